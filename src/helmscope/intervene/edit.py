"""``Edit``, which applies any function to the tensor at a site of a model, and ``SiteEdit``, the base of all edits.

Every edit is frozen; the ``EditContext`` passed to it says where it is applied. ``layers=None`` means all layers. Edits
are checked against the model before the forward pass starts; ``edited`` and ``Recording.under`` apply them.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from helmscope.models.names import Layers, layer_indices
from helmscope.models.sites import EDITABLE_STATES, IN_ATTENTION, OF_CROSS, AbstractEdit, Site
from helmscope.types import HelmscopeError, short_repr

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.sites import EditContext

ANYWHERE = (*EDITABLE_STATES, *(site for site in Site if site in IN_ATTENTION))


class SiteEdit(AbstractEdit):
    """Base of the edits that act at one ``site``, in all or some ``layers``."""

    allowed: ClassVar[tuple[Site, ...]] = ANYWHERE
    site: Site
    layers: Layers | None

    def __post_init__(self) -> None:
        if self.site not in self.allowed:
            raise self._refused_site()
        if self.layers is not None:
            object.__setattr__(self, "layers", layer_indices("layers", self.layers))

    def _refused_site(self) -> HelmscopeError:
        allowed = ", ".join(str(site) for site in self.allowed)
        if isinstance(self.site, Site):
            return HelmscopeError(f"site is {self.site!r}, but {type(self).__name__} must be at one of {allowed}")
        names = {site.name.lower(): site for site in self.allowed}
        near = difflib.get_close_matches(str(self.site).lower().replace(" ", "_"), names, n=1, cutoff=0.4)
        example = names[near[0]] if near else self.allowed[0]
        return HelmscopeError(
            f"site is {short_repr(self.site)}, but it must be a member of hs.Site such as hs.{example}, one of "
            f"{allowed}"
        )

    @property
    def sites(self) -> frozenset[Site]:
        """The site, as a set of one."""
        return frozenset({self.site})

    def acts(self, layer: int) -> bool:
        """Whether the edit applies to a layer."""
        return self.layers is None or layer in layer_indices("layers", self.layers)

    def check(self, anatomy: Anatomy) -> None:
        """Raise ``HelmscopeError`` if the model lacks one of the layers or cross-attention, or its attention cannot be
        edited.
        """
        count = len(anatomy.layers)
        for layer in () if self.layers is None else layer_indices("layers", self.layers):
            if layer >= count:
                raise HelmscopeError(f"layers holds {layer}, but the model has layers 0 to {count - 1}")
        if self.site in OF_CROSS and not anatomy.has_cross:
            raise HelmscopeError(
                f"{type(self).__name__} is made at {self.site}, but {type(anatomy.model).__name__} has no "
                "cross-attention: only the decoder of an encoder-decoder model has it"
            )
        if self.site in IN_ATTENTION and not anatomy.tapped:
            raise HelmscopeError(
                f"site of {type(self).__name__} is {self.site}, but the family of {type(anatomy.model).__name__} does "
                "not look up its attention function in the registry: only its states and writes can be edited"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Edit(SiteEdit):
    """Replace the value at ``site`` in ``layers`` by ``function(value)`` or ``function(value, context)``; if the
    function returns None, the value is unchanged.

    Values are (rows, n, d) at Site.INPUT, ATTENTION, MIDDLE, MLP and OUTPUT; (rows, heads, n, r) at QUERY, KEY and
    VALUE; (rows, heads, n, n) at WEIGHTS, from which the output is computed; (rows, n, heads, r) at HEADS; and
    broadcastable to (rows, heads, n, n) at MASK. In a decoder that reads an encoder of m tokens they are (rows, n, d)
    at CROSS and CROSS_MIDDLE, and at CROSS_QUERY to CROSS_HEADS as at QUERY to HEADS, with m keys. Rows are the
    texts of the current chunk, ``context.rows`` of the batch. The context is passed if the second argument of the
    function has no default or is called ``context``. The repr names the function, so functions of the same name look
    alike.

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
    layers: Layers | None
    function: Callable[..., Tensor | None]
    takes_context: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "takes_context", _takes_context(self.function))

    def new(self, value: Tensor, context: EditContext) -> Tensor | None:
        """The return value of the function."""
        return self.function(value, context) if self.takes_context else self.function(value)


def _takes_context(function: Any) -> bool:
    """Whether a function is to be called with the context as second argument."""
    if not callable(function):
        raise HelmscopeError(
            f"function is {function!r:.60}, but it must be a function of a value, or of a value and an EditContext"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # functions written in C need not have a signature
        return False
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    required = [one for one in positional if one.default is one.empty]
    takes_any_number = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    required_by_keyword = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    if len(required) > 2 or required_by_keyword or not (positional or takes_any_number):
        raise HelmscopeError(
            f"function is {getattr(function, '__qualname__', function)!s:.60} with the arguments "
            f"({', '.join(map(str, parameters))}), but it must take a value, or a value and an EditContext"
        )
    return len(required) == 2 or (len(positional) > 1 and positional[1].name == "context")


def whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    """Indices of layers or heads, or a single one, as a tuple; raises ``HelmscopeError`` unless they are whole numbers
    >= 0.
    """
    several = value if isinstance(value, Iterable) else (value,)
    try:
        indices = tuple(-1 if isinstance(index, bool) else operator.index(index) for index in several)
    except TypeError:
        indices = ()
    if not indices or min(indices) < 0:
        raise HelmscopeError(
            f"{name} is {value!r:.60}, but it must be a whole number >= 0 or a list of them such as [0, 3]"
        )
    return indices
