"""Closed forms of operators on tokens against singular values of NumPy, plain sums and random draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from helmscope import theory
from helmscope.types import HelmscopeError


def spectrum(matrix: np.ndarray, k: int) -> np.ndarray:
    return np.linalg.svd(np.linalg.matrix_power(matrix, k), compute_uv=False)


@pytest.mark.parametrize("tokens", [1, 2, 5, 24])
@pytest.mark.parametrize("laziness", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_lazy_averaging(tokens: int, laziness: float, k: int) -> None:
    average = np.full((tokens, tokens), 1 / tokens)
    s = spectrum((1 - laziness) * np.eye(tokens) + laziness * average, k)
    assert theory.lazy_averaging_retention(tokens, laziness, applications=k) == pytest.approx(
        s.sum() / tokens, abs=1e-13
    )
    inverse = 1 / theory.lazy_averaging_condition_number(laziness, applications=k)
    assert tokens == 1 or inverse == pytest.approx(s[-1] / s[0], abs=1e-13)
    assert theory.averaging_retention(tokens) == pytest.approx(spectrum(average, k).sum() / tokens, abs=1e-13)


def test_the_numbers_of_the_derivation() -> None:
    assert theory.lazy_averaging_retention(4, 0.5) == 0.625
    assert theory.lazy_averaging_condition_number(0.5) == 2.0
    found = [round(theory.softmax_retention(tokens), 5) for tokens in (128, 512, 1024)]
    assert found == [0.09835, 0.04917, 0.03477]
    assert theory.softmax_retention(100) == pytest.approx(8 / (3 * math.pi) * math.sqrt((math.e - 1) / 100), rel=1e-14)
    assert theory.retrieval_retention() == pytest.approx(0.773192656379286, abs=1e-12)
    assert theory.retrieval_rank_share() == pytest.approx(1 - 1 / math.e, rel=1e-15)
    root = sum(math.sqrt(m) * math.exp(-1) / math.factorial(m) for m in range(60))
    assert theory.retrieval_retention() == pytest.approx(root, abs=3e-14)  # the rounding of the transform


def law_of_generation(k: int, most: int = 200) -> np.ndarray:
    """P(Z_k = m) by sums over the size of the generation before, whose offspring are Poisson."""
    law = np.zeros(most)
    law[1] = 1.0
    for _ in range(k):
        law = sum(law[j] * stats.poisson.pmf(np.arange(most), j) for j in range(most))
    return np.asarray(law)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_retrieval_against_sums_over_generations(k: int) -> None:
    law = law_of_generation(k)
    assert theory.retrieval_rank_share(applications=k) == pytest.approx(1 - law[0], abs=1e-12)
    assert theory.retrieval_retention(applications=k) == pytest.approx(np.sqrt(np.arange(200)) @ law, abs=1e-9)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_retrieval_at_random_lands_on_its_limit(k: int) -> None:
    rng, tokens, found = np.random.default_rng(k), 2_000, []
    for _ in range(40):
        chosen, to = rng.integers(tokens, size=tokens), np.arange(tokens)
        for _ in range(k):
            to = chosen[to]
        count = np.bincount(to, minlength=tokens)
        found.append([np.sqrt(count).sum() / tokens, (count > 0).mean()])
    mean, error = np.mean(found, 0), np.std(found, 0) / math.sqrt(40)
    expected = [theory.retrieval_retention(applications=k), theory.retrieval_rank_share(applications=k)]
    assert (abs(mean - expected) < 4 * error + 0.3 / math.sqrt(tokens) * k).all()


@pytest.mark.parametrize("k", [1, 2])
def test_powers_of_noise_have_the_mean_of_their_law(k: int) -> None:
    """The term of the noise alone, at a size where terms of order 1/T are 1 %."""
    rng, tokens = np.random.default_rng(0), 300
    found = [spectrum(rng.standard_normal((tokens, tokens)) / math.sqrt(tokens), k).mean() for _ in range(4)]
    without = theory.softmax_retention(tokens, applications=k) - (k == 2) / tokens
    assert np.mean(found) == pytest.approx(without / ((math.e - 1) / tokens) ** (k / 2), rel=0.01)


def test_softmax_approaches_its_limit() -> None:
    rng, ratios = np.random.default_rng(1), []
    for tokens in (64, 512):
        weights = np.exp(rng.standard_normal((tokens, tokens)))
        rho = np.linalg.svd(weights / weights.sum(1, keepdims=True), compute_uv=False).sum() / tokens
        ratios.append(abs(rho / theory.softmax_retention(tokens) - 1))
    assert ratios[1] < min(ratios[0], 0.05)
    assert theory.softmax_retention(512, applications=5) == 1 / 512


def test_the_condition_of_softmax_has_the_quantiles_of_its_law() -> None:
    rng, tokens, below = np.random.default_rng(2), 80, []
    for _ in range(300):
        weights = np.exp(rng.standard_normal((tokens, tokens)))
        s = np.linalg.svd(weights / weights.sum(1, keepdims=True), compute_uv=False)
        below.append([s[0] / s[-1] <= theory.softmax_condition_number_quantile(tokens, q) for q in (0.25, 0.5, 0.9)])
    assert np.mean(below, 0) == pytest.approx([0.25, 0.5, 0.9], abs=0.1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: theory.lazy_averaging_retention(4, 1.5), "laziness is 1.5, but it must be between 0 and 1"),
        (lambda: theory.averaging_retention(0), "tokens"),
        (lambda: theory.softmax_retention(8, applications=0), "applications"),
        (lambda: theory.softmax_condition_number_quantile(8, 1.0), "level is 1, but it must be above 0 and below 1"),
        (lambda: theory.retrieval_retention(applications=65), "applications is 65, but it must be at most 64"),
    ],
)
def test_bad_input_is_refused(call: object, text: str) -> None:
    with pytest.raises(HelmscopeError, match=text):
        call()  # type: ignore[operator]
