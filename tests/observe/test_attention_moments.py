"""Drift and diffusion of attention heads against plain loops with d x d matrices, and against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.fields.attention import SA, USA
from helmscope.fields.multihead import MultiHead
from helmscope.geometry.sphere import retract
from helmscope.models.record import record
from helmscope.observe.attention_diffusion import (
    AttentionDiffusion,
    AttentionDiffusionSpectrum,
    attention_diffusion,
    attention_diffusion_spectrum,
    spectrum_statistics,
)
from helmscope.observe.attention_drift import AttentionDrift, attention_drift
from helmscope.observe.head_moments import HEADS_NEED
from helmscope.observe.mobility_test import mobility_test
from helmscope.solve.integrate import integrate
from helmscope.types import AttentionTensors, Half, HelmscopeError, ReplayContext
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
ALL = 100  # more tokens than any prompt here has
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 12], [3, 4, 5, 6, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
}


class Seen(hs.Instrument):
    """Keeps the tensors of every layer."""

    name = "seen"
    needs = HEADS_NEED

    def __init__(self) -> None:
        self.layers = []

    def attention(self, context, tensors):
        self.layers.append((context, tensors))
        self.keep(context, {"length": tensors.radius.mean(-1)})


def x_of(*shape, seed=0):
    return retract(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64))


def two_heads():
    g = torch.Generator().manual_seed(1)
    matrices = torch.randn(4, 4, 4, generator=g, dtype=F64)
    return MultiHead([SA(beta=2.0, query_key=matrices[k], value=matrices[k + 2]) for k in (0, 1)], scale=0.7)


def oracle(context, tensors):
    """All quantities of one layer by loops over prompts, heads, tokens and keys, with d x d matrices."""
    kernel, value, output = (t.numpy() for t in (tensors.kernel, tensors.head_values, tensors.output_matrix))
    if kernel.ndim == 3:
        kernel, value, output = kernel[:, None], value[:, None], output[None]
    rows, heads, n, _ = kernel.shape
    d = output.shape[1]
    names = (
        "drift",
        "drift_ratio",
        "nu_token_sampling",
        "nu_random_values",
        "anisotropy",
        "sigma_rank",
        "sigma_rank_bound",
    )
    per_head = {name: np.full((rows, heads, n), np.nan) for name in names}
    names = (
        "total_drift",
        "total_drift_ratio",
        "total_nu_token_sampling",
        "total_nu_random_values",
        "total_nu_as_printed",
    )
    names += ("total_anisotropy", "total_sigma_rank", "smallest_eigenvalue", "effective_dimension_share")
    total = {name: np.full((rows, n), np.nan) for name in names}
    moved = np.zeros((rows, n, d))
    for b in range(rows):
        for i in range(n):
            x = tensors.direction[b, i].numpy()
            y = float(tensors.radius[b, i])
            t = np.eye(d) - np.outer(x, x) - (np.ones((d, d)) / d if context.centered else 0)
            dim = d - (2 if context.centered else 1)
            summed, summed_b = np.zeros((d, d)), np.zeros((d, d))
            for h in range(heads):
                weights, vectors = kernel[b, h, i], [output[h] @ v for v in value[b, h]]
                weights = weights / weights.sum() if abs(weights.sum() - 1) < 1e-4 else weights
                mean = sum(p * v for p, v in zip(weights, vectors, strict=True))
                sink = 1 - weights.sum()
                cov = sum(p * np.outer(v - mean, v - mean) for p, v in zip(weights, vectors, strict=True))
                cov = cov + max(sink, 0) * np.outer(mean, mean)
                center = mean / weights.sum()
                spread = sum(p * p * np.outer(v - center, v - center) for p, v in zip(weights, vectors, strict=True))
                sigma, sigma_b = cov / 2 / y**2, spread / 2 / y**2
                tangent = t @ sigma @ t
                eigenvalues = np.linalg.eigvalsh(tangent)
                per_head["drift"][b, h, i] = np.linalg.norm(t @ mean) / y
                per_head["nu_token_sampling"][b, h, i] = np.trace(tangent) / dim
                per_head["nu_random_values"][b, h, i] = np.trace(t @ sigma_b @ t) / dim
                per_head["sigma_rank"][b, h, i] = 0
                if (weights > 0).sum() > 1 or sink > 1e-4:
                    per_head["drift_ratio"][b, h, i] = np.linalg.norm(t @ mean) / y / math.sqrt(np.trace(tangent))
                    per_head["anisotropy"][b, h, i] = np.trace(tangent @ tangent) / np.trace(tangent) ** 2
                    per_head["sigma_rank"][b, h, i] = (eigenvalues > 1e-6 * eigenvalues.max()).sum()
                per_head["sigma_rank_bound"][b, h, i] = min((weights > 0).sum() + (sink > 1e-4) - 1, value.shape[-1])
                summed, summed_b = summed + sigma, summed_b + sigma_b
            tangent = t @ summed @ t
            moved[b, i] = t @ tensors.write[b, i].numpy() / y
            total["total_drift"][b, i] = np.linalg.norm(moved[b, i])
            total["total_nu_token_sampling"][b, i] = np.trace(tangent) / dim
            total["total_nu_random_values"][b, i] = np.trace(t @ summed_b @ t) / dim
            total["total_nu_as_printed"][b, i] = np.trace(summed) / d
            eigenvalues = np.sort(np.linalg.eigvalsh(tangent))[-dim:]
            total["total_sigma_rank"][b, i] = 0
            if eigenvalues[-1] > 1e-20:
                total["total_drift_ratio"][b, i] = total["total_drift"][b, i] / math.sqrt(np.trace(tangent))
                anisotropy = (eigenvalues**2).sum() / eigenvalues.sum() ** 2
                total["total_anisotropy"][b, i] = anisotropy
                total["effective_dimension_share"][b, i] = 1 / anisotropy / dim
                total["total_sigma_rank"][b, i] = (eigenvalues > 1e-6 * eigenvalues[-1]).sum()
                total["smallest_eigenvalue"][b, i] = max(eigenvalues[0], 0) / eigenvalues.mean()
    return per_head, total, moved


def check_against_loops(system):
    seen = Seen()
    measured = system.replay(
        seen, AttentionDrift(), AttentionDiffusion(), AttentionDiffusionSpectrum(sampled_tokens=ALL)
    )
    axis = system.layer_axis
    for number, (context, tensors) in enumerate(seen.layers):
        per_head, total, moved = oracle(context, tensors)
        weights = (
            np.ones(total["total_nu_token_sampling"].shape) if context.weights is None else context.weights.numpy()
        )

        def mean(values, m):
            m = np.broadcast_to(m, values.shape) * np.isfinite(values)
            return np.where(m > 0, m * np.nan_to_num(values), 0).sum(-1) / m.sum(-1)

        expected = {name: mean(value, weights[:, None]) for name, value in per_head.items()}
        expected |= {name: mean(value, weights) for name, value in total.items()}
        average = (weights[..., None] * moved).sum(1) / weights.sum(1)[:, None]
        expected["norm_of_mean_drift"] = np.linalg.norm(average, axis=-1)
        for dataset in (
            measured[name] for name in ("attention_drift", "attention_diffusion", "attention_diffusion_spectrum")
        ):
            for name in dataset.data_vars:
                if name in expected:
                    actual = dataset[name].isel({axis: number}).values
                    wanted = expected.pop(name).reshape(actual.shape)
                    np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-12, err_msg=name)
                    assert dataset[name].attrs["long_name"]
        assert not expected


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "gpt_oss"])
def test_models_agree_with_loops(family):
    """LayerNorm on S^(d-2), RMSNorm with grouped values, post-norm, and a sink outside the tokens."""
    check_against_loops(record(tiny_model(family, dtype=F64), inputs_of(family, batch=2, n=5)))


def test_padding_is_neither_sampled_nor_counted():
    check_against_loops(record(tiny_model("bert", dtype=F64), PADDED))


@pytest.mark.parametrize("field", [two_heads(), SA(beta=3.0)], ids=["MultiHead", "SA"])
def test_simulations_agree_with_loops(field):
    check_against_loops(integrate(field, x_of(2, 5, 4), [0.0, 0.2]))


def test_the_oracle_of_the_theory():
    """theory.md 000-2: Sigma_A = [[.545, .165], [.165, .105]], mode B [[.1279, .0423], [.0423, .0351]]."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=F64)
    bias = torch.tensor([0.5, 0.3, 0.2], dtype=F64).log().expand(3, 3)
    value = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=F64)
    run = integrate(SA(beta=0.0, bias=bias, value=value), x, [0.0])
    noise, drift = attention_diffusion(run), attention_drift(run)
    assert noise.nu_token_sampling.item() == pytest.approx((0.105 + 0.545 + 0.105) / 3, abs=1e-14)
    assert noise.nu_random_values.item() == pytest.approx((0.0351 + 0.1279 + 0.0351) / 3, abs=1e-14)
    assert noise.total_nu_as_printed.item() == pytest.approx((0.545 + 0.105) / 2, abs=1e-14)
    assert drift.drift.item() == pytest.approx((0.3 + 0.9 + 0.3) / 3, abs=1e-14)  # W_V m = (.9, .3)
    spectrum = attention_diffusion_spectrum(run, sampled_tokens=3)
    assert spectrum.anisotropy.item() == pytest.approx(1.0)  # the tangent space has one dimension
    assert spectrum.token_count.item() == 3


