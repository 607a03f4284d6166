"""What a replay passes on of the MLPs that the model has run, against the same forces computed again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.fields.mlp import MLP, affine
from helmscope.models.mlp_capture import MlpCapture, MlpModules
from helmscope.observe.head_moments import HeadMoments
from helmscope.observe.mlp_force import MlpForce
from helmscope.types import AttentionTensors, Half, Needs, ReplayContext
from support.model_families import inputs_of, tiny_model


class Seen(hs.Instrument):
    """Keeps the tensors of every MLP."""

    name = "seen"
    needs = Needs.FORCE

    def __init__(self) -> None:
        self.layers = []

    def mlp(self, context, tensors):
        self.layers.append(tensors)
        self.keep(context, {"length": tensors.point.norm(dim=-1).mean(-1)})


def seen(recording):
    """What a replay passes of every MLP."""
    instrument = Seen()
    recording.replay(instrument)
    return instrument.layers


@pytest.mark.parametrize("family", ["gpt2", "llama", "phi3", "bert", "gemma2", "gpt_neox"])
def test_the_values_of_the_model_are_those_of_the_force(family):
    """Ungated, gated in two matrices and in one, post-norm, with a norm after the MLP, and parallel blocks."""
    layers = seen(hs.record(tiny_model(family, dtype=torch.float32), inputs_of(family)))
    assert layers
    for tensors in layers:
        force, point = tensors.force, tensors.point
        biases = (force.b_in,) if isinstance(force, MLP) else (force.b_gate, force.b_up)
        assert len(tensors.preactivations) == len(biases)
        for found, rows, bias in zip(tensors.preactivations, force.input_rows, biases, strict=True):
            expected = affine(point, rows, bias)
            assert (found - expected).abs().max() < 2e-5 * expected.abs().max()
        expected = force.ambient(point)
        assert (tensors.force_value - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_computed_again(dtype):
    for tensors in seen(hs.record(tiny_model("gpt2", dtype=dtype), inputs_of("gpt2"))):
        assert tensors.preactivations is None
        assert tensors.force_value is None


def test_a_mixture_of_experts_is_computed_again():
    for tensors in seen(hs.record(tiny_model("mixtral", dtype=torch.float32), inputs_of("mixtral"))):
        assert (tensors.preactivations, tensors.force_value) == (None, None)


def test_an_edit_of_the_write_leaves_the_force():
    recording = hs.record(tiny_model("gpt2", dtype=torch.float32), inputs_of("gpt2"))
    edited = recording.under(hs.Edit(hs.Site.MLP, (0,), lambda value, context: 0 * value))
    plain, under = seen(recording)[0], seen(edited)[0]
    assert torch.equal(plain.force_value, under.force_value)
    assert plain.force_value.abs().max() > 0


def test_outputs_that_are_changed_or_repeated_are_not_used():
    recording = hs.record(tiny_model("gpt2", dtype=torch.float32), inputs_of("gpt2"))
    layers, forces = recording.anatomy.layers, recording.forces
    capture = MlpCapture(layers, forces)
    first = layers[0].part(forces[0].modules.paths[0])
    x = torch.ones(2, 3, recording.anatomy.dim)
    with capture.attached(), torch.no_grad():
        known = first(x)
        assert torch.equal(capture.take(0, forces[0], 2, 3)[0][0], known)
        known.add_(1)
        assert capture.take(0, forces[0], 2, 3) == (None, None)
        capture.begin()
        first(x), first(x)
        assert capture.take(0, forces[0], 2, 3)[0] is None
    assert capture.take(0, forces[0], 2, 3) == (None, None)
    assert not first._forward_hooks
    assert capture.take(0, replace(forces[0], modules=None), 2, 3) == (None, None)


def test_paths_of_modules():
    both = MlpModules((("up", slice(0, 2)), ("up", slice(2, None))), "down")
    assert both.paths == ("up", "up", "down")


def test_the_measurement_is_that_of_the_recomputed_force(monkeypatch):
    """States of length 10 per coordinate, so that the epsilon of the norm does not matter and values are reused."""
    model = tiny_model("gpt2", dtype=torch.float32)
    with torch.no_grad():
        model.transformer.wte.weight *= 500
    recording = hs.record(model, inputs_of("gpt2"))
    reused = recording.replay(MlpForce())["mlp_force"]
    monkeypatch.setattr(MlpCapture, "take", lambda *args: (None, None))
    computed = recording.replay(MlpForce())["mlp_force"]
    for name, values in computed.data_vars.items():
        np.testing.assert_allclose(reused[name].values, values.values, rtol=1e-3, atol=1e-5, err_msg=str(name))


def test_a_nearly_radial_drift_keeps_its_digits():
    """A head that writes nearly along the state: |T W_O m|^2 is 1e-6 of |W_O m|^2, below the digits of float32."""
    generator = torch.Generator().manual_seed(0)
    x = hs.sphere.retract(torch.randn(1, 6, 5, dtype=torch.float64, generator=generator) * 1e-3 + torch.ones(5))
    kernel = torch.softmax(torch.randn(1, 2, 6, 6, dtype=torch.float64, generator=generator), -1)
    value = torch.stack([x, x], 1)
    output = torch.eye(5, dtype=torch.float64).expand(2, 5, 5)
    context = ReplayContext(0, Half.ATTENTION, 0.0, slice(0, 1))
    mean = kernel @ value
    tangential = mean - (mean * x.unsqueeze(1)).sum(-1, keepdim=True) * x.unsqueeze(1)
    for dtype, digits in ((torch.float64, 1e-11), (torch.float32, 2e-3)):
        parts = [each.to(dtype) for each in (x, x, kernel, value, value, value, x, output)]
        found = HeadMoments.of(context, AttentionTensors(*parts)).drift
        assert ((found - tangential.norm(dim=-1)) / tangential.norm(dim=-1)).abs().max() < digits
