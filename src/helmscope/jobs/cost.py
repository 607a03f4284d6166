"""Estimate the cost of a job from a short sample of the same work.

Time: for an adaptive stepper, the steps of a few systems are counted (``helmscope.jobs.sample``), and some of them are
timed. Otherwise a few systems are integrated to later and later times, until the last time or until the sample has used
up its time, and the rest is extrapolated at the speed of the last part. The result is scaled by the ratio of the times
of one step of the whole batch and of those few systems. Memory: the arrays that exist at the same time, and the
libraries.

Counted in evaluations of the flow instead of seconds, the estimates of seven jobs were 0.95 to 1.17 times the truth;
seconds vary by a factor of two with the load of the machine. For 14 jobs the memory was within 20 %.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from helmscope.jobs import checks
from helmscope.jobs.sample import extrapolate, limited, make_sample
from helmscope.types import pluralized
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from helmscope.claims.run_trials import PlannedTrial
    from helmscope.jobs.density import DensitySpec
    from helmscope.jobs.measure import MeasurementSpec
    from helmscope.jobs.phase import PhaseSpec
    from helmscope.jobs.simulate import SimulationSpec
    from helmscope.jobs.trials import TrialsSpec
    from helmscope.models.subject import Subject
    from helmscope.solve.problem import Problem

LIBRARY_BYTES = 450_000_000  # of a process that has imported torch, SciPy, xarray and matplotlib
SAMPLE_SYSTEMS = 4
SAMPLE_PAIRS = 4_000_000  # of tokens, in the overview of a sample
REPEATED_S = 0.2  # steps that take longer are timed once
SAMPLING_S = 2.0  # for all samples of an estimate together, approximately
PICTURES_S = 1.0
RECORD_FORWARDS = 2.0  # time of a recording, with its certificate
QUICK = 0.35  # time of the quick form of a trial over that of the full one; measured on all trials together
WEEK_S = 604_800.0
STEP_LIMIT_WARNING = "the step limit will probably be reached, at about t={reached:.2g} of {last:g}"
REFERENCE_PARAMETERS, REFERENCE_TOKENS = 6_174_336, 16_384  # of model A and its 128 texts


@dataclass(frozen=True)
class Estimate(ConciseRepr):
    """The estimated cost of a job: ``work`` describes the work, ``seconds`` is the time on one core, and ``bytes`` the
    memory of one process with its libraries. Each number is None if it is unknown, as the time on a GPU. ``warning``
    says if the job will probably not be completed, and ``unit_seconds`` has the time of each unit of work by name, if
    units are estimated one by one.

    >>> print(Estimate("20 rows of 64 samples", seconds=75.0, bytes=500_000_000))
    20 rows of 64 samples: roughly 75 s on one core, 500 MB
    """

    work: str
    seconds: float | None = None
    bytes: int | None = None
    warning: str = ""
    unit_seconds: Mapping[str, float] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        costs = [] if self.seconds is None else [f"{_format_duration(self.seconds)} on one core"]
        costs += [] if self.bytes is None else [_format_size(self.bytes)]
        text = f"{self.work}: {', '.join(costs)}" if costs else self.work
        return f"{text}; {self.warning}" if self.warning else text


def phase_cost(spec: PhaseSpec) -> Estimate:
    """The cost of a phase diagram, from up to three betas per dimension; dimensions of equal cost are sampled once."""
    import numpy as np

    betas = spec.beta_values
    work = f"{pluralized(len(spec.dim_values) * len(betas), 'row')} of {pluralized(spec.samples, 'sample')}"
    memory = _phase_bytes(spec)
    if spec.device != "cpu":
        return Estimate(work, bytes=memory)
    sizes = {dim: dim if spec.nu or spec.spectrum else min(dim, spec.n) for dim in spec.dim_values}
    picks = sorted({0, len(betas) // 2, len(betas) - 1})
    budget = SAMPLING_S / (len(picks) * len(set(sizes.values())))
    seconds: dict[int, float] = {}
    for dim, size in sizes.items():
        if size not in seconds:
            logs = [math.log(_row_seconds(spec, dim, size, betas[k], budget)) for k in picks]
            seconds[size] = float(np.exp(np.interp(range(len(betas)), picks, logs)).sum())
    return Estimate(work, sum(seconds[size] for size in sizes.values()) + PICTURES_S, memory)


def simulation_cost(spec: SimulationSpec) -> Estimate:
    """The cost of a simulation, including its overview."""
    work = f"{pluralized(spec.batch, 'system')} of {pluralized(spec.n, 'token')}"
    clock = checks.expand_range("times", spec.times)
    memory = _simulation_bytes(spec, len(clock))
    if spec.device != "cpu":
        return Estimate(work, bytes=memory)
    problem, size = spec.problem(), spec.unit_size
    few = problem.part(0, min(SAMPLE_SYSTEMS, size))
    seconds, warning = _adaptive_seconds(few) if spec.step is None else (_fixed_seconds(few, spec.step), "")
    full, rest = divmod(spec.batch, size)
    units = {size: full, rest: min(rest, 1)}
    one = _step_seconds(few)
    steps = sum(count * _step_seconds(problem.part(0, systems)) / one for systems, count in units.items() if count)
    setup = _seconds(spec.problem) * sum(units.values())
    measuring = _overview_seconds(spec, problem, len(clock))
    return Estimate(work, seconds * steps + setup + measuring + PICTURES_S, memory, warning)


def density_cost(spec: DensitySpec) -> Estimate:
    """The cost of a density, including its overview."""
    from helmscope.observe.density_overview import density_overview

    grid, clock = spec.grid(), checks.expand_range("times", spec.times)
    work = f"{pluralized(len(grid.degrees), 'harmonic')} at {pluralized(len(clock), 'time')}"

    def evolve_to(times: list[float]) -> None:
        spec.evolve(times)

    seconds = _extrapolate_seconds(evolve_to, clock, SAMPLING_S)
    first = spec.evolve([0.0])
    measuring = len(clock) * _seconds(lambda: density_overview(first))
    tables = sum(value.nbytes for value in vars(grid).values() if hasattr(value, "nbytes"))
    paths = 8 * len(clock) * (4 * len(grid.degrees) + 3 * len(grid.points))
    return Estimate(work, seconds + measuring + PICTURES_S, LIBRARY_BYTES + 3 * tables + paths)


def trials_cost(spec: TrialsSpec, planned: Sequence[PlannedTrial]) -> Estimate:
    """The time of trials as declared by their experiments for a simulation or for model A on its texts, scaled by the
    size of the model and its texts, and by ``QUICK`` for quick trials. The memory is that of the largest subject.
    """
    from helmscope.claims.registry import experiments, subject_kind_of

    known = experiments(spec.claims_folder)
    work = f"{pluralized(len(planned), 'quick trial' if spec.quick else 'trial')}"
    sizes = {subject: subject_size(subject) for trial in planned for subject in trial.subjects}
    scale = QUICK if spec.quick else 1.0
    seconds = {
        trial.name: scale
        * known[trial.claim].seconds[subject_kind_of(trial.subject)]
        * sizes[trial.subject].relative_time
        for trial in planned
    }
    memory = LIBRARY_BYTES + max((size.bytes for size in sizes.values()), default=0)
    return Estimate(work, sum(seconds.values()), memory, unit_seconds=seconds)


def measurement_cost(spec: MeasurementSpec) -> Estimate:
    """The time of all measurements of a model, counted in forward passes, and that of a forward pass from a few
    texts.
    """
    from helmscope.jobs.measure import REPLAY
    from helmscope.observe.interventions import intervention_measurements
    from helmscope.observe.measure import (
        REPLAY_FORWARDS,
        standalone_measurements,
        streaming_instruments,
        unsupported_measurements,
    )

    subject = spec.subject()
    few = subject.record(subject.texts[:SAMPLE_SYSTEMS])
    reasons = unsupported_measurements(few, only=spec.possible)
    names = [name for name in reasons if spec.only or reasons[name] is None]
    streamed = any(each.name in names for each in streaming_instruments())
    chosen = [each for each in (*standalone_measurements(), *intervention_measurements()) if each.name in names]
    forward_passes = {REPLAY: REPLAY_FORWARDS} if streamed else {}
    forward_passes |= {each.name: each.cost(few, quick=spec.quick) for each in chosen}
    forward = min(_seconds(few.runner.forward) for _ in range(2)) * len(subject.texts) / len(few.batch)
    size = subject_size(subject)
    work = f"{pluralized(len(names), 'measurement')} of {pluralized(len(subject.texts), 'text')}"
    seconds = (RECORD_FORWARDS + sum(forward_passes.values())) * forward + PICTURES_S
    each_unit = {name: count * forward for name, count in forward_passes.items()}
    return Estimate(work, seconds, LIBRARY_BYTES + 2 * size.bytes, unit_seconds=each_unit)


@dataclass(frozen=True)
class SubjectSize:
    """The number of parameters of a model, of tokens of its texts, and of recorded numbers; all 0 for a simulation.
    ``loops`` is how often the block of a tied model is called.

    >>> SubjectSize(2 * REFERENCE_PARAMETERS, REFERENCE_TOKENS, 0).relative_time
    2.0
    """

    parameters: int = 0
    tokens: int = 0
    recorded: int = 0
    loops: int = 1
    embedding: int = 0

    @property
    def relative_time(self) -> float:
        """The time of a trial relative to model A on its texts, which grows with parameters times tokens, those of a
        tied block once for each call; 1 for a simulation.
        """
        if self.parameters == 0:
            return 1.0
        computed = self.embedding + (self.parameters - self.embedding) * self.loops
        return computed * self.tokens / (REFERENCE_PARAMETERS * REFERENCE_TOKENS)

    @property
    def bytes(self) -> int:
        """The memory of the model, one untrained twin and the recording of each, in float32."""
        return 2 * 4 * (self.parameters + self.recorded)


def subject_size(subject: Subject) -> SubjectSize:
    """The size of a subject; loads its model.

    >>> from helmscope.models.subject import Subject
    >>> subject_size(Subject("A", ["Once upon a time"])).tokens
    4
    """
    if subject.is_simulation:
        return SubjectSize()
    model, lengths = subject.loaded.model, [len(ids) for ids in subject.token_ids]
    layers, width = (int(getattr(model.config, name, None) or 0) for name in ("num_hidden_layers", "hidden_size"))
    padded = len(lengths) * max(lengths)
    embedding = model.get_input_embeddings()
    return SubjectSize(
        int(model.num_parameters()),
        sum(lengths),
        (2 * layers + 1) * padded * width,
        loops=subject.tied_loops or 1,
        embedding=0 if embedding is None else sum(weights.numel() for weights in embedding.parameters()),
    )


def _row_seconds(spec: PhaseSpec, dim: int, size: int, beta: float, budget: float) -> float:
    """Estimated seconds for one beta in one dimension, with all samples."""
    from helmscope.observe.phase_sweep import PAIRS
    from helmscope.solve.integrate import make_problem
    from helmscope.theory.starts import Uniform

    tiny: dict[str, Any] = {"dims": (dim,), "betas": (beta,), "samples": min(SAMPLE_SYSTEMS, spec.samples)}

    def integrate_to(times: list[float]) -> None:
        msgspec.structs.replace(spec, **tiny, times=tuple(times)).diagram(dim)

    seconds = _extrapolate_seconds(integrate_to, checks.expand_range("times", spec.times), budget)
    together = max(1, min(spec.samples, PAIRS["cpu"] // spec.n**2))  # systems that phase_diagram integrates at once
    problem = make_problem(spec.flow(dim)(beta), Uniform(spec.n, size).sample(together), [1.0])
    scale = _step_seconds(problem) / _step_seconds(problem.part(0, min(SAMPLE_SYSTEMS, together)))
    return max(1e-6, seconds * scale * spec.samples / together)


def _adaptive_seconds(problem: Problem) -> tuple[float, str]:
    """Estimated seconds of an integration by an adaptive stepper, and a warning if it will reach the step limit."""
    limited(problem, 2).run()  # the first call takes longer
    sample = make_sample(problem)
    started = time.process_time()
    outcome = sample.run().outcome
    seconds, last = time.process_time() - started, float(problem.times[-1])
    whole = extrapolate(problem, sample, outcome)
    warning = "" if whole.reached == last else STEP_LIMIT_WARNING.format(reached=whole.reached, last=last)
    return seconds * whole.factor, warning


def _fixed_seconds(problem: Problem, step: float) -> float:
    """Estimated seconds of an integration with a fixed step size."""

    def integrate_to(times: list[float]) -> None:
        replace(problem, times=problem.times.new_tensor(times)).run()

    return _extrapolate_seconds(integrate_to, problem.times.tolist(), SAMPLING_S, step)


def _extrapolate_seconds(
    integrate_to: Callable[[list[float]], None], clock: list[float], budget: float, step: float | None = None
) -> float:
    """Estimated seconds of ``integrate_to`` for all times: measured, or extrapolated at the last speed once the budget
    is used up.
    """
    last, before, earlier, spent, share = clock[-1], 0.0, 0.0, 0.0, 4.0**-11
    integrate_to([0.0])  # the first call takes longer
    overhead = _seconds(lambda: integrate_to([0.0]))
    while share < 1:
        share *= 16 if before < 2 * overhead and share < 1 / 4 else 4  # most calls of a short job are overhead
        end = last * share
        if step is not None:  # whole layers only
            end = min(last, math.ceil(end / step) * step)
        if end <= earlier < last:
            continue
        times = [t for t in clock if t < end]
        took = _seconds(partial(integrate_to, [*times, end]))
        spent += took
        if end == last:
            return took
        if 4 * took + spent > budget and took > 4 * overhead:  # else the overhead would dominate the speed
            return took + max(took - before, 0.0) / (end - earlier) * (last - end)
        before, earlier = took, end
    return before


def _step_seconds(problem: Problem) -> float:
    """Seconds of one step of all systems of a problem, with a stepper of four stages."""
    from helmscope.solve.rk4 import RK4

    h = 1e-6
    short = replace(problem, stepper=RK4(h), noise=None, merge=None, times=problem.times.new_tensor([4 * h]))
    short.run()
    first = _seconds(short.run)
    again = [_seconds(short.run) for _ in range(2)] if first < REPEATED_S else []
    return min([first, *again]) / 4


def _overview_seconds(spec: SimulationSpec, problem: Problem, times: int) -> float:
    """Estimated seconds of the overview at ``times`` times, from that of the start at one and at a few times, for as
    many systems as have ``SAMPLE_PAIRS`` pairs of tokens."""
    from helmscope.observe.overview import overview
    from helmscope.types import Trajectory

    sample = problem.start[: max(1, min(SAMPLE_PAIRS // spec.n**2, len(problem.start)))]
    scale = len(problem.start) / len(sample)

    def overview_seconds(count: int) -> float:
        clock = problem.times.new_tensor(range(count))
        cloud = Trajectory(clock, sample.expand(count, *sample.shape))
        return scale * _seconds(lambda: overview(cloud, beta=spec.beta, delta=spec.delta, max_angle=spec.max_angle))

    overview_seconds(1)  # the first call takes longer
    first = overview_seconds(1)
    few = min(SAMPLE_SYSTEMS, times)
    return first if few == 1 else first + max(0.0, overview_seconds(few) - first) / (few - 1) * (times - 1)


def _seconds(work: Callable[[], object]) -> float:
    """The processor time of this process, which other load on the machine does not change."""
    started = time.process_time()
    work()
    return time.process_time() - started


def _phase_bytes(spec: PhaseSpec) -> int:
    """The starts, the pairs of the samples integrated at once, and their results at all times."""
    from helmscope.observe.phase_sweep import PAIRS, PAIRS_ELSEWHERE

    size = max(spec.dim_values) if spec.nu or spec.spectrum else min(max(spec.dim_values), spec.n)
    times = len(checks.expand_range("times", spec.times))
    pairs = max(PAIRS.get(spec.device, PAIRS_ELSEWHERE), spec.n**2)
    return LIBRARY_BYTES + 8 * (spec.samples * (2 * spec.n * size + 2 * times) + 12 * pairs)


def _simulation_bytes(spec: SimulationSpec, times: int) -> int:
    """The states, of which combining and writing take four copies, and all their pairs, for the overview."""
    from helmscope.observe.overview import MAX_PAIRED

    paired = -(-spec.n // -(-spec.n // MAX_PAIRED))
    return LIBRARY_BYTES + 8 * spec.batch * times * (4 * spec.n * spec.dim + 5 * paired**2)


def _format_duration(seconds: float) -> str:
    if seconds > WEEK_S:
        return "more than a week"
    if seconds < 100:
        return f"roughly {seconds:.0f} s"
    return f"roughly {seconds / 60:.0f} min" if seconds < 6000 else f"roughly {seconds / 3600:.0f} h"


def _format_size(amount: int) -> str:
    return f"{amount / 1e9:.1f} GB" if amount >= 1e9 else f"{amount / 1e6:.0f} MB"
