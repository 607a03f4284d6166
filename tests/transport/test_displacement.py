"""Displacement interpolation: constant speed along geodesics, also between antipodal points."""

import pytest
import torch

import helmscope as hs
from helmscope.transport import Chordal, Euclidean, circle_plan, exact_plan, interpolate, line_plan
from support.refusal import refused
from support.transport_oracles import random_weights, unit_cloud


@pytest.mark.parametrize("d", [2, 3, 6])
def test_interpolations_have_constant_speed(d: int) -> None:
    """W2(mu_s, mu_t) = |t - s| W2(mu_0, mu_1)."""
    x, y, a = unit_cloud(5, d, 0), unit_cloud(7, d, 1), random_weights(5, 2)
    plan = exact_plan(x, y, a) if d > 2 else circle_plan(x, y, a)
    whole = float(hs.w2(x, y, a))
    for s, t in ((0.0, 0.3), (0.3, 0.8), (0.8, 1.0)):
        (u, mass), (v, other) = interpolate(plan, s), interpolate(plan, t)
        assert hs.w2(u, v, mass, other) == pytest.approx((t - s) * whole, abs=1e-12)
    start, mass = interpolate(plan, 0)
    assert hs.w2(start, x, mass, a) < 1e-7
    assert hs.w2(interpolate(plan, 1)[0], y, mass) < 1e-7


def test_straight_lines() -> None:
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[4.0], [6.0]])
    points, mass = interpolate(line_plan(x, y), 0.25)
    assert points[:, 0].tolist() == [1.0, 2.25]
    assert mass.tolist() == [0.5, 0.5]


def test_antipodal_points_move_along_a_fixed_half_circle() -> None:
    x = torch.tensor([[0.6, 0.0, 0.8]], dtype=torch.float64)
    plan = exact_plan(x, -x)
    halfway, _ = interpolate(plan, 0.5)
    assert torch.allclose(halfway, torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64))  # towards the smallest entry
    assert torch.equal(interpolate(exact_plan(x.clone(), -x), 0.5)[0], halfway)
    assert torch.allclose(interpolate(plan, 1.0)[0], -x)


def test_bad_input_is_refused() -> None:
    plan = exact_plan(unit_cloud(2, 3, 0), unit_cloud(2, 3, 1))
    refused(lambda: interpolate(plan, 1.5), "t is 1.5", "[0, 1]")
    refused(lambda: interpolate(plan, -0.1), "t is -0.1")
    chordal = exact_plan(unit_cloud(2, 3, 0), unit_cloud(2, 3, 1), cost=Chordal())
    refused(lambda: interpolate(chordal, 0.5), "Chordal()", "geodesics")


def test_a_plan_in_the_plane_moves_along_straight_lines() -> None:
    x = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    points, _ = interpolate(exact_plan(x, x + torch.tensor([0.0, 3.0]), cost=Euclidean()), 0.5)
    assert torch.allclose(points, x + torch.tensor([0.0, 1.5]))
