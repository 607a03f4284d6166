"""Logits of chosen tokens: those of all logits, without computing them where the head is linear."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.models import head
from helmscope.models.record import record
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, letters, pair_inputs, tiny_model

IDS = inputs_of("gpt2")


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "cohere", "granite", "bloom", "bert"])
def test_chosen_logits_are_those_of_all(family):
    """Also where logits are scaled or capped behind the matrix, and where the matrix has a bias."""
    mask = torch.ones_like(IDS)
    mask[1, 6:] = 0
    recording = record(tiny_model(family), {"input_ids": IDS, "attention_mask": mask}, batch_size=2)
    whole = recording.logits().double().numpy()
    seen = hs.token_logits(recording, [7, 3, 95])
    assert seen.logit.dims == ("prompt", "token")
    assert seen.token.values.tolist() == ["7", "3", "95"]
    assert seen.token_id.values.tolist() == [7, 3, 95]
    wanted = whole[[0, 1, 2], [12, 5, 12]][:, [7, 3, 95]]
    np.testing.assert_allclose(seen.logit.values, wanted, rtol=0, atol=1e-5)
    everywhere = hs.token_logits(recording, [7, 3, 95], position=None).logit
    assert everywhere.dims == ("prompt", "position", "token")
    assert everywhere.isnull().values[..., 0].tolist() == (mask == 0).tolist()
    np.testing.assert_allclose(everywhere.values[2], whole[2][:, [7, 3, 95]], rtol=0, atol=1e-5)


def test_other_logits_are_not_computed():
    model, widths = tiny_model("gpt2"), []
    model.lm_head.register_forward_hook(lambda module, args, output: widths.append(tuple(output.shape)))
    hs.token_logits(record(model, IDS), [7, 3])
    assert widths[-1] == (2, 13, 2)
    assert "forward" not in model.lm_head.__dict__


def test_a_head_that_needs_all_rows_is_read_whole():
    """Logits less their mean are no function of some of them."""
    model = tiny_model("gpt2")
    model.lm_head.register_forward_hook(lambda module, args, output: output - output.mean(-1, keepdim=True))
    recording = record(model, IDS)
    wanted = recording.logits()[:, -1, [7, 3]].double().numpy()
    np.testing.assert_allclose(hs.token_logits(recording, [7, 3]).logit.values, wanted, rtol=0, atol=1e-6)


def test_the_lens_and_edits():
    recording = record(tiny_model("gpt2"), IDS, batch_size=2)
    shares = []
    seen = hs.token_logits(recording, [7, 3], depth=range(7), position=[0, -2], progress=shares.append)
    assert dict(seen.logit.sizes) == {"depth": 7, "prompt": 3, "position": 2, "token": 2}
    for depth in range(7):
        wanted = recording.logits(depth=depth)[:, [0, -2]][..., [7, 3]].numpy()
        np.testing.assert_allclose(seen.logit.sel(depth=depth).values, wanted, rtol=0, atol=1e-5)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    one = hs.token_logits(recording, [7, 3], depth=4, position=0)
    assert one.logit.values.tolist() == seen.logit.sel(depth=4, position=0).values.tolist()
    cut = hs.token_logits(recording.under(hs.intervene.AblateHead(layer=1, head=2)), [7]).logit
    assert (cut.values != hs.token_logits(recording, [7]).logit.values).all()


def test_tokens_by_their_text():
    model, words = tiny_model("gpt2"), letters(framed=True)
    recording = record(model, ["a b c", "d e"], tokenizer=words)
    seen = hs.token_logits(recording, ["b", 7])
    assert seen.token.values.tolist() == ["b", "d"]
    assert seen.token_id.values.tolist() == [5, 7]
    wanted = recording.logits()[[0, 1], [4, 3]][:, [5, 7]].numpy()
    np.testing.assert_allclose(seen.logit.values, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "options", "says"),
    [
        (["a b"], {}, r"tokens holds 'a b', which the tokenizer splits into \['a', 'b'\], but it must be one token"),
        (["?"], {}, r"tokens holds '\?', but it must be in the tokenizer's vocabulary"),
        ([""], {}, r"tokens holds '', which the tokenizer splits into \[\], but"),
        ("a", {}, "tokens is 'a', but it must be a list of at least one"),
        ([], {}, r"tokens is \[\], but it must be a list of at least one"),
        ([96], {}, "id in tokens is 96, but the model has the tokens 0 to 95"),
        ([-1], {}, "id in tokens is -1, but it must be a whole number >= 0"),
        (["b", 5], {}, "tokens holds the id 5 twice"),
        (["a"], {"position": 5}, r"position is 5, but texts\[0\] has 5 tokens"),
        (["a"], {"position": "last"}, "position is 'last', but it must be a whole number such as -1"),
        (["a"], {"depth": 9}, "depth is 9, but this recording has depths 0 to 6"),
        (["a"], {"depth": []}, "depth is empty"),
        (["a"], {"progress": 1}, "progress is 1, but"),
    ],
)
def test_what_cannot_be_chosen_is_refused(tokens, options, says):
    recording = record(tiny_model("gpt2"), ["a b c"], tokenizer=letters(framed=True))
    with pytest.raises(HelmscopeError, match=says):
        hs.token_logits(recording, tokens, **options)


def test_models_without_words_are_refused():
    with pytest.raises(HelmscopeError, match="but the recording has no tokenizer: pass token ids"):
        hs.token_logits(record(tiny_model("gpt2"), IDS), ["a"])
    with pytest.raises(HelmscopeError, match="GPT2Model has no head over a vocabulary"):
        hs.token_logits(record(tiny_model("gpt2").transformer, IDS), [1])
    with pytest.raises(HelmscopeError, match="recording is a list"):
        hs.token_logits([], [1])


def test_the_head_is_as_it_was_after_an_error():
    model = tiny_model("gpt2")
    with pytest.raises(IndexError), head.few_logits(model, torch.tensor([1])):
        model(IDS).logits[..., 1]
    assert model(IDS).logits.shape[-1] == 96


@pytest.mark.parametrize("family", ["t5-relu", "bart", "marian"])
def test_logits_of_a_decoder(family):
    model, inputs = tiny_model(family, dtype=torch.float64), pair_inputs()
    recording = record(model, inputs, batch_size=2)
    with torch.no_grad():
        logits = model(**inputs).logits
    last = recording.anatomy.depths.last
    seen = hs.token_logits(recording, [5, 7], depth=[0, last], position=None).logit
    for k, n in enumerate(inputs["decoder_attention_mask"].sum(-1).tolist()):
        wanted = logits[k, :n, [5, 7]].numpy()
        assert np.abs(seen.sel(depth=last)[k, :n] - wanted).max() < 1e-6
        assert np.abs(seen.sel(depth=0)[k, :n] - wanted).max() > 1e-3
        assert np.abs(hs.token_logits(recording, [5, 7]).logit[k] - wanted[-1]).max() < 1e-6
