"""How many directions a cloud of tokens fills, and how far it is from one point: each public definition by its name.

X is the n x d matrix of tokens with singular values s_1 >= s_2 >= ...; xbar its mean row. A token of weight m counts m
times: its row is sqrt(m) x in X, and one of weight 0 is a row of zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.geometry.sphere import check_tokens
from helmscope.observe.track import token_weights
from helmscope.types import real_number

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


def entropy_rank(
    x: Float[Tensor, "*batch n d"], *, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """exp(-sum p log p), p = s / sum s: the effective rank of Roy & Vetterli (2007).

    >>> entropy_rank(torch.eye(3))
    tensor(3.)
    """
    s = _singular_values(x, weights)
    p = s / s.sum(-1, keepdim=True)
    # p log p is 0 at p = 0, where its slope is infinite: the gradient there is set to 0
    logs = torch.log(torch.where(p > 0, p, 1.0))
    return torch.exp(-(p * logs).sum(-1))


def participation_ratio(
    x: Float[Tensor, "*batch n d"], *, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """(sum s^2)^2 / sum s^4: the effective number of eigenvalues of X^T X.

    >>> participation_ratio(torch.eye(3))
    tensor(3.)
    """
    power = _singular_values(x, weights) ** 2
    return power.sum(-1) ** 2 / (power**2).sum(-1)


def stable_rank(
    x: Float[Tensor, "*batch n d"], *, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """|X|_F^2 / |X|_2^2 = sum s^2 / s_1^2 (Rudelson & Vershynin 2007).

    >>> stable_rank(torch.eye(3))
    tensor(3.)
    """
    power = _singular_values(x, weights) ** 2
    return power.sum(-1) / power.amax(-1)


def nuclear_rank(
    x: Float[Tensor, "*batch n d"], *, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """|X|_* / |X|_2 = sum s / s_1.

    >>> nuclear_rank(torch.eye(3))
    tensor(3.)
    """
    s = _singular_values(x, weights)
    return s.sum(-1) / s.amax(-1)


def numerical_rank(
    x: Float[Tensor, "*batch n d"], *, tol: float, weights: Float[Tensor, "*batch n"] | None = None
) -> Int[Tensor, "*batch"]:
    """Number of singular values above ``tol`` s_1.

    >>> numerical_rank(torch.eye(3), tol=1e-6)
    tensor(3)
    """
    tol = real_number("tol", tol, at_least=0)
    s = _singular_values(x, weights)
    return (s > tol * s.amax(-1, keepdim=True)).sum(-1)


def residual_frobenius(
    x: Float[Tensor, "*batch n d"], *, relative: bool = False, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """|X - 1 xbar^T|_F, 0 for one cluster; ``relative`` divides by |X|_F.

    >>> residual_frobenius(torch.eye(2))
    tensor(1.)
    """
    m, residual = _residual(x, weights)
    size: Tensor = torch.linalg.vector_norm(m.sqrt() * residual, dim=(-1, -2))
    return size / torch.linalg.vector_norm(m.sqrt() * x, dim=(-1, -2)) if relative else size


def residual_composite(
    x: Float[Tensor, "*batch n d"], *, relative: bool = False, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """sqrt(|R|_1 |R|_inf) of R = X - 1 xbar^T: the rank-collapse residual of Dong, Cordonnier & Loukas (2021,
    arXiv:2103.03404) with the mean as the row taken out; ``relative`` divides by the same norm of X.

    |.|_1 is the largest column sum of absolute values, in which a token counts by its weight; |.|_inf is the largest
    row sum, over tokens of positive weight.

    >>> residual_composite(torch.eye(2))
    tensor(1.)
    """
    m, residual = _residual(x, weights)
    size = _composite(residual, m)
    return size / _composite(x, m) if relative else size


def _composite(matrix: Tensor, m: Tensor) -> Tensor:
    absolute = torch.where(m > 0, matrix.abs(), 0.0)
    columns, rows = (m * absolute).sum(-2).amax(-1), absolute.sum(-1).amax(-1)
    product = columns * rows
    # sqrt has an infinite slope at 0: one cluster gets the subgradient 0
    return torch.where(product > 0, torch.sqrt(torch.where(product > 0, product, 1.0)), 0.0)


def _residual(x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights as a column, and X - 1 xbar^T."""
    m = token_weights(check_tokens(x), weights).unsqueeze(-1)
    return m, x - (m * x).sum(-2, keepdim=True) / m.sum(-2, keepdim=True)


def _singular_values(x: Tensor, weights: Tensor | None) -> Tensor:
    m = token_weights(check_tokens(x), weights).unsqueeze(-1)
    values: Tensor = torch.linalg.svdvals(m.sqrt() * x)
    return values
