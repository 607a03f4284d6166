"""Spectra of the states along depth and along the tokens, against SciPy, all permutations and closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import linalg

from helmscope.intervene import fourier_basis, fourier_frequencies
from helmscope.intervene.arms import Arm, AttentionMode
from helmscope.models.record import record
from helmscope.observe import cloud_spectrum, fourier_spectrum, half_step_retention
from helmscope.types import HelmscopeError, Trajectory
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 9, 0, 0, 0], [8, 9, 10, 11, 12, 13, 14, 15]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8]),
}


def path_of(*states: np.ndarray) -> Trajectory:
    """Depths of one prompt, with radii."""
    x = torch.from_numpy(np.stack(states)).double().unsqueeze(1)
    radius = x.norm(dim=-1)
    times = torch.arange(float(len(states)))
    return Trajectory(times, x / radius.unsqueeze(-1), None, radius, axis="depth", replicate="prompt")


def residual_by_hand(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """The residual stream of a GPT-2 at every half-step, by its own modules."""
    trunk, ids = model.transformer, inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    count = ids.shape[1]
    hidden = (mask[:, None, None] == 0) | torch.ones(count, count, dtype=torch.bool).triu(1)
    with torch.no_grad():
        state = trunk.wte(ids) + trunk.wpe(torch.arange(count))
        found = [state]
        for block in trunk.h:
            heads = model.config.n_head
            parts = block.attn.c_attn(block.ln_1(state)).chunk(3, -1)
            query, key, value = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in parts)
            logits = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
            state = state + block.attn.c_proj((logits.softmax(-1) @ value).transpose(1, 2).flatten(2))
            found.append(state)
            state = state + block.mlp(block.ln_2(state))
            found.append(state)
    return [each.numpy() for each in found]


def test_states_of_a_model_against_its_own_forward() -> None:
    model = tiny_model("gpt2").double()
    recording = record(model, PADDED)
    measured, along = cloud_spectrum(recording), fourier_spectrum(recording, cutoff=0.4)
    by_hand = residual_by_hand(model, PADDED)
    for depth, prompt in itertools.product(range(7), range(2)):
        y = by_hand[depth][prompt, 1 : 5 if prompt == 0 else 8]
        y = y - y.mean(-1, keepdims=True)
        clouds = {"residual stream": y, "sphere": y / np.linalg.norm(y, axis=1, keepdims=True)}
        for coordinates, cloud in clouds.items():
            for mean, x in (("kept", cloud), ("removed", cloud - cloud.mean(0))):
                s = linalg.svdvals(x)
                at = measured.sel(coordinates=coordinates, token_mean=mean).isel(depth=depth, prompt=prompt)
                rank = len(x) - (mean == "removed")
                p = s[:rank] / s.sum()
                assert float(at.effective_rank) == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-10)
                assert float(at.nuclear_norm) == pytest.approx(s.sum(), rel=1e-10)
                assert float(at.log_condition_number) == pytest.approx(math.log(s[0] / s[rank - 1]), rel=1e-8)
            basis, frequencies = (each.numpy() for each in (fourier_basis(len(y)), fourier_frequencies(len(y))))
            power = ((basis.T @ cloud) ** 2).sum(1)
            found = along.sel(coordinates=coordinates).isel(depth=depth, prompt=prompt)
            assert float(found.high_frequency_share) == pytest.approx(
                power[frequencies > 0.4].sum() / power.sum(), rel=1e-9
            )
            varying = power[frequencies > 0.4].sum() / power[1:].sum()
            assert float(found.high_frequency_share_of_variation) == pytest.approx(varying, rel=1e-9)
            for band, share in zip(found.band.values, found.band_power_share.values, strict=True):
                inside = (frequencies <= band + 1e-12) & (frequencies > band - 1 / 8 + 1e-12)
                inside |= (frequencies == 0) & (band == 1 / 8)
                assert share == pytest.approx(power[inside].sum() / power.sum(), abs=1e-12)
            if depth:
                before = by_hand[depth - 1][prompt, 1 : 5 if prompt == 0 else 8]
                before = before - before.mean(-1, keepdims=True)
                if coordinates == "residual stream":
                    change = y - before
                    shift = np.linalg.norm(change.mean(0)) / np.sqrt((change**2).sum(1).mean())
                    assert float(found.mean_token_shift) == pytest.approx(shift, rel=1e-9)


def test_states_of_an_encoder_are_measured_with_and_without_gain_and_bias() -> None:
    model, ids = tiny_model("bert").double(), inputs_of("bert", batch=2, n=9)
    measured = cloud_spectrum(record(model, ids), include_first_token=True)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    for layer in range(4):
        norm = model.bert.embeddings.LayerNorm if layer == 0 else model.bert.encoder.layer[layer - 1].output.LayerNorm
        raw = hidden[layer] - hidden[layer].mean(-1, keepdim=True)
        plain = (hidden[layer] - norm.bias) / norm.weight
        unit = plain / plain.norm(dim=-1, keepdim=True)
        at = measured.sel(token_mean="kept").isel(depth=2 * layer)
        for prompt, (coordinates, states) in itertools.product(
            range(2), {"residual stream": raw, "sphere": unit}.items()
        ):
            s = linalg.svdvals(states[prompt].detach().numpy())
            found = at.sel(coordinates=coordinates).isel(prompt=prompt)
            assert float(found.nuclear_norm) == pytest.approx(s.sum(), rel=1e-9)
            assert float(found.stable_rank) == pytest.approx((s**2).sum() / s[0] ** 2, rel=1e-9)


def test_retention_between_depths_and_over_half_steps() -> None:
    model = tiny_model("gpt2").double()
    recording = record(model, inputs_of("gpt2", batch=2, n=9))
    kept = half_step_retention(recording)
    by_hand = residual_by_hand(model, {"input_ids": inputs_of("gpt2", batch=2, n=9)})
    norms = np.array([[linalg.svdvals(prompt).sum() for prompt in state] for state in by_hand])
    np.testing.assert_allclose(kept.attention_nuclear_retention, norms[1::2] / norms[:-1:2], rtol=1e-10)
    np.testing.assert_allclose(kept.mlp_nuclear_retention, norms[2::2] / norms[1::2], rtol=1e-10)
    measured = cloud_spectrum(recording, include_first_token=True)
    stream = measured.nuclear_norm.sel(coordinates="residual stream", token_mean="kept").values
    ratio = measured.nuclear_retention.sel(coordinates="residual stream", token_mean="kept").values
    np.testing.assert_allclose(ratio[1:], stream[1:] / stream[:-1])
    assert np.isnan(ratio[0]).all()


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_blocks_that_write_nothing_keep_everything(family: str) -> None:
    recording = record(tiny_model(family), inputs_of(family, batch=2, n=9))
    silent = recording.under(*Arm(AttentionMode.OFF, mlp=False).edits(recording))
    kept = half_step_retention(silent)
    assert (
        float(abs(kept.attention_nuclear_retention - 1).max())
        == float(abs(kept.mlp_nuclear_retention - 1).max())
        == 0.0
    )


def test_closed_forms_along_the_tokens() -> None:
    n = 12
    waves = np.stack([np.cos(2 * np.pi * 5 * np.arange(n) / n), np.sin(2 * np.pi * 5 * np.arange(n) / n)], 1)
    found = fourier_spectrum(path_of(waves, waves + np.array([3.0, 0.0])), include_first_token=True, cutoff=0.5)
    stream = found.isel(prompt=0).sel(coordinates="residual stream")
    assert stream.high_frequency_share.values == pytest.approx([1, 12 / (12 + 9 * 12)])
    assert stream.high_frequency_share_of_variation.values == pytest.approx([1, 1])
    assert stream.mean_token_shift.values[1] == pytest.approx(1)  # all tokens move alike
    assert stream.band_power_share.values[0] == pytest.approx([0, 0, 0, 0, 0, 0, 1, 0])  # 10/12 lies in (3/4, 7/8]
    turned = fourier_spectrum(path_of(waves, -waves), include_first_token=True)
    assert turned.mean_token_shift.values[1] == pytest.approx(0, abs=1e-15)


def test_a_linear_trend_has_the_share_that_the_docstring_says() -> None:
    n = 512
    trend = np.stack([np.arange(n) + 1.0, np.zeros(n)], 1)
    found = fourier_spectrum(path_of(trend), include_first_token=True).sel(coordinates="residual stream")
    assert found.high_frequency_share_of_variation.item() == pytest.approx(6 / (math.pi * n), rel=0.02)


def test_nulls_are_means_over_all_orders() -> None:
    x = np.random.default_rng(0).standard_normal((5, 3))
    path = fourier_spectrum(path_of(x), include_first_token=True, cutoff=0.5).sel(coordinates="residual stream")
    orders = [path_of(x[list(order)]) for order in itertools.permutations(range(5))]
    found = [fourier_spectrum(each, include_first_token=True).sel(coordinates="residual stream") for each in orders]
    for name in ("high_frequency_share", "high_frequency_share_of_variation"):
        assert path[f"{name}_null"].item() == pytest.approx(np.mean([each[name].item() for each in found]), rel=1e-12)


def test_the_null_of_the_shift_is_that_of_random_signs() -> None:
    x, moves = np.random.default_rng(1).standard_normal((2, 4, 3))
    squares = []
    for signs in itertools.product((1, -1), repeat=4):
        found = fourier_spectrum(path_of(x, x + moves * np.array(signs)[:, None]), include_first_token=True)
        squares.append(float(found.mean_token_shift[1, 0, 1]) ** 2)
    assert float(found.mean_token_shift_null[1, 0, 1]) == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-12)


def test_tokens_that_do_not_move_have_no_shift() -> None:
    x = np.random.default_rng(2).standard_normal((5, 3))
    assert np.isnan(fourier_spectrum(path_of(x, x)).mean_token_shift.values[1]).all()


def test_the_chunk_size_changes_nothing() -> None:
    model, inputs = tiny_model("gpt2").double(), inputs_of("gpt2", batch=5, n=12)
    for function in (cloud_spectrum, fourier_spectrum, half_step_retention):
        whole, single = (function(record(model, inputs, batch_size=size)) for size in (5, 2))
        for name in whole.data_vars:
            np.testing.assert_allclose(single[name], whole[name], rtol=1e-9, atol=1e-9)


def test_bad_input_is_refused() -> None:
    x = np.random.default_rng(3).standard_normal((3, 2))
    with pytest.raises(HelmscopeError, match="prompt 0 has 2 tokens that count, but its spectrum needs at least 3"):
        cloud_spectrum(path_of(x))
    with pytest.raises(HelmscopeError, match=r"3 tokens that count, and no frequency above the cutoff of 0\.8"):
        fourier_spectrum(path_of(x), include_first_token=True, cutoff=0.8)
    with pytest.raises(HelmscopeError, match="bands"):
        fourier_spectrum(path_of(x), bands=0)
    y = x.copy()
    y[2, 0] = np.nan
    with pytest.raises(HelmscopeError, match="hold NaN or infinite entries"):
        cloud_spectrum(path_of(y), include_first_token=True)
