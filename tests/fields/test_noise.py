"""Noise: the generators of the four processes, their forward equations, drifts of state-dependent noise, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from helmscope.fields.noise import (
    DivergenceForm,
    IsotropicNoise,
    Ito,
    LayerNormChain,
    MatrixNoise,
    Noise,
    StateNoise,
    Stratonovich,
)
from helmscope.geometry import surface
from helmscope.geometry.sphere import project, retract
from helmscope.types import HelmscopeError

F64 = torch.float64
PROCESSES = [LayerNormChain(), Stratonovich(), Ito(), DivergenceForm()]
Function = Callable[[torch.Tensor], torch.Tensor]


def points(*shape: int, seed: int = 0) -> torch.Tensor:
    return retract(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64))


def covariance(d: int, seed: int = 0) -> torch.Tensor:
    a = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return a @ a.T / d


def wavy(k: int) -> Function:
    """A smooth sigma(x), d x k, that turns and stretches along the sphere and off it, token by token."""

    def sigma(x: torch.Tensor) -> torch.Tensor:
        j = torch.arange(1, k + 1, dtype=x.dtype)
        return torch.sin(x.unsqueeze(-1) * j + x.sum(-1)[..., None, None]) + x.roll(1, -1).unsqueeze(-1) / j

    return sigma


def tangential(m: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    p = torch.eye(x.shape[-1], dtype=F64) - x.unsqueeze(-1) * x.unsqueeze(-2)
    return p @ m @ p


def generator(noise: Noise, phi: Function, x: torch.Tensor) -> torch.Tensor:
    """L phi = <beta, grad_S phi> + tr(P M P Hess_S phi)."""
    first = (noise.process.drift(noise, x) * surface.gradient(phi, x)).sum(-1)
    return first + (tangential(noise.diffusion_matrix(x), x) * surface.hessian(phi, x)).sum((-1, -2))


def probe(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x[..., 0] + 2 * x[..., 1]) + x[..., -1] ** 3 - x[..., 0] * x[..., -1]


# Constant noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("process", "value"), list(zip(PROCESSES, (-2, -3, -4, -1), strict=True)))
def test_the_generators_of_000_5(process, value) -> None:
    noise = MatrixNoise(torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=F64)), process=process)
    x = torch.full((1, 3), 1 / math.sqrt(3), dtype=F64)
    measured = generator(noise, lambda y: y[..., 0], x).item()
    assert measured == pytest.approx(value / math.sqrt(3), abs=1e-15)


@pytest.mark.parametrize("d", [2, 3, 5])
def test_constant_drifts_are_multiples_of_pmx(d) -> None:
    x, m = points(4, 6, d), covariance(d)
    drag = torch.stack([project(y, m @ y) for y in x.reshape(-1, d)]).reshape(x.shape)
    for process, factor in zip(PROCESSES, (-2, -1, 0, -d), strict=True):
        drift = process.drift(MatrixNoise(m), x)
        assert (drift - factor * drag).abs().max() < 1e-14
        assert (drift * x).sum(-1).abs().max() < 1e-14


@pytest.mark.parametrize("process", PROCESSES)
def test_isotropic_noise_is_one_process(process) -> None:
    x = points(5, 4, 3)
    noise = IsotropicNoise(0.7, process=process)
    assert process.drift(noise, x).abs().max() < 1e-15
    assert (generator(noise, probe, x) - 0.7 * surface.laplacian(probe, x)).abs().max() < 1e-13


@pytest.mark.parametrize(
    "noise", [IsotropicNoise(0.3), MatrixNoise(covariance(3)), StateNoise(wavy(2)), StateNoise(wavy(5))]
)
def test_kick_matrix_and_drag_belong_together(noise) -> None:
    x = points(2, 4, 3)
    k = noise.brownian_dim(x)
    columns = torch.stack([noise.increment(x, e.expand(2, 4, k)) for e in torch.eye(k, dtype=F64)], -1)
    assert columns.shape == (2, 4, 3, k)
    expected = torch.stack([s @ s.T / 2 for s in columns.reshape(-1, 3, k)]).reshape(2, 4, 3, 3)
    assert (noise.diffusion_matrix(x) - expected).abs().max() < 1e-14
    assert (noise.diffusion_times_state(x) - (expected @ x.unsqueeze(-1))[..., 0]).abs().max() < 1e-14


def test_the_square_root_is_symmetric_and_may_be_singular() -> None:
    a = torch.tensor([[1.0], [2.0], [-1.0]], dtype=F64)
    noise = MatrixNoise(a @ a.T)
    assert (noise.root - noise.root.T).abs().max() < 1e-15
    assert (noise.root @ noise.root - 2 * a @ a.T).abs().max() < 2e-14
    across = torch.tensor([[2.0, -1.0, 0.0]], dtype=F64)
    assert noise.increment(a.T, across).abs().max() < 1e-7  # roots of eigenvalues of 1e-16
    assert torch.equal(MatrixNoise(torch.zeros(3, 3)).increment(across, across), torch.zeros(1, 3, dtype=F64))


# Forward equations ----------------------------------------------------------------------------------------------------


def sphere_grid(d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes and weights of the uniform law: equal angles on the circle, Gauss by equal angles on S^2."""
    turn = 2 * np.pi * np.arange(48) / 48
    if d == 2:
        return torch.tensor(np.stack([np.cos(turn), np.sin(turn)], -1)), torch.full((48,), 1 / 48, dtype=F64)
    z, w = np.polynomial.legendre.leggauss(32)
    rho = np.sqrt(1 - z * z)[:, None]
    x = np.stack([rho * np.cos(turn), rho * np.sin(turn), z[:, None] + 0 * turn], -1)
    return torch.tensor(x.reshape(-1, 3)), torch.tensor(np.repeat(w / 2 / 48, 48))


