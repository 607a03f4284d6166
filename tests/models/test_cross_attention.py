"""Cross-attention in a replay and in a certificate; what takes a system takes both stacks of a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.models.anatomy import find_anatomy
from helmscope.models.certify_cross import cross_lines
from helmscope.models.record import record
from helmscope.models.recorder import Recorder, ResidualStream
from helmscope.models.sites import Site
from helmscope.models.tap import Attended
from helmscope.types import Half, HelmscopeError
from support.model_families import PAIRS, inputs_of, pair_inputs, tiny_model

F64 = torch.float64
TWO = ("t5-relu", "bart")
EVERYTHING = (
    hs.models.KeptTensors.QUERIES
    | hs.models.KeptTensors.KEYS
    | hs.models.KeptTensors.VALUES
    | hs.models.KeptTensors.KERNELS
    | hs.models.KeptTensors.WRITES
)


class Everything(hs.Instrument):
    """Keeps all that passes, by its half."""

    name, needs = "everything", ~hs.types.Needs.NOTHING

    # a norm follows the heads of t5gemma
    def __init__(self, needs=~(hs.types.Needs.NOTHING | hs.types.Needs.OUTPUT_MATRIX)):
        self.needs, self.seen = needs, []

    def attention(self, context, tensors):
        self.seen.append((context, tensors))
        self.keep(context, {"length": tensors.state.norm(dim=(-1, -2))})

    def cross(self, context, tensors):
        self.attention(context, tensors)

    def mlp(self, context, tensors):
        self.attention(context, tensors)

    def put_together(self, half, name):
        layers = sorted({context.layer for context, _ in self.seen})
        shown = {layer: [p for m, p in self.seen if (m.layer, m.half) == (layer, half)] for layer in layers}
        return torch.stack([torch.cat([getattr(p, name) for p in shown[layer]]) for layer in layers])


def memory_by_hand(model, inputs):
    """What the encoder gives, by a plain hook."""
    found = []
    handle = model.get_encoder().register_forward_hook(lambda module, args, out: found.append(out[0].detach()))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return found[0]


@pytest.mark.parametrize("batch_size", [2, 16])
@pytest.mark.parametrize("family", sorted(PAIRS))
def test_a_replay_shows_cross_attention_as_a_half_of_its_own(family, batch_size):
    model, inputs = tiny_model(family, dtype=F64), pair_inputs()
    model.set_attn_implementation("eager")
    recording = record(model, inputs, keep=EVERYTHING, batch_size=batch_size)
    instrument = Everything()
    recording.replay(instrument)
    kept, path = recording.kept, recording.trajectory
    for k, half in enumerate(Half):
        read = torch.stack([recording.residual_stream(depth=3 * layer + k) for layer in range(3)])
        assert (instrument.put_together(half, "state") - read).abs().max() <= 1e-12 * read.abs().max()
        shown = torch.where(path.weights.unsqueeze(-1) > 0, instrument.put_together(half, "direction"), 0.0)
        assert (shown - path.states[k:-1:3]).abs().max() <= 1e-12  # zero vectors at padding
        assert {m.time for m, _ in instrument.seen if m.half is half} == {k, 3 + k, 6 + k}
        assert torch.equal(instrument.put_together(half, "write"), kept[f"{half.value} write"])
    for name, own in (("query", "cross query"), ("key", "cross key"), ("value", "cross value")):
        assert torch.equal(instrument.put_together(Half.CROSS, name), kept[own])
    assert torch.equal(instrument.put_together(Half.CROSS, "kernel"), kept["cross kernel"])
    assert torch.equal(instrument.put_together(Half.ATTENTION, "kernel"), kept["kernel"])
    memory = memory_by_hand(model, inputs)
    shown = instrument.put_together(Half.CROSS, "memory")
    assert all((each - memory).abs().max() <= 1e-12 * memory.abs().max() for each in shown)
    for context, tensors in instrument.seen:
        if context.half is Half.CROSS:
            seen = inputs["attention_mask"][context.rows]
            assert torch.equal(tensors.memory_visible, seen.bool())
            assert torch.equal(tensors.memory_weights, seen.double())
            assert torch.equal(context.visible, inputs["decoder_attention_mask"][context.rows].bool())
    points = torch.stack([recording.force_points(layer=layer) for layer in range(3)])
    assert (instrument.put_together(Half.MLP, "point") - points).abs().max() <= 1e-12


def test_nothing_is_shown_that_is_not_needed():
    recording = record(tiny_model("bart"), pair_inputs())
    only = Everything(hs.types.Needs.CROSS_KERNEL)
    recording.replay(only)
    assert {context.half for context, _ in only.seen} == {Half.CROSS}
    assert all(tensors.write is None and tensors.query is None for _, tensors in only.seen)
    old = Everything(hs.types.Needs.KERNEL | hs.types.Needs.MLP_WRITE)
    recording.replay(old)
    assert {context.half for context, _ in old.seen} == {Half.ATTENTION, Half.MLP}
    with pytest.raises(HelmscopeError, match="everything kept nothing: this system has no half that it measures"):
        record(tiny_model("gpt2"), inputs_of("gpt2")).replay(Everything(hs.types.Needs.CROSS_KERNEL))


@pytest.mark.parametrize("family", TWO)
def test_what_takes_a_system_takes_both_stacks(family):
    recording = record(tiny_model(family), pair_inputs(), batch_size=2)
    for each, steps in ((recording, 3), (recording.encoder, 2)):
        assert isinstance(each, hs.types.System)
        tracked = hs.track(each.trajectory, product=hs.mean_inner_product)
        assert tracked.sizes["depth"] == 3 * steps + 1
        assert hs.overview(each, beta=1.0).sizes["depth"] == 3 * steps + 1
        seen = hs.measure(each)
        assert seen["kernel_statistics"].sizes["layer"] == 3
        assert np.isfinite(seen["mlp_force"].attention_tangential_length.values).all()
    lens = hs.logit_lens_kl(recording)
    assert lens.sizes["depth"] == 10
    assert np.abs(lens.kl[-1].values).max() <= 1e-6
    with pytest.raises(HelmscopeError, match="has no head over a vocabulary"):
        hs.logit_lens_kl(recording.encoder)


@pytest.mark.parametrize("family", sorted(PAIRS))
def test_a_lost_mask_is_caught(family, monkeypatch):
    """Without its mask a decoder sees the future, and padding of the encoder."""
    from transformers import AttentionMaskInterface

    from helmscope.models import tap

    honest = tap._register

    def careless():
        honest()
        AttentionMaskInterface.register(tap.NAME, lambda *args, **kwargs: None)

    monkeypatch.setattr(tap, "_register", careless)
    recording = record(tiny_model(family), pair_inputs())
    assert recording.certificate["causality"].ok is False
    assert recording.certificate["cross mask"].ok is False
    for asked in (recording.kernel, recording.cross_kernel):
        with pytest.raises(HelmscopeError, match="kernel is not available"):
            asked(layer=0)


@pytest.mark.parametrize("family", TWO)
def test_faults_of_cross_attention_are_caught(family):
    model, inputs = tiny_model(family), pair_inputs()
    anatomy, seen = find_anatomy(model, inputs)
    heard = [layer.cross[1].weights for layer in seen]

    def failing(listened=heard):
        return {line.name for line in cross_lines(anatomy, seen, listened, inputs) if line.ok is False}

    assert failing() == set()
    assert failing([each.roll(1, 1) for each in heard]) == {"cross records"}  # of the neighboring head
    call, result = seen[1].cross
    for weights, caught in (
        (result.weights.roll(1, 1), {"cross records", "cross heads"}),
        (1.01 * result.weights, {"cross records", "cross heads", "cross rows"}),
        (torch.full_like(result.weights, 1 / 11), {"cross records", "cross heads", "cross mask"}),
        (torch.nan * result.weights, {"cross records", "cross heads", "cross rows", "cross mask"}),
    ):
        seen[1].cross = (call, Attended(result.output, weights))
        assert failing() == caught
    seen[1].cross = (call, result)
    seen[1].memory = seen[1].memory.roll(1, 1)  # a decoder that reads something else than its encoder gives
    assert failing() == {"encoder"}


@pytest.mark.parametrize("depth", range(10))
@pytest.mark.parametrize("family", TWO)
def test_a_wrong_state_is_caught_at_every_depth(family, depth, monkeypatch):
    honest = ResidualStream.put

    def careless(self, at, rows, value):
        deceived = self.radius.shape[0] == 10 and at == depth  # of the decoder, whose neighbors it takes
        return honest(self, at, rows, value.roll(1, 1) if deceived else value)

    monkeypatch.setattr(ResidualStream, "put", careless)
    recording = record(tiny_model(family), pair_inputs())
    assert recording.encoder.certificate.ok
    assert recording.certificate["states"].ok is False
    with pytest.raises(HelmscopeError, match="trajectory is not available"):
        _ = recording.trajectory


@pytest.mark.parametrize("site", [Site.CROSS_MIDDLE, Site.CROSS_READ])
@pytest.mark.parametrize("family", TWO)
def test_a_wrong_tensor_of_the_right_shape_is_caught(family, site, monkeypatch):
    honest = Recorder.state

    def deceived(self, where, layer, value):
        return honest(self, where, layer, 1.01 * value.roll(1, 1) if where is site and layer == 1 else value)

    monkeypatch.setattr(Recorder, "state", deceived)
    recording = record(tiny_model(family), pair_inputs())
    assert recording.certificate["residual"].ok is False
    assert "layer 1" in recording.certificate["residual"].statement


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", TWO)
def test_half_precision_is_read_too(family, dtype, monkeypatch):
    """T5 clamps its states in float16, and keeps one matrix in float32 where it is loaded in half precision."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # its bfloat16 kills the process on some machines
    model = tiny_model(family, dtype=dtype)
    recording = record(model, pair_inputs())
    print(recording.certificate)
    assert recording.certificate.ok
    assert recording.encoder.certificate.ok
    sums = recording.cross_kernel(layer=0).sum(-1)
    assert (sums - recording.visible[:, None].float()).abs().max() < 1e-6  # rows of padding are 0
    if family == "t5-relu":
        for block in (*model.encoder.block, *model.decoder.block):
            block.layer[-1].DenseReluDense.wo.float()
        mixed = record(model, pair_inputs())
        assert mixed.certificate.ok
        assert mixed.encoder.certificate.ok


@pytest.mark.parametrize("family", TWO)
def test_an_encoder_decoder_model_on_trial_and_at_the_doctor(family):
    model = tiny_model(family)
    ids = inputs_of("gpt2", batch=6, n=5)
    subject = hs.Subject(model, ids.tolist())
    assert subject.unmet_premise("cross_kernel", "trajectory", causal=True, mlp=True, head=True) is None
    assert "is bidirectional, but that of" in subject.unmet_premise(full=True)
    assert subject.token_ids == tuple(map(tuple, ids.tolist()))
    assert subject.recording.encoder is not None
    assert len(subject.selection) == len(subject.test) == 3
    twin = next(iter(subject.twin_recordings(1)))
    assert twin.certificate.ok
    encoder = hs.Subject(model.get_encoder(), ids.tolist())
    assert encoder.unmet_premise("cross_kernel").endswith("has no cross-attention")
    found = hs.models.diagnose(model, text_count=10, text_length=16)
    assert found.ok
    assert "\nencoder\nok    topology" in str(found)
    assert found.trajectory_bytes == (10 + 7) * 10 * 16 * (32 + 2) * 4
