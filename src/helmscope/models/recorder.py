"""The observer that writes the residual stream down: directions and lengths of every state, and how well the sums of
each block are met.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.models.topology import Kind
from helmscope.models.watch import LEADS_TO, OF_CROSS, READ_AT, STATES_AND_WRITES, Observer, Site
from helmscope.types import counted

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy


@dataclass(eq=False, repr=False)
class ResidualStream:
    """A residual stream y over depth as y = radius direction + mean 1, where ``mean`` is None unless norms remove it.

    Depth counts sub-steps of layers (``Depths``): 0 is the first block's input, and each half of a layer leads to the
    next depth.
    """

    direction: Float[Tensor, "depth batch n d"]
    radius: Float[Tensor, "depth batch n"]
    mean: Float[Tensor, "depth batch n"] | None

    def __repr__(self) -> str:
        depth, batch, n, d = self.direction.shape
        return f"<ResidualStream: {depth} depths, {counted(batch, 'text')} x {counted(n, 'token')}, width {d}>"

    @classmethod
    def empty(cls, anatomy: Anatomy, batch: int, n: int, like: Tensor) -> ResidualStream:
        """Room for all depths."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        depth = anatomy.depths.last + 1
        room = torch.empty(depth, batch, n, anatomy.dim, dtype=dtype, device=like.device)
        radius = torch.empty(depth, batch, n, dtype=dtype, device=like.device)
        return cls(room, radius, torch.empty_like(radius) if anatomy.centered else None)

    def put(self, depth: int, rows: slice, value: Float[Tensor, "rows n d"]) -> None:
        """Write a state down. One of length 0, such as padding has in some families, has no direction: (1, -1, 0, ...)
        over sqrt(2) stands for it, beside its radius 0.
        """
        value = value.to(self.direction.dtype)
        if self.mean is not None:
            mean = value.mean(-1)
            self.mean[depth, rows] = mean
            value = value - mean.unsqueeze(-1)
        radius = torch.linalg.vector_norm(value, dim=-1)
        self.radius[depth, rows] = radius
        place = self.direction[depth, rows]
        torch.div(value, radius.unsqueeze(-1), out=place)
        if bool((radius == 0).any()):
            none = torch.zeros_like(place[0, 0])
            none[0], none[1] = math.sqrt(0.5), -math.sqrt(0.5)
            place[radius == 0] = none

    def since(self, depth: int) -> ResidualStream:
        """The stream from a depth on."""
        return ResidualStream(
            self.direction[depth:], self.radius[depth:], None if self.mean is None else self.mean[depth:]
        )

    def at(self, depth: int) -> Float[Tensor, "batch n d"]:
        """The state as it is."""
        state = self.radius[depth].unsqueeze(-1) * self.direction[depth]
        return state if self.mean is None else state + self.mean[depth].unsqueeze(-1)


class Recorder(Observer):
    """Writes every state into a ``ResidualStream``, allocated at the first state; ``errors`` holds for each layer the
    largest error of its residual identities at a token, relative to the state.
    """

    def __init__(self, anatomy: Anatomy, batch: int) -> None:
        self.anatomy, self.batch = anatomy, batch
        self.stream: ResidualStream | None = None
        self.errors: Float[Tensor, " layer"] | None = None
        without = set() if anatomy.post_norm else {Site.ATTENTION, Site.CROSS, Site.CLOSE}
        self.sites = STATES_AND_WRITES - without - (set() if anatomy.has_cross else OF_CROSS)
        self._sum = torch.empty(0, device="cpu")  # what the next state to be compared should be

    def recorded(self) -> tuple[ResidualStream, Float[Tensor, " layer"]]:
        """The stream and the errors, once a forward has run."""
        assert self.stream is not None
        assert self.errors is not None
        return self.stream, self.errors

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Take in what passes. A sum is formed at once: some families add to a write in place later."""
        post_norm = self.anatomy.layers[layer].wiring.kind is Kind.POST_NORM
        if self.stream is None or self.errors is None:
            self.stream = ResidualStream.empty(self.anatomy, self.batch, value.shape[1], value)
            self.errors = torch.zeros(len(self.anatomy.layers), dtype=torch.float64, device=value.device)
        depths = self.anatomy.depths
        if site in depths.states:
            self.stream.put(depths.at(layer, site), self.rows, value)
            self._sum = self._wide(value)
        elif site is Site.MLP or (site in LEADS_TO and post_norm):
            self._sum = self._sum + value.to(self._sum)
        elif site in READ_AT.values():
            self._compare(layer, value)
        elif site is Site.OUTPUT:
            if layer == len(self.anatomy.layers) - 1:
                self.stream.put(depths.last, self.rows, value)
            if not post_norm:
                self._compare(layer, value)

    def _wide(self, value: Tensor) -> Tensor:
        """Half precision would add its rounding to that of the model."""
        return value.float() if value.dtype.itemsize < 4 else value

    def _compare(self, layer: int, found: Tensor) -> None:
        assert self.errors is not None
        if found is self._sum or found.data_ptr() == self._sum.data_ptr():
            return
        off = torch.linalg.vector_norm(found.to(self._sum) - self._sum, dim=-1)
        worst = (off / torch.linalg.vector_norm(self._sum, dim=-1).clamp(min=1e-30)).max()
        self.errors[layer] = torch.maximum(self.errors[layer], worst.double())  # which keeps a NaN
