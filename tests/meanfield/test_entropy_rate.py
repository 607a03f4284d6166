"""The entropy identity: known digits, derivatives along evolutions under every process, Fisher information, faults."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.noise import (
    DivergenceForm,
    IsotropicNoise,
    Ito,
    LayerNormChain,
    MatrixNoise,
    Noise,
    Process,
    StateNoise,
    Stratonovich,
)
from helmscope.meanfield import (
    CircleGrid,
    Density,
    Grid,
    SphereGrid,
    ZonalGrid,
    entropy_rate,
    evolve,
    fisher_information,
)

CIRCLE = CircleGrid(degree=32)
START = Density.from_function(CIRCLE, lambda x: (1 + 0.5 * x[..., 0]) / (2 * math.pi))
PROCESSES = [LayerNormChain(), Stratonovich(), Ito(), DivergenceForm()]


def right(x: torch.Tensor) -> torch.Tensor:
    """On the circle -sin t."""
    return torch.eye(x.shape[-1])[0].to(x).expand_as(x)


def sigma(x: torch.Tensor) -> torch.Tensor:
    """sigma sigma^T / 2 = (0.3 + 0.1 cos t) I."""
    return (2 * (0.3 + 0.1 * x[..., :1])).sqrt()[..., None] * torch.eye(x.shape[-1]).to(x)


@pytest.mark.parametrize(
    ("process", "known"),
    [
        (DivergenceForm(), -0.2116025403784439),
        (Ito(), -0.1866025403784439),
        (LayerNormChain(), -0.1866025403784439),  # M x is radial here
        (Stratonovich(), -0.1991025403784439),
    ],
    ids=repr,
)
def test_known_digits_and_terms(process: Process, known: float) -> None:
    rate = entropy_rate(START, right, StateNoise(sigma, process=process))
    assert rate.total == pytest.approx(known, abs=1e-15)
    assert rate.drift == pytest.approx(-0.25, abs=1e-15)  # E[-cos t]
    share = {DivergenceForm: 0.0, Stratonovich: 0.5}.get(type(process), 1.0)
    assert rate.process == pytest.approx(share * 0.1 * 0.25, abs=1e-15)  # -E[Sigma''] = 0.1 E[cos t]
    t = 2 * math.pi * torch.arange(4096, dtype=torch.float64) / 4096
    density, slope = (1 + 0.5 * t.cos()) / (2 * math.pi), -0.5 * t.sin() / (2 * math.pi)
    fisher = float(((0.3 + 0.1 * t.cos()) * slope**2 / density).mean()) * 2 * math.pi
    assert rate.diffusion == pytest.approx(fisher, abs=1e-14)


def derivative(flow: object, start: Density, noise: Noise | None) -> float:
    """dH/dt from five entropies along the evolution."""
    h = 0.003
    path = evolve(flow, start, times=[0.0, h, 2 * h, 3 * h, 4 * h], noise=noise, tol=1e-12)
    return sum(c * d.entropy for c, d in zip((-25, 48, -36, 16, -3), path, strict=True)) / (12 * h)


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
@pytest.mark.parametrize("grid", [CIRCLE, SphereGrid(degree=16)], ids=repr)
def test_it_is_the_derivative_of_the_entropy(process: Process, grid: Grid) -> None:
    diffusion = torch.diag(torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)[: grid.dim])
    diffusion[0, 1] = diffusion[1, 0] = 0.1
    start = Density.von_mises_fisher(grid, kappa=1.5, center=torch.tensor([0.3, 1.0, -0.5])[: grid.dim])
    noise = MatrixNoise(diffusion, process=process)
    rate = entropy_rate(start, right, noise)
    assert rate.total == pytest.approx(derivative(right, start, noise), abs=1e-7)
    still = isinstance(process, DivergenceForm) or (grid.dim == 2 and isinstance(process, LayerNormChain))
    assert (abs(rate.process) < 1e-12) == still


def test_state_dependent_noise_along_an_evolution() -> None:
    start = Density.von_mises_fisher(CIRCLE, kappa=1.0, center=torch.tensor([0.3, 1.0]))
    for process in PROCESSES:
        noise = StateNoise(sigma, process=process)
        assert entropy_rate(start, right, noise).total == pytest.approx(derivative(right, start, noise), abs=1e-8)


@pytest.mark.parametrize("grid", [CIRCLE, SphereGrid(degree=20), ZonalGrid(dim=8, degree=24)], ids=repr)
def test_attention_compresses(grid: Grid) -> None:
    start = Density.von_mises_fisher(grid, kappa=1.0)
    for noise in (None, IsotropicNoise(0.1)):
        rate = entropy_rate(start, hs.SA(beta=3.0), noise)
        assert rate.drift < 0
        assert rate.process == 0
        assert rate.total == pytest.approx(derivative(hs.SA(beta=3.0), start, noise), abs=1e-7)


def test_fisher_information_of_von_mises_fisher_densities() -> None:
    for dim, kappa, known, entropy in (
        (3, 2.0, 2.149258882910192, 2.051614997568417),
        (8, 5.0, 17.30574174222759, 2.386109327559289),
    ):
        density = Density.von_mises_fisher(ZonalGrid(dim=dim, degree=40), kappa=kappa)
        assert fisher_information(density) == pytest.approx(known, rel=1e-14)
        assert density.entropy == pytest.approx(entropy, rel=1e-14)
        assert fisher_information(density, IsotropicNoise(0.3)) == pytest.approx(0.3 * known, rel=1e-14)
    sphere = Density.von_mises_fisher(SphereGrid(degree=24), kappa=2.0, center=torch.tensor([1.0, 2.0, -1.0]))
    assert fisher_information(sphere) == pytest.approx(2.149258882910192, rel=1e-13)


def test_points_without_density_are_left_out() -> None:
    """rho = 2 cos^2 t has |rho'|^2 / rho = 8 sin^2 t with the mean 4; at the two zeros of rho it is 8, but left out."""
    density = Density.from_function(CIRCLE, lambda x: x[..., 0] ** 2, normalize=True)
    assert fisher_information(density) == pytest.approx(4 - 2 * 8 / len(CIRCLE.points), abs=1e-10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rho",), "density is 'rho', but it must be a Density"),
        ((START, right, 0.1), "noise is 0.1, but it must be a noise such as IsotropicNoise"),
        ((START, hs.SA(beta=1.0), IsotropicNoise(0.1, common=True)), "noise is common to all tokens"),
    ],
)
def test_bad_input(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        entropy_rate(*arguments)  # type: ignore[arg-type]
