"""An integration that has passed all checks and waits to be run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import Attention
from helmscope.fields.field import Field, Space, check_states
from helmscope.fields.multihead import MultiHead
from helmscope.fields.parameters import selected
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import check_tokens, retract
from helmscope.kernels.choose import choose, using_kernel
from helmscope.solve.adaptive import run_adaptive
from helmscope.solve.events import Event, Watch
from helmscope.solve.extras import Extras
from helmscope.solve.fixed import run_fixed
from helmscope.solve.flow import Flow
from helmscope.solve.noisy import run_noisy
from helmscope.solve.random_source import RandomSource
from helmscope.solve.simulation import Simulation
from helmscope.solve.stepper import AdaptiveStepper, NoisyStepper, Stepper
from helmscope.solve.symmetry import in_span
from helmscope.solve.threads import fitting_threads
from helmscope.types import (
    HelmscopeError,
    Outcome,
    Progress,
    Trajectory,
    brief,
    counted,
    one_line_repr,
    shown,
    whole_number,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.fields.noise import Noise
    from helmscope.kernels.kernel import Kernel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Problem:
    """Field, start, times and method, checked; made by ``make_problem``. Independent systems lie along the first axis.

    ``systems`` are the numbers of the systems in the batch that was posed: they key the noise, so that a ``part`` of
    the batch gives the bits that the whole gives.
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
    origin: float = 0.0  # the time of the start
    kernel: Kernel | None = None

    def __repr__(self) -> str:
        systems, tokens, dim = self.start.shape
        who = f"{counted(systems, 'system')} x {counted(tokens, 'token')}, dimension {dim}"
        return one_line_repr(f"Problem of {brief(self.field)}: {who}; {counted(len(self.times), 'time')}")

    @full_precision
    def run(self, progress: Progress | None = None) -> Simulation:
        """Integrate."""
        span = in_span(self)
        inner = self if span is None else span.problem
        states, outcome, watches = inner._carry(progress)
        if span is not None:
            states = span.lift(states)
            if float(self.times[0]) == self.origin and self.merge is None:
                states[0] = self.start  # to the bit
        radius, streams = None, None
        if self.field.space is Space.STREAM:
            streams = states
            states, radius = self.field.direction(streams), self.field.radius(streams)
        weights = None if self.weights is None else self.weights.detach().unsqueeze(0)
        trajectory = Trajectory(self.times, states, weights=weights, radius=radius, outcome=outcome)
        found = tuple((self.origin + w.times).reshape((*self.batch, *w.shape)) for w in watches)
        return Simulation(trajectory, self, found, streams)

    @full_precision
    def read(
        self, look: Callable[[Tensor], Tensor], progress: Progress | None = None
    ) -> tuple[Float[Tensor, "time systems *kept"], Outcome]:
        """Integrate, and keep ``look(x)`` (systems, ...) of the states at each asked time instead of the states: its
        memory does not grow with times n d. ``look`` is given unit vectors (points of R^d where the field lives there).

        >>> from helmscope.fields.attention import SA
        >>> from helmscope.solve.integrate import make_problem
        >>> start = torch.eye(2, dtype=torch.float64).expand(5, 2, 2)
        >>> seen, _ = make_problem(SA(beta=0.0), start, times=[0.0, 1.0]).read(lambda x: (x[:, 0] * x[:, 1]).sum(-1))
        >>> seen.shape, round(float(seen[1, 0]), 9)  # tanh 1
        (torch.Size([2, 5]), 0.761594156)
        """
        kept, outcome, _ = self._carry(progress, lambda x: look(self.field.direction(x)))
        return kept, outcome

    def kernels(self) -> list[str]:
        """The names of the kernels chosen for the sums over tokens at the start: for what an attention field asks, or
        for one displacement of the first system. Refused where the pinned kernel cannot serve.

        >>> from helmscope.fields.attention import SA
        >>> from helmscope.solve.integrate import make_problem
        >>> make_problem(SA(beta=1.0), torch.eye(2), times=[1.0]).kernels()
        ['Dense']
        """
        first = self.part(0, 1)
        span = in_span(first)
        inner = first if span is None else span.problem
        flow = Flow(inner.field, inner.weights)
        h = torch.zeros(1, 1, 1, dtype=torch.float64, device=inner.start.device)
        with using_kernel(self.kernel) as names:
            if isinstance(inner.field, Attention | MultiHead):
                choose(inner.field.request(inner.start, inner.weights, tangent=True))
            else:
                flow.move(inner.start, h, h)
        return sorted(names)

    def _carry(
        self, progress: Progress | None, read: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Outcome, tuple[Watch, ...]]:
        """What is kept of the states, how the systems ended, and the events as they were seen."""
        clock = (self.times - self.origin).tolist()
        flow = Flow(self.field, self.weights, origin=self.origin)
        start, asked = self.start.detach(), clock[0] == 0
        watches = tuple(Watch.start(event, start, self.mask, flow.direction, asked=asked) for event in self.events)
        extras = Extras(watches, self.merge, progress, read)
        with using_kernel(self.kernel), fitting_threads(self.field, self.start):
            if isinstance(self.stepper, AdaptiveStepper):
                kept, outcome = run_adaptive(flow, self.start, clock, self.stepper, extras)
            elif isinstance(self.stepper, NoisyStepper):
                assert self.noise is not None
                streams = RandomSource(self.seed, self.systems)
                kept, outcome = run_noisy(flow, self.start, clock, self.stepper, self.noise, streams, extras)
            else:
                kept, outcome = run_fixed(flow, self.start, clock, self.stepper, extras)
        outcome = replace(outcome, times=tuple(self.origin + t for t in outcome.times))
        if outcome.failed:
            logger.warning("integration stopped early: %s", outcome)
        extras.say(1.0)
        return kept, outcome, watches

    def part(self, first: int, last: int) -> Problem:
        """The systems ``first`` to ``last`` - 1 alone; they give, to the bit, what they give in the whole batch.

        >>> from helmscope.fields.attention import SA
        >>> from helmscope.solve.integrate import make_problem
        >>> whole = make_problem(SA(beta=1.0), torch.eye(2, dtype=torch.float64).expand(5, 2, 2), times=[1.0])
        >>> bool((whole.part(3, 5).run().states == whole.run().states[:, 3:5]).all())
        True
        """
        last = whole_number("last", last, at_least=1)
        first = whole_number("first", first, at_least=0)
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
        """``number``, an argument of that ``name``, as an index into the times; negative ones count from the end."""
        last = len(self.times) - 1
        if isinstance(number, bool) or not isinstance(number, int) or not -last - 1 <= number <= last:
            raise HelmscopeError(f"{name} is {shown(number)}, but the run has stored times number 0 to {last}")
        return number % len(self.times)

    def again(
        self, depth: int, states: Float[Tensor, "*batch n d"], stream: Tensor, generator: torch.Generator | None
    ) -> Problem:
        """The same from the stored time number ``depth`` on, with other states, and with noise not seen before.

        Of a residual stream, ``stream``, the direction is changed alone: it keeps its radius and what its norm does not
        see, such as the mean under LayerNorm.
        """
        if self.field.space is Space.FLAT:
            x = check_states(self.field, states, "states")
        else:  # of a residual stream, directions
            x = on_the_sphere(check_tokens(states, name="states"))
        if x.shape not in ((*self.batch, *self.start.shape[-2:]), self.start.shape):
            raise HelmscopeError(f"states has shape {tuple(x.shape)}, but the systems have {tuple(self.start.shape)}")
        index = self.time_index(depth, "depth")
        x = x.reshape(self.start.shape).to(self.start)
        if self.field.space is Space.STREAM:
            x = stream + self.field.radius(stream).unsqueeze(-1) * (x - self.field.direction(stream))
        times = self.times[index:]
        seed = RandomSource.renewed(self.seed, index, generator)
        return replace(self, start=x, times=times, origin=float(times[0]), seed=seed)


def on_the_sphere(x: Tensor) -> Tensor:
    """Tokens off the sphere by more than rounding but too little to be refused are put back; others keep their bits.

    >>> on_the_sphere(torch.tensor([[1.0, 0.0], [0.0, 1.00001]]))
    tensor([[1., 0.],
            [0., 1.]])
    """
    off = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) - 1).abs() > 16 * torch.finfo(x.dtype).eps
    return torch.where(off, retract(x), x)


def check_start(field: Field, x0: object, *, normalize: bool) -> Float[Tensor, "*batch n d"]:
    """Tokens as ``integrate`` takes them: unit vectors, or a residual stream of any radius where the field has one.

    >>> from helmscope.fields.field import as_field
    >>> check_start(as_field(torch.zeros_like), torch.tensor([[3.0, 4.0]]), normalize=True)
    tensor([[0.6000, 0.8000]])
    """
    x = check_states(field, x0, "x0", normalize=normalize)
    if field.space is not Space.SPHERE and normalize:
        x = retract(x)
    return on_the_sphere(x) if field.space is Space.SPHERE or normalize else x
