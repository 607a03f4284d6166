"""The observer that records the residual stream: direction and radius of every state, and the error of each block's
residual sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.models.sites import LEADS_TO, OF_CROSS, READ_AT, STATES_AND_WRITES, Observer, Site
from helmscope.models.topology import Kind
from helmscope.types import pluralized

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy


@dataclass(eq=False, repr=False)
class ResidualStream:
    """A residual stream over depth, stored as y = radius direction + mean 1; ``mean`` is None unless norms remove it.

    Depth counts half-layers (``Depths``): 0 is the first block's input, and each half of a layer leads to the next
    depth. Once ``hide`` was called, the directions of padding are zero vectors, and kept apart.
    """

    direction: Float[Tensor, "depth batch n d"]
    radius: Float[Tensor, "depth batch n"]
    mean: Float[Tensor, "depth batch n"] | None
    hidden: Bool[Tensor, "batch n"] | None = None
    hidden_direction: Float[Tensor, "depth hidden d"] | None = None

    def __repr__(self) -> str:
        depth, batch, n, d = self.direction.shape
        return f"<ResidualStream: {depth} depths, {pluralized(batch, 'text')} x {pluralized(n, 'token')}, width {d}>"

    @classmethod
    def empty(cls, anatomy: Anatomy, batch: int, n: int, like: Tensor) -> ResidualStream:
        """An uninitialized stream with all depths of a model, in float64 if ``like`` is, else in float32."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        depth = anatomy.depths.last + 1
        direction = torch.empty(depth, batch, n, anatomy.dim, dtype=dtype, device=like.device)
        radius = torch.empty(depth, batch, n, dtype=dtype, device=like.device)
        return cls(direction, radius, torch.empty_like(radius) if anatomy.centered else None)

    def put(self, depth: int, rows: slice, value: Float[Tensor, "rows n d"]) -> None:
        """Store a state at a depth for the texts ``rows``. A state of length 0, such as that of padding in some
        families, has no direction: (1, -1, 0, ...) / sqrt(2) is stored, with radius 0.
        """
        value = value.to(self.direction.dtype)
        if self.mean is not None:
            mean = value.mean(-1)
            self.mean[depth, rows] = mean
            value = value - mean.unsqueeze(-1)
        radius = torch.linalg.vector_norm(value, dim=-1)
        self.radius[depth, rows] = radius
        direction = self.direction[depth, rows]
        torch.div(value, radius.unsqueeze(-1), out=direction)
        if bool((radius == 0).any()):
            placeholder = torch.zeros_like(direction[0, 0])
            placeholder[0], placeholder[1] = math.sqrt(0.5), -math.sqrt(0.5)
            direction[radius == 0] = placeholder

    def hide(self, visible: Bool[Tensor, "batch n"] | None) -> None:
        """Replace the directions of the tokens that are not ``visible`` by zero vectors, which no statistic of unit
        vectors accepts, so that padding is never counted by accident. ``at`` returns their states as before.
        """
        if visible is None or bool(visible.all()) or self.hidden is not None:
            return
        self.hidden = ~visible.to(self.direction.device)
        self.hidden_direction = self.direction[:, self.hidden]
        self.direction[:, self.hidden] = 0.0

    def since(self, depth: int) -> ResidualStream:
        """The stream from a depth on."""
        mean, hidden = (None if each is None else each[depth:] for each in (self.mean, self.hidden_direction))
        return ResidualStream(self.direction[depth:], self.radius[depth:], mean, self.hidden, hidden)

    def with_hidden(self, depth: int, states: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n d"]:
        """``states``, with the directions at a depth in place of the zero vectors of padding."""
        if self.hidden is None or self.hidden_direction is None:
            return states
        directions = torch.zeros_like(self.direction[depth])
        directions[self.hidden] = self.hidden_direction[depth]
        missing = self.hidden.to(states.device) & ~states.any(-1)
        return torch.where(missing.unsqueeze(-1), directions.to(states), states)

    def at(self, depth: int) -> Float[Tensor, "batch n d"]:
        """The state at a depth, with its radius and mean."""
        state = self.radius[depth].unsqueeze(-1) * self.with_hidden(depth, self.direction[depth])
        return state if self.mean is None else state + self.mean[depth].unsqueeze(-1)


class Recorder(Observer):
    """Records every state in a ``ResidualStream``, allocated when the first state arrives. ``errors`` holds one value
    per layer: the largest error over tokens of state + write = next state, relative to the state.
    """

    def __init__(self, anatomy: Anatomy, batch: int) -> None:
        self.anatomy, self.batch = anatomy, batch
        self.stream: ResidualStream | None = None
        self.errors: Float[Tensor, " layer"] | None = None
        unneeded = set() if anatomy.post_norm else {Site.ATTENTION, Site.CROSS, Site.BEFORE_OUTPUT_NORM}
        self.sites = STATES_AND_WRITES - unneeded - (set() if anatomy.has_cross else OF_CROSS)
        self._sum = torch.empty(0, device="cpu")  # the expected value of the next state

    def recorded(self) -> tuple[ResidualStream, Float[Tensor, " layer"]]:
        """The stream and the errors of each layer, after a forward pass."""
        assert self.stream is not None
        assert self.errors is not None
        return self.stream, self.errors

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Store a state or add a write. Sums are formed at once: some families add to a write in place later."""
        post_norm = self.anatomy.layers[layer].wiring.kind is Kind.POST_NORM
        if self.stream is None or self.errors is None:
            self.stream = ResidualStream.empty(self.anatomy, self.batch, value.shape[1], value)
            self.errors = torch.zeros(len(self.anatomy.layers), dtype=torch.float64, device=value.device)
        depths = self.anatomy.depths
        if site in depths.states:
            self.stream.put(depths.at(layer, site), self.rows, value)
            self._sum = self._at_least_float32(value)
        elif site is Site.MLP or (site in LEADS_TO and post_norm):
            self._sum = self._sum + value.to(self._sum)
        elif site in READ_AT.values():
            self._compare(layer, value)
        elif site is Site.OUTPUT:
            if layer == len(self.anatomy.layers) - 1:
                self.stream.put(depths.last, self.rows, value)
            if not post_norm:
                self._compare(layer, value)

    def _at_least_float32(self, value: Tensor) -> Tensor:
        """In at least float32: sums in half precision would add their rounding error to that of the model."""
        return value.float() if value.dtype.itemsize < 4 else value

    def _compare(self, layer: int, state: Tensor) -> None:
        assert self.errors is not None
        if state is self._sum or state.data_ptr() == self._sum.data_ptr():
            return
        error = torch.linalg.vector_norm(state.to(self._sum) - self._sum, dim=-1)
        worst = (error / torch.linalg.vector_norm(self._sum, dim=-1).clamp(min=1e-30)).max()
        self.errors[layer] = torch.maximum(self.errors[layer], worst.double())  # `maximum` propagates NaN
