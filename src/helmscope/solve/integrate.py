"""``integrate``: from a field and a start to a Simulation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import Attention
from helmscope.fields.field import Field, TokenField, check_weights
from helmscope.geometry.sphere import check_tokens
from helmscope.solve.adaptive import run_adaptive
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.events import Event, Watch
from helmscope.solve.extras import Extras, Progress
from helmscope.solve.fixed import run_fixed
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
    """Everything about an integration except where it starts and when it is looked at."""

    field: Field
    stepper: Stepper
    events: tuple[Event, ...]
    merge: float | None
    weights: Float[Tensor, "systems n"] | None
    mask: Bool[Tensor, "systems n"] | None
    batch: tuple[int, ...]

    def run(self, x0: Tensor, times: Tensor, *, origin: float = 0.0, progress: Progress | None = None) -> Simulation:
        """Integrate from checked tokens; the flow is autonomous, so only times since ``origin`` matter."""
        x = x0.reshape(-1, *x0.shape[-2:])
        watches = tuple(Watch.start(event, x.detach()) for event in self.events)
        extras = Extras(watches, self.merge, progress)
        clock = (times - origin).tolist()
        flow = Flow(self.field, self.weights)
        if isinstance(self.stepper, AdaptiveStepper):
            states, outcome = run_adaptive(flow, x, clock, self.stepper, extras)
        else:
            states, outcome = run_fixed(flow, x, clock, self.stepper, extras)
        if not outcome.ok:
            logger.warning("integration stopped early: %s", outcome)
        extras.say(1.0)
        trajectory = Trajectory(times, states, mask=self.mask, outcome=outcome)
        found = tuple((origin + w.times).reshape((*self.batch, *w.shape)) for w in watches)
        return Simulation(trajectory, self, found)


def integrate(
    field: Field,
    x0: Float[Tensor, "*batch n d"],
    times: Sequence[float],
    *,
    stepper: Stepper | None = None,
    events: Sequence[Event] = (),
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
    ``events`` are timed. ``progress`` is called with the share of the work done. A gradient with respect to x0 goes
    through the steps taken.

    A system's result does not depend, to the bit on a CPU, on the batch it runs in.

    >>> from helmscope.fields.attention import SA
    >>> x0 = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> final = integrate(SA(beta=0.0), x0, times=[1.0]).states[-1]
    >>> round(float(final[0] @ final[1]), 9)  # tanh 1
    0.761594156
    """
    x = check_tokens(x0, name="x0", normalize=normalize)
    clock = torch.tensor(increasing_times(times), dtype=torch.float64, device=x.device)
    stepper = DormandPrince() if stepper is None else stepper
    if not isinstance(stepper, AdaptiveStepper | FixedStepper):
        raise HelmscopeError(f"stepper is {stepper!r}, but it must be a stepper such as DormandPrince() or RK4(h=0.01)")
    if not callable(field):
        raise HelmscopeError(f"field is {field!r}, but it must be a callable that gives every token its velocity")
    for event in events:
        if not isinstance(event, Event):
            raise HelmscopeError(
                f"events holds {event!r}, but an event has a signal(x) method, such as HittingTime(1e-3)"
            )
    if isinstance(field, Attention):
        field.check_size(x)
    combined = check_weights(x, weights, mask)
    if combined is not None and not isinstance(field, TokenField):
        raise HelmscopeError(f"weights or mask is given, but the field {type(field).__name__} knows no token weights")
    if merge is not None:
        merge = real_number("merge", merge, at_least=0)
        if not (isinstance(field, TokenField) and field.exchangeable):
            raise HelmscopeError(
                f"merge is {merge:g}, but tokens of {type(field).__name__} cannot be merged: that needs attention "
                "without causal mask and bias"
            )
    rows = None if combined is None else combined.reshape(-1, x.shape[-2])
    padding = None if mask is None else mask.expand(x.shape[:-1]).reshape(-1, x.shape[-2])
    problem = Problem(field, stepper, tuple(events), merge, rows, padding, tuple(x.shape[:-2]))
    return problem.run(x, clock, progress=progress)
