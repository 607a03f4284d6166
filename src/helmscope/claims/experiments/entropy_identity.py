"""entropy-identity: entropy changes by the mean divergence of the drift and a Sigma-weighted Fisher information."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from helmscope.claims.circle_functions import GivenDrift, derivative, harmonic_sum, random_harmonics
from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.noise import DivergenceForm, Ito, StateNoise, Stratonovich
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.forward_equation import ForwardEquation

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.fields.noise import Process

PROCESSES: dict[str, Process] = {"divergence form": DivergenceForm(), "Ito": Ito(), "Stratonovich": Stratonovich()}
DEGREE, HARMONICS, GROUP = 32, 3, 32
IDENTITY = torch.eye(2, dtype=torch.float64)
SPREAD = 0.4  # of the coefficients of log rho and log Sigma


class Settings(NamedTuple):
    """log rho (up to a constant), the drift b and log Sigma of many cases, as sums of harmonics: (case, k, 2) each, the
    coefficients of cos k t and sin k t.
    """

    log_density: Tensor
    drift: Tensor
    log_sigma: Tensor


class Rates(NamedTuple):
    """dH/dt along the forward equation of a process, and both terms of the identity: (case,) each."""

    exact: Tensor
    divergence: Tensor
    fisher: Tensor

    @property
    def errors(self) -> Tensor:
        """The errors of the identity, relative to the sum of the absolute terms."""
        return (self.exact - self.divergence - self.fisher).abs() / (self.divergence.abs() + self.fisher)

    @property
    def slopes(self) -> Tensor:
        """The least-squares slope of predicted on exact rates, one per group of 32 cases."""
        exact, predicted = (each.reshape(-1, GROUP) for each in (self.exact, self.divergence + self.fisher))
        centered = exact - exact.mean(-1, keepdim=True)
        slopes: Tensor = (centered * predicted).sum(-1) / centered.square().sum(-1)
        return slopes


@experiment("entropy-identity", seconds=8)
def entropy_identity(case: TrialCase) -> Finding:
    """dH/dt = -int d_t rho log rho against E[div b] + E[Sigma |grad log rho|^2], on the circle, where d_t rho is that
    of the divergence form, of Ito noise or of Stratonovich noise with the same b and Sigma.

    log rho, b and log Sigma are random sums of harmonics. The terms of the identity come from their derivatives in
    closed form, d_t rho from the solver of the forward equation. For Ito noise the identity lacks -E[Sigma''], for
    Stratonovich noise half of it. The slope is that of predicted on exact rates over groups of 32 cases.
    """
    grid = CircleGrid(degree=DEGREE)
    settings = random_settings(case, GROUP * case.count(2 * GROUP, quick=GROUP))
    rates = {name: entropy_rates(settings, grid, process) for name, process in PROCESSES.items()}
    cases = f"groups of {GROUP} cases"
    return Finding(
        evidence={
            "slope": Replicates(rates["divergence form"].slopes, cases),
            "identity": IdentityErrors(rates["divergence form"].errors, "relative error"),
        },
        controls={
            "Ito form": IdentityErrors(rates["Ito"].errors, "relative error"),
            "Stratonovich form": IdentityErrors(rates["Stratonovich"].errors, "relative error"),
        },
        described={f"slope, {name} noise": Replicates(rates[name].slopes, cases) for name in ("Ito", "Stratonovich")},
        data=curve(
            "error",
            torch.stack([each.errors for each in rates.values()], -1),
            {"form": tuple(PROCESSES)},
            label="relative error of the identity",
            log=True,
        ),
        remark="Median relative errors: "
        + ", ".join(f"{float(each.errors.median()):.2g} ({name})" for name, each in rates.items()) + ".",
        setting=f"simulation: densities, drifts and Sigma on the circle, {HARMONICS} random harmonics each; d_t rho by "
        f"the forward equation with degree {DEGREE}",
    )  # fmt: skip


def random_settings(case: TrialCase, count: int) -> Settings:
    """Random harmonics for every case."""
    log_density, drift, log_sigma = (random_harmonics(case, count, HARMONICS, stream=k) for k in range(3))
    return Settings(SPREAD * log_density, drift, SPREAD * log_sigma)


def entropy_rates(settings: Settings, grid: CircleGrid, process: Process) -> Rates:
    """The rates of every case; d_t rho is that of the forward equation, the two terms come from closed forms."""
    log_density, drift, log_sigma = settings
    points = grid.points
    density, sigma = harmonic_sum(log_density, points).exp(), harmonic_sum(log_sigma, points).exp()
    density = density / grid.mean_of(density)[:, None]
    velocity = harmonic_sum(drift, points)
    x = points.expand(len(density), *points.shape)[..., None, :]  # every point is a system with one token
    noise = StateNoise(
        lambda y: (2 * harmonic_sum(log_sigma, y[..., 0, :]).exp()).sqrt()[..., None, None, None] * IDENTITY
    )
    correction = grid.components((process.drift(noise, x) - DivergenceForm().drift(noise, x))[..., 0, :])
    exact = []
    for k, values in enumerate(density):
        equation = ForwardEquation(grid, GivenDrift(velocity[k][:, None]), 0.0, correction[k], sigma[k][:, None, None])
        change = grid.synthesize(equation.rate(grid.analyze(values), 0.0))
        exact.append(-grid.mean_of(change * values.log()))
    score = harmonic_sum(derivative(log_density), points)
    divergence = grid.mean_of(density * harmonic_sum(derivative(drift), points))
    return Rates(torch.stack(exact), divergence, grid.mean_of(density * sigma * score.square()))
