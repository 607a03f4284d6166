"""What happens beside the steps of an integration: events, merging, progress, and what is kept of the states."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.fields.merge import merge_close
from helmscope.solve.events import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.solve.flow import Flow
    from helmscope.types import Progress


@dataclass(eq=False)
class Extras:
    """Events to time, the tolerance within which tokens merge (None: never), who wants to hear of progress, and what
    is kept of the states at the asked times (None: the states themselves).
    """

    watches: tuple[Watch, ...] = ()
    merge: float | None = None
    progress: Progress | None = None
    read: Callable[[Tensor], Tensor] | None = None
    _said: float = field(default=-1.0, init=False)

    def kept(self, x: Float[Tensor, "systems n d"]) -> Tensor:
        """What is kept of the states at an asked time."""
        return x if self.read is None else self.read(x)

    @cached_property
    def terminal(self) -> bool:
        """Whether some event may end a system."""
        return any(watch.terminal for watch in self.watches)

    @cached_property
    def located(self) -> bool:
        """Whether some event is located inside steps."""
        return not all(watch.sampled for watch in self.watches)

    @cached_property
    def sampled(self) -> bool:
        """Whether some event is looked at only at the asked times."""
        return any(watch.sampled for watch in self.watches)

    def see(
        self,
        systems: Tensor,
        start: Float[Tensor, " active"],
        h: Float[Tensor, " active"],
        end_states: Float[Tensor, "active n d"],
        inside: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> None:
        """Locate events in a step, as ``Watch.see`` does. What a system did after its end does not count."""
        for watch in self.watches:
            if not watch.sampled:
                watch.see(systems, start, h, end_states, inside)
        if self.terminal:  # one step may bring several events
            end = self.ends(systems)[:, None]
            for watch in self.watches:
                times = watch.times[systems]
                watch.times[systems] = torch.where(times > end, torch.nan, times)

    def sample(self, systems: Tensor, at: Float[Tensor, " active"], states: Float[Tensor, "active n d"]) -> None:
        """Look for sampled events in the states of the given systems at an asked time of each."""
        for watch in self.watches:
            if watch.sampled:
                watch.sample(systems, at, states)

    def ends(self, systems: Tensor) -> Float[Tensor, " active"]:
        """When a terminal event ended each of the systems; NaN for those still under way."""
        first = torch.full(systems.shape, torch.inf, dtype=torch.float64, device=systems.device)
        for watch in self.watches:
            if watch.terminal:
                first = torch.minimum(first, watch.times[systems].amax(-1).nan_to_num(nan=torch.inf))
        return torch.where(first.isinf(), torch.nan, first)

    def say(self, share: float) -> None:
        """Report the share of the work done, at most ten times a second."""
        now = time.monotonic()
        if self.progress is not None and (share >= 1 or now - self._said > 0.1):
            self._said = now
            self.progress(share)

    def merged(self, flow: Flow, x: Tensor) -> tuple[Flow, Tensor, Tensor | None]:
        """Merge tokens that have met: the flow and states after it, and which systems changed (None: none did)."""
        if self.merge is None:
            return flow, x, None
        n = x.shape[-2]
        alone = torch.arange(n, device=x.device).expand(x.shape[:-1])
        weights = torch.ones_like(x[..., 0]) if flow.weights is None else flow.weights
        leader = alone if flow.leader is None else flow.leader
        result = merge_close(x, weights, self.merge)
        changed = (result.leader != alone).any(-1)
        if not bool(changed.any()):
            return flow, x, None
        leader = result.leader.gather(-1, leader)  # who followed a token that now follows another
        states = result.states.gather(-2, leader.unsqueeze(-1).expand_as(x))
        return replace(flow, weights=result.weights, leader=leader), states, changed
