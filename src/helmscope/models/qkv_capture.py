"""Query, key and value of families outside transformers' attention registry, captured while their own code computes

    P = q k^T,   A = softmax(S),   y = A v        with S = c P + terms that depend on positions only

by intercepting the matrix products and the softmax of a forward pass. Values are captured but cannot be changed; that
needs the registry. That S has this form is checked on two texts of the same length: the terms of masks and position
biases are the same in both, so that S differs by c times the difference of P. Families that add other terms to their
logits, such as DeBERTa, fail the check, and their q and k are not available.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from helmscope.models.tap import Attended, Call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

# products, with the positions and the keywords of their factors
PRODUCTS = {"matmul": (0, 1), "__matmul__": (0, 1), "bmm": (0, 1), "baddbmm": (1, 2)}
FACTOR_NAMES = ("batch1", "mat2", "batch2", "other")


class AttentionCapture(TorchFunctionMode):
    """Context manager: within it, the tensors of the last attention of this thread are stored until ``take``. With
    ``checking`` the batch is two texts of the same length, and ``forms`` records for each attention whether its logits
    have the form above.
    """

    def __init__(self, *, checking: bool = False) -> None:
        super().__init__()
        self.checking = checking
        self.forms: list[bool] = []
        self._product: tuple[Tensor, Tensor] | None = None  # the factors of the last product
        self._logits: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # q, k^T, S, softmax(S)
        self._attention: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None = None  # those, v and y

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and store the tensors of products and of the softmax."""
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name in PRODUCTS:
            factors = [*args, *((kwargs or {})[key] for key in FACTOR_NAMES if key in (kwargs or {}))]
            left, right = (factors[position] for position in PRODUCTS[name])
            self._store_product(left, right, out)
        elif name == "softmax" and isinstance(out, torch.Tensor) and self._product is not None:
            left, right = self._product
            if out.ndim > 2 and left.ndim > 2 and out.shape[-2:] == (left.shape[-2], right.shape[-1]):
                self._logits = (left, right, args[0] if args else (kwargs or {})["input"], out)
        return out

    def _store_product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        if self._logits is not None and _same_values(left, self._logits[3]):
            self._attention, self._logits = (*self._logits, right, out), None
        else:
            self._product = (left, right)

    def take(self, module: nn.Module, weights: Tensor) -> tuple[Call, Attended] | None:
        """The inputs and results of the attention that computed these weights (batch, heads, n, n), in the form of the
        registry; None if it was not captured.
        """
        if self._attention is None or not _same_values(weights, self._attention[3]):
            return None
        q, k, logits, _, v, out = self._attention
        batch, heads, n, _ = weights.shape
        self._product = self._attention = None
        query, key, value, output = (part.reshape(batch, -1, n, part.shape[-1]) for part in (q, k.mT, v, out))
        if self.checking:
            self.forms.append(_has_form(query, key, logits.reshape(weights.shape), weights))
        call = Call(module, query, key, value, None, {})
        return call, Attended(output.reshape(batch, heads, n, -1).transpose(1, 2).contiguous(), weights)


def find_weights(outputs: Sequence[Tensor], n: int) -> Tensor | None:
    """The attention weights (batch, heads, n, n) among the tensors that a module returns; None if there are none."""
    square = (output for output in outputs if output.ndim == 4 and output.shape[-2:] == (n, n))
    return next((output for output in square if bool(((output.sum(-1) - 1).abs() < 1e-2).all())), None)


def _same_values(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and a.shape[-1] == b.shape[-1] and torch.equal(a.flatten(), b.flatten().to(a))


def _has_form(query: Tensor, key: Tensor, logits: Tensor, weights: Tensor) -> bool:
    """Whether the difference of the logits of two texts is a multiple of that of q k^T, where both weights are > 0."""
    if len(weights) != 2:
        return False
    repeats = weights.shape[1] // key.shape[1]
    products = query.double() @ key.double().repeat_interleave(repeats, 1).mT
    visible = (weights > 0).all(0)
    p, s = ((pair[0].double() - pair[1].double())[visible] for pair in (products, logits))
    c = (p @ s) / (p @ p)
    return bool((s - c * p).norm() <= (1e-4 if logits.dtype.itemsize > 2 else 3e-2) * s.norm()) and bool(p.any())
