"""The changes that a forward can be run under, each one a ``Watcher``; ``changed`` and ``Recording.under`` apply them.

    Replace, Add, Ablate   a state or a write: Site.INPUT, ATTENTION, MIDDLE, MLP, OUTPUT
    Patch                  states or writes of another recording
    Perturb                query, key or value by Gaussian noise
    Reweigh                the attention weights, by any function
    AblateHead, MaskKeys   single heads, single keys

``layers`` None means all layers. Every change is checked against the model before the forward begins.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helmscope.models.anatomy import Anatomy
from helmscope.models.place import HALVES
from helmscope.models.recording import Recording
from helmscope.models.watch import Site, Watcher, watching
from helmscope.types import HelmscopeError, real_number, seed_number

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.tap import Attended, Call

CHANGEABLE = (Site.INPUT, Site.ATTENTION, Site.MIDDLE, Site.MLP, Site.OUTPUT)


@contextmanager
def changed(model: Recording | Anatomy, *changes: Watcher) -> Iterator[Any]:
    """Inside, every forward of the model runs under the changes; afterwards it is as it was, whatever happened.

    Gives the model itself, to be called. No recording is made inside, which would not know of the changes:
    ``recording.under`` makes it.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> from helmscope.models.record import record
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4]]))
    >>> with changed(recording, Ablate(site=Site.ATTENTION), Ablate(site=Site.MLP)) as bare:
    ...     bare(torch.tensor([[1, 2, 3, 4]])).logits.shape
    torch.Size([1, 4, 9])
    """
    anatomy = model.anatomy if isinstance(model, Recording) else model
    if not isinstance(anatomy, Anatomy):
        raise HelmscopeError(f"model is a {type(model).__name__}, but changes are made under a Recording of it")
    with watching(anatomy, *changes):
        yield anatomy.model


@dataclass(eq=False, repr=False)
class Change(Watcher):
    """What all changes share: the layers that they act in."""

    layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.layers is not None:
            self.layers = _numbers("layers", self.layers)

    def acts(self, layer: int) -> bool:
        """Whether a layer is changed."""
        return self.layers is None or layer in self.layers

    def check(self, anatomy: Anatomy) -> None:
        """Refuse layers that the model has not, and attention that cannot be heard."""
        count = len(anatomy.layers)
        for layer in self.layers or ():
            if layer >= count:
                raise HelmscopeError(f"layers holds {layer}, but the model has layers 0 to {count - 1}")
        if self.hears and not anatomy.tapped:
            raise HelmscopeError(
                f"{type(self).__name__} changes what attention is computed from, but the family of "
                f"{type(anatomy.model).__name__} does not look its attention up: states and writes can be changed"
            )


@dataclass(eq=False, repr=False)
class AtSite(Change, ABC):
    """A change of a state or a write, at some tokens: ``tokens`` (batch, n), all where None."""

    site: Site = Site.MLP
    tokens: Bool[Tensor, "batch n"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.site not in CHANGEABLE:
            allowed = ", ".join(f"Site.{site.name}" for site in CHANGEABLE)
            raise HelmscopeError(f"site is {self.site!r}, but a change is made at one of {allowed}")
        self.sites = frozenset({self.site})

    def state(self, site: Site, layer: int, value: Tensor) -> Tensor | None:
        """The new value, at the tokens that are meant."""
        if not self.acts(layer):
            return None
        new = self.new(layer, value)
        if self.tokens is None:
            return new
        return torch.where(rows_of("tokens", self.tokens, self, value).unsqueeze(-1), new, value)

    @abstractmethod
    def new(self, layer: int, value: Tensor) -> Tensor:
        """What takes the place of a value."""


@dataclass(eq=False, repr=False)
class Ablate(AtSite):
    """A write is 0, so that the half-layer does nothing (post-norm: but its norm); a state is 0.

    >>> Ablate([3], site=Site.ATTENTION).acts(3)
    True
    """

    def new(self, layer: int, value: Tensor) -> Tensor:
        """0."""
        return torch.zeros_like(value)


@dataclass(eq=False, repr=False)
class Replace(AtSite):
    """A state or write becomes ``value``, which broadcasts to (batch, n, d).

    >>> Replace(site=Site.INPUT, value=2.0).state(Site.INPUT, 0, torch.zeros(1, 1, 2))
    tensor([[[2., 2.]]])
    """

    value: Float[Tensor, ...] | float = 0.0

    def new(self, layer: int, value: Tensor) -> Tensor:
        """The given value."""
        return _value_at(self.value, self, value)


@dataclass(eq=False, repr=False)
class Add(AtSite):
    """``value``, which broadcasts to (batch, n, d), is added to a state or write: steering by a vector.

    >>> Add(site=Site.MLP, value=torch.tensor([1.0, 0.0])).state(Site.MLP, 0, torch.ones(1, 1, 2))
    tensor([[[2., 1.]]])
    """

    value: Float[Tensor, ...] | float = 0.0

    def new(self, layer: int, value: Tensor) -> Tensor:
        """The sum."""
        return value + _value_at(self.value, self, value)


@dataclass(eq=False, repr=False)
class Patch(AtSite):
    """States or writes are those of another recording of as many tokens; writes if it kept them, ``Keep.WRITES``.

    >>> Patch([1], site=Site.MIDDLE).layers
    [1]
    """

    source: Recording | None = None

    def check(self, anatomy: Anatomy) -> None:
        """Refuse a source of another size, or one that has not kept what is asked of it."""
        super().check(anatomy)
        if not isinstance(self.source, Recording):
            raise HelmscopeError(f"source is a {type(self.source).__name__}, but a patch comes from a Recording")
        if self.site not in HALVES and f"{self.site.value} write" not in self.source.kept:
            raise HelmscopeError(f"site is {self.site!r}, but source kept no writes: record it with keep=Keep.WRITES")
        layers = len(self.source.anatomy.layers)
        if layers != len(anatomy.layers) or self.source.anatomy.dim != anatomy.dim:
            raise HelmscopeError(
                f"source has {layers} layers of width {self.source.anatomy.dim}, but the model has "
                f"{len(anatomy.layers)} of width {anatomy.dim}"
            )

    def new(self, layer: int, value: Tensor) -> Tensor:
        """The other recording's state or write."""
        assert self.source is not None
        if self.site not in HALVES:
            state = self.source.kept[f"{self.site.value} write"][layer][self.rows]
        else:
            depth = 2 * layer + HALVES[self.site]
            if depth < self.source.first:
                raise HelmscopeError(f"source begins at depth {self.source.first}, but layer {layer} asks for {depth}")
            state = self.source.stream(depth=depth)[self.rows]
        if state.shape != value.shape or len(self.source.batch) != (self.texts or len(value)):
            raise HelmscopeError(f"source has states {tuple(state.shape)}, but the model has {tuple(value.shape)}")
        return state.to(value)


