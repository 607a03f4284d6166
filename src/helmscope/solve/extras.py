"""What happens beside the steps of an integration: events, merging, progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from helmscope.fields.merge import merge_close
from helmscope.solve.events import Watch

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow
    from helmscope.types import Progress


@dataclass(eq=False)
class Extras:
    """Events to time, the tolerance within which tokens merge (None: never), and who wants to hear of progress."""

    watches: tuple[Watch, ...] = ()
    merge: float | None = None
    progress: Progress | None = None
    _said: float = field(default=-1.0, init=False)

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
