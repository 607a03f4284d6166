"""Texts, masks, what is kept, reducers, the lens, and families that cannot be read."""

from __future__ import annotations

import html
import logging
import re
import sys

import pytest
import torch
import transformers as tf
import xarray as xr

import helmscope as hs
from helmscope.models.record import record
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, letters, tiny_model


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta", "llama", "bloom"])
def test_padding_changes_nothing_for_real_tokens(family):
    model, words = tiny_model(family), letters(framed=True)
    texts = ["a b c", "d e f g h i j", "k"]
    recording = record(model, texts, tokenizer=words)
    assert recording.certificate.ok
    assert recording.batch.counted.sum(-1).tolist() == [3, 7, 1]
    assert recording.batch.tokens[0] == ("[CLS]", "a", "b", "c", "[SEP]", *["[PAD]"] * 4)
    for k, text in enumerate(texts):
        alone = record(model, [text], tokenizer=words)
        n = len(alone.batch.tokens[0])
        assert (recording.trajectory.states[:, k, :n] - alone.trajectory.states[:, 0]).abs().max() < 1e-5
    with pytest.warns(UserWarning, match=r"pairs are undefined \(NaN\) for texts\[2\]"):
        seen = hs.overview(recording, beta=1.0)
    assert seen.order_parameter.shape == (7, 3)
    assert (recording.axis, recording.layer_axis, recording.replicate) == ("depth", "layer", "prompt")
    assert seen.order_parameter.dims == (recording.axis, recording.replicate)


def test_inputs_as_a_tokenizer_gives_them():
    model, words = tiny_model("gpt2"), letters(framed=False)
    texts = ["a b c", "d e f g h i j"]
    wanted = record(model, texts, tokenizer=words)
    found = record(model, words(texts, padding=True, return_tensors="pt", return_token_type_ids=False))
    assert torch.equal(found.trajectory.states, wanted.trajectory.states)
    assert torch.equal(found.trajectory.weights, wanted.trajectory.weights)
    with pytest.raises(HelmscopeError, match="must hold input_ids"):
        record(model, {"attention_mask": torch.ones(2, 3)})
    assert record(model, torch.ones(1, 70, dtype=torch.long), truncate=True).trajectory.states.shape[2] == 64


def test_padding_on_the_left_goes_to_the_right():
    model, words = tiny_model("llama"), letters(framed=False)
    words.padding_side = "left"
    texts = ["a b c", "d e f g h i j"]
    given = words(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    assert given["attention_mask"][0, 0] == 0
    found, wanted = record(model, given), record(model, texts, tokenizer=words)
    assert torch.equal(found.trajectory.states, wanted.trajectory.states)
    assert found.certificate.ok


def test_autocast_changes_no_bit_of_a_recording():
    model = tiny_model("gpt2")
    wanted = record(model, inputs_of("gpt2"))
    with torch.autocast("cpu"):
        found = record(model, inputs_of("gpt2"))
        assert torch.equal(found.logits(), wanted.logits())
    assert torch.equal(found.trajectory.states, wanted.trajectory.states)
    assert found.certificate.ok


def test_a_key_can_be_drawn_from_the_kernel_of_a_float64_llama():
    """Its softmax is float32 inside, so its rows sum to 1 within 3e-7 only."""
    recording = record(tiny_model("llama", dtype=torch.float64), inputs_of("llama"))
    kernel, x = recording.kernel(layer=1)[:, 0], recording.trajectory.states[2]
    assert kernel.dtype == torch.float64
    assert (kernel.sum(-1) - 1).abs().max() > 1e-9
    exact = kernel / kernel.sum(-1, keepdim=True)
    mean = exact @ x
    wanted = torch.einsum("bij,bjd,bje->bide", exact, x, x) - torch.einsum("bid,bie->bide", mean, mean)
    assert (hs.observe.token_sampling_covariance(kernel, x) - wanted / 2).abs().max() < 1e-12


def test_holes_in_an_attention_mask_stay_where_they_are():
    model = tiny_model("llama")
    ids, mask = torch.tensor([[50, 60, 70, 80], [10, 11, 12, 13]]), torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]])
    found = record(model, {"input_ids": ids, "attention_mask": mask})
    assert torch.equal(found.batch.inputs["input_ids"], ids)
    assert found.batch.tokens[0] == ("50", "60", "70", "80")
    assert torch.equal(found.trajectory.weights, mask.float()[None])
    assert torch.equal(found.visible, mask.bool())
    assert found.certificate.ok
    with torch.no_grad():
        assert (found.logits() - model(input_ids=ids, attention_mask=mask).logits).abs().max() < 1e-5
    # a hole behind padding on the left moves with its text
    left = {"input_ids": torch.tensor([[0, 0, 50, 60, 70]]), "attention_mask": torch.tensor([[0, 0, 1, 0, 1]])}
    moved = record(model, left)
    assert moved.batch.inputs["input_ids"].tolist() == [[50, 60, 70, 0, 0]]
    assert moved.batch.visible.tolist() == [[True, False, True, False, False]]
    assert moved.certificate["padding"].ok


