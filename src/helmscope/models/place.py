"""Put a state into the stream: what ``resume`` and the lens do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.models.topology import Kind
from helmscope.models.watch import Site, Watcher, brief

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.recorder import Stream

HALVES = {Site.INPUT: 0, Site.MIDDLE: 1, Site.OUTPUT: 2}


@dataclass(eq=False, repr=False)
class Frozen:
    """Tokens that stay where they were: ``mask`` says which, ``stream`` where, from the depth ``first`` on."""

    mask: Bool[Tensor, "batch n"]
    stream: Stream
    first: int

    def __repr__(self) -> str:
        return f"<{int(self.mask.sum())} tokens of {brief(self.mask)}>"


@dataclass(eq=False, repr=False)
class Place(Watcher):
    """The state at one depth is ``raw``; at later depths frozen tokens are put back to where they were."""

    depth: int
    raw: Float[Tensor, "batch n d"]
    anatomy: Anatomy = field(repr=False)
    frozen: Frozen | None = None

    def __post_init__(self) -> None:
        last = self.depth == 2 * len(self.anatomy.layers) or self.frozen is not None
        self.sites = frozenset({Site.INPUT, Site.MIDDLE, Site.OUTPUT} if last else {Site.INPUT, Site.MIDDLE})

    @property
    def skip(self) -> int:
        """How many layers before it make no difference: all, but for a virtual mid state, beside which the MLP still
        reads the block's input.
        """
        layer = self.depth // 2
        virtual = self.depth % 2 and self.anatomy.layers[layer].wiring.kind is Kind.PARALLEL
        return 0 if virtual else layer

    def state(self, site: Site, layer: int, value: Tensor) -> Tensor | None:
        """The new state at its depth, the old one of frozen tokens beyond."""
        if site is Site.OUTPUT and layer < len(self.anatomy.layers) - 1:  # the next block's input is the same state
            return None
        depth = 2 * layer + HALVES[site]
        if depth == self.depth:
            return self.raw[self.rows].to(value)
        if self.frozen is None or depth < self.depth:
            return None
        old = self.frozen.stream.at(depth - self.frozen.first)[self.rows].to(value)
        return torch.where(self.frozen.mask[self.rows].unsqueeze(-1).to(value.device), old, value)