def test_chunks_change_nothing():
    model = tiny_model("gpt2", dtype=F64)
    instruments = AttentionDrift(), AttentionDiffusion(), AttentionDiffusionSpectrum(sampled_tokens=2, seed=3)
    whole = record(model, PADDED).replay(*instruments)
    small = record(model, PADDED, batch_size=1).replay(*instruments)
    for name, dataset in whole.items():
        for quantity, values in dataset.data_vars.items():
            np.testing.assert_allclose(small[name][quantity].values, values.values, rtol=1e-9, atol=1e-13)


def test_single_precision_is_close():
    ids = inputs_of("gpt2", batch=2, n=9)
    wide, narrow = (attention_diffusion(record(tiny_model("gpt2", dtype=dtype), ids)) for dtype in (F64, torch.float32))
    np.testing.assert_allclose(narrow.total_nu_token_sampling.values, wide.total_nu_token_sampling.values, rtol=2e-5)
    np.testing.assert_allclose(narrow.nu_random_values.values, wide.nu_random_values.values, rtol=1e-4)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_no_spread_means_no_ratio(dtype):
    """Identical tokens, and rows of entropy 0: nu is 0 and what divides by it is NaN."""
    same = x_of(1, 1, 3).to(dtype).expand(2, 4, 3)
    sharp = integrate(SA(beta=1e6), x_of(2, 4, 3).to(dtype), [0.0])
    for run in (integrate(SA(beta=1.0), same, [0.0]), sharp):
        assert attention_diffusion(run).nu_token_sampling.values.tolist() == [[0.0, 0.0]]
        assert np.isnan(attention_drift(run).drift_ratio.values).all()
        assert np.isnan(attention_diffusion_spectrum(run).effective_dimension_share.values).all()
    assert attention_drift(sharp).drift.values.max() < 1e-6


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_equal_tokens_of_a_model_have_no_spectrum(family):
    """Rotary phases leave values alone, so that they are equal up to rounding, which has no rank and no anisotropy."""
    recording = record(tiny_model(family), torch.full((3, 9), 5))
    found = attention_diffusion_spectrum(recording)
    assert (found.total_sigma_rank == 0).all()
    for name in ("anisotropy", "total_anisotropy", "smallest_eigenvalue", "effective_dimension_share_of_range"):
        assert np.isnan(found[name].values).all(), name
    assert np.isnan(mobility_test(recording, sampled_tokens=2).antisymmetric_share.values).all()
    differ = attention_diffusion_spectrum(record(tiny_model(family), torch.arange(5, 14).expand(3, 9)))
    assert (differ.total_sigma_rank > 0).all()