def test_moved_padding_is_compared_with_the_inputs_as_they_came():
    """GPT-2 counts positions from the padding on unless position_ids are passed; then nothing is moved."""
    model = tiny_model("gpt2")
    given = {
        "input_ids": torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1] * 4]),
    }
    line = record(model, given).certificate["padding"]
    assert line.ok is None
    assert "positions" in line.statement
    placed = given | {"position_ids": torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])}
    kept = record(model, placed)
    assert kept.certificate.ok
    assert torch.equal(kept.batch.inputs["input_ids"], given["input_ids"])
    with torch.no_grad():
        wanted = model(**placed).logits
    assert (kept.logits() - wanted)[given["attention_mask"].bool()].abs().max() < 1e-5
    alone = record(model, torch.tensor([[5, 6]]))
    assert (kept.trajectory.states[:, 0, 2:] - alone.trajectory.states[:, 0]).abs().max() < 1e-5


def test_an_encoder_padded_to_its_full_length_looks_both_ways():
    words = letters(framed=True)
    for family in ("bert", "gpt2"):
        model = tiny_model(family)
        given = words(["a b c"], padding="max_length", max_length=40, return_tensors="pt", return_token_type_ids=False)
        line = record(model, given, tokenizer=words).certificate["causality"]
        assert line.ok is (None if family == "bert" else True)
        assert line.statement == ("attention is bidirectional" if family == "bert" else "no weight on later tokens")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("attention_masks", "did you mean 'attention_mask'?"),
        ("positions_ids", "did you mean 'position_ids'?"),
        ("offset_mapping", "leave it out"),
    ],
)
def test_an_input_that_the_model_does_not_take_is_refused(name, hint):
    ids = inputs_of("gpt2")
    with pytest.raises(HelmscopeError) as caught:
        record(tiny_model("gpt2"), {"input_ids": ids, name: torch.ones_like(ids)})
    assert str(caught.value) == f"texts names '{name}', which a GPT2LMHeadModel does not take: {hint}"
    mask = torch.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1, "token_type_ids": mask}
    assert record(tiny_model("gpt2"), inputs).certificate.ok


def test_one_of_a_kind_singular():
    model, words = tiny_model("gpt2"), letters(framed=False)
    recording = record(model, ["a b"], tokenizer=words)
    assert "1 text x 2 tokens" in repr(recording)
    assert "1 text x 1 token " in repr(record(model, ["a"], tokenizer=words))
    assert repr(recording.runner.under(hs.intervene.Ablate())).endswith("1 text, 16 at a time; 1 edit>")
    assert repr(hs.Subject("A", ["a"])) == "<Subject A: 1 text>"
    assert "to record 1 text of 1 token: " in str(hs.models.diagnose(model, text_count=1, text_length=1))
    with pytest.raises(HelmscopeError, match="texts holds 1 different prompt, but two halves need at least 4"):
        _ = hs.Subject("A", ["Lily"]).test


def test_padding_is_moved_before_a_mapping_is_cut():
    """Of 70 ids the last 20 are words: all of them are recorded, and none is lost to padding on the left."""
    ids = torch.arange(1, 71)[None]
    mask = (torch.arange(70) >= 50).long()[None]
    for truncate in (False, True):
        found = record(tiny_model("gpt2"), {"input_ids": ids, "attention_mask": mask}, truncate=truncate)
        assert found.batch.inputs["input_ids"][0, :20].tolist() == list(range(51, 71))
        assert found.batch.visible.sum() == 20
        assert found.batch.inputs["input_ids"].shape == (1, 64)


def test_a_default_device_without_values_does_no_harm():
    model, ids = tiny_model("gpt2"), inputs_of("gpt2")
    wanted = record(model, ids)
    torch.set_default_device("meta")
    try:
        found = record(model, ids)
        noisy = found.under(hs.intervene.Perturb(site=hs.Site.KEY, sigma=0.1))
        assert hs.models.untrained_twin(model, seed=1).model.device.type == "cpu"
        assert hs.models.diagnose(model, text_count=1, text_length=4).certificate.ok
    finally:
        torch.set_default_device(None)
    assert torch.equal(found.trajectory.states, wanted.trajectory.states)
    assert noisy.certificate.ok


