"""The head of a language model: logits of selected tokens only, and the head as a function of directions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from helmscope.geometry.arithmetic import full_precision
from helmscope.models.norm_reading import read_norm
from helmscope.models.probe import equal
from helmscope.models.sphere import wide
from helmscope.models.tap import locked
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.fields.norms import Norm
    from helmscope.models.recording import Recording

REPRODUCED = 1e-2  # of the largest logit, by which those at directions may be off: the norm's epsilon, half precision


def has_linear_head(model: Any) -> bool:
    """Whether the model's logits are a linear map of its last states, by ``get_output_embeddings``."""
    return isinstance(model.get_output_embeddings(), nn.Linear)


@contextmanager
def few_logits(model: Any, ids: Int[Tensor, " token"]) -> Iterator[None]:
    """Context manager: within it, the head computes only the logits of the tokens ``ids``. What the model does to each
    logit, such as scaling or capping, still applies. If it mixes logits the results differ: compare one text.
    """
    head = model.get_output_embeddings()
    ids = ids.to(head.weight.device)
    weight, bias = head.weight[ids], None if head.bias is None else head.bias[ids]

    def forward(state: Tensor) -> Tensor:
        return nn.functional.linear(state, weight, bias)

    with locked(model):
        replaced = head.__dict__.get("forward")  # set on the instance by tools that move weights
        head.forward = forward
        try:
            yield
        finally:
            del head.forward
            if replaced is not None:
                head.forward = replaced


@full_precision
def head_on_directions(
    recording: Recording,
) -> tuple[Float[Tensor, "vocabulary d"], Float[Tensor, " vocabulary"]] | None:
    """W and b with logits W x + b at the direction x of the last state, from the linear head and the norm before it,
    up to the epsilon of that norm; None for a model without such a head or norm, for a post-norm model, and where W and
    b do not reproduce the model's logits, since it scales or caps them.
    """
    anatomy = recording.anatomy
    model = anatomy.model
    try:
        recording.certificate.require("lens over depth")
    except HelmscopeError:
        return None
    if anatomy.post_norm or not has_linear_head(model):
        return None
    head = model.get_output_embeddings()
    found, logits = _norm_before(head, recording)
    if found is None:
        return None
    weight, bias = found.fold(wide(head.weight.detach()), None if head.bias is None else wide(head.bias.detach()))
    weight = math.sqrt(anatomy.dim) * weight
    expected = recording.trajectory.states[-1, :1].to(weight) @ weight.mT + bias
    seen = slice(None) if recording.visible is None else recording.visible[0].to(logits.device)
    off, size = (expected - logits)[0, seen].abs().max(), logits[0, seen].abs().max()
    return (weight, bias) if bool(off <= REPRODUCED * size) else None


def _norm_before(head: nn.Module, recording: Recording) -> tuple[Norm | None, Tensor]:
    """The norm outside the blocks whose output the head reads, and the logits of the first text."""
    anatomy = recording.anatomy
    inside = {id(part) for block in anatomy.blocks for part in block.modules()}
    outside = [part for part in anatomy.model.modules() if id(part) not in inside and not list(part.children())]
    outputs: list[tuple[nn.Module, Tensor]] = []
    read: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if module is not head and isinstance(output, torch.Tensor) and output.is_floating_point():
            outputs.append((module, output))

    with locked(anatomy.model):
        handles = [part.register_forward_hook(keep) for part in outside]
        handles.append(head.register_forward_pre_hook(lambda module, args: read.append(args[0])))
        try:
            logits = recording.runner.outputs(rows=slice(0, 1))
        finally:
            for handle in handles:
                handle.remove()
    for module, output in reversed(outputs):
        if read and equal(output, read[-1]):
            norm = read_norm(module, output)
            if norm is not None:
                return norm, wide(logits)
    return None, wide(logits)