def density(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(0.8 * x[..., 0] - 0.5 * x[..., 1]) + x[..., -1] ** 2


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize(("process", "count"), list(zip(PROCESSES, (-2, -1, 0, None), strict=True)))
def test_forward_equations_of_constant_noise(process, count, d) -> None:
    """int rho L phi = int phi [div_S(Sigma grad rho) - c div_S(rho P M x)], c = d-2, d-1, d, 0 [Helmholtz Transformer,
    no. 5]."""
    x, w = sphere_grid(d)
    m = covariance(d, seed=d)
    c = 0 if count is None else d + count
    noise = MatrixNoise(m, process=process)

    def flux(y: torch.Tensor) -> torch.Tensor:  # its projection is Sigma grad rho - c rho P M x
        slope = surface.gradient(density, y)
        return (slope - c * density(y).unsqueeze(-1) * y) @ m

    backward = (w * density(x) * generator(noise, probe, x)).sum()
    forward = (w * probe(x) * surface.divergence(flux, x)).sum()
    assert backward.abs() > 1e-2
    assert (backward - forward).abs() < 1e-13


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("process", [Stratonovich(), DivergenceForm()])
def test_forward_equations_of_state_dependent_noise(process, d) -> None:
    """Stratonovich: div_S(Sigma grad rho) + div_S(rho c), c = (1/2) sum_k A_k div_S A_k; divergence form: c = 0."""
    x, w = sphere_grid(d)
    noise = StateNoise(wavy(2), process=process)

    def flux(y: torch.Tensor) -> torch.Tensor:
        sigma = wavy(2)(y)
        parts = project(y, sigma.movedim(-1, 0))
        total = (parts * (parts * surface.gradient(density, y)).sum(-1, keepdim=True)).sum(0) / 2
        if process == Stratonovich():
            spread = [surface.divergence(lambda z, k=k: wavy(2)(z)[..., k], y) for k in range(2)]
            total = total + (density(y) * torch.stack(spread)).unsqueeze(-1).mul(parts).sum(0) / 2
        return total

    backward = (w * density(x) * generator(noise, probe, x.unsqueeze(-2))[..., 0]).sum()
    forward = (w * probe(x) * surface.divergence(flux, x)).sum()
    assert backward.abs() > 1e-2
    assert (backward - forward).abs() < 1e-13


# State-dependent noise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [MatrixNoise(covariance(4)), StateNoise(wavy(3))])
def test_divergence_form_is_the_surface_divergence(noise) -> None:
    """<div_S Sigma, e_i> = div_S(Sigma e_i) + x_i tr Sigma on the tangent space, for Hess_S x_i = -x_i P."""
    x = points(10, 4)

    def column(i: int) -> Function:
        return lambda y: tangential(noise.diffusion_matrix(y.unsqueeze(-2))[..., 0, :, :], y)[..., i]

    trace = tangential(noise.diffusion_matrix(x.unsqueeze(-2))[..., 0, :, :], x).diagonal(dim1=-2, dim2=-1).sum(-1)
    rows = [surface.divergence(column(i), x) + x[..., i] * trace for i in range(4)]
    drift = DivergenceForm().drift(noise, x.unsqueeze(-2))[..., 0, :]
    assert (drift - project(x, torch.stack(rows, -1))).abs().max() < 2e-14


def test_stratonovich_is_half_the_squares_of_its_fields() -> None:
    """L = (1/2) sum_k A_k A_k, A_k phi = <P sigma_k, grad phi>, applied twice."""
    x = points(10, 4)
    noise = StateNoise(wavy(3), process=Stratonovich())

    def along(k: int, phi: Function) -> Function:
        return lambda y: (wavy(3)(y)[..., k] * surface.gradient(phi, y)).sum(-1)

    twice = sum(along(k, along(k, probe))(x.clone().requires_grad_()) for k in range(3)) / 2
    measured = generator(noise, probe, x.unsqueeze(-2))[..., 0]
    assert (measured - twice).abs().max() < 2e-14


def test_a_scalar_sigma_has_the_drifts_of_the_table() -> None:
    """c = div_S Sigma - beta in the forward equation is (1/4) grad_S sigma^2 for Stratonovich, 1/2 for Ito, 0 else."""
    x = points(10, 1, 3)

    def scale(y: torch.Tensor) -> torch.Tensor:
        return 1.5 + torch.sin(y[..., 0] + 2 * y[..., 1] * y[..., 2])

    slope = surface.gradient(lambda y: scale(y) ** 2, x)
    for process, share in ((Stratonovich(), 1 / 4), (Ito(), 1 / 2), (DivergenceForm(), 0)):
        noise = StateNoise(lambda y: scale(y)[..., None, None] * torch.eye(3, dtype=F64), process=process)
        c = DivergenceForm().drift(noise, x) - process.drift(noise, x)
        assert (c - share * slope).abs().max() < 1e-14


def test_the_chain_keeps_its_drift_for_every_sigma() -> None:
    x = points(3, 4, 3)
    noise = StateNoise(wavy(2))
    expected = [-2 * project(y, wavy(2)(y) @ wavy(2)(y).T @ y / 2) for y in x.reshape(-1, 3)]
    assert (LayerNormChain().drift(noise, x) - torch.stack(expected).reshape(3, 4, 3)).abs().max() < 1e-14


def mixing(x: torch.Tensor) -> torch.Tensor:
    """A sigma, 3 x 2, that depends on the other tokens."""
    return torch.stack([torch.sin(x + x.mean(-2, keepdim=True)), x * x.roll(1, -2)], -1)


@pytest.mark.parametrize("common", [False, True])
def test_a_sigma_that_depends_on_other_tokens(common) -> None:
    """By central differences of A_k = P sigma_k: one token moves under noise of its own, all under common noise."""
    x = points(2, 4, 3)
    noise = StateNoise(mixing, common=common, process=Stratonovich())

    def fields(y: torch.Tensor) -> torch.Tensor:
        return project(y, mixing(y).movedim(-1, 0))

    expected, e = torch.zeros_like(x), 1e-5
    for k in range(2):
        v = fields(x)[k]
        for i in range(4):
            mover = v if common else v * torch.eye(4, dtype=F64)[i][:, None]
            change = (fields(x + e * mover)[k] - fields(x - e * mover)[k]) / (2 * e)
            expected[:, i] += project(x, change)[:, i] / 2
    assert (noise.process.drift(noise, x) - expected).abs().max() < 5e-11


def test_stratonovich_correction_of_a_residual_stream() -> None:
    """sigma = diag(y): (1/2) sum_k D sigma_k[sigma_k] = y / 2, off the sphere and without P."""
    y = 3 * points(2, 4, 3)
    noise = StateNoise(torch.diag_embed)
    assert (noise.stratonovich_correction(y, on_sphere=False) - y / 2).abs().max() < 1e-15


# Bits, gradients, refusals --------------------------------------------------------------------------------------------

NOISES = [
    lambda process: IsotropicNoise(0.3, process=process),
    lambda process: MatrixNoise(covariance(3), process=process),
    lambda process: StateNoise(wavy(4), process=process),
    lambda process: StateNoise(mixing, common=True, process=process),
]


@pytest.mark.parametrize("make", NOISES)
@pytest.mark.parametrize("process", PROCESSES)
def test_a_system_does_not_depend_on_its_batch_to_the_bit(make, process) -> None:
    noise = make(process)
    x = points(7, 5, 3)
    dw = torch.randn(7, 5, noise.brownian_dim(x), dtype=F64, generator=torch.Generator().manual_seed(1))
    for whole, alone in (
        (noise.increment(x, dw), lambda i: noise.increment(x[i : i + 1], dw[i : i + 1])),
        (process.drift(noise, x), lambda i: process.drift(noise, x[i : i + 1])),
    ):
        assert all(torch.equal(whole[i], alone(i)[0]) for i in range(7))


@pytest.mark.parametrize("make", NOISES)
@pytest.mark.parametrize("process", PROCESSES)
def test_drifts_are_differentiable(make, process) -> None:
    noise = make(process)
    x = points(3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda y: process.drift(noise, y), (x,))
    with torch.no_grad():
        quiet = process.drift(noise, x)
    assert torch.equal(quiet, process.drift(noise, x).detach())
    v = points(3, 3, seed=1)
    _, forward = torch.func.jvp(lambda y: process.drift(noise, y), (x.detach(),), (v,))
    step = 1e-6 * v
    difference = (process.drift(noise, x.detach() + step) - process.drift(noise, x.detach() - step)) / 2e-6
    assert (forward - difference).abs().max() < 1e-8
    batch = points(4, 3, 3)
    assert torch.allclose(torch.vmap(lambda y: process.drift(noise, y))(batch), process.drift(noise, batch), atol=1e-14)


@pytest.mark.parametrize("make", NOISES)
def test_float32_stays_float32(make) -> None:
    noise = make(DivergenceForm())
    x = points(2, 3, 3)
    low = x.float()
    dw = torch.ones(2, 3, noise.brownian_dim(x))
    assert noise.increment(low, dw).dtype == noise.diffusion_matrix(low).dtype == torch.float32
    assert (noise.process.drift(noise, low) - noise.process.drift(noise, x)).abs().max() < 5e-6
    assert noise.process.drift(noise, low).dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: IsotropicNoise(-0.1), "nu is -0.1, but it must be a finite number >= 0"),
        (lambda: IsotropicNoise(math.nan), "nu is nan, but it must be a finite number >= 0"),
        (lambda: IsotropicNoise(1.0, common=1), "common is 1, but it must be True or False"),
        (
            lambda: IsotropicNoise(1.0, process=Ito),
            "process is <class 'helmscope.fields.process.Ito'>, but it must be a process such as LayerNormChain()",
        ),
        (
            lambda: MatrixNoise(torch.tensor([[1.0, 0.25], [0.5, 1.0]])),
            "diffusion differs from its transpose by 0.25 at (0, 1), but it must be symmetric",
        ),
        (
            lambda: MatrixNoise(torch.tensor([[1.0, 2.0], [2.0, 1.0]])),
            "diffusion has the eigenvalue -1, but it must be positive semi-definite: next to the largest, 3, only "
            "-1.1e-05 and above counts as rounding error in torch.float32",
        ),
        (
            lambda: MatrixNoise(torch.ones(2, 3)),
            "diffusion is a tensor of shape (2, 3), but it must be a square matrix as a torch tensor",
        ),
        (lambda: MatrixNoise(0.5), "diffusion is a float, but it must be a square matrix as a torch tensor"),
        (
            lambda: MatrixNoise(torch.eye(2, dtype=torch.int64)),
            "diffusion has dtype torch.int64, but it must hold floating-point numbers",
        ),
        (
            lambda: MatrixNoise(torch.tensor([[1.0, torch.inf], [torch.inf, 1.0]])),
            "diffusion holds the entry inf, but every entry must be finite",
        ),
        (
            lambda: MatrixNoise(torch.eye(2)).check_size(torch.eye(3)),
            "diffusion has shape (2, 2), but tokens of shape (3, 3) need (3, 3)",
        ),
        (
            lambda: StateNoise(3.0),
            "sigma is 3.0, but it must be a callable (..., n, d) -> (..., n, d, k): for constant noise use "
            "MatrixNoise or IsotropicNoise",
        ),
        (
            lambda: StateNoise(lambda x: x).check_size(torch.eye(3)),
            "sigma returns (3, 3) for tokens of shape (3, 3), but it must be (3, 3, k)",
        ),
        (
            lambda: StateNoise(lambda x: torch.zeros(3, 3, 0)).check_size(torch.eye(3)),
            "sigma returns (3, 3, 0) for tokens of shape (3, 3), but it must be (3, 3, k)",
        ),
        (
            lambda: StateNoise(lambda x: None).check_size(torch.eye(3)),
            "sigma returns a NoneType for tokens of shape (3, 3), but it must be (3, 3, k)",
        ),
        (
            lambda: StateNoise(lambda x: torch.full((3, 3, 1), torch.nan)).check_size(torch.eye(3)),
            "sigma returns the entry nan, but every entry must be finite",
        ),
    ],
)
def test_refusals(make, sentence) -> None:
    with pytest.raises(HelmscopeError) as error:
        make()
    assert str(error.value) == sentence


