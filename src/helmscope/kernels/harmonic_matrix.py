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

from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.harmonic_series import circle_series, sphere_series

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

MOST_MATRIX_DEGREE = 20  # A then has 7.5 million entries
CHUNK = 2**20  # tokens at once


@full_precision
def matrix_sums(
    x: Float[Tensor, "batch n d"], mass: Float[Tensor, "batch n"] | None, beta: float, degree: int
) -> Float[Tensor, "batch n s"]:
    """Z and the coordinates of the sum, over e^beta, at every token; all masses are 1 where None.

    >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> matrix_sums(x, None, beta=0.0, degree=0).round(decimals=5)
    tensor([[[2., 1., 1.],
             [2., 1., 1.]]])
    """
    parts = [slice(first, first + CHUNK) for first in range(0, x.shape[1], CHUNK)]
    kept = _bases(x, degree) if len(parts) == 1 else None
    shares = [None if mass is None else mass[:, part] for part in parts]
    moments = [_moments(kept or _bases(x[:, part], degree), share) for part, share in zip(parts, shares, strict=True)]
    coefficients = sum(moments[1:], moments[0]) @ _map(beta, degree, x.shape[-1], x.dtype, x.device)
    out = [_at_tokens(kept or _bases(x[:, part], degree), coefficients) for part in parts]
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def _bases(x: Tensor, degree: int) -> list[Tensor]:
    """P, and on S^2 U; at a pole phi is 0. In few operations: phi = atan2(y, x), theta = atan2(r, z)."""
    if x.shape[-1] == 3:
        x = torch.cat([x, torch.linalg.vector_norm(x[..., :2], dim=-1, keepdim=True)], -1)
    angles = torch.atan2(x[..., 1::2], x[..., ::2])
    orders, one = _constants(degree + 2, x.dtype, x.device)
    waves = torch.view_as_real(torch.polar(one, angles.unsqueeze(-1) * orders))
    return list(waves.flatten(-2).unbind(2))


@full_precision
def _moments(bases: list[Tensor], mass: Tensor | None) -> Float[Tensor, "batch moment"]:
    p = bases[0] if mass is None else mass.unsqueeze(-1) * bases[0]
    return p.sum(1) if len(bases) == 1 else (p.mT @ bases[1]).flatten(1)


@full_precision
def _at_tokens(bases: list[Tensor], coefficients: Tensor) -> Float[Tensor, "batch n s"]:
    p, width = bases[0], bases[0].shape[-1]
    if len(bases) == 1:
        return p @ coefficients.view(-1, width, 3)
    series = (bases[1] @ coefficients.view(-1, width, 4 * width)).view(*p.shape[:2], 4, width)
    return (series * p.unsqueeze(-2)).sum(-1)


@lru_cache(maxsize=8)
def _constants(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(count, dtype=dtype, device=device), torch.ones((), dtype=dtype, device=device)


@lru_cache(maxsize=8)
def _map(beta: float, degree: int, dim: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "moment f"]:
    """A transposed, from the flat R to the flat F: on the circle (K, 2) to (K, 2, 3), on S^2 (K, 2, K, 2) to
    (K, 2, 4, K, 2), where the pairs are cosine and sine.

    The moment with e^{-i m phi} is R_cos - i R_sin, and the real part of S e^{i m phi} is Re S cos - Im S sin.
    """
    size = degree + 2
    if dim == 2:
        unit = torch.eye(2 * size, dtype=torch.float64, device="cpu").view(-1, size, 2)
        series = circle_series(torch.complex(unit[..., 0], -unit[..., 1]), beta, degree)
        found = torch.zeros(2 * size, size, 2, 3, dtype=torch.float64, device="cpu")
        found[:, :-1, 0], found[:, :-1, 1] = series.real, -series.imag
        return found.flatten(1).to(device, dtype)
    found = torch.zeros(
        size, 2, size, 2, size, 2, 4, size, 2, dtype=torch.float64, device="cpu"
    )  # R m cs k u | F k u s m cs
    for m in range(size):  # even m go with the cosines of k theta, odd ones with the sines
        unit = torch.zeros(size, size, size, dtype=torch.complex128, device="cpu")
        unit[:, m] = torch.eye(size, dtype=torch.complex128, device="cpu")
        for part, factor in enumerate((1.0, -1j)):
            series = sphere_series(factor * unit, beta, degree)  # (moment k, m, k, 4)
            for to in range(size - 1):
                found[m, part, :, m % 2, :-1, to % 2, :, to, 0] = series[:, to].real
                found[m, part, :, m % 2, :-1, to % 2, :, to, 1] = -series[:, to].imag
    return found.view(4 * size * size, -1).to(device, dtype)
