"""Integration with a step size of its own for every system: nobody waits for the stiffest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from helmscope.kernels.kernel import may_be_differentiated
from helmscope.solve.rest import resting_state
from helmscope.types import Outcome, Status

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from helmscope.solve.extras import Extras
    from helmscope.solve.flow import Flow
    from helmscope.solve.stepper import AdaptiveStepper

DEFAULT_TOL = {torch.float64: 1e-9, torch.float32: 1e-5}
SAFETY, LEAST, MOST = 0.9, 0.2, 5.0
FIRST_LOOK, WORTHWHILE = 64, 1_000  # steps before a system may be found at rest, and steps that this must save
NO_RADIUS = 1e-6  # of the start: a stream that passes 0 so closely has no direction that its past would fix


@dataclass(eq=False)
class _Running:
    """The systems still under way; all tensors have them along the first axis."""

    systems: Int[Tensor, " active"]
    x: Float[Tensor, "active n d"]
    first: Float[Tensor, "active n d"]  # the displacement at x over first_h
    first_h: Float[Tensor, " active"]
    t: Float[Tensor, " active"]
    h: Float[Tensor, " active"]
    log_error: Float[Tensor, " active"]
    target: Int[Tensor, " active"]
    lost: Bool[Tensor, " active"]  # the last trial met a velocity that is not finite
    stopped: Bool[Tensor, " active"]  # by a terminal event
    floor: Float[Tensor, " active"]  # the radius below which a residual stream is lost; 0 where states are unit vectors
    flow: Flow

    def keep(self, which: Tensor) -> None:
        """Go on with some of the systems."""
        for item in fields(self):
            value = getattr(self, item.name)
            setattr(self, item.name, value.select(which) if item.name == "flow" else value[which])


def run_adaptive(
    flow: Flow, x: Float[Tensor, "batch n d"], times: list[float], stepper: AdaptiveStepper, extras: Extras
) -> tuple[Float[Tensor, "time batch *kept"], Outcome]:
    """What is kept of the states at the asked times; NaN after a system has ended early, unless it is at rest."""
    tol = DEFAULT_TOL[x.dtype] if stepper.tol is None else stepper.tol
    clock = torch.tensor([*times, math.inf], dtype=torch.float64, device=x.device)
    status = [Status.FINISHED] * len(x)
    ended = [times[-1]] * len(x)
    flow, x, _ = extras.merged(flow, x)
    kept = extras.kept(x)
    path = kept.new_full((len(times), *kept.shape), torch.nan)
    run = _start(flow, x, tol, stepper.order)
    if times[0] == 0:
        path[0] = kept
        run.target += 1
    run.stopped = ~extras.ends(run.systems).isnan()
    attempts, look = 0, FIRST_LOOK
    while True:
        reason = _why_stop(run, attempts, stepper.max_steps, len(times))
        if attempts == look:
            look = look * 5 // 4
            for row, state in _resting(run, times[-1], tol, extras):
                reason[row] = _hold(run, row, state, clock, path, extras)
        stopping = [s is not None for s in reason]
        for i, t, why in zip(run.systems.tolist(), run.t.tolist(), reason, strict=True):
            if why is not None:
                status[i], ended[i] = why, t
        if any(stopping):
            run.keep(~torch.tensor(stopping, device=x.device))
        if not len(run.systems):
            return path, Outcome(tuple(status), tuple(ended))
        attempts += 1
        landed = _step(run, clock, stepper, tol, extras)
        if bool(landed.any()):
            _keep_landed(run, landed, path, extras)
        if extras.progress is not None:  # reading the time waits for the device
            extras.say(float(run.t.min()) / times[-1])


def _start(flow: Flow, x: Tensor, tol: float, order: int) -> _Running:
    """The first step moves the fastest token by about tol^(1/order); the error estimate takes over from there."""
    count, device = len(x), x.device
    begin = torch.zeros(count, 1, 1, dtype=torch.float64, device=device)
    h = torch.exp(math.log(tol) / order - flow.log_speed(x.detach(), begin)).clamp(max=1.0)
    first = flow.move(x, h[:, None, None], begin)
    zeros = torch.zeros(count, dtype=torch.float64, device=device)
    index = torch.arange(count, device=device)
    lost = ~torch.isfinite(first.detach()).all(-1).all(-1)
    floor = NO_RADIUS * flow.field.radius(x.detach()).amax(-1) if flow.is_stream else zeros
    stopped = torch.zeros_like(lost)
    return _Running(index, x, first, h, zeros, h, zeros, torch.zeros_like(index), lost, stopped, floor, flow)


def _why_stop(run: _Running, attempts: int, max_steps: int, targets: int) -> list[Status | None]:
    done, stuck = run.target >= targets, ~(run.t + run.h > run.t)  # also where the step is NaN
    flat = torch.zeros_like(done)
    if run.flow.is_stream:
        flat = run.flow.field.radius(run.x.detach()).amin(-1) < run.floor
    if attempts < max_steps and not bool((done | run.stopped | stuck | flat).any()):
        return [None] * len(run.systems)
    limit = Status.STEP_LIMIT if attempts >= max_steps else None
    small = [Status.NOT_FINITE if lost else Status.STEP_TOO_SMALL for lost in run.lost.tolist()]
    flags = (done.tolist(), run.stopped.tolist(), flat.tolist(), stuck.tolist())
    return [
        Status.FINISHED if d else Status.STOPPED if e else Status.NO_RADIUS if f else why if s else limit
        for d, e, f, s, why in zip(*flags, small, strict=True)
    ]


def _keep_landed(run: _Running, landed: Tensor, path: Tensor, extras: Extras) -> None:
    """Keep the states of the systems that are at an asked time, and look for sampled events there."""
    systems, x = run.systems[landed], run.x[landed]
    path[run.target[landed] - 1, systems] = extras.kept(x)
    if extras.sampled:
        extras.sample(systems, run.t[landed], x)
        run.stopped[landed] |= ~extras.ends(systems).isnan()


def _hold(run: _Running, row: int, state: Tensor, clock: Tensor, path: Tensor, extras: Extras) -> Status:
    """Keep a state at rest for all times to come. A sampled event sees it at the next of them."""
    target, system = run.target[row : row + 1], run.systems[row : row + 1]
    first = int(target)
    path[first:, system] = extras.kept(state[None])
    extras.sample(system, clock[target], state[None])
    if first + 1 == len(path) or bool(extras.ends(system).isnan()):
        return Status.AT_REST
    path[first + 1 :, system] = torch.nan
    run.t[row] = clock[first]
    return Status.STOPPED


def _resting(run: _Running, last: float, tol: float, extras: Extras) -> Iterator[tuple[int, Tensor]]:
    """The systems that have stopped moving, by their row, and where they stay. Only those are looked at that hardly
    move, have many steps before them, and have had all their events except sampled ones, which a state at rest can
    answer; none where a derivative goes through the steps, since a start beside an equilibrium would still have one.
    """
    if not run.flow.on_sphere or may_be_differentiated(run.x):
        return
    quiet = run.flow.size(run.x, run.first).amax(-1) <= 4 * tol
    quiet &= (last - run.t) / run.h > WORTHWHILE
    for watch in extras.watches:
        if not watch.sampled:
            quiet &= ~watch.times[run.systems].isnan().any(-1)
    for row in quiet.nonzero().flatten().tolist():
        alone = torch.tensor([row], device=run.x.device)
        duration = last - float(run.t[row])
        state = resting_state(run.flow.select(alone), run.x[alone], float(run.h[row]), duration=duration, tol=tol)
        if state is not None:
            yield row, state[0]


def _step(run: _Running, clock: Tensor, stepper: AdaptiveStepper, tol: float, extras: Extras) -> Tensor:
    """One trial step of every running system; which of them landed on their next asked time."""
    goal = clock[run.target]
    left = goal - run.t
    lands = run.h >= left
    # two equal steps instead of a long one and a sliver
    h = torch.where(lands, left, torch.where(2 * run.h > left, left / 2, run.h))
    first = run.first * (h / run.first_h)[:, None, None].to(run.x.dtype)
    trial = stepper.attempt(run.flow, run.x, h[:, None, None], run.t[:, None, None], first)
    error = run.flow.size(run.x.detach(), trial.error.detach()).amax(-1).to(torch.float64) / tol
    run.lost = ~torch.isfinite(error)
    good: Tensor = error <= 1  # False for NaN
    log_error = torch.log(error.clamp(min=1e-10))
    factor = _factor(log_error, run.log_error, good, stepper.order)
    _see_events(run, h, good, trial.states, first, stepper, extras)

    pick = good[:, None, None]
    run.x = torch.where(pick, trial.states, run.x)
    run.first = torch.where(pick, trial.last, first)
    run.first_h = h
    landed, end = good & lands, torch.where(good, run.t + h, run.t)
    if extras.terminal:
        ended = extras.ends(run.systems)
        run.stopped = ~ended.isnan()
        landed &= ~(ended < end)  # what lies behind the event is not part of the path
        end = torch.where(run.stopped, ended, end)
    run.t = torch.where(landed, goal, end)
    # a step shortened to land says nothing against the longer one
    grown = h * factor
    run.h = torch.where(good & (h < run.h), torch.maximum(grown, run.h), grown)
    run.log_error = torch.where(good, log_error, run.log_error)
    run.target = run.target + landed
    run.flow, run.x, changed = extras.merged(run.flow, run.x)
    if changed is not None:
        fresh = run.flow.move(run.x, run.first_h[:, None, None], run.t[:, None, None])
        run.first = torch.where(changed[:, None, None], fresh, run.first)
    return landed


def _factor(log_error: Tensor, before: Tensor, good: Tensor, order: int) -> Tensor:
    """How the step size changes: proportional-integral control after a good step, proportional after a bad one.

    Written with exp and log because a power depends, in its last bit, on the place of a system in its batch.
    """
    smooth = torch.exp(math.log(SAFETY) - 0.7 / order * log_error + 0.4 / order * before).clamp(LEAST, MOST)
    shrink = torch.exp(math.log(SAFETY) - log_error / order).clamp(LEAST, 1.0)
    factor: Tensor = torch.where(good, smooth, torch.where(log_error.isnan(), LEAST, shrink))
    return factor


def _see_events(
    run: _Running,
    h: Tensor,
    good: Tensor,
    end_states: Tensor,
    first: Tensor,
    stepper: AdaptiveStepper,
    extras: Extras,
) -> None:
    if not extras.located or not bool(good.any()):
        return
    place = good.nonzero().flatten()

    def inside(rows: Tensor, duration: Tensor) -> Tensor:
        at = place[rows]
        part = (duration / h[at])[:, None, None].to(run.x.dtype)
        begin = run.t[at][:, None, None]
        return stepper.attempt(run.flow.select(at), run.x[at], duration[:, None, None], begin, first[at] * part).states

    extras.see(run.systems[place], run.t[place], h[place], end_states[place], inside)
