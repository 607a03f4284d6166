"""Normalized and blurred queries and keys, and strengths of equal effect on the logits, against loops."""

import numpy as np
import pytest
import torch

from helmscope.intervene import Ablate, Blur, GaugeTransform, Normalize, ShiftKeys, match_strengths
from helmscope.models import KeptTensors, record
from helmscope.models.sites import EditContext, Site
from helmscope.observe import damage_under_edits
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

QK = KeptTensors.QUERIES | KeptTensors.KEYS | KeptTensors.KERNELS
# transformers computes the softmax of LLaMA in float32, also in a model in float64
ROUNDING = {"gpt2": 1e-12, "llama": 1e-6}


def recorded(family, **options):
    model = tiny_model(family, dtype=torch.float64)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 2 and any(part in name for part in ("c_attn", "q_proj", "k_proj")):
                value *= 20
    return record(model, inputs_of(family), **options)


def changed(edit, value, layer=1):
    context = EditContext(site=edit.site, layer=layer, rows=slice(0, len(value)), texts=len(value))
    return edit.new(value, context)


@pytest.mark.parametrize("centered", [False, True])
def test_lengths_are_equal_about_the_center(centered):
    recording = recorded("gpt2", keep=QK, batch_size=2)
    keys = recording.kept["key"][1]
    found = changed(Normalize.of(recording, site=Site.KEY, centered=centered), keys)
    for head in range(4):
        vectors = keys[:, head].reshape(-1, 8).numpy()
        center = vectors.mean(0) if centered else np.zeros(8)
        size = np.sqrt(((vectors - center) ** 2).sum(-1).mean())
        expected = [center + size * (k - center) / np.sqrt(((k - center) ** 2).sum()) for k in vectors]
        assert np.abs(found[:, head].reshape(-1, 8).numpy() - expected).max() < 1e-12


def test_blur_by_loops_and_never_from_later_tokens():
    value = torch.randn(2, 3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = (0.5, 0.25, 0.25)
    found = changed(Blur(window=weights), value)
    for t in range(6):
        lags = range(min(t + 1, 3))
        expected = sum(weights[lag] * value[:, :, t - lag] for lag in lags) / sum(weights[lag] for lag in lags)
        assert (found[:, :, t] - expected).abs().max() < 1e-15
    assert changed(Blur(), value[:, :, :1]).equal(value[:, :, :1])
    recording = recorded("gpt2")
    ids = inputs_of("gpt2").clone()
    ids[:, -1] = (ids[:, -1] + 1) % 96
    other = record(recording.anatomy.model, ids)
    for site in (Site.QUERY, Site.KEY):
        both = [each.under(Blur(site=site)).logits()[:, :-1] for each in (recording, other)]
        assert (both[0] - both[1]).abs().max() < 1e-12


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_matched_strengths_by_loops(family):
    recording = recorded(family, keep=QK, batch_size=2)
    sides = [Normalize.of(recording, site=Site.QUERY), Normalize.of(recording, site=Site.KEY, centered=True)]
    matched = match_strengths(recording, *sides)
    queries, keys, weights = (recording.kept[name][1] for name in ("query", "key", "kernel"))
    moved = changed(sides[0], queries) - queries, changed(sides[1], keys) - keys
    repeats = queries.shape[1] // keys.shape[1]
    for text, group in ((0, 0), (2, 1)):
        variances = [[], []]
        for head in range(group * repeats, (group + 1) * repeats):
            for i in range(13):
                a = weights[text, head, i].numpy()
                changes = (
                    keys[text, group].numpy() @ moved[0][text, head, i].numpy(),
                    moved[1][text, group].numpy() @ queries[text, head, i].numpy(),
                )
                for side, dl in zip(variances, changes, strict=True):
                    side.append((a * (dl - a @ dl) ** 2).sum())
        means = [np.mean(side) for side in variances]
        for edit, mean in zip(matched, means, strict=True):
            expected = np.sqrt(min(means) / mean)
            assert edit.strength[1, text, group].item() == pytest.approx(expected, rel=ROUNDING[family])
    assert torch.maximum(*(edit.strength for edit in matched)).sub(1).abs().max() < 1e-12


def test_the_ratio_ignores_a_gauge_and_a_shift_of_the_keys():
    recording = recorded("gpt2")
    vector = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def damages(edited):
        sides = Normalize.of(edited, site=Site.QUERY), Normalize.of(edited, site=Site.KEY, centered=True)
        queries, keys = match_strengths(edited, *sides)
        return damage_under_edits(edited, {"queries": queries, "keys": keys}).kl.values

    plain = damages(recording)
    for edit in (GaugeTransform(factor=2), ShiftKeys(vector=vector)):
        assert np.abs(damages(recording.under(edit)) / plain - 1).max() < 1e-8, edit
    raw = [Normalize.of(each, site=Site.KEY) for each in (recording, recording.under(ShiftKeys(vector=vector)))]
    kl = [
        damage_under_edits(each, {"keys": edit}).kl.values
        for each, edit in zip((recording, recording.under(ShiftKeys(vector=vector))), raw, strict=True)
    ]
    assert np.abs(kl[1] / kl[0] - 1).max() > 0.01


def test_where_one_side_moves_nothing_neither_does():
    recording = recorded("gpt2").under(GaugeTransform(factor=1.0))
    queries, keys = match_strengths(recording, Blur(site=Site.QUERY, window=[1.0]), Blur(site=Site.KEY))
    assert queries.strength.abs().max() == 0
    assert keys.strength.abs().max() == 0


def test_refusals():
    recording = recorded("gpt2")
    with pytest.raises(HelmscopeError, match="strength is -1, but it must be a finite number >= 0"):
        Blur(strength=-1)
    with pytest.raises(HelmscopeError, match="window is 'a', but it must be a list such as"):
        Blur(window="a")
    with pytest.raises(HelmscopeError, match="window begins with 0, but the weight of lag 0 must be > 0"):
        Blur(window=[0.0, 1.0])
    with pytest.raises(HelmscopeError, match=r"site is .*, but Blur must be at one of Site.QUERY, Site.KEY"):
        Blur(site=Site.MLP)
    with pytest.raises(HelmscopeError, match="layers holds 7, but the model has layers 0 to 2"):
        Normalize.of(recording, layers=[7])
    with pytest.raises(HelmscopeError, match="centers is a NoneType, but it must be a tensor with 3 axes and 3 layers"):
        recording.under(Normalize())
    with pytest.raises(HelmscopeError, match=r"queries is .*, but it must be a Normalize or a Blur at Site.QUERY"):
        match_strengths(recording, Blur(site=Site.KEY), Blur(site=Site.KEY))
    with pytest.raises(HelmscopeError, match=r"queries is .*, but it must be a Normalize or a Blur at Site.QUERY"):
        match_strengths(recording, Ablate([1]), Blur(site=Site.KEY))
    with pytest.raises(HelmscopeError, match=r"strength is \(2, 3, 4\), but it must be a number or \(3, batch,"):
        recording.under(Blur(strength=torch.ones(2, 3, 4)))
    other = record(tiny_model("gpt2", dtype=torch.float64), inputs_of("gpt2")[:2])
    with pytest.raises(HelmscopeError, match="strength has 3 texts and 4 heads, but layer 0 has 2 texts and 4 heads"):
        other.under(Blur(strength=torch.ones(3, 3, 4)))
    sinks = record(tiny_model("gpt_oss"), inputs_of("gpt_oss"))
    with pytest.raises(HelmscopeError, match="weights have a row whose sum differs from 1 by"):
        match_strengths(sinks, Blur(site=Site.QUERY), Blur(site=Site.KEY))
