"""Harmonic sums as a few large matrix products, for a GPU, where every small operation costs a launch.

With the rows P_i = [cos m phi, sin m phi] and U_i = [cos k theta, sin k theta] of each token (on the circle P alone),

    R = sum_j m_j P_j^T U_j,       the sums at token i = P_i F U_i^T,       F = A R.

The linear map A from moments to coefficients, ``harmonic``'s own algebra, depends on beta and the degree alone: it is
made once, one column a moment, and kept.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from helmscope.kernels.harmonic_series import circle_series, sphere_series

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

MOST_MATRIX_DEGREE = 20  # A then has 7.5 million entries
CHUNK = 2**20  # tokens at once


def matrix_sums(
    x: Float[Tensor, "batch n d"], mass: Float[Tensor, "batch n"], beta: float, degree: int
) -> Float[Tensor, "batch n s"]:
    """Z and the coordinates of the sum, over e^beta, at every token.

    >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> matrix_sums(x, torch.ones(1, 2), beta=0.0, degree=0).round(decimals=5)
    tensor([[[2., 1., 1.],
             [2., 1., 1.]]])
    """
    parts = [slice(first, first + CHUNK) for first in range(0, x.shape[1], CHUNK)]
    kept = _bases(x, degree) if len(parts) == 1 else None
    moments = [_moments(kept or _bases(x[:, part], degree), mass[:, part]) for part in parts]
    coefficients = sum(moments[1:], moments[0]) @ _map(beta, degree, x.shape[-1], x.dtype, x.device)
    out = [_at_tokens(kept or _bases(x[:, part], degree), coefficients) for part in parts]
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def _bases(x: Tensor, degree: int) -> list[Tensor]:
    """P, and on S^2 U; at a pole phi is 0. One buffer and few operations."""
    orders = _orders(degree + 2, x.dtype, x.device)
    angles = torch.empty(*x.shape[:2], x.shape[-1] - 1, dtype=x.dtype, device=x.device)
    torch.atan2(x[..., 1], x[..., 0], out=angles[..., 0])
    if x.shape[-1] == 3:
        torch.atan2(torch.linalg.vector_norm(x[..., :2], dim=-1), x[..., 2], out=angles[..., 1])
    turns = angles.unsqueeze(-1) * orders
    waves = torch.empty(*angles.shape, 2, degree + 2, dtype=x.dtype, device=x.device)
    torch.cos(turns, out=waves[..., 0, :])
    torch.sin(turns, out=waves[..., 1, :])
    return list(waves.flatten(-2).unbind(2))


def _moments(bases: list[Tensor], mass: Tensor) -> Float[Tensor, "batch moment"]:
    if len(bases) == 1:
        return (mass.unsqueeze(-2) @ bases[0]).squeeze(-2)
    return ((mass.unsqueeze(-1) * bases[0]).mT @ bases[1]).flatten(1)


def _at_tokens(bases: list[Tensor], coefficients: Tensor) -> Float[Tensor, "batch n s"]:
    p, width = bases[0], bases[0].shape[-1]
    if len(bases) == 1:
        return p @ coefficients.view(-1, width, 3)
    series = (bases[1] @ coefficients.view(-1, width, 4 * width)).view(*p.shape[:2], 4, width)
    return (series * p.unsqueeze(-2)).sum(-1)


@lru_cache(maxsize=8)
def _orders(count: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " count"]:
    return torch.arange(count, dtype=dtype, device=device)


@lru_cache(maxsize=8)
def _map(beta: float, degree: int, dim: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "moment f"]:
    """A transposed, from the flat R to the flat F: on the circle (2 K) to (2 K, 3), on S^2 (2 K, 2 K) to (2 K, 4, 2 K).

    The moment with e^{-i m phi} is R_cos - i R_sin, and the real part of S e^{i m phi} is Re S cos - Im S sin.
    """
    size = degree + 2
    if dim == 2:
        unit = torch.eye(2 * size, dtype=torch.float64).view(-1, 2, size)
        series = circle_series(torch.complex(unit[:, 0], -unit[:, 1]), beta, degree)
        found = torch.zeros(2 * size, 2, size, 3, dtype=torch.float64)
        found[:, 0, :-1], found[:, 1, :-1] = series.real, -series.imag
        return found.flatten(1).to(device, dtype)
    found = torch.zeros(2, size, 2, size, 2, size, 4, 2, size, dtype=torch.float64)  # R cs m pk | F pk s cs m
    parity = torch.arange(size) % 2  # even m go with cosines of k theta, odd ones with sines
    for m in range(size):
        unit = torch.zeros(size, size, size, dtype=torch.complex128)
        unit[:, m] = torch.eye(size, dtype=torch.complex128)
        for part, factor in enumerate((1.0, -1j)):
            series = sphere_series(factor * unit, beta, degree)  # (moment k, m, k, 4)
            for to in range(size - 1):
                seen = series[:, to]
                found[part, m, parity[m], :, parity[to], :-1, :, 0, to] = seen.real
                found[part, m, parity[m], :, parity[to], :-1, :, 1, to] = -seen.imag
    return found.view(4 * size * size, -1).to(device, dtype)