def test_rounding_does_not_count_as_asymmetry() -> None:
    a = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for scale in (1e-20, 1.0, 1e20):
        noise = MatrixNoise(scale * (a @ a.T + torch.randn(64, 64) * 1e-5))
        assert torch.equal(noise.diffusion, noise.diffusion.T)
    flat = a[:, :3] @ a[:, :3].T  # rank 3, with eigenvalues of rounding on both sides of 0
    assert MatrixNoise(flat).diffusion.dtype == F64
    assert MatrixNoise(torch.eye(2, requires_grad=True)).diffusion.requires_grad is False
    assert IsotropicNoise(0.5) == IsotropicNoise(0.5) != IsotropicNoise(0.5, common=True)


def test_how_far_below_zero_an_eigenvalue_may_be() -> None:
    """Rounding leaves -4e-16 of the greatest eigenvalue in float64; 3e-14 passes for it, and 3e-8, float32's, does not.
    bfloat16 leaves -9e-4, and 1/64 passes.
    """
    a = torch.randn(8, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert MatrixNoise(a @ a.T).diffusion.dtype == F64
    coarse = (a.float() @ a.float().T).double()
    with pytest.raises(HelmscopeError, match=r"^diffusion has .* -\S+e-0\d, .*e-13 and above .* torch.float64$"):
        MatrixNoise(coarse)
    MatrixNoise(coarse.float())
    MatrixNoise(coarse.bfloat16())
    with pytest.raises(HelmscopeError, match=r"diffusion has the eigenvalue -0.5, .* only -0.016 and above"):
        MatrixNoise(torch.diag(torch.tensor([-0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])).bfloat16())
