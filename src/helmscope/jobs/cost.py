"""What a job will cost, from a short sample of the same work.

Time: a few systems are carried over longer and longer parts of the asked times, until the end or until that has taken
long enough; what is left is taken to go on at the pace of the last part. A step of the whole batch is timed against one
of those few. Memory: what the arrays take that are alive at once, and the libraries.

Over 14 simulations and diagrams that took 1 to 21 s, the time was 0.7 to 2.4 times the true one and the memory within
20 %. A sample that ends long before the last time knows the pace of the beginning alone: for USA at beta = 9 up to
t = 1000 it says ten times too much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from helmscope.jobs import checks
from helmscope.types import counted

if TYPE_CHECKING:
    from helmscope.jobs.phase import Phase
    from helmscope.jobs.simulate import Simulate
    from helmscope.jobs.trials import Trials
    from helmscope.solve.problem import Problem

LIBRARIES = 450_000_000  # bytes of a process that has imported torch, SciPy, xarray and matplotlib
FEW = 4  # systems of a sample
PATIENCE_S = 2.0  # of all samples of an estimate together, about
PICTURES_S = 1.0
WEEK_S = 604_800.0


@dataclass(frozen=True)
class Estimate:
    """``work`` says what there is to do; ``seconds`` is how long it takes on one core, and ``bytes`` what a process
    needs with its libraries; each is None where nothing is known, as the time on a GPU.

    >>> print(Estimate("20 rows of 64 samples", seconds=75.0, bytes=500_000_000))
    20 rows of 64 samples: roughly 75 s on one core, 500 MB
    """

    work: str
    seconds: float | None = None
    bytes: int | None = None

    def __str__(self) -> str:
        told = [] if self.seconds is None else [f"{_spoken(self.seconds)} on one core"]
        told += [] if self.bytes is None else [_size(self.bytes)]
        return f"{self.work}: {', '.join(told)}" if told else self.work


def phase_cost(spec: Phase) -> Estimate:
    """The cost of a phase diagram, from up to three betas in each dimension that differs from the others in cost."""
    import numpy as np

    betas = spec.temperatures
    work = f"{counted(len(spec.spaces) * len(betas), 'row')} of {counted(spec.samples, 'sample')}"
    memory = _phase_bytes(spec)
    if spec.device != "cpu":
        return Estimate(work, bytes=memory)
    carried = {dim: dim if spec.nu or spec.spectrum else min(dim, spec.n) for dim in spec.spaces}
    picks = sorted({0, len(betas) // 2, len(betas) - 1})
    patience = PATIENCE_S / (len(picks) * len(set(carried.values())))
    of_size: dict[int, float] = {}
    for dim, size in carried.items():
        if size not in of_size:
            logs = [math.log(_row_seconds(spec, dim, size, betas[k], patience)) for k in picks]
            of_size[size] = float(np.exp(np.interp(range(len(betas)), picks, logs)).sum())
    return Estimate(work, sum(of_size[size] for size in carried.values()) + PICTURES_S, memory)


def simulation_cost(spec: Simulate) -> Estimate:
    """The cost of a simulation, with that of its overview."""
    work = f"{counted(spec.batch, 'system')} of {counted(spec.n, 'token')}"
    clock = checks.spread("times", spec.times)
    memory = _simulation_bytes(spec, len(clock))
    if spec.device != "cpu":
        return Estimate(work, bytes=memory)
    problem, size = spec.problem(), spec.unit_size
    few = problem.part(0, min(FEW, size))

    def carry(times: list[float]) -> None:
        replace(few, times=few.times.new_tensor(times)).run()

    seconds = _whole(carry, clock, PATIENCE_S, step=spec.step)
    full, rest = divmod(spec.batch, size)
    units = {size: full, rest: min(rest, 1)}
    one = _step_seconds(few)
    steps = sum(count * _step_seconds(problem.part(0, systems)) / one for systems, count in units.items() if count)
    posing = _seconds(spec.problem) * sum(units.values())
    looking = _overview_seconds(spec, problem, len(clock))
    return Estimate(work, seconds * steps + posing + looking + PICTURES_S, memory)


def trials_cost(spec: Trials, claims: Sequence[str]) -> Estimate:
    """The time of trials, from what their experiments declare; quick ones may take less."""
    from helmscope.claims.registry import experiments

    known = experiments(spec.folder)
    work = f"{counted(len(claims), 'quick trial' if spec.quick else 'trial')}"
    return Estimate(work, sum(known[claim].seconds for claim in claims))


def _row_seconds(spec: Phase, dim: int, size: int, beta: float, patience: float) -> float:
    """One beta in one dimension, with all samples."""
    from helmscope.observe.phase import PAIRS
    from helmscope.solve.integrate import make_problem
    from helmscope.theory.starts import Uniform

    little: dict[str, Any] = {"dims": (dim,), "betas": (beta,), "samples": min(FEW, spec.samples)}

    def carry(times: list[float]) -> None:
        msgspec.structs.replace(spec, **little, times=tuple(times)).diagram(dim)

    seconds = _whole(carry, checks.spread("times", spec.times), patience)
    together = max(1, min(spec.samples, PAIRS["cpu"] // spec.n**2))  # so many phase_diagram carries at once
    problem = make_problem(spec.flow(dim)(beta), Uniform(spec.n, size).sample(together), [1.0])
    scale = _step_seconds(problem) / _step_seconds(problem.part(0, min(FEW, together)))
    return max(1e-6, seconds * scale * spec.samples / together)


def _whole(
    carry: Callable[[list[float]], None], clock: list[float], patience: float, *, step: float | None = None
) -> float:
    """Seconds that ``carry`` would take for all times: as measured, or from where patience ended at the last pace."""
    last, before, earlier, spent = clock[-1], 0.0, 0.0, 0.0
    carry([0.0])  # what the first call alone takes
    nothing = _seconds(lambda: carry([0.0]))
    for share in (4.0**-k for k in range(10, -1, -1)):
        end = last * share
        if step is not None:  # a layer has no part
            end = min(last, math.ceil(end / step) * step)
        if end <= earlier < last:
            continue
        asked = [t for t in clock if t < end]
        took = _seconds(partial(carry, [*asked, end]))
        spent += took
        if end == last:
            return took
        if 4 * took + spent > patience and took > 4 * nothing:  # else the pace would be that of setting out
            pace = max(took - before, 0.0) / (end - earlier)
            return took + pace * (last - end)
        before, earlier = took, end
    return before


def _step_seconds(problem: Problem) -> float:
    """One step of all systems of a problem, by four stages."""
    from helmscope.solve.rk4 import RK4

    h = 1e-6
    short = replace(problem, stepper=RK4(h), noise=None, merge=None, times=problem.times.new_tensor([4 * h]))
    short.run()
    return min(_seconds(short.run) for _ in range(3)) / 4


def _overview_seconds(spec: Simulate, problem: Problem, times: int) -> float:
    """The overview of all systems at so many times, from that of the start at one and at a few."""
    from helmscope.observe.overview import overview
    from helmscope.types import Trajectory

    def look(count: int) -> float:
        clock = problem.times.new_tensor(range(count))
        cloud = Trajectory(clock, problem.start.expand(count, *problem.start.shape))
        return _seconds(lambda: overview(cloud, beta=spec.beta, delta=spec.delta, radius=spec.radius))

    look(1)
    first = look(1)
    few = min(FEW, times)
    return first if few == 1 else first + max(0.0, look(few) - first) / (few - 1) * (times - 1)


def _seconds(work: Callable[[], object]) -> float:
    """Of this process alone: what else the machine does is none of the work's time."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _phase_bytes(spec: Phase) -> int:
    """The starts, the pairs of the samples carried at once, and their shares at all times."""
    from helmscope.observe.phase import PAIRS, PAIRS_ELSEWHERE

    size = max(spec.spaces) if spec.nu or spec.spectrum else min(max(spec.spaces), spec.n)
    times = len(checks.spread("times", spec.times))
    pairs = max(PAIRS.get(spec.device, PAIRS_ELSEWHERE), spec.n**2)
    return LIBRARIES + 8 * (spec.samples * (2 * spec.n * size + 2 * times) + 12 * pairs)


def _simulation_bytes(spec: Simulate, times: int) -> int:
    """The states, four times over where they are joined and written, and the pairs of all of them, for the overview."""
    from helmscope.observe.overview import MOST_PAIRED

    paired = -(-spec.n // -(-spec.n // MOST_PAIRED))
    return LIBRARIES + 8 * spec.batch * times * (4 * spec.n * spec.dim + 5 * paired**2)


def _spoken(seconds: float) -> str:
    if seconds > WEEK_S:
        return "more than a week"
    if seconds < 100:
        return f"roughly {seconds:.0f} s"
    return f"roughly {seconds / 60:.0f} min" if seconds < 6000 else f"roughly {seconds / 3600:.0f} h"


def _size(amount: int) -> str:
    return f"{amount / 1e9:.1f} GB" if amount >= 1e9 else f"{amount / 1e6:.0f} MB"