def test_a_mapping_is_truncated_when_asked():
    ids = torch.arange(1, 71).remainder(90)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(HelmscopeError, match="pass truncate=True"):
        record(tiny_model("gpt2"), given)
    found = record(tiny_model("gpt2"), given, truncate=True)
    assert {name: tuple(value.shape) for name, value in found.batch.inputs.items()} == {
        "input_ids": (1, 64),
        "attention_mask": (1, 64),
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input_ids": torch.tensor(3)}, "texts names .*it must hold input_ids"),
        ({"input_ids": torch.tensor([1, 2])}, r"texts has shape \(2,\)"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.tensor(1)}, "equally many"),
        (
            {"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 2)},
            r"attention_mask of shape \(1, 2\)",
        ),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1)}, r"attention_mask of shape \(1,\)"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.full((1, 3), 2)}, "must hold 0 or 1"),
        (torch.tensor(3), r"texts has shape \(\)"),
    ],
)
def test_ids_and_masks_of_the_wrong_shape(given, said):
    with pytest.raises(HelmscopeError, match=said) as caught:
        record(tiny_model("gpt2"), given)
    assert "\n" not in str(caught.value)


def test_a_block_that_writes_nothing_is_read():
    """As those that are put between trained ones to make a model deeper."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    recording = record(model, inputs_of("llama"))
    assert recording.certificate.ok
    assert torch.equal(recording.trajectory.states[2], recording.trajectory.states[4])


def test_a_resumed_recording_has_the_kernels_of_its_layers():
    for family in ("gpt2", "gpt_neox", "albert"):
        recording = record(tiny_model(family), inputs_of(family))
        states = recording.trajectory.states
        for step in (3, 4, 6):
            again = recording.resume(depth=step, states=states[step])
            assert (again.kernel(layer=again.layers[0]) - recording.kernel(layer=min(step // 2, 2))).abs().max() < 1e-5
            seen = again.replay(Entropy())["entropy"]
            assert seen.layer.values.tolist() == list(again.layers) == list(range(min(step // 2, 2), 3))
            rows = torch.special.entr(again.kernel(layer=again.layers[0])).sum(-1).mean(-1)
            assert seen.entropy[0].values == pytest.approx(rows.numpy(), abs=1e-5)
        once = recording.resume(depth=2, states=states[2].flip(1))
        twice = once.resume(depth=3, states=once.trajectory.states[1])
        assert (twice.trajectory.states[-1] - once.trajectory.states[-1]).abs().max() < 1e-5
        frozen = torch.zeros(3, 13, dtype=torch.bool)
        frozen[:, :6] = True
        held = recording.resume(depth=2, states=states[2].flip(1), frozen=frozen)
        again = held.resume(depth=3, states=held.trajectory.states[1])
        assert (again.trajectory.states[-1] - held.trajectory.states[-1]).abs().max() < 1e-5


def test_a_special_token_that_also_stands_for_unknown_words_is_special():
    words = letters(framed=False)
    words.unk_token = words.eos_token = words.bos_token = "[CLS]"  # as <|endoftext|> of GPT-2
    counted = record(tiny_model("gpt2"), ["[CLS] a b"], tokenizer=words).batch.counted
    assert counted.tolist() == [[False, True, True]]


def test_padding_and_special_tokens_are_tracked_by_their_weights():
    """track and overview agree, with each other and with the tokens that count alone."""
    recording = record(tiny_model("bert"), ["a b c", "d e f g h i j"], tokenizer=letters(framed=True))
    counted, states = recording.batch.counted, recording.trajectory.states
    alone = [torch.linalg.vector_norm(states[:, k, counted[k]].mean(1), dim=-1) for k in range(2)]
    wanted = torch.stack(alone).mean(0).numpy()
    assert hs.track(recording, order=hs.order_parameter).order.mean("prompt").values == pytest.approx(wanted, abs=1e-6)
    assert hs.overview(recording, beta=1.0).order_parameter.mean("prompt").values == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(HelmscopeError, match="order is a function that takes no weights"):
        hs.track(recording, order=lambda x: x.mean(2).norm(dim=-1))


def test_the_sink_of_an_encoder_is_its_first_special_token():
    recording = record(tiny_model("bert"), ["a b c", "d e f g h i j"], tokenizer=letters(framed=True))
    seen = hs.kernel_statistics(recording)
    assert seen.first_token_mass.dims == ("layer", "prompt", "head")
    for layer in range(3):
        kernel = recording.kernel(layer=layer)
        by_text = [kernel[k, :, recording.batch.counted[k], 0].mean(-1) for k in range(2)]
        assert seen.first_token_mass[layer].values == pytest.approx(torch.stack(by_text).numpy(), abs=1e-6)


def test_a_layer_is_asked_for_by_its_name_and_number():
    """A loop over layers reads every layer once, as edits count them."""
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"), keep=hs.models.KeptTensors.KERNELS)
    for layer in recording.layers:
        assert torch.equal(recording.kernel(layer=layer), recording.kept["kernel"][layer])
    assert torch.equal(recording.kernel(0), recording.kernel(layer="L0"))
    for ask in (recording.kernel, recording.force, recording.force_points):
        with pytest.raises(HelmscopeError, match="layer is 3, but this recording has layers 0 to 2"):
            ask(layer=3)
    for ask in (recording.residual_stream, recording.logits):
        with pytest.raises(HelmscopeError, match="depth is 7, but this recording has depths 0 to 6"):
            ask(depth=7)


def test_unknown_words_count():
    recording = record(tiny_model("gpt2"), ["a word b"], tokenizer=letters(framed=False))
    assert recording.batch.tokens[0] == ("a", "[UNK]", "b")
    assert recording.batch.counted.all()


def test_bad_texts():
    model, words = tiny_model("gpt2"), letters(framed=False)
    for texts, said in [
        ([], "texts is empty"),
        (["\ud800"], "must be Unicode without single surrogates"),
        ("a b", r"texts is a str, but it must be a list of strings or a tensor: pass \[text\]"),
        (["a", " "], r"texts\[1\] is ' '"),
        (["a", 3], r"texts\[1\] is 3"),
        ([" ".join("a" * 65)], r"texts\[0\] has 65 tokens, but the model's context is 64"),
        (torch.zeros(2, 0, dtype=torch.long), "token ids are"),
        (torch.tensor([[1, 96]]), "the token id 96, but the model has embeddings 0 to 95"),
        (torch.zeros(2, 3), "is a tensor of torch.float32 .*, but token ids must be integers"),
        (torch.zeros(2, 3, dtype=torch.bool), "token ids are int64"),
        (torch.zeros(2, 3, 4, 4), "could not be run on these inputs"),
    ]:
        with pytest.raises(HelmscopeError, match=said):
            record(model, texts, tokenizer=words)
    with pytest.raises(HelmscopeError, match="came without a tokenizer"):
        record(model, ["a"])
    nothing = {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}
    with pytest.raises(HelmscopeError, match=r"texts\[1\] has no token that counts"):
        record(model, nothing)
    with pytest.raises(HelmscopeError, match=r"texts\[0\] has no token that counts"):
        record(model, ["[CLS]"], tokenizer=words)
    with pytest.raises(
        HelmscopeError, match=r"unknown option 'batchsize': did you mean 'batch_size'\? Allowed: attention,"
    ):
        hs.record(batchsize=4)
    with pytest.raises(HelmscopeError, match="unknown option 'batchsize': did you mean 'batch_size'"):
        hs.models.diagnose("A", batchsize=4)
    with pytest.raises(HelmscopeError, match="unknown option 'foo'"):
        record(model, torch.ones(1, 3).long(), foo=1)
    with pytest.raises(HelmscopeError, match="tokenizer is 'gpt2', but it must be a tokenizer"):
        record(model, torch.ones(1, 3).long(), tokenizer="gpt2")
    assert record(model, [" ".join("a" * 65)], tokenizer=words, truncate=True).trajectory.states.shape[2] == 64


def test_a_text_that_is_too_long_is_named_by_the_error_alone():
    """Not also by a warning that transformers logs."""
    words, logged = letters(framed=False), []
    words.model_max_length = 64
    handler = logging.Handler()
    handler.emit = logged.append
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with pytest.raises(HelmscopeError, match="has 65 tokens, but the model's context is 64"):
            record(tiny_model("gpt2"), [" ".join("a" * 65)], tokenizer=words)
    finally:
        logger.removeHandler(handler)
    assert logged == []


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_the_observables_of_a_simulation_serve(family):
    recording = record(tiny_model(family), inputs_of(family))
    path = recording.trajectory
    seen = hs.overview(recording, beta=1.0)
    assert seen.order_parameter.values == pytest.approx(path.states.mean(2).norm(dim=-1).numpy(), abs=1e-6)
    rows = torch.stack([recording.kernel(layer=layer) for layer in range(3)]).double()
    entropy = torch.special.entr(rows).sum(-1).mean((1, 2, 3))
    told = hs.kernel_statistics(recording)
    assert told.row_entropy.dims == (recording.layer_axis, recording.replicate, "head")
    assert told.row_entropy.mean(("head", "prompt")).values == pytest.approx(entropy.numpy(), abs=1e-5)
    drift = hs.mlp_force(recording)
    points = torch.nn.functional.normalize(recording.force_points(layer=1), dim=-1)
    force = recording.force(layer=1)(points).norm(dim=-1).mean()
    assert float(drift.force_length[1].mean()) == pytest.approx(float(force), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_the_lens_comes_to_what_the_model_says(family, dtype):
    recording = record(tiny_model(family, dtype=dtype), inputs_of(family))
    kept, digits = hs.logit_lens_kl(recording), 1e-9 if dtype == torch.float64 else 1e-5
    assert kept.kl.dims == ("depth", "prompt")
    seen = hs.reduce_replicates(kept)
    assert abs(float(seen.kl[-1])) < 1e-3 * digits
    p, early = (torch.softmax(recording.logits(depth=depth).double(), -1) for depth in (None, 2))
    by_text = torch.nn.functional.kl_div(early.log(), p, reduction="none").sum(-1).mean(-1)
    assert float(seen.kl[2]) == pytest.approx(float(by_text.mean()), rel=digits)
    assert float(seen.kl_stderr[2]) == pytest.approx(float(by_text.std() / 3**0.5), rel=digits, abs=1e-4 * digits)
    assert float(seen.lens_entropy[2]) == pytest.approx(float(torch.special.entr(early).sum(-1).mean()), rel=digits)


class Entropy(hs.Instrument):
    """The mean entropy of the rows, by layer, prompt and head."""

    name, needs = "entropy", hs.types.Needs.KERNEL | hs.types.Needs.QKV

    def attention(self, context, tensors):
        assert tensors.query.shape[-1] == tensors.key.shape[-1]
        assert tensors.kernel.shape[1] % tensors.key.shape[1] == 0
        self.keep(context, {"entropy": torch.special.entr(tensors.kernel).sum(-1).mean(-1)})


def test_instruments_see_what_is_kept():
    model, ids = tiny_model("llama"), inputs_of("llama")
    everything = (
        hs.models.KeptTensors.QUERIES
        | hs.models.KeptTensors.KEYS
        | hs.models.KeptTensors.VALUES
        | hs.models.KeptTensors.KERNELS
        | hs.models.KeptTensors.WRITES
    )
    recording = record(model, ids, keep=everything, batch_size=2)
    kept = recording.kept
    assert {name: tuple(value.shape) for name, value in kept.items()} == {
        "query": (3, 3, 4, 13, 8),
        "key": (3, 3, 2, 13, 8),
        "value": (3, 3, 2, 13, 8),
        "kernel": (3, 3, 4, 13, 13),
        "attention write": (3, 3, 13, 32),
        "mlp write": (3, 3, 13, 32),
    }
    wide = kept["key"].repeat_interleave(2, 2)
    logits = kept["query"] @ wide.mT / 8**0.5
    hidden = torch.ones(13, 13, dtype=torch.bool).triu(1)
    assert (torch.softmax(logits.masked_fill(hidden, -torch.inf), -1) - kept["kernel"]).abs().max() < 1e-6
    streams = torch.stack([recording.residual_stream(depth=depth) for depth in range(7)])
    assert (streams[0::2][:-1] + kept["attention write"] - streams[1::2]).abs().max() < 1e-6
    assert (streams[1::2] + kept["mlp write"] - streams[2::2]).abs().max() < 1e-6
    plain = record(model, ids)
    seen = plain.replay(Entropy())["entropy"].entropy
    assert seen.shape == (3, 3, 4)
    for layer in range(3):
        assert torch.equal(plain.kernel(layer=layer), kept["kernel"][layer])
        rows = torch.special.entr(kept["kernel"][layer]).sum(-1).mean(-1)
        assert seen[layer].values == pytest.approx(rows.numpy(), rel=1e-6)
    assert not plain.kept


def test_keys_of_a_family_whose_attention_cannot_be_captured_raise():
    """DeBERTa adds products of content and place to its logits, which are not those of one q and k."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    places = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
    torch.manual_seed(0)
    model = tf.DebertaModel(tf.DebertaConfig(**sizes, **places, num_attention_heads=4)).eval()
    with torch.no_grad():
        model.encoder.rel_embeddings.weight.normal_()
    recording = record(model, inputs_of("gpt2"))
    assert recording.certificate.ok
    assert recording.certificate["heads"].ok is None
    with pytest.raises(HelmscopeError, match=r"replay is not available.*hides q, k and v"):
        recording.replay(Entropy())
    with pytest.raises(HelmscopeError, match="returns only its attention weights"):
        record(model, inputs_of("gpt2"), keep=hs.models.KeptTensors.QUERIES)
    assert record(model, inputs_of("gpt2"), keep=hs.models.KeptTensors.KERNELS).kept["kernel"].shape[0] == 3


