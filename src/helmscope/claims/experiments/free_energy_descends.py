"""free-energy-descends: F = nu Ent - int U falls along the Fokker-Planck equation with drift grad U, not with swirl."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xarray as xr

from helmscope.claims.circle_functions import GivenDrift, derivative, harmonic_sum, random_harmonics
from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors, Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced, small_steps_premise
from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.density import Density
from helmscope.meanfield.evolve import evolve
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.meanfield.free_energy import free_energy, free_energy_as_printed
from helmscope.observe.free_energy import free_energy_along_depth
from helmscope.observe.measure import unsupported_measurements
from helmscope.types import Attachment

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from helmscope.claims.evidence import Evidence

DEGREE, HARMONICS, STEPS, TOLERANCE = 24, 2, 6, 1e-5
SPREAD = 0.5  # size of the coefficients of log rho
SWIRL = 3.0  # angular velocity
CASES = 1_024  # densities at which the rate of F is compared
TWIN_PROMPTS = 16
CURVES = {"measured": "", "predicted": "predicted_", "predicted, Gaussian": "gaussian_predicted_"}


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


@experiment("free-energy-descends", seconds={"simulation": 16, "model": 41})
def free_energy_descends(case: TrialCase) -> Finding:
    """The change of F along the Fokker-Planck equation in simulation, and over every half-step of a model."""
    return _simulated(case) if case.subject.is_simulation else _of_model(case)


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
    potentials, starts = (random_harmonics(case, count, HARMONICS, index=k) for k in range(2))
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


def _changes(
    paths: list[list[tuple[float, float]]], times: list[float], *, printed: bool = False
) -> ReplicatesInEveryCase:
    """The change of F over each step of time, one value per start."""
    values = torch.tensor([[step[printed] for step in path] for path in paths])
    names = [f"t = {before:g} to {after:g}" for before, after in pairwise(times)]
    return ReplicatesInEveryCase(list(values.diff(dim=1).T), "starts", names)


def rate_errors(case: TrialCase, grid: CircleGrid, nu: float) -> Tensor:
    """The relative error of dF/dt = -int |grad(nu log rho - U)|^2 rho - int rho R U' - nu int rho R' at random
    densities with random U and R, against int d_t rho (nu log rho - U).
    """
    log_density, potential, swirl = (random_harmonics(case, CASES, HARMONICS, index=2 + k) for k in range(3))
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


def _of_model(case: TrialCase) -> Finding:
    """Delta F = -nu Delta H - E[Delta U] / r over every half-step of a model, nu and U those of its block, with the
    Gaussian entropy of all tokens of all prompts; jackknife pseudo-values over prompts.

    Real attention is deterministic: nu is how fast directions would diffuse if each head drew one key, and an attention
    half-step is judged in the landscape U of the MLP that follows it.
    """
    prompts = prompts_or_finding(case, "trajectory", "on_sphere", "kernel", "replay", "force", mlp=True, gap=1)
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    refused = unsupported_measurements(recording)[free_energy_along_depth.__name__]
    if refused is not None:
        return Finding.impossible(refused)
    tokens = case.constant("tokens")
    measured = free_energy_along_depth(recording, sampled_tokens=tokens)
    if measured.attrs["undefined"] != "none":
        return Finding.inconclusive(f"the entropy of the tokens is not defined: {measured.attrs['undefined']}")
    silent = free_energy_along_depth(silenced(recording), sampled_tokens=tokens, predict=False)
    twins = _twins(case, prompts.texts)
    return Finding(
        undecided_because=prompts.alike,
        evidence={"change of F": _half_step_changes(measured)},
        controls={"blocks that write nothing": _half_step_changes(silent)},
        described=_described(measured, twins),
        printed=_half_step_changes(measured, printed=True),
        data=_curves(measured),
        remark=_remark(measured, small_steps_premise(case)),
        setting=f"{measured.attrs['sphere']}, U in the coordinates of the unit sphere over the "
        f"{measured.attrs['radius']}, Gaussian entropy in {measured.attrs['rank']} dimensions, {len(prompts)} prompts, "
        f"{tokens} tokens of each for U, first token left out",
        attachments=(Attachment(f"Certificate of {case.subject.name}", str(recording.certificate)),),
    )


def _half_step_changes(measured: xr.Dataset, *, printed: bool = False) -> ReplicatesInEveryCase:
    """The change of F over every half-step, or that of nu Ent + E[U] as printed."""
    values = measured.free_energy_change
    if printed:
        values = measured.entropy_term - measured.potential_term
    rows = values.transpose("depth", "prompt").values[1:]
    return ReplicatesInEveryCase(list(rows), "prompts", _half_step_names(measured))


def _half_step_names(measured: xr.Dataset) -> list[str]:
    depths, halves = measured.depth.values[1:], measured.half.values[1:]
    return [f"half-step {int(depth)} ({half})" for depth, half in zip(depths, halves, strict=True)]


def _twins(case: TrialCase, texts: tuple[Any, ...]) -> np.ndarray:
    """The share of half-steps at which the mean of F falls, of each untrained twin; NaN where it is undefined."""
    count = case.constant("twins")
    recordings = case.subject.twin_recordings(count, seed=case.seed, texts=texts[:TWIN_PROMPTS])
    tokens = case.constant("tokens")
    found = (free_energy_along_depth(each, sampled_tokens=tokens, predict=False) for each in recordings)
    return np.array([_falling(each) for each in found])


def _falling(measured: xr.Dataset) -> float:
    means = measured.free_energy_change.mean("prompt").values[1:]
    return float((means < 0).mean()) if np.isfinite(means).all() else float("nan")


def _described(measured: xr.Dataset, twins: np.ndarray) -> dict[str, Evidence]:
    over = {
        f"change of F over all {half} half-steps": measured.free_energy_change.where(measured.half == half).sum("depth")
        for half in ("attention", "mlp")
    }
    over["change of the Gaussian entropy over all half-steps"] = measured.entropy_change.sum("depth")
    described: dict[str, Evidence] = {name: Replicates(values.values, "prompts") for name, values in over.items()}
    if np.isfinite(twins).all():
        described["share of half-steps at which F falls, untrained twins"] = Replicates(twins, "twins")
    return described


def _curves(measured: xr.Dataset) -> xr.Dataset:
    """F and entropy over depth, with the predicted curves and their misfits, and F as printed."""
    depths, families = measured.depth.values.tolist(), []
    for name, label in (
        ("free_energy", "free energy F since depth 0"),
        ("gaussian_entropy", "Gaussian entropy (nats)"),
    ):
        named = {text: f"{kind}{name}" for text, kind in CURVES.items()}
        misfits = {text: measured.attrs.get(f"{variable}_misfit") for text, variable in named.items()}
        labels = [text if misfit is None else f"{text}, misfit {misfit:.2g}" for text, misfit in misfits.items()]
        values = np.stack([measured[each].transpose("prompt", "depth").values for each in named.values()], -1)
        family = curve(name, values, {"depth": depths, f"{name} curve": labels}, label=label, over="prompt")
        family[name].attrs["predictions"] = "all curves but the first, whose range sets the axis"
        families.append(family)
    printed = curve(
        "free_energy_as_printed",
        measured.free_energy_as_printed.transpose("prompt", "depth").values,
        {"depth": depths},
        label="nu Ent + E[U]/r as printed; depends on each layer's constant",
        over="prompt",
    )
    return xr.merge([*families, printed], join="outer")


def _remark(measured: xr.Dataset, premise: str) -> str:
    means = measured.free_energy_change.mean("prompt").values[1:]
    names, attrs = _half_step_names(measured), measured.attrs
    return (
        f"The mean of F falls at {int((means < 0).sum())} of {len(means)} half-steps, most at {names[means.argmin()]} "
        f"({means.min():.3g}); it changes by {means.max():.3g} at {names[means.argmax()]}. What nu and U predict "
        f"differs from the measured changes by {attrs['predicted_free_energy_misfit']:.2g} times their size for F and "
        f"{attrs['predicted_entropy_misfit']:.2g} times for the entropy (with the Gaussian entropy "
        f"{attrs['gaussian_predicted_free_energy_misfit']:.2g} and {attrs['gaussian_predicted_entropy_misfit']:.2g}). "
        f"{premise}"
    ).strip()
