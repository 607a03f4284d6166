"""Critical points with their Morse index: landscapes where all are known, degenerate ones, the Euler characteristic."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.activations import Tanh
from helmscope.geometry import sphere, surface
from helmscope.geometry.critical_points import find_critical_points
from helmscope.geometry.hessian import tangent_hessian
from support.planting import Plant, outcome


def starts(n, d, seed=0):
    return hs.Uniform(n=n, dim=d).sample(seed=seed)


def diagonal(x):
    return (x.square() * torch.arange(1.0, x.shape[-1] + 1, dtype=x.dtype)).sum(-1) / 2


def angle_on_circle(x):
    return torch.atan2(x[..., 1], x[..., 0])


KNOWN = {  # dimension, potential, number of critical points of each index
    "quadratic on S^1": (2, diagonal, [2, 2]),
    "quadratic on S^2": (3, diagonal, [2, 2, 2]),
    "quadratic on S^4": (5, diagonal, [2, 2, 2, 2, 2]),
    "linear on S^3": (4, lambda x: x[..., 0], [1, 0, 0, 1]),
    "three waves on S^1": (2, lambda x: torch.cos(3 * angle_on_circle(x)), [3, 3]),
    "xyz on S^2": (3, lambda x: x.prod(-1), [4, 6, 4]),
    "fourth powers on S^2": (3, lambda x: x.pow(4).sum(-1), [6, 12, 8]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_all_critical_points_are_found(name: str) -> None:
    d, potential, counts = KNOWN[name]
    found = find_critical_points(potential, starts(192, d))
    assert torch.bincount(found.index, minlength=d).tolist() == counts
    assert found.consistent
    assert found.euler_sum == found.euler_characteristic == (2 if d % 2 else 0)
    assert int(found.hits.sum()) + found.stalled == found.starts == 192
    assert not found.degenerate.any()
    assert float(found.gradient_norms.max()) < 1e-13 * found.scale
    slopes = surface.gradient(potential, found.points)
    assert torch.allclose(torch.linalg.vector_norm(slopes, dim=-1), found.gradient_norms, atol=1e-14 * found.scale)
    assert len(found.basins) == counts[0]
    assert float(found.values.max()) == float(found.values[found.basins].max())


def test_the_points_of_a_quadratic_are_its_axes() -> None:
    found = find_critical_points(diagonal, starts(64, 3))
    assert torch.allclose(
        found.points.abs(), torch.eye(3, dtype=torch.float64).flip(0).repeat_interleave(2, 0), atol=1e-14
    )
    assert torch.allclose(found.values, torch.tensor([1.5, 1.5, 1.0, 1.0, 0.5, 0.5], dtype=torch.float64))
    expected = torch.tensor([[1.0, 2.0], [-1.0, 1.0], [-2.0, -1.0]], dtype=torch.float64).repeat_interleave(2, 0)
    assert torch.allclose(found.curvatures, expected)


def test_the_potential_of_an_mlp() -> None:
    g = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=g)  # noqa: E731
    mlp = hs.MLP(w_in=2 * normal(24, 3), w_out=normal(3, 24), b_in=normal(24), activation=Tanh())
    split = hs.helmholtz(mlp)
    found = find_critical_points(split, starts(48, 3))
    assert found.consistent
    by_autograd = find_critical_points(lambda x: split.potential(x), starts(48, 3))
    assert torch.allclose(found.points, by_autograd.points, atol=1e-12)
    # the tangential force vanishes there, since f = grad U + R and R is subtracted
    force = sphere.project(found.points, mlp(found.points) - split.swirl(found.points))
    assert float(force.abs().max()) < 1e-12


def test_extrema_are_found_where_the_gradient_alone_leads_nowhere() -> None:
    """In high dimension almost all starts end at minima of |grad U| that are not 0; they are tried again."""
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=g)  # noqa: E731
    d, hidden = 8, 64
    rows = {"w_gate": normal(hidden, d), "w_up": normal(hidden, d), "w_out": normal(d, hidden)}
    split = hs.helmholtz(hs.GatedMLP(**rows, b_gate=normal(hidden), b_up=normal(hidden)))
    found = find_critical_points(split, starts(24, d))
    assert {0, d - 1} <= set(found.index.tolist())
    sample = split.potential(starts(2000, d, seed=1))
    assert float(found.values.max()) > float(sample.max())
    assert float(found.values.min()) < float(sample.min())


def test_a_potential_with_a_singularity() -> None:
    """U = -1 / |x - e_1| has one minimum of V, at -e_1; starts near the singularity do not stop the search."""
    pole = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    u = lambda x: -1 / torch.linalg.vector_norm(x - pole, dim=-1)  # noqa: E731
    found = find_critical_points(u, starts(64, 3))
    assert torch.allclose(found.points[0], -pole, atol=1e-12)
    assert found.index[0] == 0


def test_incomplete_lists_are_noticed() -> None:
    found = find_critical_points(diagonal, starts(192, 3)[:2])
    assert not found.consistent
    assert found.outcome.endswith("use more starts")


def test_degenerate_points_are_flagged() -> None:
    circle = find_critical_points(lambda x: x[..., 2] ** 2, starts(32, 3))  # the equator consists of minima of U
    assert circle.degenerate.sum() > 2
    assert circle.euler_sum is None
    assert "degenerate, so the sum of (-1)^index is not defined" in circle.outcome
    monkey = find_critical_points(lambda x: x[..., 0] ** 3 - 3 * x[..., 0] * x[..., 1] ** 2, starts(128, 3))
    poles = monkey.points[monkey.degenerate]
    assert sorted(poles[:, 2].round(decimals=6).tolist()) == [-1.0, 1.0]
    assert find_critical_points(lambda x: 0 * x[..., 0], starts(5, 3)).degenerate.all()


def test_float32_is_enough_for_the_index() -> None:
    found = find_critical_points(diagonal, starts(64, 3).float())
    assert found.index.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.points.dtype == torch.float32


def test_equal_starts_give_equal_points_in_any_order() -> None:
    x = starts(64, 3)
    one, other = find_critical_points(diagonal, x), find_critical_points(diagonal, x.flip(0))
    assert torch.allclose(one.values, other.values)
    assert torch.equal(one.index, other.index)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_critical_points(diagonal, torch.eye(3)[0]), "starts has shape"),
        (lambda: find_critical_points(diagonal, torch.eye(3)[None]), r"starts has shape \(1, 3, 3\), but it must be"),
        (lambda: find_critical_points(diagonal, 2 * torch.eye(3)), "starts holds a token of norm 2"),
        (lambda: find_critical_points(diagonal, torch.eye(3), separation=0), "separation is 0, but"),
        (lambda: find_critical_points(diagonal, torch.eye(3), max_iterations=0), "max_iterations is 0, but"),
        (lambda: find_critical_points("U", torch.eye(3)), "potential is 'U', but it must be a Potential"),
        (lambda: find_critical_points(lambda x: x[..., 0].log(), -torch.eye(3)), "where a derivative is not finite"),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        call()


def basin_of_three_waves() -> bool:
    """The highest maximum of U = cos 3 theta + cos theta / 2 is at theta = 0, with V'' = 9.5."""
    u = lambda x: torch.cos(3 * angle_on_circle(x)) + x[..., 0] / 2  # noqa: E731
    found = find_critical_points(u, starts(64, 2))
    at_zero = ((found.points[:, 0] - 1).abs() < 1e-12).nonzero()[:, 0]
    return at_zero.tolist() == [0] and math.isclose(float(found.curvatures[0, 0]), 9.5, rel_tol=1e-12)


FAULTS = {
    "sign": lambda right, u, x: -right(u, x),
    "factor": lambda right, u, x: right(u, x) / 2,
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str) -> None:
    assert basin_of_three_waves()
    assert outcome(Plant(FAULTS[name], tangent_hessian), basin_of_three_waves) == "seen"
