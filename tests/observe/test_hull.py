"""The distance to a convex hull against closed forms, SciPy's programs and hulls, and an enumeration of all faces."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from scipy.spatial import ConvexHull

from helmscope.observe.hull import hull_distance
from helmscope.types import HelmscopeError

Array = np.ndarray


def distance(x: object, v: object) -> float:
    """One point, one cloud."""
    point, cloud = (torch.as_tensor(np.asarray(each, dtype=np.float64)) for each in (x, v))
    return float(hull_distance(point[None], cloud)[0])


def reach(x: Array, v: Array) -> float:
    """The largest |v_j - x|, which the error is measured by."""
    return float(np.linalg.norm(v - x, axis=-1).max())


def by_faces(x: Array, v: Array) -> float:
    """The least distance to the hull of d + 1 values or fewer whose nearest affine combination has no negative weight,
    in 50 digits.
    """
    with mpmath.workdps(50):
        best = mpmath.inf
        for k in range(1, min(len(v), len(x) + 1) + 1):
            for chosen in itertools.combinations(range(len(v)), k):
                p = [
                    mpmath.matrix([mpmath.mpf(a) - mpmath.mpf(b) for a, b in zip(v[j], x, strict=True)]) for j in chosen
                ]
                nearest = p[0]
                if k > 1:
                    edges = mpmath.matrix([[q[i] - p[0][i] for q in p[1:]] for i in range(len(x))])
                    try:
                        w = mpmath.lu_solve(edges.T * edges, -(edges.T * p[0]))
                    except ZeroDivisionError:
                        continue  # the values are not affinely independent: fewer of them span the same
                    if min(w) < 0 or sum(w) > 1:
                        continue
                    nearest = p[0] + edges * w
                best = min(best, mpmath.norm(nearest))
        return float(best)


# Closed forms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 3, 8, 40])
def test_the_origin_and_the_standard_simplex(d: int) -> None:
    assert distance(np.zeros(d), np.eye(d)) == pytest.approx(d**-0.5, rel=4e-16)


def test_a_segment() -> None:
    draw = np.random.default_rng(1)
    for _ in range(200):
        a, b, x = draw.normal(size=(3, 5))
        t = np.clip((x - a) @ (b - a) / ((b - a) @ (b - a)), 0, 1)
        assert distance(x, [a, b]) == pytest.approx(np.linalg.norm(x - a - t * (b - a)), rel=1e-14)


@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_a_cube(d: int) -> None:
    cube = np.array(list(itertools.product([-1.0, 1.0], repeat=d)))
    for x in 2 * np.random.default_rng(d).normal(size=(100, d)):
        outside = np.linalg.norm(np.maximum(np.abs(x) - 1, 0))
        assert abs(distance(x, cube) - outside) <= 1e-15 * reach(x, cube)


def test_one_value_is_a_point() -> None:
    assert distance([3.0, 4.0], [[0.0, 0.0]]) == 5.0
    assert distance([3.0, 4.0], [[3.0, 4.0]]) == 0.0
    assert distance([0.0, 0.0], [[1e-310, 0.0], [1.0, 0.0]]) <= 1e-310


def test_one_dimension_is_an_interval() -> None:
    draw = np.random.default_rng(2)
    for _ in range(200):
        v, x = draw.normal(size=(draw.integers(1, 9), 1)), draw.normal(size=1) * 2
        outside = max(v.min() - x[0], x[0] - v.max(), 0.0)
        assert abs(distance(x, v) - outside) <= 1e-15 * reach(x, v)


def test_a_value_has_distance_0_exactly() -> None:
    v = np.random.default_rng(3).normal(size=(16, 8))
    assert [distance(each, v) for each in v] == [0.0] * 16


# Against other methods ------------------------------------------------------------------------------------------------


def clouds(kind: str, count: int) -> list[tuple[Array, Array]]:
    """Points, within and without, and small clouds of one kind."""
    draw = np.random.default_rng(sum(map(ord, kind)))
    made = []
    for k in range(count):
        n, d = int(draw.integers(2, 7)), int(draw.integers(1, 4))
        v = draw.normal(size=(n, d))
        if kind == "repeated":
            v = v[draw.integers(0, n, n)]
        if kind == "nearly repeated":
            v = v[draw.integers(0, n, n)] + 1e-9 * draw.normal(size=(n, d))
        if kind == "collinear":
            v = np.outer(draw.normal(size=n), v[0]) + draw.normal(size=d)
        if kind == "grid":
            v = draw.integers(-1, 2, size=(n, d)).astype(float)
        if kind == "thin":
            v = v * np.logspace(0, -draw.uniform(4, 12), d) @ np.linalg.qr(draw.normal(size=(d, d)))[0]
        if kind == "far away":
            v = v + 1e6
        x = draw.dirichlet(np.ones(n)) @ v
        if k % 3:
            x = x + (v.max(0) - v.min(0)) * draw.normal(size=d) * (0.1 if k % 3 == 1 else 2.0)
        if kind == "near a value":
            x = v[0] + 10 ** -draw.uniform(3, 17) * draw.normal(size=d)
        made.append((x, v))
    return made


@pytest.mark.parametrize(
    "kind", ["plain", "repeated", "nearly repeated", "collinear", "grid", "thin", "far away", "near a value"]
)
def test_every_face_in_50_digits(kind: str) -> None:
    """Largest error seen in any kind: 4e-16 of the largest |v_j - x|."""
    for x, v in clouds(kind, 60):
        assert abs(distance(x, v) - by_faces(x, v)) <= 2e-15 * reach(x, v)


def test_a_quadratic_program() -> None:
    """SLSQP, which reaches about 7 digits of a distance that is not 0."""
    draw = np.random.default_rng(5)
    for _ in range(20):
        v, x = draw.normal(size=(7, 3)), 2 * draw.normal(size=3)
        found = minimize(
            lambda w, v=v, x=x: np.sum((w @ v - x) ** 2),
            np.full(7, 1 / 7),
            method="SLSQP",
            bounds=[(0, 1)] * 7,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            options={"ftol": 1e-15, "maxiter": 500},
        )
        assert abs(distance(x, v) ** 2 - found.fun) <= 1e-7


def test_membership_is_that_of_a_linear_program() -> None:
    draw = np.random.default_rng(6)
    inside = 0
    for _ in range(60):
        v, x = draw.normal(size=(16, 8)), 0.15 * draw.normal(size=8)
        feasible = linprog(np.zeros(16), A_eq=np.vstack([v.T, np.ones(16)]), b_eq=np.append(x, 1.0)).status == 0
        assert (distance(x, v) <= 1e-13) == feasible
        inside += feasible
    assert 15 <= inside <= 45


def test_facets_bound_the_distance_from_below() -> None:
    """Outside, a hull is at least as far as the facet that is passed by most, and as far as that one's plane where the
    foot of the perpendicular lies in the hull.
    """
    draw = np.random.default_rng(7)
    equal = 0
    for _ in range(200):
        v, x = draw.normal(size=(12, 3)), 2 * draw.normal(size=3)
        planes = ConvexHull(v).equations
        passed = planes[:, :-1] @ x + planes[:, -1]
        most = passed.argmax()
        if passed[most] <= 0:
            assert distance(x, v) <= 1e-15 * reach(x, v)
            continue
        assert distance(x, v) >= passed[most] - 1e-14
        foot = x - passed[most] * planes[most, :-1]
        if (planes[:, :-1] @ foot + planes[:, -1]).max() <= 1e-13:
            equal += 1
            assert distance(x, v) == pytest.approx(passed[most], rel=1e-12)
    assert equal > 20


def test_points_of_thin_hulls_in_many_dimensions_are_inside() -> None:
    """Largest distance seen: 1.4e-15 of the largest |v_j - x|, for hulls up to 1e14 times longer than wide."""
    draw = np.random.default_rng(8)
    for k in range(300):
        n, d = int(draw.integers(2, 24)), int(draw.integers(1, 12))
        v = (
            draw.normal(size=(n, d))
            * np.logspace(0, -draw.uniform(0, 14), d)
            @ np.linalg.qr(draw.normal(size=(d, d)))[0]
        )
        v = v[draw.integers(0, n, n)] if k % 3 == 0 else v
        x = draw.dirichlet(np.full(n, draw.choice([0.1, 1.0]))) @ v
        assert distance(x, v) <= 4e-15 * max(reach(x, v), np.abs(v).max())


# What may not matter --------------------------------------------------------------------------------------------------


def test_moving_turning_scaling_and_relabelling() -> None:
    draw = np.random.default_rng(9)
    x, v = 3 * draw.normal(size=8), draw.normal(size=(16, 8))
    turn, shift = np.linalg.qr(draw.normal(size=(8, 8)))[0], draw.normal(size=8)
    known = distance(x, v)
    assert known > 1
    assert distance(x @ turn + shift, v @ turn + shift) == pytest.approx(known, rel=1e-14)
    assert distance(x, v[draw.permutation(16)]) == pytest.approx(known, rel=1e-14)
    for scale in (1e-200, 1e-30, 1e30, 1e200):
        assert distance(scale * x, scale * v) == pytest.approx(scale * known, rel=1e-14)


def test_a_batch_is_its_points_one_by_one() -> None:
    draw = np.random.default_rng(10)
    x, v = (torch.from_numpy(draw.normal(size=(2, 3, n, 4))) for n in (5, 7))
    mask = torch.from_numpy(draw.random((2, 3, 5, 7)) < 0.6) | (torch.arange(7) == 0)
    whole, masked = hull_distance(x, v), hull_distance(x, v, mask=mask)
    assert whole.shape == masked.shape == (2, 3, 5)
    for b, c, i in np.ndindex(2, 3, 5):
        assert float(whole[b, c, i]) == distance(x[b, c, i], v[b, c])
        assert float(masked[b, c, i]) == distance(x[b, c, i], v[b, c][mask[b, c, i]])
    assert bool((masked >= whole - 1e-14).all())
    assert bool((masked > whole + 0.1).any())


def test_a_causal_mask() -> None:
    v = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    x = torch.full((3, 1), 2.0, dtype=torch.float64)
    assert hull_distance(x, v, mask=torch.ones(3, 3, dtype=torch.bool).tril()).tolist() == [2.0, 1.0, 0.0]


def test_the_dtype_stays_and_no_gradient_passes() -> None:
    x = torch.tensor([[3.0, 4.0]], requires_grad=True)
    seen = hull_distance(x, torch.zeros(1, 2))
    assert (seen.dtype, seen.requires_grad, seen.tolist()) == (torch.float32, False, [5.0])
    assert hull_distance(torch.zeros(0, 2), torch.zeros(1, 2)).shape == (0,)


# Refusals -------------------------------------------------------------------------------------------------------------

SQUARE = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("points", "values", "mask", "words"),
    [
        ([[1.0, 2.0]], SQUARE, None, "points is a list, but it must be a torch tensor"),
        (torch.zeros(2), SQUARE, None, r"points has shape \(2,\), but it must be \(..., number of points, d\)"),
        (torch.zeros(3, 2), torch.zeros(2), None, r"values has shape \(2,\), but it must be"),
        (
            torch.zeros(3, 2),
            torch.zeros(4, 3),
            None,
            r"values has shape \(4, 3\), but points .* need \(n, 2\) with n >= 1",
        ),
        (torch.zeros(5, 3, 2), SQUARE, None, r"values has shape \(4, 2\), but points .* need \(5, n, 2\)"),
        (torch.zeros(3, 2), torch.zeros(0, 2), None, r"values has shape \(0, 2\), but"),
        (torch.full((1, 2), torch.nan), SQUARE, None, "points holds NaN or infinite entries"),
        (torch.zeros(1, 2), SQUARE / 0, None, "values holds NaN or infinite entries"),
        (torch.zeros(3, 2), SQUARE, torch.ones(3, 4), r"mask is torch.float32 of \(3, 4\), but it must be .* booleans"),
        (torch.zeros(3, 2), SQUARE, torch.ones(4, 3) > 0, r"mask is torch.bool of \(4, 3\), but .* shape \(3, 4\)"),
        (torch.zeros(3, 2), SQUARE, [True], "mask is a list, but it must be a torch tensor of booleans"),
        (
            torch.zeros(1, 2),
            SQUARE,
            torch.ones(1, 4) < 0,
            "mask leaves a point without any value, but every point needs",
        ),
    ],
)
def test_refusals(points: object, values: object, mask: object, words: str) -> None:
    with pytest.raises(HelmscopeError, match=words):
        hull_distance(points, values, mask=mask)  # type: ignore[arg-type]
