"""What an encoder-decoder model reads: texts in its encoder, targets in its decoder, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import helmscope as hs
from helmscope.models.record import record
from helmscope.models.targets import prepare_inputs
from helmscope.types import HelmscopeError
from support.model_families import BART, inputs_of, pair_inputs, tiny_model

IDS = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def letters():
    """A tokenizer of letters that ends a text by </s>, as those of T5 and BART do."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {chr(97 + k): 4 + k for k in range(26)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_without_targets_the_decoder_is_to_write_the_texts():
    """BART does the same by itself."""
    model = tiny_model("bart", dtype=torch.float64)
    recording = record(model, {"input_ids": IDS, "attention_mask": MASK})
    assert recording.batch.inputs["decoder_input_ids"].tolist() == [[2, 5, 6, 7, 8], [2, 9, 10, 0, 0]]
    assert recording.visible.tolist() == MASK.bool().tolist()
    assert recording.encoder.visible.tolist() == MASK.bool().tolist()
    with torch.no_grad():
        wanted = model(IDS, attention_mask=MASK)[0]
    seen = MASK.bool()
    assert (recording.logits()[seen] - wanted[seen]).abs().max() <= 1e-12
    # a model without a function of its own for it, and a plain tensor of ids
    trunk = record(model.model, IDS)
    assert trunk.batch.inputs["decoder_input_ids"].tolist() == [[2, 5, 6, 7, 8], [2, 9, 10, 2, 0]]
    assert trunk.certificate.ok


def test_mbart_begins_with_its_last_token():
    """The language, which stands at the end of a text."""
    batch = prepare_inputs(tiny_model("mbart"), {"input_ids": IDS, "attention_mask": MASK})
    assert batch.inputs["decoder_input_ids"].tolist() == [[2, 5, 6, 7, 8], [2, 9, 10, 0, 0]]
    other = prepare_inputs(tiny_model("mbart"), torch.tensor([[5, 6, 42]]))
    assert other.inputs["decoder_input_ids"].tolist() == [[42, 5, 6]]


