"""Certificates: they hold in half precision, they fail where something is wrong, and they say what is not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tf

import helmscope as hs
from helmscope.models import certify
from helmscope.models.anatomy import find_anatomy
from helmscope.models.record import record
from helmscope.models.tap import Attended
from helmscope.types import HelmscopeError
from support.model_families import CLASSES, inputs_of, tiny_model


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", CLASSES)
def test_half_precision_is_certified(family, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # its bfloat16 kills the process on some machines
    recording = record(tiny_model(family, dtype=dtype), inputs_of(family))
    print(recording.certificate)
    assert recording.certificate.ok
    assert str(recording.anatomy) == str(record(tiny_model(family), inputs_of(family)).anatomy)
    if recording.anatomy.tapped:
        assert (recording.kernel(layer=0).sum(-1) - 1).abs().max() < 1e-6
    assert recording.trajectory.states.dtype == torch.float32


@pytest.mark.parametrize("family", [family for family in CLASSES if family != "bloom"])
def test_faults_of_attention_are_caught(family, monkeypatch):
    """Weights of the neighboring head, rows with another sum, and a lost mask."""
    model, ids = tiny_model(family), inputs_of(family)
    anatomy, seen = find_anatomy(model, {"input_ids": ids})
    heard = [layer.attention[1].weights for layer in seen]
    assert certify.heads_line(anatomy, seen).ok
    assert certify.attention_lines(anatomy, seen, heard, causal=False)[0].ok
    call, result = seen[1].attention
    for weights in (result.weights.roll(1, 1), 0.5 * result.weights, torch.nan * result.weights):
        seen[1].attention = (call, Attended(result.output, weights))
        assert certify.heads_line(anatomy, seen).ok is False
        assert certify.attention_lines(anatomy, seen, heard, causal=False)[0].ok is False
    seen[1].attention = (call, Attended(result.output, 1.01 * result.weights))
    assert certify.attention_lines(anatomy, seen, heard, causal=False)[1].ok is False
    seen[1].attention = (call, Attended(result.output, torch.full_like(result.weights, 1 / 13)))
    assert certify.attention_lines(anatomy, seen, heard, causal=True)[2].ok is False
    seen[1].attention = None
    assert certify.attention_lines(anatomy, seen, heard, causal=False)[0].ok is False


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("depth", range(7))
def test_a_wrong_state_is_caught_at_every_depth(family, depth, monkeypatch):
    """States of the neighboring token, recorded at one depth."""
    from helmscope.models.recorder import ResidualStream

    honest = ResidualStream.put
    monkeypatch.setattr(
        ResidualStream,
        "put",
        lambda self, at, rows, value: honest(self, at, rows, value.roll(1, 1) if at == depth else value),
    )
    recording = record(tiny_model(family), inputs_of(family))
    assert recording.certificate["states"].ok is False
    with pytest.raises(HelmscopeError, match="trajectory is not available"):
        _ = recording.trajectory


@pytest.mark.parametrize("family", [family for family in CLASSES if family != "bloom"])
def test_wrong_heads_of_the_observer_are_caught(family, monkeypatch):
    from helmscope.models.hooks import _ForwardPass

    honest = _ForwardPass.after
    monkeypatch.setattr(
        _ForwardPass,
        "after",
        lambda self, call, result: honest(self, call, Attended(result.output, result.weights.roll(1, 1))),
    )
    recording = record(tiny_model(family), inputs_of(family))
    assert recording.certificate["records"].ok is False
    with pytest.raises(HelmscopeError, match="kernel is not available"):
        recording.kernel(layer=0)


def test_a_layer_scale_does_not_fail_the_heads_check():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    model = tf.Dinov2Model(tf.Dinov2Config(**sizes, layerscale_value=0.5)).eval()
    recording = record(model, inputs_of("vit"))
    assert recording.certificate["heads"].ok
    assert recording.certificate["residual"].ok
    assert recording.kernel(layer=0).shape == (3, 4, 17, 17)


def test_attention_that_a_family_computes_in_two_ways(tmp_path):
    """Falcon with ALiBi: its own sdpa and eager differ by more than rounding, and the certificate names the remedy."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    torch.manual_seed(0)
    tf.FalconForCausalLM(tf.FalconConfig(**sizes, bos_token_id=1, eos_token_id=2)).save_pretrained(tmp_path)
    own = record(tmp_path, inputs_of("gpt2")).certificate["logits"]
    assert own.ok or "load it with attention='eager'" in own.statement
    assert record(tmp_path, inputs_of("gpt2"), attention="eager").certificate.ok


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss"])
def test_a_lost_mask_is_caught(family, monkeypatch):
    """The trap of registering attention without its mask: the model is silently not causal."""
    from transformers import AttentionMaskInterface

    from helmscope.models import tap

    honest = tap._register

    def careless():
        honest()
        AttentionMaskInterface.register(tap.NAME, lambda *args, **kwargs: None)

    monkeypatch.setattr(tap, "_register", careless)
    recording = record(tiny_model(family), inputs_of(family))
    assert recording.certificate["causality"].ok is False
    with pytest.raises(HelmscopeError, match="kernel is not available"):
        recording.kernel(layer=0)


@pytest.mark.parametrize("family", CLASSES)
def test_a_wrong_force_is_caught(family):
    model, ids = tiny_model(family), inputs_of(family)
    anatomy, seen = find_anatomy(model, {"input_ids": ids})
    line, forces = certify.mlp_line(anatomy, seen)
    assert line.ok
    assert len(forces) == 3
    with torch.no_grad():  # the module has changed since it was seen
        last = [value for name, value in anatomy.layers[1].block.named_parameters() if value.ndim > 1][-1]
        last += 0.01 * torch.randn(last.shape, generator=torch.Generator().manual_seed(0))
    assert certify.mlp_line(anatomy, seen)[0].ok is not True


def test_a_lens_needs_a_head_over_the_vocabulary():
    ids = inputs_of("bert")
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = tf.BertConfig(**sizes, num_attention_heads=4, num_labels=5)
    for kind, shape in [
        (tf.BertModel, (3, 13, 32)),
        (tf.BertForSequenceClassification, (3, 5)),
        (tf.BertForTokenClassification, (3, 13, 5)),
    ]:
        recording = record(kind(config).eval(), ids)
        assert recording.certificate.ok
        assert recording.certificate["head"].ok is None
        assert recording.logits().shape == shape
        for ask in (lambda r=recording: r.logits(depth=2), lambda r=recording: hs.logit_lens_kl(r)):
            with pytest.raises(HelmscopeError, match=f"{kind.__name__} has no head over a vocabulary: its output has"):
                ask()
    square = tf.BertModel(tf.BertConfig(**sizes | {"vocab_size": 32}, num_attention_heads=4)).eval()
    assert record(square, ids % 32).certificate["head"].ok is None  # its width is that of a vocabulary


def test_images_in_half_precision_have_a_manifest():
    recording = record(tiny_model("vit", dtype=torch.float16), inputs_of("vit"))
    assert recording.manifest().inputs["texts"][:12] in repr(recording)
    bfloat = record(tiny_model("vit"), inputs_of("vit"))
    inputs = {name: value.bfloat16() for name, value in bfloat.batch.inputs.items()}
    runner = replace(bfloat.runner, batch=replace(bfloat.batch, inputs=inputs))
    assert len(replace(bfloat, runner=runner).manifest().inputs["texts"]) == 64
