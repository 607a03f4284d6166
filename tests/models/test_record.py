"""Texts, masks, what is kept, reducers, certificates that fail, and families that cannot be read."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
import xarray as xr
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import helmscope as hs
from helmscope.models import certify
from helmscope.models.anatomy import dissect
from helmscope.models.record import record
from helmscope.models.tap import Attended
from helmscope.types import HelmscopeError
from model_families import CLASSES, inputs_of, tiny_model

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"]


def letters(*, framed: bool) -> tf.PreTrainedTokenizerFast:
    """A tokenizer of letters, with a special token on both sides where framed."""
    made = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if framed:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta", "llama", "bloom"])
def test_padding_changes_nothing_for_real_tokens(family):
    model, words = tiny_model(family), letters(framed=True)
    texts = ["a b c", "d e f g h i j", "k"]
    recording = record(model, texts, tokenizer=words)
    assert recording.certificate.ok
    assert recording.batch.mask.sum(-1).tolist() == [3, 7, 1]
    assert recording.batch.tokens[0] == ("[CLS]", "a", "b", "c", "[SEP]", *["[PAD]"] * 4)
    for k, text in enumerate(texts):
        alone = record(model, [text], tokenizer=words)
        n = len(alone.batch.tokens[0])
        assert (recording.trajectory.states[:, k, :n] - alone.trajectory.states[:, 0]).abs().max() < 1e-5
    seen = hs.overview(recording, beta=1.0)
    assert seen.order.shape == (7,)


def test_inputs_as_a_tokenizer_gives_them():
    model, words = tiny_model("gpt2"), letters(framed=False)
    texts = ["a b c", "d e f g h i j"]
    wanted = record(model, texts, tokenizer=words)
    found = record(model, words(texts, padding=True, return_tensors="pt", return_token_type_ids=False))
    assert torch.equal(found.trajectory.states, wanted.trajectory.states)
    assert torch.equal(found.trajectory.mask, wanted.trajectory.mask)
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


def test_a_block_that_writes_nothing_is_read():
    """As those that are put between trained ones to make a model deeper."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    recording = record(model, inputs_of("llama"))
    assert recording.certificate.ok
    assert torch.equal(recording.trajectory.states[2], recording.trajectory.states[4])


