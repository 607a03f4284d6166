"""Entropic JKO steps: a direct minimization, the bias in epsilon and its compensation, Gaussians, storage."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from helmscope.fields.attention import SA
from helmscope.meanfield import CircleGrid, Density, Gaussian, gaussian_jko_step, jko_step, particle_jko_step
from helmscope.transport import Euclidean, streaming
from helmscope.types import HelmscopeError

NU, TAU = 0.5, 0.1
GRID = CircleGrid(degree=40)
START = Density.from_function(GRID, lambda x: (1 + 0.5 * x[:, 1]) / (2 * math.pi))


def energy(x: torch.Tensor) -> torch.Tensor:
    return -x[:, 0]


def step(epsilon: float, **options):
    return particle_jko_step(*START.cloud(), energy, noise=NU, tau=TAU, epsilon=epsilon, **options)


def test_direct_minimization_over_plans() -> None:
    generator = np.random.default_rng(0)
    n, epsilon = 5, 0.3
    points = torch.from_numpy(generator.normal(size=(n, 2)))
    a, q = (torch.from_numpy(generator.dirichlet(np.full(n, 3.0))) for _ in range(2))
    potential = lambda x: x[:, 0] + x[:, 1] ** 2  # noqa: E731
    costs = torch.cdist(points, points) ** 2

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        logits = torch.from_numpy(flat).requires_grad_()
        shares = torch.log_softmax(logits.reshape(n, n), 1)
        plan = a[:, None] * shares.exp()  # all plans with the marginal a
        b = plan.sum(0)
        value = (plan * costs).sum() + epsilon * (plan * (shares - q.log())).sum()
        value = value + 2 * TAU * (NU * (b * (b / q).log()).sum() + potential(points) @ b)
        value.backward()
        return value.item(), logits.grad.numpy()

    result = minimize(objective, np.zeros(n * n), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000})
    plan = a[:, None] * torch.softmax(torch.from_numpy(result.x).reshape(n, n), 1)
    options = {"noise": NU, "tau": TAU, "epsilon": epsilon, "volumes": q, "cost": Euclidean(), "tol": 1e-13}
    found = particle_jko_step(points, a, potential, **options)
    assert found.converged
    assert float((found.weights - plan.sum(0)).abs().max()) < 1e-7
    assert abs(found.squared_distance - float((plan * costs).sum())) < 1e-6


def test_bias_is_of_order_epsilon_and_is_compensated_to_order_two() -> None:
    exact = jko_step(START, energy, noise=NU, tau=TAU).density.cloud()[1]
    plain, compensated, more_noise = [], [], []
    for epsilon in (0.08, 0.04, 0.02):
        plain.append(float((step(epsilon).weights - exact).abs().sum()))
        compensated.append(float((step(epsilon, compensate=True).weights - exact).abs().sum()))
        noisier = jko_step(START, energy, noise=NU + epsilon / (4 * TAU), tau=TAU).density.cloud()[1]
        more_noise.append(float((step(epsilon).weights - noisier).abs().sum()))
    orders = [[math.log2(e[k] / e[k + 1]) for k in (0, 1)] for e in (plain, compensated, more_noise)]
    assert np.abs(np.array(orders) - [[1], [2], [2]]).max() < 0.1
    assert plain[-1] < 2e-3  # 1.5e-3
    assert compensated[-1] < 6e-6  # 4.4e-6


def test_gaussians_on_the_line() -> None:
    x = torch.linspace(-7, 7, 281, dtype=torch.float64)[:, None]
    density = torch.exp(-((x[:, 0] - 0.5) ** 2) / (2 * 0.64))
    options = {"noise": 0.4, "tau": 0.2, "epsilon": 0.05, "cost": Euclidean(), "compensate": True}
    found = particle_jko_step(x, density / density.sum(), lambda x: 0.75 * x[:, 0] ** 2, **options)
    one = torch.ones(1, 1, dtype=torch.float64)
    law = gaussian_jko_step(Gaussian(0.5 * one[0], 0.64 * one), stiffness=1.5 * one, nu=0.4, tau=0.2).gaussian
    average = float(found.weights @ x[:, 0])
    assert abs(average - law.mean.item()) < 1e-7  # the mean has no bias: 1e-9 measured
    assert abs(float(found.weights @ (x[:, 0] - average) ** 2) - law.covariance.item()) < 2e-3  # epsilon^2


def test_without_energy_it_is_the_kernel() -> None:
    points, weights = START.cloud()
    found = particle_jko_step(points, weights, None, noise=0.0, tau=TAU, epsilon=0.1)
    kernel = torch.exp(-(torch.arccos((points @ points.mT).clamp(-1, 1)) ** 2) / 0.1)
    assert float((found.weights - weights @ (kernel / kernel.sum(1, keepdim=True))).abs().max()) < 1e-8
    assert found.iterations <= 2


def test_splitting_starts_at_the_transported_weights() -> None:
    points, weights = START.cloud()
    moved = weights.roll(10)
    one = particle_jko_step(points, weights, energy, noise=NU, tau=TAU, epsilon=0.05, transported=moved)
    other = particle_jko_step(points, moved, energy, noise=NU, tau=TAU, epsilon=0.05)
    assert torch.equal(one.weights, other.weights)


def test_splitting_along_a_flow() -> None:
    """Points that a field has moved are brought back by the step: that of the moved density, up to the blur."""
    turn = lambda x: torch.stack([-x[..., 1], x[..., 0]], -1)  # noqa: E731
    exact = jko_step(START, energy, noise=NU, tau=TAU, transported=turn).density.cloud()[1]
    found = step(0.02, transported=turn, compensate=True)
    assert found.converged
    assert float((found.weights - exact).abs().sum()) < 2e-5
    assert float((step(0.02, compensate=True).weights - exact).abs().sum()) > 1e-2
    with pytest.raises(HelmscopeError, match="moves unit vectors only"):
        step(0.1, transported=turn, cost=Euclidean())


def test_attention_counted_twice_warns() -> None:
    with pytest.warns(UserWarning, match="SA.*noise must not contain the diffusion of attention"):
        step(0.1, transported=SA(beta=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        particle_jko_step(*START.cloud(), energy, noise=0.0, tau=TAU, epsilon=0.1, transported=SA(beta=1.0))
        step(0.1, transported=START.cloud()[1])


def test_costs_that_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = step(0.05)
    monkeypatch.setattr(streaming, "MAX_STORED", 0)
    streamed = step(0.05)
    assert float((stored.weights - streamed.weights).abs().max()) < 1e-12


def test_an_iteration_that_does_not_end_says_so() -> None:
    found = step(0.01, max_iterations=5)
    assert not found.converged
    assert found.iterations == 5
    assert found.error > 1e-9


def test_bad_input() -> None:
    points, weights = START.cloud()
    for options, message in (
        ({"epsilon": 0.0}, "epsilon is 0"),
        ({"tau": 0.0}, "tau is 0"),
        ({"noise": -1.0}, "noise is -1"),
        ({"weights": -weights}, "weights is"),
        ({"weights": 2 * weights}, "weights sums to 2"),
        ({"transported": weights[1:]}, "transported is"),
        ({"volumes": torch.eye(len(weights), dtype=torch.float64)[0]}, "volumes must be positive"),
        ({"cost": 3}, "cost is 3"),
        ({"points": points[0]}, "points"),
        ({"energy": lambda x: x}, "energy gives"),
        ({"energy": 3}, "energy gives"),
        ({"epsilon": 0.3, "compensate": True}, "must be at most 4 tau nu = 0.2"),
    ):
        given = {"points": points, "weights": weights, "energy": energy}
        given |= {"noise": NU, "tau": TAU, "epsilon": 0.1, **options}
        with pytest.raises(HelmscopeError, match=message):
            particle_jko_step(given.pop("points"), given.pop("weights"), given.pop("energy"), **given)
