"""finite-time: do the inner products of tokens reach 1 in finite time?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Finding, Replicates, SomeLayer
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA, USA
from helmscope.geometry.sphere import project, retract
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.stats.scales import LogScale
from helmscope.theory.equiangular import equiangular_rate
from helmscope.theory.starts import Orthonormal
from helmscope.types import Ruling

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, DIM = 8, 12
FLOWS: dict[str, SA | USA] = {
    "SA, beta = 0": SA(beta=0.0),
    "SA, beta = 1": SA(beta=1.0),
    "SA, beta = 3": SA(beta=3.0),
    "USA, beta = 1": USA(beta=1.0),
}
EARLY, LATE, DEEP = 1e-3, 1e-12, 1e-24
LENGTH, STEP, LOOK = 34.0, 0.2, 0.2  # in units of the time 1 (SA) or e^-beta (USA)
COLDEST, DRAWN = 3.0, 8
_LEAST = 5e-324


@experiment("finite-time", seconds=2)
def finite_time(case: Case) -> Finding:
    """An arrival 1 - gamma ~ (T - t)^p has the decay rate p / (T - t), which grows without bound as 1 - gamma falls; an
    exponential decay keeps its rate. From orthonormal tokens gamma' = 2 e^(beta gamma) (1 - gamma) ((n-1) gamma + 1) /
    (e^beta + (n-1) e^(beta gamma)) under SA, so that log(1 - gamma) tends to the slope -2 (USA: -2 e^beta).

    1 - gamma is the mean of |x_i - x_j|^2 / 2 over pairs, which keeps its digits down to 1e-28. A replicate is a random
    frame with a beta of its own, uniform in [0, 3]; its number is the decay rate where 1 - gamma passes 1e-12 over that
    where it passes 1e-3. The claim is held to either flow, the weakest form: refuted where neither speeds up. The null
    is carried by the same solver: a planted field, at a random pace for each frame, along which 1 - gamma is e^-2pt.
    """
    starts = case.count(128, quick=64)
    x = Orthonormal(n=TOKENS, dim=DIM).sample(starts, seed=case.seed_for(0))
    looks = [LOOK * k for k in range(round(LENGTH / LOOK) + 1)]
    clock = torch.tensor(looks, dtype=torch.float64)
    beta = COLDEST * torch.special.ndtr(case.normal(starts, stream=1))
    ratios = [speed_up(clock, gaps(Tempered(kind, beta), x, clock)) for kind in (SA, USA)]
    both = torch.cat(ratios)
    decay = speed_up(clock, gaps(Fading(0.75 + case.normal(starts, stream=2).abs() / 2), x, clock))
    power = 1 + case.normal(starts, stream=3).abs()
    left = 10 ** (-torch.arange(0, 13, 0.02, dtype=torch.float64))
    arrival = speed_up(-left, left[:, None] ** power)
    paths = {name: gaps(field, x[:DRAWN], clock * _unit(field), _unit(field)) for name, field in FLOWS.items()}
    deep = [float((decay_rate(clock, each, DEEP) / decay_rate(clock, each, EARLY)).mean()) for each in paths.values()]
    return Finding(
        evidence=SomeLayer(ratios, "frames with a beta of their own", ("SA", "USA"), LogScale()),
        null=Check(
            "decay rate at 1e-12 over that at 1e-3, a planted field with exactly exponential decay",
            Replicates(decay, "frames", LogScale()),
        ),
        also=(
            Check(
                "decay rate at 1e-12 over that at 1e-3, a planted arrival (T - t)^p with random p >= 1",
                Replicates(arrival, "powers", LogScale()),
                Ruling.SUPPORTED,
            ),
        ),
        data=curve(
            "gap",
            torch.stack(list(paths.values()), -1).transpose(0, 1),
            {"time": looks, "flow": tuple(FLOWS)},
            label="1 - gamma (USA: time in e^-beta)",
            log=True,
        ),
        remark=(
            f"With beta from {beta.min():.2f} to {beta.max():.2f} the ratios lie between {both.min():.4f} and "
            f"{both.max():.4f}. Followed on to {DEEP:g} at fixed beta they are {_listed(deep)}, and at {EARLY:g} the "
            "rates over those of the equiangular ODE are "
            f"{_listed([_over_theory(f, clock, paths[name]) for name, f in FLOWS.items()])} ({'; '.join(FLOWS)})."
        ),
        where=f"simulation on the unit sphere: {TOKENS} orthonormal tokens, d = {DIM}, beta uniform in "
        f"[0, {COLDEST:g}], t <= {LENGTH:g} (USA: in e^-beta), RK4 step {STEP:g}",
    )


@dataclass(frozen=True, eq=False)
class Tempered:
    """SA or USA with a beta of its own for each start, time in units of 1 (SA) or e^-beta (USA): beta <x_i, x_j> is the
    inner product of tokens made longer by sqrt(beta).
    """

    kind: type[SA] | type[USA]
    beta: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        beta = self.beta[:, None, None]
        longer = beta.sqrt()
        velocity = project(x, self.kind(beta=1.0).ambient(longer * x) / longer)
        return velocity if self.kind.normalized else velocity * (-beta).exp()


@dataclass(frozen=True, eq=False)
class Fading:
    """x_i' = p P_{x_i} c / <x_i, c>, c the direction of the mean, with a pace p of its own for each start. From
    orthonormal tokens the angle to c obeys theta' = -p tan theta, so that 1 - gamma ~ sin^2 theta is exactly e^-2pt.
    """

    pace: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        center = retract(x.mean(-2, keepdim=True)).expand_as(x)
        return self.pace[:, None, None] * project(x, center) / (x * center).sum(-1, keepdim=True)


def _unit(field: SA | USA) -> float:
    return 1.0 if field.normalized else math.exp(-field.beta)


def gaps(field: SA | USA | Tempered | Fading, x: Tensor, times: Tensor, unit: float = 1.0) -> Tensor:
    """1 - gamma (time, start): sum_i |x_i - mean|^2 / (n - 1) is the mean of |x_i - x_j|^2 / 2 over pairs."""
    states = integrate(field, x, times.tolist(), stepper=RK4(STEP * unit)).states
    apart = states - states.mean(-2, keepdim=True)
    return apart.square().sum((-1, -2)) / (states.shape[-2] - 1)


def decay_rate(times: Tensor, gap: Tensor, level: float) -> Tensor:
    """-d log(gap) / dt over the step in which a gap (time, start) first passes the level; NaN where it never does."""
    logs = gap.clamp_min(_LEAST).log()  # tokens that have met have the least gap there is, not none
    rates = -logs.diff(dim=0) / times.diff()[:, None]
    passed = gap[1:] <= level
    rate = rates.gather(0, passed.int().argmax(0, keepdim=True)).squeeze(0)
    return torch.where(passed.any(0), rate, torch.nan)


def speed_up(times: Tensor, gap: Tensor) -> Tensor:
    """The decay rate at 1e-12 over the decay rate at 1e-3."""
    return decay_rate(times, gap, LATE) / decay_rate(times, gap, EARLY)


def _over_theory(field: SA | USA, clock: Tensor, gap: Tensor) -> float:
    predicted = float(equiangular_rate(field, 1 - EARLY, n=TOKENS)) / EARLY * _unit(field)
    return float(decay_rate(clock, gap, EARLY).mean()) / predicted


def _listed(numbers: list[float]) -> str:
    return ", ".join(f"{number:.4f}" for number in numbers)
