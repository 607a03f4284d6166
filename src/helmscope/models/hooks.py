"""Forward hooks that apply edits and call observers at every site of a model.

``hooked`` removes all hooks when it exits, also after an exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.probe import tensors_in
from helmscope.models.qkv_capture import AttentionCapture
from helmscope.models.sites import (
    IN_ATTENTION,
    IN_CROSS,
    IN_SELF,
    LEADS_TO,
    READ_AT,
    AbstractEdit,
    Chunk,
    Observer,
    Site,
)
from helmscope.models.tap import Attended, Call, locked, tapped
from helmscope.models.topology import Kind
from helmscope.store.atomic import one_line
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from helmscope.models.anatomy import Anatomy, Layer

_chunks: ContextVar[Mapping[int, Chunk]] = ContextVar("chunks", default=MappingProxyType({}))


@contextmanager
def current_chunk(model: nn.Module, chunk: Chunk) -> Iterator[None]:
    """Context manager: within it, forward passes of the model process the texts of ``chunk``, which all edits attached
    to it receive, those of outer contexts too. An encoder and the model that contains it have separate chunks.
    """
    token = _chunks.set({**_chunks.get(), id(model): chunk})
    try:
        yield
    finally:
        _chunks.reset(token)


class _ForwardPass:
    """The current forward pass: the number of the layer, its input ``pre``, the ``state`` to which the next write is
    added, the texts, the edits and the observers.
    """

    def __init__(self, anatomy: Anatomy, edits: Sequence[AbstractEdit], observers: Sequence[Observer]) -> None:
        self.anatomy, self.edits, self.observers, self.number = anatomy, edits, observers, -1
        self.pre: Tensor | None = None
        self.state: Tensor | None = None
        self.chunk = Chunk.whole(0)
        self.wanted = frozenset().union(*(edit.sites for edit in edits), *(each.sites for each in observers))
        self.modules = {id(module) for block in anatomy.blocks for module in block.modules()}
        paths = [(layer, layer.wiring.cross_module) for layer in anatomy.layers]
        self.cross_modules = {id(layer.part(path)) for layer, path in paths if path is not None}
        observed = any(each.sees_attention or each.sees_cross for each in observers)
        self.sees_attention = bool(self.wanted & IN_ATTENTION) or observed
        self.capture = AttentionCapture() if anatomy.captured and self.sees_attention else None

    @property
    def layer(self) -> Layer:
        return self.anatomy.layers[self.number]

    def begin_layer(self, pre: Tensor) -> None:
        """Advance to the next layer, whose input is ``pre``; the first layer also begins a chunk of texts."""
        self.number += 1
        self.pre = self.state = pre
        if self.number == 0:
            chunk, texts = _chunks.get().get(id(self.anatomy.model)), len(pre)
            fits = chunk is not None and chunk.rows.stop - chunk.rows.start == texts
            self.chunk = chunk if chunk is not None and fits else Chunk.whole(texts)
            for observer in self.observers:
                observer.begin(self.chunk)

    def edit(self, site: Site, value: Tensor) -> Tensor | None:
        """The value after all edits; None if no edit changed it."""
        changed = None
        for edit in self.edits:
            if site in edit.sites and edit.acts(self.number):
                old = value if changed is None else changed
                new = self._replacement(edit, site, old)
                changed = changed if new is None else _checked_replacement(new, old, edit, site)
        return changed

    def _replacement(self, edit: AbstractEdit, site: Site, value: Tensor) -> Tensor | None:
        """What an edit returns for a value; an error in its code is raised as HelmscopeError that names the edit."""
        try:
            return edit.new(value, self.chunk.at(site, self.number))
        except HelmscopeError:
            raise
        except Exception as error:  # the function of an edit is any code
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise HelmscopeError(
                f"the function of {edit!r:.120} fails at {site} in layer {self.number}: {reason}"
            ) from error

    def edit_and_observe(self, site: Site, value: Tensor) -> Tensor | None:
        """Apply the edits to a state or write, and pass the result to the observers; None if no edit changed it."""
        changed = self.edit(site, value)
        for observer in self.observers:
            if site in observer.sites:
                observer.state(site, self.number, value if changed is None else changed)
        return changed

    def _is_in_block(self, call: Call | None) -> bool:
        """Whether an attention call comes from a block of this model, not from another model or another part of it."""
        return call is None or id(call.module) in self.modules

    def before(self, call: Call) -> Call:
        """The inputs of attention after the edits; the observers receive them."""
        if not self._is_in_block(call):
            return call
        is_cross = self._is_cross(call)
        for name, site in (IN_CROSS if is_cross else IN_SELF).before.items():
            if site in self.wanted:
                old = getattr(call, name)
                n, m = call.query.shape[-2], call.key.shape[-2]
                new = self.edit(site, call.query.new_zeros(1, 1, n, m) if old is None else old)
                changes: dict[str, Any] = {} if new is None else {name: new}
                call = replace(call, **changes)
        for observer in self.observers:
            if observer.sees_attention and not is_cross:
                observer.before(self.number, call)
        return call

    def _is_cross(self, call: Call | None) -> bool:
        """Whether an attention call is cross-attention."""
        return call is not None and id(call.module) in self.cross_modules

    def after(self, call: Call | None, result: Attended) -> Attended:
        """The results of attention after the edits; the observers receive them."""
        if not self._is_in_block(call):
            return result
        is_cross = self._is_cross(call)
        sites = IN_CROSS if is_cross else IN_SELF
        if sites.weights in self.wanted and call is not None:
            weights = self.edit(sites.weights, result.weights)
            result = result if weights is None else result.with_weights(weights, call)
        if sites.heads in self.wanted:
            output = self.edit(sites.heads, result.output)
            result = result if output is None else replace(result, output=output)
        for observer in self.observers:
            if is_cross and observer.sees_cross and call is not None:
                observer.after_cross(self.number, call, result)
            elif observer.sees_attention and not is_cross:
                observer.after(self.number, call, result)
        return result


def _checked_replacement(new: Any, old: Tensor, edit: AbstractEdit, site: Site) -> Tensor:
    """What an edit returned, in dtype and on the device of the value that it replaces; raises HelmscopeError unless the
    shape is the same, but a mask may have more rows or heads.
    """
    shown = tuple(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
    fits = isinstance(new, torch.Tensor) and new.shape == old.shape
    if site in (Site.MASK, Site.CROSS_MASK) and isinstance(new, torch.Tensor):
        fits = new.ndim == 4 and new.shape[-2:] == old.shape[-2:]
    if not fits:
        allowed = f"it must return a tensor of shape {tuple(old.shape)} there, or None for no change"
        raise HelmscopeError(f"{edit!r:.120} returns {shown} at {site}, but {allowed}")
    replacement: Tensor = new.to(old)
    return replacement


@contextmanager
def hooked(
    anatomy: Anatomy, edits: Sequence[AbstractEdit] = (), observers: Sequence[Observer] = (), *, skip: int = 0
) -> Iterator[None]:
    """Context manager: within it, every forward pass of the model runs under the edits, applied in their order, and the
    observers receive the values after all of them.

    The first ``skip`` layers return their input and compute nothing, for an edit that puts in a state after them; they
    run nevertheless if the blocks of the model return more than a state or are tied. Other threads wait for the model.
    """
    check_edits(anatomy, edits)
    with locked(anatomy.model), _attached_hooks(_ForwardPass(anatomy, edits, observers), skip):
        yield


def check_edits(anatomy: Anatomy, edits: Sequence[AbstractEdit]) -> None:
    """Raise HelmscopeError for an object that is not an edit, and for an edit that does not fit the model."""
    for edit in edits:
        if not isinstance(edit, AbstractEdit):
            raise HelmscopeError(
                f"an edit is {type_with_article(edit)}, but it must be an Edit(site, layers, function) or one "
                "such as Ablate()"
            )
        edit.check(anatomy)


@contextmanager
def locked_unedited(model: Any) -> Iterator[None]:
    """Context manager: within it, no other thread changes or records the model. Raises HelmscopeError if an edit is
    attached to it in this thread, whose effect would be recorded as that of the model.
    """
    with locked(model):
        hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
        if any(getattr(hook, "__module__", None) == __name__ for hook in hooks):
            raise HelmscopeError(
                f"model is {type_with_article(model)} under an edit, but only an unedited model can be recorded: leave "
                "`edited` first, and pass the edit to recording.under"
            )
        yield


@contextmanager
def _attached_hooks(forward: _ForwardPass, skip: int) -> Iterator[None]:
    anatomy = forward.anatomy
    skipped = [layer.block for layer in anatomy.layers[:skip]] if anatomy.can_skip else []
    handles: list[RemovableHandle] = []
    replaced: list[Any] = []  # the blocks' own `forward` attributes, which tools that move weights set

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        forward.number = -1

    try:
        for entry in (anatomy.model, anatomy.model.base_model):  # whichever is called
            handles.append(entry.register_forward_pre_hook(begin))
        for block in skipped:
            replaced.append(block.__dict__.get("forward"))
            block.forward = _return_input
        for block in anatomy.blocks:
            handles += _hook_block(block, forward)
            first = next(layer for layer in anatomy.layers if layer.block is block)
            handles += _hook_modules(first, forward)
        if anatomy.encoder is not None and any(each.sees_cross for each in forward.observers):
            handles.append(anatomy.encoder.register_forward_hook(_memory_hook(forward)))
        with tapped(anatomy.model, forward if forward.sees_attention else None), forward.capture or nullcontext():
            yield
    finally:
        for block, block_forward in zip(skipped, replaced, strict=False):
            del block.forward
            if block_forward is not None:
                block.forward = block_forward
        for handle in handles:
            handle.remove()


def _return_input(*args: Any, **kwargs: Any) -> Tensor:
    return tensors_in((args, kwargs))[0]


def _hook_block(block: nn.Module, forward: _ForwardPass) -> list[RemovableHandle]:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward.begin_layer(tensors_in((args, kwargs))[0])
        assert forward.pre is not None
        new = forward.edit_and_observe(Site.INPUT, forward.pre)
        if new is None:
            return None
        forward.pre = forward.state = new
        return replace_first_tensor((args, kwargs), new)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        value = tensors_in(output)[0]
        new = forward.edit_and_observe(Site.OUTPUT, value) if Site.OUTPUT in forward.wanted else None
        return None if new is None else replace_first_tensor(output, new)

    return [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]


def _memory_hook(forward: _ForwardPass) -> Any:
    """A hook that passes the encoder's last states to the observers of cross-attention."""

    def remember(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for observer in forward.observers:
            if observer.sees_cross:
                observer.memory = tensors_in(output)[0]

    return remember


def _hook_modules(layer: Layer, forward: _ForwardPass) -> list[RemovableHandle]:
    """Attach hooks to the modules of a block that write or read a state, if an edit or observer uses it."""
    wiring, handles = layer.wiring, []
    post_norm = wiring.kind is Kind.POST_NORM

    def write_hook(site: Site) -> Any:
        def on_write(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return _process_write(output, forward, site, adds=not post_norm)

        return on_write

    def state_hook(site: Site) -> Any:
        def on_state(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return forward.edit_and_observe(site, output)

        return on_state

    def read_hook(site: Site) -> Any:
        def on_read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert forward.pre is not None
            forward.edit_and_observe(site, tensors_in((args, kwargs))[0].reshape(forward.pre.shape))

        return on_read

    # a state between the halves is the sum of the writes before it, unless it is the output of a norm
    between = forward.wanted & {Site.MIDDLE, Site.CROSS_MIDDLE}
    for site, path in wiring.writes.items():
        needed = not post_norm and site is not Site.MLP and _leads_to_one_of(site, between)
        if site in forward.wanted or needed:
            handles.append(layer.part(path).register_forward_hook(write_hook(site)))
    for site, path in wiring.joints.items():
        if post_norm and site in between:
            handles.append(layer.part(path).register_forward_hook(state_hook(site)))
        if READ_AT[site] in forward.wanted:
            handles.append(layer.part(path).register_forward_pre_hook(read_hook(READ_AT[site]), with_kwargs=True))
    if wiring.weights is not None and forward.sees_attention:
        handles.append(layer.part(wiring.weights).register_forward_hook(_weights_hook(forward)))
    return handles


def _leads_to_one_of(write: Site, states: frozenset[Site]) -> bool:
    """Whether the write is a summand of one of the states."""
    return LEADS_TO[write] in states or (write is Site.ATTENTION and Site.CROSS_MIDDLE in states)


def _process_write(output: Any, forward: _ForwardPass, site: Site, *, adds: bool) -> Any:
    """Apply edits and observers to what a module writes, times the residual multiplier. If the write ``adds`` to the
    state, also to the state after it; a replaced state is reached by changing the write. Returns the new output of the
    module, None if it is unchanged.
    """
    value, state = tensors_in(output)[0], forward.state
    assert state is not None
    scale = forward.layer.wiring.scale(site)
    write = value.reshape(state.shape) if scale == 1 else scale * value.reshape(state.shape)
    changed = forward.edit_and_observe(site, write) if site in forward.wanted else None
    if adds and site is not Site.MLP and forward.wanted & {Site.MIDDLE, Site.CROSS_MIDDLE}:
        reached = state + (write if changed is None else changed)
        new = forward.edit_and_observe(LEADS_TO[site], reached)
        changed = changed if new is None else new - state
        forward.state = reached if new is None else new
    return None if changed is None else replace_first_tensor(output, (changed / scale).to(value).reshape(value.shape))


def _weights_hook(forward: _ForwardPass) -> Any:
    """A hook for a family outside the registry: it takes the weights that the attention module returns, and query, key
    and value if they are captured.
    """

    def on_attention(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        state, *others = tensors_in(output)
        weights = next(each for each in others if each.ndim == 4 and each.shape[-1] == each.shape[-2])
        captured = None if forward.capture is None else forward.capture.take(module, weights)
        forward.after(*(captured or (None, Attended(state, weights))))

    return on_attention


def replace_first_tensor(value: Any, new: Tensor) -> Any:
    """The arguments or the result of a call with the first floating-point tensor replaced."""
    return _replace_first(value, new)[0]


def _replace_first(value: Any, new: Tensor) -> tuple[Any, bool]:
    if isinstance(value, torch.Tensor):
        return (new, True) if value.is_floating_point() else (value, False)
    if isinstance(value, dict):
        for key, part in value.items():
            changed, done = _replace_first(part, new)
            if done:
                return {**value, key: changed}, True
    if isinstance(value, tuple | list):
        for k, part in enumerate(value):
            changed, done = _replace_first(part, new)
            if done:
                return type(value)([*value[:k], changed, *value[k + 1 :]]), True
    return value, False
