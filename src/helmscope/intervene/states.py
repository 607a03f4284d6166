"""Edits of states and writes (Site.INPUT, ATTENTION, MIDDLE, MLP, OUTPUT, and CROSS and CROSS_MIDDLE of a decoder):
``Ablate`` makes them 0, ``Replace`` another value, ``Add`` adds one, ``Patch`` takes them from another recording.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.intervene.edit import SiteEdit
from helmscope.models.recording import Recording
from helmscope.models.watch import EDITABLE_STATES, LEADS_TO, Site
from helmscope.types import HelmscopeError, counted

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.watch import Context


@dataclass(frozen=True, eq=False, repr=False)
class StateEdit(SiteEdit):
    """An edit of a state or a write, at some tokens: ``tokens`` (batch, n), all where None."""

    allowed = EDITABLE_STATES
    layers: Sequence[int] | None = None
    site: Site = Site.MLP
    tokens: Bool[Tensor, "batch n"] | None = None

    def new(self, value: Tensor, context: Context) -> Tensor:
        """The changed value, at the tokens that are meant."""
        changed = self.changed(value, context)
        if self.tokens is None:
            return changed
        return torch.where(mask_rows("tokens", self.tokens, context, value).unsqueeze(-1), changed, value)

    @abstractmethod
    def changed(self, value: Tensor, context: Context) -> Tensor:
        """What takes the place of a value."""


@dataclass(frozen=True, eq=False, repr=False)
class Ablate(StateEdit):
    """A write is 0, so that the half-layer does nothing (post-norm: but its norm); a state is 0.

    >>> Ablate([3], site=Site.ATTENTION)
    Ablate(layers=[3], site=Site.ATTENTION)
    """

    def changed(self, value: Tensor, context: Context) -> Tensor:
        """0."""
        return torch.zeros_like(value)


@dataclass(frozen=True, eq=False, repr=False)
class Replace(StateEdit):
    """A state or write becomes ``value``, which broadcasts to (batch, n, d).

    >>> from helmscope.models.watch import Chunk
    >>> Replace(site=Site.INPUT, value=2.0).new(torch.zeros(1, 1, 2), Chunk.whole(1).at(Site.INPUT, layer=0))
    tensor([[[2., 2.]]])
    """

    value: Float[Tensor, ...] | float = 0.0

    def changed(self, value: Tensor, context: Context) -> Tensor:
        """The given value."""
        return _value_rows(self.value, context, value)


@dataclass(frozen=True, eq=False, repr=False)
class Add(StateEdit):
    """``value``, which broadcasts to (batch, n, d), is added to a state or write: steering by a vector.

    Its gradient is that of what ``recording.under(...).logits(gradients=True)`` gives.

    >>> from helmscope.models.watch import Chunk
    >>> Add(value=torch.tensor([1.0, 0.0])).new(torch.ones(1, 1, 2), Chunk.whole(1).at(Site.MLP, layer=0))
    tensor([[[2., 1.]]])
    """

    value: Float[Tensor, ...] | float = 0.0

    def changed(self, value: Tensor, context: Context) -> Tensor:
        """The sum."""
        return value + _value_rows(self.value, context, value)


@dataclass(frozen=True, eq=False, repr=False)
class Patch(StateEdit):
    """States or writes are those of another recording of as many tokens; writes if it kept them, ``Keep.WRITES``.

    >>> Patch([1], site=Site.MIDDLE).layers
    (1,)
    """

    source: Recording | None = None

    def check(self, anatomy: Anatomy) -> None:
        """Refuse a source of another size, one that begins later, or one that has not kept what is asked of it."""
        super().check(anatomy)
        if not isinstance(self.source, Recording):
            raise HelmscopeError(f"source is a {type(self.source).__name__}, but a patch comes from a Recording")
        if self.site in LEADS_TO and f"{self.site.value} write" not in self.source.kept:
            raise HelmscopeError(f"site is {self.site!r}, but source kept no writes: record it with keep=Keep.WRITES")
        layers, depths = len(self.source.anatomy.layers), self.source.anatomy.depths
        if depths != anatomy.depths or self.source.anatomy.dim != anatomy.dim:
            steps = "" if depths.steps == anatomy.depths.steps else f" of {depths.steps} sub-steps"
            others = "" if not steps else f" of {anatomy.depths.steps} sub-steps"
            raise HelmscopeError(
                f"source has {counted(layers, 'layer')}{steps} of width {self.source.anatomy.dim}, but the model has "
                f"{len(anatomy.layers)}{others} of width {anatomy.dim}"
            )
        for layer in filter(self.acts, range(layers)):
            depth = self.source.first if self.site in LEADS_TO else depths.at(layer, self.site)
            if depth < self.source.first:
                raise HelmscopeError(f"source begins at depth {self.source.first}, but layer {layer} asks for {depth}")

    def changed(self, value: Tensor, context: Context) -> Tensor:
        """The other recording's state or write."""
        assert self.source is not None
        if self.site in LEADS_TO:
            state = self.source.kept[f"{self.site.value} write"][context.layer][context.rows]
        else:
            depth = self.source.anatomy.depths.at(context.layer, self.site)
            state = self.source.stream(depth=depth)[context.rows]
        if state.shape != value.shape or len(self.source.batch) != context.texts:
            raise HelmscopeError(f"source has states {tuple(state.shape)}, but the model has {tuple(value.shape)}")
        return state.to(value)


def mask_rows(name: str, mask: Bool[Tensor, "batch n"], context: Context, like: Tensor) -> Bool[Tensor, "rows n"]:
    """The part of a mask over the whole batch that belongs to the texts under way, which are ``like``'s (rows, n)."""
    part = mask[context.rows].to(like.device) if isinstance(mask, torch.Tensor) else torch.empty(0)
    if part.shape != like.shape[:2] or len(mask) != context.texts or part.dtype != torch.bool:
        shown = f"of {mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        wanted = f"it must be a tensor of bool of shape ({context.texts}, {like.shape[1]})"
        raise HelmscopeError(f"{name} is {shown}, but {wanted}")
    return part


def _value_rows(value: Tensor | float, context: Context, like: Tensor) -> Tensor:
    """A value for the texts under way: it broadcasts to them, or has a row for each text of the batch."""
    try:
        tensor = torch.as_tensor(value).to(like)
        by_text = tensor.ndim == 3 and len(tensor) == context.texts
        return (tensor[context.rows] if by_text else tensor).expand_as(like)
    except (RuntimeError, TypeError) as error:
        shown = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)[:40]
        wanted = f"it must broadcast to states of shape {(context.texts, *like.shape[1:])}"
        raise HelmscopeError(f"value is {shown}, but {wanted}") from error
