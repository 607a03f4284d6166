"""finite-time: do the inner products of tokens reach 1 in finite time?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Log
from helmscope.claims.finding import Check, Finding, Replicates, SomeLayer
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA, USA
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
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
_LEAST = 5e-324


@experiment("finite-time", seconds=1.1)
def finite_time(case: Case) -> Finding:
    """An arrival 1 - gamma ~ (T - t)^p has the decay rate p / (T - t), which grows without bound as 1 - gamma falls; an
    exponential decay keeps its rate. From orthonormal tokens gamma' = 2 e^(beta gamma) (1 - gamma) ((n-1) gamma + 1) /
    (e^beta + (n-1) e^(beta gamma)) under SA, so that log(1 - gamma) tends to the slope -2 (USA: -2 e^beta).

    1 - gamma is the mean of |x_i - x_j|^2 / 2 over pairs, which keeps its digits down to 1e-28. A number a start (a
    random frame): the decay rate where 1 - gamma passes 1e-12 over that where it passes 1e-3. The claim is held to
    some flow and beta, the weakest form: refuted where none of them speeds up.
    """
    starts = case.count(64, quick=32)
    x = Orthonormal(n=TOKENS, dim=DIM).sample(starts, seed=case.stream(0))
    looks = [LOOK * k for k in range(round(LENGTH / LOOK) + 1)]
    clock = torch.tensor(looks, dtype=torch.float64)
    paths = {name: gaps(field, x, clock * _unit(field)) for name, field in FLOWS.items()}
    ratios = [speed_up(clock, path) for path in paths.values()]
    power = 1 + case.normal(starts, stream=1).abs()
    left = 10 ** (-torch.arange(0, 13, 0.02, dtype=torch.float64))
    arrival = speed_up(-left, left[:, None] ** power)
    pace = 1.5 + case.normal(starts, stream=2).abs()
    decay = speed_up(clock, (-pace * clock[:, None]).exp())
    deep = [float((decay_rate(clock, each, DEEP) / decay_rate(clock, each, EARLY)).mean()) for each in paths.values()]
    return Finding(
        evidence=SomeLayer(ratios, "frames", tuple(FLOWS)),
        null=Check("exact exponential decay at random rates", Replicates(decay, "rates")),
        also=(
            Check(
                "a planted arrival (T - t)^p with random p >= 1", Replicates(arrival, "powers", Log()), Ruling.SUPPORTED
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
            f"Followed on to {DEEP:g} the ratios are {_listed(deep)}. At {EARLY:g} the rates over those of the "
            f"equiangular ODE are {_listed([_over_theory(f, clock, paths[name]) for name, f in FLOWS.items()])} "
            f"({'; '.join(FLOWS)})."
        ),
    )


def _unit(field: SA | USA) -> float:
    return 1.0 if field.normalized else math.exp(-field.beta)


def gaps(field: SA | USA, x: Tensor, times: Tensor) -> Tensor:
    """1 - gamma (time, start): sum_i |x_i - mean|^2 / (n - 1) is the mean of |x_i - x_j|^2 / 2 over pairs."""
    states = integrate(field, x, times.tolist(), stepper=RK4(STEP * _unit(field))).states
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
