"""Query, key and value of a family outside the registry, overheard while its own code computes

    P = q k^T,   A = softmax(S),   y = A v        with S = c P + whatever depends on places alone

by watching the matrix products and the softmax of a forward. Nothing is changed, and so nothing can be: the registry is
for that. That S has this form is checked, on two texts of the same length: what masks and position biases add is the
same in both, so that their difference must be c times that of P. Families that add something else to their logits,
such as DeBERTa, do not pass, and keep their q and k to themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from helmscope.models.tap import Attended, Call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

PRODUCTS = {"matmul": (0, 1), "__matmul__": (0, 1), "bmm": (0, 1), "baddbmm": (1, 2)}  # and where their factors stand
NAMES = ("batch1", "mat2", "batch2", "other")


class Overhearing(TorchFunctionMode):
    """Inside, the last attention of this thread is remembered until ``taken``. With ``checking`` the batch is two texts
    of the same length, and ``forms`` holds for each attention whether its logits had the form above.
    """

    def __init__(self, *, checking: bool = False) -> None:
        super().__init__()
        self.checking = checking
        self.forms: list[bool] = []
        self._product: tuple[Tensor, Tensor] | None = None  # the factors of the last product
        self._logits: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # q, k^T, S, softmax(S)
        self._whole: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None = None  # and v, y

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute, and remember what was computed from what."""
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name in PRODUCTS:
            given = [*args, *((kwargs or {}).get(each) for each in NAMES if each in (kwargs or {}))]
            first, second = PRODUCTS[name]
            self._multiplied(given[first], given[second], out)
        elif name == "softmax" and isinstance(out, torch.Tensor) and self._product is not None:
            left, right = self._product
            if out.ndim > 2 and left.ndim > 2 and out.shape[-2:] == (left.shape[-2], right.shape[-1]):
                self._logits = (left, right, args[0] if args else (kwargs or {})["input"], out)
        return out

    def _multiplied(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        if self._logits is not None and _same_numbers(left, self._logits[3]):
            self._whole, self._logits = (*self._logits, right, out), None
        else:
            self._product = (left, right)

    def taken(self, module: nn.Module, weights: Tensor) -> tuple[Call, Attended] | None:
        """The attention that gave these weights (batch, heads, n, n), as the registry would have shown it."""
        if self._whole is None or not _same_numbers(weights, self._whole[3]):
            return None
        q, k, logits, _, v, out = self._whole
        batch, heads, n, _ = weights.shape
        self._product = self._whole = None
        query, key, value, output = (each.reshape(batch, -1, n, each.shape[-1]) for each in (q, k.mT, v, out))
        if self.checking:
            self.forms.append(_has_form(query, key, logits.reshape(weights.shape), weights))
        call = Call(module, query, key, value, None, {})
        return call, Attended(output.reshape(batch, heads, n, -1).transpose(1, 2).contiguous(), weights)


def rows_of_weights(outputs: Sequence[Tensor], n: int) -> Tensor | None:
    """The attention weights (batch, heads, n, n) among the tensors that a module returns."""
    found = (each for each in outputs if each.ndim == 4 and each.shape[-2:] == (n, n))
    return next((each for each in found if bool(((each.sum(-1) - 1).abs() < 1e-2).all())), None)


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and a.shape[-1] == b.shape[-1] and torch.equal(a.flatten(), b.flatten().to(a))


def _has_form(query: Tensor, key: Tensor, logits: Tensor, weights: Tensor) -> bool:
    """Whether the logits of two texts differ by a multiple of what q k^T differs by, wherever both have weight."""
    if len(weights) != 2:
        return False
    repeats = weights.shape[1] // key.shape[1]
    products = query.double() @ key.double().repeat_interleave(repeats, 1).mT
    seen = (weights > 0).all(0)
    p, s = ((each[0].double() - each[1].double())[seen] for each in (products, logits))
    c = (p @ s) / (p @ p)
    return bool((s - c * p).norm() <= (1e-4 if logits.dtype.itemsize > 2 else 3e-2) * s.norm()) and bool(p.any())
