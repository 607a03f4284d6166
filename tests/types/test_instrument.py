"""Values that an instrument keeps are assembled by replicate and layer, for any chunk size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.types import Half, Moment, ReplayPlan

PLAN = ReplayPlan(range(2, 5), "layer", [2, 3, 4], "prompt", 3)


class Numbers(hs.Instrument):
    name = "numbers"
    needs = hs.types.Needs.ATTENTION


def moment(layer, start, stop):
    return Moment(layer, Half.ATTENTION, 0.0, slice(start, stop))


def test_chunks_in_any_order_give_the_same():
    values = torch.randn(3, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for chunks in ([(0, 3)], [(0, 1), (1, 3)], [(2, 3), (0, 2)]):
        instrument = Numbers()
        instrument.start(PLAN)
        for start, stop in chunks:
            for k in range(3):
                instrument.keep(moment(2 + k, start, stop), {"mass": values[k, start:stop]})
        seen = instrument.result()
        assert seen.mass.dims == ("layer", "prompt", "head")
        assert seen.layer.values.tolist() == [2, 3, 4]
        assert np.array_equal(seen.mass.values, values.numpy())


def test_what_is_missing_is_nan():
    """A layer without the half, and a layer with fewer heads than another."""
    instrument = Numbers()
    instrument.start(PLAN)
    instrument.keep(moment(2, 0, 3), {"mass": torch.ones(3, 2)})
    instrument.keep(moment(4, 0, 3), {"mass": torch.ones(3, 1)})
    seen = instrument.result().mass
    assert seen.isnull().sum("prompt").values.tolist() == [[0, 0], [3, 3], [0, 3]]


def test_an_instrument_starts_afresh():
    instrument = Numbers()
    instrument.start(PLAN)
    instrument.keep(moment(2, 0, 3), {"old": torch.ones(3)})
    instrument.start(PLAN)
    instrument.keep(moment(2, 0, 3), {"new": torch.ones(3)})
    assert list(instrument.result()) == ["new"]
    assert instrument.extra_forwards == 0


def test_axes_have_names():
    instrument = Numbers()
    instrument.start(PLAN)
    instrument.keep(moment(2, 0, 3), {"pair": torch.ones(3, 2, 5)}, axes=("head", "bin"))
    assert instrument.result().pair.dims == ("layer", "prompt", "head", "bin")
    for value in (torch.ones(2), torch.ones(3, 2, 5)):
        with pytest.raises(hs.HelmscopeError, match=r"but a chunk of 3 replicates needs the axes \(prompt\) or"):
            instrument.keep(moment(2, 0, 3), {"pair": value})


def test_an_instrument_has_a_name_and_needs():
    class Nameless(hs.Instrument):
        needs = hs.types.Needs.KERNEL

    with pytest.raises(TypeError, match="abstract"):
        Nameless()


@pytest.mark.parametrize("shape", [(2, 3), (2, 4, 3)])
def test_the_mean_over_tokens_leaves_out_padding(shape):
    values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    weights = torch.tensor([[1.0, 1.0, 0.0], [1.0, 2.0, 1.0]])
    moment = Moment(0, Half.MLP, 0.0, slice(0, 2), weights=weights)
    for row, weight in enumerate(weights):
        wanted = (values[row] * weight).sum(-1) / weight.sum()
        assert torch.equal(moment.token_mean(values)[row], wanted)
    assert torch.equal(Moment(0, Half.MLP, 0.0, slice(0, 2)).token_mean(values), values.mean(-1))