def test_rows_above_1_have_a_drift_and_no_sampling_covariance():
    run = integrate(USA(beta=4.0), x_of(1, 4, 3), [0.0])
    assert np.isnan(attention_diffusion(run).nu_token_sampling.values).all()
    assert np.isnan(attention_diffusion_spectrum(run).total_sigma_rank.values).all()
    assert attention_drift(run).drift.item() > 0


def test_the_uniform_kernel_has_its_whole_drift():
    """theory.md 000-11: it is bistochastic, and its tangential mean is the clustering drift |P_x mean|."""
    x = x_of(1, 6, 3)
    drift = attention_drift(integrate(SA(beta=0.0), x, [0.0]))
    mean = x[0].mean(0).numpy()
    expected = np.mean([np.linalg.norm(mean - (mean @ each) * each) for each in x[0].numpy()])
    assert drift.drift.item() == pytest.approx(expected, abs=1e-13)


def test_spectra_with_known_answers():
    isotropic = spectrum_statistics(torch.tensor([0.0, 2.0, 2.0, 2.0], dtype=F64), 3, 1e-6)
    assert [
        isotropic[name].item()
        for name in ("anisotropy", "sigma_rank", "smallest_eigenvalue", "effective_dimension_share")
    ] == (pytest.approx([1 / 3, 3, 1, 1]))
    single = spectrum_statistics(torch.tensor([0.0, 0.0, 0.0, 5.0], dtype=F64), 3, 1e-6)
    assert [
        single[name].item() for name in ("anisotropy", "sigma_rank", "smallest_eigenvalue", "effective_dimension_share")
    ] == (pytest.approx([1, 1, 0, 1 / 3]))
    # eigenvalues 0, 1, 3 of a tangent space of three dimensions: the range has two, of mean 2
    low = spectrum_statistics(torch.tensor([0.0, 0.0, 1.0, 3.0], dtype=F64), 3, 1e-6)
    names = ("sigma_rank", "smallest_eigenvalue", "smallest_eigenvalue_of_range", "effective_dimension_share_of_range")
    assert [low[name].item() for name in names] == pytest.approx([2, 0, 1 / 2, 16 / 10 / 2])
    for full in (isotropic, spectrum_statistics(torch.tensor([1.0, 2.0, 5.0], dtype=F64), 3, 1e-6)):
        for name in (
            "smallest_eigenvalue",
            "effective_dimension_share",
        ):  # at full rank the range is the whole tangent space
            assert full[f"{name}_of_range"].item() == pytest.approx(full[name].item(), rel=1e-14)
    nothing = spectrum_statistics(torch.zeros(4), 3, 1e-6)
    assert nothing.pop("sigma_rank") == 0
    assert all(math.isnan(value) for value in nothing.values())
    with pytest.raises(HelmscopeError, match="must be at least dim"):
        spectrum_statistics(torch.zeros(2), 3, 1e-6)


def test_a_state_that_is_not_finite_is_named():
    x = x_of(1, 3, 2).expand(2, 3, 2).clone()
    x[1, 2, 0] = torch.nan
    context = ReplayContext(4, Half.ATTENTION, 0.0, slice(5, 7))
    even = torch.full((2, 3, 3), 1 / 3, dtype=F64)
    tensors = AttentionTensors(x, x, even, x, x, x, x, torch.eye(2, dtype=F64))
    with pytest.raises(HelmscopeError, match=r"state of text 6 .* token 2 in layer 4"):
        AttentionDrift().attention(context, tensors)


@pytest.mark.parametrize(("name", "value"), [("sampled_tokens", 0), ("seed", -1), ("top", 0), ("tol", 0.0)])
def test_arguments_are_checked(name, value):
    with pytest.raises(HelmscopeError, match=name):
        AttentionDiffusionSpectrum(**{name: value})
