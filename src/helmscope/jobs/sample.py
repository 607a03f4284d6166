"""A short sample of an adaptive integration, and how much longer the whole integration is, counted in steps.

Nothing is timed here, so a problem always gets the same answer. A sample of a fixed number of steps shows how far they
reach. The rest is extrapolated at the pace of the end of the sample, up to the time at which the systems come to rest.
That time, and the pace shortly before it, are found by merging tokens that have met, which removes the stiffness of
clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from helmscope.types import Outcome, Status

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.problem import Problem

MAX_STEPS, MIN_STEPS = 300, 10  # of a sample of few tokens, and of many
PAIRS = 1.5e7  # of tokens, in all steps of a sample together: a few seconds
MERGED = 5  # steps with merged tokens, over those of a sample without
LONG = 10  # steps of an integration for which it pays to find out when it comes to rest, over those of the sample
MERGE, AT_REST, OCTAVES = 1e-2, 1e-6, 20  # radians; a change of a coordinate; octaves of time that are searched


@dataclass(frozen=True)
class Extrapolation:
    """What a sample says of the whole integration: it takes ``factor`` times as many steps, and ends at the time
    ``reached``: its last time, or that of its step limit.
    """

    factor: float
    reached: float


@dataclass(frozen=True)
class Rest:
    """The ``time`` at which all systems are at rest, infinite if unknown, and the ``pace`` shortly before it, in steps
    per unit of time, None if unknown.
    """

    time: float = math.inf
    pace: float | None = None


def make_sample(problem: Problem) -> Problem:
    """The same problem with a step limit so low that it is integrated in seconds.

    >>> from helmscope.jobs import SimulationSpec
    >>> [make_sample(SimulationSpec(n=n, batch=1).problem()).stepper.max_steps for n in (8, 512, 4096)]
    [300, 57, 10]
    """
    systems, tokens = problem.start.shape[:2]
    steps = min(MAX_STEPS, max(MIN_STEPS, int(PAIRS / (systems * tokens**2))))
    return limited(problem, steps if problem.merge is None else MERGED * steps)


def extrapolate(problem: Problem, sample: Problem, outcome: Outcome) -> Extrapolation:
    """Extrapolate from a sample with this outcome to the whole integration.

    >>> from helmscope.jobs import SimulationSpec
    >>> problem = SimulationSpec(n=4, batch=1, times=[0, 1]).problem()
    >>> sample = make_sample(problem)
    >>> extrapolate(problem, sample, sample.run().outcome)  # so short an integration is its own sample
    Extrapolation(factor=1.0, reached=1.0)
    """
    last, steps, most = float(problem.times[-1]), _step_limit(sample), _step_limit(problem)
    reached = _time_of_limit(outcome)
    if reached is None:
        return Extrapolation(1.0, last)
    if steps == most:
        return Extrapolation(1.0, reached)
    half = _time_of_limit(limited(problem, steps // 2).run().outcome) or 0.0
    pace, end = (steps - steps // 2) / (reached - half), last
    if pace * (last - reached) > LONG * steps and problem.merge is None:
        rest = find_rest(problem, steps)
        pace, end = rest.pace or pace, min(last, rest.time)
    total = steps + pace * max(0.0, end - reached)
    if total > most:
        return Extrapolation(most / steps, reached + (most - steps) / pace)
    return Extrapolation(total / steps, last)


def find_rest(problem: Problem, steps: int) -> Rest:
    """Find when the systems come to rest, in a small multiple of ``steps``. Merging replaces a cluster, in which the
    stepper needs short steps, by a single token, so that late states are reached in few steps.

    >>> from helmscope.jobs import SimulationSpec
    >>> find_rest(SimulationSpec(field="usa", n=3, batch=2, times=[0, 2000]).problem(), 100).time  # exact: 7.516
    7.8125
    """
    last = float(problem.times[-1])
    clock = [last * 2.0 ** (-k / 2) for k in range(2 * OCTAVES, -1, -1)]
    merged = replace(limited(problem, MERGED * steps), merge=MERGE, times=problem.times.new_tensor(clock)).run()
    if merged.outcome.failed:
        return Rest()
    states = merged.states
    moving = ((states - states[-1]).abs() > AT_REST).flatten(1).any(-1)
    first = int(moving.nonzero()[-1]) + 1 if bool(moving.any()) else 0
    late = replace(limited(problem, steps), start=_spread_out(states[max(0, first - 2)]))
    reached = _time_of_limit(late.run().outcome)
    time = clock[first] if first < len(clock) - 1 else math.inf
    return Rest(time, None if reached is None else steps / reached)


def limited(problem: Problem, steps: int) -> Problem:
    """The same problem with a step limit of at most ``steps``.

    >>> from helmscope.jobs import SimulationSpec
    >>> limited(SimulationSpec(n=4, batch=1).problem(), 50).stepper.max_steps
    50
    """
    stepper: Any = problem.stepper
    return replace(problem, stepper=replace(stepper, max_steps=min(steps, stepper.max_steps)))


def _step_limit(problem: Problem) -> int:
    stepper: Any = problem.stepper
    return int(stepper.max_steps)


def _time_of_limit(outcome: Outcome) -> float | None:
    """The earliest time at which a system reached the step limit; None if none did."""
    ended = zip(outcome.times, outcome.statuses, strict=True)
    return min((t for t, status in ended if status is Status.STEP_LIMIT), default=None)


def _spread_out(x: Tensor) -> Tensor:
    """Unit vectors moved by about ``MERGE`` / 1000, so that merged tokens differ."""
    import torch

    from helmscope.geometry.sphere import retract

    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    return retract(x + 1e-3 * MERGE * noise.to(x.device))
