"""What small noise on queries or keys does to the attention kernel: the divergence of a row at second order.

With logits l_j = beta <q, k_j> + const and kernel A = softmax(l), a change dl of the logits gives

    KL(A || A')  =  (1/2) Var_A(dl)  +  O(dl^3).

For independent normal noise of standard deviation sigma in every coordinate its expectation is

    noise on all keys:   (1/2) sigma^2 beta^2 |q|^2 (1 - sum_j A_j^2),
    noise on the query:  (1/2) sigma^2 beta^2 tr Cov_A(k).

Their ratio |q|^2 (1 - sum A^2) / tr Cov_A(k) grows as c^4 under q -> c q, k -> k / c, which leaves attention unchanged:
which of the two hurts more [Additive transport, table 1] depends on the scale of queries and keys, not on what the
model computes. ``MatchedQueryNoise`` makes the two equal row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.intervene.query_key import collision_gap, key_spread
from helmscope.types import HelmscopeError, check_real, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def key_noise_kl(
    kernel: Float[Tensor, "*batch n m"],
    queries: Float[Tensor, "*batch n r"],
    beta: float,
    sigma: float,
) -> Float[Tensor, "*batch n"]:
    """The expected divergence KL(A || A') of each attention row, at second order, under noise on all keys:

        (1/2) sigma^2 beta^2 |q_i|^2 (1 - sum_j A_ij^2).

    ``beta`` multiplies the inner products in the logits (1 / sqrt(r) in most models), and ``sigma`` is the standard
    deviation of the noise in each coordinate. The law holds for sigma beta |q| << 1. It is the null hypothesis for the
    comparison of query and key noise in [Additive transport], table 1. Raises HelmscopeError for tensors that do not
    fit, rows that do not sum to 1, beta <= 0 or sigma < 0.

    Uniform attention to 2 keys, where it is (1/4) sigma^2 beta^2 |q|^2:

    >>> key_noise_kl(torch.tensor([[0.5, 0.5]]), torch.tensor([[3.0, 4.0]]), beta=1.0, sigma=0.02)
    tensor([0.0025])
    """
    _check(kernel, "queries", queries, -2)
    scale = (check_real("sigma", sigma, at_least=0) * check_real("beta", beta, above=0)) ** 2 / 2
    return scale * queries.square().sum(-1) * collision_gap(kernel)


def query_noise_kl(
    kernel: Float[Tensor, "*batch n m"],
    keys: Float[Tensor, "*batch m r"],
    beta: float,
    sigma: float,
) -> Float[Tensor, "*batch n"]:
    """The expected divergence KL(A || A') of each attention row, at second order, under noise on its query:

        (1/2) sigma^2 beta^2 tr Cov_A(k),      tr Cov_A(k) = sum_j A_ij |k_j - sum_l A_il k_l|^2.

    ``beta`` and ``sigma`` are as in ``key_noise_kl``; the law holds for sigma beta times the spread of the keys << 1.
    Source: [Additive transport], table 1, of which it is the null hypothesis. Raises HelmscopeError for tensors that
    do not fit, rows that do not sum to 1, beta <= 0 or sigma < 0.

    Two keys at distance 2 with equal kernel, where tr Cov = 1:

    >>> query_noise_kl(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), beta=1.0, sigma=0.1)
    tensor([0.0050])
    """
    _check(kernel, "keys", keys, -1)
    collision_gap(kernel)  # refuses rows that do not sum to 1
    scale = (check_real("sigma", sigma, at_least=0) * check_real("beta", beta, above=0)) ** 2 / 2
    return scale * key_spread(kernel, keys)


def _check(kernel: object, name: str, vectors: object, axis: int) -> None:
    """Raise ``HelmscopeError`` unless kernel (..., n, m) and vectors (..., count, r) are float tensors that fit."""
    for label, value in (("kernel", kernel), (name, vectors)):
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float64) or value.ndim < 2:
            shown = f"of {value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else None
            raise HelmscopeError(
                f"{label} is {shown or type_with_article(value)}, but it must be a tensor of float32 or float64 with "
                "at least 2 axes"
            )
    assert isinstance(kernel, torch.Tensor)
    assert isinstance(vectors, torch.Tensor)
    if vectors.dtype != kernel.dtype or vectors.shape[:-1] != (*kernel.shape[:-2], kernel.shape[axis]):
        raise HelmscopeError(
            f"{name} is of {vectors.dtype} {tuple(vectors.shape)}, but for kernel of {kernel.dtype} "
            f"{tuple(kernel.shape)} it must be of that dtype and shape {(*kernel.shape[:-2], kernel.shape[axis])} + "
            "(r,)"
        )
