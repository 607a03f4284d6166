"""Where a forward overflows: the first module that makes numbers of its input that float32 cannot hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.probe import no_cache, run, tensors_in
from helmscope.models.tap import plainly_eager
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from helmscope.models.probe import LayerProbe


def check_finite(model: Any, inputs: Mapping[str, Tensor], seen: Sequence[LayerProbe]) -> None:
    """Refuse a model whose states on these inputs overflow, and name the module where that begins and the largest
    weight: no identity holds between such numbers.
    """
    if not any(_overflows((layer.pre, layer.post)) for layer in seen):
        return
    found: list[tuple[str, nn.Module]] = []

    def noting(path: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not found and _overflows(output) and not any(map(_lost, tensors_in((args, kwargs)))):
                found.append((path, module))

        return note

    handles = [
        module.register_forward_hook(noting(path), with_kwargs=True) for path, module in model.named_modules() if path
    ]
    try:
        with plainly_eager(model):
            run(model, inputs, **no_cache(model))
    finally:
        for handle in handles:
            handle.remove()
    where = f"first in '{found[0][0]}' ({type(found[0][1]).__name__})" if found else "where no module alone shows it"
    sizes = {name: float(value.detach().abs().max()) for name, value in model.named_parameters() if value.numel()}
    largest = max(sizes, key=sizes.__getitem__)
    kind = str(model.dtype).removeprefix("torch.")
    raise HelmscopeError(
        f"model is a {type(model).__name__} whose states on these inputs are NaN or too large for {kind}, {where}; its "
        f"largest weight is {sizes[largest]:.3g}, in '{largest}'"
        + (": load it with dtype=torch.float32" if model.dtype.itemsize < 4 else "")
    )


def _overflows(value: Any) -> bool:
    """Whether some vector of a call's result has no finite length."""
    for each in tensors_in(value):
        wide = each.float() if each.dtype.itemsize < 4 else each
        if not bool(torch.isfinite(torch.linalg.vector_norm(wide, dim=-1) if wide.ndim else wide).all()):
            return True
    return False


def _lost(value: Tensor) -> bool:
    """Whether a tensor holds NaN or infinity; -inf is none, since masks hide tokens with it."""
    return not bool((value < torch.inf).all())
