"""Run a model's forward with edits and observers attached to it: the hooks that find each site.

All hooks are gone when ``watching`` ends, whatever happened inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.overhear import Overhearing
from helmscope.models.probe import tensors_in
from helmscope.models.tap import Attended, Call, held, tapped
from helmscope.models.topology import Kind
from helmscope.models.watch import (
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
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from helmscope.models.anatomy import Anatomy, Layer

_chunks: ContextVar[Mapping[int, Chunk]] = ContextVar("chunks", default=MappingProxyType({}))


@contextmanager
def running(model: nn.Module, chunk: Chunk) -> Iterator[None]:
    """Inside, a forward of the model is one of these texts; all edits attached to it know, those of outer contexts too.
    An encoder and the model that it is part of have chunks of their own.
    """
    token = _chunks.set({**_chunks.get(), id(model): chunk})
    try:
        yield
    finally:
        _chunks.reset(token)


class _Passage:
    """A forward under way: the number of the layer, its input ``pre``, the ``state`` that the next write is added to,
    the texts, and everybody who changes or sees a value.
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
        hears = any(each.sees_attention or each.sees_cross for each in observers)
        self.sees_attention = bool(self.wanted & IN_ATTENTION) or hears
        self.overhearing = Overhearing() if anatomy.overheard and self.sees_attention else None

    @property
    def layer(self) -> Layer:
        return self.anatomy.layers[self.number]

    def enter(self, pre: Tensor) -> None:
        """The next layer begins, with its input; the first one begins a forward."""
        self.number += 1
        self.pre = self.state = pre
        if self.number == 0:
            known, texts = _chunks.get().get(id(self.anatomy.model)), len(pre)
            fits = known is not None and known.rows.stop - known.rows.start == texts
            self.chunk = known if known is not None and fits else Chunk.whole(texts)
            for observer in self.observers:
                observer.begin(self.chunk)

    def edited(self, site: Site, value: Tensor) -> Tensor | None:
        """What the edits make of a value, None where all left it alone."""
        changed = None
        for edit in self.edits:
            if site in edit.sites and edit.acts(self.number):
                old = value if changed is None else changed
                new = edit.new(old, self.chunk.at(site, self.number))
                changed = changed if new is None else _fitting(new, old, edit, site)
        return changed

    def passes(self, site: Site, value: Tensor) -> Tensor | None:
        """What the edits make of a state or write; the observers see it."""
        changed = self.edited(site, value)
        for observer in self.observers:
            if site in observer.sites:
                observer.state(site, self.number, value if changed is None else changed)
        return changed

    def _of_block(self, call: Call | None) -> bool:
        """Whether a call comes from a block of this model, and not from another model or another part of it."""
        return call is None or id(call.module) in self.modules

    def before(self, call: Call) -> Call:
        """What attention is computed from."""
        if not self._of_block(call):
            return call
        crosses = self._crosses(call)
        for name, site in (IN_CROSS if crosses else IN_SELF).before.items():
            if site in self.wanted:
                old = getattr(call, name)
                n, m = call.query.shape[-2], call.key.shape[-2]
                new = self.edited(site, call.query.new_zeros(1, 1, n, m) if old is None else old)
                given: dict[str, Any] = {} if new is None else {name: new}
                call = replace(call, **given)
        for observer in self.observers:
            if observer.sees_attention and not crosses:
                observer.before(self.number, call)
        return call

    def _crosses(self, call: Call | None) -> bool:
        """Whether a call is cross-attention."""
        return call is not None and id(call.module) in self.cross_modules

    def after(self, call: Call | None, result: Attended) -> Attended:
        """What attention gave."""
        if not self._of_block(call):
            return result
        crosses = self._crosses(call)
        inside = IN_CROSS if crosses else IN_SELF
        if inside.weights in self.wanted and call is not None:
            weights = self.edited(inside.weights, result.weights)
            result = result if weights is None else result.with_weights(weights, call)
        if inside.heads in self.wanted:
            output = self.edited(inside.heads, result.output)
            result = result if output is None else replace(result, output=output)
        for observer in self.observers:
            if crosses and observer.sees_cross and call is not None:
                observer.after_cross(self.number, call, result)
            elif observer.sees_attention and not crosses:
                observer.after(self.number, call, result)
        return result