def test_a_state_that_is_not_finite_is_named():
    model, inputs = tiny_model("gpt2"), inputs_of("gpt2", batch=4)  # of which the first and the last are probed
    inputs[inputs == 7] = 8
    inputs[2, 5] = 7
    with torch.no_grad():
        model.transformer.wte.weight[7] = 1e30  # whose square float32 does not hold
    recording = record(model, inputs)
    assert recording.certificate["finite"].ok is False
    with pytest.raises(HelmscopeError, match=r"not finite .* prompt 2 at depth 0 \(input of layer 0\), token 5$"):
        hs.measure(recording, only=["arc_length"])


def test_a_state_that_is_not_finite_is_named_at_the_depth_of_a_resumed_run():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2", batch=3))

    def broken(weights):
        weights = weights.clone()
        weights[1, :, 4] = torch.nan
        return weights

    lost = recording.resume(depth=2, states=recording.trajectory.states[2])
    lost = lost.under(hs.intervene.ReplaceKernel(function=broken, layers=[1]))
    with pytest.raises(HelmscopeError, match=r"prompt 1 at depth 3 \(layer 1\), token 4$"):
        _ = lost.trajectory


def test_states_that_are_not_finite_or_not_unit_vectors_raise():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    lost = recording.under(hs.intervene.ReplaceKernel(function=lambda weights: torch.nan * weights))
    assert lost.certificate.ok is False
    with pytest.raises(HelmscopeError, match=r"not finite .* first that of prompt 0 at depth 1 \(layer 0\), token 0$"):
        _ = lost.trajectory
    for states, said in [
        (recording.trajectory.states[2] * 3, "vector of length 3 "),
        (recording.trajectory.states[2, :1], "must be a tensor of shape"),
        (torch.nan * recording.trajectory.states[2], "vector of length nan "),
    ]:
        with pytest.raises(HelmscopeError, match=said):
            recording.resume(depth=2, states=states)


