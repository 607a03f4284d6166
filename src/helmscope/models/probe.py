"""The probe: one short forward pass that records inputs and outputs of every module in every block.

``topology``, ``mlp_reading`` and ``norm_reading`` then identify the modules by identities between these tensors, not by
their names.
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
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module during the probe: its path in the block, and its floating-point inputs and outputs."""

    path: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def depth(self) -> int:
        """The nesting level of the module in the block; 1 for a direct child."""
        return self.path.count(".") + 1

    @property
    def input(self) -> Tensor | None:
        """The first input tensor."""
        return self.inputs[0] if self.inputs else None

    @property
    def output(self) -> Tensor | None:
        """The first output tensor."""
        return self.outputs[0] if self.outputs else None


@dataclass(eq=False)
class LayerTrace:
    """What the probe recorded of one call of a block: its input ``pre``, its output ``post``, the ``calls`` of its
    modules in the order in which they returned, its ``attention`` and, in a decoder that reads an encoder, its
    cross-attention ``cross``.
    """

    block: nn.Module
    pre: Float[Tensor, "batch n d"]
    post: Float[Tensor, "batch n d"] | None = None
    plain: bool = False  # whether the block returns a single tensor
    calls: list[ModuleCall] = field(default_factory=list)
    attention: tuple[Call, Attended] | None = None
    cross: tuple[Call, Attended] | None = None
    memory: Float[Tensor, "batch m e"] | None = None  # the encoder output that cross-attention reads
    attention_calls: list[tuple[Call, Attended]] = field(default_factory=list)  # as the registry reports them
    captured: bool = False  # whether attention was recorded though the family is not in the registry


def block_class(model: Any) -> type[nn.Module]:
    """The class of a model's blocks: the one whose outputs the family records as hidden states, else that of the
    longest ModuleList; raises ``HelmscopeError`` if there is neither.
    """
    for part in (model, getattr(model, "base_model", model)):
        recorded = (getattr(part, "_can_record_outputs", None) or {}).get("hidden_states")
        recorded = recorded[0] if isinstance(recorded, list | tuple) else recorded
        kind = getattr(recorded, "target_class", recorded)
        if isinstance(kind, type) and any(isinstance(module, kind) for module in model.modules()):
            return kind
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part)]
    if not lists:
        raise HelmscopeError(f"model is {type_with_article(model)}, but it has no list of blocks")
    return type(max(lists, key=len)[0])


def probe(model: Any, inputs: Mapping[str, Tensor]) -> list[LayerTrace]:
    """Run the model once on ``inputs`` (keyword arguments of its forward); returns one probe per layer, in call order.

    For an encoder-decoder model these are the layers of the decoder. Raises ``HelmscopeError`` if the model fails on
    the inputs, has no blocks that are called, or computes attention outside its blocks.
    """
    if can_be_tapped(model):
        return _probe_forward(model, inputs)
    layers = _probe_forward(model, inputs, AttentionCapture())
    checking = AttentionCapture(checking=True)
    if all(layer.attention is not None for layer in layers):
        _probe_forward(model, _two_texts(model, inputs), checking)
    known = checking.forms == [True] * len(layers)
    for layer in layers:
        layer.captured, layer.attention = known, layer.attention if known else None
    return layers


def _probe_forward(
    model: Any, inputs: Mapping[str, Tensor], capture: AttentionCapture | None = None
) -> list[LayerTrace]:
    """One probed forward pass; ``capture`` records the attention of a family that is not in the registry."""
    layers: list[LayerTrace] = []
    stacks = stacks_of(model)
    part = model if stacks is None else stacks.decoder
    kind = block_class(part)
    blocks = [module for module in part.modules() if isinstance(module, kind)]
    with ExitStack() as stack, torch.no_grad():
        for block in blocks:
            stack.enter_context(_record_calls(block, layers, capture))
        memory = None if stacks is None else stack.enter_context(output_of(stacks.encoder))
        stack.enter_context(tapped(model, _AttentionRecorder(layers, stacks)))
        if capture is not None:
            stack.enter_context(capture)
        more = {} if capture is None else {"output_attentions": True}
        run(model, inputs, **no_cache(model), **more)
    if not layers:
        raise HelmscopeError(f"model is {type_with_article(model)}, but none of its {kind.__name__} blocks was called")
    for layer in layers:
        _assign_attention(layer, memory[-1] if memory else None)
        if layer.pre.ndim != 3:
            raise HelmscopeError(
                f"model is {type_with_article(model)} whose {kind.__name__} blocks read tensors of shape "
                f"{tuple(layer.pre.shape)}, but only models of tokens, (batch, n, d), can be recorded"
            )
    return layers


