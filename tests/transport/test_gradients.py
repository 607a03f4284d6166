"""Gradients of exact distances and plans by everything they depend on: both clouds and both weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import helmscope as hs
from helmscope.transport import Euclidean, circle_plan, exact_plan, line_plan, wasserstein
from support.transport_oracles import central_difference, on_circle, random_weights, unit_cloud

Value = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


def normal(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SOLVERS: dict[str, tuple[int, Value]] = {
    "exact plan": (3, lambda x, y, a, b: exact_plan(x, y, a, b, cost=Euclidean()).value),
    "distance": (3, lambda x, y, a, b: wasserstein(x, y, a, b, p=1.5, cost=Euclidean())),
    "plan on the line": (1, lambda x, y, a, b: line_plan(x, y, a, b).value),
    "distance on the line": (1, lambda x, y, a, b: wasserstein(x, y, a, b, p=3, cost=Euclidean())),
    "plan on the circle": (1, lambda x, y, a, b: circle_plan(on_circle(x[:, 0]), on_circle(y[:, 0]), a, b).value),
    "distance on the circle": (1, lambda x, y, a, b: hs.w2(on_circle(x[:, 0]), on_circle(y[:, 0]), a, b)),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_gradients_by_both_clouds_and_both_weights_are_finite_differences(name: str) -> None:
    """The masses of one cloud at a time are given: they are scaled to 1, so that every direction is allowed."""
    dim, value = SOLVERS[name]
    x, y, a, b = normal(5, dim, 1), normal(7, dim, 2), random_weights(5, 3), random_weights(7, 4)
    cases: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = [
        (x, lambda moved: value(moved, y, a, None)),
        (y, lambda moved: value(x, moved, None, b)),
        (a, lambda moved: value(x, y, moved, None)),
        (b, lambda moved: value(x, y, None, moved)),
    ]
    for k, (point, function) in enumerate(cases):
        leaf = point.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf)
        assert float(gradient.norm()) > 0.01  # so that a wrong sign is seen
        for seed in range(3):
            direction = normal(len(point), point.shape[1] if point.ndim > 1 else 1, 10 * k + seed).reshape(point.shape)
            found = float((gradient * direction).sum())
            assert found == pytest.approx(central_difference(function, point, direction), abs=2e-6), (name, k)


def test_gradients_on_the_sphere_by_both_clouds() -> None:
    raw_x, raw_y = unit_cloud(5, 3, 0), unit_cloud(7, 3, 1)

    def distance(raw_x: torch.Tensor, raw_y: torch.Tensor) -> torch.Tensor:
        return hs.w2(hs.sphere.retract(raw_x), hs.sphere.retract(raw_y))

    leaves = raw_x.clone().requires_grad_(), raw_y.clone().requires_grad_()
    by_x, by_y = torch.autograd.grad(distance(*leaves), leaves)
    for seed in range(3):
        v, w = normal(5, 3, seed), normal(7, 3, seed + 5)
        assert float((by_x * v).sum()) == pytest.approx(
            central_difference(lambda x: distance(x, raw_y), raw_x, v), abs=1e-6
        )
        assert float((by_y * w).sum()) == pytest.approx(
            central_difference(lambda y: distance(raw_x, y), raw_y, w), abs=1e-6
        )