def test_a_model_in_training_mode_is_not_run():
    model = tiny_model("gpt2")
    recording = record(model, inputs_of("gpt2"))
    model.train()
    with pytest.raises(HelmscopeError, match="training mode"):
        recording.logits()


def test_encoder_decoder_models_whose_attention_cannot_be_recorded_raise():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 96}
    model = tf.MvpForConditionalGeneration(tf.MvpConfig(**sizes, pad_token_id=1)).eval()
    with pytest.raises(HelmscopeError, match=r"MvpForCond.*attention registry.*record the encoder alone"):
        record(model, inputs_of("gpt2"))
    sounds = tf.WhisperConfig(**sizes, num_mel_bins=8, pad_token_id=1, bos_token_id=1, eos_token_id=2)
    with pytest.raises(HelmscopeError, match=r"Whisper.* encoder reads input_features, but .* only on token ids"):
        record(tf.WhisperForConditionalGeneration(sounds).eval(), inputs_of("gpt2"))
    bart = tf.BartForConditionalGeneration(tf.BartConfig(**sizes)).eval()
    assert record(bart.get_encoder(), inputs_of("gpt2")).certificate.ok


def test_a_family_without_attention_is_refused():
    config = tf.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(
        HelmscopeError, match=r"MambaBlock at layer 0 without observable attention.*measured as a Trajectory"
    ):
        record(tf.MambaForCausalLM(config).eval(), inputs_of("gpt2"))


