"""Harmonic sums as a few large matrix products, for GPUs, on which every small operation costs a launch.

With the rows P_i = [cos m phi, sin m phi] and U_i = [cos k theta, sin k theta] of each token (on the circle P alone),

    R = sum_j m_j P_j^T U_j,       the sums at token i = P_i F U_i^T,       F = A R.

The linear map A from moments to coefficients, that of ``harmonic_series``, depends only on beta and the degree: it is
computed once, one column per moment, and cached.
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

MAX_MATRIX_DEGREE = 20  # A then has 7.5 million entries
CHUNK = 2**20  # tokens at once


@full_precision
def matrix_sums(
    x: Float[Tensor, "batch n d"], mass: Float[Tensor, "batch n"] | None, beta: float, degree: int
) -> Float[Tensor, "batch n s"]:
    """Z and the coordinates of the sum, divided by e^beta, at every token; all weights ``mass`` are 1 if None.

    >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> matrix_sums(x, None, beta=0.0, degree=0).round(decimals=5)
    tensor([[[2., 1., 1.],
             [2., 1., 1.]]])
    """
    chunks = [slice(first, first + CHUNK) for first in range(0, x.shape[1], CHUNK)]
    bases = _bases(x, degree) if len(chunks) == 1 else None  # recomputed if there are several chunks
    masses = [None if mass is None else mass[:, chunk] for chunk in chunks]
    moments = [_moments(bases or _bases(x[:, chunk], degree), m) for chunk, m in zip(chunks, masses, strict=True)]
    coefficients = sum(moments[1:], moments[0]) @ _coefficient_map(beta, degree, x.shape[-1], x.dtype, x.device)
    out = [_evaluate(bases or _bases(x[:, chunk], degree), coefficients) for chunk in chunks]
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def _bases(x: Tensor, degree: int) -> list[Tensor]:
    """P, and on S^2 also U, in few operations: phi = atan2(y, x), theta = atan2(r, z). At a pole phi is 0."""
    if x.shape[-1] == 3:
        x = torch.cat([x, torch.linalg.vector_norm(x[..., :2], dim=-1, keepdim=True)], -1)
    angles = torch.atan2(x[..., 1::2], x[..., ::2])
    orders, one = _constants(degree + 2, x.dtype, x.device)
    waves = torch.view_as_real(torch.polar(one, angles.unsqueeze(-1) * orders))
    return list(waves.flatten(-2).unbind(2))


@full_precision
def _moments(bases: list[Tensor], mass: Tensor | None) -> Float[Tensor, "batch moment"]:
    """R, flattened."""
    p = bases[0] if mass is None else mass.unsqueeze(-1) * bases[0]
    return p.sum(1) if len(bases) == 1 else (p.mT @ bases[1]).flatten(1)


@full_precision
def _evaluate(bases: list[Tensor], coefficients: Tensor) -> Float[Tensor, "batch n s"]:
    """P_i F U_i^T at every token."""
    p, width = bases[0], bases[0].shape[-1]
    if len(bases) == 1:
        return p @ coefficients.view(-1, width, 3)
    series = (bases[1] @ coefficients.view(-1, width, 4 * width)).view(*p.shape[:2], 4, width)
    return (series * p.unsqueeze(-2)).sum(-1)


@lru_cache(maxsize=8)
def _constants(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(count, dtype=dtype, device=device), torch.ones((), dtype=dtype, device=device)


@lru_cache(maxsize=8)
def _coefficient_map(
    beta: float, degree: int, dim: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "moment f"]:
    """The transpose of A, from the flattened R to the flattened F: on the circle (K, 2) to (K, 2, 3), on S^2
    (K, 2, K, 2) to (K, 2, 4, K, 2), where axes of size 2 are cosine and sine.

    The moment with e^{-i m phi} is R_cos - i R_sin, and the real part of S e^{i m phi} is Re S cos - Im S sin.
    """
    size = degree + 2
    if dim == 2:
        unit = torch.eye(2 * size, dtype=torch.float64, device="cpu").view(-1, size, 2)
        series = circle_series(torch.complex(unit[..., 0], -unit[..., 1]), beta, degree)
        matrix = torch.zeros(2 * size, size, 2, 3, dtype=torch.float64, device="cpu")
        matrix[:, :-1, 0], matrix[:, :-1, 1] = series.real, -series.imag
        return matrix.flatten(1).to(device, dtype)
    # axes: m, cos/sin of m phi, k, cos/sin of k theta of R; then k, cos/sin of k theta, sum, m, cos/sin of m phi of F
    matrix = torch.zeros(size, 2, size, 2, size, 2, 4, size, 2, dtype=torch.float64, device="cpu")
    for m in range(size):  # even m are paired with the cosines of k theta, odd m with the sines
        unit = torch.zeros(size, size, size, dtype=torch.complex128, device="cpu")
        unit[:, m] = torch.eye(size, dtype=torch.complex128, device="cpu")
        for part, factor in enumerate((1.0, -1j)):
            series = sphere_series(factor * unit, beta, degree)  # (moment k, m, k, 4)
            for order in range(size - 1):
                matrix[m, part, :, m % 2, :-1, order % 2, :, order, 0] = series[:, order].real
                matrix[m, part, :, m % 2, :-1, order % 2, :, order, 1] = -series[:, order].imag
    return matrix.view(4 * size * size, -1).to(device, dtype)
