"""``integrate``: from a field and a start to a Simulation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import Attention
from helmscope.fields.field import Field, TokenField, check_weights
from helmscope.geometry.sphere import check_tokens, retract
from helmscope.solve.adaptive import run_adaptive
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.events import Event, Watch
from helmscope.solve.extras import Extras, Progress
from helmscope.solve.fixed import check_grid, run_fixed
from helmscope.solve.flow import Flow
from helmscope.solve.simulation import Simulation
from helmscope.solve.stepper import AdaptiveStepper, FixedStepper, Stepper
from helmscope.types import HelmscopeError, Trajectory, increasing_times, real_number

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Problem:
    """An integration that has passed all checks and waits to be run; made by ``pose``."""

    field: Field
    start: Float[Tensor, "systems n d"]
    times: Float[Tensor, " time"]
    stepper: Stepper
    events: tuple[Event, ...]
    merge: float | None
    weights: Float[Tensor, "systems n"] | None
    mask: Bool[Tensor, "systems n"] | None
    batch: tuple[int, ...]
    origin: float = 0.0  # the time of the start; the flow is autonomous, so only times since then matter

    def run(self, progress: Progress | None = None) -> Simulation:
        """Integrate."""
        watches = tuple(Watch.start(event, self.start.detach(), self.mask) for event in self.events)
        extras = Extras(watches, self.merge, progress)
        clock = (self.times - self.origin).tolist()
        flow = Flow(self.field, self.weights)
        if isinstance(self.stepper, AdaptiveStepper):
            states, outcome = run_adaptive(flow, self.start, clock, self.stepper, extras)
        else:
            states, outcome = run_fixed(flow, self.start, clock, self.stepper, extras)
        outcome = replace(outcome, times=tuple(self.origin + t for t in outcome.times))
        if not outcome.ok:
            logger.warning("integration stopped early: %s", outcome)
        extras.say(1.0)
        trajectory = Trajectory(self.times, states, mask=self.mask, outcome=outcome)
        found = tuple((self.origin + w.times).reshape((*self.batch, *w.shape)) for w in watches)
        return Simulation(trajectory, self, found)

    def time_index(self, step: object) -> int:
        """``step`` as an index into the times; negative ones count from the end."""
        if isinstance(step, bool) or not isinstance(step, int) or not -len(self.times) <= step < len(self.times):
            raise HelmscopeError(f"step is {step!r}, but the run has the time indices 0 to {len(self.times) - 1}")
        return step % len(self.times)

    def again(self, step: int, states: Float[Tensor, "*batch n d"]) -> Problem:
        """The same from time index ``step`` on, with other states."""
        x = _on_the_sphere(check_tokens(states, name="states"))
        if x.shape not in ((*self.batch, *self.start.shape[-2:]), self.start.shape):
            raise HelmscopeError(f"states has shape {tuple(x.shape)}, but the systems have {tuple(self.start.shape)}")
        times = self.times[self.time_index(step) :]
        return replace(self, start=x.reshape(self.start.shape).to(self.start), times=times, origin=float(times[0]))


def integrate(
    field: Field,
    x0: Float[Tensor, "*batch n d"],
    times: Sequence[float],
    *,
    stepper: Stepper | None = None,
    events: Iterable[Event] = (),
    merge: float | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
    normalize: bool = False,
    progress: Progress | None = None,
) -> Simulation:
    """Carry tokens by x' = f(x) on the sphere from time 0 and look at them at ``times``.

    ``stepper`` is ``DormandPrince()`` where None: adaptive, local error 1e-9 in float64. A system that cannot reach its
    last time keeps NaN from there on, and ``outcome`` says why and what would help. ``merge`` carries tokens closer
    than so many radians as one weighted token, which frees stiff flows from the fast rates inside clusters (see
    ``merge_tokens`` for when that is right). ``weights`` and ``mask`` make the cloud a weighted measure with padding.
    ``events`` are timed, in the ``event_times`` of the result. ``progress`` is called with the share of the work done.
    A gradient with respect to x0 goes through the steps taken.

    A system's result does not depend, to the bit on a CPU, on the batch it runs in.

    >>> from helmscope.fields.attention import SA
    >>> x0 = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> final = integrate(SA(beta=0.0), x0, times=[1.0]).states[-1]
    >>> round(float(final[0] @ final[1]), 9)  # tanh 1
    0.761594156
    """
    if progress is not None and not callable(progress):
        raise HelmscopeError(f"progress is {progress!r}, but it must be a callable that takes the share of work done")
    problem = pose(
        field,
        x0,
        times,
        stepper=stepper,
        events=events,
        merge=merge,
        weights=weights,
        mask=mask,
        normalize=normalize,
    )
    return problem.run(progress)


def pose(
    field: Field,
    x0: Float[Tensor, "*batch n d"],
    times: Sequence[float],
    *,
    stepper: Stepper | None = None,
    events: Iterable[Event] = (),
    merge: float | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
    normalize: bool = False,
) -> Problem:
    """Everything ``integrate`` refuses is refused here, before any work is done; the arguments are the same.

    >>> from helmscope.fields.attention import SA
    >>> pose(SA(beta=1.0), torch.eye(2), times=[1.0]).run().states.shape
    torch.Size([1, 2, 2])
    """
    if not isinstance(normalize, bool):
        raise HelmscopeError(f"normalize is {normalize!r}, but it must be True or False")
    x = _on_the_sphere(check_tokens(x0, name="x0", normalize=normalize))
    clock = increasing_times(times)
    stepper = DormandPrince() if stepper is None else stepper
    if not isinstance(stepper, AdaptiveStepper | FixedStepper):
        raise HelmscopeError(f"stepper is {stepper!r}, but it must be a stepper such as DormandPrince() or RK4(h=0.01)")
    if isinstance(stepper, FixedStepper):
        check_grid(clock, stepper)
    events = _listed(events)
    for event in events:
        if isinstance(event, type) or not isinstance(event, Event):
            raise HelmscopeError(f"events holds {event!r}, but an event has a signal(x), such as HittingTime(1e-3)")
    combined = check_weights(x, weights, mask)
    _check_field(field, x, weighted=combined is not None, merge=merge)
    return Problem(
        field,
        x.reshape(-1, *x.shape[-2:]) if x.numel() else x.reshape(0, *x.shape[-2:]),
        torch.tensor(clock, dtype=torch.float64, device=x.device),
        stepper,
        events,
        merge,
        None if combined is None else combined.reshape(-1, x.shape[-2]),
        None if mask is None else mask.expand(x.shape[:-1]).reshape(-1, x.shape[-2]),
        tuple(x.shape[:-2]),
    )


def _listed(events: Iterable[Event]) -> tuple[Event, ...]:
    try:
        return tuple(events)
    except TypeError:
        raise HelmscopeError(
            f"events is {events!r}, but it must be a list of events, such as [HittingTime(1e-3)]"
        ) from None


def _on_the_sphere(x: Tensor) -> Tensor:
    """Tokens off the sphere by more than rounding but too little to be refused are put back; others keep their bits."""
    off = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) - 1).abs() > 16 * torch.finfo(x.dtype).eps
    return torch.where(off, retract(x), x)


def _check_field(field: object, x: Tensor, *, weighted: bool, merge: float | None) -> None:
    """Refuse a field that cannot do what is asked of it."""
    name = type(field).__name__
    if isinstance(field, type) or not callable(field):
        raise HelmscopeError(
            f"field is {field!r}, but it must be a field such as SA(beta=4.0): tokens in, velocities out"
        )
    if isinstance(field, Attention):
        field.check_size(x)
    elif not isinstance(field, TokenField):
        with torch.no_grad():
            velocity = field(x)
        if not isinstance(velocity, torch.Tensor) or velocity.shape != x.shape:
            given = tuple(velocity.shape) if isinstance(velocity, torch.Tensor) else type(velocity).__name__
            raise HelmscopeError(
                f"field gives {given} for tokens of shape {tuple(x.shape)}, but a velocity has their shape"
            )
    if weighted and not isinstance(field, TokenField):
        raise HelmscopeError(f"weights or mask is given, but the field {name} knows no token weights")
    if merge is None:
        return
    if real_number("merge", merge, at_least=0) > 0.5:
        raise HelmscopeError(f"merge is {merge:g}, but tokens that far apart have not met: take at most 0.5 radians")
    if not (isinstance(field, TokenField) and field.exchangeable):
        raise HelmscopeError(
            f"merge is {merge:g}, but merging needs attention without causal mask and bias, not this {name}"
        )