def test_what_doctor_reads_is_not_obeyed_by_the_terminal(tmp_path, capsys, monkeypatch):
    import sys

    from helmscope.cli import main

    folder = tmp_path / "\x1b[2Jmodel\u202e"
    tiny_model("gpt2").save_pretrained(folder)
    monkeypatch.setattr(sys, "argv", ["helmscope", "doctor", str(folder), "--text-count", "2", "--text-length", "8"])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert r"\x1b[2Jmodel\u202e" in out
    assert all(line.isprintable() for line in out.splitlines())


def test_doctor_on_the_command_line(tmp_path, capsys, monkeypatch):
    import json
    import sys

    from helmscope.cli import main

    tiny_model("gpt2").save_pretrained(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["helmscope", "doctor", str(tmp_path), "--json", "--text-count", "10", "--text-length", "16"]
    )
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (0, None)
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert told["trajectory_bytes"] == 7 * 10 * 16 * 34 * 4
    assert told["origin"]["hashes"]["model.safetensors"]


def test_a_head_that_transformers_does_not_name(monkeypatch):
    model = tiny_model("gpt2")
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda self: None)
    assert hs.logit_lens_kl(record(model, inputs_of("gpt2"))).kl.shape == (7, 3)


def test_what_is_shown_of_a_recording_is_one_line(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path / "small")
    loaded = hs.load(tmp_path / "small")
    recording = record(loaded, inputs_of("gpt2"))
    shown = repr(recording.under(hs.intervene.Ablate([1])).resume(depth=2, states=recording.trajectory.states[2]))
    assert shown.startswith("<Recording of small (gpt2), from depth 2, under Ablate(layers=[1]), PutState(depth=2, sta")
    assert re.search(r"\.\.\.: certificate ok; 3 texts x 13 tokens \(\w{12}\); sequential pre-norm; 3 layers", shown)
    failed = recording.under(hs.intervene.ReplaceKernel(function=lambda weights: torch.nan * weights))
    assert repr(failed).startswith("<Recording of small (gpt2), under ReplaceKernel(")
    assert ": certificate fails: finite, residual; 3 texts" in repr(failed)
    for thing in (recording, failed, recording.anatomy, recording.anatomy.layers[0], recording.residual, loaded):
        assert "\n" not in repr(thing)
        assert "tensor(" not in repr(thing)
    assert repr(recording.batch) == "<Batch: input_ids (3, 13)>"


