"""Check token weights and padding masks and combine them into one weight per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.fields.parameters import shape_or_type
from helmscope.geometry.arithmetic import check_dense_values, every, is_vmapped
from helmscope.geometry.linkage import collapse_padding
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


def check_weights(
    x: Float[Tensor, "*batch n d"],
    weights: Float[Tensor, "*batch n"] | None,
    mask: Bool[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch n"] | None:
    """The weight m_j >= 0 of every token: ``weights``, set to 0 where ``mask`` is False. None if neither is given.

    The tokens x_j with these weights are the measure sum_j m_j delta_{x_j}. Raises ``HelmscopeError`` for a shape that
    does not fit x, a mask that is not boolean, a weight other than 0 outside 1e-30 to 1e30, and a system without
    positive weight.

    >>> check_weights(torch.eye(2), None, torch.tensor([True, False]))
    tensor([1., 0.])
    """
    for name, value in (("weights", weights), ("mask", mask)):
        if value is not None and (not isinstance(value, torch.Tensor) or not _broadcasts_to(value.shape, x.shape[:-1])):
            raise HelmscopeError(
                f"{name} is {shape_or_type(value)}, but it must be a tensor of shape {tuple(x.shape[:-1])} or "
                f"({x.shape[-2]},)"
            )
        if value is not None:
            check_dense_values(name, value)
    if mask is not None and mask.dtype != torch.bool:
        raise HelmscopeError(f"mask has dtype {mask.dtype}, but it must be torch.bool, True at real tokens")
    if weights is None and mask is None:
        return None
    combined = torch.ones(x.shape[:-1], dtype=x.dtype, device=x.device) if weights is None else weights.to(x)
    good = (combined == 0) | ((combined >= 1e-30) & (combined <= 1e30))  # so that sums stay well within float32
    if not every(good):
        bad = combined[~good][0].item()
        raise HelmscopeError(
            f"weights holds the entry {bad:g}, but every weight must be finite and >= 0 (0, or 1e-30 to 1e30)"
        )
    combined = combined if mask is None else combined * mask.to(x)
    if not every(combined.sum(-1) > 0):
        raise HelmscopeError("weights and mask leave a system without any token of positive weight")
    return combined.expand(x.shape[:-1])


def fill_padding(
    x: object, weights: Float[Tensor, "*batch n"] | None, mask: Bool[Tensor, "*batch n"] | None = None
) -> object:
    """``x``, with zero vectors of weight 0, such as the padding of a recording, replaced by the first other token of
    their system; anything else is returned unchanged, to be checked.

    >>> fill_padding(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0]))
    tensor([[1., 0.],
            [1., 0.]])
    """
    if (weights is None and mask is None) or not isinstance(x, torch.Tensor) or x.ndim < 2:
        return x
    zero = ~x.any(-1)
    if is_vmapped(zero) or not bool(zero.any()):
        return x
    m = check_weights(x, weights, mask)
    return x if m is None else collapse_padding(x, ~(zero & (m == 0)))


def _broadcasts_to(shape: torch.Size, tokens: torch.Size) -> bool:
    """Whether ``shape`` has one entry per token and leading axes that broadcast to those of ``tokens``."""
    if not 0 < len(shape) <= len(tokens) or shape[-1] != tokens[-1]:
        return False
    return all(size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(tokens), strict=False))
