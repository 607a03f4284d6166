"""metastability: two clusters last for times of order e^(beta (1 - gamma0)) before they merge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, EveryLayer, Finding
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.stats.scales import LogScale
from helmscope.theory.metastable import metastable_time, metastable_time_asymptotic
from helmscope.types import Region, Ruling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BETAS, GAMMAS, SIZES = (1.0, 4.0, 9.0, 16.0), (-0.5, 0.0, 0.5), (4, 32)
DIM, SPREAD, MET, PATIENCE, TOL = 3, 0.01, 0.999, 1.5, 1e-7
OF_ORDER = Region(text="The measured time is that of the formula within a factor of 1.25.", low=0.8, high=1.25)
EXPONENT = Region(text="The slope is 1 within 0.15.", low=0.85, high=1.15)


@experiment("metastability", seconds=10)
def metastability(case: Case) -> Finding:
    """g' = 2 e^(beta g) (1 - g^2) / (e^beta + e^(beta g)) for two equal clusters of inner product g, whatever n; the
    time from g0 tends to e^(beta (1 - g0)) / (2 beta (1 - g0^2)).

    A start has two clusters of n/2 tokens each (n = 16), spread at random by 0.01 about two places of inner product
    gamma0, and runs by SA until the inner product of the clusters' mean directions is 0.999. Its time is divided by
    that of the two-cluster ODE from the inner product g0 that its own mean directions start with. A start that has not
    merged within 1.5 times the ODE's time counts as if it had then.

    That the time is of order e^(beta (1 - g0)) is tried apart: at the largest beta the measured time is held against
    e^(beta (1 - g0)) / (2 beta (1 - g0^2)), and from the last but one beta to the last, from the same starts, the
    growth of log(beta time) against that of beta (1 - g0).
    """
    noise = case.normal(case.count(64, quick=32), 2, max(SIZES) // 2, DIM, stream=0)
    cells = [_merging(beta, torch.stack([_clusters(g0, noise, n=16) for g0 in GAMMAS])) for beta in BETAS]
    times, starts = (torch.stack(part) for part in zip(*cells, strict=True))
    ratios = times / torch.stack([_theory(beta, start) for beta, start in zip(BETAS, starts, strict=True)])
    fast = times / _theory(0.0, starts[0])
    by_size = [time / _theory(4.0, start) for time, start in (_merging(4.0, _clusters(0.0, noise, n=n)) for n in SIZES)]
    names = [f"beta = {beta:g}, gamma0 = {g0:g}" for beta in BETAS for g0 in GAMMAS]
    sizes, apart = [f"n = {n}" for n in SIZES], [f"gamma0 = {g0:g}" for g0 in GAMMAS]
    return Finding(
        evidence=_every(ratios.flatten(0, 1), names),
        null=Check("measured time over that of the two-cluster ODE at beta = 0", _every(fast.flatten(0, 1), names)),
        data=_drawn(times, ratios),
        also=(
            Check(
                f"measured time over that of the two-cluster ODE at beta = 4, n = {', '.join(map(str, SIZES))}",
                _every(by_size, sizes),
                Ruling.SUPPORTED,
            ),
            Check(
                f"measured time over e^(beta (1 - g0)) / (2 beta (1 - g0^2)) at beta = {BETAS[-1]:g}",
                _every(times[-1] / _large(BETAS[-1], starts[-1]), apart),
                Ruling.SUPPORTED,
                OF_ORDER,
            ),
            Check(
                f"slope of log(beta time) over beta (1 - g0) from beta = {BETAS[-2]:g} to {BETAS[-1]:g}",
                EveryLayer(list(_slope(times, starts[0])), "starts", apart),
                Ruling.SUPPORTED,
                EXPONENT,
            ),
        ),
        remark=f"The measured times lie between {float(times.min()):.3g} and {float(times.max()):.3g}.",
        where=(
            f"simulation on the unit sphere: two clusters of 8 tokens, d = {DIM}, beta = {BETAS[0]:g} to "
            f"{BETAS[-1]:g}, until their inner product is {MET:g}, Dormand-Prince"
        ),
    )


def _every(samples: Sequence[Tensor] | Tensor, names: list[str]) -> EveryLayer:
    return EveryLayer(list(samples), "starts", names, scale=LogScale())


def _drawn(times: Tensor, ratios: Tensor) -> xr.Dataset:
    """Times (beta, gamma0, start) from gamma0 = 0 over beta with both formulas, and the ratios."""
    measured = times[:, GAMMAS.index(0.0)].mT
    formulas = [
        measured.new_tensor([formula(SA(beta=beta), gamma0=0.0) for beta in BETAS]).expand_as(measured)
        for formula in (metastable_time, metastable_time_asymptotic)
    ]
    lives = curve(
        "life",
        torch.stack([measured, *formulas], -1),
        {"beta": BETAS, "time": ("measured", "two-cluster ODE", "large beta")},
        label="time until two clusters merge, gamma0 = 0",
        log=True,
    )
    axes = {"beta": BETAS, "gamma0": GAMMAS}
    seen = curve("ratio", ratios.permute(2, 0, 1), axes, label="measured time over that of the two-cluster ODE")
    return xr.merge([lives, seen], join="outer")


@dataclass(frozen=True)
class _Met:
    """The mean directions of the two halves of the tokens have the inner product 0.999; as a logarithm, which falls
    evenly in time and so is located fast.
    """

    def signal(self, x: Tensor) -> Tensor:
        return math.log(1 - MET) - _apart(x).clamp(min=1e-30).log()


def _apart(x: Tensor) -> Tensor:
    """1 - g of the mean directions of both clusters, as |a - b|^2 / 2."""
    first, second = (retract(half.mean(-2)) for half in x.chunk(2, -2))
    return (first - second).square().sum(-1) / 2


def _clusters(g0: float, noise: Tensor, *, n: int) -> Tensor:
    """Starts (start, n, d) of two clusters about places of inner product g0; the first half of the tokens is one."""
    places = torch.zeros(2, 1, DIM, dtype=noise.dtype)
    places[0, 0, 0], places[1, 0, 0], places[1, 0, 1] = 1.0, g0, math.sqrt(1 - g0 * g0)
    return retract(places + SPREAD * noise[:, :, : n // 2]).flatten(1, 2)


def _theory(beta: float, g0: Tensor) -> Tensor:
    """The time of the two-cluster ODE from each g0."""
    times = [metastable_time(SA(beta=beta), gamma0=g, gamma1=MET) for g in g0.flatten().tolist()]
    return torch.tensor(times, dtype=g0.dtype).reshape(g0.shape)


def _large(beta: float, g0: Tensor) -> Tensor:
    """The time from each g0 as beta grows."""
    times = [metastable_time_asymptotic(SA(beta=beta), gamma0=g) for g in g0.flatten().tolist()]
    return torch.tensor(times, dtype=g0.dtype).reshape(g0.shape)


def _slope(times: Tensor, g0: Tensor) -> Tensor:
    """Of log(beta time) over beta (1 - g0), between the last two betas, from times (beta, gamma0, start)."""
    low, high = BETAS[-2:]
    return (high * times[-1] / (low * times[-2])).log() / ((high - low) * (1 - g0))


def _merging(beta: float, x: Tensor) -> tuple[Tensor, Tensor]:
    """The merge time of each start, and the inner product it starts with."""
    start = 1 - _apart(x)
    limit = PATIENCE * _theory(beta, start)
    run = integrate(SA(beta=beta), x, [float(limit.max())], events=[_Met()], merge=10 * TOL, stepper=DormandPrince(TOL))
    seen = run.event_times[0]
    return torch.where(seen < limit, seen, limit), start
