"""Edits inside attention: of query, key and value (``Perturb``, which takes states and writes too), of the weights
(``Reweigh``), of single heads (``AblateHead``) and single keys (``MaskKeys``). All but the last are made in
cross-attention too, by their ``site``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.intervene.edit import SiteEdit, whole_numbers
from helmscope.intervene.states import mask_rows
from helmscope.models.watch import EDITABLE_STATES, Site
from helmscope.types import HelmscopeError, real_number, seed_number

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.watch import Context


@dataclass(frozen=True, eq=False, repr=False)
class Perturb(SiteEdit):
    """Gaussian noise on query, key or value, or on a state or write: of standard deviation ``sigma``, as source 003
    prints it, or of ``relative`` times the root mean square of the value over a text in the layer. One of the two is
    given.

    The noise follows from ``seed``, the layer and the number of the text, in every forward, in every process and
    however many texts run at a time. Two edits need different seeds for their noise to be independent.

    >>> Perturb(site=Site.KEY, relative=0.1, seed=1)
    Perturb(site=Site.KEY, relative=0.1, seed=1)
    """

    allowed = (
        *(Site.QUERY, Site.KEY, Site.VALUE, Site.CROSS_QUERY, Site.CROSS_KEY, Site.CROSS_VALUE),
        *EDITABLE_STATES,
    )
    layers: Sequence[int] | None = None
    site: Site = Site.QUERY
    sigma: float | None = None
    relative: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seed", seed_number(self.seed))
        if (self.sigma is None) == (self.relative is None):
            raise HelmscopeError(
                f"sigma is {self.sigma!r} and relative is {self.relative!r}, but exactly one of them must be given"
            )
        name, size = ("sigma", self.sigma) if self.relative is None else ("relative", self.relative)
        object.__setattr__(self, name, real_number(name, size, at_least=0))

    def new(self, value: Tensor, context: Context) -> Tensor:
        """With noise."""
        if self.relative is None:
            size = torch.tensor(self.sigma, device="cpu").to(value)
        else:
            of_text = tuple(range(1, value.ndim))
            size = self.relative * value.float().square().mean(of_text, keepdim=True).sqrt().to(value)
        return value + size * context.normal(value, seed=self.seed)


@dataclass(frozen=True, eq=False, repr=False)
class Reweigh(SiteEdit):
    """The attention weights (rows, heads, n, n) of a layer go through ``function``; the output follows from them. At
    Site.CROSS_WEIGHTS they are those of cross-attention, (rows, heads, n, m).

    >>> Reweigh([0], function=torch.clone)
    Reweigh(layers=[0])
    """

    allowed = (Site.WEIGHTS, Site.CROSS_WEIGHTS)
    layers: Sequence[int] | None = None
    function: Callable[[Tensor], Tensor] = torch.clone
    site: Site = Site.WEIGHTS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise HelmscopeError(f"function is {self.function!r:.60}, but it must be a function of the weights")

    def new(self, value: Tensor, context: Context) -> Tensor:
        """Other weights."""
        return self.function(value)


@dataclass(frozen=True, eq=False, repr=False)
class AblateHead(SiteEdit):
    """What some heads read is 0: they write nothing but the output matrix's bias. At Site.CROSS_HEADS they are heads of
    cross-attention.

    >>> AblateHead([2], heads=[0, 5])
    AblateHead(layers=[2], heads=[0, 5])
    """

    allowed = (Site.HEADS, Site.CROSS_HEADS)
    layers: Sequence[int] | None = None
    heads: Sequence[int] = ()
    site: Site = Site.HEADS

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "heads", whole_numbers("heads", self.heads))

    def check(self, anatomy: Anatomy) -> None:
        """Refuse heads that a layer does not have."""
        super().check(anatomy)
        for number, layer in enumerate(anatomy.layers):
            count = layer.heads if self.site is Site.HEADS else layer.cross_heads
            if count is not None and self.acts(number) and max(self.heads) >= count:
                raise HelmscopeError(f"heads holds {max(self.heads)}, but layer {number} has heads 0 to {count - 1}")

    def new(self, value: Tensor, context: Context) -> Tensor:
        """Without these heads."""
        kept = torch.ones(value.shape[2], 1, dtype=torch.bool, device=value.device)
        kept[list(self.heads)] = False
        return torch.where(kept, value, 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class MaskKeys(SiteEdit):
    """No other token sees the tokens where ``keys`` (batch, n) is True; a token always sees itself. One that would see
    nobody sees what it saw before.

    >>> MaskKeys(keys=torch.tensor([[True, False]])).acts(0)
    True
    """

    layers: Sequence[int] | None = None
    keys: Bool[Tensor, "batch n"] | None = None
    site = Site.MASK

    def check(self, anatomy: Anatomy) -> None:
        """Refuse a mask that is none."""
        super().check(anatomy)
        if not isinstance(self.keys, torch.Tensor) or self.keys.dtype != torch.bool:
            raise HelmscopeError(f"keys is {type(self.keys).__name__}, but it must be a tensor of bool (batch, n)")

    def new(self, value: Tensor, context: Context) -> Tensor:
        """A stricter mask."""
        assert self.keys is not None
        n, least = value.shape[-1], torch.finfo(value.dtype).min
        others = ~torch.eye(n, dtype=torch.bool, device=value.device)
        like = value.new_empty(context.rows.stop - context.rows.start, n)
        hidden = mask_rows("keys", self.keys, context, like)[:, None, None, :] & others
        seen = (value > least / 2) & ~hidden
        blind = ~seen.any(-1, keepdim=True)
        return torch.where(hidden & ~blind, least, value)
