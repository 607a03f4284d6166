"""The evolution of a density under a field with noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, as_field
from helmscope.fields.noise import Noise
from helmscope.meanfield.density import Density, check_nonnegative
from helmscope.meanfield.etd import integrate_etd
from helmscope.meanfield.forward_equation import ForwardEquation, density_modes
from helmscope.meanfield.grid import Grid
from helmscope.meanfield.log_truncation import LogTruncation
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    Outcome,
    Status,
    Trajectory,
    check_integer,
    check_progress,
    check_real,
    pluralized,
    short_repr,
)
from helmscope.types.display import Plottable, one_line_repr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

UNRESOLVED = 1e-4  # share of the norm of a density in the upper quarter of the degrees
ACCURATE = 1e3  # largest error of a truncated logarithm, in units of the error of one step
FLOOR = 1e-12  # smallest relative density of a start whose logarithm is taken


@dataclass(frozen=True, eq=False, repr=False)
class DensityPath(Plottable):
    """A density over time: the coefficients at chosen times, and how the integration ended.

    ``path[k]`` is the density at ``times[k]``. ``steps`` counts the steps. Where the logarithm was evolved,
    ``mass_error`` is the deviation of the total mass from 1 that was corrected, summed over all steps, and
    ``truncation_error`` the largest estimate of the error in L1 that the truncated series of the logarithm has caused;
    otherwise mass is kept to rounding, and both are 0. Densities after the end of a run that stopped early are missing:
    ``path`` is then shorter than the requested times.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.meanfield import CircleGrid
    >>> start = Density.von_mises_fisher(CircleGrid(degree=32), kappa=0.1)
    >>> evolve(SA(beta=1.0), start, times=[0, 1])
    <DensityPath on S^1, degree 32: 2 times, 0 to 1; finished>
    """

    grid: Grid
    times: Float[Tensor, " time"]
    modes: Float[Tensor, "time modes"]
    outcome: Outcome
    field: Field | None  # None without drift
    noise: Noise | None
    steps: int
    mass_error: float
    log_modes: Float[Tensor, "time modes"] | None = None  # of the logarithm, if that was evolved
    truncation_error: float = 0.0

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, index: int) -> Density:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index is {index}, but the path has {pluralized(len(self), 'time')}: {self.outcome}")
        return Density(self.grid, self.modes[index], None if self.log_modes is None else self.log_modes[index])

    def __iter__(self) -> Iterator[Density]:
        return (self[k] for k in range(len(self)))

    @property
    def minimum(self) -> Float[Tensor, " time"]:
        """The smallest relative value at each time; negative where the series undershoots."""
        return self.times.new_tensor([density.minimum for density in self])

    @property
    def negative_mass(self) -> Float[Tensor, " time"]:
        """The mass of the negative part at each time, which ``trajectory`` clips."""
        return self.times.new_tensor([density.negative_mass for density in self])

    @cached_property
    def trajectory(self) -> Trajectory:
        """The density as a cloud on the points of the grid, with weights that change in time, so that ``track`` and
        smooth observables run on it. Raises ``HelmscopeError`` if the run ended before the first time.
        """
        if not len(self):
            raise HelmscopeError(f"the path has no times, but a trajectory needs one or more: {self.outcome}")
        clouds = [density.cloud() for density in self]
        points = clouds[0][0].expand(len(clouds), 1, -1, -1)
        weights = torch.stack([weights for _, weights in clouds])[:, None]
        return Trajectory(self.times, points, weights=weights, outcome=self.outcome)

    def __repr__(self) -> str:
        ends = f"{float(self.times[0]):g} to {float(self.times[-1]):g}" if len(self) else "none"
        return one_line_repr(
            f"DensityPath on S^{self.grid.dim - 1}, degree {self.grid.degree}: {pluralized(len(self), 'time')}, "
            f"{ends}; {self.outcome.summary}"
        )


@shows_progress("evolving")
def evolve(
    field: object,
    start: Density,
    *,
    times: Sequence[float] | Tensor,
    noise: Noise | None = None,
    positive: bool = False,
    tol: float = 1e-9,
    max_steps: int = 100_000,
    progress: ProgressOption = None,
) -> DensityPath:
    """Solve the forward equation of tokens under ``field`` and ``noise``, the law of infinitely many tokens, from
    ``start`` at t = 0; see ``forward_equation``.

    ``field`` is an attention field (the continuity equation, with noise the McKean-Vlasov equation), an MLP or a
    function of points (with noise the Fokker-Planck equation, drift P f), a Block, or None for no drift. Steps are
    exponential Runge-Kutta steps of order 4 with local error ``tol``. Mass is kept to rounding.

    With ``positive`` the logarithm of the density is evolved, so that it is positive, and accurate where it is far
    below its largest value; the start must then be positive. The logarithm often needs more harmonics than the density.

    The run ends early, with a status that names the remedy, if the density is no longer resolved by the grid, as when
    attention without noise forms clusters: where the upper quarter of the degrees has more than 1e-4 of the norm, and
    with ``positive`` also where the truncation has caused an estimated error of more than 1,000 ``tol`` in L1. Raises
    ``HelmscopeError`` for bad input.

    >>> from helmscope.fields.noise import IsotropicNoise
    >>> from helmscope.meanfield import SphereGrid
    >>> start = Density.von_mises_fisher(SphereGrid(degree=16), kappa=1.0)
    >>> path = evolve(None, start, times=[0.5], noise=IsotropicNoise(0.3))  # Brownian motion
    >>> (path[0].mean / start.mean)[0].item()  # e^{-nu (d - 1) t}
    0.7408...
    """
    if not isinstance(start, Density):
        raise HelmscopeError(f"start is {short_repr(start)}, but it must be a Density such as Density.uniform(grid)")
    check_nonnegative("start", start)
    grid, wanted = start.grid, _check_times(times)
    tol, max_steps = check_real("tol", tol, above=0), check_integer("max_steps", max_steps, at_least=1)
    equation = ForwardEquation.of(field, grid, noise)
    report, corrections, errors = check_progress(progress), [0.0], [0.0]
    state = _log_start(start) if positive else start.modes / start.modes[0]
    drift = None if field is None else as_field(field)
    truncation = LogTruncation.of(equation, drift, noise) if positive else None

    def restore_mass(y: Tensor) -> Tensor:
        if not positive:
            return y
        mass = float(grid.mean_of(grid.synthesize(y).exp()))
        corrections.append(abs(mass - 1))
        return torch.cat([y[:1] - math.log(mass), y[1:]])

    def stop(y: Tensor, t: float) -> Status | None:
        if truncation is not None:
            errors.append(truncation.advance(y, t))
        return None if is_resolved(grid, y) and errors[-1] <= ACCURATE * tol else Status.UNRESOLVED

    result = integrate_etd(
        equation.log_rate if positive else equation.rate,
        equation.decay,
        state,
        wanted,
        tol=tol,
        max_steps=max_steps,
        after_step=restore_mass,
        stop=stop,
        progress=report,
    )
    reached = int(torch.isfinite(result.states[:, 0]).sum())
    states = result.states[:reached]
    log_modes = states if positive else None
    if positive and reached:
        modes = density_modes(grid, states)
        states = modes / modes[:, :1]
    outcome = Outcome((result.status,), (result.time,))
    times_reached = torch.tensor(wanted[:reached], dtype=torch.float64, device="cpu")
    totals = (result.steps, sum(corrections), log_modes, max(errors))
    return DensityPath(grid, times_reached, states, outcome, drift, noise, *totals)


def is_resolved(grid: Grid, modes: Float[Tensor, " modes"]) -> bool:
    """Whether the harmonics in the upper quarter of the degrees have at most 1e-4 of the norm, so that those which the
    grid leaves out have less.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=8)
    >>> is_resolved(grid, Density.von_mises_fisher(grid, kappa=1.0).modes)
    True
    """
    upper = modes[grid.degrees > 0.75 * grid.degree]
    return float(upper.norm()) <= UNRESOLVED * (1 + float(modes.norm()))


def _log_start(start: Density) -> Tensor:
    if start.log_modes is not None:
        return start.log_modes
    lowest = start.minimum
    if not lowest > FLOOR:
        raise HelmscopeError(
            f"start has the relative value {lowest:.3g}, but with positive=True it must be above {FLOOR:g} everywhere: "
            "mix it with the uniform density"
        )
    return start.grid.analyze(start.values.log())


def _check_times(times: object) -> list[float]:
    try:
        wanted = [float(t) for t in times]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise HelmscopeError(f"times is {short_repr(times)}, but it must be a list of numbers") from None
    if not wanted or not all(map(math.isfinite, wanted)) or min(wanted) < 0 or wanted != sorted(set(wanted)):
        raise HelmscopeError(f"times is {short_repr(times)}, but it must hold increasing finite numbers >= 0")
    return wanted
