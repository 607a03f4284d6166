"""Exponential Runge-Kutta steps of order 4 with error control, for y' = -D y + N(y, t) with a diagonal D >= 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.types import Status

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import Progress

ORDER = 4
SAFETY, SMALLEST, LARGEST = 0.9, 0.2, 4.0
KEPT = 1.3  # a step that could grow by less than this stays as it is
SMALLEST_STEP = 1e-12  # steps to states that are not finite are shortened down to this
_TAYLOR = 18  # terms of the series of the phi functions, for |z| < 1

Rate = Callable[["Tensor", float], "Tensor"]


@dataclass(frozen=True)
class EtdResult:
    """The states that were reached, (time, modes), NaN after the end, and how the run ended."""

    states: Float[Tensor, "time modes"]
    status: Status
    time: float
    steps: int


def integrate_etd(
    rate: Rate,
    decay: Float[Tensor, " modes"],
    start: Float[Tensor, " modes"],
    times: Sequence[float],
    *,
    tol: float,
    max_steps: int,
    after_step: Callable[[Tensor], Tensor] = lambda y: y,
    stop: Callable[[Tensor, float], Status | None] = lambda y, t: None,
    progress: Progress = lambda share: None,
) -> EtdResult:
    """States at increasing ``times`` >= 0 from the state at t = 0.

    A step is Krogstad's ETDRK4-B (J. Comput. Phys. 203, 2005), twice with h / 2; its local error is estimated by the
    difference from one step of size h, divided by 2^4 - 1, and kept below tol (1 + |y|). ``after_step`` maps an
    accepted state, such as to one of mass 1, and ``stop`` may end the run. Where D = 0 the method is the classical
    Runge-Kutta method.

    >>> decay, times = torch.tensor([0.0, 100.0], dtype=torch.float64), [0.0, 1.0]
    >>> result = integrate_etd(lambda y, t: y, decay, torch.ones_like(decay), times, tol=1e-9, max_steps=1000)
    >>> torch.allclose(result.states[1], torch.exp(1 - decay), atol=1e-8)
    True
    """
    y, t, steps = start, 0.0, 0
    states = start.new_full((len(times), len(start)), math.nan)
    now = rate(y, t)
    h = _first_step(now - decay * y, y, times[-1], tol)
    factors = _StepFactors(decay)
    for index, target in enumerate(times):
        while t < target:
            if steps >= max_steps:
                return EtdResult(states, Status.STEP_LIMIT, t, steps)
            clipped = t + h >= target * (1 - 1e-14)
            step = target - t if clipped else h
            if step <= 1e-14 * max(1.0, t):
                return EtdResult(states, Status.STEP_TOO_SMALL, t, steps)
            whole = etd_step(rate, factors.of(step), y, t, step, now)
            half = etd_step(rate, factors.of(step / 2), y, t, step / 2, now)
            after = etd_step(rate, factors.of(step / 2), half, t + step / 2, step / 2, rate(half, t + step / 2))
            error = float((after - whole).norm()) / (2**ORDER - 1) / (tol * (1 + float(y.norm())))
            steps += 1
            if not math.isfinite(error):
                if step < SMALLEST_STEP:
                    return EtdResult(states, Status.NOT_FINITE, t, steps)
                h = step * SMALLEST
                continue
            factor = min(LARGEST, max(SMALLEST, SAFETY * max(error, 1e-12) ** (-1 / (ORDER + 1))))
            if error > 1:
                h = step * factor
                continue
            factor = 1.0 if 1 <= factor < KEPT else factor  # the factors of the next step are then known
            y, t = after_step(after), target if clipped else t + step
            h = max(h, step * factor) if clipped else step * factor
            status = stop(y, t)
            if status is not None:
                return EtdResult(states, status, t, steps)
            now = rate(y, t)
            progress(t / times[-1])
        states[index] = y
    return EtdResult(states, Status.FINISHED, t, steps)


@dataclass(frozen=True)
class EtdFactors:
    """e^z, phi_1, phi_2, phi_3 at z = -h D, and at half of it.

    >>> EtdFactors.of(torch.zeros(1), 0.1).full.flatten()
    tensor([1.0000, 1.0000, 0.5000, 0.1667])
    """

    full: Float[Tensor, "4 modes"]
    half: Float[Tensor, "4 modes"]

    @classmethod
    def of(cls, decay: Float[Tensor, " modes"], h: float) -> EtdFactors:
        """The factors of a step of size h."""
        z = torch.stack([-h * decay, -h / 2 * decay])
        full, half = torch.cat([z.exp()[None], phi_functions(z)]).unbind(1)
        return cls(full, half)


class _StepFactors:
    """The factors of the latest step sizes."""

    def __init__(self, decay: Tensor) -> None:
        self.decay = decay
        self.known: dict[float, EtdFactors] = {}

    def of(self, h: float) -> EtdFactors:
        if h not in self.known:
            if len(self.known) >= 8:
                self.known.clear()
            self.known[h] = EtdFactors.of(self.decay, h)
        return self.known[h]


def _first_step(speed: Tensor, y: Tensor, last: float, tol: float) -> float:
    """A step over which the state changes by about tol^(1/5) of itself."""
    size, change = 1 + float(y.norm()), float(speed.norm())
    return min(last, 0.5 * tol ** (1 / (ORDER + 1)) * size / change) if change > 0 else last


def etd_step(rate: Rate, factors: EtdFactors, y: Tensor, t: float, h: float, now: Tensor) -> Tensor:
    """One step of Krogstad's ETDRK4-B of size h from y at time t; ``now`` is N(y, t).

    >>> decay, y = torch.tensor([100.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    >>> linear = etd_step(lambda y, t: 0 * y, EtdFactors.of(decay, 0.1), y, 0.0, 0.1, 0 * y)
    >>> torch.allclose(linear, torch.exp(-0.1 * decay))  # exact where N = 0
    True
    """
    half, full = factors.half, factors.full
    at_a = rate(half[0] * y + h / 2 * half[1] * now, t + h / 2)
    at_b = rate(half[0] * y + h * (half[1] / 2 * now + half[2] * (at_a - now)), t + h / 2)
    whole = full[0] * y + h * full[1] * now
    at_c = rate(whole + 2 * h * full[2] * (at_b - now), t + h)
    middle = at_a + at_b
    return whole + h * (full[2] * (2 * middle - 3 * now - at_c) + 4 * full[3] * (now - middle + at_c))


@full_precision
def phi_functions(z: Float[Tensor, "*batch"]) -> Tensor:
    """phi_1 = (e^z - 1)/z, phi_2 = (phi_1 - 1)/z and phi_3 = (phi_2 - 1/2)/z for z <= 0, to rounding, along a new first
    axis.

    >>> phi_functions(torch.tensor(0.0, dtype=torch.float64))
    tensor([1.0000, 0.5000, 0.1667], dtype=torch.float64)
    """
    inside = z.abs() < 1
    near, far = torch.where(inside, z, torch.zeros_like(z)), torch.where(inside, torch.ones_like(z), z)
    terms = [[1 / math.factorial(j + order) for order in (1, 2, 3)] for j in range(_TAYLOR)]
    powers = near[..., None] ** torch.arange(_TAYLOR, device=z.device)
    series = (powers @ z.new_tensor(terms)).movedim(-1, 0)
    phi1 = torch.expm1(far) / far
    phi2 = (phi1 - 1) / far
    return torch.where(inside, series, torch.stack([phi1, phi2, (phi2 - 0.5) / far]))
