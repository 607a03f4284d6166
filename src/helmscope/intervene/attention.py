"""Edits inside attention: noise on queries, keys and values (``Perturb``, also on states and writes), changed attention
weights (``ReplaceKernel``), ablated heads (``AblateHead``) and masked keys (``MaskKeys``). All but the last also edit
cross-attention, by their ``site``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.intervene.edit import SiteEdit, whole_numbers
from helmscope.intervene.states import mask_rows
from helmscope.models.names import parse_head
from helmscope.models.sites import EDITABLE_STATES, Site
from helmscope.types import HelmscopeError, check_integer, check_real, check_seed, short_repr, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.sites import EditContext

ONE_EDIT_PER_NAME = "one edit per name, [AblateHead(head=name) for name in names]"


@dataclass(frozen=True, eq=False, repr=False)
class Perturb(SiteEdit):
    """Add Gaussian noise to queries, keys or values, or to a state or write. Its standard deviation is ``sigma``, as
    [Additive transport] prints it, or ``relative_sigma`` times the root mean square of the tensor over each text in the
    layer; exactly one of the two must be given.

    The noise depends only on ``seed``, the layer and the index of the text, not on the process or the batch size. Two
    edits need different seeds for their noise to be independent.

    >>> Perturb(site=Site.KEY, relative_sigma=0.1, seed=1)
    Perturb(site=Site.KEY, relative_sigma=0.1, seed=1)
    """

    allowed = (
        *(Site.QUERY, Site.KEY, Site.VALUE, Site.CROSS_QUERY, Site.CROSS_KEY, Site.CROSS_VALUE),
        *EDITABLE_STATES,
    )
    layers: int | Sequence[int] | None = None
    site: Site = Site.QUERY
    sigma: float | None = None
    relative_sigma: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seed", check_seed(self.seed))
        if (self.sigma is None) == (self.relative_sigma is None):
            raise HelmscopeError(
                f"sigma is {self.sigma!r} and relative_sigma is {self.relative_sigma!r}, but exactly one of them must "
                "be given"
            )
        name, size = ("sigma", self.sigma) if self.relative_sigma is None else ("relative_sigma", self.relative_sigma)
        object.__setattr__(self, name, check_real(name, size, at_least=0))

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """The value plus noise."""
        if self.relative_sigma is None:
            scale = torch.tensor(self.sigma, device="cpu").to(value)
        else:
            axes_of_text = tuple(range(1, value.ndim))
            scale = self.relative_sigma * value.float().square().mean(axes_of_text, keepdim=True).sqrt().to(value)
        return value + scale * context.normal(value, seed=self.seed)


@dataclass(frozen=True, eq=False, repr=False)
class ReplaceKernel(SiteEdit):
    """Replace the attention weights (rows, heads, n, n) of a layer by ``function(weights)``; the output of attention is
    computed from the new weights. At Site.CROSS_KERNEL they are those of cross-attention, (rows, heads, n, m).

    With uniform weights instead of those that the model computes:

    >>> from helmscope import record
    >>> recording = record("A", ["Once upon a time, there was a cat."])
    >>> def uniform(weights):
    ...     causal = torch.ones_like(weights).tril()
    ...     return causal / causal.sum(-1, keepdim=True)
    >>> edited = recording.under(ReplaceKernel([0], function=uniform))
    >>> edited.kernel(layer=0)[0, 0, 1, :3]
    tensor([0.5000, 0.5000, 0.0000])
    """

    allowed = (Site.KERNEL, Site.CROSS_KERNEL)
    layers: int | Sequence[int] | None = None
    function: Callable[[Tensor], Tensor] = torch.clone
    site: Site = Site.KERNEL

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise HelmscopeError(f"function is {self.function!r:.60}, but it must be a function of the weights")

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """The new weights."""
        return self.function(value)


@dataclass(frozen=True, eq=False, repr=False)
class AblateHead(SiteEdit):
    """Set the output of some heads to 0, so that they write only the bias of the output matrix. At Site.CROSS_HEADS
    these are heads of cross-attention. A single head may be given by ``layer`` and ``head``, or by its name alone, such
    as head="L2H5" or head="2.5" (see ``parse_head``); several names are several edits.

    >>> AblateHead([2], heads=[0, 5])
    AblateHead(layers=[2], heads=[0, 5])
    >>> AblateHead(layer=2, head=5)
    AblateHead(layers=[2], heads=[5])
    >>> AblateHead(head="L2H5")
    AblateHead(layers=[2], heads=[5])
    """

    allowed = (Site.HEADS, Site.CROSS_HEADS)
    layers: int | Sequence[int] | None = None
    heads: int | Sequence[int] = ()
    site: Site = Site.HEADS
    layer: InitVar[int | None] = None
    head: InitVar[int | str | None] = None

    def __post_init__(self, layer: int | None, head: int | str | None) -> None:
        for argument, value in (("layers", self.layers), ("heads", self.heads)):
            _refuse_names(argument, value)
        if isinstance(head, Iterable) and not isinstance(head, str):
            several = "heads=[...] with layers=" if all(isinstance(one, int) for one in head) else ONE_EDIT_PER_NAME
            raise HelmscopeError(f"head is {short_repr(head)}, but it must be one head: for several use {several}")
        if isinstance(head, str):
            if layer is not None:
                raise HelmscopeError(f"layer is {layer!r} and head is {head!r}, but that name contains its layer")
            layer, head = parse_head(head).values()
        for one, number, several, given in (
            ("layer", layer, "layers", self.layers is not None),
            ("head", head, "heads", self.heads != ()),
        ):
            if number is not None:
                if given:
                    raise HelmscopeError(
                        f"{one} is {number!r} and {several} is given too: pass either {one} or {several}, not both"
                    )
                object.__setattr__(self, several, (check_integer(one, number, at_least=0),))
        super().__post_init__()
        object.__setattr__(self, "heads", whole_numbers("heads", self.heads))

    def check(self, anatomy: Anatomy) -> None:
        """Raise ``HelmscopeError`` if a layer does not have one of the heads."""
        super().check(anatomy)
        last = max(whole_numbers("heads", self.heads))
        for number, layer in enumerate(anatomy.layers):
            count = layer.heads if self.site is Site.HEADS else layer.cross_heads
            if count is not None and self.acts(number) and last >= count:
                raise HelmscopeError(f"heads holds {last}, but layer {number} has heads 0 to {count - 1}")

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """The value with these heads set to 0."""
        kept = torch.ones(value.shape[2], 1, dtype=torch.bool, device=value.device)
        kept[list(whole_numbers("heads", self.heads))] = False
        return torch.where(kept, value, 0.0)


def _refuse_names(argument: str, value: object) -> None:
    """Raise ``HelmscopeError`` for names of heads in place of numbers."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not names:
        return
    try:
        for name in names:
            parse_head(name)
    except HelmscopeError:  # numbers, or something else that is refused later
        return
    use = f"pass head={names[0]!r}" if len(names) == 1 else f"use {ONE_EDIT_PER_NAME}"
    raise HelmscopeError(f"{argument} is {short_repr(value)}, but names of heads are given by head=: {use}")


