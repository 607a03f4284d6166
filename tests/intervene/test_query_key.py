"""GaugeTransform, shifts of keys, centered key noise and matched query noise: exact invariances and sums by loops."""

import numpy as np
import pytest
import torch

from helmscope.intervene import CenteredKeyNoise, Edit, GaugeTransform, MatchedQueryNoise, Perturb, ShiftKeys
from helmscope.models import KeptTensors, record
from helmscope.models.sites import EditContext, Site
from helmscope.observe import damage_under_edits, key_noise_kl, query_noise_kl
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

QK = KeptTensors.QUERIES | KeptTensors.KEYS | KeptTensors.KERNELS
# transformers computes the softmax of LLaMA in float32, also in a model in float64
ROUNDING = {"gpt2": 1e-12, "llama": 1e-6}


def sharp(family, dtype=torch.float32):
    """A tiny model whose queries and keys are large enough for attention to be far from uniform."""
    model = tiny_model(family, dtype=dtype)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 2 and any(part in name for part in ("c_attn", "q_proj", "k_proj")):
                value *= 20
    return model


def recorded(family, dtype=torch.float32, **options):
    return record(sharp(family, dtype), inputs_of(family), **options)


def test_a_gauge_of_two_keeps_every_bit():
    for recording in (recorded("gpt2"), recorded("llama"), record("A", ["Once upon a time, there was a cat."])):
        plain = recording.logits()
        assert torch.equal(recording.under(GaugeTransform(factor=2)).logits(), plain)
        assert torch.equal(recording.under(GaugeTransform([1], factor=0.25)).logits(), plain)
        # each half alone is not a gauge
        assert not torch.equal(recording.under(Edit(Site.QUERY, None, lambda q: 2 * q)).logits(), plain)


@pytest.mark.parametrize("c", [2.0, 3.0])
def test_the_ratio_in_another_gauge_is_that_of_rescaled_noise(c):
    recording, sigma = recorded("gpt2", torch.float64), 0.3

    def noise(site, size):
        return Perturb(site=site, sigma=size, seed=4)

    damage = damage_under_edits(
        recording,
        {
            "key, gauge": [GaugeTransform(factor=c), noise(Site.KEY, sigma)],
            "query, gauge": [GaugeTransform(factor=c), noise(Site.QUERY, sigma)],
            "key": noise(Site.KEY, c * sigma),
            "query": noise(Site.QUERY, sigma / c),
            "key, same": noise(Site.KEY, sigma),
        },
    ).kl
    in_gauge = damage.sel(edit="key, gauge").values / damage.sel(edit="query, gauge").values
    rescaled = damage.sel(edit="key").values / damage.sel(edit="query").values
    assert np.abs(in_gauge / rescaled - 1).max() < 1e-5
    assert (np.abs(damage.sel(edit="key, gauge") / damage.sel(edit="key, same") - 1) > 0.1).all()


