"""Covariances that have been called the diffusion of attention, each under its own name [Helmholtz Transformer, no. 2].

    m_i = sum_j P_ij x_j,    Cov_P(i) = sum_j P_ij (x_j - m_i)(x_j - m_i)^T,    Sigma = (1/2) Cov(increment) / dt

(A) ``token_sampling_covariance``: one key J ~ P_i is sampled, x' = x + sqrt(eps) W_V (x_J - m_i) + eps b. Then
    Sigma_A = (1/2) W_V Cov_P(i) W_V^T exactly, without a central limit theorem; averaging k samples divides it by k.
(B) ``random_value_covariance``: the values are random and the weights are not, as in a sum of many small terms.
(C) ``context_covariance``: the variation of a token's increment over contexts, measured.

Real attention is neither (A) nor (B): given its tokens it is deterministic, so its conditional covariance is 0 and its
generator is W_V m_i . grad alone. Deterministic interpretations of Cov_P are D_q m = beta Cov_P for a query q, and, for
a doubly stochastic kernel, Cov(x) = Cov(m) + mean_i Cov_P(i): attention *contracts* by as much as (A) adds. With V = +I
and beta -> infinity the flow is the backward heat equation, X = (1/beta) grad log rho.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.fields.lowrank import LowRank
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import check_tokens
from helmscope.kernels.dense import matrix_product
from helmscope.observe.generator import check_points
from helmscope.observe.kernel import attention_distributions, check_kernel
from helmscope.types import HelmscopeError, check_reduced, pluralized

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    Matrix = Float[Tensor, "k d"] | LowRank


@full_precision
def token_sampling_covariance(
    kernel: Float[Tensor, "*batch n n"], x: Float[Tensor, "*batch n d"], value: Matrix | None = None
) -> Float[Tensor, "*batch n k k"]:
    """Covariance (A) of sampling one key: Sigma_A = (1/2) W_V Cov_P(i) W_V^T for each query i.

    W_V = ``value`` is a k x d matrix or a ``LowRank``, by default I. Sigma_A is the second-order term of the generator
    if one key is sampled, and only then. Tokens may be any points of R^d. Raises HelmscopeError unless rows of the
    kernel sum to 1 (normalize those of USA first), or to 0 for a query that attends to no key and does not move. The
    rank is at most min(n - 1, rank of W_V). Memory grows as n^2 k + n k^2.

    >>> half = torch.full((2, 2), 0.5)
    >>> token_sampling_covariance(half, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))[0]
    tensor([[0.5000, 0.0000],
            [0.0000, 0.0000]])
    """
    p, values = _distributions_and_values(kernel, x, value)
    return _second_moment(p, values, p @ values) / 2


@full_precision
def random_value_covariance(
    kernel: Float[Tensor, "*batch n n"], x: Float[Tensor, "*batch n d"], value: Matrix | None = None
) -> Float[Tensor, "*batch n k k"]:
    """Half the covariance of the output of attention if its values were random and its weights fixed:
    (1/2) W_V [sum_j P_ij^2 (x_j - m_i)(x_j - m_i)^T] W_V^T for each query i, with m_i = sum_j P_ij x_j.

    If the values that query i averages with the weights P_ij are independent, each of them adds P_ij^2 times its own
    covariance, so that the sum is smaller than the covariance of one value by the factor sum_j P_ij^2 = 1 / n_eff. It
    is Gaussian by a central limit theorem only if the largest weight vanishes (see ``largest_weight``). In
    ``token_sampling_covariance``, which has the same arguments and errors, one key is sampled instead.

    >>> half = torch.full((2, 2), 0.5)
    >>> random_value_covariance(half, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))[0]
    tensor([[0.2500, 0.0000],
            [0.0000, 0.0000]])
    """
    p, values = _distributions_and_values(kernel, x, value)
    return _second_moment(p * p, values, p @ values) / 2


def independent_draws_covariance(
    kernel: Float[Tensor, "*batch heads n n"], x: Float[Tensor, "*batch n d"], value: Float[Tensor, "heads k d"]
) -> Float[Tensor, "*batch n k k"]:
    """Covariance (A) of several heads that sample keys independently: sum_h (1/2) B_h Cov_{P^h}(i) B_h^T.

    ``value`` holds B_h = W_O^h W_V^h. Raises HelmscopeError unless ``kernel`` has one matrix per head.

    >>> half = torch.full((2, 2, 2), 0.5)
    >>> values = torch.eye(2).expand(2, 2, 2)
    >>> independent_draws_covariance(half, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), values)[0]
    tensor([[1., 0.],
            [0., 0.]])
    """
    heads = _check_heads(value)
    if not isinstance(kernel, torch.Tensor) or kernel.ndim < 3 or kernel.shape[-3] != heads:
        actual = tuple(kernel.shape) if isinstance(kernel, torch.Tensor) else type(kernel).__name__
        raise HelmscopeError(
            f"kernel is {actual}, but value has {pluralized(heads, 'head')}: it must be (..., {heads}, n, n)"
        )
    per_head = [token_sampling_covariance(kernel.select(-3, h), x, value[h]) for h in range(heads)]
    return torch.stack(per_head).sum(0)


def shared_draw_covariance(
    kernel: Float[Tensor, "*batch n n"], x: Float[Tensor, "*batch n d"], value: Float[Tensor, "heads k d"]
) -> Float[Tensor, "*batch n k k"]:
    """Covariance (A) of several heads that share one sampled key J ~ P_i: the increment is sum_h B_h (x_J - m_i), so

        Sigma = (1/2) (sum_h B_h) Cov_P (sum_h B_h)^T = sum_h Sigma_h + (1/2) sum_{h != g} B_h Cov_P B_g^T.

    The cross terms may be positive or negative. All heads must have the same ``kernel``: x_J has the mean m^h of head h
    only if J ~ P^h, so heads with different weights cannot share a sample. (They could share the random number from
    which it is computed, but the covariance would then depend on the order of the tokens.)

    >>> half = torch.full((2, 2), 0.5)
    >>> values = torch.stack([torch.eye(2), -torch.eye(2)])
    >>> shared_draw_covariance(half, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), values)[0]  # the heads cancel
    tensor([[0., 0.],
            [0., 0.]])
    """
    _check_heads(value)
    return token_sampling_covariance(kernel, x, value.sum(0))


@full_precision
def context_covariance(increments: Float[Tensor, "contexts n d"]) -> xr.Dataset:
    """Covariance (C) over contexts, measured: (1/2) Cov(Delta | x_i = x), the context as noise on a token.

    ``increments[c, i]`` is the increment of token i in context c; the state of token i must be the same in all
    contexts. Returns ``drift`` (token, row), the mean of Delta, and ``covariance`` (token, row, column), unbiased and
    centered, each with its standard error over contexts (for the covariance to first order in 1 / sqrt(contexts)). The
    result is reduced, because a covariance is a property of all contexts together. Raises HelmscopeError for fewer than
    two.

    >>> increments = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]])
    >>> measured = context_covariance(increments)
    >>> measured.covariance.values[0].tolist(), measured.attrs["n"]
    ([[1.0, 0.0], [0.0, 0.0]], 2)
    """
    check_points(increments, name="increments")
    if increments.ndim != 3 or increments.shape[0] < 2 or increments.shape[1] < 1:
        raise HelmscopeError(
            f"increments has shape {tuple(increments.shape)}, but it must be (contexts, n, d) with contexts >= 2"
        )
    increments = increments.detach().to(torch.float64).cpu()
    n = len(increments)
    mean = increments.mean(0)
    deviation = (increments - mean).movedim(0, -1)  # (token, row, context)
    covariance = deviation @ deviation.mT / (n - 1)
    # the covariance is the mean over contexts of n / (n - 1) deviation_a deviation_b: its error is that of a mean
    squares = deviation**2 @ (deviation**2).mT * (n / (n - 1)) ** 2 / n
    stderr = ((squares - covariance**2).clamp(min=0) / (n - 1)).sqrt()
    data = {
        "drift": (("token", "row"), mean.numpy()),
        "drift_stderr": (("token", "row"), (increments.std(0, correction=1) / n**0.5).numpy()),
        "covariance": (("token", "row", "column"), (covariance / 2).numpy()),
        "covariance_stderr": (("token", "row", "column"), (stderr / 2).numpy()),
    }
    return check_reduced(xr.Dataset(data, attrs={"n": n}))


@full_precision
def diffusivity(diffusion: Float[Tensor, "*batch n d d"], x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n"]:
    """Diffusivity nu = tr(P Sigma P) / (d - 1): that of isotropic noise on the sphere of equal strength [Helmholtz
    Transformer, no. 2].

    >>> diffusivity(torch.diag(torch.tensor([1.0, 2.0, 4.0])).expand(1, 3, 3), torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([3.])
    """
    diffusion = _check_diffusion(diffusion, check_tokens(x))
    radial = (x * (diffusion @ x.unsqueeze(-1)).squeeze(-1)).sum(-1)
    return (_trace(diffusion) - radial) / (x.shape[-1] - 1)


def diffusivity_as_printed(diffusion: Float[Tensor, "*batch n d d"]) -> Float[Tensor, "*batch n"]:
    """Diffusivity tr Sigma / d as printed in the [Helmholtz Transformer], which on the sphere wrongly includes the
    radial direction.

    >>> diffusivity_as_printed(torch.diag(torch.tensor([1.0, 2.0, 6.0])).expand(1, 3, 3))
    tensor([3.])
    """
    diffusion = _check_square(diffusion)
    return _trace(diffusion) / diffusion.shape[-1]


@full_precision
def anisotropy(diffusion: Float[Tensor, "*batch n d d"], x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n"]:
    """Anisotropy tr(S^2) / (tr S)^2 of S = P Sigma P: 1 / (d - 1) for isotropic noise on the tangent space, 1 for noise
    in a single direction, NaN for none.

    >>> anisotropy(torch.eye(3).expand(1, 3, 3), torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([0.5000])
    """
    ambient = _check_diffusion(diffusion, check_tokens(x))
    p = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) - x.unsqueeze(-1) * x.unsqueeze(-2)
    tangent = p @ ambient @ p
    trace = _trace(tangent)
    return (tangent * tangent.mT).sum((-1, -2)) / (trace * trace)


def _distributions_and_values(kernel: Tensor, x: Tensor, value: Matrix | None) -> tuple[Tensor, Tensor]:
    """The distributions over keys and the values W_V x_j that are sampled."""
    check_points(check_kernel(kernel))
    check_points(x)
    if x.ndim < 2 or kernel.dtype != x.dtype or kernel.shape != (*x.shape[:-1], x.shape[-2]):
        raise HelmscopeError(
            f"kernel has shape {tuple(kernel.shape)} and dtype {kernel.dtype}, but tokens of shape {tuple(x.shape)} "
            f"and dtype {x.dtype} need (..., n, n)"
        )
    p = attention_distributions(kernel)
    if value is None:
        return p, x
    value = check_points(value.dense() if isinstance(value, LowRank) else value, name="value")
    if value.ndim != 2 or value.shape[-1] != x.shape[-1]:
        raise HelmscopeError(f"value has shape {tuple(value.shape)}, but tokens need (k, {x.shape[-1]})")
    return p, matrix_product(x, value.to(x).mT)


@full_precision
def _second_moment(weight: Tensor, values: Tensor, mean: Tensor) -> Tensor:
    """sum_j weight_ij (v_j - m_i)(v_j - m_i)^T, centered before squaring to avoid cancellation."""
    deviation = values.unsqueeze(-3) - mean.unsqueeze(-2)
    moment = (weight.unsqueeze(-1) * deviation).mT @ deviation
    return (moment + moment.mT) / 2


def _check_heads(value: object) -> int:
    check_points(value, name="value")
    assert isinstance(value, torch.Tensor)
    if value.ndim != 3 or value.shape[0] < 1:
        raise HelmscopeError(f"value has shape {tuple(value.shape)}, but several heads need (heads, k, d)")
    return value.shape[0]


def _check_square(diffusion: Tensor) -> Tensor:
    check_points(diffusion, name="diffusion")
    if diffusion.ndim < 2 or diffusion.shape[-1] != diffusion.shape[-2]:
        raise HelmscopeError(f"diffusion has shape {tuple(diffusion.shape)}, but it must be (..., d, d)")
    return diffusion


def _check_diffusion(diffusion: Tensor, x: Tensor) -> Tensor:
    _check_square(diffusion)
    if diffusion.shape != (*x.shape, x.shape[-1]) or diffusion.dtype != x.dtype:
        raise HelmscopeError(
            f"diffusion has shape {tuple(diffusion.shape)} and dtype {diffusion.dtype}, but tokens of shape "
            f"{tuple(x.shape)} and dtype {x.dtype} need (..., n, d, d)"
        )
    return diffusion


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
