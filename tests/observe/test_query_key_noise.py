"""Damage of query and key noise against the model itself, the gauge, shifts of keys, and refusals; what is derived from
it in closed form.
"""

import numpy as np
import pytest
import torch
import xarray as xr
from tests.observe.test_damage import by_loops

from helmscope.intervene import Arm, AttentionMode, GaugeTransform, Perturb, ShiftKeys, WeightNoise, with_parameters
from helmscope.models import KeptTensors, record
from helmscope.models.sites import Site
from helmscope.observe import (
    NoiseKind,
    noise_table_as_printed,
    query_key_noise,
    query_key_noise_at_equal_kl,
    query_key_noise_by_layer,
    query_key_noise_ratio,
    query_key_noise_slope,
    query_key_noise_table,
)
from helmscope.stats import reduce_replicates
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

KL, ENTROPY, TOP = "kl", "prediction_entropy_change", "top_token_agreement"
ALL = list(NoiseKind)


def recorded(dtype=torch.float64, **options):
    """A tiny model whose queries and keys are large enough for attention to be far from uniform."""
    model = tiny_model("gpt2", dtype=dtype)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight *= 20
    return record(model, inputs_of("gpt2"), **options)


def test_noise_on_activations_and_on_weights_by_loops():
    recording = recorded()
    noise = query_key_noise(
        recording, kinds=[NoiseKind.ACTIVATIONS, NoiseKind.WEIGHTS], sigmas=[0.4], draws=2, seed=7,
        sites=[Site.QUERY, Site.VALUE],
    )  # fmt: skip
    plain, ids = recording.logits(), recording.batch.inputs["input_ids"]
    weights = WeightNoise.of(recording)
    kept = record(recording.anatomy.model, ids, keep=KeptTensors.KERNELS).kept["kernel"]
    for site in (Site.QUERY, Site.VALUE):
        edited = recording.under(Perturb(site=site, sigma=0.4, seed=8), keep=KeptTensors.KERNELS)
        with with_parameters(recording.anatomy.model, weights.values(site, sigma=0.4, seed=8)):
            changed = recording.logits()
        for kind, logits in (("activations", edited.logits()), ("weights", changed)):
            kl, _, entropy, top = by_loops(plain, logits, ids)
            found = noise.sel(kind=kind, site=site.value, draw=8, sigma=0.4)
            for name, expected in ((KL, kl), (ENTROPY, entropy), (TOP, top)):
                assert np.abs(found[name].values - expected).max() < 1e-12, (kind, name)
        same = edited.kept["kernel"].argmax(-1) == kept.argmax(-1)
        expected = same[..., 1:].double().mean((0, 2, 3))
        found = noise.top_key_agreement.sel(kind="activations", site=site.value, draw=8, sigma=0.4)
        assert np.abs(found.values - expected.numpy()).max() < 1e-12
    assert (noise.kl > 0).all()


def test_draws_together_are_those_alone_in_every_form():
    many, few = (
        query_key_noise(recorded(batch_size=size), kinds=ALL, sigmas=[0.3], draws=3, layers=[1]) for size in (64, 2)
    )
    for name in (KL, ENTROPY, TOP, "top_key_agreement"):
        assert np.abs(many[name] - few[name]).max() < 1e-12, name
    assert (many.kl > 0).all()
    assert many.kl.attrs == few.kl.attrs


def test_noise_in_one_layer_at_a_time():
    recording = recorded()
    by_layer = query_key_noise_by_layer(recording, kind=NoiseKind.MATCHED, sigma=0.3, draws=2)
    alone = query_key_noise(recording, kinds=[NoiseKind.MATCHED], sigmas=[0.3], draws=2, layers=[2])
    assert np.array_equal(by_layer.kl.sel(layer=2), alone.kl.isel(kind=0, sigma=0))
    assert by_layer.kl.dims == ("layer", "site", "draw", "prompt")


def test_the_gauge_multiplies_the_printed_ratio_by_its_fourth_power_and_leaves_the_fair_ones():
    recording = recorded()
    options = {"sigmas": [1e-3], "draws": 2}
    plain, gauged = (
        query_key_noise_ratio(query_key_noise(each, kinds=ALL, **options))
        for each in (recording, recording.under(GaugeTransform(factor=2)))
    )
    change = (gauged / plain).isel(sigma=0)
    assert np.abs(change.sel(kind="activations") / 16 - 1).max() < 0.02
    for kind in ("relative", "centered", "matched", "mixed states"):
        assert np.abs(change.sel(kind=kind) - 1).max() < 1e-7, kind


def test_the_ratio_in_another_gauge_is_that_of_rescaled_noise():
    recording, c, sigma = recorded(), 3.0, 0.2
    kinds = [NoiseKind.ACTIVATIONS]
    gauged = query_key_noise(recording.under(GaugeTransform(factor=c)), kinds=kinds, sigmas=[sigma], draws=2)
    rescaled = query_key_noise(recording, kinds=kinds, sigmas=[sigma / c, c * sigma], draws=2).kl
    expected = rescaled.sel(site="key").isel(sigma=1) / rescaled.sel(site="query").isel(sigma=0)
    found = gauged.kl.sel(site="key").isel(sigma=0) / gauged.kl.sel(site="query").isel(sigma=0)
    assert np.abs(found / expected.values - 1).max() < 1e-5


