"""The theory's sphere of a recording, and untrained twins."""

from __future__ import annotations

import pytest
import torch

from helmscope.models.load import load
from helmscope.models.record import record
from helmscope.models.twin import untrained_twin
from helmscope.types import HelmscopeError
from model_families import inputs_of, tiny_model


@pytest.mark.parametrize("family", ["bert", "albert", "distilbert"])
def test_on_the_sphere_a_post_norm_state_is_the_direction_of_what_its_norm_read(family):
    """Gain and bias away, LayerNorm gives the centered direction of its input, whatever they are."""
    model = tiny_model(family)
    norms = [part for part in model.modules() if isinstance(part, torch.nn.LayerNorm)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(torch.linspace(0.5, 2.0, norm.weight.shape[0]))
            norm.bias.copy_(torch.linspace(-1.0, 1.0, norm.bias.shape[0]))
    recording = record(model, inputs_of(family))
    wiring = recording.anatomy.layers[0].wiring
    read = []
    block = recording.anatomy.layers[0].block
    handles = [
        block.get_submodule(path).register_forward_pre_hook(lambda _, args: read.append(args[0].clone()))
        for path in (wiring.middle, wiring.close)
    ]
    recording.forward()
    for handle in handles:
        handle.remove()
    path = recording.on_sphere
    assert len(read) == (2 * len(recording.anatomy.layers) if family == "albert" else 2)
    for depth, seen in enumerate(read[:2], start=1):
        centered = seen - seen.mean(-1, keepdim=True)
        wanted = centered / centered.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(path.states[depth], wanted.to(path.states.dtype), atol=2e-6, rtol=0)
    assert (path.states[1:] - recording.trajectory.states[1:]).abs().max() > 1e-2
    assert torch.equal(path.states[0], recording.trajectory.states[0])


def test_a_pre_norm_model_is_on_its_sphere_already():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    assert torch.equal(recording.on_sphere.states, recording.trajectory.states)


def test_a_resumed_recording_has_the_later_part_of_the_sphere():
    recording = record(tiny_model("bert"), inputs_of("bert"))
    later = recording.resume(1, recording.trajectory.states[1])
    torch.testing.assert_close(later.on_sphere.states, recording.on_sphere.states[1:], atol=1e-5, rtol=0)


def test_a_twin_has_the_configuration_and_other_weights():
    loaded = load("tied", loops=3)
    before = torch.get_rng_state()
    twin, again, other = (untrained_twin(loaded, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert twin.model.config.to_dict() == loaded.model.config.to_dict()
    assert not twin.model.training
    weights = [
        next(part for part in each.model.parameters() if part.ndim == 2) for each in (loaded, twin, again, other)
    ]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[1], weights[3])
    assert not torch.equal(weights[0], weights[1])
    assert twin.tokenizer is loaded.tokenizer
    assert not twin.origin.hashes
    with pytest.raises(HelmscopeError, match="seed is -1"):
        untrained_twin(loaded, seed=-1)
