"""Kernels of heads as operators: spectra, lags and filters against loops, SciPy and closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import linalg

from helmscope.fields.attention import SA
from helmscope.intervene import ReplaceKernel
from helmscope.models.record import record
from helmscope.observe import KernelLag, KernelSpectrum, head_quantiles, kernel_lag, kernel_spectrum
from helmscope.observe.kernel_lag import mean_lag, toeplitz_share, white_noise_high_frequency_share
from helmscope.solve.integrate import integrate
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 0, 0], [8, 9, 10, 11, 12, 13], [3, 4, 5, 6, 7, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
}


def random_kernel(*shape: int, causal: bool, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(*shape, shape[-1], dtype=F64, generator=torch.Generator().manual_seed(seed))
    if causal:
        logits = logits.masked_fill(torch.ones(shape[-1], shape[-1], dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1)


def eager_weights(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """The weights that the model itself returns, (text, head, n, n) of every layer."""
    model.set_attn_implementation("eager")  # type: ignore[operator]
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    return [each.double().numpy() for each in out.attentions]


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_spectra_and_lags_of_a_model_against_its_own_weights(family: str) -> None:
    model = tiny_model(family).double()
    recording = record(model, PADDED)
    spectra, lags = kernel_spectrum(recording), kernel_lag(recording)
    for layer, weights in enumerate(eager_weights(model, PADDED)):
        for prompt, length in enumerate((4, 6, 5)):
            for head in range(4):
                a = weights[prompt, head, :length, :length]
                at = {"layer": layer, "prompt": prompt, "head": head}
                for number, operator in enumerate((a, np.eye(length) + a)):
                    s = linalg.svdvals(operator)
                    found = spectra.isel(at).isel(operator=number)
                    assert float(found.nuclear_retention) == pytest.approx(s.sum() / length, rel=1e-5)
                    assert float(found.stable_rank) == pytest.approx((s**2).sum() / s[0] ** 2, rel=1e-5)
                    assert float(found.log_condition_number) == pytest.approx(math.log(s[0] / s[-1]), rel=1e-3)
                    own = sum(abs(i - j) * a[i, j] for i in range(length) for j in range(length)) / length
                    assert float(lags.mean_lag.isel(at)) == pytest.approx(own, rel=1e-5)


def test_the_chunk_size_changes_nothing() -> None:
    model = tiny_model("gpt2").double()
    inputs = inputs_of("gpt2", batch=5, n=12)
    instruments = KernelSpectrum(), KernelLag()
    whole, single = (record(model, inputs, batch_size=size).replay(*instruments) for size in (5, 2))
    for name in whole:
        for variable in whole[name].data_vars:
            np.testing.assert_allclose(single[name][variable], whole[name][variable], rtol=1e-12, atol=1e-12)


def test_averaging_and_the_identity() -> None:
    run = integrate(SA(beta=0.0), torch.eye(8, dtype=F64).expand(1, 8, 8), times=[0.0])
    found = kernel_spectrum(run).squeeze()
    assert found.nuclear_retention.values == pytest.approx([1 / 8, 1 + 1 / 8])
    assert found.collapse_residual_frobenius.values[0] == pytest.approx(0, abs=1e-12)
    assert found.numerically_singular.values.tolist() == [1, 0]
    assert found.log_condition_number.values[1] == pytest.approx(math.log(2))
    lag = kernel_lag(run).squeeze()
    assert (
        float(lag.mean_lag)
        == float(lag.mean_lag_null)
        == pytest.approx(sum(abs(i - j) for i in range(8) for j in range(8)) / 64)
    )
    assert float(lag.toeplitz_share) == float(lag.toeplitz_share_null) == pytest.approx(1)
    assert lag.white_noise_high_frequency_share.values[0] == pytest.approx(0, abs=1e-20)


def test_a_causal_average_has_the_spectrum_of_a_triangular_matrix() -> None:
    model = tiny_model("gpt2").double()
    recording = record(model, inputs_of("gpt2", batch=2, n=10))

    def average(weights: torch.Tensor) -> torch.Tensor:
        causal = torch.ones_like(weights).tril()
        return causal / causal.sum(-1, keepdim=True)

    found = kernel_spectrum(recording.under(ReplaceKernel(function=average)))
    a = np.tril(np.ones((10, 10))) / np.arange(1, 11)[:, None]
    s = linalg.svdvals(a)
    assert found.nuclear_retention.isel(operator=0).values == pytest.approx(np.full((3, 2, 4), s.sum() / 10), rel=1e-12)
    lag = kernel_lag(recording.under(ReplaceKernel(function=average)))
    assert lag.mean_lag.values == pytest.approx(np.full((3, 2, 4), np.mean(np.arange(10)) / 2), rel=1e-12)
    assert lag.mean_lag_null.values == pytest.approx(lag.mean_lag.values, rel=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_the_toeplitz_share_against_loops(causal: bool) -> None:
    kernel = random_kernel(3, 6, causal=causal)
    share, _ = toeplitz_share(kernel)
    for k in range(3):
        a = kernel[k].numpy()
        fitted = linalg.toeplitz(
            [np.mean(np.diagonal(a, -d)) for d in range(6)], [np.mean(np.diagonal(a, d)) for d in range(6)]
        )
        assert float(share[k]) == pytest.approx((fitted**2).sum() / (a**2).sum(), rel=1e-12)
        # the nearest Toeplitz matrix: what is left is orthogonal to it
        assert ((a - fitted) * fitted).sum() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_the_null_of_the_toeplitz_share_is_the_mean_over_all_permutations(causal: bool) -> None:
    kernel = random_kernel(3, causal=causal, seed=4)
    rows = [list(itertools.permutations(range(i + 1 if causal else 3))) for i in range(3)]
    shares = []
    for orders in itertools.product(*rows):
        permuted = torch.zeros_like(kernel)
        for i, order in enumerate(orders):
            permuted[i, : len(order)] = kernel[i, list(order)]
        shares.append(float(toeplitz_share(permuted)[0]))
    assert float(toeplitz_share(kernel)[1]) == pytest.approx(np.mean(shares), rel=1e-12)


def test_the_lag_against_loops() -> None:
    kernel = random_kernel(2, 5, causal=True)
    own, equal = mean_lag(kernel)
    for k, i in itertools.product(range(2), range(5)):
        assert float(own[k, i]) == pytest.approx(sum(float(kernel[k, i, j]) * (i - j) for j in range(i + 1)), abs=1e-15)
        assert float(equal[k, i]) == pytest.approx(i / 2)
    full = mean_lag(random_kernel(5, causal=False))[1]
    assert full.tolist() == pytest.approx([sum(abs(i - j) for j in range(5)) / 5 for i in range(5)])


@pytest.mark.parametrize("n", [7, 8])
@pytest.mark.parametrize("cutoff", [0.0, 0.5, 0.6])
def test_passed_white_noise_against_samples_and_an_exact_transform(n: int, cutoff: float) -> None:
    operator = torch.randn(n, n, dtype=F64, generator=torch.Generator().manual_seed(n))
    transform = linalg.dft(n, scale="sqrtn") @ operator.numpy()
    frequency = np.minimum(np.arange(n), n - np.arange(n)) * 2 / n
    power = (abs(transform) ** 2).sum(1)
    expected = power[frequency > cutoff + 1e-12].sum() / power.sum()
    assert float(white_noise_high_frequency_share(operator, cutoff)) == pytest.approx(expected, rel=1e-12)
    noise = np.random.default_rng(0).standard_normal((n, 20_000))
    seen = (abs(transform @ noise) ** 2).sum(1)
    assert seen[frequency > cutoff + 1e-12].sum() / seen.sum() == pytest.approx(expected, abs=0.01)


def test_a_low_pass_and_a_high_pass_kernel() -> None:
    """Circulant kernels have a gain at every frequency, that of white noise is 1."""
    n = 64
    one = np.eye(n)
    angle = 2 * np.pi * np.arange(n) / n
    high = np.minimum(angle, 2 * np.pi - angle) > np.pi / 2 + 1e-12
    averaged = sum(np.exp(-1j * k * angle) for k in range(4)) / 4
    gains = {"average of 4": abs(averaged) ** 2, "difference": 2 - 2 * np.cos(angle), "shift": np.ones(n)}
    kernels = {
        "average of 4": sum(np.roll(one, k, axis=0) for k in range(4)) / 4,
        "difference": one - np.roll(one, 1, axis=0),
        "shift": np.roll(one, 3, axis=0),
    }
    found = {
        name: float(white_noise_high_frequency_share(torch.from_numpy(kernel))) for name, kernel in kernels.items()
    }
    for name, gain in gains.items():
        assert found[name] == pytest.approx(gain[high].sum() / gain.sum(), rel=1e-12)
    assert found["average of 4"] < 0.1 < 31 / 64 == found["shift"] < 0.8 < found["difference"]


def test_quantiles_over_heads() -> None:
    measured = kernel_spectrum(record(tiny_model("gpt2").double(), inputs_of("gpt2", batch=3, n=9)))
    found = head_quantiles(measured, levels=[0.25, 1.0])
    values = measured.log_condition_number.transpose("prompt", "operator", "layer", "head").values.reshape(3, 2, 12)
    np.testing.assert_array_equal(
        found.log_condition_number.sel(quantile=1.0).transpose("prompt", "operator"), values.max(-1)
    )
    np.testing.assert_array_equal(
        found.log_condition_number.sel(quantile=0.25).transpose("prompt", "operator"), np.sort(values, -1)[..., 2]
    )


def test_bad_input_is_refused() -> None:
    with pytest.raises(HelmscopeError, match="cutoff is 1, but it must be below 1, the highest frequency"):
        KernelLag(cutoff=1.0)
    measured = kernel_spectrum(record(tiny_model("gpt2"), inputs_of("gpt2", batch=2, n=5)))
    with pytest.raises(HelmscopeError, match="numbers between 0 and 1"):
        head_quantiles(measured, levels=[2.0])
    with pytest.raises(HelmscopeError, match="quantiles are over layers and heads"):
        head_quantiles(measured.isel(layer=0, head=0))
