"""One attention function for all families of transformers' attention registry: the family's own eager attention, with
hooks before and after it.

A ``tapped`` model computes the same values as with eager attention, bit for bit; the hook receives query, key, value
and weights of every call, and may change them. The mask function is registered too: without it a model would silently
attend to future tokens.
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
    """The inputs of an attention call: ``query`` (batch, heads, n, r), ``key`` and ``value`` (batch, kv_heads, n, r),
    the additive ``mask`` or None, and all other arguments of the family.
    """

    module: nn.Module
    query: Float[Tensor, "batch heads n r"]
    key: Float[Tensor, "batch kv_heads n r"]
    value: Float[Tensor, "batch kv_heads n r"]
    mask: Float[Tensor, "batch shared n n"] | None
    rest: Mapping[str, Any]

    @property
    def repeats(self) -> int:
        """The number of query heads per key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def head_values(self) -> Float[Tensor, "batch heads n r"]:
        """The values, repeated for each query head."""
        return self.value.repeat_interleave(self.repeats, 1)


@dataclass(frozen=True, eq=False)
class Attended:
    """The results of attention: ``output`` (batch, n, heads, r) before the output matrix, and the ``weights``."""

    output: Float[Tensor, "batch n heads r"]
    weights: Float[Tensor, "batch heads n n"]

    def with_weights(self, weights: Float[Tensor, "batch heads n n"], call: Call) -> Attended:
        """The results with other weights, and the output computed from them."""
        return Attended(head_outputs(call, weights).transpose(1, 2).contiguous(), weights)


class AttentionHook(Protocol):
    """Called before and after every attention call."""

    def before(self, call: Call) -> Call:
        """The inputs to use instead of ``call``."""

    def after(self, call: Call, result: Attended) -> Attended:
        """The results to use instead of ``result``."""


_current_hook: ContextVar[AttentionHook | None] = ContextVar("attention hook", default=None)
_locks: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Chained:
    """The hook of an outer context, followed by that of an inner one."""

    outer: AttentionHook
    inner: AttentionHook

    def before(self, call: Call) -> Call:
        return self.inner.before(self.outer.before(call))

    def after(self, call: Call, result: Attended) -> Attended:
        return self.inner.after(call, self.outer.after(call, result))


def tapped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
) -> tuple[Tensor, Tensor]:
    """The family's own eager attention, with the current hook, if any, called before and after it."""
    eager, hook = eager_of(module), _current_hook.get()
    call = Call(module, query, key, value, attention_mask, rest)
    if hook is not None:
        call = hook.before(call)
    output, weights = eager(module, call.query, call.key, call.value, call.mask, **rest)
    if hook is not None:
        if query.dtype.itemsize < 4:  # rows in half precision sum to 1 within 2e-3 only
            wide = [None if part is None else part.float() for part in (call.query, call.key, call.value, call.mask)]
            weights = eager(module, *wide, **rest)[1]
        result = hook.after(call, Attended(output, weights))
        output, weights = result.output, result.weights
    return output, weights


def eager_of(module: nn.Module) -> Any:
    """The ``eager_attention_forward`` of the Python module that defines the class of an attention module."""
    for kind in type(module).__mro__:
        eager = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise LookupError(f"{type(module).__name__} has no eager_attention_forward in its Python module")


def can_be_tapped(model: Any) -> bool:
    """Whether the model's family takes its attention function from the registry."""
    return bool(model._can_set_attn_implementation())


def share_lock(part: nn.Module, whole: nn.Module) -> None:
    """Use one lock for an encoder and its model, so that threads that need both cannot deadlock."""
    _locks[part] = _locks.setdefault(whole, RLock())


@contextmanager
def locked(model: Any) -> Iterator[None]:
    """Context manager: within it, other threads wait before they change or record this model."""
    with _locks.setdefault(model, RLock()):
        yield


@contextmanager
def tapped(model: Any, hook: AttentionHook | None) -> Iterator[None]:
    """Context manager: within it, a model computes eager attention and ``hook`` is called; on exit, the model's own
    attention is restored.

    In a family outside the registry the hook is not called. It is set to eager nevertheless: with another
    implementation it may return weights computed without its mask. Contexts nest, and outer hooks are still called.
    """
    registered, outer = can_be_tapped(model), _current_hook.get()
    chained = _Chained(outer, hook) if outer is not None and hook is not None else hook or outer
    with plainly_eager(model):
        token = _current_hook.set(chained)
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
            _current_hook.reset(token)


@contextmanager
def plainly_eager(model: Any) -> Iterator[None]:
    """Context manager: within it, a model computes attention by its own eager code, without hooks."""
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
    """All configurations that select an attention implementation: those of the model and of its parts."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    for config in list(configs.values()):
        for name in getattr(config, "sub_configs", ()):
            part = getattr(config, name, None)
            if part is not None:
                configs[id(part)] = part
    return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]


def head_outputs(call: Call, weights: Float[Tensor, "batch heads n n"]) -> Float[Tensor, "batch heads n r"]:
    """The head outputs A_h V_h for each query head."""
    return torch.matmul(weights.to(call.value.dtype), call.head_values)