def _fitting(new: Any, old: Tensor, edit: AbstractEdit, site: Site) -> Tensor:
    """What an edit gave, as a tensor like the one whose place it takes; a mask may have more rows or heads."""
    shown = tuple(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
    fits = isinstance(new, torch.Tensor) and new.shape == old.shape
    if site in (Site.MASK, Site.CROSS_MASK) and isinstance(new, torch.Tensor):
        fits = new.ndim == 4 and new.shape[-2:] == old.shape[-2:]
    if not fits:
        wanted = f"a tensor of shape {tuple(old.shape)} takes the place of what passes there (None: it stays)"
        raise HelmscopeError(f"{edit!r:.120} gives {shown} at {site}, but {wanted}")
    fitting: Tensor = new.to(old)
    return fitting


@contextmanager
def watching(
    anatomy: Anatomy, edits: Sequence[AbstractEdit] = (), observers: Sequence[Observer] = (), *, skip: int = 0
) -> Iterator[None]:
    """Inside, every forward of the model runs under the edits, in their order; each sees what those before it left, and
    observers what all of them left.

    The first ``skip`` layers hand their input on and compute nothing, for an edit that puts another state behind them;
    where the blocks of a model return more than a state, or are tied, they run all the same. Another thread that wants
    the same model waits.
    """
    check_edits(anatomy, edits)
    with held(anatomy.model), _hooked(_Passage(anatomy, edits, observers), skip):
        yield


def check_edits(anatomy: Anatomy, edits: Sequence[AbstractEdit]) -> None:
    """Refuse what is not an edit, and an edit that does not fit the model."""
    for edit in edits:
        if not isinstance(edit, AbstractEdit):
            raise HelmscopeError(
                f"a {type(edit).__name__} is given as an edit, but it must be an Edit(site, layers, function) or one "
                "such as Ablate()"
            )
        edit.check(anatomy)


@contextmanager
def held_unwatched(model: Any) -> Iterator[None]:
    """Inside, no other thread changes or records the model; refused where this one has an edit attached to it, which
    a recording would take for the model's own doing.
    """
    with held(model):
        hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
        if any(getattr(hook, "__module__", None) == __name__ for hook in hooks):
            raise HelmscopeError(
                f"model is a {type(model).__name__} that runs under an edit, but only an unchanged one is recorded: "
                "leave `changed` first, and give the edit to recording.under"
            )
        yield


@contextmanager
def _hooked(passage: _Passage, skip: int) -> Iterator[None]:
    anatomy = passage.anatomy
    skipped = [layer.block for layer in anatomy.layers[:skip]] if anatomy.can_skip else []
    handles: list[RemovableHandle] = []
    own: list[Any] = []

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        passage.number = -1

    try:
        for entry in (anatomy.model, anatomy.model.base_model):  # whichever is called
            handles.append(entry.register_forward_pre_hook(begin))
        for block in skipped:
            own.append(block.__dict__.get("forward"))  # one of the instance's, as tools that move weights about set it
            block.forward = _hand_on
        for block in anatomy.blocks:
            handles += _on_block(block, passage)
            first = next(layer for layer in anatomy.layers if layer.block is block)
            handles += _inside(first, passage)
        if anatomy.encoder is not None and any(each.sees_cross for each in passage.observers):
            handles.append(anatomy.encoder.register_forward_hook(_remembered(passage)))
        with tapped(anatomy.model, passage if passage.sees_attention else None), passage.overhearing or nullcontext():
            yield
    finally:
        for block, forward in zip(skipped, own, strict=False):
            del block.forward
            if forward is not None:
                block.forward = forward
        for handle in handles:
            handle.remove()


def _hand_on(*args: Any, **kwargs: Any) -> Tensor:
    return tensors_in((args, kwargs))[0]


def _on_block(block: nn.Module, passage: _Passage) -> list[RemovableHandle]:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        passage.enter(tensors_in((args, kwargs))[0])
        assert passage.pre is not None
        new = passage.passes(Site.INPUT, passage.pre)
        if new is None:
            return None
        passage.pre = passage.state = new
        return with_first((args, kwargs), new)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        value = tensors_in(output)[0]
        new = passage.passes(Site.OUTPUT, value) if Site.OUTPUT in passage.wanted else None
        return None if new is None else with_first(output, new)

    return [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]


def _remembered(passage: _Passage) -> Any:
    """Before the decoder begins, its observers see what the encoder gave."""

    def remember(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for observer in passage.observers:
            if observer.sees_cross:
                observer.memory = tensors_in(output)[0]

    return remember


def _inside(layer: Layer, passage: _Passage) -> list[RemovableHandle]:
    """Hooks on the modules of a block that give or read a state, as far as anybody wants it."""
    wiring, handles = layer.wiring, []
    post_norm = wiring.kind is Kind.POST_NORM

    def writing(site: Site) -> Any:
        def written(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return _written(output, passage, site, adds=not post_norm)

        return written

    def giving(site: Site) -> Any:
        def given(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return passage.passes(site, output)

        return given

    def reading(site: Site) -> Any:
        def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert passage.pre is not None
            passage.passes(site, tensors_in((args, kwargs))[0].reshape(passage.pre.shape))

        return read

    # a state between the halves follows from the writes before it, where no norm gives it
    between = passage.wanted & {Site.MIDDLE, Site.CROSS_MIDDLE}
    for site, path in wiring.writes.items():
        needed = not post_norm and site is not Site.MLP and _leads_to_one_of(site, between)
        if site in passage.wanted or needed:
            handles.append(layer.part(path).register_forward_hook(writing(site)))
    for site, path in wiring.joints.items():
        if post_norm and site in between:
            handles.append(layer.part(path).register_forward_hook(giving(site)))
        if READ_AT[site] in passage.wanted:
            handles.append(layer.part(path).register_forward_pre_hook(reading(READ_AT[site]), with_kwargs=True))
    if wiring.weights is not None and passage.sees_attention:
        handles.append(layer.part(wiring.weights).register_forward_hook(_overheard(passage)))
    return handles


def _leads_to_one_of(write: Site, states: frozenset[Site]) -> bool:
    """Whether a state is the sum of this write and others."""
    return LEADS_TO[write] in states or (write is Site.ATTENTION and Site.CROSS_MIDDLE in states)


def _written(output: Any, passage: _Passage, site: Site, *, adds: bool) -> Any:
    """What a module writes, times the residual multiplier, as the edits leave it. Where it ``adds`` to the state, the
    state that it leads to passes as well, and another one is reached by another write.
    """
    given, state = tensors_in(output)[0], passage.state
    assert state is not None
    scale = passage.layer.wiring.scale(site)
    write = given.reshape(state.shape) if scale == 1 else scale * given.reshape(state.shape)
    changed = passage.passes(site, write) if site in passage.wanted else None
    if adds and site is not Site.MLP and passage.wanted & {Site.MIDDLE, Site.CROSS_MIDDLE}:
        reached = state + (write if changed is None else changed)
        new = passage.passes(LEADS_TO[site], reached)
        changed = changed if new is None else new - state
        passage.state = reached if new is None else new
    return None if changed is None else with_first(output, (changed / scale).to(given).reshape(given.shape))


def _overheard(passage: _Passage) -> Any:
    """For a family outside the registry: the rows of weights that its attention module returns, and where they can be
    overheard query, key and value.
    """

    def hear(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        state, *others = tensors_in(output)
        weights = next(each for each in others if each.ndim == 4 and each.shape[-1] == each.shape[-2])
        heard = None if passage.overhearing is None else passage.overhearing.taken(module, weights)
        passage.after(*(heard or (None, Attended(state, weights))))

    return hear


def with_first(value: Any, new: Tensor) -> Any:
    """A call's arguments or result with its first floating-point tensor replaced."""
    return _replaced(value, new)[0]


def _replaced(value: Any, new: Tensor) -> tuple[Any, bool]:
    if isinstance(value, torch.Tensor):
        return (new, True) if value.is_floating_point() else (value, False)
    if isinstance(value, dict):
        for key, part in value.items():
            changed, done = _replaced(part, new)
            if done:
                return {**value, key: changed}, True
    if isinstance(value, tuple | list):
        for k, part in enumerate(value):
            changed, done = _replaced(part, new)
            if done:
                return type(value)([*value[:k], changed, *value[k + 1 :]]), True
    return value, False
