"""JKO steps between Gaussian laws: known digits, fixed points, a slow minimization, order one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm
from scipy.optimize import minimize

from helmscope.meanfield import Gaussian, gaussian_jko_step
from helmscope.transport import gaussian_w2
from helmscope.types import HelmscopeError

ONE = torch.ones(1, 1, dtype=torch.float64)
STIFFNESS = torch.tensor([[2.0, 0.6, 0.0], [0.6, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=torch.float64)
COVARIANCE = torch.tensor([[1.0, -0.4, 0.2], [-0.4, 0.6, 0.1], [0.2, 0.1, 2.0]], dtype=torch.float64)
MEAN, CENTER = torch.tensor([[1.0, -2.0, 0.5], [0.2, 0.0, -0.3]], dtype=torch.float64)


def test_known_digits() -> None:
    step = gaussian_jko_step(Gaussian(2 * ONE[0], 1.69 * ONE), stiffness=1.5 * ONE, nu=0.4, tau=0.1)
    assert abs(step.gaussian.mean.item() - 1.7391304347826089) < 1e-15
    assert abs(math.sqrt(step.gaussian.covariance.item()) - 1.1604092159529602) < 1e-15
    assert abs(step.distance - math.hypot(2 - 1.7391304347826089, 1.3 - 1.1604092159529602)) < 1e-14


@pytest.mark.parametrize("tau", [0.01, 1.0, 30.0])
def test_the_gibbs_law_stays(tau: float) -> None:
    gibbs = 0.4 * torch.linalg.inv(STIFFNESS)
    step = gaussian_jko_step(Gaussian(CENTER, gibbs), stiffness=STIFFNESS, nu=0.4, tau=tau, center=CENTER)
    assert torch.allclose(step.gaussian.covariance, gibbs, atol=1e-13)
    assert torch.allclose(step.gaussian.mean, CENTER, atol=1e-15)


@pytest.mark.parametrize(("nu", "tau"), [(0.0, 0.05), (0.4, 0.05), (0.4, 3.0)])
def test_the_distance_of_a_step(nu: float, tau: float) -> None:
    """The traces of the optimal map against Dowson and Landau's formula, as is the distance between two laws."""
    before = Gaussian(MEAN, COVARIANCE)
    step = gaussian_jko_step(before, stiffness=STIFFNESS, nu=nu, tau=tau, center=CENTER)
    slow = float(gaussian_w2(MEAN, COVARIANCE, step.gaussian.mean, step.gaussian.covariance))
    assert step.distance == pytest.approx(slow, rel=1e-12)
    assert before.w2(step.gaussian) == pytest.approx(slow, rel=1e-12)


def test_slow_minimization() -> None:
    """F + W2^2 / (2 tau) over means and Cholesky factors; stiffness and covariance do not commute."""
    nu, tau = 0.4, 0.3
    rows, columns = np.tril_indices(3)

    def law(parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        factor = torch.zeros(3, 3, dtype=torch.float64)
        factor[rows, columns] = parameters[3:]
        return parameters[:3], factor @ factor.mT

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        parameters = torch.from_numpy(flat).requires_grad_()
        mean, covariance = law(parameters)
        energy = ((mean - CENTER) @ STIFFNESS @ (mean - CENTER) + (STIFFNESS * covariance).sum()) / 2
        value = energy - nu / 2 * torch.logdet(covariance)
        value = value + gaussian_w2(MEAN, COVARIANCE, mean, covariance) ** 2 / (2 * tau)
        value.backward()
        return value.item(), parameters.grad.numpy()

    start = np.concatenate([MEAN.numpy() * 0.9, 0.9 * torch.linalg.cholesky(COVARIANCE).numpy()[rows, columns]])
    result = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-10})
    mean, covariance = law(torch.from_numpy(result.x))
    step = gaussian_jko_step(Gaussian(MEAN, COVARIANCE), stiffness=STIFFNESS, nu=nu, tau=tau, center=CENTER)
    assert float((step.gaussian.mean - mean).abs().max()) < 1e-7
    assert float((step.gaussian.covariance - covariance).abs().max()) < 1e-7


def test_order_one_against_the_exact_flow() -> None:
    nu, time = 0.4, 0.5
    gibbs, decay = nu * torch.linalg.inv(STIFFNESS), torch.from_numpy(expm(-time * STIFFNESS.numpy()))
    exact = gibbs + decay @ (COVARIANCE - gibbs) @ decay.mT
    errors = []
    for count in (8, 16, 32):
        law = Gaussian(MEAN, COVARIANCE)
        for _ in range(count):
            law = gaussian_jko_step(law, stiffness=STIFFNESS, nu=nu, tau=time / count).gaussian
        errors.append([float((law.mean - decay @ MEAN).norm()), float((law.covariance - exact).norm())])
    slopes = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert (np.abs(slopes - 1) < 0.1).all()


def test_degenerate_and_concave_cases() -> None:
    """From almost a point mass, s'^2 = nu tau / (1 + k tau); without noise, s' = s / (1 + k tau), also for k < 0."""
    step = gaussian_jko_step(Gaussian(ONE[0], 1e-30 * ONE), stiffness=1.5 * ONE, nu=0.4, tau=0.1)
    assert abs(step.gaussian.covariance.item() - 0.04 / 1.15) < 1e-15
    step = gaussian_jko_step(Gaussian(ONE[0], ONE), stiffness=-0.5 * ONE, nu=0.0, tau=1.0)
    assert abs(step.gaussian.covariance.item() - 4) < 1e-14


def test_bad_input() -> None:
    for options, message in (
        ({"tau": 0.0}, "tau is 0"),
        ({"nu": -1.0}, "nu is -1"),
        ({"gaussian": MEAN}, "gaussian is"),
        ({"center": MEAN[:2]}, "center is .* of length 3"),
        ({"stiffness": STIFFNESS + torch.triu(torch.ones(3, 3), 1)}, "stiffness differs from its transpose"),
        ({"stiffness": STIFFNESS[:2]}, "stiffness is .* matrix"),
        ({"stiffness": -STIFFNESS, "tau": 1.0}, "must be below 0.4"),
    ):
        given = {"gaussian": Gaussian(MEAN, COVARIANCE), "stiffness": STIFFNESS, "nu": 0.4, "tau": 0.1, **options}
        with pytest.raises(HelmscopeError, match=message):
            gaussian_jko_step(given.pop("gaussian"), **given)
