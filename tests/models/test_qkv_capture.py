"""q, k and v captured in families outside the registry agree with the outputs of their modules."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from helmscope.models.keep import KeptTensors
from helmscope.models.record import record
from helmscope.types import Instrument, Needs
from support.model_families import inputs_of, tiny_model

EVERYTHING = KeptTensors.QUERIES | KeptTensors.KEYS | KeptTensors.VALUES | KeptTensors.KERNELS | KeptTensors.WRITES


def outputs(model, paths, ids):
    """The outputs of modules in a plain forward."""
    seen = {}
    handles = [
        model.get_submodule(path).register_forward_hook(lambda _, args, out, path=path: seen.update({path: out}))
        for path in paths
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_the_heads_of_mpnet_are_its_own(batch_size):
    model, ids = tiny_model("mpnet"), inputs_of("mpnet")
    with torch.no_grad():
        model.mpnet.encoder.relative_attention_bias.weight.normal_()
    recording = record(model, ids, keep=EVERYTHING, batch_size=batch_size)
    assert recording.certificate.ok
    assert recording.certificate["heads"].ok
    kept = recording.kept
    for layer in range(3):
        stem = f"mpnet.encoder.layer.{layer}.attention.attn"
        own = outputs(model, [f"{stem}.{name}" for name in "qkvo"], ids)
        for name, full in (("q", "query"), ("k", "key"), ("v", "value")):
            wanted = own[f"{stem}.{name}"].view(3, 13, 4, 8).transpose(1, 2)
            torch.testing.assert_close(kept[full][layer], wanted, rtol=0, atol=1e-6)
        bias = model.mpnet.encoder.compute_position_bias(torch.zeros(3, 13, 32)).detach()
        weights = torch.softmax(kept["query"][layer] @ kept["key"][layer].mT / 8**0.5 + bias, -1)
        torch.testing.assert_close(kept["kernel"][layer], weights, rtol=0, atol=1e-6)
        torch.testing.assert_close(kept["attention write"][layer], own[f"{stem}.o"], rtol=0, atol=1e-6)


def test_an_instrument_sees_them():
    class Shapes(Instrument):
        name, needs, seen = "shapes", Needs.KERNEL | Needs.QKV, []

        def attention(self, context, tensors):
            parts = (tensors.query, tensors.key, tensors.value, tensors.kernel)
            self.seen.append((context.layer, *(tuple(part.shape) for part in parts)))
            self.keep(context, {"peak": tensors.kernel.amax((-1, -2))})

    record(tiny_model("falcon"), inputs_of("falcon")).replay(Shapes())  # one key for four queries
    wide, single, rows = (3, 4, 13, 8), (3, 1, 13, 8), (3, 4, 13, 13)
    assert Shapes.seen == [(layer, wide, single, single, rows) for layer in range(3)]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, dtype) for family in ("gptj", "bloom", "falcon") for dtype in (torch.float32, torch.float64)),
        *((family, torch.bfloat16) for family in ("gptj", "falcon")),  # ALiBi drowns the logits of a tiny bloom
    ],
)
def test_the_weights_follow_from_them(family, dtype):
    """Up to a mask and terms that depend on positions only: rotary positions are in q and k, ALiBi is not."""
    kept = record(tiny_model(family, dtype=dtype), inputs_of(family), keep=EVERYTHING).kept
    key = kept["key"].double().repeat_interleave(kept["query"].shape[2] // kept["key"].shape[2], 2)
    logits = kept["query"].double() @ key.mT / 8**0.5
    seen = torch.ones(13, 13, dtype=torch.bool).tril()
    rest = kept["kernel"].double().log() - logits
    rest = (rest - rest[..., :1])[..., seen]  # the same for every text
    size = 0.1 if dtype == torch.bfloat16 else 1e-4
    assert (rest[:, 1:] - rest[:, :1]).abs().max() < size
    assert (logits[:, 1:] - logits[:, :1])[..., seen].abs().max() > 20 * 1e-4


def test_what_is_computed_stays_as_it_was():
    model, ids = tiny_model("mpnet"), inputs_of("mpnet")
    with torch.no_grad():
        before = model(input_ids=ids)[0]
    recording = record(model, ids, keep=EVERYTHING)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids)[0], before)
    assert recording.certificate["logits"].value == 0
    one = record(model, ids[:1, :1])
    assert one.certificate.ok


def test_logits_of_another_form_are_not_taken_for_those_of_q_and_k():
    """With a cap on the logits the weights are no longer a softmax of q k^T, though the products are the same."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    config = tf.GPTNeoConfig(**sizes, **special, attention_types=[[["global"], 2]])
    model = tf.GPTNeoForCausalLM(config).eval()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.attention.q_proj.weight *= 20
    assert record(model, inputs_of("gpt2")).certificate["heads"].ok
    honest = torch.nn.functional.softmax
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.nn.functional, "softmax", lambda x, **options: honest(torch.tanh(x).where(x > -1e9, x), **options)
        )
        capped = record(model, inputs_of("gpt2"))
    assert capped.certificate["heads"].ok is None
    assert not capped.anatomy.captured
