"""Integration with a fixed step size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.types import HelmscopeError, Outcome, Status

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.solve.extras import Extras
    from helmscope.solve.flow import Flow
    from helmscope.solve.stepper import FixedStepper, NoisyStepper

MOST_STEPS = 1e9


def run_fixed(
    flow: Flow, x: Float[Tensor, "batch n d"], times: list[float], stepper: FixedStepper, extras: Extras
) -> tuple[Float[Tensor, "time batch n d"], Outcome]:
    """States at the asked times. Each interval is cut into equal steps of at most h."""
    states, systems = [], torch.arange(len(x), device=x.device)
    flow, x, _ = extras.merged(flow, x)
    now = 0.0
    for target in times:
        count = steps_in(target - now, stepper)
        size = (target - now) / max(count, 1)
        h = torch.full((len(x),), size, dtype=torch.float64, device=x.device)
        for k in range(count):
            before, x = x, stepper.step(flow, x, h[:, None, None], (now + k * h)[:, None, None])
            _watch(extras, systems, now + k * h, h, (before, x), flow, stepper)
            flow, x, _ = extras.merged(flow, x)
            extras.say((now + (k + 1) * size) / times[-1])
        now = target
        states.append(x)
    return torch.stack(states), outcome_of(states, times)


def outcome_of(states: list[Tensor], times: list[float]) -> Outcome:
    """How systems ended that took fixed steps: at the first asked time where their states are not finite, or well."""
    finite = torch.stack([torch.isfinite(x.detach()).all(-1).all(-1) for x in states]).cpu()
    lost = (~finite).int().argmax(0).tolist()  # the first, where there is one
    well = finite.all(0).tolist()
    statuses = tuple(Status.FINISHED if ok else Status.NOT_FINITE for ok in well)
    return Outcome(statuses, tuple(times[-1] if ok else times[i] for ok, i in zip(well, lost, strict=True)))


def check_grid(times: list[float], stepper: FixedStepper | NoisyStepper) -> None:
    """Refuse times that are no multiples of the step of a map, which cannot be cut, and more steps than anyone waits
    for.
    """
    count = times[-1] / stepper.h
    if count > MOST_STEPS:
        raise HelmscopeError(
            f"h is {stepper.h:g}, but to reach t={times[-1]:g} takes {count:.0e} steps: take a larger h, for at most "
            f"{MOST_STEPS:.0e} steps"
        )
    for t in times:
        ratio = t / stepper.h
        if not stepper.divisible and abs(ratio - round(ratio)) > 1e-9 * max(1.0, ratio):
            name = type(stepper).__name__
            raise HelmscopeError(
                f"times holds {t:g}, but {name} is a map: times must be multiples of its h={stepper.h:g}"
            )


def steps_in(span: float, stepper: FixedStepper | NoisyStepper) -> int:
    """How many equal steps of at most h make up a span; for a map, how many times it is applied."""
    ratio = span / stepper.h
    return math.ceil(ratio - 1e-9) if stepper.divisible else round(ratio)


def _watch(
    extras: Extras,
    systems: Tensor,
    start: Tensor,
    h: Tensor,
    states: tuple[Tensor, Tensor],
    flow: Flow,
    stepper: FixedStepper,
) -> None:
    before, after = states

    def inside(rows: Tensor, duration: Tensor) -> Tensor:
        return stepper.step(flow.select(rows), before[rows], duration[:, None, None], start[rows][:, None, None])

    for watch in extras.watches:
        watch.see(systems, start, h, after, inside if stepper.divisible else None)
