"""Changed queries and keys, and other temperatures of attention, against a forward pass that is written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helmscope.intervene import GaugeTransform, ShiftKeys
from helmscope.models.record import record
from helmscope.observe import (
    EditStrength,
    QueryKeyEditKind,
    attention_temperature_damage,
    damage_under_edits,
    query_key_edit_damage,
    query_key_edits,
)
from helmscope.types import HelmscopeError
from support.gpt2_by_hand import divergence, logits_by_hand, queries_and_keys
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
PRINTED, MATCHED = EditStrength.AS_PRINTED, EditStrength.MATCHED


def sharp_model():
    """A model whose attention is far from uniform and matters for what it predicts."""
    model = tiny_model("gpt2", dtype=F64)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight *= 20
            block.attn.c_proj.weight *= 20
    return model


def normalized(vectors, center):
    """All vectors of a head at the root mean square distance from its center, over all texts and tokens."""
    center = vectors.mean((0, 2), keepdim=True) if center else 0 * vectors.mean((0, 2), keepdim=True)
    about = vectors - center
    size = about.square().sum(-1).mean((0, 2)).sqrt()[None, :, None, None]
    return lambda x: center + size * (x - center) / (x - center).norm(dim=-1, keepdim=True)


def blurred(x):
    found = torch.empty_like(x)
    for t in range(x.shape[2]):
        weights = [0.5, 0.25, 0.25][: t + 1]
        found[:, :, t] = sum(w * x[:, :, t - lag] for lag, w in enumerate(weights)) / sum(weights)
    return found


def test_damage_as_printed_is_that_of_a_forward_written_out():
    model, ids = sharp_model(), inputs_of("gpt2")
    measured = query_key_edit_damage(record(model, ids), strengths=[PRINTED])
    assert measured["kind"].values.tolist() == ["normalized", "blurred"]
    plain, tensors = logits_by_hand(model, ids), queries_and_keys(model, ids)
    for change in ("normalized", "blurred"):
        for side, site in enumerate(("query", "key")):

            def edited(layer, query, key, change=change, side=side):
                pair = [query, key]
                function = normalized(tensors[layer][side], center=False) if change == "normalized" else blurred
                pair[side] = function(pair[side])
                return tuple(pair)

            expected = divergence(plain, logits_by_hand(model, ids, edited))
            found = measured.kl.sel(kind=change, strength="as printed", site=site)
            np.testing.assert_allclose(found, expected, rtol=1e-8)
    ratio = measured.kl.sel(site="key") / measured.kl.sel(site="query")
    np.testing.assert_allclose(measured.ratio, ratio, rtol=1e-14)


def test_matched_changes_are_those_of_their_edits_and_ignore_gauge_and_shift():
    recording = record(sharp_model(), inputs_of("gpt2"))
    measured = query_key_edit_damage(recording, strengths=[MATCHED])
    for change in QueryKeyEditKind:
        queries, keys = query_key_edits(recording, change, MATCHED)
        assert torch.maximum(queries.strength, keys.strength).eq(1).all()
        kl = damage_under_edits(recording, {"query": queries, "key": keys}).kl
        assert np.array_equal(measured.kl.sel(kind=change.value, strength="matched"), kl)
    gauged = query_key_edit_damage(recording.under(GaugeTransform(factor=3)), strengths=[MATCHED])
    np.testing.assert_allclose(gauged.ratio, measured.ratio, rtol=1e-6)
    shift = ShiftKeys(vector=torch.full((8,), 2.0, dtype=F64))
    both = query_key_edit_damage(recording.under(shift))
    np.testing.assert_allclose(both.ratio.sel(strength="matched"), measured.ratio.isel(strength=0), rtol=1e-6)
    printed = query_key_edit_damage(recording, strengths=[PRINTED])
    change = np.abs(both.ratio.sel(strength="as printed") / printed.ratio.isel(strength=0) - 1)
    assert change.sel(kind="normalized").min() > 0.01


@pytest.mark.parametrize("temperature", [0.25, 3.0])
def test_the_temperature_divides_the_logits(temperature):
    model, ids = sharp_model(), inputs_of("gpt2")
    measured = attention_temperature_damage(record(model, ids), temperatures=[1.0, temperature])
    expected = divergence(logits_by_hand(model, ids), logits_by_hand(model, ids, temperature=temperature))
    np.testing.assert_allclose(measured.kl.sel(temperature=temperature), expected, rtol=1e-9)
    assert (measured.kl.sel(temperature=1.0) == 0).all()
    one = attention_temperature_damage(record(model, ids), temperatures=[temperature], layers=[1])
    assert not np.allclose(one.kl.isel(temperature=0), expected, rtol=0.01)


def test_refusals():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    with pytest.raises(HelmscopeError, match=r"kinds is \['blurred'\], but it must be a list of different ones"):
        query_key_edit_damage(recording, kinds=["blurred"])
    with pytest.raises(HelmscopeError, match=r"strengths is .*, but it must be a list of different ones"):
        query_key_edit_damage(recording, strengths=[])
    with pytest.raises(HelmscopeError, match="window begins with 0"):
        query_key_edit_damage(recording, window=[0.0, 1.0])
    with pytest.raises(HelmscopeError, match="recording is an int, but it must be a Recording"):
        query_key_edit_damage(3)
    with pytest.raises(HelmscopeError, match="weights have a row whose sum differs from 1"):
        query_key_edit_damage(record(tiny_model("gpt_oss"), inputs_of("gpt_oss")))
    with pytest.raises(HelmscopeError, match="temperatures is 0, but it must be a finite number > 0"):
        attention_temperature_damage(recording, temperatures=[0])
    with pytest.raises(HelmscopeError, match="temperatures is 2, but it must be a list of numbers"):
        attention_temperature_damage(recording, temperatures=2)
    with pytest.raises(HelmscopeError, match="layers holds 7, but the model has layers 0 to 2"):
        attention_temperature_damage(recording, layers=[7])
    with pytest.raises(HelmscopeError, match="needs attention that is causal"):
        attention_temperature_damage(record(tiny_model("bert"), inputs_of("bert")))