class Part(Enum):
    """What attention is computed from.

    >>> [part.value for part in Part]
    ['query', 'key', 'value']
    """

    QUERY = "query"
    KEY = "key"
    VALUE = "value"


@dataclass(eq=False, repr=False)
class Perturb(Change):
    """Gaussian noise on query, key or value: of standard deviation ``sigma``, as source 003 prints it, or of
    ``relative`` times the root mean square of that part over a text in the layer. One of the two is given.

    The noise follows from ``seed``, the layer and the number of the text, in every forward, in every process and
    however many texts run at a time.

    >>> Perturb(part=Part.KEY, relative=0.1, seed=1)
    Perturb(part=Part.KEY, relative=0.1, seed=1)
    """

    part: Part = Part.QUERY
    sigma: float | None = None
    relative: float | None = None
    seed: int = 0
    hears = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seed = seed_number(self.seed)
        if (self.sigma is None) == (self.relative is None):
            raise HelmscopeError(
                f"sigma is {self.sigma!r} and relative is {self.relative!r}, but exactly one of them must be given"
            )
        if self.sigma is not None:
            self.sigma = real_number("sigma", self.sigma, at_least=0)
        if self.relative is not None:
            self.relative = real_number("relative", self.relative, at_least=0)
        if not isinstance(self.part, Part):
            raise HelmscopeError(f"part is {self.part!r}, but it must be Part.QUERY, Part.KEY or Part.VALUE")

    def before(self, layer: int, call: Call) -> Call:
        """With noise in one part."""
        if not self.acts(layer):
            return call
        old: Tensor = getattr(call, self.part.value)
        first = self.rows.start or 0
        noise = torch.stack([self._noise(layer, first + k, old.shape[1:]) for k in range(len(old))]).to(old)
        if self.relative is None:
            size = torch.tensor(self.sigma).to(old)
        else:
            size = self.relative * old.float().square().mean((1, 2, 3), keepdim=True).sqrt().to(old)
        new: dict[str, Any] = {self.part.value: old + size * noise}
        return replace(call, **new)

    def _noise(self, layer: int, text: int, shape: torch.Size) -> Tensor:
        """Standard normal numbers, in float64 on the CPU."""
        source = np.random.SeedSequence(self.seed, spawn_key=(layer, text))
        return torch.from_numpy(np.random.Generator(np.random.Philox(source)).standard_normal(tuple(shape)))


