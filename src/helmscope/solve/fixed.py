"""Integration with a fixed step size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.types import HelmscopeError, Outcome, Status

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.solve.extras import Extras
    from helmscope.solve.flow import Flow
    from helmscope.solve.stepper import FixedStepper, NoisyStepper

MOST_STEPS = 1e9


def run_fixed(
    flow: Flow, x: Float[Tensor, "batch n d"], times: list[float], stepper: FixedStepper, extras: Extras
) -> tuple[Float[Tensor, "time batch *kept"], Outcome]:
    """What is kept of the states at the asked times. Each interval is cut into equal steps of at most h."""

    def step(flow: Flow, x: Tensor, h: Tensor, t: Tensor, systems: Tensor) -> Tensor:
        return stepper.step(flow, x, h[:, None, None], t[:, None, None])

    return march(flow, x, times, stepper, extras, step, inside=stepper.divisible)


def march(
    flow: Flow,
    x: Float[Tensor, "batch n d"],
    times: list[float],
    stepper: FixedStepper | NoisyStepper,
    extras: Extras,
    step: Callable[[Flow, Tensor, Tensor, Tensor, Tensor], Tensor],
    *,
    inside: bool,
) -> tuple[Float[Tensor, "time batch *kept"], Outcome]:
    """All systems in equal steps to the asked times, those left out that a terminal event has ended.

    ``step(flow, x, h, t, systems)`` carries the given systems over a step; where ``inside`` is True, also over part of
    one, so that events are located there.
    """
    flow, x, _ = extras.merged(flow, x)
    run, path, now = _Marching(flow, x, torch.arange(len(x), device=x.device), extras), _Path(extras.kept(x)), 0.0
    for target in times:
        count = steps_in(target - now, stepper)
        size = (target - now) / max(count, 1)
        for k in range(count):
            run.leave()
            if not len(run.systems):
                break
            run.step(now + k * size, size, step, inside=inside)
            extras.say((now + (k + 1) * size) / times[-1])
        now = target
        path.keep(run, target)
    return path.kept(), path.outcome(times, extras)


@dataclass(eq=False)
class _Marching:
    """The systems still under way."""

    flow: Flow
    x: Float[Tensor, "active n d"]
    systems: Int[Tensor, " active"]
    extras: Extras

    def leave(self, before: Float[Tensor, " active"] | None = None) -> None:
        """Go on without the systems that a terminal event has ended, or has ended ``before`` a time of each."""
        if not self.extras.terminal:
            return
        ends = self.extras.ends(self.systems)
        ended = ~ends.isnan() if before is None else ends < before
        if bool(ended.any()):
            self.flow, self.x, self.systems = self.flow.select(~ended), self.x[~ended], self.systems[~ended]

    def step(self, start: float, size: float, step: Callable[..., Tensor], *, inside: bool) -> None:
        """One step of size ``size`` from time ``start``; systems that end inside it leave."""
        h = torch.full((len(self.x),), size, dtype=torch.float64, device=self.x.device)
        t = torch.full_like(h, start)
        flow, before, systems = self.flow, self.x, self.systems

        def part(rows: Tensor, duration: Tensor) -> Tensor:
            return step(flow.select(rows), before[rows], duration, t[rows], systems[rows])

        self.x = step(flow, before, h, t, systems)
        self.extras.see(systems, t, h, self.x, part if inside else None)
        self.leave(before=t + h)  # what lies behind the event is not part of the path
        self.flow, self.x, _ = self.extras.merged(self.flow, self.x)


class _Path:
    """What is kept of the states, one asked time after another; ``start`` is what is kept of the start."""

    def __init__(self, start: Tensor) -> None:
        self._missing = torch.full_like(start.detach(), torch.nan)
        self._kept: list[Tensor] = []
        self._reached: list[Tensor] = []
        self._lost: list[Tensor] = []

    def keep(self, run: _Marching, target: float) -> None:
        """Keep the states of the systems under way at the asked time ``target``, and look for sampled events there."""
        systems, whole = run.systems, len(self._missing)
        lost = ~torch.isfinite(run.x.detach()).all(-1).all(-1)
        reached = torch.ones_like(lost)
        if len(systems) < whole:
            nobody = lost.new_zeros(whole)
            lost, reached = nobody.index_copy(0, systems, lost), nobody.index_copy(0, systems, reached)
        self._lost.append(lost)
        self._reached.append(reached)
        if not len(systems):
            self._kept.append(self._missing)
            return
        kept = run.extras.kept(run.x)
        self._kept.append(kept if len(systems) == whole else self._missing.index_copy(0, systems, kept))
        if run.extras.sampled:
            run.extras.sample(systems, torch.full_like(systems, target, dtype=torch.float64), run.x)

    def kept(self) -> Tensor:
        """All that was kept, (time, systems, ...)."""
        return torch.stack(self._kept)

    def outcome(self, times: list[float], extras: Extras) -> Outcome:
        """Lost at the first asked time at which a state is not finite; ended by an event; or carried to the end."""
        lost, whole = torch.stack(self._lost), self._reached[-1].tolist()
        first, gone = lost.int().argmax(0).tolist(), lost.any(0).tolist()
        ends = extras.ends(torch.arange(len(whole), device=lost.device)).tolist()
        statuses, ended = [], []
        for k, end in enumerate(ends):
            statuses.append(Status.NOT_FINITE if gone[k] else Status.FINISHED if whole[k] else Status.STOPPED)
            ended.append(times[first[k]] if gone[k] else times[-1] if whole[k] else end)
        return Outcome(tuple(statuses), tuple(ended))


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
