"""Diffusions of the reference: densities by closed forms and quadrature, gradients, energies by plain algebra."""

from __future__ import annotations

import math

import pytest
import torch

from helmscope.fields.noise import IsotropicNoise, MatrixNoise
from helmscope.geometry.sphere import project
from helmscope.theory.starts import Uniform, VonMisesFisher
from helmscope.transport.diffusion import Diffusion, FlatDiffusion, SphereDiffusion, SphereMatrixDiffusion
from helmscope.transport.particle_bridge import bridge_particles
from support.transport_oracles import on_circle, unit_cloud

F64 = torch.float64


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def test_density_of_a_matrix_on_the_circle_is_a_normal_density_of_the_angle() -> None:
    """There the exponential map preserves length, so that no factor of volume is left."""
    matrix, s = torch.tensor([[0.5, 0.1], [0.1, 0.3]], dtype=F64), 0.2
    angles = torch.tensor([0.3, 1.7, -2.0], dtype=F64)
    turns = torch.tensor([0.0, 0.4, -1.3, 2.9], dtype=F64)
    z = on_circle(angles)
    for i, angle in enumerate(angles.tolist()):
        tangent = torch.tensor([-math.sin(angle), math.cos(angle)], dtype=F64)
        variance = 2 * s * float(tangent @ matrix @ tangent)
        w = on_circle(angle + turns)
        log_p, factor = SphereMatrixDiffusion(matrix).pairs(z[i : i + 1], w, s)
        assert factor is not None
        for j, turn in enumerate(turns.tolist()):
            wanted = -(turn**2) / (2 * variance) - math.log(2 * math.pi * variance) / 2
            assert float(log_p[0, j]) == pytest.approx(wanted, abs=1e-9)
            assert float(factor[0, j]) == pytest.approx(turn / math.sin(turn) if turn else 1, abs=1e-9)


@pytest.mark.parametrize("dim", [2, 3])
def test_density_of_a_matrix_has_mass_one_by_quadrature(dim: int) -> None:
    """On S^2 over polar coordinates around the point, whose element of area is sin theta."""
    matrix = torch.diag(torch.tensor([0.5, 0.3, 0.2], dtype=F64)[:dim])
    z = torch.eye(dim, dtype=F64)[:1]
    count = 1600
    theta = (torch.arange(count, dtype=F64) + 0.5) * math.pi / count
    if dim == 2:
        w = torch.cat([on_circle(theta), on_circle(-theta)])
        area = torch.full((2 * count,), math.pi / count, dtype=F64)
    else:
        turn = torch.arange(64, dtype=F64) * 2 * math.pi / 64
        across = torch.stack([torch.zeros_like(turn), turn.cos(), turn.sin()], -1)
        w = (theta.cos()[:, None, None] * z + theta.sin()[:, None, None] * across).reshape(-1, 3)
        area = (theta.sin()[:, None] * (math.pi / count) * (2 * math.pi / 64)).expand(-1, 64).reshape(-1)
    log_p = SphereMatrixDiffusion(matrix).pairs(z, w, 0.3)[0][0]
    assert float((torch.exp(log_p) * area).sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("dim", [2, 3, 8])
def test_energy_is_that_of_the_pseudoinverse(dim: int) -> None:
    """u . Sigma^+ u / 4 with Sigma = P M P, by the pseudoinverse of a dense matrix, point by point."""
    random = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0), dtype=F64)
    matrix = random @ random.mT / dim + torch.eye(dim, dtype=F64) / 5
    x = unit_cloud(5, dim, 1)
    u = project(x, torch.randn(5, dim, generator=torch.Generator().manual_seed(2), dtype=F64))
    found, image = SphereMatrixDiffusion(matrix).energy(x, u), SphereMatrixDiffusion(matrix).times_sigma(x, u)
    for k in range(5):
        projector = torch.eye(dim, dtype=F64) - torch.outer(x[k], x[k])
        sigma = projector @ matrix @ projector
        wanted = float(u[k] @ torch.linalg.pinv(sigma, rtol=1e-10) @ u[k]) / 4
        assert float(found[k]) == pytest.approx(wanted, rel=1e-10)
        torch.testing.assert_close(image[k], sigma @ u[k], rtol=1e-10, atol=1e-12)
    nu_identity = SphereMatrixDiffusion(0.3 * torch.eye(dim, dtype=F64)).energy(x, u)
    torch.testing.assert_close(nu_identity, SphereDiffusion(0.3).energy(x, u), rtol=1e-10, atol=0)
    flat = FlatDiffusion(matrix).energy(x, u)
    for k in range(5):
        assert float(flat[k]) == pytest.approx(float(u[k] @ torch.linalg.inv(matrix) @ u[k]) / 4, rel=1e-10)


def test_cost_with_the_matrix_nu_times_the_identity_is_that_of_isotropic_noise() -> None:
    x = VonMisesFisher(n=60, dim=3, kappa=4.0, mean=torch.eye(3)[0]).sample(seed=1)
    y = VonMisesFisher(n=60, dim=3, kappa=8.0, mean=torch.eye(3)[1]).sample(seed=2)
    isotropic, matrix = (
        bridge_particles(x, y, noise=noise, particles=150, steps=4, rounds=1).cost_until(0.6, n=300, seed=1)
        for noise in (IsotropicNoise(0.3), MatrixNoise(0.3 * torch.eye(3)))
    )
    assert isotropic.estimate > 0.5
    assert matrix.estimate == pytest.approx(isotropic.estimate, rel=0.1)  # the same paths, up to the error of the steps


def test_densities_of_diffusions_have_their_gradients() -> None:
    """On S^2 against differences; with a matrix the gradient is that of the exponent alone."""
    w = Uniform(n=4000, dim=3).sample(seed=0)
    z = VonMisesFisher(n=3, dim=3, kappa=4.0, mean=torch.eye(3)[0]).sample(seed=1)
    anisotropic = SphereMatrixDiffusion(torch.diag(torch.tensor([0.5, 0.3, 0.2], dtype=F64)))
    cases: list[tuple[Diffusion, float]] = [(SphereDiffusion(0.4), 1e-6), (anisotropic, 0.15)]
    for diffusion, tol in cases:
        log_p, factor = diffusion.pairs(z, w, 0.1)
        assert factor is not None
        mass = 4 * math.pi * torch.exp(log_p).mean(1)
        assert (mass - 1).abs().max() < 0.15
        near = log_p > log_p.max() - 3
        for k in range(3):
            j = int(near[k].nonzero()[5])
            shares = torch.zeros_like(log_p)
            shares[k, j] = factor[k, j]
            gradient = diffusion.gradient(z, w, shares, 0.1)[k]
            assert abs(float(gradient @ z[k])) < 1e-9
            step = 1e-5 * gradient / gradient.norm()
            ends = torch.stack([unit(z[k] + step), unit(z[k] - step)])
            values = diffusion.pairs(ends, w[j : j + 1], 0.1)[0][:, 0]
            assert float(values[0] - values[1]) / 2e-5 == pytest.approx(float(gradient.norm()), rel=10 * tol)
