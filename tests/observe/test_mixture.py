"""Von Mises-Fisher mixtures against 50-digit Bessel functions, SciPy, closed forms and a plain loop of EM."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

import helmscope as hs
from helmscope.observe import mixture as home
from helmscope.observe.mixture import vmf_concentration, vmf_log_density, vmf_mixture

F64 = torch.float64
PLANTED = ((0.5, 40.0), (0.3, 80.0), (0.2, 160.0))


def circle(*angles: float) -> torch.Tensor:
    given = torch.tensor(angles, dtype=F64)
    return torch.stack([given.cos(), given.sin()], -1)


def planted(d: int, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n tokens of three laws about orthogonal places (in d = 2 about angles 2 apart), and these places."""
    places = circle(0.0, 2.0, 4.0) if d == 2 else hs.Orthonormal(3, d).sample(seed=seed)
    laws = [
        hs.VonMisesFisher(n=round(w * n), dim=d, kappa=kappa, mean=place).sample(seed=10 * seed + i)
        for i, ((w, kappa), place) in enumerate(zip(PLANTED, places, strict=True))
    ]
    return torch.cat(laws), places


def exact_log_density(x, center, kappa) -> mpmath.mpf:
    """kappa <mu, x> + log of kappa^(d/2-1) / ((2 pi)^(d/2) I_(d/2-1)(kappa)), of directions, in 50 digits."""
    with mpmath.workdps(50):
        x, mu = (mpmath.matrix([mpmath.mpf(v) for v in row.tolist()]) for row in (x, center))
        cosine = mpmath.fdot(x, mu) / (mpmath.norm(x) * mpmath.norm(mu))
        half, kappa = mpmath.mpf(len(x)) / 2, mpmath.mpf(kappa)
        norm = (half - 1) * mpmath.log(kappa) - half * mpmath.log(2 * mpmath.pi)
        return kappa * cosine + norm - mpmath.log(mpmath.besseli(half - 1, kappa))


def exact_spread(d: int, kappa: float) -> mpmath.mpf:
    with mpmath.workdps(50):
        half = mpmath.mpf(d) / 2
        return 1 - mpmath.besseli(half, kappa) / mpmath.besseli(half - 1, kappa)


@pytest.mark.parametrize("d", [2, 3, 4, 16, 101, 512])
@pytest.mark.parametrize("kappa", [1e-3, 0.7, 12.0, 300.0, 1e4, 1e8])
def test_log_density_is_that_of_50_digits(d, kappa):
    center, far = hs.Uniform(2, d).sample(seed=d)
    near = hs.sphere.exp(center, hs.sphere.project(center, far) / math.sqrt(kappa + 1))
    x = torch.stack([center, near, far, -center])
    exact = [exact_log_density(token, center, kappa) for token in x]
    ours = vmf_log_density(x, center, kappa).tolist()
    for got, wanted in zip(ours, exact, strict=True):
        assert abs(got - wanted) <= 5e-14 * max(1, abs(wanted))  # measured: 1.5e-14