def test_a_shift_of_all_keys_changes_only_the_forms_that_see_it():
    recording = recorded()
    shift = ShiftKeys(vector=torch.full((8,), 3.0, dtype=torch.float64))
    kinds = [NoiseKind.ACTIVATIONS, NoiseKind.CENTERED, NoiseKind.MATCHED, NoiseKind.RELATIVE]
    plain, shifted = (
        query_key_noise(each, kinds=kinds, sigmas=[0.3], draws=1).kl for each in (recording, recording.under(shift))
    )
    change = np.abs(shifted / plain - 1)
    assert change.sel(kind=["activations", "centered", "matched"]).max() < 1e-8
    assert change.sel(kind="relative", site="key").max() > 0.01


def test_blocks_that_write_nothing_are_not_damaged():
    recording = recorded()
    silent = recording.under(*Arm(AttentionMode.OFF, mlp=False).edits(recording))
    noise = query_key_noise(silent, sigmas=[0.5], draws=1)
    assert noise.kl.max() == 0
    assert query_key_noise_ratio(noise).isnull().all()


def planted(c_query=1.0, c_key=3.0, power=2.0):
    """KL = c sigma^p with effects that are known functions of it."""
    sigma, prompts = np.array([0.1, 0.2, 0.4]), np.array([1.0, 2.0])
    kl = np.stack(
        [c * sigma[:, None, None] ** power * np.array([0.5, 1.5])[:, None] * prompts for c in (c_query, c_key)]
    )
    coords = {"site": ["query", "key"], "sigma": sigma, "draw": [0, 1]}
    data = {"kl": (("site", "sigma", "draw", "prompt"), kl)}
    mean = np.broadcast_to(kl.mean(2, keepdims=True), kl.shape)
    for effect, slope in (
        ("prediction_entropy_change", 1.0),
        ("top_token_agreement", -0.1),
        ("top_key_agreement", 0.0),
    ):
        values = slope * np.log(mean)
        values[1] += 0.25
        data[effect] = (("site", "sigma", "draw", "prompt"), values)
    return xr.Dataset(data, coords)


def test_ratio_slope_and_kinds_in_closed_form():
    noise = planted(power=1.7)
    assert np.abs(query_key_noise_ratio(noise) - 3).max() < 1e-14
    assert query_key_noise_ratio(noise, over="prompt").dims == ("sigma", "draw")
    assert np.abs(query_key_noise_slope(noise) - 1.7).max() < 1e-12
    equal = query_key_noise_at_equal_kl(noise)
    low, high = 3 * 0.1**1.7, 0.4**1.7
    assert np.abs(equal.equal_kl - np.sqrt(low * high) * np.array([1, 2])).max() < 1e-14
    for effect in ("prediction_entropy_change", "top_token_agreement", "top_key_agreement"):
        assert np.abs(equal[effect].sel(site="key") - equal[effect].sel(site="query") - 0.25).max() < 1e-12
    assert np.abs(equal.prediction_entropy_change.sel(site="query") - np.log(equal.equal_kl)).max() < 1e-12
    assert query_key_noise_at_equal_kl(planted(c_key=100.0)).equal_kl.isnull().all()  # no KL that both reach
    with pytest.raises(HelmscopeError, match="measurement has 1 sizes > 0, but a slope needs at least 2"):
        query_key_noise_slope(noise.isel(sigma=[0]))
    with pytest.raises(HelmscopeError, match="measurement is an int, but it must be what query_key_noise returns"):
        query_key_noise_ratio(3)


def test_the_table_as_printed():
    recording = recorded()
    table = noise_table_as_printed(recording, draws=2, seed=3)
    kinds = [NoiseKind.ACTIVATIONS, NoiseKind.WEIGHTS]
    noise = query_key_noise(recording, kinds=kinds, draws=2, seed=3)
    assert table.printed_query.values.tolist() == [0.0007, 0.0342, 0.1237]
    assert table.printed_key.values.tolist() == [0.0013, 0.0296, 0.1581]
    cell = noise.kl.sel(kind="weights", sigma=0.05)
    assert np.allclose(table.kl_key.sel(kind="weights", sigma=0.05), cell.sel(site="key").mean("draw"), rtol=1e-14)
    assert np.allclose(table.ratio, query_key_noise_table(noise).ratio, rtol=0)
    reduced = reduce_replicates(table)
    geometric = np.exp(np.log(table.ratio).mean("prompt"))
    assert np.allclose(reduced.ratio, geometric, rtol=1e-12)
    assert np.allclose(reduced.kl_key, table.kl_key.mean("prompt"), rtol=1e-12)


def test_refusals():
    recording = recorded()
    with pytest.raises(HelmscopeError, match=r"sigmas is -0.1, but it must be a finite number >= 0"):
        query_key_noise(recording, sigmas=[-0.1])
    with pytest.raises(HelmscopeError, match=r"sigmas is 0.1, but it must be a list of numbers"):
        query_key_noise(recording, sigmas=0.1)
    with pytest.raises(HelmscopeError, match="layer is 7, but this recording has layers 0 to 2"):
        query_key_noise(recording, layers=[7])
    with pytest.raises(HelmscopeError, match=r"kinds is .*, but it must be a list of members of NoiseKind"):
        query_key_noise(recording, kinds=["matched"])
    with pytest.raises(HelmscopeError, match=r"sites holds Site.VALUE, but NoiseKind.MATCHED compares queries"):
        query_key_noise(recording, kinds=[NoiseKind.MATCHED], sites=[Site.VALUE])
    with pytest.raises(HelmscopeError, match="draws is 0, but it must be"):
        query_key_noise(recording, draws=0)
    with pytest.raises(HelmscopeError, match="needs attention that is causal"):
        query_key_noise(record(tiny_model("bert"), inputs_of("bert")))
