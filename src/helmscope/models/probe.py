"""One short forward in which every module of every block says what went in and what came out.

``topology`` and ``reading`` then find by algebra what is what; no table of names is asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from helmscope.geometry.arithmetic import full_precision
from helmscope.models.qkv_capture import AttentionCapture, find_weights
from helmscope.models.stacks import Stacks, stacks_of
from helmscope.models.tap import Attended, Call, can_be_tapped, tapped
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Seen:
    """One call of one module: its path in the block, its tensors in and out (the first of a tuple), in the order in
    which calls ended.
    """

    path: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def depth(self) -> int:
        """How deep in the block the module stands."""
        return self.path.count(".") + 1

    @property
    def input(self) -> Tensor | None:
        """The first tensor that went in."""
        return self.inputs[0] if self.inputs else None

    @property
    def output(self) -> Tensor | None:
        """The first tensor that came out."""
        return self.outputs[0] if self.outputs else None


@dataclass(eq=False)
class LayerProbe:
    """All that one call of a block showed: its input ``pre``, its output ``post``, every call inside; ``attention``
    and, in a decoder that reads an encoder, ``cross`` attention.
    """

    block: nn.Module
    pre: Float[Tensor, "batch n d"]
    post: Float[Tensor, "batch n d"] | None = None
    plain: bool = False  # whether the block returns a tensor alone
    calls: list[Seen] = field(default_factory=list)
    attention: tuple[Call, Attended] | None = None
    cross: tuple[Call, Attended] | None = None
    memory: Float[Tensor, "batch m e"] | None = None  # what cross-attention reads of the encoder
    heard: list[tuple[Call, Attended]] = field(default_factory=list)  # as the registry showed it, whichever it is
    overheard: bool = False  # whether attention is known though the family is not in the registry


def block_class(model: Any) -> type[nn.Module]:
    """The class of the blocks: what the family itself records as hidden states, else that of the longest ModuleList."""
    for part in (model, getattr(model, "base_model", model)):
        recorded = (getattr(part, "_can_record_outputs", None) or {}).get("hidden_states")
        recorded = recorded[0] if isinstance(recorded, list | tuple) else recorded
        kind = getattr(recorded, "target_class", recorded)
        if isinstance(kind, type) and any(isinstance(module, kind) for module in model.modules()):
            return kind
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part)]
    if not lists:
        raise HelmscopeError(f"model is a {type(model).__name__}, but it has no list of blocks that could be read")
    return type(max(lists, key=len)[0])


def probe(model: Any, inputs: Mapping[str, Tensor]) -> list[LayerProbe]:
    """One forward of ``inputs`` (those of the model's forward), layer by layer in the order of the calls; of an
    encoder-decoder model the layers of the decoder.
    """
    if can_be_tapped(model):
        return _forward(model, inputs)
    found = _forward(model, inputs, AttentionCapture())
    checking = AttentionCapture(checking=True)
    if all(layer.attention is not None for layer in found):
        _forward(model, _two_texts(model, inputs), checking)
    known = checking.forms == [True] * len(found)
    for layer in found:
        layer.overheard, layer.attention = known, layer.attention if known else None
    return found


def _forward(model: Any, inputs: Mapping[str, Tensor], overhearing: AttentionCapture | None = None) -> list[LayerProbe]:
    """What one forward showed; attention of a family that is not in the registry by ``overhearing``."""
    found: list[LayerProbe] = []
    stacks = stacks_of(model)
    part = model if stacks is None else stacks.decoder
    kind = block_class(part)
    blocks = [module for module in part.modules() if isinstance(module, kind)]
    with ExitStack() as stack, torch.no_grad():
        for block in blocks:
            stack.enter_context(_hooked(block, found, overhearing))
        memory = None if stacks is None else stack.enter_context(output_of(stacks.encoder))
        stack.enter_context(tapped(model, _AttentionListener(found, stacks)))
        if overhearing is not None:
            stack.enter_context(overhearing)
        more = {} if overhearing is None else {"output_attentions": True}
        run(model, inputs, **no_cache(model), **more)
    if not found:
        raise HelmscopeError(f"model is a {type(model).__name__}, but none of its {kind.__name__} blocks was called")
    for layer in found:
        _tell_apart(layer, memory[-1] if memory else None)
        if layer.pre.ndim != 3:
            raise HelmscopeError(
                f"model is a {type(model).__name__} whose {kind.__name__} blocks read tensors of shape "
                f"{tuple(layer.pre.shape)}, but only models of tokens, (batch, n, d), can be recorded"
            )
    return found


def _two_texts(model: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The first text, and one of the same length of which no token is the same; two images."""
    if "input_ids" not in inputs:
        return {name: value[:2] for name, value in inputs.items()}
    twice = {name: torch.cat([value[:1], value[:1]]) for name, value in inputs.items()}
    twice["input_ids"][1] = (twice["input_ids"][1] + 1) % vocabulary_size(model)
    return twice


@full_precision
def run(model: Any, inputs: Mapping[str, Tensor], *, gradients: bool = False, **options: Any) -> Any:
    """A forward in the model's own dtype, inside ``torch.autocast`` too, and without gradients unless they are asked
    for; where the model itself fails, one sentence says so.
    """
    try:
        with torch.set_grad_enabled(gradients):
            return model(**inputs, **options)
    except HelmscopeError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        hint = "; record its encoder alone, model.get_encoder()" if _has_decoder(model) else ""
        raise HelmscopeError(f"{type(model).__name__} could not be run on these inputs: {why}{hint}") from error


def _has_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def trunk_of(model: Any) -> Any:
    """The model without its head, which gives the last state; the model itself where that cannot be called."""
    trunk = model.base_model
    takes = inspect.signature(trunk.forward).parameters
    return trunk if getattr(model, "main_input_name", "input_ids") in takes else model


def vocabulary_size(model: Any) -> int:
    """How many token ids a model has embeddings for; a ``HelmscopeError`` where it has none."""
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # a model of images or sounds alone
        table = None
    size = getattr(table, "num_embeddings", None)
    if size is None:
        takes = getattr(model, "main_input_name", "other inputs")
        raise HelmscopeError(
            f"model is a {type(model).__name__}, which takes {takes}, but it has no table of embeddings of token ids"
        )
    return int(size)


def no_cache(model: Any) -> dict[str, bool]:
    """A cache would grow with every call, and costs memory: it is switched off where there is one."""
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


@contextmanager
def output_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, a list of the first tensor that each forward of a module gives."""
    found: list[Tensor] = []
    handle = module.register_forward_hook(lambda module, args, output: found.append(tensors_in(output)[0]))
    try:
        yield found
    finally:
        handle.remove()


def _tell_apart(layer: LayerProbe, memory: Tensor | None) -> None:
    """Of what was heard in a block, cross-attention is what reads the encoder's output, ``memory``."""
    for call, result in layer.heard:
        own = [seen for seen in layer.calls if seen.module is call.module]
        read = [value for seen in own for value in seen.inputs[1:] if equal(value, memory)]
        crosses = bool(read)
        if (layer.cross if crosses else layer.attention) is not None:
            raise _stray(call)
        if crosses:
            layer.cross, layer.memory = (call, result), read[0]
        else:
            layer.attention = (call, result)


def _stray(call: Call) -> HelmscopeError:
    return HelmscopeError(
        f"the model computes attention in {type(call.module).__name__} outside its blocks, or twice in one: of "
        "several parts record one alone, such as model.get_encoder() or model.model.language_model"
    )


class _AttentionListener:
    """Notes the attention of the block that is under way; that of the encoder is left to the encoder."""

    def __init__(self, found: list[LayerProbe], stacks: Stacks | None) -> None:
        self.found = found
        self.elsewhere = set[int]()
        if stacks is not None:  # what both stacks use cannot be told apart, and is refused as attention out of place
            encoder, decoder = ({id(part) for part in each.modules()} for each in (stacks.encoder, stacks.decoder))
            self.elsewhere = encoder - decoder

    def before(self, call: Call) -> Call:
        return call

    def after(self, call: Call, result: Attended) -> Attended:
        if id(call.module) in self.elsewhere:
            return result
        under_way = self.found[-1] if self.found and self.found[-1].post is None else None
        if under_way is None or call.module not in set(under_way.block.modules()):
            raise _stray(call)
        under_way.heard.append((call, result))
        return result


@contextmanager
def _hooked(block: nn.Module, found: list[LayerProbe], overhearing: AttentionCapture | None) -> Iterator[None]:
    """Note the calls of a block and of everything in it. Copies, since some families add to a tensor in place later."""

    def copies(value: Any) -> tuple[Tensor, ...]:
        return tuple(each.clone() for each in tensors_in(value))

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(LayerProbe(module, copies((args, kwargs))[0]))

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found[-1].post, found[-1].plain = copies(output)[0], isinstance(output, torch.Tensor)

    def inside(path: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            layer, seen = found[-1], Seen(path, module, copies((args, kwargs)), copies(output))
            layer.calls.append(seen)
            rows = None if overhearing is None else find_weights(seen.outputs, layer.pre.shape[-2])
            if overhearing is not None and rows is not None and layer.attention is None:
                layer.attention = overhearing.take(module, rows)

        return note

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True)]
    for path, module in block.named_modules():
        handles.append(module.register_forward_hook(inside(path) if path else leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """The floating-point tensors of a call's arguments or result, in their order."""
    if isinstance(value, torch.Tensor):
        return (value,) if value.is_floating_point() else ()
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return tuple(each for part in value for each in tensors_in(part))
    return ()


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors hold the same numbers in the same order, whatever their shapes."""
    return a is not None and b is not None and a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten())
