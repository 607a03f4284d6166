"""Ground distances against plain formulas, and powers of them."""

import pytest
import torch

import helmscope as hs
from helmscope.transport import Chordal, Euclidean
from helmscope.transport.cost import check_power, power
from support.refusal import refused
from support.transport_oracles import costs, unit_cloud


@pytest.mark.parametrize(("cost", "metric"), [(hs.Geodesic(), "geodesic"), (Chordal(), ""), (Euclidean(), "")])
def test_matrices_are_all_distances(cost: hs.transport.Cost, metric: str) -> None:
    x, y = unit_cloud(5, 4, 0), unit_cloud(3, 4, 1)
    matrix = cost.matrix(x, y)
    assert torch.allclose(matrix, torch.from_numpy(costs(x, y, 1.0, metric)), atol=1e-14)
    assert torch.equal(cost.matrix(torch.stack([x, x]), y)[1], matrix)


def test_geodesic_and_chordal_distances_are_related() -> None:
    x, y = unit_cloud(5, 3, 0), unit_cloud(5, 3, 1)
    assert torch.allclose(Chordal().distance(x, y), 2 * torch.sin(hs.Geodesic().distance(x, y) / 2))
    assert torch.allclose(hs.Geodesic().distance(x, -x), torch.full((5,), torch.pi, dtype=torch.float64))


@pytest.mark.parametrize("p", [1.0, 1.3, 2.0, 7.0])
def test_powers(p: float) -> None:
    distance = torch.tensor([0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.allclose(power(distance, p), distance**p, rtol=1e-14)
    (gradient,) = torch.autograd.grad(power(distance, p).sum(), distance)
    assert torch.allclose(gradient[1:], p * distance[1:].detach() ** (p - 1))
    assert gradient[0] == (1 if p == 1 else 0)


def test_bad_input_is_refused() -> None:
    refused(lambda: hs.Geodesic().check(torch.zeros(2, 1), "x"), "x has dimension d=1")
    refused(lambda: Chordal().check(torch.ones(2, 3), "y"), "y holds a token of norm")
    refused(lambda: Euclidean().check([1.0], "x"), "x is a list")
    refused(lambda: check_power(True), "p is True")
    assert check_power(1) == 1.0
