"""The theory's sphere of a recording, and untrained twins."""

from __future__ import annotations

import pytest
import torch

import helmscope as hs
from helmscope.models.load import load
from helmscope.models.record import record
from helmscope.models.twin import untrained_twin
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model


@pytest.mark.parametrize("family", ["bert", "albert", "distilbert"])
def test_on_the_sphere_a_post_norm_state_is_the_direction_of_the_input_of_its_norm(family):
    """Without gain and bias, LayerNorm returns the centered direction of its input, whatever their values."""
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
    recording.runner.forward()
    for handle in handles:
        handle.remove()
    path = recording.on_sphere
    assert len(read) == (2 * len(recording.anatomy.layers) if family == "albert" else 2)
    for depth, seen in enumerate(read[:2], start=1):
        centered = seen - seen.mean(-1, keepdim=True)
        wanted = centered / centered.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(path.states[depth], wanted.to(path.states.dtype), atol=2e-6, rtol=0)
    assert (path.states[1:] - recording.trajectory.states[1:]).abs().max() > 1e-2


def small_gains(family, dtype=torch.float64):
    """A post-norm model in which one coordinate in four of every norm, that of the embedding included, has a gain near
    1e-33, as MiniLM's last norm has, beside a bias.
    """
    model = tiny_model(family, dtype=dtype)
    with torch.no_grad():
        for norm in (part for part in model.modules() if isinstance(part, torch.nn.LayerNorm)):
            d = norm.weight.shape[0]
            norm.weight.copy_(torch.linspace(0.5, 2.0, d))
            norm.weight[::4] = 3e-33
            norm.bias.copy_(torch.linspace(-1.0, 1.0, d))
    return model


def read_by_norms(recording, modules):
    """The inputs of the norms, from separate hooks, as centered unit vectors."""
    read = []
    handles = [part.register_forward_pre_hook(lambda _, args: read.append(args[0].clone())) for part in modules]
    recording.runner.forward()
    for handle in handles:
        handle.remove()
    centered = [each - each.mean(-1, keepdim=True) for each in read]
    return torch.stack([each / each.norm(dim=-1, keepdim=True) for each in centered])


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_gains_near_zero_are_not_divided_by(family):
    model = small_gains(family)
    recording = record(model, inputs_of(family))
    assert recording.certificate.ok
    assert recording.certificate["sphere"].ok
    embedding = model.base_model.embeddings.LayerNorm
    blocks = [
        layer.part(path) for layer in recording.anatomy.layers for path in (layer.wiring.middle, layer.wiring.close)
    ]
    wanted = read_by_norms(recording, [embedding, *blocks])
    path = recording.on_sphere
    assert (path.states - wanted).abs().max() < 1e-10
    assert (path.radius - 32**0.5).abs().max() < 1e-3
    inner = wanted @ wanted.mT
    n = inner.shape[-1]
    mean = (inner.sum((-1, -2)) - n) / (n * (n - 1))
    assert (hs.mean_inner_product(path.states) - mean).abs().max() < 1e-10
    for layer in recording.layers:
        where = recording.force_points(layer=layer)
        assert (where.norm(dim=-1) - 1).abs().max() < 1e-4
        assert (where / where.norm(dim=-1, keepdim=True) - wanted[2 * layer + 1]).abs().max() < 1e-10


def test_the_force_at_its_points_is_what_the_mlp_writes_under_small_gains():
    recording = record(small_gains("bert"), inputs_of("bert"), keep=hs.models.KeptTensors.WRITES)
    for layer in recording.layers:
        found = recording.force(layer=layer).ambient(recording.force_points(layer=layer))
        wanted = recording.kept["mlp write"][layer]
        assert (found - wanted).abs().max() < 1e-10 * wanted.abs().max()


def test_an_edited_state_is_unfolded_where_its_gain_allows():
    """Under a push the state is not the output of its norm; it is divided by the gain where that is not negligible."""
    model = small_gains("bert")
    recording = record(model, inputs_of("bert"))
    push = torch.linspace(-0.3, 0.4, 32, dtype=torch.float64)
    pushed = recording.under(hs.intervene.Add([1], site=hs.Site.MIDDLE, value=push))
    norm = recording.anatomy.layers[1].mlp_norm
    core = recording.on_sphere.radius[3].unsqueeze(-1) * recording.on_sphere.states[3]
    moved = core + torch.where(norm.gain.abs() > 1e-3, push / norm.gain, 0.0)
    moved = moved - moved.mean(-1, keepdim=True)
    wanted = moved / moved.norm(dim=-1, keepdim=True)
    assert (pushed.on_sphere.states[3] - wanted).abs().max() < 1e-10
    assert (pushed.on_sphere.states[2] - recording.on_sphere.states[2]).abs().max() < 1e-12


def test_a_pre_norm_model_is_on_its_sphere_already():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    assert torch.equal(recording.on_sphere.states, recording.trajectory.states)


def test_a_resumed_recording_has_the_later_part_of_the_sphere():
    recording = record(tiny_model("bert"), inputs_of("bert"))
    later = recording.resume(depth=1, states=recording.trajectory.states[1])
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
