"""Edits inside attention: noise on queries, keys and values (``Perturb``, also on states and writes), changed attention
weights (``ReplaceKernel``), ablated heads (``AblateHead``) and masked keys (``MaskKeys``). All but the last also edit
cross-attention, by their ``site``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.intervene.edit import SiteEdit, whole_numbers
from helmscope.intervene.states import mask_rows
from helmscope.models.names import Layers, layer_indices, parse_head
from helmscope.models.sites import EDITABLE_STATES, Site
from helmscope.types import HelmscopeError, check_integer, check_real, check_seed, short_repr, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.sites import EditContext


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
    layers: Layers | None = None
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
    layers: Layers | None = None
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
    these are heads of cross-attention. ``heads`` are numbers, the same in all ``layers``, or without ``layers`` one or
    several names such as "L2H5" or "2.5" (see ``parse_head``). A single head may also be given by ``layer`` and
    ``head``, or by ``head``, its name.

    >>> AblateHead([2], heads=[0, 5])
    AblateHead(layers=[2], heads=[0, 5])
    >>> AblateHead(layer=2, head=5)
    AblateHead(layers=[2], heads=[5])
    >>> AblateHead(head="L2H5")
    AblateHead(layers=[2], heads=[5])
    >>> AblateHead(heads=["L2H5", "L4H0"])
    AblateHead(heads=['L2H5', 'L4H0'])
    """

    allowed = (Site.HEADS, Site.CROSS_HEADS)
    layers: Layers | None = None
    heads: int | str | Sequence[int | str] = ()
    site: Site = Site.HEADS
    layer: InitVar[int | str | None] = None
    head: InitVar[int | str | None] = None

    def __post_init__(self, layer: int | str | None, head: int | str | None) -> None:
        if _are_names(self.layers):
            raise HelmscopeError(f"layers is {short_repr(self.layers)}, but names of heads are given by heads=")
        if isinstance(head, Iterable) and not isinstance(head, str):
            raise HelmscopeError(f"head is {short_repr(head)}, but it must be one head: for several use heads=[...]")
        _check_heads(self.heads)
        if _are_names(self.heads):
            self._set_names(layer, head)
            return
        if isinstance(head, str):
            if layer is not None:
                raise HelmscopeError(f"layer is {layer!r} and head is {head!r}, but that name contains its layer")
            layer, head = parse_head(head).values()
        if isinstance(layer, str):
            (layer,) = layer_indices("layer", layer)
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

    def _set_names(self, layer: int | str | None, head: int | str | None) -> None:
        """Store heads given by name: as numbers if all are in one layer, else as names "L2H5"."""
        for name, value in (("layers", self.layers), ("layer", layer), ("head", head)):
            if value is not None:
                raise HelmscopeError(
                    f"heads is {short_repr(self.heads)} and {name} is {short_repr(value)}, but the names of heads "
                    "contain their layers: give heads alone"
                )
        names = self.heads if isinstance(self.heads, Sequence) and not isinstance(self.heads, str) else [self.heads]
        places = sorted({tuple(parse_head(str(name)).values()) for name in names})
        layers = {number for number, _ in places}
        if len(layers) == 1:
            object.__setattr__(self, "layers", tuple(layers))
            object.__setattr__(self, "heads", tuple(number for _, number in places))
        else:
            object.__setattr__(self, "heads", tuple(f"L{layer}H{head}" for layer, head in places))
        super().__post_init__()

    def _heads_in(self, layer: int) -> tuple[int, ...]:
        """The heads that are ablated in a layer."""
        if not _are_names(self.heads):
            return whole_numbers("heads", self.heads) if super().acts(layer) else ()
        assert isinstance(self.heads, Sequence)
        places = [parse_head(str(name)) for name in self.heads]
        return tuple(place["head"] for place in places if place["layer"] == layer)

    def acts(self, layer: int) -> bool:
        """Whether some head of a layer is ablated."""
        return bool(self._heads_in(layer))

    def check(self, anatomy: Anatomy) -> None:
        """Raise ``HelmscopeError`` if a layer does not have one of the heads."""
        super().check(anatomy)
        if _are_names(self.heads):
            assert isinstance(self.heads, Sequence)
            for name in self.heads:
                if parse_head(str(name))["layer"] >= len(anatomy.layers):
                    raise HelmscopeError(
                        f"heads holds {name!r}, but the model has layers 0 to {len(anatomy.layers) - 1}"
                    )
        for number, layer in enumerate(anatomy.layers):
            count, last = layer.heads if self.site is Site.HEADS else layer.cross_heads, self._heads_in(number)
            if count is not None and last and max(last) >= count:
                raise HelmscopeError(f"heads holds {max(last)}, but layer {number} has heads 0 to {count - 1}")

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """The value with these heads set to 0."""
        kept = torch.ones(value.shape[2], 1, dtype=torch.bool, device=value.device)
        kept[list(self._heads_in(context.layer))] = False
        return torch.where(kept, value, 0.0)


def _check_heads(heads: object) -> None:
    """Raise ``HelmscopeError`` for the first of ``heads`` that is neither a number nor a name, or not what the others
    are.
    """
    several = list(heads) if isinstance(heads, Iterable) and not isinstance(heads, str) else [heads]
    named = any(isinstance(each, str) for each in several)
    for i, each in enumerate(several):
        if _are_names(each) if named and isinstance(each, str) else not named and _is_index(each):
            continue
        shown = f"heads[{i}]" if isinstance(heads, Iterable) and not isinstance(heads, str) else "heads"
        raise HelmscopeError(
            f"{shown} is {short_repr(each)}, but heads must be numbers >= 0, such as [0, 3] with layers=, or names "
            "such as ['L2H0', 'L4H3']"
        )


def _is_index(value: object) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= 0  # type: ignore[arg-type]
    except TypeError:
        return False


def _are_names(value: object) -> bool:
    """Whether a value is the name of a head such as "L2H5", or a list of them."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not names:
        return False
    try:
        for name in names:
            parse_head(name)
    except HelmscopeError:  # numbers, or something else that is refused later
        return False
    return True


@dataclass(frozen=True, eq=False, repr=False)
class MaskKeys(SiteEdit):
    """Mask the tokens where ``keys`` (batch, n) is True, so that no other token attends to them; a token may always
    attend to itself. A token that would be left with nothing to attend to keeps its original mask.

    >>> MaskKeys(keys=torch.tensor([[True, False]])).acts(0)
    True
    """

    layers: Layers | None = None
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
