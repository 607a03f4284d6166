"""Location of an overflow: the first module whose output is not finite though its inputs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.probe import no_cache, run, tensors_in
from helmscope.models.tap import plainly_eager
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    from torch import Tensor, nn

    from helmscope.models.probe import LayerTrace


def check_finite(
    model: Any, inputs: Mapping[str, Tensor], probes: Sequence[LayerTrace], prompts: Sequence[int], first_token: int
) -> None:
    """Raise ``HelmscopeError`` if the states of a model overflow on these inputs, which are those of some prompts from
    ``first_token`` on: no identity could be checked.

    The error names the first such state, the first module that overflows and the largest weight.
    """
    if not any(_overflows((layer.pre, layer.post)) for layer in probes):
        return
    overflowing: list[tuple[str, nn.Module]] = []

    def check_at(path: str) -> Any:
        def check_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not overflowing and _overflows(output) and not any(map(_has_nan_or_inf, tensors_in((args, kwargs)))):
                overflowing.append((path, module))

        return check_output

    handles = [
        module.register_forward_hook(check_at(path), with_kwargs=True) for path, module in model.named_modules() if path
    ]
    try:
        with plainly_eager(model):
            run(model, inputs, **no_cache(model))
    finally:
        for handle in handles:
            handle.remove()
    if overflowing:
        path, module = overflowing[0]
        where = f"first in '{path}' ({type(module).__name__})"
    else:
        where = "though no single module is the first to overflow"
    sizes = {name: float(value.detach().abs().max()) for name, value in model.named_parameters() if value.numel()}
    largest = max(sizes, key=sizes.__getitem__)
    kind = str(model.dtype).removeprefix("torch.")
    raise HelmscopeError(
        f"model is {type_with_article(model)} whose states, first that of "
        f"{_first_state(probes, prompts, first_token)}, are NaN or too large for {kind}, {where}; "
        f"its largest weight is {sizes[largest]:.3g}, in '{largest}'"
        + (": load it with dtype=torch.float32" if model.dtype.itemsize < 4 else "")
    )


def _first_state(probes: Sequence[LayerTrace], prompts: Sequence[int], first_token: int) -> str:
    """The prompt, layer and token of the first state whose norm is not finite."""
    for layer, probe in enumerate(probes):
        for state in (probe.pre, probe.post):
            lost = () if state is None else (~_has_norm(state)).nonzero().tolist()
            if lost:
                row, token = lost[0]
                return f"prompt {prompts[row]} at layer {layer}, token {first_token + token}"
    raise AssertionError("called where a state overflows")


def _overflows(value: Any) -> bool:
    """Whether a tensor in the result of a call has a vector, along the last axis, whose norm is not finite."""
    return any(not bool(_has_norm(tensor).all()) for tensor in tensors_in(value))


def _has_norm(tensor: Tensor) -> Tensor:
    """Where the norm along the last axis is finite."""
    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor
    return torch.isfinite(torch.linalg.vector_norm(wide, dim=-1) if wide.ndim else wide)


def _has_nan_or_inf(value: Tensor) -> bool:
    """Whether a tensor has an entry NaN or +inf; -inf is allowed, since attention masks contain it."""
    return not bool((value < torch.inf).all())