@dataclass(eq=False, repr=False)
class Reweigh(Change):
    """The attention weights (batch, heads, n, n) of a layer go through ``function``; the output follows from them.

    >>> Reweigh([0], function=lambda weights: torch.full_like(weights, 1 / weights.shape[-1])).acts(1)
    False
    """

    function: Callable[[Tensor], Tensor] = torch.clone
    hears = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise HelmscopeError(f"function is {self.function!r:.60}, but it must be a function of the weights")

    def after(self, layer: int, call: Call | None, result: Attended) -> Attended:
        """With other weights."""
        if not self.acts(layer):
            return result
        assert call is not None
        weights = self.function(result.weights)
        if not isinstance(weights, torch.Tensor) or weights.shape != result.weights.shape:
            shown = tuple(weights.shape) if isinstance(weights, torch.Tensor) else type(weights).__name__
            raise HelmscopeError(f"function gives {shown}, but weights have the shape {tuple(result.weights.shape)}")
        return result.with_weights(weights, call)


@dataclass(eq=False, repr=False)
class AblateHead(Change):
    """What some heads read is 0: they write nothing but the output matrix's bias.

    >>> AblateHead([2], heads=[0, 5]).heads
    [0, 5]
    """

    heads: Sequence[int] = ()
    hears = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.heads = _numbers("heads", self.heads)

    def after(self, layer: int, call: Call | None, result: Attended) -> Attended:
        """Without these heads."""
        if not self.acts(layer):
            return result
        count = result.output.shape[2]
        for head in self.heads:
            if head >= count:
                raise HelmscopeError(f"heads holds {head}, but layer {layer} has heads 0 to {count - 1}")
        output = result.output.clone()
        output[:, :, list(self.heads)] = 0
        return replace(result, output=output)


@dataclass(eq=False, repr=False)
class MaskKeys(Change):
    """No other token sees the tokens where ``keys`` (batch, n) is True; a token always sees itself. One that would see
    nobody sees what it saw before.

    >>> MaskKeys(keys=torch.tensor([[True, False]])).acts(0)
    True
    """

    keys: Bool[Tensor, "batch n"] | None = None
    hears = True

    def check(self, anatomy: Anatomy) -> None:
        """Refuse a mask that is none."""
        super().check(anatomy)
        if not isinstance(self.keys, torch.Tensor) or self.keys.dtype != torch.bool:
            raise HelmscopeError(f"keys is {type(self.keys).__name__}, but it must be a tensor of bool (batch, n)")

    def before(self, layer: int, call: Call) -> Call:
        """With a stricter mask."""
        if not self.acts(layer):
            return call
        assert self.keys is not None
        n = call.query.shape[-2]
        least = torch.finfo(call.query.dtype).min
        old = call.query.new_zeros(1, 1, n, n) if call.mask is None else call.mask
        others = ~torch.eye(n, dtype=torch.bool, device=old.device)
        hidden = rows_of("keys", self.keys, self, call.query[:, 0])[:, None, None, :] & others
        seen = (old > least / 2) & ~hidden
        blind = ~seen.any(-1, keepdim=True)
        return replace(call, mask=torch.where(hidden & ~blind, least, old))


