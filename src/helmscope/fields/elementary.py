"""Elementwise functions whose rounding does not depend on the position of an element in its tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.fields.antiderivative import with_derivative

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def sigmoid(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1 / (1 + e^(-z)), accurate to a relative rounding error for z of either sign, and infinitely differentiable.

    >>> sigmoid(torch.tensor([-100.0, 0.0]))
    tensor([3.7835e-44, 5.0000e-01])
    """
    return with_derivative(z, _sigmoid_value, lambda u: sigmoid(u) * sigmoid(-u))


def _sigmoid_value(z: Tensor) -> Tensor:
    small = torch.exp(-z.abs())
    return torch.where(z < 0, small, 1.0) / (1 + small)


def monomial(z: Tensor, n: int) -> Tensor:
    """z^n / n!, the n-fold antiderivative of 1, by multiplication: rounding in torch.pow depends on the position.

    >>> monomial(torch.tensor([2.0]), 3)
    tensor([1.3333])
    """
    return math.prod([z] * (n - 1), start=z) / math.factorial(n)
