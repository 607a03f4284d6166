"""Values that an instrument keeps are assembled by replicate and layer, for any chunk size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.types import Half, ReplayContext, ReplayPlan
from support.refusal import refused

PLAN = ReplayPlan(range(2, 5), "layer", [2, 3, 4], "prompt", 3)


class Numbers(hs.Instrument):
    name = "numbers"
    needs = hs.types.Needs.ATTENTION


def context(layer, start, stop, heads=2):
    return ReplayContext(layer, Half.ATTENTION, 0.0, slice(start, stop), heads=heads)


def test_chunks_in_any_order_give_the_same():
    values = torch.randn(3, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for chunks in ([(0, 3)], [(0, 1), (1, 3)], [(2, 3), (0, 2)]):
        instrument = Numbers()
        instrument.start(PLAN)
        for start, stop in chunks:
            for k in range(3):
                instrument.keep(context(2 + k, start, stop), {"mass": values[k, start:stop]})
        seen = instrument.result()
        assert seen.mass.dims == ("layer", "prompt", "head")
        assert seen.layer.values.tolist() == [2, 3, 4]
        assert np.array_equal(seen.mass.values, values.numpy())


def test_what_is_missing_is_nan():
    """A layer without the half, and a layer with fewer heads than another."""
    instrument = Numbers()
    instrument.start(PLAN)
    instrument.keep(context(2, 0, 3), {"mass": torch.ones(3, 2)})
    instrument.keep(context(4, 0, 3, heads=1), {"mass": torch.ones(3, 1)})
    seen = instrument.result().mass
    assert seen.isnull().sum("prompt").values.tolist() == [[0, 0], [3, 3], [0, 3]]


def test_an_instrument_starts_afresh():
    instrument = Numbers()
    instrument.start(PLAN)
    instrument.keep(context(2, 0, 3), {"old": torch.ones(3)})
    instrument.start(PLAN)
    instrument.keep(context(2, 0, 3), {"new": torch.ones(3)})
    assert list(instrument.result()) == ["new"]
    assert instrument.extra_forward_passes == 0


def test_axes_have_names():
    instrument = Numbers()
    instrument.start(PLAN)
    instrument.keep(context(2, 0, 3), {"pair": torch.ones(3, 2, 5)}, axes=("head", "bin"))
    assert instrument.result().pair.dims == ("layer", "prompt", "head", "bin")
    for value in (torch.ones(2), torch.ones(3, 2, 5)):
        with pytest.raises(hs.HelmscopeError, match=r"but a chunk of 3 replicates needs the axes \(prompt\) or"):
            instrument.keep(context(2, 0, 3), {"pair": value})


@pytest.mark.parametrize(
    ("heads", "words"),
    [(2, "but this attention half has 2 heads"), (1, "has 1 head:"), (None, "has no known heads")],
)
def test_an_axis_that_is_not_that_of_the_heads_must_be_named(heads, words):
    instrument = Numbers()
    instrument.start(PLAN)
    histogram = {"histogram": torch.ones(3, 5)}
    text = refused(lambda: instrument.keep(context(2, 0, 3, heads=heads), histogram), "histogram of instrument", words)
    assert text.endswith("name the axis of 5 entries, such as keep(context, values, axes=('bin',))")
    for axes in (("bin",), "bin"):
        instrument.keep(context(2, 0, 3, heads=heads), histogram, axes=axes)
    assert instrument.result().histogram.dims == ("layer", "prompt", "bin")
    refused(lambda: instrument.keep(context(2, 0, 3), histogram, axes=("layer",)), "'prompt' and 'layer' are axes of")


def test_the_number_of_heads_is_that_of_the_system():
    class Peaks(hs.Instrument):
        name, needs = "peaks", hs.types.Needs.KERNEL

        def attention(self, context, tensors):
            self.keep(context, {"peak": tensors.kernel.amax((-1, -2)), "rows": tensors.kernel.amax(-1).flatten(1)})

    x0 = torch.eye(3).expand(2, 3, 3)
    refused(
        lambda: hs.integrate(hs.MultiHead([hs.SA(1.0), hs.SA(2.0)]), x0, times=[0.0]).replay(Peaks()),
        "rows of instrument peaks has shape (2, 6), but this attention half has 2 heads",
    )
    refused(lambda: hs.integrate(hs.SA(1.0), x0, times=[0.0]).replay(Peaks()), "rows of instrument", "no known heads")


def test_what_is_not_a_tensor_is_refused_with_one_sentence():
    instrument = Numbers()
    instrument.start(PLAN)
    refused(
        lambda: instrument.keep(context(2, 0, 3), {"mass": [1.0, 2.0, 3.0]}),
        "mass of instrument numbers is a list, but keep needs a tensor with one entry per replicate",
    )
    refused(lambda: instrument.keep(context(2, 0, 3), torch.ones(3)), "values of instrument numbers is a Tensor")


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ("kernel", "needs of instrument odd is 'kernel', but it must be a member of Needs: did you mean Needs.KERNEL?"),
        ("kernl", "did you mean Needs.KERNEL?"),
        ("mlp write", "did you mean Needs.MLP_WRITE?"),
        (None, "needs of instrument odd is None, but it must be a member of Needs: such as Needs.KERNEL"),
    ],
)
def test_needs_that_are_not_a_member_are_refused_with_the_one_that_was_meant(needs, words):
    odd = type("Odd", (hs.Instrument,), {"name": "odd", "needs": needs})()
    refused(lambda: hs.integrate(hs.SA(1.0), torch.eye(3), times=[0.0]).replay(odd), words)


def test_an_instrument_has_a_name_and_needs():
    class Nameless(hs.Instrument):
        needs = hs.types.Needs.KERNEL

    with pytest.raises(TypeError, match="abstract"):
        Nameless()


@pytest.mark.parametrize("shape", [(2, 3), (2, 4, 3)])
def test_the_mean_over_tokens_leaves_out_padding(shape):
    values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    weights = torch.tensor([[1.0, 1.0, 0.0], [1.0, 2.0, 1.0]])
    context = ReplayContext(0, Half.MLP, 0.0, slice(0, 2), weights=weights)
    for row, weight in enumerate(weights):
        wanted = (values[row] * weight).sum(-1) / weight.sum()
        assert torch.equal(context.token_mean(values)[row], wanted)
    assert torch.equal(ReplayContext(0, Half.MLP, 0.0, slice(0, 2)).token_mean(values), values.mean(-1))
