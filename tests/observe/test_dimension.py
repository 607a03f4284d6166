"""Two-NN and GRIDE against their closed forms, scikit-dimension and the densities of the ratios."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import betaln
from scipy.stats import beta, kstest

from helmscope.observe.dimension import (
    HighDimensionWarning,
    dimension_by_scale,
    dimension_by_size,
    distinct_cloud,
    gride,
    gride_of_ratios,
    neighbor_ratios,
    two_nn,
    two_nn_fit,
    two_nn_mle,
    two_nn_of_ratios,
)
from helmscope.types import HelmscopeError

QUANTILES = (1 - (np.arange(1, 1001) - 0.5) / 1000) ** -0.2  # of the ratios in dimension 5


def uniform(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embedded(x: torch.Tensor, ambient: int, seed: int = 1) -> torch.Tensor:
    """x in some of the coordinates of a rotated space."""
    frame = torch.linalg.qr(torch.randn(ambient, ambient, generator=torch.Generator().manual_seed(seed)).double())[0]
    return x @ frame[: x.shape[1]]


def points_with(ratios: np.ndarray) -> torch.Tensor:
    """Far triples on a line, at 0, 1 and 1 + r, whose first points have the ratios 1 + r."""
    starts = 1e4 * np.arange(len(ratios))[:, None]
    return torch.from_numpy((starts + np.stack([0 * ratios, 0 * ratios - 1, ratios], 1)).reshape(-1, 1))


def test_closed_forms_of_the_estimators() -> None:
    """theory.md: maximum likelihood, without bias, and the fit of the first 90 %, of exact quantiles."""
    unbiased = two_nn_of_ratios(QUANTILES)
    assert unbiased.estimate == pytest.approx(4.996731526987837, rel=1e-12)
    assert gride_of_ratios(QUANTILES, 1).estimate == pytest.approx(5.001733260248085, rel=1e-12)
    # the exact interval: 2 D S ~ chi^2(2 N), so that the relative half-width is about 1.96 / sqrt(N)
    assert (unbiased.high - unbiased.low) / 10 == pytest.approx(1.96 / np.sqrt(1000), rel=0.01)


def test_the_estimators_take_the_ratios_of_the_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helmscope.observe.dimension.neighbor_ratios", lambda *_, **__: QUANTILES)
    points = uniform(10, 2)
    assert two_nn(points).estimate == pytest.approx(4.996731526987837, rel=1e-12)
    assert two_nn_mle(points).estimate == pytest.approx(5.001733260248085, rel=1e-12)
    assert two_nn_fit(points).estimate == pytest.approx(5.0081999196445555, rel=1e-12)


def test_ratios_are_those_of_the_points() -> None:
    given = np.array([1.5, 2.0, 7.0, 1.01])
    np.testing.assert_allclose(neighbor_ratios(points_with(given))[::3], given, rtol=1e-9)


SETS = {
    f"{name}, n = {n}": make(n)
    for n in (60, 500)
    for name, make in {
        "cube of dimension 2": lambda n: uniform(n, 2),
        "cube of dimension 10": lambda n: uniform(n, 10),
        "plane in 40": lambda n: embedded(uniform(n, 2), 40),
        "normal of dimension 6": lambda n: torch.randn(n, 6, generator=torch.Generator().manual_seed(3)).double(),
        "normal of dimension 60": lambda n: torch.randn(n, 60, generator=torch.Generator().manual_seed(4)).double(),
        "circle": lambda n: torch.stack([(7 * uniform(n, 1)[:, 0]).cos(), (7 * uniform(n, 1)[:, 0]).sin()], 1),
        "sphere": lambda n: torch.nn.functional.normalize(uniform(n, 5) - 0.5, dim=1),
        "roll": lambda n: torch.stack([uniform(n, 2)[:, 0], (9 * uniform(n, 2)).prod(1).cos(), uniform(n, 2)[:, 1]], 1),
        "far from 0": lambda n: uniform(n, 3) + 1e4,
        "scales": lambda n: uniform(n, 4) * torch.tensor([1.0, 0.1, 0.01, 0.001]).double(),
    }.items()
}


@pytest.mark.filterwarnings("ignore::helmscope.observe.dimension.HighDimensionWarning")
@pytest.mark.parametrize("name", SETS)
def test_agrees_with_scikit_dimension(name: str) -> None:
    from skdim.id import TwoNN

    points = SETS[name]
    estimators = {
        (0.0, "mle"): two_nn(points),
        (0.1, "linear"): two_nn_fit(points),
        (0.25, "linear"): two_nn_fit(points, discarded=0.25),
    }
    for (discarded, method), ours in estimators.items():
        with np.errstate(divide="ignore"):  # of its plot data at the largest ratio
            theirs = TwoNN(discard_fraction=discarded, method=method).fit(points.numpy()).dimension_
        assert ours.estimate == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_gride_maximizes_the_likelihood_of_its_density(k: int) -> None:
    """f(mu) = D (mu^D - 1)^(k - 1) / (mu^((2k - 1) D + 1) B(k, k)), maximized numerically."""
    powers = beta.rvs(k, k, size=400, random_state=1)
    mu = powers ** (-1 / 3.5)

    def minus_log_likelihood(d: float) -> float:
        logs = np.log(d) + (k - 1) * np.log(mu**d - 1) - ((2 * k - 1) * d + 1) * np.log(mu) - betaln(k, k)
        return -float(logs.sum())

    best = minimize_scalar(minus_log_likelihood, bounds=(0.5, 20), method="bounded", options={"xatol": 1e-10}).x
    found = gride_of_ratios(mu, k)
    assert found.estimate == pytest.approx(best, rel=1e-6)
    assert found.low < 3.5 < found.high
    # the observed information is the curvature there
    step = 1e-3
    down, at, up = (minus_log_likelihood(found.estimate + shift) for shift in (-step, 0, step))
    error = 1 / np.sqrt((down - 2 * at + up) / step**2)
    assert np.log(found.high / found.estimate) == pytest.approx(1.959964 * error / found.estimate, rel=1e-3)


@pytest.mark.parametrize("k", [1, 3])
def test_ratios_of_uniform_points_have_the_beta_law(k: int) -> None:
    ratios = neighbor_ratios(uniform(3_000, 2), neighbor=k)[::10]  # neighbors share distances: every tenth
    assert kstest(ratios**-2, beta(k, k).cdf).pvalue > 1e-3
    assert kstest(ratios**-3, beta(k, k).cdf).pvalue < 1e-3


def test_known_dimensions_are_read_and_biased_ones_are_low() -> None:
    assert two_nn(embedded(uniform(3_000, 3), 30)).estimate == pytest.approx(3, rel=0.06)
    assert gride(embedded(uniform(3_000, 3), 30), neighbor=4).estimate == pytest.approx(3, rel=0.06)
    with pytest.warns(
        HighDimensionWarning, match=r"the dimension 16\.\d of 2000 points is a lower bound: they resolve"
    ):
        assert two_nn(uniform(2_000, 20)).estimate < 17


def test_scales_tell_noise_from_a_manifold() -> None:
    line = torch.cat([uniform(4_000, 1), 2e-4 * uniform(4_000, 4, seed=2)], 1)
    found = dimension_by_scale(line, neighbors=(1, 16)).dimension.values
    assert found[0] > 1.5
    assert found[1] < 1.2


def test_scales_equal_gride() -> None:
    x = uniform(300, 3)
    found = dimension_by_scale(x, neighbors=(1, 4))
    for k in (1, 4):
        one = gride(x, neighbor=k)
        assert float(found.dimension.sel(neighbor=k)) == pytest.approx(one.estimate, rel=1e-12)
        assert float(found.dimension_high.sel(neighbor=k)) == pytest.approx(one.high, rel=1e-12)
    assert float(found.distance.sel(neighbor=4)) > float(found.distance.sel(neighbor=1))
    assert found.attrs["n"] == 300


def test_the_curve_over_n_is_flat_in_few_dimensions_and_rises_in_many() -> None:
    few = dimension_by_size(uniform(2_048, 2), halvings=4).dimension.values
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning: the curve is what it asks for
        many = dimension_by_size(uniform(2_048, 40), halvings=4).dimension.values
    assert np.abs(few / 2 - 1).max() < 0.08
    assert (np.diff(many) > 0).all()
    whole = two_nn(uniform(2_048, 2)).estimate
    assert few[-1] == pytest.approx(whole, rel=1e-12)


def test_the_curve_is_the_mean_over_disjoint_parts() -> None:
    x = uniform(64, 2)
    seen: list[torch.Tensor] = []

    def estimate(part: torch.Tensor) -> object:
        seen.append(part)
        return two_nn(part)

    found = dimension_by_size(x, halvings=1, estimate=estimate, seed=3)  # type: ignore[arg-type]
    assert [len(part) for part in seen] == [32, 32, 64]
    assert sorted(torch.cat(seen[:2])[:, 0].tolist()) == sorted(x[:, 0].tolist())
    assert float(found.dimension[0]) == pytest.approx(np.mean([two_nn(part).estimate for part in seen[:2]]))


def test_copies_and_weights() -> None:
    x = uniform(100, 3)
    doubled = torch.cat([x, x, x[:5] + 1e-9])
    assert two_nn(doubled) == two_nn(x)
    weights = torch.ones(120).double()
    weights[100:] = 0
    padded = torch.cat([x, torch.full((20, 3), 7.0)])
    assert two_nn(padded, weights) == two_nn(x)
    assert distinct_cloud(doubled).shape == (100, 3)


def test_coverage_of_the_exact_interval() -> None:
    rng = np.random.default_rng(0)
    found = [two_nn_of_ratios(np.exp(rng.exponential(1 / 4.0, size=32))) for _ in range(1_000)]
    missed = np.mean([not each.low <= 4 <= each.high for each in found])
    assert 0.032 <= missed <= 0.068
    assert np.mean([each.estimate for each in found]) == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: two_nn(uniform(7, 2)),
            "only 7 points are distinct and have positive weight, but a",
        ),
        (lambda: two_nn(torch.ones(30, 2)), "only 1 point is distinct and has positive weight, but"),
        (lambda: two_nn(uniform(30, 2)[None]), r"points have shape \(1, 30, 2\), but they must be one cloud, \(n, d\)"),
        (lambda: two_nn(uniform(30, 2), torch.arange(30.0)), "weights are 1 to 29, but nearest neighbors need equal"),
        (lambda: two_nn(torch.cartesian_prod(*[torch.arange(4.0)] * 2)), "two equally near neighbors each"),
        (lambda: gride(uniform(30, 2), neighbor=0), "neighbor is 0, but it must be a whole number >= 1"),
        (lambda: gride(uniform(30, 2), neighbor=15), "30 nearest neighbors need at least 31 points"),
        (lambda: two_nn_fit(uniform(30, 2), discarded=1.0), "discarded is 1.0, but it must be above 0 and below 1"),
        (lambda: dimension_by_scale(uniform(30, 2), neighbors=[]), "neighbors is .*, but it must hold at least one"),
        (lambda: dimension_by_size(uniform(30, 2), halvings=3), "only 3 points are distinct and have positive weight"),
    ],
)
def test_bad_input(call: object, message: str) -> None:
    with pytest.raises(HelmscopeError, match=message):
        call()  # type: ignore[operator]
