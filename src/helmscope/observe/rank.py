"""Effective rank of a cloud of tokens, and its distance from a single point, in several definitions.

X is the n x d matrix of tokens with singular values s_1 >= s_2 >= ...; xbar is its mean row. A token of weight m counts
m times: its row in X is sqrt(m) x, a row of zeros for weight 0. Raises HelmscopeError for x that is not on the sphere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.observe.observable import observable
from helmscope.observe.track import counted_tokens, token_weights
from helmscope.types import check_real
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = [
    "collapse_residual_composite",
    "collapse_residual_frobenius",
    "effective_rank",
    "nuclear_rank",
    "numerical_rank",
    "participation_ratio",
    "spectral_ranks",
    "stable_rank",
]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__, "effective_rank")


@observable
def effective_rank(
    x: Float[Tensor, "*batch n d"], *, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Effective rank exp(-sum p log p), p = s / sum s, of each cloud (Roy & Vetterli 2007).

    >>> effective_rank(torch.eye(3))
    tensor(3.)
    """
    return spectral_ranks(_singular_values(x, weights))["effective_rank"]


@observable
def participation_ratio(
    x: Float[Tensor, "*batch n d"], *, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Participation ratio (sum s^2)^2 / sum s^4 of each cloud: the effective number of eigenvalues of X^T X.

    >>> participation_ratio(torch.eye(3))
    tensor(3.)
    """
    return spectral_ranks(_singular_values(x, weights))["participation_ratio"]


@observable
def stable_rank(
    x: Float[Tensor, "*batch n d"], *, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Stable rank |X|_F^2 / |X|_2^2 = sum s^2 / s_1^2 of each cloud (Rudelson & Vershynin 2007).

    >>> stable_rank(torch.eye(3))
    tensor(3.)
    """
    return spectral_ranks(_singular_values(x, weights))["stable_rank"]


@observable
def nuclear_rank(
    x: Float[Tensor, "*batch n d"], *, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Nuclear rank |X|_* / |X|_2 = sum s / s_1 of each cloud.

    >>> nuclear_rank(torch.eye(3))
    tensor(3.)
    """
    return spectral_ranks(_singular_values(x, weights))["nuclear_rank"]


def spectral_ranks(s: Float[Tensor, "*batch k"]) -> dict[str, Float[Tensor, "*batch"]]:
    """Four effective ranks by name, from the singular values s of X, with p = s / sum s: ``effective_rank``
    e^{-sum p log p}, ``participation_ratio`` (sum s^2)^2 / sum s^4, ``stable_rank`` sum s^2 / s_1^2, and
    ``nuclear_rank`` sum s / s_1.

    >>> {name: rank.item() for name, rank in spectral_ranks(torch.ones(3)).items()}["stable_rank"]
    3.0
    """
    power, largest = s**2, s.amax(-1)
    p = s / s.sum(-1, keepdim=True)
    # p log p is 0 at p = 0, where its slope is infinite: the gradient there is set to 0
    logs = torch.log(torch.where(p > 0, p, 1.0))
    return {
        "effective_rank": torch.exp(-(p * logs).sum(-1)),
        "participation_ratio": power.sum(-1) ** 2 / (power**2).sum(-1),
        "stable_rank": power.sum(-1) / largest**2,
        "nuclear_rank": s.sum(-1) / largest,
    }


@observable
def numerical_rank(
    x: Float[Tensor, "*batch n d"], *, tol: float, weights: Float[Tensor, "*batch n"] | None = None
) -> Int[Tensor, "*batch"]:
    """Numerical rank of each cloud: the number of singular values above ``tol`` s_1.

    >>> numerical_rank(torch.eye(3), tol=1e-6)
    tensor(3)
    """
    tol = check_real("tol", tol, at_least=0)
    s = _singular_values(x, weights)
    return (s > tol * s.amax(-1, keepdim=True)).sum(-1)


@observable
def collapse_residual_frobenius(
    x: Float[Tensor, "*batch n d"], *, relative: bool = False, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Distance |X - 1 xbar^T|_F of each cloud from its mean, 0 for a single point; ``relative`` divides by |X|_F.

    >>> collapse_residual_frobenius(torch.eye(2))
    tensor(1.)
    """
    x = counted_tokens(x, weights)
    m, residual = _residual(x, weights)
    size: Tensor = torch.linalg.vector_norm(m.sqrt() * residual, dim=(-1, -2))
    return size / torch.linalg.vector_norm(m.sqrt() * x, dim=(-1, -2)) if relative else size


@observable
def collapse_residual_composite(
    x: Float[Tensor, "*batch n d"], *, relative: bool = False, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Rank-collapse residual sqrt(|R|_1 |R|_inf) of R = X - 1 xbar^T for each cloud (Dong, Cordonnier & Loukas 2021,
    arXiv:2103.03404, here with the mean as the subtracted row); ``relative`` divides by the same norm of X.

    |.|_1 is the largest column sum of absolute values, weighted by token; |.|_inf is the largest row sum, over tokens
    of positive weight.

    >>> collapse_residual_composite(torch.eye(2))
    tensor(1.)
    """
    x = counted_tokens(x, weights)
    m, residual = _residual(x, weights)
    size = _composite_norm(residual, m)
    return size / _composite_norm(x, m) if relative else size


def _composite_norm(matrix: Tensor, m: Tensor) -> Tensor:
    absolute = torch.where(m > 0, matrix.abs(), 0.0)
    columns, rows = (m * absolute).sum(-2).amax(-1), absolute.sum(-1).amax(-1)
    product = columns * rows
    # sqrt has an infinite slope at 0: for a single point the gradient is set to 0
    return torch.where(product > 0, torch.sqrt(torch.where(product > 0, product, 1.0)), 0.0)


def _residual(x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights as a column, and X - 1 xbar^T."""
    m = token_weights(x, weights).unsqueeze(-1)
    return m, x - (m * x).sum(-2, keepdim=True) / m.sum(-2, keepdim=True)


def _singular_values(x: Tensor, weights: Tensor | None) -> Tensor:
    x = counted_tokens(x, weights)
    m = token_weights(x, weights).unsqueeze(-1)
    values: Tensor = torch.linalg.svdvals(m.sqrt() * x)
    return values
