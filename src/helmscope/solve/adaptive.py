"""Adaptive integration with a separate step size for every system, so that stiff systems do not slow down others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from helmscope.kernels.request import may_be_differentiated
from helmscope.solve.rest import resting_state
from helmscope.types import Outcome, Status

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from helmscope.solve.flow import Flow
    from helmscope.solve.step_actions import StepActions
    from helmscope.solve.stepper import AdaptiveStepper

DEFAULT_TOL = {torch.float64: 1e-9, torch.float32: 1e-5}
SAFETY, MIN_FACTOR, MAX_FACTOR = 0.9, 0.2, 5.0
FIRST_REST_CHECK, MIN_STEPS_SAVED = 64, 1_000  # steps before the first test for rest, and steps it must save
NO_RADIUS = 1e-6  # relative to the start: a residual stream this close to 0 has no well-defined direction


@dataclass(eq=False)
class _Running:
    """The systems that are still being integrated, along the first axis of all tensors."""

    systems: Int[Tensor, " active"]
    x: Float[Tensor, "active n d"]
    first: Float[Tensor, "active n d"]  # displacement at x for the step size first_h
    first_h: Float[Tensor, " active"]
    t: Float[Tensor, " active"]
    h: Float[Tensor, " active"]
    log_error: Float[Tensor, " active"]
    target: Int[Tensor, " active"]  # index of the next requested time
    not_finite: Bool[Tensor, " active"]  # whether the last trial step met a velocity that is not finite
    stopped: Bool[Tensor, " active"]  # by a terminal event
    floor: Float[Tensor, " active"]  # smallest valid radius of a residual stream; 0 if states are unit vectors
    flow: Flow

    def keep(self, which: Tensor) -> None:
        """Continue with some of the systems, by index or mask."""
        for item in fields(self):
            value = getattr(self, item.name)
            setattr(self, item.name, value.select(which) if item.name == "flow" else value[which])


def run_adaptive(
    flow: Flow, x: Float[Tensor, "batch n d"], times: list[float], stepper: AdaptiveStepper, actions: StepActions
) -> tuple[Float[Tensor, "time batch *kept"], Outcome]:
    """The stored values at the requested times, and how the systems ended. Values are NaN after a system has ended
    early, unless it is at rest.
    """
    tol = DEFAULT_TOL[x.dtype] if stepper.tol is None else stepper.tol
    clock = torch.tensor([*times, math.inf], dtype=torch.float64, device=x.device)
    status = [Status.FINISHED] * len(x)
    ended = [times[-1]] * len(x)
    flow, x, _ = actions.merge_tokens(flow, x)
    kept = actions.stored_values(x)
    path = kept.new_full((len(times), *kept.shape), torch.nan)
    run = _start(flow, x, tol, stepper.order)
    if times[0] == 0:
        path[0] = kept
        run.target += 1
    run.stopped = ~actions.end_times(run.systems).isnan()
    attempts, next_check = 0, FIRST_REST_CHECK
    while True:
        reasons = _stop_reasons(run, attempts, stepper.max_steps, len(times))
        if attempts == next_check:
            next_check = next_check * 5 // 4
            for row, state in _find_resting(run, times[-1], tol, actions):
                reasons[row] = _hold(run, row, state, clock, path, actions)
        stopping = [reason is not None for reason in reasons]
        for i, t, reason in zip(run.systems.tolist(), run.t.tolist(), reasons, strict=True):
            if reason is not None:
                status[i], ended[i] = reason, t
        if any(stopping):
            run.keep(~torch.tensor(stopping, device=x.device))
        if not len(run.systems):
            return path, Outcome(tuple(status), tuple(ended))
        attempts += 1
        landed = _step(run, clock, stepper, tol, actions)
        if bool(landed.any()):
            _store_landed(run, landed, path, actions)
        if actions.progress is not None:  # reading t synchronizes with the device
            actions.report(float(run.t.min()) / times[-1])


def _start(flow: Flow, x: Tensor, tol: float, order: int) -> _Running:
    """The first step moves the fastest token by about tol^(1/order); the error estimate controls the later ones."""
    count, device = len(x), x.device
    begin = torch.zeros(count, 1, 1, dtype=torch.float64, device=device)
    h = torch.exp(math.log(tol) / order - flow.log_speed(x.detach(), begin)).clamp(max=1.0)
    first = flow.displacement(x, h[:, None, None], begin)
    zeros = torch.zeros(count, dtype=torch.float64, device=device)
    index = torch.arange(count, device=device)
    not_finite = ~torch.isfinite(first.detach()).all(-1).all(-1)
    floor = NO_RADIUS * flow.field.radius(x.detach()).amax(-1) if flow.is_stream else zeros
    stopped = torch.zeros_like(not_finite)
    return _Running(index, x, first, h, zeros, h, zeros, torch.zeros_like(index), not_finite, stopped, floor, flow)


def _stop_reasons(run: _Running, attempts: int, max_steps: int, targets: int) -> list[Status | None]:
    """Why each system must stop before the next step; None if it need not."""
    done, stuck = run.target >= targets, ~(run.t + run.h > run.t)  # stuck also if the step size is NaN
    no_radius = torch.zeros_like(done)
    if run.flow.is_stream:
        no_radius = run.flow.field.radius(run.x.detach()).amin(-1) < run.floor
    if attempts < max_steps and not bool((done | run.stopped | stuck | no_radius).any()):
        return [None] * len(run.systems)
    limit = Status.STEP_LIMIT if attempts >= max_steps else None
    if_stuck = [Status.NOT_FINITE if bad else Status.STEP_TOO_SMALL for bad in run.not_finite.tolist()]
    flags = (done.tolist(), run.stopped.tolist(), no_radius.tolist(), stuck.tolist())
    return [
        Status.FINISHED if d else Status.STOPPED if e else Status.NO_RADIUS if r else reason if s else limit
        for d, e, r, s, reason in zip(*flags, if_stuck, strict=True)
    ]


def _store_landed(run: _Running, landed: Tensor, path: Tensor, actions: StepActions) -> None:
    """Store the states of the systems that have reached a requested time, and evaluate sampled events there."""
    systems, x = run.systems[landed], run.x[landed]
    path[run.target[landed] - 1, systems] = actions.stored_values(x)
    if actions.sampled:
        actions.sample_events(systems, run.t[landed], x)
        run.stopped[landed] |= ~actions.end_times(systems).isnan()


def _hold(run: _Running, row: int, state: Tensor, clock: Tensor, path: Tensor, actions: StepActions) -> Status:
    """Store a state at rest for all later requested times. Sampled events are evaluated at the first of them."""
    target, system = run.target[row : row + 1], run.systems[row : row + 1]
    first = int(target)
    path[first:, system] = actions.stored_values(state[None])
    actions.sample_events(system, clock[target], state[None])
    if first + 1 == len(path) or bool(actions.end_times(system).isnan()):
        return Status.AT_REST
    path[first + 1 :, system] = torch.nan
    run.t[row] = clock[first]
    return Status.STOPPED


def _find_resting(run: _Running, last: float, tol: float, actions: StepActions) -> Iterator[tuple[int, Tensor]]:
    """The rows of the systems that have stopped moving, and where they stay.

    Only systems are tested that hardly move, have many steps left, and to which all events have happened, except
    sampled ones, which can be evaluated at a state at rest. Yields nothing if a gradient goes through the steps,
    because the derivative with respect to a start near an equilibrium is not that of the equilibrium.
    """
    if not run.flow.on_sphere or may_be_differentiated(run.x):
        return
    quiet = run.flow.relative_length(run.x, run.first).amax(-1) <= 4 * tol
    quiet &= (last - run.t) / run.h > MIN_STEPS_SAVED
    for watch in actions.watches:
        if not watch.sampled:
            quiet &= ~watch.times[run.systems].isnan().any(-1)
    for row in quiet.nonzero().flatten().tolist():
        index = torch.tensor([row], device=run.x.device)
        duration = last - float(run.t[row])
        state = resting_state(run.flow.select(index), run.x[index], float(run.h[row]), duration=duration, tol=tol)
        if state is not None:
            yield row, state[0]


def _step(run: _Running, clock: Tensor, stepper: AdaptiveStepper, tol: float, actions: StepActions) -> Tensor:
    """Attempt one step of every running system; returns a mask of those that reached their next requested time."""
    goal = clock[run.target]
    left = goal - run.t
    lands = run.h >= left
    # two equal steps rather than a long one and a tiny one
    h = torch.where(lands, left, torch.where(2 * run.h > left, left / 2, run.h))
    first = run.first * (h / run.first_h)[:, None, None].to(run.x.dtype)
    trial = stepper.attempt(run.flow, run.x, h[:, None, None], run.t[:, None, None], first)
    error = run.flow.relative_length(run.x.detach(), trial.error.detach()).amax(-1).to(torch.float64) / tol
    run.not_finite = ~torch.isfinite(error)
    accepted: Tensor = error <= 1  # False for NaN
    log_error = torch.log(error.clamp(min=1e-10))
    factor = _step_factor(log_error, run.log_error, accepted, stepper.order)
    _locate_events(run, h, accepted, trial.states, first, stepper, actions)

    pick = accepted[:, None, None]
    run.x = torch.where(pick, trial.states, run.x)
    run.first = torch.where(pick, trial.last, first)
    run.first_h = h
    landed, end = accepted & lands, torch.where(accepted, run.t + h, run.t)
    if actions.terminal:
        ended = actions.end_times(run.systems)
        run.stopped = ~ended.isnan()
        landed &= ~(ended < end)  # the path ends at the event
        end = torch.where(run.stopped, ended, end)
    run.t = torch.where(landed, goal, end)
    # a step that was shortened to reach a requested time must not shorten the next one
    grown = h * factor
    run.h = torch.where(accepted & (h < run.h), torch.maximum(grown, run.h), grown)
    run.log_error = torch.where(accepted, log_error, run.log_error)
    run.target = run.target + landed
    run.flow, run.x, changed = actions.merge_tokens(run.flow, run.x)
    if changed is not None:
        fresh = run.flow.displacement(run.x, run.first_h[:, None, None], run.t[:, None, None])
        run.first = torch.where(changed[:, None, None], fresh, run.first)
    return landed


def _step_factor(log_error: Tensor, previous: Tensor, accepted: Tensor, order: int) -> Tensor:
    """The change of the step size: proportional-integral control after an accepted step, proportional after a rejected
    one.

    Written with exp and log because the rounding of torch.pow depends on the position of a system in its batch.
    """
    smooth = torch.exp(math.log(SAFETY) - 0.7 / order * log_error + 0.4 / order * previous)
    shrink = torch.exp(math.log(SAFETY) - log_error / order).clamp(MIN_FACTOR, 1.0)
    factor: Tensor = torch.where(
        accepted, smooth.clamp(MIN_FACTOR, MAX_FACTOR), torch.where(log_error.isnan(), MIN_FACTOR, shrink)
    )
    return factor


def _locate_events(
    run: _Running,
    h: Tensor,
    accepted: Tensor,
    end_states: Tensor,
    first: Tensor,
    stepper: AdaptiveStepper,
    actions: StepActions,
) -> None:
    if not actions.located or not bool(accepted.any()):
        return
    index = accepted.nonzero().flatten()

    def inside(rows: Tensor, duration: Tensor) -> Tensor:
        at = index[rows]
        part = (duration / h[at])[:, None, None].to(run.x.dtype)
        begin = run.t[at][:, None, None]
        return stepper.attempt(run.flow.select(at), run.x[at], duration[:, None, None], begin, first[at] * part).states

    actions.locate_events(run.systems[index], run.t[index], h[index], end_states[index], inside)
