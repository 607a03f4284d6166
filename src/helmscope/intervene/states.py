"""Edits of states and writes (Site.INPUT, ATTENTION, MIDDLE, MLP, OUTPUT, and CROSS and CROSS_MIDDLE of a decoder):
``Ablate`` sets them to 0, ``Replace`` to a given value, ``Patch`` to those of another recording, and ``Add`` adds a
value.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.intervene.edit import SiteEdit
from helmscope.models.names import Layers
from helmscope.models.recording import Recording
from helmscope.models.sites import EDITABLE_STATES, LEADS_TO, Site
from helmscope.types import HelmscopeError, pluralized, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.sites import EditContext


@dataclass(frozen=True, eq=False, repr=False)
class StateEdit(SiteEdit):
    """Base of the edits of a state or a write, at the tokens where ``tokens`` (batch, n) is True; None means all."""

    allowed = EDITABLE_STATES
    layers: Layers | None = None
    site: Site = Site.MLP
    tokens: Bool[Tensor, "batch n"] | None = None

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """The value, changed at the chosen tokens."""
        changed = self.changed(value, context)
        if self.tokens is None:
            return changed
        return torch.where(mask_rows("tokens", self.tokens, context, value).unsqueeze(-1), changed, value)

    @abstractmethod
    def changed(self, value: Tensor, context: EditContext) -> Tensor:
        """The value that replaces the old one, for all tokens."""


@dataclass(frozen=True, eq=False, repr=False)
class Ablate(StateEdit):
    """Set a state or a write to 0. Without its write a half-layer does nothing (in post-norm models, only its norm).

    >>> Ablate([3], site=Site.ATTENTION)
    Ablate(layers=[3], site=Site.ATTENTION)
    """

    def changed(self, value: Tensor, context: EditContext) -> Tensor:
        """Zeros."""
        return torch.zeros_like(value)


@dataclass(frozen=True, eq=False, repr=False)
class Replace(StateEdit):
    """Replace a state or write by ``value``, which broadcasts to (batch, n, d).

    >>> from helmscope.models.sites import Chunk
    >>> Replace(site=Site.INPUT, value=2.0).new(torch.zeros(1, 1, 2), Chunk.whole(1).at(Site.INPUT, layer=0))
    tensor([[[2., 2.]]])
    """

    value: Float[Tensor, ...] | float = 0.0

    def changed(self, value: Tensor, context: EditContext) -> Tensor:
        """The given value."""
        return _value_rows(self.value, context, value)


@dataclass(frozen=True, eq=False, repr=False)
class Add(StateEdit):
    """Add ``value``, which broadcasts to (batch, n, d), to a state or write: steering by a vector.

    ``recording.under(...).logits(gradients=True)`` is differentiable with respect to ``value``.

    >>> from helmscope.models.sites import Chunk
    >>> Add(value=torch.tensor([1.0, 0.0])).new(torch.ones(1, 1, 2), Chunk.whole(1).at(Site.MLP, layer=0))
    tensor([[[2., 1.]]])
    """

    value: Float[Tensor, ...] | float = 0.0

    def changed(self, value: Tensor, context: EditContext) -> Tensor:
        """The sum."""
        return value + _value_rows(self.value, context, value)


@dataclass(frozen=True, eq=False, repr=False)
class Patch(StateEdit):
    """Replace states or writes by those of another recording with the same number of tokens. To patch writes, make that
    recording with ``keep=KeptTensors.WRITES``.

    >>> Patch([1], site=Site.MIDDLE).layers
    (1,)
    """

    source: Recording | None = None

    def check(self, anatomy: Anatomy) -> None:
        """Raise ``HelmscopeError`` if the source has another size, starts at a later depth, or kept no writes."""
        super().check(anatomy)
        if not isinstance(self.source, Recording):
            raise HelmscopeError(f"source is {type_with_article(self.source)}, but it must be a Recording")
        if self.site in LEADS_TO and f"{self.site.value} write" not in self.source.kept:
            raise HelmscopeError(
                f"site is {self.site!r}, but source kept no writes: record it with keep=KeptTensors.WRITES"
            )
        layers, depths = len(self.source.anatomy.layers), self.source.anatomy.depths
        if depths != anatomy.depths or self.source.anatomy.dim != anatomy.dim:
            steps = "" if depths.steps == anatomy.depths.steps else f" of {depths.steps} sub-steps"
            others = "" if not steps else f" of {anatomy.depths.steps} sub-steps"
            raise HelmscopeError(
                f"source has {pluralized(layers, 'layer')}{steps} of width {self.source.anatomy.dim}, but the model "
                f"has {len(anatomy.layers)}{others} of width {anatomy.dim}"
            )
        for layer in filter(self.acts, range(layers)):
            depth = self.source.first if self.site in LEADS_TO else depths.at(layer, self.site)
            if depth < self.source.first:
                raise HelmscopeError(f"source begins at depth {self.source.first}, but layer {layer} needs {depth}")

    def changed(self, value: Tensor, context: EditContext) -> Tensor:
        """The other recording's state or write."""
        assert self.source is not None
        if self.site in LEADS_TO:
            state = self.source.kept[f"{self.site.value} write"][context.layer][context.rows]
        else:
            depth = self.source.anatomy.depths.at(context.layer, self.site)
            state = self.source.residual_stream(depth=depth)[context.rows]
        if state.shape != value.shape or len(self.source.batch) != context.texts:
            raise HelmscopeError(f"source has states {tuple(state.shape)}, but the model has {tuple(value.shape)}")
        return state.to(value)


def mask_rows(name: str, mask: Bool[Tensor, "batch n"], context: EditContext, like: Tensor) -> Bool[Tensor, "rows n"]:
    """The rows of a mask over the batch for the texts of the current chunk; they must be (rows, n) as in ``like``."""
    rows = mask[context.rows].to(like.device) if isinstance(mask, torch.Tensor) else torch.empty(0)
    if rows.shape != like.shape[:2] or len(mask) != context.texts or rows.dtype != torch.bool:
        shown = f"of {mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type_with_article(mask)
        allowed = f"it must be a tensor of bool of shape ({context.texts}, {like.shape[1]})"
        raise HelmscopeError(f"{name} is {shown}, but {allowed}")
    return rows


def _value_rows(value: Tensor | float, context: EditContext, like: Tensor) -> Tensor:
    """``value`` expanded to the texts of the current chunk; it has one row per text of the batch, or broadcasts."""
    try:
        tensor = torch.as_tensor(value).to(like)
        row_per_text = tensor.ndim == 3 and len(tensor) == context.texts
        return (tensor[context.rows] if row_per_text else tensor).expand_as(like)
    except (RuntimeError, TypeError) as error:
        shown = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)[:40]
        allowed = f"it must broadcast to states of shape {(context.texts, *like.shape[1:])}"
        raise HelmscopeError(f"value is {shown}, but {allowed}") from error