@dataclass(frozen=True, eq=False, repr=False)
class MaskKeys(SiteEdit):
    """Mask the tokens where ``keys`` (batch, n) is True, so that no other token attends to them; a token may always
    attend to itself. A token that would be left with nothing to attend to keeps its original mask.

    >>> MaskKeys(keys=torch.tensor([[True, False]])).acts(0)
    True
    """

    layers: int | Sequence[int] | None = None
    keys: Bool[Tensor, "batch n"] | None = None
    site = Site.MASK

    def check(self, anatomy: Anatomy) -> None:
        """Raise ``HelmscopeError`` unless ``keys`` is a boolean tensor."""
        super().check(anatomy)
        if not isinstance(self.keys, torch.Tensor) or self.keys.dtype != torch.bool:
            raise HelmscopeError(f"keys is {type_with_article(self.keys)}, but it must be a tensor of bool (batch, n)")

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """The mask with these keys masked as well."""
        assert self.keys is not None
        n, masked = value.shape[-1], torch.finfo(value.dtype).min
        off_diagonal = ~torch.eye(n, dtype=torch.bool, device=value.device)
        like = value.new_empty(context.rows.stop - context.rows.start, n)
        hidden = mask_rows("keys", self.keys, context, like)[:, None, None, :] & off_diagonal
        visible = (value > masked / 2) & ~hidden
        keeps_a_key = visible.any(-1, keepdim=True)
        return torch.where(hidden & keeps_a_key, masked, value)
