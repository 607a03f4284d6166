"""Whitening: the counterexample, commuting matrices, mobility, singular noise, stationary laws, scalar diffusion."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm

from helmscope.fields.noise import DivergenceForm, IsotropicNoise, MatrixNoise
from helmscope.meanfield import (
    CircleGrid,
    Density,
    SphereGrid,
    is_gradient_flow,
    scalar_diffusion_error,
    stationary_current,
    stationary_gaussian,
    whiten,
)
from helmscope.types import HelmscopeError

S = torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=torch.float64)
SIGMA = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))


def random_symmetric(seed: int, dim: int = 5) -> torch.Tensor:
    matrix = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return matrix @ matrix.mT / dim + 0.5 * torch.eye(dim, dtype=torch.float64)


def test_the_counterexample() -> None:
    """A gradient drift, S = S^T, that whitening turns into one with a swirl."""
    result = whiten(S, SIGMA)
    assert torch.allclose(result.stiffness, torch.tensor([[1, 1], [0.25, 2]], dtype=torch.float64), atol=1e-15)
    assert abs(float((result.stiffness - result.stiffness.mT)[0, 1]) / 2 - 0.375) < 1e-15
    assert result.antisymmetric_share_before == 0
    assert abs(result.antisymmetric_share_after - 2 * 0.375**2 / 6.0625) < 1e-15  # as everywhere, of squares
    assert repr(result) == "<Whitening: antisymmetric share 0 before, 0.0464 after; no gradient flow>"
    assert result.commutator > 0.1
    assert not result.gives_gradient_flow
    covariance = stationary_gaussian(drift=-S, diffusion=SIGMA).covariance
    assert torch.allclose(7 * covariance, torch.tensor([[9, -4], [-4, 15]], dtype=torch.float64), atol=1e-14)
    current = stationary_current(S, SIGMA)
    assert torch.allclose(current, torch.tensor([[0, 0.5], [-0.5, 0]], dtype=torch.float64), atol=1e-15)


def test_when_it_gives_a_gradient_flow() -> None:
    sigma, hessian = random_symmetric(0), random_symmetric(1)
    values, vectors = torch.linalg.eigh(sigma)
    commuting = (vectors * torch.tensor([0.3, 2.0, 1.0, 4.0, 0.7], dtype=torch.float64)) @ vectors.mT
    for drift, expected in ((commuting, True), (sigma @ hessian, True), (hessian, False), (hessian @ sigma, False)):
        result = whiten(drift, sigma)
        assert result.gives_gradient_flow is expected
        assert is_gradient_flow(drift, sigma) is expected
        assert (result.asymmetry < 1e-12) is expected
        assert (float(stationary_current(drift, sigma).norm()) < 1e-12) is expected
        root = torch.linalg.inv((vectors * values.sqrt()) @ vectors.mT)
        assert torch.allclose(result.stiffness, root @ drift @ torch.linalg.inv(root), atol=1e-12)
    assert whiten(commuting, sigma).commutator < 1e-14
    assert whiten(sigma @ hessian, sigma).commutator > 1e-2  # mobility needs no commuting


def test_shares_are_of_squares_and_tol_is_of_lengths() -> None:
    """|A|^2 / |S|^2 as in ``JacobianSplit``; an antisymmetric part of 1e-6 |S| is no gradient flow at tol = 1e-10."""
    drift = torch.randn(5, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    result = whiten(drift, random_symmetric(0))
    for share, matrix in (
        (result.antisymmetric_share_before, drift.numpy()),
        (result.antisymmetric_share_after, result.stiffness.numpy()),
    ):
        assert share == pytest.approx(((matrix - matrix.T) ** 2).sum() / (4 * (matrix**2).sum()), rel=1e-13)
    nearly = torch.eye(2, dtype=torch.float64)
    nearly[0, 1], nearly[1, 0] = 1e-6, -1e-6
    result = whiten(nearly, torch.eye(2, dtype=torch.float64))
    assert result.antisymmetric_share_after == pytest.approx(1e-12, rel=1e-5)
    assert not result.gives_gradient_flow
    assert whiten(nearly, torch.eye(2, dtype=torch.float64), tol=1e-5).gives_gradient_flow


def test_singular_noise() -> None:
    """On the range of Sigma; a drift that leads out of it is no gradient flow there."""
    sigma = torch.diag(torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64))
    block = torch.zeros(3, 3, dtype=torch.float64)
    block[:2, :2], block[2, 2] = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64)), 5.0
    inside = whiten(block, sigma)
    assert inside.gives_gradient_flow
    assert inside.stiffness.shape == (2, 2)
    assert inside.axes.shape == (3, 2)
    leaking = block.clone()
    leaking[2, 0] = leaking[0, 2] = 0.5
    outside = whiten(leaking, sigma)
    assert not outside.gives_gradient_flow
    assert outside.leak > 0.05
    assert outside.antisymmetric_share_after < 1e-28
    twisted = block.clone()
    twisted[:2, :2] = S
    values = np.sort(np.linalg.eigvals(whiten(twisted, sigma).stiffness.numpy()).real)
    assert np.allclose(values, np.linalg.eigvalsh(S.numpy()))  # similar matrices
    assert abs(whiten(twisted, sigma).antisymmetric_share_after - whiten(S, SIGMA).antisymmetric_share_after) < 1e-14
    assert is_gradient_flow(sigma @ random_symmetric(2, 3), sigma)  # mobility


def test_stationary_covariance_by_integration() -> None:
    """C = int_0^inf e^{-S t} 2 Sigma e^{-S^T t} dt, by Gauss-Legendre quadrature; and the equation itself."""
    drift = random_symmetric(3) + torch.triu(torch.ones(5, 5, dtype=torch.float64), 1) * 0.4
    sigma = random_symmetric(4)
    nodes, weights = np.polynomial.legendre.leggauss(80)
    total = np.zeros((5, 5))
    for node, weight in zip(nodes, weights, strict=True):
        decay = expm(-drift.numpy() * 20 * (node + 1))
        total += 20 * weight * decay @ (2 * sigma.numpy()) @ decay.T
    covariance = stationary_gaussian(drift=-drift, diffusion=sigma).covariance
    assert np.abs(covariance.numpy() - total).max() < 1e-7
    assert torch.allclose(drift @ covariance + covariance @ drift.mT, 2 * sigma, atol=1e-12)
    current = stationary_current(drift, sigma)
    assert torch.allclose(drift @ covariance - sigma, current, atol=1e-12)


def test_scalar_diffusion_against_finite_differences() -> None:
    """On the circle the chain with M = diag(a, b) has d_t rho = d(Sigma d rho), Sigma = a sin^2 + b cos^2."""
    n, a, b, time = 400, 0.8, 0.2, 0.3
    start = Density.von_mises_fisher(CircleGrid(degree=24), kappa=1.0)
    noise = MatrixNoise(torch.diag(torch.tensor([a, b], dtype=torch.float64)))
    (error,) = scalar_diffusion_error(None, start, noise, times=[time]).tolist()
    t = 2 * np.pi * np.arange(n) / n

    def laws(sigma: np.ndarray) -> np.ndarray:
        flux = sigma * (n / (2 * np.pi)) ** 2
        off = np.roll(np.diag(flux), 1, 1)
        return expm(time * (off + off.T - np.diag(flux + np.roll(flux, 1))))

    middle = t + np.pi / n
    rho = np.exp(np.cos(t))
    rho /= rho.mean()
    exact = laws(a * np.sin(middle) ** 2 + b * np.cos(middle) ** 2) @ rho
    scalar = laws(np.full(n, (a + b) / 2)) @ rho
    assert abs(error - np.abs(exact - scalar).mean() / 2) < 1e-4
    assert error > 0.02


def test_scalar_diffusion_on_the_sphere() -> None:
    start = Density.von_mises_fisher(SphereGrid(degree=16), kappa=0.5)
    assert float(scalar_diffusion_error(None, start, IsotropicNoise(0.2), times=[0.5])) < 1e-12
    matrix = torch.diag(torch.tensor([1.0, 0.7, 0.2], dtype=torch.float64))
    errors = [
        scalar_diffusion_error(None, start, MatrixNoise(matrix, process=process), times=[0.1, 0.2])
        for process in (DivergenceForm(), MatrixNoise(matrix).process)
    ]
    assert all(float(each.min()) > 0.005 for each in errors)
    assert float((errors[0] - errors[1]).abs().max()) > 1e-3  # the processes differ on S^2


def test_bad_input() -> None:
    start = Density.uniform(CircleGrid(degree=8))
    for call, message in (
        (lambda: whiten(S[0], SIGMA), "stiffness is"),
        (lambda: whiten(S, torch.eye(3)), "diffusion has shape"),
        (lambda: whiten(S, S + torch.triu(S, 1)), "diffusion is not symmetric"),
        (lambda: whiten(S, -SIGMA), "diffusion has the eigenvalues -4 to -1"),
        (lambda: whiten(S, 0 * SIGMA), "diffusion has the eigenvalues 0 to 0"),
        (lambda: whiten(S * math.nan, SIGMA), "stiffness is"),
        (lambda: stationary_current(-S, SIGMA), "stiffness has an eigenvalue with real part"),
        (lambda: scalar_diffusion_error(None, S, IsotropicNoise(0.1), times=[1.0]), "start is"),
        (lambda: scalar_diffusion_error(None, start, None, times=[1.0]), "noise is None"),
    ):
        with pytest.raises(HelmscopeError, match=message):
            call()
