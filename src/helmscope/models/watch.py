"""See, and change, what passes through a model: one set of entry points for recording and for every intervention.

    INPUT       the block's input
    ATTENTION   what attention writes
    MIDDLE      the state between the halves, virtual in a parallel block
    READ        what the module at the middle reads: the mid state, or in a post-norm block the sum before the norm
    MLP         what the MLP writes
    CLOSE       what the norm at the end of a post-norm block reads
    OUTPUT      the block's output

READ and CLOSE are there to be compared; a change is made at the others.

A ``Watcher`` names the sites it wants and is called there; what it returns takes the place of what was there. All hooks
are gone when ``watching`` ends, whatever happened inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.overhear import Overhearing
from helmscope.models.probe import tensors_in
from helmscope.models.tap import Attended, Call, held, tapped
from helmscope.models.topology import Kind
from helmscope.store.manifest import hash_bytes
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from helmscope.models.anatomy import Anatomy, Layer


BRIEF = 400  # characters of a value in the repr of a watcher


class Site(Enum):
    """Where a state or a write passes.

    >>> [site.value for site in Site]
    ['input', 'attention', 'middle', 'read', 'mlp', 'close', 'output']
    """

    INPUT = "input"
    ATTENTION = "attention"
    MIDDLE = "middle"
    READ = "read"
    MLP = "mlp"
    CLOSE = "close"
    OUTPUT = "output"


class Watcher:
    """Sees what passes; the methods of this one change nothing. Its repr names what was given, tensors by their shape
    and hash: a manifest holds it.

    >>> Watcher().state(Site.INPUT, 0, torch.zeros(1)) is None
    True
    """

    sites: frozenset[Site] = frozenset()
    hears: bool = False
    every_layer: bool = False  # whether the layers before a state that is put in must run all the same
    rows: slice = slice(None)  # the texts of the batch that are under way
    texts: int | None = None  # how many the batch has, where that is known

    def __repr__(self) -> str:
        given: list[Field[Any]] = [each for each in fields(self) if each.repr] if is_dataclass(self) else []
        values = [(each, getattr(self, each.name)) for each in given]
        shown = (f"{each.name}={brief(value)}" for each, value in values if value is not each.default)
        return f"{type(self).__name__}({', '.join(shown)})"

    def check(self, anatomy: Anatomy) -> None:
        """Refuse a model that this watcher does not fit, before anything runs."""

    def state(self, site: Site, layer: int, value: Tensor) -> Tensor | None:
        """A state or write (batch, n, d), valid during the call alone; what is returned takes its place."""
        return None

    def before(self, layer: int, call: Call) -> Call:
        """What attention is computed from."""
        return call

    def after(self, layer: int, call: Call | None, result: Attended) -> Attended:
        """What attention gave; ``call`` is None in a family that shows its weights alone."""
        return result


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
    shown = " ".join((getattr(value, "__qualname__", None) or repr(value)).split())
    return shown if len(shown) <= BRIEF else shown[: BRIEF - 3] + "..."


class _Depth:
    """Which call of a block is under way, and its input."""

    def __init__(self, anatomy: Anatomy, watchers: tuple[Watcher, ...]) -> None:
        self.anatomy, self.watchers, self.number = anatomy, watchers, -1
        self.pre: Tensor | None = None
        self.wanted = frozenset(site for watcher in watchers for site in watcher.sites)
        self.modules = {id(module) for block in anatomy.blocks for module in block.modules()}
        self.hears = any(watcher.hears for watcher in watchers)
        self.overhearing = Overhearing() if anatomy.overheard and self.hears else None

    @property
    def layer(self) -> Layer:
        return self.anatomy.layers[self.number]

    def ask(self, site: Site, value: Tensor) -> Tensor | None:
        """What the watchers make of a value, None where all left it alone."""
        changed = None
        for watcher in self.watchers:
            if site in watcher.sites:
                answer = watcher.state(site, self.number, value if changed is None else changed)
                changed = changed if answer is None else answer
        return changed

    def _of_block(self, call: Call | None) -> bool:
        """Whether a call comes from a block of this model, and not from another model or another part of it."""
        return call is None or id(call.module) in self.modules

    def before(self, call: Call) -> Call:
        if not self._of_block(call):
            return call
        for watcher in self.watchers:
            call = watcher.before(self.number, call) if watcher.hears else call
        return call

    def after(self, call: Call | None, result: Attended) -> Attended:
        if not self._of_block(call):
            return result
        for watcher in self.watchers:
            result = watcher.after(self.number, call, result) if watcher.hears else result
        return result


@contextmanager
def watching(anatomy: Anatomy, *watchers: Watcher, skip: int = 0) -> Iterator[None]:
    """Inside, every forward of the model is seen by the watchers, in their order; each sees what those before left.

    The first ``skip`` layers hand their input on and compute nothing, for a watcher who puts another state behind them;
    where the blocks of a model return more than a state, or are tied, they run all the same. Another thread that wants
    the same model waits.
    """
    check_watchers(anatomy, *watchers)
    with held(anatomy.model), _hooked(anatomy, watchers, skip):
        yield


def check_watchers(anatomy: Anatomy, *watchers: Watcher) -> None:
    """Refuse what is no watcher, and a watcher that the model does not fit."""
    for watcher in watchers:
        if not isinstance(watcher, Watcher):
            raise HelmscopeError(
                f"a {type(watcher).__name__} is given as a change, but it must be a Watcher such as Ablate()"
            )
        watcher.check(anatomy)


@contextmanager
def held_unwatched(model: Any) -> Iterator[None]:
    """Inside, no other thread changes or records the model; refused where this one has a change attached to it, which
    a recording would take for the model's own doing.
    """
    with held(model):
        hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
        if any(getattr(hook, "__module__", None) == __name__ for hook in hooks):
            raise HelmscopeError(
                f"model is a {type(model).__name__} that runs under a change, but only an unchanged one is recorded: "
                "leave `changed` first, and give the change to recording.under"
            )
        yield


@contextmanager
def _hooked(anatomy: Anatomy, watchers: tuple[Watcher, ...], skip: int) -> Iterator[None]:
    depth = _Depth(anatomy, watchers)
    skipped = [layer.block for layer in anatomy.layers[:skip]] if anatomy.can_skip else []
    handles: list[RemovableHandle] = []
    own: list[Any] = []

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        depth.number = -1

    try:
        for entry in (anatomy.model, anatomy.model.base_model):  # whichever is called
            handles.append(entry.register_forward_pre_hook(begin))
        for block in skipped:
            own.append(block.__dict__.get("forward"))  # one of the instance's, as tools that move weights about set it
            block.forward = _hand_on
        for block in anatomy.blocks:
            handles += _on_block(block, depth)
            first = next(layer for layer in anatomy.layers if layer.block is block)
            handles += _inside(first, depth)
        with tapped(anatomy.model, depth if depth.hears else None), depth.overhearing or nullcontext():
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


def _on_block(block: nn.Module, depth: _Depth) -> list[RemovableHandle]:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depth.number += 1
        depth.pre = tensors_in((args, kwargs))[0]
        new = depth.ask(Site.INPUT, depth.pre)
        if new is None:
            return None
        depth.pre = new.to(depth.pre)
        return with_first((args, kwargs), depth.pre)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        value = tensors_in(output)[0]
        new = depth.ask(Site.OUTPUT, value) if Site.OUTPUT in depth.wanted else None
        return None if new is None else with_first(output, new.to(value))

    return [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]


def _inside(layer: Layer, depth: _Depth) -> list[RemovableHandle]:
    """Hooks on the modules of a block that give or read a state, as far as anybody wants it."""
    wiring, handles = layer.wiring, []
    post_norm = wiring.kind is Kind.POST_NORM

    def attention(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _written(output, depth, Site.ATTENTION, middle=not post_norm)

    def mlp(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _written(output, depth, Site.MLP, middle=False)

    def middle(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        new = depth.ask(Site.MIDDLE, output)
        return None if new is None else new.to(output)

    def reading(site: Site) -> Any:
        def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert depth.pre is not None
            depth.ask(site, tensors_in((args, kwargs))[0].reshape(depth.pre.shape))

        return read

    if depth.wanted & {Site.ATTENTION, Site.MIDDLE}:
        handles.append(layer.part(wiring.attention).register_forward_hook(attention))
    if Site.MLP in depth.wanted:
        handles.append(layer.part(wiring.mlp).register_forward_hook(mlp))
    if wiring.middle is not None and post_norm and Site.MIDDLE in depth.wanted:
        handles.append(layer.part(wiring.middle).register_forward_hook(middle))
    for path, site in ((wiring.middle, Site.READ), (wiring.close, Site.CLOSE)):
        if path is not None and site in depth.wanted:
            handles.append(layer.part(path).register_forward_pre_hook(reading(site), with_kwargs=True))
    if wiring.weights is not None and depth.hears:
        handles.append(layer.part(wiring.weights).register_forward_hook(_overheard(depth)))
    return handles


def _written(output: Any, depth: _Depth, site: Site, *, middle: bool) -> Any:
    """What a module writes, times the residual multiplier, as the watchers leave it; with ``middle`` they are asked for
    the state that it leads to as well, and a new one is reached by another write.
    """
    given, pre = tensors_in(output)[0], depth.pre
    assert pre is not None
    scale = depth.layer.wiring.scales[site is Site.MLP]
    write = given.reshape(pre.shape) if scale == 1 else scale * given.reshape(pre.shape)
    changed = depth.ask(site, write) if site in depth.wanted else None
    if middle and Site.MIDDLE in depth.wanted:
        state = pre + (write if changed is None else changed)
        new = depth.ask(Site.MIDDLE, state)
        changed = changed if new is None else new - pre
    return None if changed is None else with_first(output, (changed / scale).to(given).reshape(given.shape))


def _overheard(depth: _Depth) -> Any:
    """For a family outside the registry: the rows of weights that its attention module returns, and where they can be
    overheard query, key and value.
    """

    def hear(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        state, *others = tensors_in(output)
        weights = next(each for each in others if each.ndim == 4 and each.shape[-1] == each.shape[-2])
        heard = None if depth.overhearing is None else depth.overhearing.taken(module, weights)
        depth.after(*(heard or (None, Attended(state, weights))))

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
