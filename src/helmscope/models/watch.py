"""What passes through a model's forward, and the two ways to take part in it.

    INPUT              the block's input
    ATTENTION          what attention writes
    MIDDLE             the state behind attention, virtual in a parallel block
    READ               what the module at the middle reads: the mid state, or of a post-norm block the sum
    CROSS              what cross-attention writes, in the decoder of an encoder-decoder model
    CROSS_MIDDLE       the state behind cross-attention
    CROSS_READ         what the module there reads, as READ
    MLP                what the MLP writes
    CLOSE              what the norm at the end of a post-norm block reads
    OUTPUT             the block's output                                            all of these are (rows, n, d)
    QUERY, KEY, VALUE  what attention is computed from: (rows, heads, n, r), keys and values (rows, kv_heads, n, r)
    MASK               what is added to the logits of attention, broadcasts to (rows, heads, n, n); 0 if there is none
    WEIGHTS            the attention weights (rows, heads, n, n)
    HEADS              what the heads read, before the output matrix: (rows, n, heads, r)
    CROSS_QUERY, ...   the same six of cross-attention, whose keys and values are those of the encoder's m tokens:
                       (rows, kv_heads, m, r), and (rows, heads, n, m) for weights and mask

An edit (``AbstractEdit``) gives what takes the place of a value. It is frozen: where it is, and which texts are under
way, is passed to it as a ``Context``. An ``Observer`` sees what the edits left and changes nothing; it gathers a
result, and is told when the next texts begin. READ, CROSS_READ and CLOSE are there to be observed; edits are made at
the others.
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

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.tap import Attended, Call

LONGEST_VALUE = 400  # characters of one value in the repr of an edit


class Site(Enum):
    """Where a value passes.

    >>> " ".join(site.name for site in Site if "CROSS" not in site.name)
    'INPUT ATTENTION MIDDLE READ MLP CLOSE OUTPUT QUERY KEY VALUE MASK WEIGHTS HEADS'
    >>> Site.CROSS_WEIGHTS.value
    'cross weights'
    """

    INPUT = "input"
    ATTENTION = "attention"
    MIDDLE = "middle"
    READ = "read"
    CROSS = "cross"
    CROSS_MIDDLE = "cross middle"
    CROSS_READ = "cross read"
    MLP = "mlp"
    CLOSE = "close"
    OUTPUT = "output"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    MASK = "mask"
    WEIGHTS = "weights"
    HEADS = "heads"
    CROSS_QUERY = "cross query"
    CROSS_KEY = "cross key"
    CROSS_VALUE = "cross value"
    CROSS_MASK = "cross mask"
    CROSS_WEIGHTS = "cross weights"
    CROSS_HEADS = "cross heads"


@dataclass(frozen=True)
class Inside:
    """The sites inside an attention: what it is computed from, by the names that a ``Call`` has for it, and what it
    gives.
    """

    before: Mapping[str, Site]
    weights: Site
    heads: Site

    @property
    def all(self) -> frozenset[Site]:
        """All of them."""
        return frozenset({*self.before.values(), self.weights, self.heads})


IN_SELF = Inside(
    {"query": Site.QUERY, "key": Site.KEY, "value": Site.VALUE, "mask": Site.MASK}, Site.WEIGHTS, Site.HEADS
)
IN_CROSS = Inside(
    {"query": Site.CROSS_QUERY, "key": Site.CROSS_KEY, "value": Site.CROSS_VALUE, "mask": Site.CROSS_MASK},
    Site.CROSS_WEIGHTS,
    Site.CROSS_HEADS,
)
IN_ATTENTION = IN_SELF.all | IN_CROSS.all
STATES_AND_WRITES = frozenset(Site) - IN_ATTENTION
OF_CROSS = IN_CROSS.all | {Site.CROSS, Site.CROSS_MIDDLE, Site.CROSS_READ}
EDITABLE_STATES = (
    *(Site.INPUT, Site.ATTENTION, Site.MIDDLE, Site.CROSS, Site.CROSS_MIDDLE),
    *(Site.MLP, Site.OUTPUT),
)
LEADS_TO = {Site.ATTENTION: Site.MIDDLE, Site.CROSS: Site.CROSS_MIDDLE, Site.MLP: Site.OUTPUT}  # from write to state
READ_AT = {Site.MIDDLE: Site.READ, Site.CROSS_MIDDLE: Site.CROSS_READ, Site.OUTPUT: Site.CLOSE}


@dataclass(frozen=True, eq=False, kw_only=True)
class Chunk:
    """The texts of a batch that one forward runs: those numbered ``rows``, of ``texts`` in all. ``weights`` (rows, n)
    is how much each token counts in statistics and ``visible`` (rows, n) which tokens attention sees; each is None
    where it is 1 or True everywhere, or not known.
    """

    rows: slice
    texts: int
    weights: Float[Tensor, "rows n"] | None = None
    visible: Bool[Tensor, "rows n"] | None = None

    @classmethod
    def whole(cls, texts: int) -> Chunk:
        """A forward of all texts at once, of which nothing else is known."""
        return cls(rows=slice(0, texts), texts=texts)

    def at(self, site: Site, layer: int) -> Context:
        """The context of a value that passes while these texts run."""
        given = {"rows": self.rows, "texts": self.texts, "weights": self.weights, "visible": self.visible}
        return Context(site=site, layer=layer, **given)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False, kw_only=True)
class Context(Chunk):
    """Where an edit is: at a ``site`` of a ``layer``, while the texts of a ``Chunk`` run.

    >>> context = Context(site=Site.MLP, layer=3, rows=slice(4, 6), texts=8)
    >>> torch.arange(8)[context.rows]
    tensor([4, 5])
    >>> context.normal(torch.zeros(2, 5, 16), seed=0).shape
    torch.Size([2, 5, 16])
    """

    site: Site
    layer: int

    def generator(self, seed: int, text: int) -> np.random.Generator:
        """Random numbers that depend on the seed, this layer and the number of the text in the batch, and on nothing
        else: neither on the chunk, nor on the forward or the process.
        """
        source = np.random.SeedSequence(seed, spawn_key=(self.layer, text))
        return np.random.Generator(np.random.Philox(source))

    def normal(self, like: Float[Tensor, "rows ..."], *, seed: int) -> Float[Tensor, "rows ..."]:
        """Independent standard normal numbers of the shape of ``like``, drawn text by text from ``generator``."""
        texts = range(self.rows.start, self.rows.stop)
        drawn = [self.generator(seed, text).standard_normal(tuple(like.shape[1:])) for text in texts]
        return torch.from_numpy(np.stack(drawn)).to(like)


class AbstractEdit(ABC):
    """Gives what takes the place of a value in a forward. Its repr names what it was made of in one line, tensors by
    their shape and hash: a manifest holds it.
    """

    def __repr__(self) -> str:
        given: list[Field[Any]] = [each for each in fields(self) if each.repr] if is_dataclass(self) else []
        values = [(each, getattr(self, each.name)) for each in given]
        shown = (f"{each.name}={brief(value)}" for each, value in values if value is not each.default)
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    @abstractmethod
    def sites(self) -> frozenset[Site]:
        """The sites at which values are changed."""

    @abstractmethod
    def new(self, value: Tensor, context: Context) -> Tensor | None:
        """What takes the place of a value, which is valid during the call alone; None leaves it as it is."""

    def acts(self, layer: int) -> bool:
        """Whether anything is changed in a layer."""
        return True

    @property
    def skip(self) -> int:
        """How many of the first layers make no difference to what follows, because a state is put in behind them."""
        return 0

    def check(self, anatomy: Anatomy) -> None:  # noqa: B027 - most edits fit every model
        """Refuse a model that this edit does not fit, before anything runs."""


class Observer:
    """Sees what passes, as the edits left it, and changes nothing. Values are valid during the call alone.

    >>> class Lengths(Observer):
    ...     sites = frozenset({Site.OUTPUT})
    ...
    ...     def state(self, site, layer, value):
    ...         print(layer, self.chunk.rows, value.norm(dim=-1).shape)
    """

    sites: frozenset[Site] = frozenset()  # states and writes for which ``state`` is called
    sees_attention: bool = False  # whether ``before`` and ``after`` are called
    sees_cross: bool = False  # whether ``after_cross`` is called
    needs_all_layers: bool = False  # whether the layers before a state that is put in must run all the same
    chunk: Chunk
    memory: Tensor  # where it sees cross-attention, what the encoder gave: (rows, m, d)

    @property
    def rows(self) -> slice:
        """The texts of the batch that are under way."""
        return self.chunk.rows

    def begin(self, chunk: Chunk) -> None:
        """The forward of a chunk of texts begins."""
        self.chunk = chunk

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """A state or write (rows, n, d)."""

    def before(self, layer: int, call: Call) -> None:
        """What attention is about to be computed from; not called for families outside the registry of attention."""

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """What attention gave, and what from; ``call`` is None in a family that shows its weights alone."""

    def after_cross(self, layer: int, call: Call, result: Attended) -> None:
        """What cross-attention gave, and what from."""


def bytes_of(value: Tensor) -> bytes:
    """The numbers of a tensor, of whatever dtype."""
    return value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()


def brief(value: Any) -> str:
    """A value in a few words that tell it from another."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"<{kind} {tuple(value.shape)} sha256 {hash_bytes(bytes_of(value))[:12]}>"
    if isinstance(value, Enum):
        return str(value)
    value = list(value) if isinstance(value, tuple) else value
    shown = " ".join((getattr(value, "__qualname__", None) or repr(value)).split())
    return shown if len(shown) <= LONGEST_VALUE else shown[: LONGEST_VALUE - 3] + "..."
