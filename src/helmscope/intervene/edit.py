"""``Edit``: any function in the place of what passes at a site of a model; what all edits share.

Every edit is frozen and told where it is by the ``Context`` that is passed to it. ``layers`` None means all layers.
Edits are checked against the model before the forward begins; ``changed`` and ``Recording.under`` apply them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from helmscope.models.watch import EDITABLE_STATES, IN_ATTENTION, OF_CROSS, AbstractEdit, Site
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.watch import Context

ANYWHERE = (*EDITABLE_STATES, *(site for site in Site if site in IN_ATTENTION))


class SiteEdit(AbstractEdit):
    """What all edits share that act at one ``site`` and in some ``layers``."""

    allowed: ClassVar[tuple[Site, ...]] = ANYWHERE
    site: Site
    layers: Sequence[int] | None

    def __post_init__(self) -> None:
        if self.site not in self.allowed:
            allowed = ", ".join(str(site) for site in self.allowed)
            raise HelmscopeError(f"site is {self.site!r}, but {type(self).__name__} is made at one of {allowed}")
        if self.layers is not None:
            object.__setattr__(self, "layers", whole_numbers("layers", self.layers))

    @property
    def sites(self) -> frozenset[Site]:
        """The one site."""
        return frozenset({self.site})

    def acts(self, layer: int) -> bool:
        """Whether a layer is changed."""
        return self.layers is None or layer in self.layers

    def check(self, anatomy: Anatomy) -> None:
        """Refuse layers and cross-attention that the model does not have, and a family whose attention cannot be
        changed.
        """
        count = len(anatomy.layers)
        for layer in self.layers or ():
            if layer >= count:
                raise HelmscopeError(f"layers holds {layer}, but the model has layers 0 to {count - 1}")
        if self.site in OF_CROSS and not anatomy.has_cross:
            raise HelmscopeError(
                f"{type(self).__name__} is made at {self.site}, but {type(anatomy.model).__name__} has no "
                "cross-attention: only the decoder of an encoder-decoder model has"
            )
        if self.site in IN_ATTENTION and not anatomy.tapped:
            raise HelmscopeError(
                f"{type(self).__name__} is made at {self.site}, but the family of {type(anatomy.model).__name__} does "
                "not look its attention up: its states and writes can be edited, the inside of its attention cannot"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Edit(SiteEdit):
    """``function(value)`` or ``function(value, context)`` takes the place of what passes at ``site`` in ``layers``;
    where the function gives None, the value stays.

    Values are (rows, n, d) at Site.INPUT, ATTENTION, MIDDLE, MLP and OUTPUT; (rows, heads, n, r) at QUERY, KEY and
    VALUE; (rows, heads, n, n) at WEIGHTS, from which the output follows; (rows, n, heads, r) at HEADS; at MASK what
    broadcasts to (rows, heads, n, n). In a decoder that reads an encoder of m tokens they are (rows, n, d) at CROSS and
    CROSS_MIDDLE, and at CROSS_QUERY to CROSS_HEADS as above with m keys. Rows are the texts under way,
    ``context.rows`` of the batch. The function is handed the context if its second argument has no default or is called
    ``context``. The repr names the function, and cannot tell two of the same name apart.

    >>> half = Edit(Site.MLP, [1], lambda write: 0.5 * write)
    >>> half
    Edit(site=Site.MLP, layers=[1], function=<lambda>)
    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> from helmscope.models.record import record
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4]]))
    >>> recording.under(half).logits().shape
    torch.Size([1, 4, 9])
    >>> noise = Edit(Site.KEY, None, lambda key, context: key + 0.1 * context.normal(key, seed=3))
    >>> bool((recording.under(noise).kernel(layer=0) - recording.kernel(layer=0)).any())
    True
    """

    site: Site
    layers: Sequence[int] | None
    function: Callable[..., Tensor | None]
    takes_context: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "takes_context", _takes_context(self.function))

    def new(self, value: Tensor, context: Context) -> Tensor | None:
        """What the function gives."""
        return self.function(value, context) if self.takes_context else self.function(value)


def _takes_context(function: Any) -> bool:
    """Whether a function is to be called with the context beside the value."""
    if not callable(function):
        raise HelmscopeError(
            f"function is {function!r:.60}, but it must be a function of a value, or of a value and a Context"
        )
    try:
        given = inspect.signature(function).parameters.values()
    except ValueError:  # functions written in C need not tell
        return False
    by_place = [each for each in given if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each for each in by_place if each.default is each.empty]
    any_number = any(each.kind is each.VAR_POSITIONAL for each in given)
    by_name = [each.name for each in given if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    if len(needed) > 2 or by_name or not (by_place or any_number):
        raise HelmscopeError(
            f"function is {getattr(function, '__qualname__', function)!s:.60} with the arguments "
            f"({', '.join(map(str, given))}), but it must take a value, or a value and a Context"
        )
    return len(needed) == 2 or (len(by_place) > 1 and by_place[1].name == "context")


def whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    """Layers or heads by their numbers."""
    try:
        found = tuple(-1 if isinstance(each, bool) else operator.index(each) for each in value)
    except TypeError:
        found = ()
    if not found or min(found) < 0:
        raise HelmscopeError(f"{name} is {value!r:.60}, but it must be a list of whole numbers >= 0 such as [0, 3]")
    return found
