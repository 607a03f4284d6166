"""Relaxed marginals against closed forms for single points, POT, and a direct minimization."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helmscope.transport import Euclidean, sinkhorn, sinkhorn_divergence, sinkhorn_iteration, sinkhorn_plan
from helmscope.transport.unbalanced import best_translation, conjugate, damping, relative_entropy
from helmscope.types import HelmscopeError
from support.planting import Plant, outcome


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_points(mass: float, other: float, distance: float, epsilon: float, rho: float) -> tuple[float, float]:
    """The optimal mass t between two points, and the objective: c + (epsilon + 2 rho) log t
    = epsilon log(a b) + rho log(a b) by setting the derivative of the objective to 0."""
    c, product = distance**2, mass * other
    t = math.exp((-c + (epsilon + rho) * math.log(product)) / (epsilon + 2 * rho))
    kl = lambda r, a: r * math.log(r / a) - r + a  # noqa: E731
    return t, t * c + epsilon * kl(t, product) + rho * (kl(t, mass) + kl(t, other))


@pytest.mark.parametrize("reach", [0.3, 1.0, 5.0])
@pytest.mark.parametrize(("mass", "other"), [(1.0, 1.0), (2.0, 0.5)])
def test_two_points(reach, mass, other):
    x, y = torch.zeros(1, 1).double(), torch.full((1, 1), 0.7, dtype=torch.float64)
    weights = torch.tensor([mass]).double(), torch.tensor([other]).double()
    plan = sinkhorn(x, y, *weights, epsilon=0.2, reach=reach, tol=1e-12, cost=Euclidean())
    t, objective = two_points(mass, other, 0.7, 0.2, reach**2)
    assert float(plan.matrix) == pytest.approx(t, abs=1e-10)
    assert float(plan.objective) == pytest.approx(objective, abs=1e-10)
    assert float(plan.dual) == pytest.approx(objective, abs=1e-10)
    assert float(plan.value) == pytest.approx(0.49 * t, abs=1e-10)


@pytest.mark.parametrize(("mass", "other"), [(1.0, 1.0), (2.0, 0.5), (0.3, 1.7)])
def test_divergence_of_two_points(mass, other):
    """OT(x, y) - OT(x, x) / 2 - OT(y, y) / 2 + epsilon (a - b)^2 / 2, each from the closed form of two points."""
    x, y = torch.zeros(1, 1).double(), torch.full((1, 1), 0.7, dtype=torch.float64)
    weights = torch.tensor([mass], dtype=torch.float64), torch.tensor([other], dtype=torch.float64)
    for epsilon in (0.2, 3.0):
        options = {"cost": Euclidean(), "epsilon": epsilon, "reach": 0.8, "tol": 1e-12}
        found = sinkhorn_divergence(x, y, *weights, **options).value
        across, within, within_other = (
            two_points(*masses, distance, epsilon, 0.64)[1]
            for *masses, distance in ((mass, other, 0.7), (mass, mass, 0.0), (other, other, 0.0))
        )
        wanted = across - within / 2 - within_other / 2 + epsilon * (mass - other) ** 2 / 2
        assert float(found) == pytest.approx(wanted, abs=1e-10)


def test_plans_are_those_of_pot():
    import ot

    x, y = normal(20, 2), 0.5 * normal(25, 2, seed=1) + 1
    a, b = normal(20, seed=2).abs(), 2 * normal(25, seed=3).abs()
    matrix = ot.dist(x.numpy(), y.numpy())
    plan = sinkhorn(x, y, a, b, epsilon=0.3, reach=1.2, tol=1e-12, max_iterations=10_000, cost=Euclidean())
    reference = a.numpy()[:, None] * b.numpy()  # POT regularizes by KL relative to it only if it is passed
    wanted = ot.unbalanced.sinkhorn_unbalanced(
        a.numpy(), b.numpy(), matrix, 0.3, 1.44, reg_type="kl", c=reference, numItermax=50_000, stopThr=1e-14
    )
    assert plan.ok
    assert abs(plan.matrix.numpy() - wanted).max() < 1e-8
    other = ot.unbalanced.sinkhorn_unbalanced(a.numpy(), b.numpy(), matrix, 0.3, 1.2, reg_type="kl", c=reference)
    assert abs(plan.matrix.numpy() - other).max() > 1e-3  # rho is reach^2, not reach


def test_objective_is_that_of_the_matrix_and_minimal():
    x, y, a, b = normal(6, 2), normal(7, 2, seed=1), normal(6, seed=2).abs(), normal(7, seed=3).abs()
    plan = sinkhorn(x, y, a, b, epsilon=0.2, reach=0.8, tol=1e-12, max_iterations=10_000, cost=Euclidean())

    def objective(pi: torch.Tensor) -> float:
        cost = (pi * (x[:, None] - y).square().sum(-1)).sum()
        relaxed = relative_entropy(pi.sum(1), a) + relative_entropy(pi.sum(0), b)
        return float(cost + 0.2 * relative_entropy(pi, a[:, None] * b) + 0.64 * relaxed)

    best = objective(plan.matrix)
    assert float(plan.objective) == pytest.approx(best, rel=1e-10)
    assert abs(plan.duality_gap) < 1e-9
    for seed in range(5):
        assert objective(plan.matrix * torch.exp(1e-3 * normal(6, 7, seed=10 + seed))) > best


def test_infinite_reach_is_balanced_transport():
    x, y = normal(15, 2), normal(18, 2, seed=1)
    relaxed = sinkhorn(x, y, epsilon=0.5, reach=1e4, tol=1e-9, cost=Euclidean())
    balanced = sinkhorn(x, y, epsilon=0.5, tol=1e-9, cost=Euclidean())
    assert float(relaxed.objective) == pytest.approx(float(balanced.objective), rel=1e-6)
    assert relaxed.iterations < 100  # without the translation it would take about rho / epsilon = 2e8


def test_gradients_are_finite_differences():
    x, y, a, b = normal(5, 2), normal(6, 2, seed=1), normal(5, seed=2).abs(), normal(6, seed=3).abs()
    options = {"cost": Euclidean(), "epsilon": 0.3, "reach": 0.9, "tol": 1e-13, "max_iterations": 10_000}
    leaves = [part.clone().requires_grad_() for part in (x, y, a, b)]
    gradients = torch.autograd.grad(sinkhorn(*leaves, **options).objective, leaves)
    for index, gradient in enumerate(gradients):
        direction = normal(*gradient.shape, seed=20 + index) * 0.1
        values = []
        for sign in (1, -1):
            moved = [x, y, a, b]
            moved[index] = moved[index] + sign * 1e-4 * direction
            values.append(float(sinkhorn(*moved, **options).objective))
        assert (values[0] - values[1]) / 2e-4 == pytest.approx(float((gradient * direction).sum()), abs=1e-7)


def test_helpers():
    assert damping(math.inf, 1.0) == 1
    f = normal(4)
    torch.testing.assert_close(conjugate(f, 1e9), f, atol=1e-6, rtol=0)
    a, b, g = normal(4, seed=1).abs(), normal(3, seed=2).abs(), normal(3, seed=3)

    def dual(t: float) -> float:
        return float((a * conjugate(f + t, 0.7)).sum() + (b * conjugate(g - t, 0.7)).sum())

    best = best_translation(f, g, a, b, 0.7)
    assert dual(best) > max(dual(best + 0.01), dual(best - 0.01))
    with pytest.raises(HelmscopeError, match=r"reach is 0\.0, but"):
        sinkhorn(normal(2, 1), normal(2, 1), epsilon=1.0, reach=0.0, cost=Euclidean())
    with pytest.raises(HelmscopeError, match="equal masses"):
        sinkhorn(normal(1, 1), normal(1, 1), torch.ones(1), torch.full((1,), 2.0), epsilon=1.0, cost=Euclidean())


FAULTS = {
    "undamped update": Plant(lambda right, rho, epsilon: 1.0, damping),
    "damping by epsilon / rho": Plant(lambda right, rho, epsilon: right(epsilon, rho), damping),
    "sign of the conjugate": Plant(lambda right, f, rho: right(-f, rho), conjugate),
    "half the entropy": Plant(lambda right, r, a: right(r, a) / 2, relative_entropy),
    "translation to the wrong side": Plant(lambda right, *given: -2 * right(*given), best_translation),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name):
    assert sinkhorn_plan.relative_entropy is relative_entropy
    assert sinkhorn_iteration.damping is damping
    x, y = torch.zeros(1, 1).double(), torch.full((1, 1), 0.7, dtype=torch.float64)

    def check() -> bool:
        masses = torch.tensor([2.0]), torch.tensor([0.5])
        plan = sinkhorn(x, y, *masses, epsilon=0.2, reach=1.0, tol=1e-10, max_iterations=60, cost=Euclidean())
        t, objective = two_points(2.0, 0.5, 0.7, 0.2, 1.0)
        numbers = [float(plan.matrix), float(plan.objective), float(plan.dual)]
        return plan.ok and np.allclose(numbers, [t, objective, objective], atol=1e-8)

    assert check()
    assert outcome(FAULTS[name], check) == "seen"
