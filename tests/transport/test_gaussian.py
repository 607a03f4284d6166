"""W2 between Gaussians against samples, commuting covariances and the JKO step of a Gaussian."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from scipy.optimize import minimize

from helmscope.transport.cost import Euclidean
from helmscope.transport.distance import wasserstein
from helmscope.transport.gaussian import gaussian_w2
from helmscope.types import HelmscopeError


def random_covariance(d: int, seed: int) -> torch.Tensor:
    a = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return a @ a.mT + 0.1 * torch.eye(d, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_against_scipy(seed: int) -> None:
    a, b = random_covariance(4, seed), random_covariance(4, seed + 100)
    m, n = (torch.randn(4, generator=torch.Generator().manual_seed(seed + k), dtype=torch.float64) for k in (200, 300))
    root = sqrtm(a.numpy())
    cross = np.trace(sqrtm(root @ b.numpy() @ root).real)
    squared = float((m - n).square().sum() + a.trace() + b.trace()) - 2 * cross
    assert float(gaussian_w2(m, a, n, b)) == pytest.approx(math.sqrt(squared), rel=1e-10)
    assert float(gaussian_w2(n, b, m, a)) == pytest.approx(math.sqrt(squared), rel=1e-10)


def test_a_cloud_and_its_optimal_linear_image() -> None:
    """x -> S x with S symmetric and positive is an optimal map, so W2 of the clouds is their root mean squared shift,
    and that is W2 of the Gaussians with the same moments.
    """
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s = random_covariance(3, 1)
    y = x @ s + 0.3
    moments = [part for cloud in (x, y) for part in (cloud.mean(0), torch.cov(cloud.mT, correction=0))]
    exact = wasserstein(x, y, p=2, cost=Euclidean())
    assert float(gaussian_w2(*moments)) == pytest.approx(float(exact), rel=1e-10)


def test_the_jko_step_of_a_gaussian() -> None:
    """argmin of F + W2^2 / (2 tau), F = nu Ent + E[k x^2 / 2], over Gaussians N(m, s^2)."""
    k, nu, tau, m0, s0 = 1.5, 0.4, 0.1, 2.0, 1.3

    def objective(parameters: np.ndarray) -> float:
        m, s = parameters[0], math.exp(parameters[1])
        law = (torch.tensor([m], dtype=torch.float64), torch.tensor([[s * s]], dtype=torch.float64))
        start = (torch.tensor([m0], dtype=torch.float64), torch.tensor([[s0 * s0]], dtype=torch.float64))
        entropy = -math.log(s)  # up to a constant
        return nu * entropy + k * (m * m + s * s) / 2 + float(gaussian_w2(*law, *start)) ** 2 / (2 * tau)

    found = minimize(objective, [m0, math.log(s0)], method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-15})
    assert found.x[0] == pytest.approx(1.7391304347826089, abs=1e-6)
    assert math.exp(found.x[1]) == pytest.approx(1.1604092159529602, abs=1e-6)
    wrong = minimize(lambda p: objective(p) - 2 * k * (p[0] ** 2 + math.exp(2 * p[1])) / 2, [m0, 0.0])  # sign of V
    assert abs(wrong.x[0] - 1.7391304347826089) > 0.1


def test_what_is_no_covariance_is_refused() -> None:
    zero, eye = torch.zeros(2), torch.eye(2)
    with pytest.raises(HelmscopeError, match="covariance_y has a negative eigenvalue"):
        gaussian_w2(zero, eye, zero, -eye)
    with pytest.raises(HelmscopeError, match="covariance_x is not symmetric"):
        gaussian_w2(zero, torch.tensor([[1.0, 0.5], [0.0, 1.0]]), zero, eye)
    with pytest.raises(HelmscopeError, match=r"covariance_x is \(2,\), but it must be a tensor of square matrices"):
        gaussian_w2(zero, zero, zero, eye)
