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

    from helmscope.solve.flow import Flow
    from helmscope.solve.step_actions import StepActions
    from helmscope.solve.stepper import FixedStepper, NoisyStepper

MAX_STEPS = 1e9


def run_fixed(
    flow: Flow, x: Float[Tensor, "batch n d"], times: list[float], stepper: FixedStepper, actions: StepActions
) -> tuple[Float[Tensor, "time batch *kept"], Outcome]:
    """The stored values at the requested times, and how the systems ended. Each interval between requested times is
    divided into equal steps of at most h.
    """

    def step(flow: Flow, x: Tensor, h: Tensor, t: Tensor, systems: Tensor) -> Tensor:
        return stepper.step(flow, x, h[:, None, None], t[:, None, None])

    return run_steps(flow, x, times, stepper, actions, step, inside=stepper.divisible)


def run_steps(
    flow: Flow,
    x: Float[Tensor, "batch n d"],
    times: list[float],
    stepper: FixedStepper | NoisyStepper,
    actions: StepActions,
    step: Callable[[Flow, Tensor, Tensor, Tensor, Tensor], Tensor],
    *,
    inside: bool,
) -> tuple[Float[Tensor, "time batch *kept"], Outcome]:
    """Integrate all systems in equal steps to the requested times, or to a terminal event.

    ``step(flow, x, h, t, systems)`` advances the given systems by one step; if ``inside`` is True it can also advance
    them by part of one, so that events are located within steps.
    """
    flow, x, _ = actions.merge_tokens(flow, x)
    run = _ActiveSystems(flow, x, torch.arange(len(x), device=x.device), actions)
    path, now = _Path(actions.stored_values(x)), 0.0
    for target in times:
        count = steps_in(target - now, stepper)
        size = (target - now) / max(count, 1)
        for k in range(count):
            run.drop_ended()
            if not len(run.systems):
                break
            run.step(now + k * size, size, step, inside=inside)
            actions.report((now + (k + 1) * size) / times[-1])
        now = target
        path.store(run, target)
    return path.values(), path.outcome(times, actions)


@dataclass(eq=False)
class _ActiveSystems:
    """The systems that are still being integrated."""

    flow: Flow
    x: Float[Tensor, "active n d"]
    systems: Int[Tensor, " active"]
    actions: StepActions

    def drop_ended(self, before: Float[Tensor, " active"] | None = None) -> None:
        """Remove the systems that a terminal event has ended, or has ended ``before`` a time given for each."""
        if not self.actions.terminal:
            return
        ends = self.actions.end_times(self.systems)
        ended = ~ends.isnan() if before is None else ends < before
        if bool(ended.any()):
            self.flow, self.x, self.systems = self.flow.select(~ended), self.x[~ended], self.systems[~ended]

    def step(self, start: float, size: float, step: Callable[..., Tensor], *, inside: bool) -> None:
        """One step of size ``size`` from time ``start``; systems that end within it are removed."""
        h = torch.full((len(self.x),), size, dtype=torch.float64, device=self.x.device)
        t = torch.full_like(h, start)
        flow, before, systems = self.flow, self.x, self.systems

        def part(rows: Tensor, duration: Tensor) -> Tensor:
            return step(flow.select(rows), before[rows], duration, t[rows], systems[rows])

        self.x = step(flow, before, h, t, systems)
        self.actions.locate_events(systems, t, h, self.x, part if inside else None)
        self.drop_ended(before=t + h)  # the path ends at the event
        self.flow, self.x, _ = self.actions.merge_tokens(self.flow, self.x)


class _Path:
    """The stored values, one requested time after another; ``start`` are those of the initial states."""

    def __init__(self, start: Tensor) -> None:
        self._missing = torch.full_like(start.detach(), torch.nan)
        self._kept: list[Tensor] = []
        self._reached: list[Tensor] = []
        self._lost: list[Tensor] = []

    def store(self, run: _ActiveSystems, target: float) -> None:
        """Store the values of the active systems at the requested time ``target``, and evaluate sampled events."""
        systems, whole = run.systems, len(self._missing)
        lost = ~torch.isfinite(run.x.detach()).all(-1).all(-1)
        reached = torch.ones_like(lost)
        if len(systems) < whole:
            none = lost.new_zeros(whole)
            lost, reached = none.index_copy(0, systems, lost), none.index_copy(0, systems, reached)
        self._lost.append(lost)
        self._reached.append(reached)
        if not len(systems):
            self._kept.append(self._missing)
            return
        kept = run.actions.stored_values(run.x)
        self._kept.append(kept if len(systems) == whole else self._missing.index_copy(0, systems, kept))
        if run.actions.sampled:
            run.actions.sample_events(systems, torch.full_like(systems, target, dtype=torch.float64), run.x)

    def values(self) -> Tensor:
        """All stored values, (time, systems, ...)."""
        return torch.stack(self._kept)

    def outcome(self, times: list[float], actions: StepActions) -> Outcome:
        """Not finite from the first requested time at which a state is not; stopped by an event; or finished."""
        lost, whole = torch.stack(self._lost), self._reached[-1].tolist()
        first, gone = lost.int().argmax(0).tolist(), lost.any(0).tolist()
        ends = actions.end_times(torch.arange(len(whole), device=lost.device)).tolist()
        statuses, ended = [], []
        for k, end in enumerate(ends):
            statuses.append(Status.NOT_FINITE if gone[k] else Status.FINISHED if whole[k] else Status.STOPPED)
            ended.append(times[first[k]] if gone[k] else times[-1] if whole[k] else end)
        return Outcome(tuple(statuses), tuple(ended))


def check_grid(times: list[float], stepper: FixedStepper | NoisyStepper) -> None:
    """Raise ``HelmscopeError`` if the times need too many steps, or if the stepper is a map, which has no fractional
    steps, and they are not multiples of its step size.
    """
    count = times[-1] / stepper.h
    if count > MAX_STEPS:
        raise HelmscopeError(
            f"h is {stepper.h:g}, but reaching t={times[-1]:g} takes {count:.0e} steps: use a larger h, for at most "
            f"{MAX_STEPS:.0e} steps"
        )
    for t in times:
        ratio = t / stepper.h
        if not stepper.divisible and abs(ratio - round(ratio)) > 1e-9 * max(1.0, ratio):
            name = type(stepper).__name__
            raise HelmscopeError(
                f"times holds {t:g}, but {name} is a map: times must be multiples of its h={stepper.h:g}"
            )


def steps_in(span: float, stepper: FixedStepper | NoisyStepper) -> int:
    """The number of equal steps of at most h in a time span; for a map, the number of times it is applied."""
    ratio = span / stepper.h
    return math.ceil(ratio - 1e-9) if stepper.divisible else round(ratio)
