"""Events: the first time that a condition holds for a system, located to the accuracy of the stepper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from helmscope.geometry.linkage import collapse_padding, spanning_tree
from helmscope.types import HelmscopeError, check_real, short_repr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@runtime_checkable
class Event(Protocol):
    """Interface of events: a signal (batch, n, d) -> (batch,) or (batch, m), each component of which happens when it
    first reaches 0 from below.

    An event may have two attributes, which default to False. ``terminal``: a system ends as soon as all components have
    happened to it. ``sampled``: the event is evaluated only at the requested times, once for each, and happens at the
    first of them at which its signal is at least 0; otherwise it is located within a step.
    """

    def signal(self, x: Float[Tensor, "batch n d"]) -> Tensor:
        """Negative before the event, nonnegative after it."""


@dataclass(frozen=True)
class HittingTime:
    """Event: all pairs of tokens have met, min_{i,j} <x_i, x_j> >= 1 - delta; its signal is
    delta - max |x_i - x_j|^2 / 2.

    From an orthonormal start it is the t* of ``hitting_time``. With ``terminal`` a system ends when it happens; with
    ``sampled`` it is evaluated only at the requested times (see ``integrate``). Raises ``HelmscopeError`` unless
    delta > 0.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(2, dtype=torch.float64), [4.0], events=[HittingTime(1e-3)])
    >>> round(float(run.event_times[0]), 6)  # artanh 0.999
    3.800201
    """

    delta: float
    _: KW_ONLY
    terminal: bool = False
    sampled: bool = False

    def __post_init__(self) -> None:
        check_real("delta", self.delta, above=0)
        check_options(self)

    def signal(self, x: Float[Tensor, "batch n d"]) -> Float[Tensor, " batch"]:
        """delta - max_ij (1 - <x_i, x_j>).

        >>> HittingTime(delta=0.5).signal(torch.eye(2)[None])
        tensor([-0.5000])
        """
        distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").amax((-1, -2))
        return self.delta - distance * distance / 2


@dataclass(frozen=True)
class ClusterMerge:
    """Event: clusters merge at scale ``max_angle`` (radians, single linkage); component k happens when at most k + 1
    are left.

    So component 0 is the time of the last merge, and component n - 2 that of the first. With ``terminal`` a system ends
    at its last merge; with ``sampled`` merges are detected only at the requested times (see ``integrate``). Raises
    ``HelmscopeError`` unless radius > 0.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(2, dtype=torch.float64), [4.0], events=[ClusterMerge(0.1)])
    >>> round(float(run.event_times[0][0]), 6)  # artanh cos 0.1
    2.994898
    """

    max_angle: float
    _: KW_ONLY
    terminal: bool = False
    sampled: bool = False

    def __post_init__(self) -> None:
        check_real("max_angle", self.max_angle, above=0)
        check_options(self)

    def signal(self, x: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n_minus_1"]:
        """radius minus the lengths of the spanning tree's edges, longest first.

        >>> ClusterMerge(max_angle=0.5).signal(torch.eye(2)[None])
        tensor([[-1.0708]])
        """
        return self.max_angle - spanning_tree(x).length.sort(dim=-1, descending=True).values


def check_options(event: Event) -> None:
    """Raise ``HelmscopeError`` unless ``terminal`` and ``sampled`` of an event are True or False."""
    for name in ("terminal", "sampled"):
        value = getattr(event, name, False)
        if not isinstance(value, bool):
            raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be True or False")


@dataclass(eq=False)
class EventTracker:
    """The times of one event for a batch during an integration: NaN until it happens. Events ignore padding."""

    event: Event
    mask: Bool[Tensor, "batch n"] | None
    direction: Callable[[Tensor], Tensor]
    level: Float[Tensor, "batch m"]
    times: Float[Tensor, "batch m"]
    shape: tuple[int, ...]

    @classmethod
    def start(
        cls,
        event: Event,
        x: Float[Tensor, "batch n d"],
        mask: Bool[Tensor, "batch n"] | None,
        direction: Callable[[Tensor], Tensor],
        *,
        requested: bool = True,
    ) -> EventTracker:
        """Start at the initial states. If the event holds there its time is 0, unless it is sampled and time 0 is not
        ``requested``.

        ``direction`` converts states to unit vectors.
        """
        points = direction(x)
        signal = event.signal(points if mask is None else collapse_padding(points, mask))
        if not isinstance(signal, torch.Tensor) or signal.shape[:1] != x.shape[:1]:
            name = type(event).__name__
            raise HelmscopeError(
                f"events holds a {name} whose signal is {signal!r}, but it must be a tensor (batch, ...)"
            )
        level = signal.reshape(len(x), math.prod(signal.shape[1:])).to(torch.float64)
        counts = requested or not getattr(event, "sampled", False)
        times = torch.where((level >= 0) & counts, 0.0, torch.nan).to(torch.float64)
        return cls(event, mask, direction, level, times, tuple(signal.shape[1:]))

    @property
    def sampled(self) -> bool:
        """Whether the event is evaluated only at the requested times."""
        return getattr(self.event, "sampled", False)

    @property
    def terminal(self) -> bool:
        """Whether the event ends a system; an event without components never happens."""
        return getattr(self.event, "terminal", False) and self.times.shape[1] > 0

    def sample(self, systems: Tensor, at: Float[Tensor, " active"], states: Float[Tensor, "active n d"]) -> None:
        """Evaluate a sampled event for the given systems, each at a requested time."""
        level, known = self._signal(states, systems), self.times[systems]
        self.level[systems] = level
        self.times[systems] = torch.where((level >= 0) & known.isnan(), at[:, None], known)

    def locate(
        self,
        systems: Tensor,
        start: Float[Tensor, " active"],
        h: Float[Tensor, " active"],
        end_states: Float[Tensor, "active n d"],
        inside: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> None:
        """Locate the event in an accepted step of the given systems from time ``start`` over ``h``.

        ``inside(rows, durations)`` returns the states of those rows (positions among the given systems) after part of
        the step, computed by the stepper, so that the event is located to its accuracy. None: the step is a map that
        cannot be subdivided, and events happen at its end.
        """
        before, after = self.level[systems], self._signal(end_states, systems)
        self.level[systems] = after
        rows, parts = ((after >= 0) & self.times[systems].isnan()).nonzero(as_tuple=True)
        if not len(rows):
            return
        share = torch.ones_like(h[rows])
        if inside is not None:

            def signal(share: Tensor, among: Tensor) -> Tensor:
                chosen = rows[among]
                states = inside(chosen, share * h[chosen])
                return self._signal(states, systems[chosen]).gather(1, parts[among, None])[:, 0]

            share = _root(signal, before[rows, parts], after[rows, parts])
        self.times[systems[rows], parts] = start[rows] + share * h[rows]

    def _signal(self, states: Tensor, systems: Tensor) -> Float[Tensor, "active m"]:
        points = self.direction(states.detach())
        points = points if self.mask is None else collapse_padding(points, self.mask[systems])
        return self.event.signal(points).reshape(len(points), self.level.shape[1]).to(torch.float64)


def _root(signal: Callable[[Tensor, Tensor], Tensor], low_value: Tensor, high_value: Tensor) -> Tensor:
    """The point in (0, 1] where each signal reaches 0, by Chandrupatla's method (1997): inverse quadratic interpolation
    where that is safe, otherwise bisection, so that a jump of the signal is located too.

    ``signal(points, rows)`` is that of the given rows. Returns the end of the last bracket at which it is >= 0. A row
    that has converged is not evaluated again, so that its result does not depend on how long the others take.
    """
    a, fa = torch.ones_like(high_value), high_value
    b, fb = torch.zeros_like(low_value), low_value
    share = torch.full_like(a, 0.5)
    best = torch.full_like(a, torch.nan)
    for _ in range(100):
        searching = best.isnan().nonzero().flatten()
        if not len(searching):
            break
        x = a + share * (b - a)
        fx = fa.index_copy(0, searching, signal(x[searching], searching))
        same = (fx >= 0) == (fa >= 0)
        c, fc = torch.where(same, a, b), torch.where(same, fa, fb)
        b, fb = torch.where(same, b, a), torch.where(same, fb, fa)
        a, fa = x, fx
        reached = torch.where(fa >= 0, a, b)
        least = 4 * torch.finfo(torch.float64).eps / (b - a).abs()
        best = torch.where(best.isnan() & (least >= 0.5), reached, best)
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        safe = (phi * phi < xi) & ((1 - phi) * (1 - phi) < 1 - xi)
        curved = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        share = torch.where(safe, curved, 0.5)
        share = torch.minimum(torch.maximum(share, least), 1 - least)
    return torch.where(best.isnan(), torch.where(fa >= 0, a, b), best)
