"""What an integration does besides stepping: events, merging, progress, and storing values at the requested times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.fields.merge import close_pairs, merge_close
from helmscope.solve.events import EventTracker

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.solve.flow import Flow
    from helmscope.types import Progress


@dataclass(eq=False)
class StepActions:
    """The events, the angle within which tokens merge (None: never), the progress callback, and the function ``read``
    of the states that is stored at the requested times (None: the states themselves).
    """

    watches: tuple[EventTracker, ...] = ()
    merge: float | None = None
    progress: Progress | None = None
    read: Callable[[Tensor], Tensor] | None = None
    _reported_at: float = field(default=-1.0, init=False)

    def stored_values(self, x: Float[Tensor, "systems n d"]) -> Tensor:
        """The values to store for states at a requested time."""
        return x if self.read is None else self.read(x)

    @cached_property
    def terminal(self) -> bool:
        """Whether some event may end a system."""
        return any(watch.terminal for watch in self.watches)

    @cached_property
    def located(self) -> bool:
        """Whether some event is located within steps."""
        return not all(watch.sampled for watch in self.watches)

    @cached_property
    def sampled(self) -> bool:
        """Whether some event is evaluated only at the requested times."""
        return any(watch.sampled for watch in self.watches)

    def locate_events(
        self,
        systems: Tensor,
        start: Float[Tensor, " active"],
        h: Float[Tensor, " active"],
        end_states: Float[Tensor, "active n d"],
        inside: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> None:
        """Locate events in a step, as ``EventTracker.locate`` does, and discard those after the end of a system."""
        for watch in self.watches:
            if not watch.sampled:
                watch.locate(systems, start, h, end_states, inside)
        if self.terminal:  # several events may happen in one step
            end = self.end_times(systems)[:, None]
            for watch in self.watches:
                times = watch.times[systems]
                watch.times[systems] = torch.where(times > end, torch.nan, times)

    def sample_events(self, systems: Tensor, at: Float[Tensor, " active"], states: Float[Tensor, "active n d"]) -> None:
        """Evaluate sampled events for the given systems, each at a requested time."""
        for watch in self.watches:
            if watch.sampled:
                watch.sample(systems, at, states)

    def end_times(self, systems: Tensor) -> Float[Tensor, " active"]:
        """The time at which a terminal event ended each of the systems; NaN if none did."""
        first = torch.full(systems.shape, torch.inf, dtype=torch.float64, device=systems.device)
        for watch in self.watches:
            if watch.terminal:
                first = torch.minimum(first, watch.times[systems].amax(-1).nan_to_num(nan=torch.inf))
        return torch.where(first.isinf(), torch.nan, first)

    def report(self, share: float) -> None:
        """Call ``progress`` with the share of the work done, at most ten times per second."""
        now = time.monotonic()
        if self.progress is not None and (share >= 1 or now - self._reported_at > 0.1):
            self._reported_at = now
            self.progress(share)

    def merge_tokens(self, flow: Flow, x: Tensor) -> tuple[Flow, Tensor, Tensor | None]:
        """Merge tokens that have met; returns the flow, the states, and a mask of the systems that changed, or None."""
        if self.merge is None:
            return flow, x, None
        weights = torch.ones_like(x[..., 0]) if flow.weights is None else flow.weights
        close = close_pairs(x, weights, self.merge)
        changed = close.triu(1).flatten(-2).any(-1)
        if not bool(changed.any()):  # as in almost every step, and finding the pairs is a third of the work
            return flow, x, None
        result = merge_close(x, weights, self.merge, close)
        unmerged = torch.arange(x.shape[-2], device=x.device).expand(x.shape[:-1])
        leader = unmerged if flow.leader is None else flow.leader
        leader = result.leader.gather(-1, leader)  # tokens that followed a leader which now follows another
        states = result.states.gather(-2, leader.unsqueeze(-1).expand_as(x))
        return replace(flow, weights=result.weights, leader=leader), states, changed
