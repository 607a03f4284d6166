"""metastability: two clusters last for times of order e^(beta (1 - gamma0)) before they merge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.stats.scales import LogScale
from helmscope.theory.metastable import metastable_time, metastable_time_asymptotic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PATIENCE, TOL = 1.5, 1e-7


@experiment("metastability", seconds=10)
def metastability(case: TrialCase) -> Finding:
    """g' = 2 e^(beta g) (1 - g^2) / (e^beta + e^(beta g)) for two equal clusters of inner product g, whatever n; the
    time from g0 tends to e^(beta (1 - g0)) / (2 beta (1 - g0^2)).

    A start has two clusters of n/2 tokens each (n = 16), scattered by 0.01 about two points with inner product gamma0,
    and is integrated under SA until the inner product of the clusters' mean directions is 0.999. Its time is
    divided by that of the two-cluster ODE from the initial inner product g0 of its mean directions. A start that has
    not merged within 1.5 times the ODE's time is censored there.

    That the time is of order e^(beta (1 - g0)) is tested separately: at the largest beta the measured time is compared
    with e^(beta (1 - g0)) / (2 beta (1 - g0^2)), and between the last two betas, from the same starts, the growth of
    log(beta time) with that of beta (1 - g0).
    """
    betas, gammas, sizes = (case.constant(name) for name in ("betas", "gammas", "sizes"))
    dim, spread, met = (case.constant(name) for name in ("dim", "spread", "met"))
    noise = spread * case.normal(case.count(64, quick=32), 2, max(sizes) // 2, dim, index=0)
    cells = [_merge_times(beta, torch.stack([_clusters(g0, noise, n=16) for g0 in gammas]), met) for beta in betas]
    times, starts = (torch.stack(column) for column in zip(*cells, strict=True))
    ratios = times / torch.stack([_ode_times(beta, start, met) for beta, start in zip(betas, starts, strict=True)])
    over_null = times / _ode_times(0.0, starts[0], met)
    merged = [_merge_times(4.0, _clusters(0.0, noise, n=n), met) for n in sizes]
    by_size = [time / _ode_times(4.0, start, met) for time, start in merged]
    names = [f"beta = {beta:g}, gamma0 = {g0:g}" for beta in betas for g0 in gammas]
    gamma_names = [f"gamma0 = {g0:g}" for g0 in gammas]
    return Finding(
        evidence={
            "merge time": _every_case(ratios.flatten(0, 1), names),
            "other numbers of tokens": _every_case(by_size, [f"n = {n}" for n in sizes]),
            "order of magnitude": _every_case(times[-1] / _asymptotic_times(betas[-1], starts[-1]), gamma_names),
            "exponent": ReplicatesInEveryCase(list(_exponent(times, starts[0], betas)), "starts", gamma_names),
        },
        controls={"two-cluster ODE at beta = 0": _every_case(over_null.flatten(0, 1), names)},
        data=_curves(times, ratios, betas, gammas),
        remark=f"The measured times are between {float(times.min()):.3g} and {float(times.max()):.3g}.",
        setting=(
            f"simulation on the unit sphere: two clusters of 8 tokens, d = {dim}, beta = {betas[0]:g} to "
            f"{betas[-1]:g}, until their inner product is {met:g}, Dormand-Prince"
        ),
    )


def _every_case(samples: Sequence[Tensor] | Tensor, names: list[str]) -> ReplicatesInEveryCase:
    return ReplicatesInEveryCase(list(samples), "starts", names, scale=LogScale())


def _curves(times: Tensor, ratios: Tensor, betas: Sequence[float], gammas: Sequence[float]) -> xr.Dataset:
    """The times (beta, gamma0, start) from gamma0 = 0 over beta with both formulas, and the ratios."""
    measured = times[:, gammas.index(0.0)].mT
    formulas = [
        measured.new_tensor([formula(SA(beta=beta), gamma0=0.0) for beta in betas]).expand_as(measured)
        for formula in (metastable_time, metastable_time_asymptotic)
    ]
    lives = curve(
        "life",
        torch.stack([measured, *formulas], -1),
        {"beta": betas, "time": ("measured", "two-cluster ODE", "large beta")},
        label="time until two clusters merge, gamma0 = 0",
        log=True,
    )
    axes = {"beta": betas, "gamma0": gammas}
    over_ode = curve("ratio", ratios.permute(2, 0, 1), axes, label="measured time over that of the two-cluster ODE")
    return xr.merge([lives, over_ode], join="outer")


@dataclass(frozen=True)
class _Merged:
    """Event: the mean directions of the two halves of the tokens have the inner product ``met``. The signal is
    logarithmic, hence nearly linear in time, so that its root is found in few steps.
    """

    met: float

    def signal(self, x: Tensor) -> Tensor:
        return math.log(1 - self.met) - _cluster_gap(x).clamp(min=1e-30).log()


def _cluster_gap(x: Tensor) -> Tensor:
    """1 - g for the mean directions a and b of the two clusters, computed as |a - b|^2 / 2."""
    first, second = (retract(half.mean(-2)) for half in x.chunk(2, -2))
    return (first - second).square().sum(-1) / 2


def _clusters(g0: float, noise: Tensor, *, n: int) -> Tensor:
    """Starts (start, n, d) of two clusters, one per half of the tokens, about points with inner product g0."""
    centers = torch.zeros(2, 1, noise.shape[-1], dtype=noise.dtype)
    centers[0, 0, 0], centers[1, 0, 0], centers[1, 0, 1] = 1.0, g0, math.sqrt(1 - g0 * g0)
    return retract(centers + noise[:, :, : n // 2]).flatten(1, 2)


def _ode_times(beta: float, g0: Tensor, met: float) -> Tensor:
    """The time of the two-cluster ODE from each g0."""
    times = [metastable_time(SA(beta=beta), gamma0=g, gamma1=met) for g in g0.flatten().tolist()]
    return torch.tensor(times, dtype=g0.dtype).reshape(g0.shape)


def _asymptotic_times(beta: float, g0: Tensor) -> Tensor:
    """The large-beta asymptotic time from each g0."""
    times = [metastable_time_asymptotic(SA(beta=beta), gamma0=g) for g in g0.flatten().tolist()]
    return torch.tensor(times, dtype=g0.dtype).reshape(g0.shape)


def _exponent(times: Tensor, g0: Tensor, betas: Sequence[float]) -> Tensor:
    """The slope of log(beta time) over beta (1 - g0) between the last two betas, from times (beta, gamma0, start)."""
    low, high = betas[-2:]
    slope: Tensor = (high * times[-1] / (low * times[-2])).log() / ((high - low) * (1 - g0))
    return slope


def _merge_times(beta: float, x: Tensor, met: float) -> tuple[Tensor, Tensor]:
    """The merge time of each start, and its initial inner product."""
    start = 1 - _cluster_gap(x)
    limit = PATIENCE * _ode_times(beta, start, met)
    horizon, stepper = [float(limit.max())], DormandPrince(TOL)
    run = integrate(SA(beta=beta), x, horizon, events=[_Merged(met)], merge=10 * TOL, stepper=stepper)
    merged = run.event_times[0]
    return torch.where(merged < limit, merged, limit), start
