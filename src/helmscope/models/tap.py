"""One attention function for every family of the transformers registry: the family's own eager attention, with somebody
listening.

A model that is ``tapped`` computes what it computes under eager attention, to the bit; whoever listens sees query, key,
value and weights of every call, and may change them. The mask is registered too: without it a model would silently see
the future.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from helmscope.types import MissingExtra

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

NAME = "helmscope"


@dataclass(frozen=True, eq=False)
class Call:
    """What attention is computed from: ``query`` (batch, heads, n, r), ``key`` and ``value`` (batch, kv_heads, n, r),
    the additive ``mask`` or None, and whatever else the family hands over.
    """

    module: nn.Module
    query: Float[Tensor, "batch heads n r"]
    key: Float[Tensor, "batch kv_heads n r"]
    value: Float[Tensor, "batch kv_heads n r"]
    mask: Float[Tensor, "batch shared n n"] | None
    rest: Mapping[str, Any]

    @property
    def repeats(self) -> int:
        """How many query heads share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def head_values(self) -> Float[Tensor, "batch heads n r"]:
        """The values, one for each query head."""
        return self.value.repeat_interleave(self.repeats, 1)


@dataclass(frozen=True, eq=False)
class Attended:
    """What attention gives: ``output`` (batch, n, heads, r) before the output matrix, and the ``weights``."""

    output: Float[Tensor, "batch n heads r"]
    weights: Float[Tensor, "batch heads n n"]

    def with_weights(self, weights: Float[Tensor, "batch heads n n"], call: Call) -> Attended:
        """Other weights, and the output that follows from them."""
        return Attended(head_outputs(call, weights).transpose(1, 2).contiguous(), weights)


class Listener(Protocol):
    """Hears every attention call."""

    def before(self, call: Call) -> Call:
        """What to compute from."""

    def after(self, call: Call, result: Attended) -> Attended:
        """What to go on with."""


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_locks: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Both:
    """An outer listener, then an inner one, as nested contexts want it."""

    outer: Listener
    inner: Listener

    def before(self, call: Call) -> Call:
        return self.inner.before(self.outer.before(call))

    def after(self, call: Call, result: Attended) -> Attended:
        return self.inner.after(call, self.outer.after(call, result))


def tapped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
) -> tuple[Tensor, Tensor]:
    """The family's own eager attention; the listener, if there is one, is asked before and after."""
    eager, listener = eager_of(module), _listener.get()
    call = Call(module, query, key, value, attention_mask, rest)
    if listener is not None:
        call = listener.before(call)
    output, weights = eager(module, call.query, call.key, call.value, call.mask, **rest)
    if listener is not None:
        if query.dtype.itemsize < 4:  # rows in half precision sum to 1 within 2e-3 only
            wide = [None if part is None else part.float() for part in (call.query, call.key, call.value, call.mask)]
            weights = eager(module, *wide, **rest)[1]
        result = listener.after(call, Attended(output, weights))
        output, weights = result.output, result.weights
    return output, weights


def eager_of(module: nn.Module) -> Any:
    """``eager_attention_forward`` of the Python module in which the attention module's class is written."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise LookupError(f"{type(module).__name__} has no eager_attention_forward beside it")


def can_be_tapped(model: Any) -> bool:
    """Whether the model's family looks its attention up in the registry."""
    return bool(model._can_set_attn_implementation())


def share_lock(part: nn.Module, whole: nn.Module) -> None:
    """One lock for an encoder and its model: threads that want both, in whatever order, do not wait for each other."""
    _locks[part] = _locks.setdefault(whole, RLock())


@contextmanager
def held(model: Any) -> Iterator[None]:
    """Inside, no other thread changes or records this model: it waits."""
    with _locks.setdefault(model, RLock()):
        yield


@contextmanager
def tapped(model: Any, listener: Listener | None) -> Iterator[None]:
    """Inside, the attention of a model is eager and heard by ``listener``; afterwards the model's own is back.

    A family outside the registry is heard by nobody. It is told to be eager all the same: asked for its weights under
    another name it may compute them without its mask. Contexts nest, and an outer listener goes on hearing.
    """
    registered, outer = can_be_tapped(model), _listener.get()
    everyone = _Both(outer, listener) if outer is not None and listener is not None else listener or outer
    with plainly_eager(model):
        token = _listener.set(everyone)
        try:
            if registered:
                _register()
                model.set_attn_implementation(NAME)
                # before transformers 5.18 a stack with a copy of its model's configuration, as in T5, is not reached
                for part in model.modules():
                    if type(getattr(part, "config", None)) is type(model.config):
                        part.config._attn_implementation_internal = NAME
            yield
        finally:
            _listener.reset(token)


@contextmanager
def plainly_eager(model: Any) -> Iterator[None]:
    """Inside, a model computes its attention by its own eager code, and nobody hears it; afterwards as before."""
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def _register() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask
    except ImportError as error:
        raise MissingExtra("transformers", "models") from error
    AttentionInterface.register(NAME, tapped_attention)
    AttentionMaskInterface.register(NAME, eager_mask)


def _configs(model: Any) -> list[Any]:
    """Every configuration that says how attention is computed: that of the model, and those of its parts."""
    found = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    for config in list(found.values()):
        for name in getattr(config, "sub_configs", ()):
            part = getattr(config, name, None)
            if part is not None:
                found[id(part)] = part
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def head_outputs(call: Call, weights: Float[Tensor, "batch heads n n"]) -> Float[Tensor, "batch heads n r"]:
    """A_h V_h, one for each query head."""
    return torch.matmul(weights.to(call.value.dtype), call.head_values)