@pytest.mark.parametrize("family", ["t5-relu", "bart"])
def test_targets_as_strings_and_as_ids(family):
    model, words = tiny_model(family), letters()
    start = model.config.decoder_start_token_id
    recording = record(model, ["a b c d", "e f"], targets=["g", "h i j"], tokenizer=words)
    assert recording.batch.inputs["decoder_input_ids"].tolist() == [[start, 10, 0, 0], [start, 11, 12, 13]]
    assert recording.batch.inputs["decoder_attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert recording.batch.tokens[1][1:] == ("h", "i", "j")
    assert recording.encoder.batch.tokens[1][:3] == ("e", "f", "</s>")
    # the start token and </s> take part, and are not counted
    assert recording.trajectory.weights[0].tolist() == [[0, 1, 0, 0], [0, 1, 1, 1]]
    assert recording.encoder.trajectory.weights[0].tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    ids = {"input_ids": torch.tensor([[10, 2, 0, 0], [11, 12, 13, 2]])}
    ids["attention_mask"] = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    same = record(model, ["a b c d", "e f"], targets=ids, tokenizer=words)
    assert torch.equal(same.logits(), recording.logits())
    assert record(model, torch.tensor([[5, 6]]), targets=torch.tensor([[7, 8, 9]])).trajectory.states.shape[2] == 3


def test_a_tokenizer_with_rules_of_its_own_for_targets():
    class Marking(tf.PreTrainedTokenizerFast):
        def _switch_to_target_mode(self):
            self._tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
            )

    words = letters()
    marking = Marking(tokenizer_object=words._tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    batch = prepare_inputs(tiny_model("bart"), ["a b"], marking, targets=["c"])
    assert batch.inputs["input_ids"].tolist() == [[4, 5, 2]]
    assert batch.inputs["decoder_input_ids"].tolist() == [[2, 1, 6]]


def test_padding_on_the_left_of_either_is_moved():
    """T5 has relative positions, which padding does not shift; BART counts from the first token on."""
    right = pair_inputs()
    left = {name: value.flip(1) for name, value in right.items()}
    for name in ("", "decoder_"):  # the padding is in front now, and the words are in their order again
        ids, mask = left[f"{name}input_ids"], left[f"{name}attention_mask"]
        for row, seen in zip(ids, mask.bool(), strict=True):
            row[seen] = row[seen].flip(0)
    for family, says in (("t5-relu", True), ("bart", None)):
        model = tiny_model(family, dtype=torch.float64)
        moved, wanted = record(model, left), record(model, right)
        assert torch.equal(moved.logits(), wanted.logits())
        assert torch.equal(moved.cross_kernel(layer=1), wanted.cross_kernel(layer=1))
        assert moved.certificate["padding"].ok is says
        assert moved.encoder.certificate["padding"].ok is says


def test_what_is_refused():
    model = tiny_model("bart")
    both = pair_inputs()
    texts = {name: both[name] for name in ("input_ids", "attention_mask")}
    cases = [
        (
            {"targets": inputs_of("gpt2", batch=2)},
            texts,
            "targets holds 2 texts, but the encoder reads 3: one for",
        ),
        ({"targets": ["a"] * 3}, texts, "targets are strings, but the model came without a tokenizer"),
        ({"targets": []}, texts, "targets is empty, but it must hold at least one text"),
        (
            {"targets": torch.full((3, 2), 96)},
            texts,
            "targets contain the token id 96, but the model has embeddings 0 to",
        ),
        ({"targets": torch.ones(3, 65).long()}, texts, r"targets\[0\] has 65 tokens, but the model's context is 64"),
        ({"targets": inputs_of("gpt2")}, both, "targets is passed, but texts names decoder_input_ids too"),
        ({}, texts | {"labels": texts["input_ids"]}, "texts names labels, .*: pass them as targets"),
        ({}, texts | {"position_ids": texts["input_ids"]}, "texts names 'position_ids', but an encoder-decoder model"),
        ({}, texts | {"decoder_attention_mask": texts["attention_mask"]}, "decoder_attention_mask, but no decoder_inp"),
        (
            {},
            {**both, "decoder_input_ids": both["decoder_input_ids"][:2]},
            "attention_mask holds 3 rows, but decoder_i",
        ),
        ({}, {"input_ids": IDS, "decoder_input_ids": IDS[:1]}, "decoder_input_ids holds 1 texts, but the encoder rea"),
    ]
    for options, given, says in cases:
        with pytest.raises(HelmscopeError, match=says):
            record(model, given, **options)
    with pytest.raises(HelmscopeError, match="targets is passed, but model is a GPT2LMHeadModel, and only encoder-"):
        record(tiny_model("gpt2"), inputs_of("gpt2"), targets=inputs_of("gpt2"))
    lost = tf.BartModel(tf.BartConfig(**BART | {"decoder_start_token_id": None})).eval()
    with pytest.raises(HelmscopeError, match=r"texts are read .*, but BartModel cannot shift .*start_token_id\)"):
        record(lost, IDS)
    with pytest.raises(HelmscopeError, match=r"targets\[0\] has no token that counts"):
        record(model, ["a b"], targets=["</s>"], tokenizer=letters())


def test_truncate_cuts_both():
    model = tiny_model("bart")
    long = torch.randint(3, 96, (2, 70), generator=torch.Generator().manual_seed(0))
    recording = record(model, long, targets=long, truncate=True)
    assert recording.trajectory.states.shape[2] == recording.encoder.trajectory.states.shape[2] == 64


@pytest.mark.parametrize("family", ["t5-relu", "bart"])
def test_from_a_folder(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    recording = hs.record(tmp_path, ["a b c", "d e f g"])
    assert recording.certificate.ok
    assert recording.encoder.certificate.ok
    wanted = record(model, ["a b c", "d e f g"], tokenizer=letters())
    assert torch.equal(recording.logits(), wanted.logits())
    config = tmp_path / "config.json"
    config.write_text("\n".join(line for line in config.read_text().splitlines() if "ForCond" not in line))
    config.write_text(config.read_text().replace('"architectures": [\n  ],', '"architectures": null,'))
    assert type(hs.load(tmp_path).model) is type(model)  # and not its decoder as a language model


def test_a_prompt_is_identified_by_its_text_and_its_target():
    model, words = tiny_model("t5-relu"), letters()
    texts, targets = ["a b", "c"], ["d", "e"]
    alone, paired = (prepare_inputs(model, texts, words, targets=given) for given in (None, targets))
    assert alone.identities == alone.source.identities == paired.source.identities
    swapped = prepare_inputs(model, texts, words, targets=targets[::-1])
    assert len({*alone.identities, *paired.identities, *swapped.identities}) == 6
    ids = prepare_inputs(model, torch.tensor([[5, 6]]))
    assert ids.identities == prepare_inputs(model, {"input_ids": torch.tensor([[5, 6]])}).identities