def test_a_resumed_recording_hears_its_own_layers():
    for family in ("gpt2", "gpt_neox", "albert"):
        recording = record(tiny_model(family), inputs_of(family))
        states = recording.trajectory.states
        for step in (3, 4, 6):
            again = recording.resume(step, states[step])
            assert (again.kernel(0) - recording.kernel(step)).abs().max() < 1e-5
            reducer = Entropy()
            again.replay(reducer)
            assert sorted(reducer.rows) == list(range(min(step // 2, 3), 3))
        once = recording.resume(2, states[2].flip(1))
        twice = once.resume(1, once.trajectory.states[1])
        assert (twice.trajectory.states[-1] - once.trajectory.states[-1]).abs().max() < 1e-5
        frozen = torch.zeros(3, 13, dtype=torch.bool)
        frozen[:, :6] = True
        held = recording.resume(2, states[2].flip(1), frozen=frozen)
        again = held.resume(1, held.trajectory.states[1])
        assert (again.trajectory.states[-1] - held.trajectory.states[-1]).abs().max() < 1e-5


def test_unknown_words_count():
    recording = record(tiny_model("gpt2"), ["a word b"], tokenizer=letters(framed=False))
    assert recording.batch.tokens[0] == ("a", "[UNK]", "b")
    assert recording.batch.mask.all()


def test_bad_texts():
    model, words = tiny_model("gpt2"), letters(framed=False)
    for texts, said in [
        ([], "texts is empty"),
        ("a b", "texts is a str"),
        (["a", " "], r"texts\[1\] is ' '"),
        (["a", 3], r"texts\[1\] is 3"),
        ([" ".join("a" * 65)], r"texts\[0\] has 65 tokens, but the model's context is 64"),
        (torch.zeros(2, 0, dtype=torch.long), "token ids are"),
        (torch.tensor([[1, 96]]), "the token id 96, but the model has embeddings 0 to 95"),
        (torch.zeros(2, 3), "images are"),
        (torch.zeros(2, 3, dtype=torch.bool), "token ids are int64"),
        (torch.zeros(2, 3, 4, 4), "could not be run on these inputs"),
    ]:
        with pytest.raises(HelmscopeError, match=said):
            record(model, texts, tokenizer=words)
    with pytest.raises(HelmscopeError, match="came without a tokenizer"):
        record(model, ["a"])
    assert record(model, [" ".join("a" * 65)], tokenizer=words, truncate=True).trajectory.states.shape[2] == 64


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_the_observables_of_a_simulation_serve(family):
    recording = record(tiny_model(family), inputs_of(family))
    path = recording.trajectory
    seen = hs.overview(recording, beta=1.0)
    assert seen.order.values == pytest.approx(path.states.mean(2).norm(dim=-1).mean(1).numpy(), abs=1e-6)
    rows = torch.stack([recording.kernel(step) for step in range(7)]).double()
    entropy = torch.special.entr(rows).sum(-1).mean((1, 2, 3))
    assert hs.kernel_statistics(recording).entropy.mean("head").values == pytest.approx(entropy.numpy(), abs=1e-5)
    drift = hs.drift_and_swirl(recording, derivatives=False)
    points = torch.nn.functional.normalize(recording.points(1), dim=-1)
    force = recording.force(1)(points).norm(dim=-1).mean()
    assert float(drift.force[1]) == pytest.approx(float(force), rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_the_lens_comes_to_what_the_model_says(family):
    recording = record(tiny_model(family), inputs_of(family))
    seen = hs.lens_divergence(recording)
    assert abs(float(seen.divergence[-1])) < 1e-9
    p, early = (torch.softmax(recording.logits(step).double(), -1) for step in (None, 2))
    by_text = torch.nn.functional.kl_div(early.log(), p, reduction="none").sum(-1).mean(-1)
    assert float(seen.divergence[2]) == pytest.approx(float(by_text.mean()), rel=1e-9)
    assert float(seen.divergence_stderr[2]) == pytest.approx(float(by_text.std() / 3**0.5), rel=1e-9)
    assert float(seen.entropy[2]) == pytest.approx(float(torch.special.entr(early).sum(-1).mean()), rel=1e-9)


class Entropy:
    """A reducer: the mean entropy of the rows, by layer."""

    def __init__(self):
        self.rows = {}

    def update(self, layer, query, key, value, weights):
        assert query.shape[-1] == key.shape[-1]
        assert weights.shape[1] % key.shape[1] == 0
        self.rows[layer] = float(torch.special.entr(weights).sum(-1).mean())

    def result(self):
        return xr.Dataset({"entropy": ("layer", list(self.rows.values()))})


def test_reducers_see_what_is_kept():
    model, ids = tiny_model("llama"), inputs_of("llama")
    everything = hs.Keep.QUERIES | hs.Keep.KEYS | hs.Keep.VALUES | hs.Keep.WEIGHTS | hs.Keep.WRITES
    recording = record(model, ids, keep=everything, batch_size=2)
    kept = recording.kept
    assert {name: tuple(value.shape) for name, value in kept.items()} == {
        "query": (3, 3, 4, 13, 8),
        "key": (3, 3, 2, 13, 8),
        "value": (3, 3, 2, 13, 8),
        "weights": (3, 3, 4, 13, 13),
        "attention write": (3, 3, 13, 32),
        "mlp write": (3, 3, 13, 32),
    }
    wide = kept["key"].repeat_interleave(2, 2)
    logits = kept["query"] @ wide.mT / 8**0.5
    hidden = torch.ones(13, 13, dtype=torch.bool).triu(1)
    assert (torch.softmax(logits.masked_fill(hidden, -torch.inf), -1) - kept["weights"]).abs().max() < 1e-6
    streams = torch.stack([recording.stream(step) for step in range(7)])
    assert (streams[0::2][:-1] + kept["attention write"] - streams[1::2]).abs().max() < 1e-6
    assert (streams[1::2] + kept["mlp write"] - streams[2::2]).abs().max() < 1e-6
    plain, reducer = record(model, ids), Entropy()
    plain.replay(reducer)
    assert reducer.result().entropy.shape == (3,)
    for layer in range(3):
        assert torch.equal(plain.kernel(2 * layer), kept["weights"][layer])
        assert reducer.rows[layer] == pytest.approx(float(torch.special.entr(kept["weights"][layer]).sum(-1).mean()))
    assert not plain.kept


def test_a_family_outside_the_registry_says_what_it_hides():
    recording = record(tiny_model("bloom"), inputs_of("bloom"))
    with pytest.raises(HelmscopeError, match=r"replay is not given out.*hides q, k and v"):
        recording.replay(Entropy())
    with pytest.raises(HelmscopeError, match="shows its attention weights alone"):
        record(tiny_model("bloom"), inputs_of("bloom"), keep=hs.Keep.QUERIES)
    assert record(tiny_model("bloom"), inputs_of("bloom"), keep=hs.Keep.WEIGHTS).kept["weights"].shape[0] == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", CLASSES)
def test_half_precision_is_read_too(family, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # its bfloat16 kills the process on some machines
    recording = record(tiny_model(family, dtype=dtype), inputs_of(family))
    print(recording.certificate)
    assert recording.certificate.ok
    assert str(recording.anatomy) == str(record(tiny_model(family), inputs_of(family)).anatomy)
    if recording.anatomy.tapped:
        assert (recording.kernel(0).sum(-1) - 1).abs().max() < 1e-6
    assert recording.trajectory.states.dtype == torch.float32


@pytest.mark.parametrize("family", [family for family in CLASSES if family != "bloom"])
def test_faults_of_attention_are_caught(family, monkeypatch):
    """Weights of the neighbouring head, rows of another sum, and a mask that is lost."""
    model, ids = tiny_model(family), inputs_of(family)
    anatomy, seen = dissect(model, {"input_ids": ids})
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
    """States of the neighbouring token, written down at one depth."""
    from helmscope.models.recorder import Stream

    honest = Stream.put
    monkeypatch.setattr(
        Stream, "put", lambda self, at, rows, value: honest(self, at, rows, value.roll(1, 1) if at == depth else value)
    )
    recording = record(tiny_model(family), inputs_of(family))
    assert recording.certificate["states"].ok is False
    with pytest.raises(HelmscopeError, match="trajectory is not given out"):
        _ = recording.trajectory


@pytest.mark.parametrize("family", [family for family in CLASSES if family != "bloom"])
def test_wrong_heads_on_the_way_to_a_kernel_are_caught(family, monkeypatch):
    from helmscope.models.watch import _Depth

    honest = _Depth.after
    monkeypatch.setattr(
        _Depth,
        "after",
        lambda self, call, result: honest(self, call, Attended(result.output, result.weights.roll(1, 1))),
    )
    recording = record(tiny_model(family), inputs_of(family))
    assert recording.certificate["records"].ok is False
    with pytest.raises(HelmscopeError, match="kernel is not given out"):
        recording.kernel(0)


def test_states_that_are_lost_are_said():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    lost = recording.under(hs.Reweigh(function=lambda weights: torch.nan * weights))
    assert lost.certificate.ok is False
    with pytest.raises(HelmscopeError, match="not finite"):
        _ = lost.trajectory
    for states, said in [
        (recording.trajectory.states[2] * 3, "lengths up to 3"),
        (recording.trajectory.states[2, :1], "must be a tensor of shape"),
        (torch.nan * recording.trajectory.states[2], "lengths up to nan"),
    ]:
        with pytest.raises(HelmscopeError, match=said):
            recording.resume(2, states)


def test_a_model_in_training_mode_is_not_run():
    model = tiny_model("gpt2")
    recording = record(model, inputs_of("gpt2"))
    model.train()
    with pytest.raises(HelmscopeError, match="training mode"):
        recording.logits()


def test_a_layer_scale_is_no_fault_of_the_heads():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    model = tf.Dinov2Model(tf.Dinov2Config(**sizes, layerscale_value=0.5)).eval()
    recording = record(model, inputs_of("vit"))
    assert recording.certificate["heads"].ok
    assert recording.certificate["residual"].ok
    assert recording.kernel(0).shape == (3, 4, 17, 17)


def test_attention_that_a_family_computes_in_two_ways(tmp_path):
    """Falcon with ALiBi: its own sdpa and eager differ by more than rounding, and the certificate says what to do."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    torch.manual_seed(0)
    tf.FalconForCausalLM(tf.FalconConfig(**sizes, bos_token_id=1, eos_token_id=2)).save_pretrained(tmp_path)
    own = record(tmp_path, inputs_of("gpt2")).certificate["logits"]
    assert own.ok or "load it with attention='eager'" in own.says
    assert record(tmp_path, inputs_of("gpt2"), attention="eager").certificate.ok


def test_an_encoder_with_its_decoder_is_refused():
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    whole = tf.T5ForConditionalGeneration(tf.T5Config(**sizes)).eval()
    with pytest.raises(HelmscopeError, match=r"record its encoder alone, model\.get_encoder"):
        record(whole, inputs_of("gpt2"))
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 96}
    model = tf.BartForConditionalGeneration(tf.BartConfig(**sizes)).eval()
    with pytest.raises(HelmscopeError, match=r"record one alone, such as model\.get_encoder"):
        record(model, inputs_of("gpt2"))
    assert record(model.get_encoder(), inputs_of("gpt2")).certificate.ok


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
    with pytest.raises(HelmscopeError, match="kernel is not given out"):
        recording.kernel(0)


@pytest.mark.parametrize("family", CLASSES)
def test_a_wrong_force_is_caught(family):
    model, ids = tiny_model(family), inputs_of(family)
    anatomy, seen = dissect(model, {"input_ids": ids})
    line, forces = certify.mlp_line(anatomy, seen)
    assert line.ok
    assert len(forces) == 3
    with torch.no_grad():  # the module has changed since it was seen
        last = [value for name, value in anatomy.layers[1].block.named_parameters() if value.ndim > 1][-1]
        last += 0.01 * torch.randn(last.shape, generator=torch.Generator().manual_seed(0))
    assert certify.mlp_line(anatomy, seen)[0].ok is not True


def test_a_family_without_attention_is_refused():
    config = tf.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(HelmscopeError, match=r"MambaBlock at layer 0 without attention.*measured as a Trajectory"):
        record(tf.MambaForCausalLM(config).eval(), inputs_of("gpt2"))


def test_doctor_on_the_command_line(tmp_path, capsys, monkeypatch):
    import json
    import sys

    from helmscope.cli import main

    tiny_model("gpt2").save_pretrained(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["helmscope", "doctor", str(tmp_path), "--json", "--texts", "10", "--tokens", "16"]
    )
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (0, None)
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert told["trajectory_bytes"] == 7 * 10 * 16 * 34 * 4
    assert told["origin"]["hashes"]["model.safetensors"]
