"""The Sinkhorn divergence: closed form for Gaussians, naive combination of POT's values, gradients, positivity."""

from __future__ import annotations

import math

import pytest
import torch

from helmscope.transport import Chordal, Euclidean, Geodesic, sinkhorn, sinkhorn_divergence
from helmscope.transport.divergence import entropic_plan
from helmscope.types import HelmscopeError
from support.planting import Plant, outcome

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.nn.functional.normalize(normal(*shape, seed=seed), dim=-1)


def grid_gaussian(deviation: float, mean: float, n: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.linspace(-8, 8, n, dtype=F64)
    weights = torch.exp(-z.square() / 2)
    return (mean + deviation * z)[:, None], weights / weights.sum()


def gaussian_divergence(s: float, t: float, shift: float, epsilon: float) -> float:
    """Janati, Muzellec, Peyre & Cuturi 2020: shift^2 + (D_ss - 2 D_st + D_tt) / 2 + sigma^2 / 2 log(...)."""
    sigma2 = epsilon / 2
    d = {(a, b): math.sqrt(4 * a**2 * b**2 + sigma2**2) for a in (s, t) for b in (s, t)}
    logs = math.log((d[s, t] + sigma2) ** 2 / ((d[s, s] + sigma2) * (d[t, t] + sigma2)))
    return shift**2 + (d[s, s] + d[t, t] - 2 * d[s, t]) / 2 + sigma2 / 2 * logs


def check_gaussian() -> bool:
    (x, a), (y, b) = grid_gaussian(1.0, 0.0), grid_gaussian(0.6, 0.4, 100)
    divergence = sinkhorn_divergence(x, y, a, b, epsilon=0.5, tol=1e-12, cost=Euclidean())
    return divergence.ok and abs(float(divergence.value) - gaussian_divergence(1.0, 0.6, 0.4, 0.5)) < 1e-8


def test_gaussians_have_their_closed_form():
    assert check_gaussian()


@pytest.mark.parametrize("cost", [Euclidean(), Chordal(), Geodesic()])
def test_combination_of_pot(cost):
    import ot

    x, y = unit(7, 3), unit(8, 3, seed=1)

    def objective(x: torch.Tensor, y: torch.Tensor) -> float:
        matrix = cost.matrix(x, y).numpy() ** 2
        masses = [torch.full((len(part),), 1 / len(part), dtype=F64).numpy() for part in (x, y)]
        log = ot.sinkhorn(*masses, matrix, 0.5, method="sinkhorn_log", stopThr=1e-13, numItermax=3_000, log=True)[1]
        return 0.5 * sum(float((mass * u).sum()) for mass, u in zip(masses, _duals(log, masses), strict=True))

    wanted = objective(x, y) - objective(x, x) / 2 - objective(y, y) / 2
    divergence = sinkhorn_divergence(x, y, epsilon=0.5, cost=cost, tol=1e-11)
    assert float(divergence.value) == pytest.approx(wanted, abs=1e-8)


def _duals(log: dict, masses: list) -> list:
    """POT's scalings are e^{f / epsilon} a; its potentials divided by epsilon are therefore log u - log a."""
    import numpy as np

    return [np.asarray(log[name]) - np.log(mass) for name, mass in zip(("log_u", "log_v"), masses, strict=True)]


@pytest.mark.parametrize("reach", [None, 0.8])
def test_zero_and_gradient_zero_at_equal_clouds(reach):
    x, weights = normal(12, 2), normal(12, seed=3).abs() + 0.1
    leaf, mass = x.clone().requires_grad_(), weights.clone().requires_grad_()
    divergence = sinkhorn_divergence(leaf, x, mass, weights, epsilon=0.3, reach=reach, tol=1e-12, cost=Euclidean())
    assert abs(float(divergence.value.detach())) < 1e-10
    for gradient in torch.autograd.grad(divergence.value, [leaf, mass]):
        assert float(gradient.abs().max()) < 1e-8
    biased = sinkhorn(x, x, weights, weights, epsilon=0.3, reach=reach, cost=Euclidean())
    assert float(biased.objective) > 0.01  # which the divergence removes


@pytest.mark.parametrize("seed", range(4))
def test_positive(seed):
    x, y = unit(8, 3, seed=seed), unit(9, 3, seed=seed + 10)
    for cost in (Euclidean(), Chordal()):
        for p in (1.0, 2.0):
            for reach in (None, 0.5):
                options = {"epsilon": 0.1 * 4**seed, "cost": cost, "p": p, "reach": reach}
                assert float(sinkhorn_divergence(x, y, **options).value) > 1e-6
    assert float(sinkhorn_divergence(x, x + 1e-2, epsilon=1.0, cost=Euclidean()).value) == pytest.approx(3e-4, rel=1e-3)


@pytest.mark.parametrize("reach", [None, 0.8])
def test_gradients_are_finite_differences(reach):
    x, y, a, b = normal(5, 2), normal(6, 2, seed=1), normal(5, seed=2).abs() + 0.1, normal(6, seed=3).abs() + 0.1
    if reach is None:
        a, b = a / a.sum(), b / b.sum()
    options = {"cost": Euclidean(), "epsilon": 0.3, "reach": reach, "tol": 1e-13, "max_iterations": 5000}
    leaves = [part.clone().requires_grad_() for part in (x, y, a, b)]
    gradients = torch.autograd.grad(sinkhorn_divergence(*leaves, **options).value, leaves)
    for index, gradient in enumerate(gradients):
        direction, values = 0.1 * normal(*gradient.shape, seed=20 + index), []
        if index > 1:
            direction = direction - direction.mean()
        for sign in (1, -1):
            moved = [x, y, a, b]
            moved[index] = moved[index] + sign * 1e-4 * direction
            values.append(float(sinkhorn_divergence(*moved, **options).value))
        assert (values[0] - values[1]) / 2e-4 == pytest.approx(float((gradient * direction).sum()), abs=1e-7)


def test_descent_reaches_the_target():
    """Gradient flow of the divergence moves a cloud onto another one; without debiasing it would shrink it."""
    target = 0.5 * normal(30, 2, seed=1) + 1
    x = normal(30, 2)
    for _ in range(25):
        leaf = x.clone().requires_grad_()
        value = sinkhorn_divergence(leaf, target, epsilon=0.2, tol=1e-4, cost=Euclidean()).value
        x = x - 15 * torch.autograd.grad(value, leaf)[0]
    assert float(sinkhorn_divergence(x, target, epsilon=0.2, cost=Euclidean()).value) < 1e-3
    assert float(x.var(0).sum() / target.var(0).sum()) == pytest.approx(1, abs=0.1)


def test_symmetric_updates_converge_faster_and_outcome_is_named():
    x, y = normal(40, 2), normal(40, 2, seed=1)
    divergence = sinkhorn_divergence(x, y, epsilon=0.05, tol=1e-8, cost=Euclidean())
    assert divergence.plans[1].iterations < sinkhorn(x, x, epsilon=0.05, tol=1e-8, cost=Euclidean()).iterations
    torch.testing.assert_close(*divergence.plans[1].potentials)
    limited = sinkhorn_divergence(x, y, epsilon=1e-3, max_iterations=5, cost=Euclidean())
    assert not limited.ok
    assert "x to y: iteration limit" in limited.outcome
    assert "y to y" in repr(limited)
    with pytest.raises(HelmscopeError, match="epsilon is -1"):
        sinkhorn_divergence(x, y, epsilon=-1, cost=Euclidean())


FAULTS = {
    "not debiased": lambda right, clouds, rules, *, symmetric=False, progress=None: (
        _zero(right(clouds, rules, symmetric=symmetric)) if symmetric else right(clouds, rules)
    ),
    "debiased twice": lambda right, clouds, rules, *, symmetric=False, progress=None: _scaled(
        right(clouds, rules, symmetric=symmetric), 2.0 if symmetric else 1.0
    ),
    "sign of the whole": lambda right, clouds, rules, *, symmetric=False, progress=None: _scaled(
        right(clouds, rules, symmetric=symmetric), -1.0
    ),
}


def _scaled(plan, factor):
    from dataclasses import replace

    return replace(plan, dual=factor * plan.dual)


def _zero(plan):
    return _scaled(plan, 0.0)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name):
    assert outcome(Plant(FAULTS[name], entropic_plan), check_gaussian) == "seen"