@pytest.mark.parametrize(
    ("source", "title"),
    [
        (lambda folder: "A", "A (gpt2)"),
        (lambda folder: hs.models.untrained_twin("A", seed=0), "A's untrained twin 0 (gpt2)"),
        (lambda folder: folder / "small", "small (gpt2)"),
        (lambda folder: hs.models.untrained_twin(folder / "small", seed=3), "small's untrained twin 3 (gpt2)"),
        (lambda folder: tiny_model("gpt2"), "GPT2LMHeadModel (gpt2)"),
    ],
    ids=["bundled", "twin", "folder", "twin of a folder", "memory"],
)
def test_a_recording_is_titled_by_its_model(tmp_path, source, title):
    tiny_model("gpt2").save_pretrained(tmp_path / "small")
    recording = record(source(tmp_path), torch.tensor([[1, 2, 3, 4]]))
    assert repr(recording).startswith(f"<Recording of {title}: certificate ok; 1 text x 4 tokens")
    assert f">Recording of {html.escape(title)}</div>" in recording._repr_html_()
    assert recording.plot().get_suptitle().startswith(f"{title}: sequential pre-norm")


def test_a_model_of_the_hub_is_titled_by_its_id(tmp_path, monkeypatch):
    tiny_model("gpt2").save_pretrained(tmp_path / "0123abc")
    monkeypatch.setattr(
        sys.modules["helmscope.models.load"], "_from_hub", lambda name, revision, offline: tmp_path / "0123abc"
    )
    origin = hs.load("someone/small").origin
    assert (origin.title, origin.folder, origin.revision) == ("someone/small (gpt2)", None, "0123abc")


def test_the_lens_goes_by_blocks_of_texts_and_tokens(monkeypatch):
    """Texts of different lengths, one at a time and a few tokens at a time, under a change and from a later depth."""
    from helmscope.observe import lens

    words, texts = letters(framed=True), ["a b c", "d e f g h i j", "k"]
    recording = record(tiny_model("gpt2"), texts, tokenizer=words)
    tokens = torch.zeros(3, 9, dtype=torch.bool)
    tokens[1, 2] = True
    recording = recording.under(hs.intervene.Add([1], value=torch.linspace(-1, 1, 32), tokens=tokens))
    recording = recording.resume(depth=2, states=recording.trajectory.states[2])
    asked, honest = [], type(recording).logits

    def seen_logits(self, *, depth=None, rows=slice(None)):
        asked.append(honest(self, depth=depth, rows=rows).shape[0])
        return honest(self, depth=depth, rows=rows)

    monkeypatch.setattr(type(recording), "logits", seen_logits)
    once = hs.logit_lens_kl(recording)
    assert set(asked) == {1, 3}
    monkeypatch.setattr(lens, "LOGITS_PER_FORWARD", 96 * 9)
    monkeypatch.setattr(lens, "LOGITS_PER_SUM", 96 * 2)
    asked.clear()
    again = hs.logit_lens_kl(recording)
    assert set(asked) == {1}
    xr.testing.assert_allclose(once, again, rtol=1e-5, atol=1e-7)
    p, early = (torch.softmax(honest(recording, depth=depth).double(), -1) for depth in (None, 4))
    by_token = torch.nn.functional.kl_div(early.log(), p, reduction="none").sum(-1)
    by_text = [by_token[k, recording.batch.counted[k]].mean() for k in range(3)]
    assert again.kl[2].values == pytest.approx(torch.stack(by_text).numpy(), rel=1e-5)


def test_special_tokens_do_not_count_however_the_texts_come():
    model, words = tiny_model("gpt2"), letters(framed=True)
    texts = ["a b c d", "e f word h"]
    wanted = record(model, texts, tokenizer=words)
    given = words(texts, return_tensors="pt", return_token_type_ids=False)
    for form in (given["input_ids"], {"input_ids": given["input_ids"]}, given):
        found = record(model, form, tokenizer=words)
        assert torch.equal(found.batch.counted, wanted.batch.counted)
        assert found.batch.counted.tolist() == [[False, True, True, True, True, False]] * 2
    assert record(model, given["input_ids"]).batch.counted is None
    assert record(model, given["input_ids"][:, 1:5], tokenizer=words).batch.counted is None
    loaded = hs.load(model, tokenizer=words)
    assert torch.equal(record(loaded, given["input_ids"]).batch.counted, wanted.batch.counted)