@contextmanager
def with_parameters(model: Any, values: Mapping[str, Tensor]) -> Iterator[Any]:
    """Inside, the named parameters of a model are these; afterwards they are what they were, to the bit.

    That is a model of its own, and may be recorded; what asks it again (``kernel``, ``force``, ``logits``, ``resume``,
    ``under``) is to be called inside as well. Record the model itself: a ``Loaded`` names the hashes of its files.

    >>> line = torch.nn.Linear(1, 1, bias=False)
    >>> with with_parameters(line, {"weight": torch.tensor([[2.0]])}):
    ...     line(torch.ones(1)).tolist()
    [2.0]
    """
    if not isinstance(model, torch.nn.Module):
        raise HelmscopeError(f"model is a {type(model).__name__}, but parameters are those of a module")
    known = dict(model.named_parameters())
    for name, value in values.items():
        if name not in known:
            raise HelmscopeError(f"values names the parameter '{name}', but the model has none of that name")
        if not isinstance(value, torch.Tensor):
            raise HelmscopeError(f"values gives '{name}' a {type(value).__name__}, but it must be a tensor")
        if known[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, but the model's has {tuple(known[name].shape)}"
            raise HelmscopeError(f"values gives '{name}' the shape {shapes}")
    before = {name: known[name].detach().clone() for name in values}
    try:
        with torch.no_grad():
            for name, value in values.items():
                known[name].copy_(value)
        yield model
    finally:
        with torch.no_grad():
            for name, value in before.items():
                known[name].copy_(value)


def _numbers(name: str, value: Any) -> list[int]:
    """Layers or heads by their numbers."""
    try:
        found = [-1 if isinstance(each, bool) else operator.index(each) for each in value]
    except TypeError:
        found = []
    if not found or min(found) < 0:
        raise HelmscopeError(f"{name} is {value!r:.60}, but it must be a list of whole numbers >= 0 such as [0, 3]")
    return found


def rows_of(name: str, mask: Bool[Tensor, "batch n"], watcher: Watcher, like: Tensor) -> Bool[Tensor, "rows n"]:
    """The part of a mask over the whole batch that belongs to the texts under way, which are ``like``'s (rows, n)."""
    part = mask[watcher.rows].to(like.device) if isinstance(mask, torch.Tensor) else torch.empty(0)
    whole = len(like) if watcher.texts is None else watcher.texts
    if part.shape != like.shape[:2] or len(mask) != whole or part.dtype != torch.bool:
        shown = f"of {mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise HelmscopeError(f"{name} is {shown}, but it must be a tensor of bool of shape ({whole}, {like.shape[1]})")
    return part


def _value_at(value: Tensor | float, watcher: Watcher, like: Tensor) -> Tensor:
    """A value for the texts under way: it broadcasts to them, or has a row for each text of the batch."""
    whole = len(like) if watcher.texts is None else watcher.texts
    try:
        tensor = torch.as_tensor(value).to(like)
        rows = tensor.ndim == 3 and len(tensor) == whole
        return (tensor[watcher.rows] if rows else tensor).expand_as(like)
    except (RuntimeError, TypeError) as error:
        shown = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)[:40]
        wanted = f"it must broadcast to states of shape {(whole, *like.shape[1:])}"
        raise HelmscopeError(f"value is {shown}, but {wanted}") from error
