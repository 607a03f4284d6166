"""W_p: which solver is chosen, batches, defaults and bad input."""

import pytest
import torch

import helmscope as hs
from helmscope.transport import Chordal, Euclidean, exact_plan, wasserstein
from helmscope.transport.circle import circle_cost
from helmscope.transport.exact import exact_cost
from helmscope.transport.line import line_cost
from support.planting import Plant
from support.refusal import refused
from support.transport_oracles import random_weights, unit_cloud


def test_w2_is_the_distance_and_not_its_square() -> None:
    x, y = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    assert hs.w2(x, y) == pytest.approx(torch.pi / 2)
    assert hs.w2(x, y, cost=hs.Geodesic()) == hs.w2(x, y)
    assert hs.w2(x, y, cost=Chordal()) == pytest.approx(2**0.5)
    assert hs.w2(3 * x, 3 * y, cost=Euclidean()) == pytest.approx(18**0.5)


@pytest.mark.parametrize(
    ("solver", "x", "cost"),
    [
        (circle_cost, unit_cloud(3, 2, 0), hs.Geodesic()),
        (line_cost, torch.zeros(3, 1), Euclidean()),
        (exact_cost, unit_cloud(3, 2, 0), Chordal()),
        (exact_cost, unit_cloud(3, 2, 0), Euclidean()),
        (exact_cost, unit_cloud(3, 3, 0), hs.Geodesic()),
    ],
)
def test_the_fastest_solver_is_chosen(solver: object, x: torch.Tensor, cost: object) -> None:
    with Plant(lambda right, *args: right(*args), solver) as watch:
        assert wasserstein(x, x, cost=cost) == pytest.approx(0, abs=1e-15)
    assert watch.reached == 1


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_solvers_agree_where_two_apply(p: float) -> None:
    x, y, a = unit_cloud(6, 2, 0), unit_cloud(8, 2, 1), random_weights(6, 0)
    assert wasserstein(x, y, a, p=p) ** p == pytest.approx(float(exact_plan(x, y, a, p=p).value), abs=1e-12)
    s, t = x[:, :1], y[:, :1]
    planar = wasserstein(*(torch.cat([u, torch.zeros_like(u)], 1) for u in (s, t)), a, p=p, cost=Euclidean())
    assert wasserstein(s, t, a, p=p, cost=Euclidean()) == pytest.approx(float(planar), abs=1e-12)


def test_batches_broadcast_and_are_bitwise_the_same_systems() -> None:
    x, y = unit_cloud(12, 3, 0).reshape(2, 1, 6, 3), unit_cloud(15, 3, 1).reshape(3, 5, 3)
    together = hs.w2(x, y)
    assert together.shape == (2, 3)
    assert all(torch.equal(together[i, j], hs.w2(x[i, 0], y[j])) for i in range(2) for j in range(3))
    assert hs.w2(x[:0], y[:1]).shape == (0, 1)
    assert hs.w2(x[:0, :, :, :2] * 0 + 1, y[:1, :, :2] * 0 + torch.tensor([1.0, 0.0])).shape == (0, 1)


def test_it_is_a_metric() -> None:
    clouds = [unit_cloud(5, 3, seed) for seed in range(3)]
    for p in (1.0, 2.0):
        ab, bc, ac, ba = (wasserstein(clouds[i], clouds[j], p=p) for i, j in ((0, 1), (1, 2), (0, 2), (1, 0)))
        assert ab == pytest.approx(float(ba), abs=1e-12)
        assert ac <= ab + bc
        assert wasserstein(clouds[0], clouds[0].flip(0), p=p) < 1e-12


def test_w_p_grows_with_p_to_the_largest_displacement() -> None:
    x, y = unit_cloud(9, 2, 0), unit_cloud(9, 2, 1)
    values = [float(wasserstein(x, y, p=p)) for p in (1, 1.5, 2, 4, 16, 128)]
    assert values == sorted(values)
    assert values[-1] < torch.pi


@pytest.mark.parametrize("d", [2, 3])
def test_gradients_of_a_batch_and_of_autocast(d: int) -> None:
    x = unit_cloud(12, d, 0).reshape(2, 6, d).requires_grad_()
    y = unit_cloud(5, d, 1)
    (together,) = torch.autograd.grad(hs.w2(x, y).sum(), x)
    (alone,) = torch.autograd.grad(hs.w2(x[1], y), x)
    assert torch.equal(together[1], alone[1])
    with torch.autocast("cpu"):
        assert torch.equal(hs.w2(x.detach(), y), hs.w2(x, y).detach())


def test_bad_input_is_refused() -> None:
    x, line = unit_cloud(3, 3, 0), torch.zeros(3, 1)
    refused(lambda: hs.w2(x[:0], x), "x has shape (0, 3)", "n >= 1")
    refused(lambda: hs.w2(line[:0], line, cost=Euclidean()), "x has shape (0, 1)", "n >= 1")
    refused(lambda: hs.w2(line, line), "x has dimension d=1", "d >= 2")
    refused(lambda: hs.w2(2 * x, x), "x holds a token of norm 2")
    refused(lambda: hs.w2(x, x * torch.nan), "y holds NaN")
    refused(lambda: hs.w2(x, x * torch.nan, cost=Euclidean()), "y holds", "finite")
    refused(lambda: hs.w2(x, unit_cloud(3, 2, 0)), "y has dimension 2", "3")
    refused(lambda: hs.w2(x, x.float()), "y has dtype torch.float32")
    refused(lambda: hs.w2(x.expand(2, 3, 3), x.expand(3, 3, 3)), "batch axes must broadcast")
    refused(lambda: wasserstein(x, x, p=0.99), "p is 0.99", ">= 1")
    refused(lambda: wasserstein(x, x, p="2"), "p is '2'")
    refused(lambda: wasserstein(x, x, p=float("inf")), "p is inf")
    refused(lambda: hs.w2(x, x, cost="geodesic"), "cost is 'geodesic'")
    refused(lambda: hs.w2(x, x, torch.tensor([0.5, 0.7, -0.2])), "x_weights holds the entry -0.2")
    refused(lambda: hs.w2(x, x, torch.tensor([0.5, 0.7, torch.nan])), "x_weights holds the entry nan")
    refused(lambda: hs.w2(x, x, torch.ones(3), torch.tensor([1.0, 1.0, 2.0])), "sums to 3", "4", "equal masses")
    refused(lambda: hs.w2(x, x, torch.ones(2)), "x_weights is (2,)", "3 points")
    refused(lambda: hs.w2(x, x, y_weights=torch.zeros(3)), "y_weights sums to 0")
    refused(lambda: wasserstein(line, line + 1e-9, p=50, cost=Euclidean()), "p is 50", "underflow")
    assert wasserstein(x, x.flip(0), p=50) == 0  # nothing is lost here
    refused(lambda: wasserstein(x * 1e300, x, p=3, cost=Euclidean()), "p is 3", "overflow")
