"""Entropic plans against POT, dense loops, closed forms for Gaussians, and exact transport as epsilon -> 0."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helmscope.transport import (
    Chordal,
    Euclidean,
    Geodesic,
    PlanStatus,
    sinkhorn,
    sinkhorn_levels,
    sinkhorn_plan,
    streaming,
)
from helmscope.transport.sinkhorn_iteration import Entropic, iterate
from helmscope.transport.streaming import PairwiseCost
from helmscope.types import HelmscopeError
from support.planting import Plant, outcome

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.nn.functional.normalize(normal(*shape, seed=seed), dim=-1)


def masses(n: int, seed: int = 0) -> torch.Tensor:
    weights = normal(n, seed=seed).abs() + 0.1
    return weights / weights.sum()


@pytest.mark.parametrize("cost", [Euclidean(), Chordal(), Geodesic()])
@pytest.mark.parametrize(("p", "epsilon"), [(2.0, 1.0), (2.0, 0.05), (1.0, 0.2)])
def test_plans_are_those_of_pot(cost, p, epsilon):
    """POT minimizes <pi, c> + epsilon sum pi log pi, which has the same plan; the objectives differ by the entropy of
    the masses."""
    import ot

    x, y, a, b = unit(20, 3), unit(25, 3, seed=1), masses(20), masses(25, 1)
    plan = sinkhorn(x, y, a, b, epsilon=epsilon, cost=cost, p=p, tol=1e-12, max_iterations=20_000)
    matrix = cost.matrix(x, y).numpy() ** p
    wanted = ot.sinkhorn(a.numpy(), b.numpy(), matrix, epsilon, method="sinkhorn_log", stopThr=1e-13, numItermax=20_000)
    assert plan.status is PlanStatus.CONVERGED
    assert abs(plan.matrix.numpy() - wanted).max() < 1e-10
    assert float(plan.value) == pytest.approx(float((wanted * matrix).sum()), abs=1e-8)
    entropy = float((wanted * np.log(wanted)).sum())
    of_masses = float((a * a.log()).sum() + (b * b.log()).sum())
    objective = float(plan.value) + epsilon * (entropy - of_masses)
    assert float(plan.objective) == pytest.approx(objective, abs=1e-8)
    assert float(plan.dual) == pytest.approx(objective, abs=1e-8)
    assert abs(plan.duality_gap) < 1e-9


def test_plan_is_that_of_dense_loops():
    x, y, epsilon = [0.0, 0.3, 1.0], [0.1, 0.9], 0.25
    a, b = [0.2, 0.3, 0.5], [0.6, 0.4]
    kernel = [[math.exp(-((s - t) ** 2) / epsilon) for t in y] for s in x]
    u, v = [1.0] * 3, [1.0] * 2
    for _ in range(500):
        u = [a[i] / sum(kernel[i][j] * v[j] for j in range(2)) for i in range(3)]
        v = [b[j] / sum(kernel[i][j] * u[i] for i in range(3)) for j in range(2)]
    wanted = [[u[i] * kernel[i][j] * v[j] for j in range(2)] for i in range(3)]
    points = (torch.tensor(part, dtype=F64)[:, None] for part in (x, y))
    weights = (torch.tensor(part, dtype=F64) for part in (a, b))
    plan = sinkhorn(*points, *weights, epsilon=epsilon, tol=1e-13, cost=Euclidean())
    assert np.allclose(plan.matrix, wanted, atol=1e-12)
    assert plan.barycentric_projection.shape == (3, 1)
    assert np.allclose(
        plan.barycentric_projection[:, 0], [(r[0] * y[0] + r[1] * y[1]) / sum(r) for r in wanted], atol=1e-12
    )


def gaussian_objective(s: float, t: float, shift: float, epsilon: float) -> float:
    """OT between N(0, s^2) and N(shift, t^2): Janati, Muzellec, Peyre & Cuturi 2020, theorem 1, epsilon = 2 sigma^2."""
    sigma2 = epsilon / 2
    d = math.sqrt(4 * s**2 * t**2 + sigma2**2)
    return shift**2 + s**2 + t**2 - d + sigma2 * (1 - math.log(2 * sigma2)) + sigma2 * math.log(d + sigma2)


def grid_gaussian(deviation: float, mean: float, n: int = 160) -> tuple[torch.Tensor, torch.Tensor]:
    """Points and masses of the trapezoidal rule, which is accurate to rounding for a Gaussian."""
    z = torch.linspace(-8, 8, n, dtype=F64)
    weights = torch.exp(-z.square() / 2)
    return (mean + deviation * z)[:, None], weights / weights.sum()


def check_gaussian(epsilon: float = 0.5) -> bool:
    (x, a), (y, b) = grid_gaussian(1.0, 0.0), grid_gaussian(0.6, 0.4, 150)
    plan = sinkhorn(x, y, a, b, epsilon=epsilon, tol=1e-12, cost=Euclidean())
    wanted = gaussian_objective(1.0, 0.6, 0.4, epsilon)
    d = math.sqrt(4 * 0.36 + epsilon**2 / 4)
    slope = (d - epsilon / 2) / 2  # covariance of the plan, and its regression on x since s = 1
    inner = a > 1e-6
    images = torch.allclose(plan.barycentric_projection[inner], 0.4 + slope * x[inner], atol=1e-7)
    value = 0.16 + 1 + 0.36 - 2 * slope
    numbers = [float(plan.objective), float(plan.dual), float(plan.value)]
    rows = torch.allclose(plan.apply(torch.ones_like(y))[:, 0], a, atol=1e-10)
    return plan.ok and np.allclose(numbers, [wanted, wanted, value], atol=1e-8) and images and rows


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 4.0])
def test_gaussians_have_their_closed_form(epsilon):
    assert check_gaussian(epsilon)


def test_exact_distance_as_epsilon_vanishes():
    x, y = normal(15, 1), 0.5 * normal(15, 1, seed=1) + 1
    exact = float((x.sort(0).values - y.sort(0).values).square().mean())
    gaps = []
    for epsilon in (0.1, 0.03, 0.01):
        plan = sinkhorn(x, y, epsilon=epsilon, tol=1e-6, max_iterations=5_000, cost=Euclidean())
        gaps.append(float(plan.value) - exact)
        assert -1e-5 <= gaps[-1] <= epsilon * math.log(15)
    assert gaps[2] < 0.2 * gaps[0]


def test_points_of_mass_zero():
    x, y = normal(5, 2), normal(6, 2, seed=1)
    a = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.3], dtype=F64)
    plan = sinkhorn(x, y, a, epsilon=0.1, tol=1e-10, cost=Euclidean())
    kept = sinkhorn(x[a > 0], y, a[a > 0], epsilon=0.1, tol=1e-10, cost=Euclidean())
    assert plan.matrix[a == 0].abs().max() == 0
    torch.testing.assert_close(plan.matrix[a > 0], kept.matrix, atol=1e-9, rtol=0)
    assert torch.isfinite(plan.potentials[0]).all()


@pytest.fixture
def small_storage(monkeypatch):
    """Problems of 300 points count as large: they are streamed, and start from samples of samples."""
    monkeypatch.setattr(sinkhorn_levels, "MAX_STORED", 2_000)
    monkeypatch.setattr(streaming, "MAX_STORED", 2_000)
    monkeypatch.setattr(sinkhorn_levels, "SAMPLE", 20)
    monkeypatch.setattr(sinkhorn_levels, "COARSENING", 4)


@pytest.mark.parametrize(
    ("cost", "p", "reach"), [(Chordal(), 2.0, None), (Geodesic(), 2.0, None), (Euclidean(), 1.0, 0.7)]
)
def test_large_problems_have_the_same_solution(cost, p, reach, request):
    x, y, a, b, values = unit(300, 3), unit(350, 3, seed=1), masses(300), masses(350, 1), normal(350, 4, seed=5)
    options = {"epsilon": 0.1, "cost": cost, "p": p, "reach": reach, "tol": 1e-9}
    small = sinkhorn(x, y, a, b, **options)
    request.getfixturevalue("small_storage")
    large = sinkhorn(x, y, a, b, **options)
    assert large.ok
    for name in ("value", "objective", "dual"):
        assert float(getattr(large, name)) == pytest.approx(float(getattr(small, name)), abs=1e-7)
    torch.testing.assert_close(large.apply(values), small.matrix @ values, atol=1e-8, rtol=0)
    assert max(large.marginal_errors) <= 1e-9


def test_samples_save_iterations(small_storage, monkeypatch):
    monkeypatch.setattr(sinkhorn_levels, "SAMPLE", 250)
    for module in (sinkhorn_levels, streaming):
        monkeypatch.setattr(module, "MAX_STORED", 70_000)
    x, y = unit(1000, 3), torch.nn.functional.normalize(unit(900, 3, seed=1) + torch.tensor([0.8, 0, 0]), dim=-1)
    started = sinkhorn(x, y, epsilon=0.1, tol=0.02, cost=Euclidean())
    problem = Entropic(PairwiseCost.of(x, y, Euclidean()), masses(1000) * 0 + 1 / 1000, masses(900) * 0 + 1 / 900)
    cold = iterate(problem, torch.zeros(900, dtype=F64), epsilon=0.1, tol=0.02, max_iterations=1000)
    assert started.ok
    assert started.iterations < cold.iterations


def test_float32():
    x, y = unit(60, 3), unit(70, 3, seed=1)
    exact = sinkhorn(x, y, epsilon=0.05, tol=1e-10, cost=Euclidean())
    plan = sinkhorn(x.float(), y.float(), epsilon=0.05, cost=Euclidean())
    assert plan.ok
    assert plan.value.dtype == torch.float32
    assert float(plan.objective) == pytest.approx(float(exact.objective), abs=1e-5)


@pytest.mark.parametrize("n", [40, 700])
def test_the_named_epsilon_converges(n):
    """Exactly for small clouds; for larger ones on samples, with a margin."""
    x, y = normal(n, 2), normal(n, 2, seed=1) + 0.5
    failed = sinkhorn(x, y, epsilon=1e-4, max_iterations=20, cost=Euclidean())
    assert failed.status is PlanStatus.ITERATION_LIMIT
    assert not failed.ok
    assert "iteration limit reached after 20 iterations" in failed.outcome
    named = float(failed.outcome.rsplit(" ", 1)[1])
    assert named == failed.remedy_epsilon > 1e-4
    assert sinkhorn(x, y, epsilon=named, max_iterations=20, cost=Euclidean()).ok
    if n == 40:  # and it is not needlessly large
        assert not sinkhorn(x, y, epsilon=named / 4, max_iterations=20, cost=Euclidean()).ok


def test_tiny_epsilon_stays_finite():
    """Annealing finds the optimal assignment or reports that it did not; nothing overflows at c / epsilon = 1e10."""
    from scipy.optimize import linear_sum_assignment

    for seed in range(3):
        x, y = normal(30, 2, seed=seed), normal(30, 2, seed=seed + 10)
        plan = sinkhorn(x, y, epsilon=1e-9, max_iterations=15, cost=Euclidean())
        assert plan.status in (PlanStatus.CONVERGED, PlanStatus.ITERATION_LIMIT)
        assert all(torch.isfinite(potential).all() for potential in plan.potentials)
        assert min(plan.marginal_errors) < 1e-5  # the last update makes one marginal exact, up to rounding
        matrix = (x[:, None] - y).square().sum(-1).numpy()
        exact = matrix[linear_sum_assignment(matrix)].mean()
        assert float(plan.dual) <= exact + 1e-6
        if plan.ok:
            assert float(plan.value) == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("cost", [Euclidean(), Geodesic()])
def test_gradients_are_finite_differences(cost):
    x, y, a, b = unit(6, 3), unit(7, 3, seed=1), masses(6), masses(7, 1)
    options = {"epsilon": 0.2, "cost": cost, "tol": 1e-13, "max_iterations": 5000}
    leaves = [part.clone().requires_grad_() for part in (x, y, a, b)]
    gradients = torch.autograd.grad(sinkhorn(*leaves, **options).objective, leaves)
    for index, gradient in enumerate(gradients):
        direction, values = 0.1 * normal(*gradient.shape, seed=20 + index), []
        if index < 2:
            direction = direction - (direction * leaves[index].detach()).sum(-1, True) * leaves[index].detach()
        else:
            direction = direction - direction.mean()  # masses keep their sum
        for sign in (1, -1):
            moved = [x, y, a, b]
            moved[index] = moved[index] + sign * 1e-4 * direction
            if index < 2:
                moved[index] = torch.nn.functional.normalize(moved[index], dim=-1)
            values.append(float(sinkhorn(*moved, **options).objective))
        assert (values[0] - values[1]) / 2e-4 == pytest.approx(float((gradient * direction).sum()), abs=1e-7)


def test_progress_and_silence():
    shares = []
    sinkhorn(normal(20, 2), normal(20, 2, seed=1), epsilon=0.01, progress=shares.append, cost=Euclidean())
    assert shares == sorted(shares) or max(shares) <= 1
    assert 0 < shares[-1] <= 1


def test_global_settings_of_torch_change_nothing(small_storage):
    x, y, values = unit(100, 3).float(), unit(120, 3, seed=1).float(), normal(120, 2, seed=2).float()
    plain = sinkhorn(x, y, epsilon=0.2, cost=Euclidean())
    coupled = plain.apply(values)
    with torch.autocast("cpu"), torch.device("meta"):
        plan = sinkhorn(x, y, epsilon=0.2, cost=Euclidean())
        assert torch.equal(plan.objective, plain.objective)
        assert torch.equal(plan.apply(values), coupled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, r"epsilon is 0\.0"),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"p": 0.5}, r"p is 0\.5"),
        ({"tol": 1e-20}, "tol is 1e-20"),
        ({"max_iterations": 0}, "max_iterations is 0"),
        ({"cost": "geodesic"}, "cost is 'geodesic'"),
        ({"x": torch.zeros(0, 2, dtype=F64)}, r"x has shape \(0, 2\)"),
        ({"x": torch.zeros(2, 3, 2, dtype=F64)}, r"x has shape \(2, 3, 2\)"),
        ({"x_weights": torch.tensor([1.0, -1.0, 1.0])}, "x_weights holds the entry -1"),
        ({"x_weights": torch.ones(3), "y_weights": torch.ones(2)}, "equal masses"),
        ({"cost": Geodesic()}, r"x holds a zero vector .*pass cost=Euclidean\(\)"),
        ({"cost": Geodesic(), "x": torch.eye(2, dtype=F64)}, r"y holds a token of norm 1.41.*pass cost=Euclidean\(\)"),
        ({"cost": None}, "cost is None"),
    ],
)
def test_bad_input(change, message):
    given = {"x": torch.zeros(3, 2, dtype=F64), "y": torch.ones(2, 2, dtype=F64), "epsilon": 1.0, "cost": Euclidean()}
    with pytest.raises(HelmscopeError, match=message):
        sinkhorn(**given | change)


def test_one_dimension_and_antipodal_points():
    assert float(
        sinkhorn(torch.zeros(1, 1), torch.full((1, 1), 3.0), epsilon=1.0, cost=Euclidean()).value
    ) == pytest.approx(9)
    x = torch.tensor([[1.0, 0.0]], dtype=F64)
    assert float(sinkhorn(x, -x, epsilon=0.1, cost=Geodesic()).value) == pytest.approx(math.pi**2)


def _axes_exchanged(right, self, *given, **options):
    return right(self.transposed, *given, **options) if len(self.x) == len(self.y) else right(self, *given, **options)


LSE = (PairwiseCost, ["log_sum_exp"])
FAULTS = {
    "epsilon doubled": Plant(
        lambda right, self, h, *, epsilon, guess=None: right(self, h, epsilon=2 * epsilon, guess=guess), LSE
    ),
    "sign of the cost": Plant(
        lambda right, self, h, *, epsilon, guess=None: right(self, h, epsilon=-epsilon, guess=guess), LSE
    ),
    "cost not squared": Plant(lambda right, self, distance: distance, (PairwiseCost, ["power"])),
    "sign of the update": Plant(lambda right, *given: -right(*given), (Entropic, ["softmin"])),
    "masses of the other cloud": Plant(
        lambda right, self, g, epsilon, guess: right(self, g, epsilon, guess) + epsilon * float(g[0]),
        (Entropic, ["softmin"]),
    ),
    "mean cost doubled": Plant(
        lambda right, *given, **options: [k * part for k, part in zip((1, 2), right(*given, **options), strict=True)],
        (PairwiseCost, ["mean_cost"]),
    ),
    "plan divided by masses": Plant(
        lambda right, self, h, shift, values, *, epsilon: right(self, h, 0 * shift, values, epsilon=epsilon),
        (PairwiseCost, ["couple"]),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name, monkeypatch):
    monkeypatch.setattr(sinkhorn_plan, "converging_epsilon", lambda *given, **options: 1.0)  # slow if nothing converges
    assert outcome(FAULTS[name], check_gaussian) == "seen"


def test_exchanged_axes_are_seen(monkeypatch):
    """Where the numbers of points agree, exchanging rows and columns of the costs goes unnoticed by shapes."""
    monkeypatch.setattr(sinkhorn_plan, "converging_epsilon", lambda *given, **options: 1.0)
    x, y, a = normal(12, 2), normal(12, 2, seed=1), masses(12)

    def check() -> bool:
        plan = sinkhorn(x, y, a, epsilon=0.5, tol=1e-9, max_iterations=200, cost=Euclidean())
        f, g = plan.potentials
        matrix = (x[:, None] - y).square().sum(-1)
        row = torch.exp((f[:, None] + g - matrix) / 0.5).mean(-1)
        return plan.ok and bool(torch.allclose(row, torch.ones_like(row), atol=1e-7))

    assert check()
    assert outcome(Plant(_axes_exchanged, LSE), check) == "seen"
