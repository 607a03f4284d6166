"""Checks of two clouds and their masses."""

import pytest
import torch

from helmscope.transport import Euclidean
from helmscope.transport.clouds import check_clouds
from support.refusal import refused
from support.transport_oracles import random_weights


def test_masses_are_normalized_and_default_to_equal_ones() -> None:
    clouds = check_clouds(torch.zeros(2, 3), torch.ones(4, 3), torch.tensor([1.0, 3.0]), cost=Euclidean())
    assert clouds.a.tolist() == [0.25, 0.75]
    assert clouds.b.tolist() == [0.25] * 4
    unbalanced = check_clouds(
        torch.zeros(2, 3), torch.ones(1, 3), torch.tensor([1.0, 3.0]), cost=Euclidean(), balanced=False
    )
    assert unbalanced.a.tolist() == [1, 3]


def test_batch_axes_broadcast() -> None:
    clouds = check_clouds(torch.zeros(2, 1, 5, 3), torch.ones(4, 6, 3), y_weights=torch.ones(6), cost=Euclidean())
    assert clouds.x.shape == (2, 4, 5, 3)
    assert clouds.y.shape == (2, 4, 6, 3)
    assert clouds.a.shape == (2, 4, 5)
    assert clouds.b.shape == (2, 4, 6)


def test_gradients_reach_the_weights() -> None:
    weights = random_weights(3, 0).requires_grad_()
    clouds = check_clouds(torch.zeros(3, 2).double(), torch.zeros(1, 2).double(), weights, cost=Euclidean())
    (gradient,) = torch.autograd.grad(clouds.a[0], weights)
    expected = -weights[0].detach() + torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert torch.allclose(gradient, expected)


def test_double_restores_the_total_of_float32_masses() -> None:
    clouds = check_clouds(torch.zeros(7, 2), torch.zeros(3, 2), cost=Euclidean())
    assert abs(clouds.a.double().sum().item() - 1) > 1e-9
    assert clouds.double().a.sum().item() == pytest.approx(1, abs=1e-15)


def test_unequal_masses_are_refused_but_rounding_is_not() -> None:
    x = torch.zeros(3, 2)
    refused(
        lambda: check_clouds(x, x, torch.ones(3), torch.full((3,), 1.1), cost=Euclidean()),
        "x_weights sums to 3 and y_weights to 3.3",
        "reach",
    )
    check_clouds(x, x, torch.ones(3), torch.full((3,), 1 + 1e-6), cost=Euclidean())
    refused(lambda: check_clouds(x, x.double(), cost=Euclidean()), "y has dtype torch.float64")
    refused(lambda: check_clouds(x, x, [1, 1, 1], cost=Euclidean()), "x_weights is list")
    refused(lambda: check_clouds(x.expand(3, 3, 2), x, torch.ones(2, 3), cost=Euclidean()), "must broadcast", "weights")
    third = torch.tensor([0.1, 0.2, 0.7])  # does not sum to 1 in float64
    check_clouds(x.double(), x.double(), third, torch.ones(3).double() / 3, cost=Euclidean())


def test_weights_may_have_batch_axes_of_their_own() -> None:
    x, weights = torch.zeros(3, 2), torch.tensor([[1.0, 1.0, 2.0], [0.0, 0.0, 1.0]])
    clouds = check_clouds(x, x, weights, cost=Euclidean())
    assert clouds.x.shape == (2, 3, 2)
    assert clouds.a.tolist() == [[0.25, 0.25, 0.5], [0, 0, 1]]
