"""Every family: a recording agrees with the model's own forward pass."""

from __future__ import annotations

import pytest
import torch

from helmscope.models.hooks import hooked
from helmscope.models.keep import KeptTensors
from helmscope.models.record import record
from helmscope.models.sites import Observer, Site
from support.model_families import CLASSES, FAMILIES, inputs_of, tiny_model

OUTSIDE = ("gptj", "bloom", "falcon", "mpnet")  # families outside the registry, whose attention is captured
TOPOLOGY = {
    "gpt_neox": "parallel pre-norm",
    "cohere": "parallel pre-norm",
    "gptj": "parallel pre-norm",
    "falcon": "parallel pre-norm",
    "gemma2": "sequential sandwich",
    "gemma3": "sequential sandwich",
    "olmo2": "sequential sandwich",
    "bert": "post-norm",
    "roberta": "post-norm",
    "albert": "post-norm",
    "distilbert": "post-norm",
    "mpnet": "post-norm",
    "granite": "sequential pre-norm, writes scaled by 0.5 and 0.5",
}
CENTERED = {
    *("gpt2", "gpt_neox", "gpt_neox-sequential", "cohere", "opt", "bert", "roberta", "albert", "distilbert"),
    *("modernbert", "mpnet", "vit", "gptj", "bloom", "falcon"),
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def recorded(request):
    model = tiny_model(request.param)
    return request.param, model, record(model, inputs_of(request.param), batch_size=2)


def test_the_certificate(recorded):
    family, _, recording = recorded
    print(recording.certificate)
    assert recording.certificate.ok
    assert str(recording.anatomy).startswith(TOPOLOGY.get(family, "sequential pre-norm;").rstrip(";"))
    assert recording.anatomy.centered == (family in CENTERED)
    assert recording.anatomy.tapped == (family not in OUTSIDE)
    assert recording.anatomy.captured == (family in OUTSIDE)
    assert recording.certificate["heads"].value <= 1e-5
    assert recording.certificate["residual"].value <= 1e-5
    assert recording.certificate["mlp"].value <= 1e-5


def hidden_states(model, ids):
    """The inputs of the blocks as the model reports them, without the last one, which is after the final norm."""
    name = "pixel_values" if ids.is_floating_point() else "input_ids"
    with torch.no_grad():
        return model(**{name: ids}, output_hidden_states=True).hidden_states[:-1]


def test_the_states_agree_with_the_model(recorded):
    family, model, recording = recorded
    own = torch.stack(hidden_states(model, inputs_of(family)))
    path = recording.trajectory
    assert len(path.times) == 7
    assert torch.allclose(path.states.norm(dim=-1), torch.ones(()), atol=1e-6)
    found = torch.stack([recording.residual_stream(depth=2 * layer) for layer in range(3)])
    assert (found - own).abs().max() <= 2e-6 * own.abs().max()
    centered = own - own.mean(-1, keepdim=True) if recording.anatomy.centered else own
    assert (path.radius[0:6:2] - centered.norm(dim=-1)).abs().max() <= 1e-5 * centered.norm(dim=-1).max()
    assert (path.states[0:6:2] - torch.nn.functional.normalize(centered, dim=-1)).abs().max() <= 5e-6


def hooks(model):
    """How many there are; transformers leaves its own in place."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


class Everything(Observer):
    sites = frozenset(Site)
    sees_attention = True


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_logits_are_bit_identical_with_and_without_hooks(recorded, implementation):
    family, model, recording = recorded
    if family in (*OUTSIDE, "gpt_oss", "gemma2"):  # whose own is the only one
        implementation = model.config._attn_implementation
    else:
        model.set_attn_implementation(implementation)
    ids, there = inputs_of(family), hooks(model)
    name = "pixel_values" if family == "vit" else "input_ids"
    with torch.no_grad():
        before = model(**{name: ids})[0]
        with hooked(recording.anatomy, observers=[Everything()]):
            inside = model(**{name: ids}, **recording.anatomy.options)[0]
        after = model(**{name: ids})[0]
    assert torch.equal(before, after)
    assert model.config._attn_implementation == implementation
    if implementation == "eager":
        assert torch.equal(before, inside)
    assert (before - inside).abs().max() <= 2e-6 * before.abs().max()
    assert hooks(model) == there


def test_resume_from_every_depth_and_the_lens(recorded):
    family, _, recording = recorded
    logits = recording.logits()
    size = logits.abs().max()
    for step in range(7):
        again = recording.resume(depth=step, states=recording.trajectory.states[step])
        assert (again.logits() - logits).abs().max() <= 2e-6 * size, step
        assert len(again.trajectory.times) == 7 - step
        assert (again.trajectory.states[-1] - recording.trajectory.states[-1]).abs().max() <= 5e-6
    if any(line.name == "head" for line in recording.certificate.lines):
        assert family in ("t5", "vit")
    else:
        assert (recording.logits(depth=6) - logits).abs().max() <= 2e-6 * size


def test_kernels_and_forces(recorded):
    family, model, recording = recorded
    kernel = recording.kernel(layer=1)
    ids = inputs_of(family)
    name = "pixel_values" if family == "vit" else "input_ids"
    if family in OUTSIDE:
        own = model.config._attn_implementation
        model.config._attn_implementation = "eager"
        with torch.no_grad():
            wanted = model(**{name: ids}, output_attentions=True).attentions[1]
        model.config._attn_implementation = own
    else:
        own = model.config._attn_implementation
        model.set_attn_implementation("eager")
        with torch.no_grad():
            wanted = model(**{name: ids}, output_attentions=True).attentions[1]
        model.set_attn_implementation(own)
    assert (kernel - wanted).abs().max() <= 1e-6
    assert recording.force(layer=1) is not None


def test_a_force_at_its_points_is_what_the_mlp_writes(recorded):
    family, model, _ = recorded
    recording = record(model, inputs_of(family), keep=KeptTensors.WRITES)
    for layer, found in enumerate(recording.anatomy.layers):
        force, points = recording.force(layer=layer), recording.force_points(layer=layer)
        written = force.ambient(points)
        if found.wiring.sandwich:  # through the norm behind it
            written = found.part(found.wiring.mlp)(written.detach()).detach()
        wanted = recording.kept["mlp write"][layer]
        assert (written - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_in_double_precision(family):
    """1e-10, and 1e-6 where the family's own norm stays in float32."""
    model = tiny_model(family, dtype=torch.float64)
    recording = record(model, inputs_of(family))
    assert recording.certificate.ok
    assert recording.certificate["residual"].value <= 1e-10
    single = {"gpt2", "gpt_neox", "gpt_neox-sequential", "opt", "bert", "roberta", "albert", "distilbert", "modernbert"}
    single |= {"mpnet", "vit", "gptj", "falcon", "olmo2", "bloom"}
    assert recording.certificate["mlp"].value <= (1e-10 if family in single else 1e-6)
    logits = recording.logits()
    for step in range(7):
        again = recording.resume(depth=step, states=recording.trajectory.states[step])
        assert (again.logits() - logits).abs().max() <= 1e-10 * logits.abs().max()


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("site", [Site.ATTENTION, Site.MLP, Site.MIDDLE])
def test_a_wrong_tensor_of_the_right_shape_is_caught(family, site, monkeypatch):
    """A recorder receives another write, or another middle state, than that of the model."""
    from helmscope.models.recorder import Recorder

    honest = Recorder.state

    def deceived(self, where, layer, value):
        wrong = where is site and layer == 1
        return honest(self, where, layer, 1.01 * value.roll(1, 1) if wrong else value)

    monkeypatch.setattr(Recorder, "state", deceived)
    recording = record(tiny_model(family), inputs_of(family))
    seen = site is not Site.ATTENTION or family in ("bert", "albert")  # elsewhere the recorder does not ask for it
    assert recording.certificate.ok != seen
    if seen:
        assert recording.certificate["residual"].ok is False
        with pytest.raises(ValueError, match="trajectory is not available"):
            _ = recording.trajectory


def test_the_longest_text_is_compared_in_full_with_the_original_model():
    """BigBird switches off sparse attention permanently on a short text, so that another model would be recorded."""
    from transformers import BigBirdConfig, BigBirdModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = BigBirdModel(BigBirdConfig(**sizes, vocab_size=90, block_size=4, num_random_blocks=1)).eval()
    certificate = record(model, torch.randint(90, (2, 64))).certificate
    assert [line.name for line in certificate.lines if line.ok is False] == ["logits"]
