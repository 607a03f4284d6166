"""Transport on the line: quantile formulas, SciPy and POT."""

import pytest
import torch
from scipy.stats import wasserstein_distance

import helmscope as hs
from helmscope.transport import Euclidean, line_plan
from support.refusal import refused
from support.transport_oracles import central_difference, costs, pot_cost, random_weights

wasserstein = hs.transport.wasserstein


def points(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 5.0])
def test_pot_agrees(p: float) -> None:
    for seed in range(25):
        x, y, a, b = points(3 + seed % 4, seed), points(5, seed + 50), random_weights(3 + seed % 4, 0), None
        exact = pot_cost(costs(x, y, p, "euclidean"), a, b)
        assert float(wasserstein(x, y, a, b, p=p, cost=Euclidean())) ** p == pytest.approx(exact, rel=1e-9)
        plan = line_plan(x, y, a, b, p=p)
        assert float(plan.value) == pytest.approx(exact, rel=1e-9)
        assert abs(plan.duality_gap) < 1e-12 * (1 + exact)
        f, g = plan.potentials
        assert (f[:, None] + g - torch.from_numpy(costs(x, y, p, "euclidean"))).max() < 1e-11 * (1 + exact)
        assert max(plan.marginal_errors) < 1e-13


def test_scipy_agrees_for_p_1() -> None:
    x, y, a, b = points(40, 0), points(30, 1), random_weights(40, 0), random_weights(30, 1)
    oracle = wasserstein_distance(x[:, 0], y[:, 0], a, b)
    assert wasserstein(x, y, a, b, p=1, cost=Euclidean()) == pytest.approx(oracle, rel=1e-12)


def test_closed_forms() -> None:
    x, shift, scale = points(50, 0), 2.5, 3.0
    for p in (1.0, 2.0, 3.5):
        assert wasserstein(x, x + shift, p=p, cost=Euclidean()) == pytest.approx(shift, rel=1e-13)
    # between a cloud and its dilation W_2 is the root mean square of the displacements
    dilated = hs.w2(x, scale * x, cost=Euclidean())
    assert dilated == pytest.approx(float((scale - 1) * x.square().mean().sqrt()), rel=1e-13)
    weights = random_weights(50, 1)
    assert hs.w2(x, x.flip(0), weights, weights.flip(0), cost=Euclidean()) == 0


def test_zero_masses_do_not_matter() -> None:
    x, y = torch.tensor([[0.0], [9.0], [1.0]]), torch.tensor([[2.0], [-7.0], [50.0]])
    a, b = torch.tensor([0.5, 0.0, 0.5]), torch.tensor([1.0, 0.0, 0.0])
    plan = line_plan(x, y, a, b)
    assert plan.value == 2.5
    assert plan.matrix.tolist() == [[0.5, 0, 0], [0, 0, 0], [0.5, 0, 0]]
    assert plan.duality_gap == 0


def test_batches_are_bitwise_the_same_systems() -> None:
    x, y = points(12, 0).reshape(2, 6, 1), points(10, 1).reshape(2, 5, 1)
    for p in (1.5, 2.0):
        together = wasserstein(x, y, p=p, cost=Euclidean())
        assert all(torch.equal(together[k], wasserstein(x[k], y[k], p=p, cost=Euclidean())) for k in range(2))


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0])
def test_gradients_are_finite_differences(p: float) -> None:
    x, y, a = points(5, 0), points(7, 1), random_weights(5, 2)

    def distance(x: torch.Tensor, a: torch.Tensor = a) -> torch.Tensor:
        return wasserstein(x, y, a, p=p, cost=Euclidean())

    moving, masses = x.clone().requires_grad_(), a.clone().requires_grad_()
    by_x, by_mass = torch.autograd.grad(distance(moving, masses), (moving, masses))
    for k in range(5):
        direction = torch.zeros_like(x)
        direction[k] = 1
        assert by_x[k, 0] == pytest.approx(central_difference(distance, x, direction), abs=1e-7)
        along = central_difference(lambda a: distance(x, a), a, direction[:, 0])
        assert by_mass[k] == pytest.approx(along, abs=1e-6)


def test_bad_input_is_refused() -> None:
    refused(lambda: line_plan(torch.zeros(2, 2), torch.zeros(2, 2)), "dimension 2")
    refused(lambda: line_plan(torch.zeros(2, 1), torch.zeros(2, 1), p=float("nan")), "p is nan")
    huge = torch.tensor([[0.0], [1e200]], dtype=torch.float64)
    refused(lambda: wasserstein(huge, -huge, p=3, cost=Euclidean()), "p is 3", "overflow")
    refused(lambda: line_plan(huge, -huge, p=3), "p is 3", "overflow")
