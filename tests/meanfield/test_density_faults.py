"""Planted faults in the density solvers: signs and factors, each noticed by a known number."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise, MatrixNoise, Stratonovich
from helmscope.meanfield import CircleGrid, Density, Grid, SphereGrid, ZonalGrid, evolve
from helmscope.meanfield import drift as drift_module
from helmscope.meanfield import etd as etd_module
from helmscope.meanfield.attention_sums import attention_sums
from helmscope.meanfield.drift import AttentionDrift, ForceDrift
from helmscope.meanfield.etd import etd_step, phi_functions
from helmscope.meanfield.forward_equation import ForwardEquation
from support.planting import Plant, outcome

F64 = torch.float64


def free_energy() -> bool:
    """U = cos t, nu = 1/2 at t = 1."""
    start = Density.from_function(CircleGrid(16), lambda x: (1 + 0.5 * x[..., 1]) / (2 * math.pi))
    force = lambda x: torch.eye(2, dtype=F64)[0].expand_as(x)  # noqa: E731
    for positive in (False, True):
        density = evolve(force, start, times=[1.0], noise=IsotropicNoise(0.5), positive=positive)[0]
        if abs(-0.5 * density.entropy - float(density.mean[0]) + 1.2099136761) > 1e-7:
            return False
    return True


def growth(field, grid: Grid, known: float) -> bool:
    """The growth rate of degree 1 of the uniform density."""
    uniform = Density.uniform(grid).modes
    direction = torch.zeros_like(uniform)
    direction[1] = 1e-5
    equation = ForwardEquation.of(field, grid, IsotropicNoise(0.1))
    up, down = (equation.rate(uniform + sign * direction, 0.0) for sign in (1, -1))
    return abs(float((up - down)[1] / 2e-5 - equation.decay[1]) - known) < 1e-8


def critical_noise() -> bool:
    """nu_c(4) on S^1, S^2 and for zonal densities, and the rate of USA."""
    cases = [(CircleGrid(20), 0.2158806527561376), (SphereGrid(19), 0.18766778760042)]
    cases += [(ZonalGrid(dim=3, degree=19), 0.18766778760042)]
    if not all(growth(hs.SA(beta=4.0), grid, (grid.dim - 1) * (known - 0.1)) for grid, known in cases):
        return False
    return growth(hs.USA(beta=1.0), CircleGrid(20), 0.565159103992485 - 0.1)  # I_1(1) - nu


def stationary_law() -> bool:
    """Stratonovich, sigma = diag(2, 1): the right-hand side vanishes at ~ (4 sin^2 + cos^2)^(-1/2)."""
    grid = CircleGrid(48)
    equation = ForwardEquation.of(
        None, grid, MatrixNoise(torch.diag(torch.tensor([2.0, 0.5], dtype=F64)), process=Stratonovich())
    )
    values = (4 * grid.points[:, 1] ** 2 + grid.points[:, 0] ** 2) ** -0.5
    modes = grid.analyze(values / grid.mean_of(values))
    return float((equation.rate(modes, 0.0) - equation.decay * modes).abs().max()) < 1e-8


def von_mises_fisher() -> bool:
    """Entropy at d = 3, kappa = 2, and the share of pairs within a cap of the uniform density."""
    density = Density.von_mises_fisher(SphereGrid(16), kappa=2.0)
    return (
        abs(density.entropy - 2.051614997568417) < 1e-9
        and abs(Density.uniform(SphereGrid(4)).aligned_pair_share(0.5) - 0.25) < 1e-9
    )


def narrow_cluster() -> bool:
    """The velocity kappa A_2(r) / r P e of a von Mises density with kappa = beta = 20, r = |kappa e + beta x|."""
    grid = CircleGrid(64)
    values = (20 * (grid.points[:, 0] - 1)).exp()
    values = values / grid.mean_of(values)
    r = 20 * (grid.points + torch.tensor([1.0, 0.0], dtype=F64)).norm(dim=-1)
    ratio = torch.where(r > 1e-9, torch.special.i1e(r) / torch.special.i0e(r) / r.clamp(min=1e-9), 0.5)
    known = -20 * ratio * grid.points[:, 1]
    found = AttentionDrift.of(hs.SA(beta=20.0), grid).components(grid.analyze(values), 0.0, values)[:, 0]
    return bool(((found - known).abs() < 1e-7).all())


def scaled(factor: float, kind: type, *names: str) -> Plant:
    """A method whose result is multiplied by a factor."""
    return Plant(lambda right, *args, **kwargs: factor * right(*args, **kwargs), (kind, names))


FAULTS = {
    "drift with the wrong sign": (scaled(-1, ForceDrift, "components"), free_energy),
    "divergence with the wrong sign": (scaled(-1, CircleGrid, "divergence"), free_energy),
    "gradient twice as large": (scaled(2, CircleGrid, "gradient"), stationary_law),
    "nu with a factor 1/2": (scaled(0.5, ForwardEquation, "decay"), free_energy),
    "entropy with the wrong sign": (scaled(-1, Density, "entropy"), free_energy),
    "uniform density of area 2 pi": (
        Plant(lambda right, grid: right(grid) - math.log(2), (Grid, ["log_area"])),
        von_mises_fisher,
    ),
    "eigenvalues k^2 in every dimension": (
        Plant(lambda right, grid: grid.degrees.double() ** 2, (Grid, ["eigenvalues"])),
        critical_noise,
    ),
    "kernel without N(d, k)": (
        Plant(lambda right, grid, beta: right(grid, beta) * (1 + grid.degrees), (Grid, ["exponential_multipliers"])),
        critical_noise,
    ),
    "kernel of beta / 2": (
        Plant(lambda right, grid, beta: right(grid, beta / 2), (Grid, ["exponential_multipliers"])),
        critical_noise,
    ),
    "attention repels": (scaled(-1, AttentionDrift, "components"), critical_noise),
    "Z by its series alone": (
        Plant(lambda right, z, values: right(z, values)[:0], drift_module._lost_points),
        narrow_cluster,
    ),
    "sums of attention with other weights": (
        Plant(
            lambda right, grid, beta, values, at: right(grid, beta, values * (1 + grid.points[:, 0]) / 2, at),
            attention_sums,
        ),
        narrow_cluster,
    ),
    "USA without e^beta": (
        Plant(
            lambda right, drift, *args: right(drift, *args) / (1 if drift.constant is not None else math.e),
            (AttentionDrift, ["components"]),
        ),
        critical_noise,
    ),
    "phi_2 and phi_3 exchanged": (Plant(lambda right, z: right(z)[[0, 2, 1]], phi_functions), lambda: fourth_order()),
    "a step without its last stage": (
        Plant(lambda right, rate, factors, y, t, h, now: factors.full[0] * y + h * factors.full[1] * now, etd_step),
        lambda: fourth_order(),
    ),
    "correction of the process left out": (
        Plant(lambda right, equation, *args: equation.drift.components(*args), (ForwardEquation, ["velocity"])),
        stationary_law,
    ),
}


def fourth_order() -> bool:
    """y' = -y + sin(t + y) with steps of 0.1 and 0.05."""
    decay, rate = torch.ones(1, dtype=F64), lambda y, t: torch.sin(t + y)

    def after(steps: int) -> float:
        y, h = torch.ones(1, dtype=F64), 1 / steps
        for k in range(steps):
            factors = etd_module.EtdFactors.of(decay, h)
            y = etd_module.etd_step(rate, factors, y, k * h, h, rate(y, k * h))
        return float(y)

    exact = after(200)
    return abs(math.log2(abs(after(10) - exact) / abs(after(20) - exact)) - 4) < 0.2


@pytest.mark.parametrize(
    "check", [free_energy, critical_noise, stationary_law, von_mises_fisher, narrow_cluster, fourth_order]
)
def test_the_checks_pass_without_a_fault(check) -> None:
    assert check()


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_noticed(name: str) -> None:
    plant, check = FAULTS[name]
    assert outcome(plant, check) in ("seen", "refused")
