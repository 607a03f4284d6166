"""Barycenters against Gaussians, translations, McCann interpolation, and POT."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helmscope.geometry import sphere
from helmscope.transport import Chordal, Euclidean, Geodesic, fixed_support_barycenter, free_support_barycenter
from helmscope.transport.barycenter import _karcher_means, _means
from helmscope.types import HelmscopeError
from support.planting import Plant, outcome

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def check_interpolation() -> bool:
    """The barycenter of two clouds of equal size is the McCann interpolation along their optimal assignment."""
    import ot

    x, y, share = normal(12, 2), normal(12, 2, seed=1) + torch.tensor([2.0, 0.0]), 0.3
    targets = torch.as_tensor(ot.emd([], [], ot.dist(x.numpy(), y.numpy()))).argmax(1)
    wanted = (1 - share) * x + share * y[targets]
    result = free_support_barycenter(x, [x, y], barycentric_weights=[1 - share, share], cost=Euclidean())
    w2 = (x - y[targets]).square().sum(-1).mean()
    return (
        result.ok
        and torch.allclose(result.points, wanted, atol=1e-9)
        and abs(float(result.value) - float(share * (1 - share) * w2)) < 1e-9
    )


def test_two_clouds_interpolate():
    assert check_interpolation()


def test_translations():
    x = normal(20, 3)
    shifts = normal(3, 3, seed=1)
    result = free_support_barycenter(
        x, [x + shift for shift in shifts], barycentric_weights=[1, 2, 3], cost=Euclidean()
    )
    mean = (torch.tensor([1.0, 2, 3], dtype=F64) / 6) @ shifts
    torch.testing.assert_close(result.points, x + mean, atol=1e-9, rtol=0)


def test_gaussians():
    """Linear images A_l z of one symmetric cloud z: the barycenter is A z with A = sum lambda_l (A A_l^2 A)^(1/2) A^-1,
    the fixed point of Agueh & Carlier for the covariances A_l^2."""
    z = normal(60, 2)
    maps = []
    for seed in range(3):
        m = normal(2, 2, seed=seed + 5)
        maps.append(0.2 * m @ m.mT + 0.5 * torch.eye(2, dtype=F64))

    def root(matrix: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values.sqrt()) @ vectors.mT

    a = torch.eye(2, dtype=F64)
    for _ in range(100):
        a_inverse = torch.linalg.inv(a)
        step = sum(root(a @ m @ m @ a) for m in maps) / 3
        a = root(a_inverse @ step @ step @ a_inverse)
    # Gaussian maps are optimal for the clouds T_l x, where x = a z and T_l is the optimal map between the covariances
    x = z @ a
    inverse = torch.linalg.inv(a)
    transports = [inverse @ root(a @ m @ m @ a) @ inverse for m in maps]
    assert torch.allclose(sum(transports) / 3, torch.eye(2, dtype=F64), atol=1e-10)
    result = free_support_barycenter(x, [x @ t for t in transports], cost=Euclidean())
    torch.testing.assert_close(result.points, x, atol=1e-9, rtol=0)


@pytest.mark.parametrize("start", [1, 2])
def test_free_support_is_that_of_pot(start):
    import ot

    clouds = [normal(15, 2, seed=k) + k for k in range(3)]
    weights = [normal(15, seed=10 + k).abs() + 0.1 for k in range(3)]
    weights = [w / w.sum() for w in weights]
    x = normal(10, 2, seed=20 + start)
    wanted = ot.lp.free_support_barycenter(
        [c.numpy() for c in clouds], [w.numpy() for w in weights], x.numpy(), numItermax=200, stopThr=1e-20
    )
    result = free_support_barycenter(x, clouds, weights, tol=1e-10, max_iterations=200, cost=Euclidean())
    assert np.allclose(result.points, wanted, atol=1e-8)


def test_entropic_plans_come_close_and_shrink():
    x = normal(10, 2)
    shifted = free_support_barycenter(x, [x, x + 1], epsilon=1.0, tol=1e-3, cost=Euclidean())
    assert shifted.ok
    assert float((shifted.points.mean(0) - x.mean(0) - 0.5).abs().max()) < 1e-3
    assert float(shifted.points.var(0).sum()) < float(x.var(0).sum())


def test_geodesic_barycenter_is_the_middle_of_arcs():
    """Clouds on two circles of latitude: each point moves to the middle of its meridian arc; Chordal agrees at 1/2."""
    longitude = torch.arange(9, dtype=F64) * 2 * math.pi / 9

    def circle(latitude: float) -> torch.Tensor:
        c, s = math.cos(latitude), math.sin(latitude)
        return torch.stack([c * longitude.cos(), c * longitude.sin(), torch.full_like(longitude, s)], -1)

    low, high = circle(0.1), circle(0.7)
    for share in (0.5, 0.25):
        result = free_support_barycenter(low, [low, high], barycentric_weights=[1 - share, share], cost=Geodesic())
        torch.testing.assert_close(result.points, circle(0.1 + 0.6 * share), atol=1e-9, rtol=0)
        assert float(result.value) == pytest.approx(share * (1 - share) * 0.36, abs=1e-9)
    result = free_support_barycenter(low, [low, high], cost=Chordal())
    torch.testing.assert_close(result.points, circle(0.4), atol=1e-9, rtol=0)


def test_karcher_mean_is_a_critical_point():
    x, y = (torch.nn.functional.normalize(normal(n, 3, seed=n) + 1, dim=-1) for n in (4, 6))
    result = free_support_barycenter(x, [y], cost=Geodesic(), epsilon=0.5)
    assert result.ok
    from helmscope.transport import sinkhorn

    plan = sinkhorn(result.points, y, epsilon=0.5, cost=Geodesic()).matrix
    tangents = (plan[..., None] * sphere.log(result.points[:, None], y)).sum(1)
    assert float(tangents.abs().max()) < 1e-5


def test_antipodal_points_are_counted():
    x = torch.tensor([[0.0, 0.0, 1.0]], dtype=F64)
    chord = free_support_barycenter(x, [x, -x], cost=Chordal())
    assert torch.equal(chord.points, x)  # the mean is 0: the point stays
    assert chord.antipodal == 1
    assert "antipodal" in chord.outcome
    arc = free_support_barycenter(x, [x, -x], cost=Geodesic())
    assert arc.ok
    assert float(arc.points[0, 2]) == pytest.approx(0, abs=1e-9)  # on the equator, in the direction of sphere.log
    assert float(arc.value) == pytest.approx(math.pi**2 / 4)


def histograms() -> tuple[torch.Tensor, torch.Tensor]:
    grid = torch.linspace(0, 1, 30, dtype=F64)[:, None]
    columns = [torch.exp(-(grid[:, 0] - m).square() / (2 * s**2)) for m, s in ((0.25, 0.06), (0.7, 0.1))]
    return grid, torch.stack([c / c.sum() for c in columns], -1)


def check_grid() -> bool:
    import ot

    grid, weights = histograms()
    matrix = ot.dist(grid.numpy(), grid.numpy())
    wanted = ot.bregman.barycenter(
        weights.numpy(), matrix, 0.02, weights=np.array([0.3, 0.7]), method="sinkhorn_log", stopThr=1e-13,
        numItermax=20_000,
    )  # fmt: skip
    result = fixed_support_barycenter(
        grid,
        [grid, grid],
        list(weights.mT),
        barycentric_weights=[0.3, 0.7],
        epsilon=0.02,
        tol=1e-11,
        max_iterations=20_000,
        cost=Euclidean(),
    )
    return result.ok and np.allclose(result.weights, wanted, atol=1e-8)


def test_entropic_grid_is_that_of_pot():
    assert check_grid()


def test_exact_grid_is_that_of_pot():
    import ot

    grid, weights = histograms()
    matrix = ot.dist(grid.numpy(), grid.numpy())
    shares = np.array([0.3, 0.7])
    result = fixed_support_barycenter(
        grid, [grid, grid], list(weights.mT), barycentric_weights=list(shares), cost=Euclidean()
    )
    assert result.ok
    assert float(result.weights.sum()) == pytest.approx(1, abs=1e-9)

    def value(w: np.ndarray) -> float:
        return sum(s * ot.emd2(w / w.sum(), b.numpy(), matrix) for s, b in zip(shares, weights.mT, strict=True))

    assert float(result.value) == pytest.approx(value(result.weights.numpy()), abs=1e-9)
    theirs = ot.lp.barycenter(weights.numpy(), matrix, shares, solver="highs")
    assert float(result.value) <= value(np.clip(theirs, 0, None)) + 1e-9
    mean = 0.3 * 0.25 + 0.7 * 0.7
    assert float((result.weights * grid[:, 0]).sum()) == pytest.approx(mean, abs=0.01)
    blurred = fixed_support_barycenter(
        grid, [grid, grid], list(weights.mT), barycentric_weights=list(shares), epsilon=0.002, cost=Euclidean()
    )
    assert float((blurred.weights - result.weights).abs().sum()) < 0.3
    assert float(blurred.value) >= float(result.value) - 1e-6


def test_iteration_limit_is_said():
    grid, weights = histograms()
    result = fixed_support_barycenter(
        grid, [grid, grid], list(weights.mT), epsilon=1e-3, max_iterations=2, cost=Euclidean()
    )
    assert not result.ok
    assert "iteration limit reached after 2 iterations: marginal error" in repr(result)
    assert "raise max_iterations or tol, or take epsilon >= " in result.outcome
    assert fixed_support_barycenter(
        grid, [grid, grid], list(weights.mT), epsilon=result.remedy_epsilon, max_iterations=2, cost=Euclidean()
    ).ok
    moving = free_support_barycenter(grid, [grid, grid + 5], max_iterations=1, cost=Euclidean())
    assert not moving.ok
    assert moving.outcome.startswith("iteration limit reached after 1 iteration: movement 2.5: raise max_iterations")


def test_an_epsilon_too_small_is_reported_with_one_that_converges():
    x, y = (torch.nn.functional.normalize(normal(n, 3, seed=n), dim=-1) for n in (5, 6))
    limits = {"tol": 1.0, "max_iterations": 1, "cost": Chordal()}
    result = free_support_barycenter(x, [x, y], epsilon=1e-3, **limits)
    assert not result.ok
    assert "marginal error of a plan" in result.outcome
    enough = float(result.outcome.rpartition("take epsilon >= ")[2])
    assert free_support_barycenter(x, [x, y], epsilon=enough, **limits).ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clouds": []}, "clouds is empty, but it must be a list of at least one cloud"),
        ({"clouds": normal(4, 2)}, "clouds is a Tensor"),
        (
            {"barycentric_weights": [1.0]},
            "barycentric_weights has length 1, but it must be a list with one entry for each of the 2 clouds",
        ),
        ({"barycentric_weights": [0.0, 0.0]}, "its sum must be > 0"),
        ({"barycentric_weights": [-1.0, 2.0]}, r"barycentric_weights\[0\] is -1\.0"),
        ({"cloud_weights": [None]}, "cloud_weights has length 1"),
        ({"cloud_weights": torch.ones(3)}, "cloud_weights is a Tensor"),
        ({"cloud_weights": [None, -torch.ones(5)]}, r"cloud_weights\[1\] holds the entry -1"),
        ({"clouds": [normal(4, 2), normal(4, 3)]}, r"clouds\[1\] has dimension 3, but it must have that of points, 2"),
        ({"cost": Geodesic()}, r"points holds a token of norm .*pass cost=Euclidean\(\)"),
        ({"epsilon": 0.0}, r"epsilon is 0\.0"),
        ({"points": torch.zeros(0, 2, dtype=F64)}, r"points has shape \(0, 2\), but it must be"),
    ],
)
@pytest.mark.parametrize("solver", [free_support_barycenter, fixed_support_barycenter])
def test_bad_input(solver, change, message):
    given = {"points": normal(3, 2), "clouds": [normal(4, 2), normal(5, 2)], "cost": Euclidean()}
    with pytest.raises(HelmscopeError, match=message):
        solver(**given | change)


def test_planted_faults_are_seen():
    doubled = Plant(lambda right, x, *given: 2 * right(x, *given), _means)
    backwards = Plant(lambda right, x, *given: 2 * x - right(x, *given), _means)
    unweighted = Plant(lambda right, x, pairs, plans, shares, cost: right(x, pairs, plans, [0.5, 0.5], cost), _means)
    for fault in (doubled, backwards, unweighted):
        assert outcome(fault, check_interpolation) == "seen"
    assert _karcher_means is not _means


def test_a_choice_between_antipodal_points_is_reported() -> None:
    """Also if no pair is antipodal any more once the choice is made."""
    u = torch.eye(3, dtype=torch.float64)[:1]
    found = free_support_barycenter(u, [u, -u], cost=Geodesic())
    assert float(found.value) == pytest.approx((math.pi / 2) ** 2)
    assert found.antipodal == 1
    assert "not unique" in found.outcome
