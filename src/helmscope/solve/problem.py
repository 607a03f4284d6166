"""A problem whose arguments have been checked, ready to be integrated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import Attention
from helmscope.fields.field import Field, StateSpace, check_states
from helmscope.fields.multihead import MultiHead
from helmscope.fields.parameters import selected
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import check_tokens, retract
from helmscope.kernels.choose import choose, using_summation
from helmscope.runs.bar import shows_progress
from helmscope.solve.adaptive import run_adaptive
from helmscope.solve.events import Event, EventTracker
from helmscope.solve.fixed import run_fixed
from helmscope.solve.flow import Flow
from helmscope.solve.noisy import run_noisy
from helmscope.solve.random_source import RandomSource
from helmscope.solve.simulation import Simulation
from helmscope.solve.step_actions import StepActions
from helmscope.solve.stepper import AdaptiveStepper, NoisyStepper, Stepper
from helmscope.solve.symmetry import in_span
from helmscope.solve.threads import fitting_threads
from helmscope.types import (
    HelmscopeError,
    Outcome,
    Progress,
    Trajectory,
    check_integer,
    one_line_repr,
    pluralized,
    short_description,
    short_repr,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.fields.noise import Noise
    from helmscope.kernels.request import Summation
    from helmscope.types.progress import ProgressOption

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Problem:
    """Field, initial states, times and method, with checked values; made by ``make_problem``. The first axis holds
    independent systems.

    ``systems`` are the numbers of the systems in the original batch. They key the noise, so that a ``part`` of the
    batch gives exactly the result that the whole batch gives.
    """

    field: Field
    start: Float[Tensor, "systems n d"]
    times: Float[Tensor, " time"]
    stepper: Stepper
    batch: tuple[int, ...]
    systems: tuple[int, ...]
    events: tuple[Event, ...] = ()
    merge: float | None = None
    weights: Float[Tensor, "systems n"] | None = None
    mask: Bool[Tensor, "systems n"] | None = None
    noise: Noise | None = None
    seed: int = 0
    origin: float = 0.0  # the initial time
    summation: Summation | None = None

    def __repr__(self) -> str:
        systems, tokens, dim = self.start.shape
        who = f"{pluralized(systems, 'system')} x {pluralized(tokens, 'token')}, dimension {dim}"
        return one_line_repr(
            f"Problem of {short_description(self.field)}: {who}; {pluralized(len(self.times), 'time')}"
        )

    @full_precision
    @shows_progress("integrating")
    def run(self, *, progress: ProgressOption = None) -> Simulation:
        """Integrate and return the Simulation; ``progress`` is called with the share of the work done."""
        span = in_span(self)
        inner = self if span is None else span.problem
        states, outcome, watches = inner._integrate(progress or None)
        if span is not None:
            states = span.lift(states)
            if float(self.times[0]) == self.origin and self.merge is None:
                states[0] = self.start  # without the rounding of the lift
        radius, streams = None, None
        if self.field.space is StateSpace.STREAM:
            streams = states
            states, radius = self.field.direction(streams), self.field.radius(streams)
        weights = None if self.weights is None else self.weights.detach().unsqueeze(0)
        trajectory = Trajectory(self.times, states, weights=weights, radius=radius, outcome=outcome)
        event_times = tuple((self.origin + w.times).reshape((*self.batch, *w.shape)) for w in watches)
        return Simulation(trajectory, self, event_times, streams)

    @full_precision
    def read(
        self, statistic: Callable[[Tensor], Tensor], progress: Progress | None = None
    ) -> tuple[Float[Tensor, "time systems *kept"], Outcome]:
        """Integrate, and return ``statistic(x)``, (systems, ...), at each requested time instead of the states, so that
        the memory does not grow with times n d; and how the systems ended. ``statistic`` takes unit vectors, (systems,
        n, d), or points of R^d if these are the field's states.

        >>> from helmscope.fields.attention import SA
        >>> from helmscope.solve.integrate import make_problem
        >>> start = torch.eye(2, dtype=torch.float64).expand(5, 2, 2)
        >>> problem = make_problem(SA(beta=0.0), start, times=[0.0, 1.0])
        >>> cosines, _ = problem.read(lambda x: (x[:, 0] * x[:, 1]).sum(-1))
        >>> cosines.shape, round(float(cosines[1, 0]), 9)  # tanh 1
        (torch.Size([2, 5]), 0.761594156)
        """
        kept, outcome, _ = self._integrate(progress, lambda x: statistic(self.field.direction(x)))
        return kept, outcome

    def summations(self) -> list[str]:
        """The names of the methods that compute the sums over tokens: of an attention field, or in one displacement of
        the first system. Raises ``HelmscopeError`` if the method was fixed and cannot compute them.

        >>> from helmscope.fields.attention import SA
        >>> from helmscope.solve.integrate import make_problem
        >>> make_problem(SA(beta=1.0), torch.eye(2), times=[1.0]).summations()
        ['Dense']
        """
        first = self.part(0, 1)
        span = in_span(first)
        inner = first if span is None else span.problem
        flow = Flow(inner.field, inner.weights)
        h = torch.zeros(1, 1, 1, dtype=torch.float64, device=inner.start.device)
        with using_summation(self.summation) as names:
            if isinstance(inner.field, Attention | MultiHead):
                choose(inner.field.request(inner.start, inner.weights, tangent=True))
            else:
                flow.displacement(inner.start, h, h)
        return sorted(names)

    def _integrate(
        self, progress: Progress | None, read: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Outcome, tuple[EventTracker, ...]]:
        """The stored values, how the systems ended, and the times of the events."""
        clock = (self.times - self.origin).tolist()
        flow = Flow(self.field, self.weights, origin=self.origin)
        start, requested = self.start.detach(), clock[0] == 0
        watches = tuple(
            EventTracker.start(event, start, self.mask, flow.direction, requested=requested) for event in self.events
        )
        actions = StepActions(watches, self.merge, progress, read)
        with using_summation(self.summation), fitting_threads(self.field, self.start):
            if isinstance(self.stepper, AdaptiveStepper):
                kept, outcome = run_adaptive(flow, self.start, clock, self.stepper, actions)
            elif isinstance(self.stepper, NoisyStepper):
                assert self.noise is not None
                streams = RandomSource(self.seed, self.systems)
                kept, outcome = run_noisy(flow, self.start, clock, self.stepper, self.noise, streams, actions)
            else:
                kept, outcome = run_fixed(flow, self.start, clock, self.stepper, actions)
        outcome = replace(outcome, times=tuple(self.origin + t for t in outcome.times))
        if outcome.failed:
            logger.warning("integration stopped early: %s", outcome)
        actions.report(1.0)
        return kept, outcome, watches

    def part(self, first: int, last: int) -> Problem:
        """The problem for the systems ``first`` to ``last`` - 1 alone; their results are exactly those in the whole
        batch. Raises ``HelmscopeError`` unless 0 <= first < last <= the number of systems.

        >>> from helmscope.fields.attention import SA
        >>> from helmscope.solve.integrate import make_problem
        >>> whole = make_problem(SA(beta=1.0), torch.eye(2, dtype=torch.float64).expand(5, 2, 2), times=[1.0])
        >>> bool((whole.part(3, 5).run().states == whole.run().states[:, 3:5]).all())
        True
        """
        last = check_integer("last", last, at_least=1)
        first = check_integer("first", first, at_least=0)
        if not first < last <= len(self.start):
            raise HelmscopeError(f"part is {first} to {last}, but the batch has the systems 0 to {len(self.start)}")
        rows = slice(first, last)
        return replace(
            self,
            field=self.field.with_parameters(selected(torch.arange(first, last, device=self.start.device))),
            start=self.start[rows],
            batch=(last - first,),
            systems=self.systems[rows],
            weights=None if self.weights is None else self.weights[rows],
            mask=None if self.mask is None else self.mask[rows],
        )

    def time_index(self, number: object, name: str) -> int:
        """``number`` as an index into the times, where negative ones count from the end; raises a ``HelmscopeError``
        that names the argument ``name`` if there is no such time.
        """
        last = len(self.times) - 1
        if isinstance(number, bool) or not isinstance(number, int) or not -last - 1 <= number <= last:
            raise HelmscopeError(f"{name} is {short_repr(number)}, but the stored times are numbered 0 to {last}")
        return number % len(self.times)

    def continued(
        self, depth: int, states: Float[Tensor, "*batch n d"], stream: Tensor, generator: torch.Generator | None
    ) -> Problem:
        """The same problem from the stored time number ``depth`` on, with other states and new noise.

        For a residual stream, ``stream``, only the direction is replaced: it keeps its radius and what its norm
        ignores, such as the mean under LayerNorm.
        """
        if self.field.space is StateSpace.FLAT:
            x = check_states(self.field, states, "states")
        else:  # for a residual stream, these are directions
            x = on_the_sphere(check_tokens(states, name="states"))
        if x.shape not in ((*self.batch, *self.start.shape[-2:]), self.start.shape):
            raise HelmscopeError(f"states has shape {tuple(x.shape)}, but the systems have {tuple(self.start.shape)}")
        index = self.time_index(depth, "depth")
        x = x.reshape(self.start.shape).to(self.start)
        if self.field.space is StateSpace.STREAM:
            x = stream + self.field.radius(stream).unsqueeze(-1) * (x - self.field.direction(stream))
        times = self.times[index:]
        seed = RandomSource.continuation_seed(self.seed, index, generator)
        return replace(self, start=x, times=times, origin=float(times[0]), seed=seed)


def on_the_sphere(x: Tensor) -> Tensor:
    """Project tokens to the sphere that are off it by more than rounding; others are unchanged.

    >>> on_the_sphere(torch.tensor([[1.0, 0.0], [0.0, 1.00001]]))
    tensor([[1., 0.],
            [0., 1.]])
    """
    off = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) - 1).abs() > 16 * torch.finfo(x.dtype).eps
    return torch.where(off, retract(x), x)


def check_start(field: Field, x0: object, *, normalize: bool) -> Float[Tensor, "*batch n d"]:
    """The initial states, checked and if necessary normalized: unit vectors, or a residual stream of any radius if that
    is the field's state. Raises ``HelmscopeError`` if they are invalid.

    >>> from helmscope.fields.field import as_field
    >>> check_start(as_field(torch.zeros_like), torch.tensor([[3.0, 4.0]]), normalize=True)
    tensor([[0.6000, 0.8000]])
    """
    x = check_states(field, x0, "x0", normalize=normalize, remedy=", or pass normalize=True")
    if field.space is not StateSpace.SPHERE and normalize:
        x = retract(x)
    return on_the_sphere(x) if field.space is StateSpace.SPHERE or normalize else x