@pytest.mark.parametrize("kappa", [1e-9, 1e-3, 0.5, 3.0, 60.0, 1e3])
def test_log_density_in_three_dimensions_is_elementary(kappa):
    x = hs.Uniform(5, 3).sample(seed=1)
    # kappa / (4 pi sinh kappa), written for large kappa
    norm = math.log(kappa / (2 * math.pi * -math.expm1(-2 * kappa)))
    assert torch.allclose(vmf_log_density(x, x[0], kappa), kappa * (x @ x[0] - 1) + norm, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("d", [2, 3, 16, 512])
def test_uniform_law_is_kappa_zero(d):
    x = hs.Uniform(4, d).sample(seed=2)
    area = math.log(2) + d / 2 * math.log(math.pi) - math.lgamma(d / 2)
    assert vmf_log_density(x, x[0], 0.0).tolist() == pytest.approx([-area] * 4, rel=1e-13)


@pytest.mark.parametrize("kappa", [0.0, 2.0, 500.0])
def test_density_integrates_to_one_on_the_circle(kappa):
    angles = torch.arange(4000, dtype=F64) * (2 * math.pi / 4000)
    density = vmf_log_density(circle(*angles.tolist()), circle(0.3)[0], kappa).exp()
    assert float(density.sum()) * 2 * math.pi / 4000 == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("d", [2, 3, 16])
def test_log_density_and_one_component_are_those_of_scipy(d):
    x = hs.VonMisesFisher(n=200, dim=d, kappa=7.0).sample(seed=d)
    mu, kappa = stats.vonmises_fisher.fit(x.numpy())
    fitted = vmf_mixture(x, max_components=1)
    assert fitted.kappas.item() == pytest.approx(kappa, rel=1e-9)
    assert fitted.centers[0].tolist() == pytest.approx(mu.tolist(), abs=1e-12)
    scipy = stats.vonmises_fisher(mu, kappa).logpdf(x.numpy())
    assert vmf_log_density(x, torch.from_numpy(mu), float(kappa)).tolist() == pytest.approx(scipy.tolist(), abs=1e-11)
    assert fitted.log_likelihood.item() == pytest.approx(scipy.sum(), abs=1e-9)


@pytest.mark.parametrize("d", [2, 3, 16, 512])
def test_concentration_solves_its_equation(d):
    kappas = [0.05, 1.0, 30.0, 1e3, 1e6, 1e9]
    spreads = torch.tensor([float(exact_spread(d, kappa)) for kappa in kappas], dtype=F64)
    # near 1 a rounding of the spread moves kappa by 1e-16 d / kappa of itself; measured: 1.3e-14, and 8e-12 there
    allowed = [1e-14 + 2e-15 * d / kappa for kappa in kappas]
    for got, kappa, bound in zip(vmf_concentration(spreads, dim=d).tolist(), kappas, allowed, strict=True):
        assert abs(got / kappa - 1) <= bound
    assert vmf_concentration(1.0, dim=d).item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("d", [2, 3, 16, 64])
def test_the_table_of_the_inner_loop_is_the_equation(d):
    kappas = np.geomspace(0.1, 1e9, 500)
    exact = home._polar_integrals(kappas, d)
    seen, log_mass = home._kappa_and_log_mass(exact.spread, d, 0.0, math.inf)
    assert np.abs(seen / kappas - 1).max() < 1e-11
    assert np.abs(log_mass - exact.log_mass).max() < 1e-10


@pytest.mark.parametrize("d", [2, 3, 16])
def test_planted_mixtures_are_found(d):
    """At n = 400: the count always, the masses exactly, centers within 4 and kappa within 3 standard errors."""
    for seed in range(6):
        x, places = planted(d, 400, seed)
        fitted = vmf_mixture(x)
        assert fitted.count.item() == 3
        for k, (w, kappa) in enumerate(PLANTED):
            error = math.sqrt((d - 1) / (w * 400 * kappa))
            assert hs.sphere.angle(fitted.centers[k], places[k]).item() < 4 * error
            assert fitted.weights[k].item() == pytest.approx(w, abs=1e-9)
            assert abs(math.log(fitted.kappas[k].item() / kappa)) < 3 * math.sqrt(2 / ((d - 1) * w * 400))
        assert not bool(fitted.weights[3:].any() or fitted.kappas[3:].any() or fitted.centers[3:].any())


def one_step_by_loops(x, weights, centers, kappas):
    """Expectation maximization in SciPy's functions, one number at a time; log-likelihood, then the new parameters."""
    n, d = x.shape
    laws = list(zip(weights, centers, kappas, strict=True))
    logs = np.array(
        [[math.log(w) + stats.vonmises_fisher(mu, k).logpdf(row) for w, mu, k in laws] for row in x]
    ).reshape(n, -1)
    share = special.softmax(logs, axis=1)
    new = []
    for k in range(len(weights)):
        pull = sum(share[i, k] * x[i] for i in range(n))
        length = np.linalg.norm(pull) / share[:, k].sum()
        kappa = optimize.brentq(lambda z, r: special.ive(d / 2, z) / special.ive(d / 2 - 1, z) - r, 1e-3, 1e5, length)
        new.append((share[:, k].mean(), pull / np.linalg.norm(pull), kappa))
    return special.logsumexp(logs, axis=1).sum(), new


@pytest.mark.parametrize("d", [2, 3, 5])
def test_a_step_is_that_of_plain_loops(d):
    x = planted(d, 40, 1)[0].numpy()
    weights, kappas, centers = np.array([0.3, 0.7]), np.array([20.0, 4.0]), x[[0, 30]]
    likelihood, new = one_step_by_loops(x, weights, centers, kappas)
    fit = home._Fit(weights[None], centers[None], kappas[None], home._polar_integrals(kappas, d).log_mass[None])
    ours, seen = home._em_step(x[None], fit, 1e-6, math.inf)
    assert seen[0] == pytest.approx(likelihood, abs=1e-9)
    for k, (w, mu, kappa) in enumerate(new):
        assert ours.weights[0, k] == pytest.approx(w, rel=1e-11)
        assert ours.centers[0, k].tolist() == pytest.approx(mu.tolist(), abs=1e-11)
        assert ours.kappas[0, k] == pytest.approx(kappa, rel=1e-9)


@pytest.mark.parametrize("d", [2, 3, 16])
@pytest.mark.parametrize("max_kappa", [10.0, 1e3, 1e6])
def test_no_step_lowers_the_likelihood(monkeypatch, d, max_kappa):
    gains, step = [], home._em_step

    def watched(x, fit, floor, bound):
        new, before = step(x, fit, floor, bound)
        gains.append((step(x, new, floor, bound)[1] - before).min())
        return new, before

    monkeypatch.setattr(home, "_em_step", watched)
    vmf_mixture(
        torch.stack([hs.Uniform(30, d).sample(seed=1), planted(d, 30, 2)[0]]), max_kappa=max_kappa, max_components=5
    )
    assert len(gains) > 60
    assert min(gains) > -1e-11  # measured: -3e-13, the rounding of a sum of 30 logs


def test_result_holds_together():
    x = torch.stack([planted(3, 100, seed)[0] for seed in range(4)]).reshape(2, 2, 100, 3)
    fitted = vmf_mixture(x, max_components=5)
    assert fitted.count.shape == (2, 2)
    assert fitted.centers.shape == (2, 2, 5, 3)
    assert fitted.log_density(x).sum(-1).flatten().tolist() == pytest.approx(fitted.log_likelihood.flatten().tolist())
    for i, j in np.ndindex(2, 2):
        k = fitted.count[i, j].item()
        parts = zip(fitted.weights[i, j, :k], fitted.centers[i, j, :k], fitted.kappas[i, j, :k], strict=True)
        density = sum(w * vmf_log_density(x[i, j], mu, kappa).exp() for w, mu, kappa in parts)
        assert fitted.log_likelihood[i, j].item() == pytest.approx(density.log().sum().item(), abs=1e-9)
        assert fitted.bic[i, j].argmin().item() == k - 1
        penalty = (4 * k - 1) * math.log(100)
        assert fitted.bic[i, j, k - 1].item() == pytest.approx(penalty - 2 * fitted.log_likelihood[i, j].item())
        assert fitted.weights[i, j].sum().item() == pytest.approx(1.0, abs=1e-12)
        assert bool((fitted.weights[i, j].diff() <= 0).all())
        assert hs.sphere.check_tokens(fitted.centers[i, j, :k]) is not None


@pytest.mark.parametrize("d", [2, 3, 16])
def test_order_batch_and_seed(d):
    x = torch.stack([planted(d, 60, 4)[0], hs.Uniform(60, d).sample(seed=4)])
    fitted = vmf_mixture(x)
    shuffled = vmf_mixture(x[:, torch.randperm(60, generator=torch.Generator().manual_seed(0))])
    for name in ("count", "weights", "centers", "kappas", "log_likelihood", "bic"):
        assert torch.equal(getattr(fitted, name), getattr(shuffled, name))
        assert torch.allclose(getattr(fitted, name)[0].double(), getattr(vmf_mixture(x[0]), name).double(), atol=1e-9)
    other = vmf_mixture(x, seed=1)
    assert fitted.count.tolist() == other.count.tolist() == [3, 1]
    assert other.log_likelihood.tolist() == pytest.approx(fitted.log_likelihood.tolist(), abs=1e-2)
    turn = hs.Orthonormal(d, d).sample(seed=9)
    turned = vmf_mixture(x @ turn)
    assert torch.allclose(turned.centers[0], fitted.centers[0] @ turn, atol=1e-3)
    assert turned.kappas[0].tolist() == pytest.approx(fitted.kappas[0].tolist(), rel=1e-2)


def test_float32_tokens_are_those_of_float64():
    x = planted(3, 60, 5)[0]
    single, double = vmf_mixture(x.to(torch.float32)), vmf_mixture(x)
    assert single.kappas.dtype == F64
    assert torch.allclose(single.centers, double.centers, atol=1e-5)


@pytest.mark.parametrize("max_kappa", [1.0, 1e3, 1e9])
@pytest.mark.parametrize("d", [2, 3, 16])
def test_equal_tokens_are_one_component_at_the_bound(d, max_kappa):
    place = hs.Uniform(1, d).sample(seed=6)
    fitted = vmf_mixture(place.expand(10, d), max_kappa=max_kappa)
    assert fitted.count.item() == 1
    assert fitted.kappas[0].item() == max_kappa
    assert torch.allclose(fitted.centers[0], place[0], atol=1e-15)
    top = vmf_log_density(place, place[0], max_kappa).item()
    assert fitted.log_likelihood.item() == pytest.approx(10 * top, rel=1e-12)


def test_points_are_told_apart_and_the_bound_is_the_resolution():
    x = torch.cat([circle(0.0).expand(12, 2), circle(0.2).expand(8, 2), circle(3.0).expand(4, 2)])
    fine, coarse = vmf_mixture(x, max_kappa=1e4), vmf_mixture(x, max_kappa=10.0)
    assert (fine.count.item(), coarse.count.item()) == (3, 2)
    assert fine.weights[:3].tolist() == pytest.approx([1 / 2, 1 / 3, 1 / 6], abs=1e-12)
    assert hs.sphere.angle(fine.centers[:3], circle(0.0, 0.2, 3.0)).max().item() < 1e-12
    assert coarse.weights[:2].tolist() == pytest.approx([5 / 6, 1 / 6], abs=1e-3)


@pytest.mark.parametrize("d", [2, 3, 16])
def test_a_balanced_cloud_is_the_uniform_law(d):
    """A cross of 2d tokens has mean 0: one component of kappa 0."""
    axes = torch.eye(d, dtype=F64)
    fitted = vmf_mixture(torch.cat([axes, -axes]), max_components=1)
    area = math.log(2) + d / 2 * math.log(math.pi) - math.lgamma(d / 2)
    assert fitted.kappas.item() == pytest.approx(0.0, abs=1e-10)
    assert fitted.log_likelihood.item() == pytest.approx(-2 * d * area, rel=1e-12)


def test_uniform_tokens_take_one_component():
    """98.2 % of 512 clouds on the circle, in an earlier count: 61 or more of 64 are due in 99 % of all counts."""
    assert int((vmf_mixture(hs.Uniform(64, 2).sample(64, seed=8)).count == 1).sum()) >= 61


X = hs.Uniform(4, 3).sample(2, seed=0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: vmf_mixture(X, max_components=5), "max_components is 5.*4 tokens"),
        (lambda: vmf_mixture(X, max_components=0), "max_components is 0.*>= 1"),
        (lambda: vmf_mixture(X, max_components=2, max_kappa=0.0), r"max_kappa is 0\.0.*> 0"),
        (lambda: vmf_mixture(X, max_components=2, max_kappa=math.inf), "max_kappa is inf.*finite"),
        (lambda: vmf_mixture(X, max_components=2, max_kappa=1e13), r"max_kappa is 1e\+13.*at most 1e\+12"),
        (lambda: vmf_mixture(X, max_components=2, restarts=0), "restarts is 0.*>= 1"),
        (lambda: vmf_mixture(X, max_components=2, seed=-1), "seed is -1.*>= 0"),
        (lambda: vmf_mixture(2 * X, max_components=2), "x holds a token of norm 2.*unit sphere"),
        (lambda: vmf_mixture(X.tolist(), max_components=2), "x is a list.*tensor"),
        (lambda: vmf_mixture(X, max_components=2).log_density(2 * X), "x holds a token of norm 2"),
        (lambda: vmf_log_density(X, X[:, 0], -1.0), r"kappa is -1, but.*\[0, 1e\+12\]"),
        (lambda: vmf_log_density(X, X[:, 0], torch.tensor([1.0, math.nan])), r"kappa is nan, but.*\[0, 1e\+12\]"),
        (lambda: vmf_log_density(X, X[:, 0], "1"), "kappa is '1'.*finite number"),
        (lambda: vmf_log_density(X, 2 * X[:, 0], 1.0), "center holds a token of norm 2"),
        (lambda: vmf_log_density(X, [1.0, 0.0, 0.0], 1.0), "center is a list.*tensor"),
        (lambda: vmf_log_density(X, circle(0.0)[0], 1.0), "center has 2 coordinates.*tokens have 3"),
        (lambda: vmf_concentration(0.0, dim=3), r"spread is 0, but it must be in \[3e-12, 1\]"),
        (lambda: vmf_concentration(1.1, dim=3), r"spread is 1\.1, but it must be in"),
        (lambda: vmf_concentration(0.5, dim=1), "dim is 1.*>= 2"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