def test_the_ratio_grows_as_the_fourth_power_where_the_slope_is_two():
    recording, sigma, c = recorded("gpt2", torch.float64), 1e-4, 2.0
    edits = {
        (site.name, size): Perturb(site=site, sigma=size * sigma, seed=4)
        for site in (Site.QUERY, Site.KEY)
        for size in (1 / c, 1.0, c)
    }
    kl = damage_under_edits(recording, {str(name): edit for name, edit in edits.items()}).kl
    found = {name: kl.sel(edit=str(name)).values for name in edits}
    for site in ("QUERY", "KEY"):
        slope = np.log2(found[site, c] / found[site, 1 / c]) / 2
        assert np.abs(slope - 2).max() < 1e-2, site
    ratio = found["KEY", c] / found["QUERY", 1 / c]
    assert np.abs(ratio / (found["KEY", 1.0] / found["QUERY", 1.0]) / c**4 - 1).max() < 1e-2


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_a_constant_on_all_keys_changes_nothing_and_one_on_queries_does(dtype, bound):
    recording = recorded("gpt2", dtype)
    plain, sizes = recording.logits(), recording.anatomy.model.config
    vector = torch.randn(sizes.n_head, sizes.n_embd // sizes.n_head, generator=torch.Generator().manual_seed(0))
    shifted = recording.under(ShiftKeys(vector=vector)).logits()
    assert (shifted - plain).abs().max() < bound
    moved = recording.under(Edit(Site.QUERY, None, lambda q: q + vector.to(q).unsqueeze(-2))).logits()
    assert (moved - plain).abs().max() > 1e-3


def test_before_the_rotary_phases_a_constant_on_keys_matters():
    ids, vector = inputs_of("llama"), torch.randn(16, generator=torch.Generator().manual_seed(0))
    found = {}
    for family in ("llama", "gpt2"):
        model = sharp(family, torch.float64)
        recording = record(model, ids, keep=KeptTensors.KEYS)
        plain = recording.logits()
        heads, r = recording.kept["key"].shape[2], recording.kept["key"].shape[4]
        constant = vector[torch.arange(heads * r) % 16].double()
        after = recording.under(ShiftKeys(vector=constant.reshape(heads, r))).logits()
        assert (after - plain).abs().max() < ROUNDING[family], family
        with torch.no_grad():
            if family == "llama":
                for layer in model.model.layers:
                    layer.self_attn.k_proj.bias = torch.nn.Parameter(constant)
            else:
                for layer in model.transformer.h:
                    layer.attn.c_attn.bias[heads * r : 2 * heads * r] += constant
        found[family] = float((record(model, ids).logits() - plain).abs().max())
    assert found["gpt2"] < ROUNDING["gpt2"]
    assert found["llama"] > 1e-3


def test_centered_noise_has_the_size_of_the_centered_visible_keys():
    keys = torch.randn(3, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 10
    visible = torch.ones(3, 5, dtype=torch.bool)
    visible[1, 3:] = False
    context = EditContext(site=Site.KEY, layer=1, rows=slice(0, 3), texts=3, visible=visible)
    found = CenteredKeyNoise(relative_sigma=0.1, seed=7).new(keys, context) - keys
    draws = context.normal(keys, seed=7)
    for text in range(3):
        for head in range(2):
            seen = [keys[text, head, j].numpy() for j in range(5) if visible[text, j]]
            mean = sum(seen) / len(seen)
            size = np.sqrt(sum(((key - mean) ** 2).sum() for key in seen) / (4 * len(seen)))
            assert (found[text, head] - 0.1 * size * draws[text, head]).abs().max() < 1e-12
    whole = EditContext(site=Site.KEY, layer=1, rows=slice(0, 3), texts=3)
    shifted = CenteredKeyNoise(relative_sigma=0.1, seed=7).new(keys + 50, whole) - (keys + 50)
    assert (shifted - (CenteredKeyNoise(relative_sigma=0.1, seed=7).new(keys, whole) - keys)).abs().max() < 1e-12


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_matched_noise_by_loops_and_its_law(family):
    recording = recorded(family, torch.float64, keep=QK, batch_size=2)
    found = MatchedQueryNoise.of(recording, sigma=0.1).sigma
    relative = MatchedQueryNoise.of(recording, relative_sigma=0.1).sigma
    queries, keys, weights = (recording.kept[name] for name in ("query", "key", "kernel"))
    repeats = queries.shape[2] // keys.shape[2]
    assert repeats == (1 if family == "gpt2" else 2)
    for layer, text, head, i in ((0, 0, 0, 3), (1, 2, 3, 12), (1, 1, 2, 1)):
        a, k = weights[layer, text, head, i].numpy(), keys[layer, text, head // repeats].numpy()
        mean = sum(a[j] * k[j] for j in range(13))
        trace = sum(a[j] * ((k[j] - mean) ** 2).sum() for j in range(13))
        length = np.sqrt((queries[layer, text, head, i].numpy() ** 2).sum())
        expected = 0.1 * length * np.sqrt((1 - (a**2).sum()) / trace)
        assert found[layer, text, head, i].item() == pytest.approx(expected, rel=ROUNDING[family])
        size = np.sqrt(((k - k.mean(0)) ** 2).mean())
        assert relative[layer, text, head, i].item() == pytest.approx(size * expected, rel=ROUNDING[family])
    assert torch.equal(found[..., 0], torch.zeros_like(found[..., 0]))
    laws = key_noise_kl(weights, queries, 1.0, 0.1)
    matched = found.square() * query_noise_kl(weights, keys.repeat_interleave(repeats, 2), 1.0, 1.0)
    assert (matched - laws).abs().max() < 1e-12 * laws.max()


def test_matched_noise_moves_the_rows_as_much_as_key_noise():
    recording, sigma = recorded("gpt2", torch.float64), 1e-3
    plain = recording.kernel(layer=0)
    means = {}
    for name in ("key", "query"):
        total = 0.0
        for seed in range(40):
            edit = (
                Perturb([0], site=Site.KEY, sigma=sigma, seed=seed)
                if name == "key"
                else MatchedQueryNoise.of(recording, sigma=sigma, layers=[0], seed=seed)
            )
            kernel = recording.under(edit).kernel(layer=0)
            total += torch.where(plain > 0, plain * (plain / kernel).log(), 0.0).sum().item()
        means[name] = total
    assert means["query"] == pytest.approx(means["key"], rel=0.1)


def test_matched_noise_does_not_depend_on_the_batch_size():
    kernels, model = [], sharp("gpt2")
    for batch_size in (1, 3):
        recording = record(model, inputs_of("gpt2"), batch_size=batch_size)
        kernels.append(recording.under(MatchedQueryNoise.of(recording, sigma=0.5, seed=2)).kernel(layer=1))
    assert (kernels[0] - kernels[1]).abs().max() < 1e-5
    assert (kernels[0] - recording.kernel(layer=1)).abs().max() > 1e-2


def test_padding_does_not_count_in_the_size_of_centered_keys():
    model, ids = sharp("gpt2"), inputs_of("gpt2")
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    padded = MatchedQueryNoise.of(record(model, {"input_ids": ids, "attention_mask": mask}), relative_sigma=0.1).sigma
    alone = MatchedQueryNoise.of(record(model, ids[1:2, :8]), relative_sigma=0.1).sigma
    counted = MatchedQueryNoise.of(record(model, ids), relative_sigma=0.1).sigma
    assert (padded[:, 1, :, :8] - alone[:, 0]).abs().max() < 1e-5 * alone.max()
    assert (counted[:, 1, :, :8] - alone[:, 0]).abs().max() > 1e-2 * alone.max()


def test_refusals():
    recording = recorded("gpt2")
    with pytest.raises(HelmscopeError, match="factor is 0, but it must be a finite number > 0"):
        GaugeTransform(factor=0)
    with pytest.raises(HelmscopeError, match="relative_sigma is -1, but it must be a finite number >= 0"):
        CenteredKeyNoise(relative_sigma=-1)
    with pytest.raises(HelmscopeError, match="layers holds 7, but the model has layers 0 to"):
        recording.under(GaugeTransform([7], factor=2))
    with pytest.raises(HelmscopeError, match=r"vector is a NoneType, but it must be a float tensor \(r\)"):
        recording.under(ShiftKeys())
    with pytest.raises(HelmscopeError, match=r"vector has shape \(3,\), but for the keys of layer 0 it must be"):
        recording.under(ShiftKeys(vector=torch.ones(3)))
    with pytest.raises(HelmscopeError, match="sigma is None and relative_sigma is None, but exactly one"):
        MatchedQueryNoise.of(recording)
    with pytest.raises(HelmscopeError, match="sigma is a NoneType, but it must be a tensor"):
        recording.under(MatchedQueryNoise())
    noise = MatchedQueryNoise.of(recording, sigma=0.1)
    with pytest.raises(HelmscopeError, match=r"sigma has \(3, 4, 13\) texts, heads and tokens, but layer 0 has"):
        record(sharp("gpt2"), inputs_of("gpt2", n=6)).under(noise)
    sinks = record(tiny_model("gpt_oss"), inputs_of("gpt_oss"))
    with pytest.raises(HelmscopeError, match="weights have a row whose sum differs from 1 by"):
        MatchedQueryNoise.of(sinks, sigma=0.1)
