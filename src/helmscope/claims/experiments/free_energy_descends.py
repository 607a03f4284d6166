"""free-energy-descends: F = nu Ent - int U falls along the Fokker-Planck equation with drift grad U, not with swirl."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from helmscope.claims.circle_functions import GivenDrift, derivative, harmonic_sum, random_harmonics
from helmscope.claims.curves import curve
from helmscope.claims.evidence import EverySample, IdentityErrors
from helmscope.claims.finding import Finding
from helmscope.claims.free_energy_model import free_energy_of_model
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.density import Density
from helmscope.meanfield.evolve import evolve
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.meanfield.free_energy import free_energy, free_energy_as_printed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DEGREE, HARMONICS, STEPS, TOLERANCE = 24, 2, 6, 1e-5
SPREAD = 0.5  # size of the coefficients of log rho
SWIRL = 3.0  # angular velocity
CASES = 1_024  # densities at which the rate of F is compared


class Landscape(NamedTuple):
    """U and the logarithm of a start, up to a constant, as coefficients of harmonics (k, 2)."""

    potential: Tensor
    log_start: Tensor

    def u(self, x: Tensor) -> Tensor:
        """U at unit vectors."""
        return harmonic_sum(self.potential, x)

    def force(self, sign: float = 1.0, swirl: float = 0.0) -> Callable[[Tensor], Tensor]:
        """The force sign grad U + swirl t, t the unit tangent vector."""

        def field(x: Tensor) -> Tensor:
            turn = torch.stack([-x[..., 1], x[..., 0]], -1)
            return (sign * harmonic_sum(derivative(self.potential), x) + swirl)[..., None] * turn

        return field


@experiment("free-energy-descends", seconds={"simulation": 16, "model": 60})
def free_energy_descends(case: TrialCase) -> Finding:
    """The change of F along the Fokker-Planck equation in simulation, and over every half-step of a model."""
    return _simulated(case) if case.subject.is_simulation else free_energy_of_model(case)


def _simulated(case: TrialCase) -> Finding:
    """d_t rho = -div(rho (grad U + R)) + nu Lap rho on the circle, for random U and random starts, by ``evolve``: the
    change of F = nu Ent - int U rho over each of six steps of time.

    The swirl is a rotation, R = 3, and starts at the Gibbs density e^(U/nu), where F is smallest and can only rise. The
    drift of the opposite sign is -grad U with the same F. The rate of F is measured at random densities as
    int d_t rho (nu log rho - U), with the right-hand side of the solver, against the sum of its three terms. What the
    source prints, nu Ent + int U rho, is measured along the same flow.
    """
    nu, end = case.constant("nu"), case.constant("time")
    noise, grid = IsotropicNoise(nu), CircleGrid(degree=DEGREE)
    times = [end * k / STEPS for k in range(STEPS + 1)]
    landscapes = random_landscapes(case, case.count(64, quick=32))
    few = landscapes[: len(landscapes) // 2]
    falling = [follow(each, each.log_start, each.force(), grid, noise, times) for each in landscapes]
    opposite = [follow(each, each.log_start, each.force(sign=-1.0), grid, noise, times) for each in few]
    turning = [follow(each, each.potential / nu, each.force(swirl=SWIRL), grid, noise, times) for each in few]
    curves = {"grad U": falling, "grad U, F as printed": falling, "-grad U": opposite, "grad U + swirl": turning}
    values = torch.tensor([[[step[name == "grad U, F as printed"] for step in path] for path in paths[: len(few)]]
                           for name, paths in curves.items()])  # fmt: skip
    return Finding(
        evidence={"change of F": _changes(falling, times)},
        controls={
            "swirl": _changes(turning, times),
            "rate of F": IdentityErrors(rate_errors(case, grid, nu), "relative error"),
            "drift of the opposite sign": _changes(opposite, times),
        },
        printed=_changes(falling, times, printed=True),
        data=curve("F", values.permute(1, 2, 0), {"time": times, "force": tuple(curves)}, label="free energy F"),
        remark=_counterexample(grid, noise, end),
        setting=f"simulation: the Fokker-Planck equation on the circle, nu = {nu:g}, t <= {end:g}, {len(landscapes)} "
        f"random U and starts with {HARMONICS} harmonics, degree {DEGREE}",
    )


def random_landscapes(case: TrialCase, count: int) -> list[Landscape]:
    """Random U and starts; the coefficients of U have the norm 1, as those of cos t."""
    potentials, starts = (random_harmonics(case, count, HARMONICS, stream=k) for k in range(2))
    return [Landscape(u / u.norm(), SPREAD * start) for u, start in zip(potentials, starts, strict=True)]


def follow(
    landscape: Landscape,
    log_start: Tensor,
    force: Callable[[Tensor], Tensor],
    grid: CircleGrid,
    noise: IsotropicNoise,
    times: list[float],
) -> list[tuple[float, float]]:
    """F, and F as printed, along the flow from the density ~ e^log_start, at every time."""
    start = Density.from_function(grid, lambda x: harmonic_sum(log_start, x).exp(), normalize=True)
    path = evolve(force, start, times=times, noise=noise, tol=TOLERANCE)
    return [
        (
            free_energy(density, noise=noise, potential=landscape.u),
            free_energy_as_printed(density, noise=noise, potential=landscape.u),
        )
        for density in path
    ]


def _changes(paths: list[list[tuple[float, float]]], times: list[float], *, printed: bool = False) -> EverySample:
    """The change of F over each step of time, one value per start."""
    values = torch.tensor([[step[printed] for step in path] for path in paths])
    names = [f"t = {before:g} to {after:g}" for before, after in pairwise(times)]
    return EverySample(list(values.diff(dim=1).T), "starts", names)


def rate_errors(case: TrialCase, grid: CircleGrid, nu: float) -> Tensor:
    """The relative error of dF/dt = -int |grad(nu log rho - U)|^2 rho - int rho R U' - nu int rho R' at random
    densities with random U and R, against int d_t rho (nu log rho - U).
    """
    log_density, potential, swirl = (random_harmonics(case, CASES, HARMONICS, stream=2 + k) for k in range(3))
    log_density, points = SPREAD * log_density, grid.points
    density = harmonic_sum(log_density, points).exp()
    density = density / grid.mean_of(density)[:, None]
    slope, turn = harmonic_sum(derivative(potential), points), harmonic_sum(swirl, points)
    equation = ForwardEquation(grid, GivenDrift((slope + turn)[..., None]), nu, None, None)
    modes = grid.analyze(density)
    change = grid.synthesize(equation.rate(modes, 0.0) - equation.decay * modes)
    measured = grid.mean_of(change * (nu * density.log() - harmonic_sum(potential, points)))
    terms = [
        -(nu * harmonic_sum(derivative(log_density), points) - slope).square() * density,
        -density * turn * slope,
        -nu * density * harmonic_sum(derivative(swirl), points),
    ]
    sizes = torch.stack([grid.mean_of(term) for term in terms])
    return (measured - sizes.sum(0)).abs() / sizes.abs().sum(0)


def _counterexample(grid: CircleGrid, noise: IsotropicNoise, end: float) -> str:
    """F and F as printed for U = cos t from (1 + sin(t) / 2) / 2 pi, and F with a swirl from e^(U/nu), in words."""
    start = Density.from_function(grid, lambda x: 1 + 0.5 * x[..., 1], normalize=True)
    cosine = Landscape(torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.zeros(1, 2))
    path = evolve(cosine.force(), start, times=[0, end], noise=noise, tol=TOLERANCE)
    f, printed = (
        [each(density, noise=noise, potential=cosine.u) for density in path]
        for each in (free_energy, free_energy_as_printed)
    )
    gibbs = Density.from_function(grid, lambda x: (cosine.u(x) / noise.nu).exp(), normalize=True)
    turning = evolve(cosine.force(swirl=SWIRL), gibbs, times=[0, end], noise=noise, tol=TOLERANCE)
    rising = [free_energy(density, noise=noise, potential=cosine.u) for density in turning]
    return (
        f"For U = cos t, from (1 + sin(t)/2)/2pi, F falls from {f[0]:.4f} to {f[1]:.4f}, and F as printed, with + int "
        f"U, rises from {printed[0]:.4f} to {printed[1]:.4f}. With the swirl R = {SWIRL:g} from the Gibbs density, F "
        f"rises from {rising[0]:.4f} to {rising[1]:.4f}: it need not fall."
    )