def _two_texts(model: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Two inputs: the first text and one of the same length that differs in every token; or the first two images."""
    if "input_ids" not in inputs:
        return {name: value[:2] for name, value in inputs.items()}
    twice = {name: torch.cat([value[:1], value[:1]]) for name, value in inputs.items()}
    twice["input_ids"][1] = (twice["input_ids"][1] + 1) % vocabulary_size(model)
    return twice


@full_precision
def run(model: Any, inputs: Mapping[str, Tensor], *, gradients: bool = False, **options: Any) -> Any:
    """The output of one forward pass, in the model's own dtype even inside ``torch.autocast``.

    Without gradients unless ``gradients``. An exception of the model is raised as ``HelmscopeError``.
    """
    try:
        with torch.set_grad_enabled(gradients):
            return model(**inputs, **options)
    except HelmscopeError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        hint = "; record its encoder alone, model.get_encoder()" if _has_decoder(model) else ""
        raise HelmscopeError(f"{type(model).__name__} could not be run on these inputs: {reason}{hint}") from error


def _has_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def base_model_of(model: Any) -> Any:
    """The model without its head, which returns the last state; the model itself if the trunk takes other inputs."""
    trunk = model.base_model
    takes = inspect.signature(trunk.forward).parameters
    return trunk if getattr(model, "main_input_name", "input_ids") in takes else model


def vocabulary_size(model: Any) -> int:
    """The number of token ids that a model has embeddings for; raises ``HelmscopeError`` if it has none."""
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # a model of images or sound
        table = None
    size = getattr(table, "num_embeddings", None)
    if size is None:
        takes = getattr(model, "main_input_name", "other inputs")
        raise HelmscopeError(
            f"model is {type_with_article(model)}, which takes {takes}, but it has no embedding table of token ids"
        )
    return int(size)


def no_cache(model: Any) -> dict[str, bool]:
    """The argument that switches off the key-value cache, which would grow with every call; empty if there is none."""
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


@contextmanager
def output_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Context manager: yields a list to which each forward pass of the module appends its first output tensor."""
    outputs: list[Tensor] = []
    handle = module.register_forward_hook(lambda module, args, output: outputs.append(tensors_in(output)[0]))
    try:
        yield outputs
    finally:
        handle.remove()


def _assign_attention(layer: LayerTrace, memory: Tensor | None) -> None:
    """Assign each recorded attention of a block: it is cross-attention if it reads the encoder's output, ``memory``."""
    for call, result in layer.attention_calls:
        own_calls = [module_call for module_call in layer.calls if module_call.module is call.module]
        from_encoder = [value for own in own_calls for value in own.inputs[1:] if equal(value, memory)]
        is_cross = bool(from_encoder)
        if (layer.cross if is_cross else layer.attention) is not None:
            raise _misplaced_attention(call)
        if is_cross:
            layer.cross, layer.memory = (call, result), from_encoder[0]
        else:
            layer.attention = (call, result)


def _misplaced_attention(call: Call) -> HelmscopeError:
    return HelmscopeError(
        f"the model computes attention in {type(call.module).__name__} outside its blocks, or twice in one: "
        "record one part alone, such as model.get_encoder() or model.model.language_model"
    )


class _AttentionRecorder:
    """Records the attention of the block that is running; ignores that of the encoder, which is probed by itself."""

    def __init__(self, layers: list[LayerTrace], stacks: Stacks | None) -> None:
        self.layers = layers
        self.ignored = set[int]()
        if stacks is not None:  # modules shared by both stacks are not ignored, and raise as misplaced attention
            encoder, decoder = ({id(part) for part in stack.modules()} for stack in (stacks.encoder, stacks.decoder))
            self.ignored = encoder - decoder

    def before(self, call: Call) -> Call:
        return call

    def after(self, call: Call, result: Attended) -> Attended:
        if id(call.module) in self.ignored:
            return result
        running = self.layers[-1] if self.layers and self.layers[-1].post is None else None
        if running is None or call.module not in set(running.block.modules()):
            raise _misplaced_attention(call)
        running.attention_calls.append((call, result))
        return result


@contextmanager
def _record_calls(block: nn.Module, layers: list[LayerTrace], capture: AttentionCapture | None) -> Iterator[None]:
    """Context manager: within it, calls of the block and of its submodules are recorded in ``layers``.

    Tensors are copied, since some families modify them in place afterwards.
    """

    def copies(value: Any) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors_in(value))

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layers.append(LayerTrace(module, copies((args, kwargs))[0]))

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        layers[-1].post, layers[-1].plain = copies(output)[0], isinstance(output, torch.Tensor)

    def recorder_of(path: str) -> Any:
        def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            layer, call = layers[-1], ModuleCall(path, module, copies((args, kwargs)), copies(output))
            layer.calls.append(call)
            rows = None if capture is None else find_weights(call.outputs, layer.pre.shape[-2])
            if capture is not None and rows is not None and layer.attention is None:
                layer.attention = capture.take(module, rows)

        return record_call

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True)]
    for path, module in block.named_modules():
        handles.append(module.register_forward_hook(recorder_of(path) if path else leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """The floating-point tensors in the arguments or the result of a call, in order."""
    if isinstance(value, torch.Tensor):
        return (value,) if value.is_floating_point() else ()
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return tuple(tensor for part in value for tensor in tensors_in(part))
    return ()


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors have the same entries in the same order, regardless of their shapes."""
    return a is not None and b is not None and a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten())
