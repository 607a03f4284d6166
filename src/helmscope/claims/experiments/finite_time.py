"""finite-time: do the inner products of tokens reach 1 in finite time?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates, ReplicatesInSomeCase
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA, USA
from helmscope.fields.field import Field
from helmscope.geometry.sphere import project, retract
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.stats.scales import LogScale
from helmscope.theory.equiangular import equiangular_rate
from helmscope.theory.starts import Orthonormal
from helmscope.types import HelmscopeError

FLOWS: dict[str, SA | USA] = {
    "SA, beta = 0": SA(beta=0.0),
    "SA, beta = 1": SA(beta=1.0),
    "SA, beta = 3": SA(beta=3.0),
    "USA, beta = 1": USA(beta=1.0),
}
DEEP = 1e-24
LENGTH, STEP = 34.0, 0.2  # in units of 1 (SA) or e^-beta (USA)
PLOTTED = 8
_SMALLEST = 5e-324


@experiment("finite-time", seconds=2)
def finite_time(case: TrialCase) -> Finding:
    """An arrival 1 - gamma ~ (T - t)^p has the decay rate p / (T - t), which grows without bound as 1 - gamma falls; an
    exponential decay keeps its rate. From orthonormal tokens gamma' = 2 e^(beta gamma) (1 - gamma) ((n-1) gamma + 1) /
    (e^beta + (n-1) e^(beta gamma)) under SA, so that log(1 - gamma) tends to the slope -2 (USA: -2 e^beta).

    1 - gamma is computed as the mean of |x_i - x_j|^2 / 2 over pairs, which is accurate down to 1e-28. A replicate is a
    random frame with its own beta; its statistic is the decay rate where 1 - gamma passes the late level over that
    where it passes the early one, and 1 (no speed-up) if it does not pass both. The claim is tested in its weakest
    form, for either flow: it is refuted if neither speeds up. Two planted fields go through the same solver: one along
    which 1 - gamma = e^-2pt, and one whose tokens merge at a finite time, each with a random speed per frame.
    """
    n, dim, largest = (case.constant(name) for name in ("tokens", "dim", "largest_beta"))
    levels = case.constant("early"), case.constant("late")
    starts = case.count(128, quick=64)
    x = Orthonormal(n=n, dim=dim).sample(starts, seed=case.seed_for(0))
    clock = STEP * torch.arange(round(LENGTH / STEP) + 1, dtype=torch.float64)
    beta, speed = (torch.special.ndtr(case.normal(starts, index=index)) for index in (1, 4))
    beta = largest * beta
    slowest, fastest = case.constant("merging_speeds")
    merging = FiniteTimeMerging(slowest + (fastest - slowest) * speed, case.constant("merging_power"))
    decay = ExponentialDecay(0.75 + case.normal(starts, index=2).abs() / 2)
    ratios = [speed_up(clock, gaps(field, x, clock), *levels) for field in (SA(beta=beta), unit_rate_usa(beta, dim))]
    both = torch.cat(ratios)
    power = 1 + case.normal(starts, index=3).abs()
    remaining = 10 ** (-torch.arange(0, 13, 0.02, dtype=torch.float64))
    arrival = speed_up(-remaining, remaining[:, None] ** power, *levels)
    paths = {name: gaps(field, x[:PLOTTED], clock * _unit(field), _unit(field)) for name, field in FLOWS.items()}
    deep = [float(speed_up(clock, gap, levels[0], DEEP).mean()) for gap in paths.values()]
    over_theory = [_rate_over_theory(field, clock, paths[name], n, levels[0]) for name, field in FLOWS.items()]
    return Finding(
        evidence=ReplicatesInSomeCase(ratios, "frames (one beta per frame)", ("SA", "USA"), LogScale()),
        controls={
            "planted exponential decay": Replicates(
                speed_up(clock, gaps(decay, x, clock), *levels), "frames", LogScale()
            ),
            "planted merging in finite time": Replicates(
                speed_up(clock, gaps(merging, x, clock), *levels), "frames", LogScale()
            ),
            "arrival (T - t)^p": Replicates(arrival, "powers", LogScale()),
        },
        data=curve(
            "gap",
            torch.stack(list(paths.values()), -1).transpose(0, 1),
            {"time": clock.tolist(), "flow": tuple(FLOWS)},
            label="1 - gamma (USA: time in e^-beta)",
            log=True,
        ),
        remark=(
            f"With beta from {beta.min():.2f} to {beta.max():.2f} the ratios are between {both.min():.4f} and "
            f"{both.max():.4f}. Continued to {DEEP:g} at fixed beta they are {_format_list(deep)}, and at "
            f"{levels[0]:g} the rates over those of the equiangular ODE are {_format_list(over_theory)} "
            f"({'; '.join(FLOWS)})."
        ),
        setting=f"simulation on the unit sphere: {n} orthonormal tokens, d = {dim}, beta uniform in "
        f"[0, {largest:g}], t <= {LENGTH:g} (USA: in e^-beta), RK4 step {STEP:g}",
    )


def unit_rate_usa(beta: Tensor, dim: int) -> USA:
    """USA with one beta per start and V = e^-beta I, so that near the cluster tokens converge at rate 1 like SA's."""
    return USA(beta=beta, value=(-beta).exp()[:, None, None] * torch.eye(dim, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class ExponentialDecay(Field):
    """x_i' = p P_{x_i} c / <x_i, c>, c the direction of the mean, with one rate p per start. From orthonormal tokens
    the angle to c obeys theta' = -p tan theta, so that 1 - gamma ~ sin^2 theta is exactly e^-2pt.
    """

    rate: Tensor
    parameters: ClassVar[Mapping[str, int]] = {"rate": 0}

    def velocity(self, x: Tensor, weights: Tensor | None = None, *, t: float | Tensor = 0.0) -> Tensor:
        """The velocity, unchecked."""
        center = retract(x.mean(-2, keepdim=True)).expand_as(x)
        return self.rate[..., None, None] * project(x, center) / (x * center).sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class FiniteTimeMerging(Field):
    """x_i' = a P_{x_i} c / |P_{x_i} c|^(2/p), c the direction of the mean: the angle to c obeys
    theta' = -a sin^(1 - 2/p) theta, so that 1 - gamma ~ theta^2 reaches 0 at a finite time T, like (T - t)^p. There is
    one speed a per start.

    RK4 with step h follows this down to a theta^(-2/p) h ~ 1; below that theta stays small without converging.
    """

    speed: Tensor
    power: float
    parameters: ClassVar[Mapping[str, int]] = {"speed": 0}

    def velocity(self, x: Tensor, weights: Tensor | None = None, *, t: float | Tensor = 0.0) -> Tensor:
        """The velocity, unchecked; 0 for tokens that have merged."""
        pull = project(x, retract(x.mean(-2, keepdim=True)).expand_as(x))
        length: Tensor = torch.linalg.vector_norm(pull, dim=-1, keepdim=True).clamp_min(_SMALLEST)
        return self.speed[..., None, None] * (pull / length.pow(2 / self.power))


def _unit(field: SA | USA) -> float:
    return 1.0 if field.normalized else math.exp(-field.beta)


def gaps(field: Field, x: Tensor, times: Tensor, unit: float = 1.0) -> Tensor:
    """1 - gamma (time, start): sum_i |x_i - mean|^2 / (n - 1) is the mean of |x_i - x_j|^2 / 2 over pairs.

    Raises HelmscopeError if the solver fails, since a path of NaN would look like one that never speeds up.
    """
    states = integrate(field, x, times.tolist(), stepper=RK4(STEP * unit)).states
    deviations = states - states.mean(-2, keepdim=True)
    gap = deviations.square().sum((-1, -2)) / (states.shape[-2] - 1)
    if not bool(gap.isfinite().all()):
        raise HelmscopeError(f"the path of {field.name} is not finite, so that its decay cannot be measured")
    return gap


def decay_rate(times: Tensor, gap: Tensor, level: float) -> Tensor:
    """-d log(gap) / dt over the step in which a gap (time, start) first passes the level; NaN where it never does."""
    logs = gap.clamp_min(_SMALLEST).log()  # tokens that coincide get the smallest positive gap, whose log is finite
    rates = -logs.diff(dim=0) / times.diff()[:, None]
    passed = gap[1:] <= level
    rate = rates.gather(0, passed.int().argmax(0, keepdim=True)).squeeze(0)
    return torch.where(passed.any(0), rate, torch.nan)


def speed_up(times: Tensor, gap: Tensor, early: float, late: float) -> Tensor:
    """The decay rate at the late level over that at the early one; 1 for a path that does not pass both."""
    return (decay_rate(times, gap, late) / decay_rate(times, gap, early)).nan_to_num(1.0)


def _rate_over_theory(field: SA | USA, clock: Tensor, gap: Tensor, n: int, level: float) -> float:
    predicted = float(equiangular_rate(field, 1 - level, n=n)) / level * _unit(field)
    return float(decay_rate(clock, gap, level).mean()) / predicted


def _format_list(values: list[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
