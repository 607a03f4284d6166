"""Edits that put a state into the residual stream, for ``resume``, the lens and runs that begin at a later layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.models.sites import AbstractEdit, Site, short_description
from helmscope.models.topology import Kind
from helmscope.types import HelmscopeError, pluralized, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.recorder import ResidualStream
    from helmscope.models.sites import EditContext


@dataclass(frozen=True, eq=False, repr=False)
class FrozenTokens:
    """Tokens that keep their recorded states: those where ``mask`` is True keep the states in ``stream``, which begins
    at depth ``first``.
    """

    mask: Bool[Tensor, "batch n"]
    stream: ResidualStream
    first: int

    def __repr__(self) -> str:
        return f"<{pluralized(int(self.mask.sum()), 'token')} of {short_description(self.mask)}>"


@dataclass(frozen=True, eq=False, repr=False)
class PutState(AbstractEdit):
    """Replace the state at one depth by ``states``, or with radius and mean by ``radius states + mean 1``; at later
    depths, reset frozen tokens to their recorded states.

    The sum is computed in every forward pass, so that each has its own autograd graph from ``states`` on.
    """

    depth: int
    states: Float[Tensor, "batch n d"]
    anatomy: Anatomy = field(repr=False)
    frozen: FrozenTokens | None = None
    radius: Float[Tensor, "batch n"] | None = field(repr=False, default=None)
    mean: Float[Tensor, "batch n"] | None = field(repr=False, default=None)

    @property
    def sites(self) -> frozenset[Site]:
        """The sites of states; the output of the last block only if it is needed."""
        depths = self.anatomy.depths
        last = self.depth == depths.last or self.frozen is not None
        return frozenset({*depths.states, Site.OUTPUT} if last else depths.states)

    @property
    def skip(self) -> int:
        """All layers before the depth need not run, except for a virtual middle state: the MLP of that layer reads the
        block's input.
        """
        layers, depths = self.anatomy.layers, self.anatomy.depths
        if self.depth == depths.last:
            return len(layers)
        layer, site = depths.site(self.depth)
        virtual = site is Site.MIDDLE and layers[layer].wiring.kind is Kind.PARALLEL
        return 0 if virtual else layer

    def new(self, value: Tensor, context: EditContext) -> Tensor | None:
        """The new state at its depth; after it, the recorded states of frozen tokens."""
        site, layer, rows = context.site, context.layer, context.rows
        if site is Site.OUTPUT and layer < len(self.anatomy.layers) - 1:  # the next block's input is the same state
            return None
        depth = self.anatomy.depths.at(layer, site)
        if depth == self.depth:
            return self._state(rows).to(value)
        if self.frozen is None or depth < self.depth:
            return None
        recorded = self.frozen.stream.at(depth - self.frozen.first)[rows].to(value)
        return torch.where(self.frozen.mask[rows].unsqueeze(-1).to(value.device), recorded, value)

    def _state(self, rows: slice) -> Tensor:
        state = self.states[rows]
        if self.radius is not None:
            state = self.radius[rows].unsqueeze(-1) * state.to(self.radius)
        return state if self.mean is None else state + self.mean[rows].unsqueeze(-1)


@dataclass(frozen=True, eq=False, repr=False)
class PutInput(AbstractEdit):
    """Replace the input of a layer by ``state`` without any arithmetic, for the texts ``rows``: a forward pass that
    begins there agrees bit for bit with one that runs all layers before it.
    """

    layer: int
    state: Float[Tensor, "rows n d"]
    rows: slice

    @property
    def sites(self) -> frozenset[Site]:
        """The input of a block."""
        return frozenset({Site.INPUT})

    @property
    def skip(self) -> int:
        """All layers before this one need not run."""
        return self.layer

    def acts(self, layer: int) -> bool:
        """Whether ``layer`` is the one whose input is replaced."""
        return layer == self.layer

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """The rows of the state for the current texts."""
        begin = context.rows.start - self.rows.start
        return self.state[begin : begin + len(value)]


def check_states(states: Tensor, like: Tensor, frozen: Tensor | None, hidden: Tensor | None) -> None:
    """Raise HelmscopeError unless ``states`` are unit vectors of the shape of ``like``, or zero vectors at ``hidden``
    tokens, and ``frozen`` is None or a mask of its tokens.
    """
    if not isinstance(states, torch.Tensor) or states.shape != like.shape:
        shown = tuple(states.shape) if isinstance(states, torch.Tensor) else type_with_article(states)
        raise HelmscopeError(f"states is {shown}, but it must be a tensor of shape {tuple(like.shape)}")
    length = torch.linalg.vector_norm(states.double(), dim=-1)
    good = (length - 1).abs() <= 1e-3
    if hidden is not None:
        good = good | ((length == 0) & hidden.to(length.device))
    if not bool(good.all()):
        text, token = (int(index) for index in (~good).nonzero()[0])
        raise HelmscopeError(
            f"states has a vector of length {float(length[text, token]):g} (token {token} of text {text}), but "
            "directions are unit vectors, and only padding may be 0"
        )
    if frozen is not None and (not isinstance(frozen, torch.Tensor) or frozen.shape != like.shape[:2]):
        shown = tuple(frozen.shape) if isinstance(frozen, torch.Tensor) else type_with_article(frozen)
        raise HelmscopeError(f"frozen is {shown}, but it must be a bool tensor of shape {tuple(like.shape[:2])}")
