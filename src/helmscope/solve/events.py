"""Events: when something first happens to a system, located to the accuracy of the stepper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from helmscope.geometry.linkage import spanning_tree
from helmscope.types import real_number

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@runtime_checkable
class Event(Protocol):
    """A signal (batch, n, d) -> (batch,) or (batch, m): each component happens when it first reaches 0 from below."""

    def signal(self, x: Float[Tensor, "batch n d"]) -> Tensor:
        """Below 0 before, at least 0 after."""


@dataclass(frozen=True)
class HittingTime:
    """All pairs of tokens closer than delta: min_{i,j} <x_i, x_j> >= 1 - delta, as delta - max |x_i - x_j|^2 / 2.

    From an orthonormal start it is the t* of ``hitting_time``.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> seen = integrate(SA(beta=0.0), torch.eye(2, dtype=torch.float64), [4.0], events=[HittingTime(1e-3)])
    >>> round(float(seen.event_times[0]), 6)  # artanh 0.999
    3.800201
    """

    delta: float

    def __post_init__(self) -> None:
        real_number("delta", self.delta, above=0)

    def signal(self, x: Float[Tensor, "batch n d"]) -> Float[Tensor, " batch"]:
        """delta - max_ij (1 - <x_i, x_j>)."""
        apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").amax((-1, -2))
        return self.delta - apart * apart / 2


@dataclass(frozen=True)
class ClusterMerge:
    """Clusters merge at scale ``radius`` (radians, single linkage): component k happens when at most k + 1 are left.

    So component 0 is the time of the last merge, and the component n - 2 that of the first.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> seen = integrate(SA(beta=0.0), torch.eye(2, dtype=torch.float64), [4.0], events=[ClusterMerge(0.1)])
    >>> round(float(seen.event_times[0][0]), 6)  # artanh cos 0.1
    2.994898
    """

    radius: float

    def __post_init__(self) -> None:
        real_number("radius", self.radius, above=0)

    def signal(self, x: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n_minus_1"]:
        """radius minus the lengths of the spanning tree's edges, longest first."""
        return self.radius - spanning_tree(x).length.sort(dim=-1, descending=True).values


@dataclass(eq=False)
class Watch:
    """Event times of a batch as it runs: NaN until an event happens."""

    event: Event
    level: Float[Tensor, "batch m"]
    times: Float[Tensor, "batch m"]
    shape: tuple[int, ...]

    @classmethod
    def start(cls, event: Event, x: Float[Tensor, "batch n d"]) -> Watch:
        """Events that are true at the start have time 0."""
        signal = event.signal(x)
        level = signal.reshape(len(x), -1).to(torch.float64)
        times = torch.where(level >= 0, 0.0, torch.nan).to(torch.float64)
        return cls(event, level, times, tuple(signal.shape[1:]))

    def see(
        self,
        systems: Tensor,
        start: Float[Tensor, " active"],
        h: Float[Tensor, " active"],
        end_states: Float[Tensor, "active n d"],
        inside: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Take in an accepted step of the given systems from time ``start`` over ``h``.

        ``inside(rows, durations)`` gives the states of those rows (places among the active systems) after part of the
        step: it is how an event is located, by the stepper itself and so with its accuracy.
        """
        before = self.level[systems]
        after = self.event.signal(end_states).reshape(len(systems), -1).to(torch.float64)
        self.level[systems] = after
        rows, parts = ((after >= 0) & self.times[systems].isnan()).nonzero(as_tuple=True)
        if not len(rows):
            return

        def signal(share: Tensor) -> Tensor:
            states = inside(rows, share * h[rows])
            return self.event.signal(states).reshape(len(rows), -1).to(torch.float64).gather(1, parts[:, None])[:, 0]

        share = _root(signal, before[rows, parts], after[rows, parts])
        self.times[systems[rows], parts] = start[rows] + share * h[rows]


def _root(signal: Callable[[Tensor], Tensor], low_value: Tensor, high_value: Tensor) -> Tensor:
    """Where in (0, 1] each signal first reaches 0, by the Illinois variant of the false position.

    A row that has converged is frozen: its result must not depend on how long the others take.
    """
    low, high = torch.zeros_like(low_value), torch.ones_like(high_value)
    best = torch.where(high_value == 0, high, torch.nan)
    side = torch.zeros_like(low)
    guess = high
    for _ in range(60):
        open_rows = best.isnan()
        if not bool(open_rows.any()):
            break
        previous, guess = guess, high - high_value * (high - low) / (high_value - low_value)
        value = signal(guess)
        settled = open_rows & (((guess - previous).abs() <= 1e-15) | (value == 0))
        best = torch.where(settled, guess, best)
        after = value >= 0
        # halving the value that was kept twice pulls the next guess to its side
        low_value = torch.where(after, torch.where(side > 0, low_value / 2, low_value), value)
        high_value = torch.where(after, value, torch.where(side < 0, high_value / 2, high_value))
        low, high = torch.where(after, low, guess), torch.where(after, guess, high)
        side = torch.where(after, 1.0, -1.0)
    return torch.where(best.isnan(), guess, best)
