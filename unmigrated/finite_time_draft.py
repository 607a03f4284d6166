"""finite-time: do the inner products of tokens reach 1 in finite time?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates, SomeLayer
from helmscope.claims.finding import Finding
from helmscope.claims.reading import entry
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA, USA
from helmscope.fields.field import Field
from helmscope.geometry.sphere import project, retract
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.stats.scales import LogScale
from helmscope.theory.equiangular import equiangular_rate
from helmscope.theory.starts import Orthonormal

CONSTANTS = entry("finite-time").constants
TOKENS, DIM, LARGEST_BETA, EARLY, LATE = (
    CONSTANTS[name] for name in ("tokens", "dim", "largest_beta", "early", "late")
)
FLOWS: dict[str, SA | USA] = {
    "SA, beta = 0": SA(beta=0.0),
    "SA, beta = 1": SA(beta=1.0),
    "SA, beta = 3": SA(beta=3.0),
    "USA, beta = 1": USA(beta=1.0),
}
DEEP = 1e-24
LENGTH, EVERY, TOL = 34.0, 0.2, 1e-12  # times in units of 1 (SA) or e^-beta (USA)
PLOTTED = 8
_SMALLEST = 5e-324


@experiment("finite-time", seconds=2)
def finite_time(case: Case) -> Finding:
    """An arrival 1 - gamma ~ (T - t)^p has the decay rate p / (T - t), which grows without bound as 1 - gamma falls; an
    exponential decay keeps its rate. From orthonormal tokens gamma' = 2 e^(beta gamma) (1 - gamma) ((n-1) gamma + 1) /
    (e^beta + (n-1) e^(beta gamma)) under SA, so that log(1 - gamma) tends to the slope -2 (USA: -2 e^beta).

    1 - gamma is computed as the mean of |x_i - x_j|^2 / 2 over pairs, which is accurate down to 1e-28. A replicate is a
    random frame with its own beta, uniform in [0, 3]; its statistic is the decay rate where 1 - gamma passes 1e-12 over
    that where it passes 1e-3. The claim is tested in its weakest form, for either flow: it is refuted if neither speeds
    up. Two planted fields go through the same solver: one with a random rate p per frame, along which
    1 - gamma = e^-2pt, and one whose tokens merge at a finite time. The decay rate of a path that passes a level and
    then merges within one step is that of the step, whose end is at rounding; a path that never passes both levels has
    not sped up.
    """
    starts = case.count(128, quick=64)
    x = Orthonormal(n=TOKENS, dim=DIM).sample(starts, seed=case.seed_for(0))
    times = [EVERY * k for k in range(round(LENGTH / EVERY) + 1)]
    clock = torch.tensor(times, dtype=torch.float64)
    beta = LARGEST_BETA * torch.special.ndtr(case.normal(starts, stream=1))
    ratios = [speed_up(clock, gaps(BetaPerStart(kind, beta), x, clock)) for kind in (SA, USA)]
    both = torch.cat(ratios)
    decay = speed_up(clock, gaps(ExponentialDecay(0.75 + case.normal(starts, stream=2).abs() / 2), x, clock))
    merging = speed_up(clock, gaps(FiniteTimeMerging(0.08 + 0.04 * case.normal(starts, stream=4).abs()), x, clock))
    power = 1 + case.normal(starts, stream=3).abs()
    remaining = 10 ** (-torch.arange(0, 13, 0.02, dtype=torch.float64))
    arrival = speed_up(-remaining, remaining[:, None] ** power)
    paths = {name: gaps(field, x[:PLOTTED], clock * _unit(field)) for name, field in FLOWS.items()}
    deep = [float((decay_rate(clock, gap, DEEP) / decay_rate(clock, gap, EARLY)).mean()) for gap in paths.values()]
    over_theory = [_rate_over_theory(field, clock, paths[name]) for name, field in FLOWS.items()]
    return Finding(
        evidence=SomeLayer(ratios, "frames, each with its own beta", ("SA", "USA"), LogScale()),
        controls={
            "planted exponential decay": Replicates(decay, "frames", LogScale()),
            "planted merging in finite time": Replicates(merging, "frames", LogScale()),
            "arrival (T - t)^p": Replicates(arrival, "powers", LogScale()),
        },
        data=curve(
            "gap",
            torch.stack(list(paths.values()), -1).transpose(0, 1),
            {"time": times, "flow": tuple(FLOWS)},
            label="1 - gamma (USA: time in e^-beta)",
            log=True,
        ),
        remark=(
            f"With beta from {beta.min():.2f} to {beta.max():.2f} the ratios are between {both.min():.4f} and "
            f"{both.max():.4f}. Continued to {DEEP:g} at fixed beta they are {_format_list(deep)}, and at {EARLY:g} "
            f"the rates over those of the equiangular ODE are {_format_list(over_theory)} ({'; '.join(FLOWS)})."
        ),
        where=f"simulation on the unit sphere: {TOKENS} orthonormal tokens, d = {DIM}, beta uniform in "
        f"[0, {LARGEST_BETA:g}], t <= {LENGTH:g} (USA: in e^-beta), Dormand-Prince",
    )


@dataclass(frozen=True, eq=False)
class BetaPerStart(Field):
    """SA or USA with one beta per start, time in units of 1 (SA) or e^-beta (USA)."""

    kind: type[SA] | type[USA]
    beta: Tensor
    parameters = {"beta": 0}

    def velocity(self, x: Tensor, *, t: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        velocity = self.kind(beta=self.beta).velocity(x, t=t, weights=weights)
        return velocity if self.kind.normalized else velocity * (-self.beta[:, None, None]).exp()


@dataclass(frozen=True, eq=False)
class ExponentialDecay(Field):
    """x_i' = p P_{x_i} c / <x_i, c>, c the direction of the mean, with one rate p per start. From orthonormal tokens
    the angle to c obeys theta' = -p tan theta, so that 1 - gamma ~ sin^2 theta is exactly e^-2pt.
    """

    rate: Tensor
    parameters = {"rate": 0}

    def velocity(self, x: Tensor, *, t: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        center = retract(x.mean(-2, keepdim=True)).expand_as(x)
        return self.rate[:, None, None] * project(x, center) / (x * center).sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class FiniteTimeMerging(Field):
    """x_i' = a P_{x_i} c / |P_{x_i} c|^{1/2}, c the direction of the mean: the angle to c obeys
    theta' = -a sin^{1/2} theta, which reaches 0 in finite time, like (T - t)^2. One speed a per start.
    """

    speed: Tensor
    parameters = {"speed": 0}

    def velocity(self, x: Tensor, *, t: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        pull = project(x, retract(x.mean(-2, keepdim=True)).expand_as(x))
        length = torch.linalg.vector_norm(pull, dim=-1, keepdim=True).clamp_min(_SMALLEST)
        return self.speed[:, None, None] * pull / length.sqrt()


def _unit(field: SA | USA) -> float:
    return 1.0 if field.normalized else math.exp(-field.beta)


def gaps(field: Field, x: Tensor, times: Tensor) -> Tensor:
    """1 - gamma (time, start): sum_i |x_i - mean|^2 / (n - 1) is the mean of |x_i - x_j|^2 / 2 over pairs."""
    states = integrate(field, x, times.tolist(), stepper=DormandPrince(TOL)).states
    deviations = states - states.mean(-2, keepdim=True)
    return deviations.square().sum((-1, -2)) / (states.shape[-2] - 1)


def decay_rate(times: Tensor, gap: Tensor, level: float) -> Tensor:
    """-d log(gap) / dt over the step in which a gap (time, start) first passes the level; NaN where it never does."""
    logs = gap.clamp_min(_SMALLEST).log()  # tokens that coincide get the smallest positive gap, whose log is finite
    rates = -logs.diff(dim=0) / times.diff()[:, None]
    passed = gap[1:] <= level
    rate = rates.gather(0, passed.int().argmax(0, keepdim=True)).squeeze(0)
    return torch.where(passed.any(0), rate, torch.nan)


def speed_up(times: Tensor, gap: Tensor) -> Tensor:
    """The decay rate at 1e-12 over the decay rate at 1e-3; 1, no speed-up, for a path that never passes both."""
    ratio = decay_rate(times, gap, LATE) / decay_rate(times, gap, EARLY)
    return ratio.nan_to_num(1.0)


def _rate_over_theory(field: SA | USA, clock: Tensor, gap: Tensor) -> float:
    predicted = float(equiangular_rate(field, 1 - EARLY, n=TOKENS)) / EARLY * _unit(field)
    return float(decay_rate(clock, gap, EARLY).mean()) / predicted


def _format_list(values: list[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
