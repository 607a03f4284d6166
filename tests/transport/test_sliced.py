"""Sliced transport on the sphere: POT with the same great circles, d = 2, invariance, gradients."""

import math

import ot
import pytest
import torch

import helmscope as hs
from helmscope.transport import random_frames, sliced_w2, w2_on_great_circles
from helmscope.transport.circle import circle_cost
from support.planting import Plant, outcome
from support.refusal import refused
from support.transport_oracles import central_difference, random_weights, unit_cloud


def test_pot_agrees_on_the_same_great_circles() -> None:
    """POT measures on circles of circumference 1; its bisection is accurate to 1e-6."""
    x, y = unit_cloud(20, 4, 0), unit_cloud(20, 4, 1)
    a = random_weights(20, 2)
    frames = random_frames(12, 4, seed=3)
    for weights in (None, a):
        ours = w2_on_great_circles(x, y, weights, weights, frames=frames)
        mass = None if weights is None else weights.numpy()
        value, log = ot.sliced_wasserstein_sphere(
            x.numpy(), y.numpy(), mass, mass, 12, projections=frames.numpy(), p=2, log=True
        )
        assert torch.allclose(ours / (2 * math.pi), torch.from_numpy(log["projected_emds"]).sqrt(), atol=1e-6)
        assert float(ours.square().mean().sqrt()) == pytest.approx(2 * math.pi * value, rel=1e-5)


def test_in_the_plane_every_slice_is_w2_itself() -> None:
    x, y, a = unit_cloud(10, 2, 0), unit_cloud(7, 2, 1), random_weights(10, 2)
    exact = float(hs.w2(x, y, a))
    interval = sliced_w2(x, y, a, slices=5)
    assert interval.estimate == pytest.approx(exact, rel=1e-12)
    assert interval.high - interval.low < 1e-12


def test_slices_agree_with_projections_one_by_one() -> None:
    x, y = unit_cloud(9, 3, 0), unit_cloud(9, 3, 1)
    frames = random_frames(6, 3)
    ours = w2_on_great_circles(x, y, frames=frames)
    for k in range(6):
        flat = [hs.sphere.retract(points @ frames[k]) for points in (x, y)]
        assert ours[k] == pytest.approx(float(hs.w2(*flat)), abs=1e-13)


def test_closed_form_for_two_points() -> None:
    """E over planes of the squared angle between projections, by many slices; equal points have distance 0."""
    x = unit_cloud(5, 3, 0)
    assert sliced_w2(x, x.flip(0), slices=4).estimate == 0
    interval = sliced_w2(x[:1], -x[:1], slices=8)  # antipodal points remain antipodal in every slice
    assert interval.estimate == pytest.approx(math.pi, abs=1e-14)


def test_rotations_change_nothing_but_the_slices() -> None:
    x, y = unit_cloud(30, 3, 0), unit_cloud(30, 3, 1)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    frames = random_frames(10, 3)
    turned = w2_on_great_circles(x @ turn.mT, y @ turn.mT, frames=turn @ frames)
    assert torch.allclose(w2_on_great_circles(x, y, frames=frames), turned, atol=1e-12)
    one, two = sliced_w2(x, y, seed=0), sliced_w2(x @ turn.mT, y @ turn.mT, seed=1)
    assert one.low < two.high
    assert two.low < one.high


def test_seeds_repeat_and_intervals_narrow() -> None:
    x, y = unit_cloud(12, 3, 0), hs.sphere.retract(unit_cloud(12, 3, 1) + 1)
    assert sliced_w2(x, y, seed=4) == sliced_w2(x, y, seed=4)
    assert sliced_w2(x, y, seed=4) != sliced_w2(x, y, seed=5)
    few, many = sliced_w2(x, y, slices=16), sliced_w2(x, y, slices=256)
    assert many.high - many.low < few.high - few.low
    assert few.n == 16


def test_batches_and_gradients() -> None:
    x, y = unit_cloud(12, 3, 0).reshape(2, 6, 3), unit_cloud(5, 3, 1)
    frames = random_frames(4, 3)
    together = w2_on_great_circles(x, y, frames=frames)
    assert together.shape == (2, 4)
    assert torch.allclose(together[1], w2_on_great_circles(x[1], y, frames=frames), atol=1e-14)

    def mean_square(x: torch.Tensor) -> torch.Tensor:
        return w2_on_great_circles(hs.sphere.retract(x), y, frames=frames).square().mean()

    moving = x[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(mean_square(moving), moving)
    direction = unit_cloud(6, 3, 5)
    along = central_difference(mean_square, x[0], direction)
    assert float((gradient * direction).sum()) == pytest.approx(along, abs=1e-6)


def test_a_point_orthogonal_to_the_plane_has_angle_zero() -> None:
    frames = torch.eye(3, dtype=torch.float64)[None, :, :2]
    pole = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    assert w2_on_great_circles(pole, torch.eye(3, dtype=torch.float64)[1:2], frames=frames) == pytest.approx(
        math.pi / 2
    )


def test_planted_faults_are_seen() -> None:
    x, y = unit_cloud(8, 4, 0), unit_cloud(8, 4, 1)
    frames = random_frames(5, 4)
    oracle = 2 * math.pi * ot.sliced_wasserstein_sphere(x.numpy(), y.numpy(), None, None, 5, 2, frames.numpy())

    def agrees() -> bool:
        return abs(float(w2_on_great_circles(x, y, frames=frames).square().mean().sqrt()) - oracle) < 1e-5

    assert agrees()
    assert outcome(Plant(lambda right, clouds, p: right(clouds, p) / 4, circle_cost), agrees) == "seen"
    assert outcome(Plant(lambda right, clouds, p: right(clouds, 1.0), circle_cost), agrees) == "seen"


def test_bad_input_is_refused() -> None:
    x = unit_cloud(3, 3, 0)
    refused(lambda: sliced_w2(x, x, slices=1), "slices is 1", ">= 2")
    refused(lambda: sliced_w2(x, x, seed=-1), "seed is -1")
    refused(lambda: sliced_w2(x[None], x[None]), "batch axes (1,)", "w2_on_great_circles")
    refused(lambda: sliced_w2(2 * x, x), "norm 2")
    refused(lambda: w2_on_great_circles(x, x, frames=random_frames(2, 4)), "frames is (2, 4, 2)", "3, 2)")
    refused(lambda: random_frames(2, 1), "dim is 1")