def test_a_tokenizer_that_fails_is_named_in_the_error():
    class Broken:
        pad_token_id = 0

        def __call__(self, text):
            raise KeyError("merges")

    with pytest.raises(HelmscopeError, match="tokenizer is a Broken, but it fails on these texts: 'merges'"):
        record(tiny_model("gpt2"), ["a"], tokenizer=Broken())


def test_a_damaged_tokenizer_is_named_in_the_error(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    assert "random tokens: there is no tokenizer" in str(hs.models.diagnose(tmp_path, text_length=100))
    letters(framed=False).save_pretrained(tmp_path)
    assert "\nchecked on sentences tokenized by " in str(hs.models.diagnose(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(
        HelmscopeError, match=r"texts are strings, but its tokenizer could not be read \(tokenizer.json: "
    ):
        record(tmp_path, ["a"])
    told = str(hs.models.diagnose(tmp_path, text_count=3, text_length=100))
    assert "checked on random tokens: the tokenizer could not be read (tokenizer.json: " in told
    assert "to record 3 texts of 64 tokens (100 are truncated to the model's context): about " in told
    assert "truncated to" not in str(hs.models.diagnose(tmp_path, text_length=64))


UNEVEN = ["Once upon a time there was a little girl", "The dog ran", "A big red ball was on the grass"]


@pytest.mark.parametrize("model", ["A", "tied"])  # the second is post-norm
def test_the_states_of_padding_are_zero_vectors(model):
    recording = record(model, UNEVEN)
    padding = ~recording.visible
    assert padding.any()
    for path in (recording.trajectory, recording.on_sphere):
        lengths = path.states.norm(dim=-1)
        assert (lengths[:, padding] == 0).all()
        assert (lengths[:, ~padding] - 1).abs().max() < 1e-5
    # what runs the model again has them
    kept = record(model, UNEVEN)
    depth = 4
    again = recording.resume(depth=depth, states=recording.trajectory.states[depth])
    torch.testing.assert_close(
        again.residual_stream(depth=depth), recording.residual_stream(depth=depth), rtol=1e-5, atol=1e-5
    )
    assert recording.residual_stream(depth=depth)[padding].norm(dim=-1).min() > 0
    assert (again.logits() - recording.logits()).abs().max() <= 1e-4 * recording.logits().abs().max()
    twice = again.resume(depth=6, states=again.trajectory.states[2])
    torch.testing.assert_close(twice.residual_stream(depth=6), again.residual_stream(depth=6), rtol=1e-5, atol=1e-5)
    assert torch.equal(kept.force_points(layer=2), recording.force_points(layer=2))
    assert recording.force_points(layer=2)[padding].norm(dim=-1).min() > 0
    moved = recording.trajectory.states[depth].roll(1, 0)
    with pytest.raises(HelmscopeError, match=r"states has a vector of length 0 \(token 8 of text 0\), .* only padding"):
        recording.resume(depth=depth, states=moved)


def test_padding_counts_nowhere_by_accident():
    """A function of tokens that is not passed the weights refuses the zero vectors of padding."""
    recording = record("A", UNEVEN)
    states, weights = recording.trajectory.states, recording.trajectory.weights
    for wrong in (
        lambda: hs.order_parameter(states),
        lambda: hs.rank.effective_rank(states),
        lambda: hs.interaction_energy(states, beta=1.0),
        lambda: hs.w2(states[0], states[1]),
        lambda: hs.SA(beta=1.0)(states),
        lambda: hs.integrate(hs.SA(beta=1.0), states[0], times=[1.0]),
    ):
        with pytest.raises(HelmscopeError, match=r"holds a zero vector .*pass the weights of its trajectory too"):
            wrong()
    velocity = hs.SA(beta=1.0)(states, weights=weights.expand(states.shape[:-1]))
    alone = hs.SA(beta=1.0)(states[:, 1, :3])
    torch.testing.assert_close(velocity[:, 1, :3], alone, rtol=1e-5, atol=1e-6)
    run = hs.integrate(hs.SA(beta=1.0), states[0], times=[1.0], weights=weights[0])
    whole = hs.integrate(hs.SA(beta=1.0), states[0, 1, :3], times=[1.0])
    torch.testing.assert_close(run.states[-1, 1, :3], whole.states[-1], rtol=1e-5, atol=1e-6)
