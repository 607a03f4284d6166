"""Sites: the values of a model's forward pass that can be edited or observed, and the base classes of edits and
observers.

    INPUT              the block's input
    ATTENTION          what attention writes
    MIDDLE             the state after attention, virtual in a parallel block
    READ               the input of the module after it: the middle state, or in a post-norm block the sum before it
    CROSS              what cross-attention writes, in the decoder of an encoder-decoder model
    CROSS_MIDDLE       the state after cross-attention
    CROSS_READ         the input of the module after that, as READ
    MLP                what the MLP writes
    BEFORE_OUTPUT_NORM the input of the norm at the end of a post-norm block
    OUTPUT             the block's output                                            all of these are (rows, n, d)
    QUERY, KEY, VALUE  the inputs of attention: (rows, heads, n, r), keys and values (rows, kv_heads, n, r)
    MASK               added to the logits of attention, broadcasts to (rows, heads, n, n); 0 if there is no mask
    KERNEL             the attention weights (rows, heads, n, n)
    HEADS              the outputs of the heads, before the output matrix: (rows, n, heads, r)
    CROSS_QUERY, ...   the same six for cross-attention, whose keys and values are those of the encoder's m tokens:
                       (rows, kv_heads, m, r), and (rows, heads, n, m) for kernel and mask

An edit (``AbstractEdit``) returns a replacement for a value. It is frozen: site, layer and current texts are passed to
it as an ``EditContext``. An ``Observer`` receives values after all edits and cannot change them; it collects a
result, and is notified when the next chunk of texts begins. READ, CROSS_READ and BEFORE_OUTPUT_NORM can only be
observed; the other sites can also be edited.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helmscope.store.manifest import hash_bytes
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.tap import Attended, Call

LONGEST_VALUE = 400  # characters of one value in the repr of an edit


class Site(Enum):
    """A place in a block whose value can be observed or edited; the module's docstring lists them with their shapes.

    >>> " ".join(site.name for site in Site if "CROSS" not in site.name)
    'INPUT ATTENTION MIDDLE READ MLP BEFORE_OUTPUT_NORM OUTPUT QUERY KEY VALUE MASK KERNEL HEADS'
    >>> Site.CROSS_KERNEL.value
    'cross kernel'
    """

    INPUT = "input"
    ATTENTION = "attention"
    MIDDLE = "middle"
    READ = "read"
    CROSS = "cross"
    CROSS_MIDDLE = "cross middle"
    CROSS_READ = "cross read"
    MLP = "mlp"
    BEFORE_OUTPUT_NORM = "before output norm"
    OUTPUT = "output"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    MASK = "mask"
    KERNEL = "kernel"
    HEADS = "heads"
    CROSS_QUERY = "cross query"
    CROSS_KEY = "cross key"
    CROSS_VALUE = "cross value"
    CROSS_MASK = "cross mask"
    CROSS_KERNEL = "cross kernel"
    CROSS_HEADS = "cross heads"


@dataclass(frozen=True)
class AttentionSites:
    """The sites inside an attention module: its inputs, by their names in a ``Call``, its weights and its heads'
    outputs.
    """

    before: Mapping[str, Site]
    weights: Site
    heads: Site

    @property
    def all(self) -> frozenset[Site]:
        """All sites of the attention module."""
        return frozenset({*self.before.values(), self.weights, self.heads})


IN_SELF = AttentionSites(
    {"query": Site.QUERY, "key": Site.KEY, "value": Site.VALUE, "mask": Site.MASK}, Site.KERNEL, Site.HEADS
)
IN_CROSS = AttentionSites(
    {"query": Site.CROSS_QUERY, "key": Site.CROSS_KEY, "value": Site.CROSS_VALUE, "mask": Site.CROSS_MASK},
    Site.CROSS_KERNEL,
    Site.CROSS_HEADS,
)
IN_ATTENTION = IN_SELF.all | IN_CROSS.all
STATES_AND_WRITES = frozenset(Site) - IN_ATTENTION
OF_CROSS = IN_CROSS.all | {Site.CROSS, Site.CROSS_MIDDLE, Site.CROSS_READ}
EDITABLE_STATES = (
    *(Site.INPUT, Site.ATTENTION, Site.MIDDLE, Site.CROSS, Site.CROSS_MIDDLE),
    *(Site.MLP, Site.OUTPUT),
)
# the state after each write, and the input of the module that computes or reads that state
LEADS_TO = {Site.ATTENTION: Site.MIDDLE, Site.CROSS: Site.CROSS_MIDDLE, Site.MLP: Site.OUTPUT}
READ_AT = {Site.MIDDLE: Site.READ, Site.CROSS_MIDDLE: Site.CROSS_READ, Site.OUTPUT: Site.BEFORE_OUTPUT_NORM}


@dataclass(frozen=True, eq=False, kw_only=True)
class Chunk(ConciseRepr):
    """The texts of a batch that one forward pass processes: ``rows`` out of ``texts`` in all. ``weights`` (rows, n) are
    the weights of tokens in statistics, and ``visible`` (rows, n) is True at tokens that attention can see; each is
    None if it is 1 or True everywhere, or unknown.
    """

    rows: slice
    texts: int
    weights: Float[Tensor, "rows n"] | None = None
    visible: Bool[Tensor, "rows n"] | None = None

    @classmethod
    def whole(cls, texts: int) -> Chunk:
        """The chunk of a forward pass of all texts at once, with unknown weights and mask."""
        return cls(rows=slice(0, texts), texts=texts)

    def at(self, site: Site, layer: int) -> EditContext:
        """The context of a value at a site of a layer, for these texts."""
        return EditContext(
            site=site, layer=layer, rows=self.rows, texts=self.texts, weights=self.weights, visible=self.visible
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class EditContext(Chunk):
    """What an edit knows about the value that it receives: its ``site`` and ``layer``, and the texts (a ``Chunk``).

    >>> context = EditContext(site=Site.MLP, layer=3, rows=slice(4, 6), texts=8)
    >>> torch.arange(8)[context.rows]
    tensor([4, 5])
    >>> context.normal(torch.zeros(2, 5, 16), seed=0).shape
    torch.Size([2, 5, 16])
    """

    site: Site
    layer: int

    def generator(self, seed: int, text: int) -> np.random.Generator:
        """A random generator that depends only on the seed, this layer and the index of the text in the batch, not on
        the chunk, the forward pass or the process.

        >>> context = EditContext(site=Site.MLP, layer=3, rows=slice(4, 6), texts=8)
        >>> context.generator(0, text=4).random() == context.generator(0, text=4).random()
        True
        """
        source = np.random.SeedSequence(seed, spawn_key=(self.layer, text))
        return np.random.Generator(np.random.Philox(source))

    def normal(self, like: Float[Tensor, "rows ..."], *, seed: int) -> Float[Tensor, "rows ..."]:
        """Independent standard normal samples of the shape of ``like``, one ``generator`` per text.

        >>> both = EditContext(site=Site.MLP, layer=3, rows=slice(4, 6), texts=8).normal(torch.zeros(2, 5), seed=0)
        >>> second = EditContext(site=Site.MLP, layer=3, rows=slice(5, 6), texts=8).normal(torch.zeros(1, 5), seed=0)
        >>> torch.equal(both[1:], second)
        True
        """
        texts = range(self.rows.start, self.rows.stop)
        samples = [self.generator(seed, text).standard_normal(tuple(like.shape[1:])) for text in texts]
        return torch.from_numpy(np.stack(samples)).to(like)


class AbstractEdit(ABC):
    """Base class of edits, which replace values in a model's forward pass. The repr, which manifests store, is one line
    with the arguments; tensors appear as shape and hash.
    """

    def __repr__(self) -> str:
        arguments: list[Field[Any]] = [field for field in fields(self) if field.repr] if is_dataclass(self) else []
        values = [(field, getattr(self, field.name)) for field in arguments]
        shown = (f"{field.name}={short_description(value)}" for field, value in values if value is not field.default)
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    @abstractmethod
    def sites(self) -> frozenset[Site]:
        """The sites at which values are changed."""

    @abstractmethod
    def new(self, value: Tensor, context: EditContext) -> Tensor | None:
        """The replacement of a value, or None to leave it unchanged; ``value`` is valid only during the call."""

    def acts(self, layer: int) -> bool:
        """Whether the edit may change a value in a layer."""
        return True

    @property
    def skip(self) -> int:
        """The number of first layers that need not run, because this edit puts in a state after them."""
        return 0

    def check(self, anatomy: Anatomy) -> None:  # noqa: B027 - most edits fit every model
        """Raise HelmscopeError, before anything runs, if this edit does not fit the model."""


class Observer:
    """Base class of observers, which receive values after all edits and do not change them. Values are valid only
    during the call.

    >>> class Lengths(Observer):
    ...     sites = frozenset({Site.OUTPUT})
    ...
    ...     def state(self, site, layer, value):
    ...         print(layer, self.chunk.rows, value.norm(dim=-1).shape)
    """

    sites: frozenset[Site] = frozenset()  # states and writes for which ``state`` is called
    sees_attention: bool = False  # whether ``before`` and ``after`` are called
    sees_cross: bool = False  # whether ``after_cross`` is called
    needs_all_layers: bool = False  # whether layers before a state that is put in must run too
    chunk: Chunk
    memory: Tensor  # the last states of the encoder (rows, m, d); set if ``sees_cross``

    @property
    def rows(self) -> slice:
        """The texts of the batch that the current forward pass processes."""
        return self.chunk.rows

    def begin(self, chunk: Chunk) -> None:
        """Called when the forward pass of a chunk of texts begins."""
        self.chunk = chunk

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Called with a state or write (rows, n, d) at one of ``sites``."""

    def before(self, layer: int, call: Call) -> None:
        """Called with the inputs of attention, except in families outside transformers' attention registry."""

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Called with the inputs and results of attention; ``call`` is None if a family returns only its weights."""

    def after_cross(self, layer: int, call: Call, result: Attended) -> None:
        """Called with the inputs and results of cross-attention."""


def bytes_of(value: Tensor) -> bytes:
    """The raw bytes of a tensor of any dtype."""
    return value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()


def short_description(value: Any) -> str:
    """A short repr of a value; tensors appear as dtype, shape and hash."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"<{kind} {tuple(value.shape)} sha256 {hash_bytes(bytes_of(value))[:12]}>"
    if isinstance(value, Enum):
        return str(value)
    value = list(value) if isinstance(value, tuple) else value
    shown = " ".join((getattr(value, "__qualname__", None) or repr(value)).split())
    return shown if len(shown) <= LONGEST_VALUE else shown[: LONGEST_VALUE - 3] + "..."
