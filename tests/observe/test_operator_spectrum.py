"""Spectra of matrices and operators against NumPy, plain loops and closed forms, and the synthetic operators."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import linalg

from helmscope import theory
from helmscope.observe import SyntheticOperator, matrix_spectrum, operator_spectrum, synthetic_operators
from helmscope.stats import quantile_interval
from helmscope.types import HelmscopeError

F64 = torch.float64


def by_hand(x: np.ndarray) -> dict[str, float]:
    """All quantities of one matrix, by loops and SciPy."""
    s = linalg.svdvals(x)
    size = sum(float(value) ** 2 for value in x.ravel())
    mean = x.mean(0)
    entropy = {power: -sum(p * math.log(p) for p in s**power / (s**power).sum() if p > 0) for power in (1, 2)}
    return {
        "effective_rank": math.exp(entropy[1]),
        "effective_rank_of_squares": math.exp(entropy[2]),
        "participation_ratio": (s**2).sum() ** 2 / (s**4).sum(),
        "stable_rank": size / s[0] ** 2,
        "nuclear_rank": s.sum() / s[0],
        "nuclear_norm": s.sum(),
        "log_condition_number": math.log(s[0] / s[-1]),
        "numerically_singular": 0.0,
        "dirichlet_energy": sum(((x[i + 1] - x[i]) ** 2).sum() for i in range(len(x) - 1)) / size,
        "collapse_residual_frobenius": math.sqrt(sum(((row - mean) ** 2).sum() for row in x) / size),
    }


def test_a_matrix_against_loops() -> None:
    x = torch.randn(3, 7, 5, dtype=F64, generator=torch.Generator().manual_seed(0)) + 1
    found = matrix_spectrum(x)
    for k in range(3):
        expected = by_hand(x[k].numpy())
        assert {name: pytest.approx(float(found[name][k]), rel=1e-12) for name in expected} == expected
        alone = matrix_spectrum(x[k])
        assert all(float(alone[name]) == float(found[name][k]) for name in expected)


def test_closed_forms_of_matrices() -> None:
    same = matrix_spectrum(torch.ones(6, 4))
    assert float(same["stable_rank"]) == pytest.approx(1, abs=1e-12)
    assert (float(same["dirichlet_energy"]), float(same["collapse_residual_frobenius"])) == (0.0, 0.0)
    assert float(same["numerically_singular"]) == 1
    assert float(same["log_condition_number"]) == pytest.approx(-math.log(4 * 2**-52))
    alternating = torch.tensor([[1.0], [-1.0]]).repeat(10, 1)
    assert float(matrix_spectrum(alternating)["dirichlet_energy"]) == pytest.approx(4 * 19 / 20)
    assert float(matrix_spectrum(alternating)["collapse_residual_frobenius"]) == pytest.approx(1)
    ranks = matrix_spectrum(torch.eye(5))
    for name in ("effective_rank", "effective_rank_of_squares", "participation_ratio", "stable_rank", "nuclear_rank"):
        assert float(ranks[name]) == pytest.approx(5)


def test_a_removed_mean_is_no_singular_direction() -> None:
    x = torch.randn(6, 9, dtype=F64, generator=torch.Generator().manual_seed(1))
    centered = x - x.mean(0)
    assert float(matrix_spectrum(centered)["numerically_singular"]) == 1
    s = linalg.svdvals(centered.numpy())
    assert float(matrix_spectrum(centered, rank=5)["log_condition_number"]) == pytest.approx(
        math.log(s[0] / s[4]), rel=1e-10
    )
    assert math.isnan(float(matrix_spectrum(torch.zeros(3, 2))["stable_rank"]))


@pytest.mark.parametrize("signal", [False, True])
def test_an_operator_against_powers(signal: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(2, 6, 6, dtype=F64, generator=generator)
    x = torch.randn(2, 6, 3, dtype=F64, generator=generator) if signal else None
    found = operator_spectrum(a, signal=x, applications=[3, 1])
    for k, power in ((0, 3), (1, 1)):
        for i in range(2):
            before = np.eye(6) if x is None else x[i].numpy()
            s = linalg.svdvals(np.linalg.matrix_power(a[i].numpy(), power) @ before)
            assert float(found["nuclear_retention"][i, k]) == pytest.approx(
                s.sum() / linalg.svdvals(before).sum(), rel=1e-12
            )
            assert float(found["log_condition_number"][i, k]) == pytest.approx(math.log(s[0] / s[-1]), rel=1e-9)
            assert float(found["rank_share"][i, k]) == len(s) / 6


def test_a_retention_of_1_is_no_isometry() -> None:
    found = operator_spectrum(torch.diag(torch.tensor([1.5, 0.5])))
    assert float(found["nuclear_retention"]) == pytest.approx(1)
    assert float(found["inverse_condition_number"]) == pytest.approx(1 / 3)
    x = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(3))
    turned = operator_spectrum(SyntheticOperator.ROTATION.draw(5, seed=0), signal=x)
    assert float(turned["nuclear_retention"]) == pytest.approx(1, abs=1e-14)  # whatever the signal
    assert float(turned["log_condition_number"]) == pytest.approx(
        float(matrix_spectrum(x)["log_condition_number"]), abs=1e-12
    )


def test_averaging_singular() -> None:
    found = operator_spectrum(torch.full((4, 4), 0.25), applications=[1, 16])
    assert found["nuclear_retention"].tolist() == pytest.approx([0.25, 0.25])
    assert found["rank_share"].tolist() == [0.25, 0.25]
    assert (found["numerically_singular"] == 1).all()
    assert (found["inverse_condition_number"] == 0).all()


@pytest.fixture(scope="module")
def measured() -> object:
    return synthetic_operators(tokens=[32, 256], applications=[1, 2, 4], seeds=24)


def test_table_2_lands_on_the_closed_forms(measured: object) -> None:
    at = measured.sel(tokens=256)  # type: ignore[attr-defined]
    rho = at.nuclear_retention.mean("seed")
    for k in (1, 2, 4):
        retrieval = rho.sel(operator="retrieval", applications=k)
        assert float(retrieval) == pytest.approx(theory.retrieval_retention(applications=k), rel=0.02)
        share = float(at.rank_share.sel(operator="retrieval", applications=k).mean("seed"))
        assert share == pytest.approx(theory.retrieval_rank_share(applications=k), rel=0.04)
    mixing = rho.sel(operator="mixing").values
    expected = [theory.softmax_retention(256, applications=k) for k in (1, 2, 4)]
    assert mixing == pytest.approx(expected, rel=0.05)
    for operator in ("transport: permutation", "transport: rotation"):
        assert float(abs(rho.sel(operator=operator) - 1).max()) < 1e-12
        assert float(at.log_condition_number.sel(operator=operator).max()) < 1e-12


def test_the_condition_of_mixing_has_quantiles(measured: object) -> None:
    log_kappa = measured.log_condition_number.sel(operator="mixing", applications=1, tokens=256)  # type: ignore[attr-defined]
    interval = quantile_interval(log_kappa.values, 0.5)
    assert interval.low < math.log(theory.softmax_condition_number_quantile(256, 0.5)) < interval.high


def test_operators_are_what_they_say() -> None:
    mixing = SyntheticOperator.MIXING.draw(6, seed=1)
    assert bool((mixing > 0).all())
    assert mixing.sum(-1).tolist() == pytest.approx([1.0] * 6)
    permutation = SyntheticOperator.PERMUTATION.draw(6, seed=1)
    assert permutation.sum(0).tolist() == permutation.sum(1).tolist() == [1.0] * 6
    assert not torch.equal(mixing, SyntheticOperator.MIXING.draw(6, seed=2))
    assert torch.equal(mixing, SyntheticOperator.MIXING.draw(6, seed=1))
    # Haar: the mean of the first entry squared is 1/n, of its fourth power 3 / (n (n + 2))
    entries = np.array([float(SyntheticOperator.ROTATION.draw(3, seed=k)[0, 0]) for k in range(2000)])
    assert abs(entries.mean()) < 0.05
    assert (entries**4).mean() == pytest.approx(3 / 15, abs=0.02)


def test_the_signal_matters() -> None:
    options = {"tokens": [64], "applications": [1], "operators": [SyntheticOperator.RETRIEVAL], "seeds": 4}
    identity, normal = (synthetic_operators(signal_dim=dim, **options) for dim in (None, 16))  # type: ignore[arg-type]
    assert float(identity.nuclear_retention.mean()) < 0.82
    assert float(normal.nuclear_retention.mean()) > 0.9


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: operator_spectrum(torch.ones(2, 3)), r"operator is \(2, 3\), but it must be a tensor of shape"),
        (lambda: operator_spectrum(torch.full((2, 2), torch.nan)), "operator holds NaN"),
        (lambda: operator_spectrum(torch.eye(2), applications=[]), "applications is empty"),
        (lambda: operator_spectrum(torch.eye(2), applications=[0]), "applications"),
        (lambda: operator_spectrum(torch.eye(2), signal=torch.ones(3, 1)), r"signal is \(3, 1\)"),
        (lambda: operator_spectrum(torch.eye(2), signal=torch.zeros(2, 1)), "signal is 0"),
        (lambda: matrix_spectrum(torch.ones(3)), r"x is \(3,\)"),
        (lambda: matrix_spectrum(torch.eye(2), rank=3), r"rank is 3, but a matrix of shape \(2, 2\) has at most 2"),
        (lambda: matrix_spectrum(torch.tensor([[1.0, torch.inf]])), "x holds NaN or infinite entries"),
        (lambda: synthetic_operators(operators=["mixing"]), "operators holds 'mixing'"),  # type: ignore[list-item]
        (lambda: synthetic_operators(tokens=[]), "tokens is empty"),
        (lambda: synthetic_operators(seeds=0), "seeds"),
    ],
)
def test_bad_input_is_refused(call: object, text: str) -> None:
    with pytest.raises(HelmscopeError, match=text):
        call()  # type: ignore[operator]
