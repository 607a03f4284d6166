"""Harmonic sums in float32 on a GPU, in three launches: the moments of parts of the cloud, the coefficients, the sums.

A fast version of ``harmonic_matrix``: the rows P and U stay in registers, and the quantities that decide whether the
sums are accurate enough are computed along the way. How a system is partitioned depends only on n and d, so that its
sums are bitwise the same in every run and in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from helmscope.kernels.flash import _has_triton
from helmscope.kernels.harmonic_series import circle_series, sphere_series

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

MAX_ORDERS = {2: 128, 3: 32}  # the most that fits in the registers of one program, by the dimension of the tokens
_MIN_ORDERS = {2: 8, 3: 16}  # a matrix product in Triton has at least 16 rows


@dataclass(frozen=True)
class LaunchConfig:
    """How a system is divided: tokens per step (a power of two >= 16), maximal number of programs, warps per program.

    >>> LaunchConfig(tokens=32, programs=4, warps=4).programs_and_steps(1_000)
    (4, 8)
    """

    tokens: int
    programs: int
    warps: int

    def programs_and_steps(self, n: int) -> tuple[int, int]:
        """Number of programs for n tokens, and number of steps per program."""
        blocks = -(-n // self.tokens)
        steps = -(-blocks // self.programs)
        return -(-blocks // steps), steps


# on S^2 by the number of orders: the fastest on an H200 at n = 65,536, or within 1 % of it
_MOMENTS = {16: LaunchConfig(tokens=64, programs=256, warps=2), 32: LaunchConfig(tokens=32, programs=512, warps=4)}
_SUMS = {16: LaunchConfig(tokens=64, programs=4_096, warps=2), 32: LaunchConfig(tokens=64, programs=4_096, warps=4)}


def default_partitions(d: int, orders: int) -> tuple[LaunchConfig, LaunchConfig]:
    """The partitions for the moments and for the sums; more programs leave more partial results to add up.

    >>> default_partitions(2, 128)[0]
    LaunchConfig(tokens=16, programs=512, warps=4)
    """
    if d == 3:
        return _MOMENTS[orders], _SUMS[orders]
    tokens = max(16, 2_048 // orders)
    return LaunchConfig(tokens, 512, 4), LaunchConfig(tokens, 4_096, 4)


def fits(x: Float[Tensor, "*batch n d"], degree: int) -> bool:
    """Whether these kernels support tokens x on the circle or S^2 with a series of this degree.

    >>> fits(torch.eye(3), 12)
    False
    """
    if not x.is_cuda or x.dtype != torch.float32 or not _has_triton():
        return False
    return degree + 2 <= MAX_ORDERS[x.shape[-1]] and x.shape[-2] * x.shape[-1] < 2**30


def gpu_sums(
    x: Float[Tensor, "batch n d"],
    mass: Float[Tensor, "batch n"] | None,
    beta: float,
    degree: int,
    *,
    skip_self: bool = False,
    partitions: tuple[LaunchConfig, LaunchConfig] | None = None,
) -> tuple[Float[Tensor, "batch n d"], Float[Tensor, "batch n 1"], Float[Tensor, "batch 3 part"]]:
    """The sum divided by e^beta, without a token's own term if ``skip_self``; its mass divided by e^beta; and
    diagnostics.

    The diagnostics are, for each part of the cloud, the smallest mass that a token receives from the others, the
    largest | |x| - 1 | and the total weight.
    """
    from helmscope.kernels.harmonic_triton import coefficients_kernel, moments_kernel, sums_kernel

    systems, n, d = x.shape
    orders = max(_MIN_ORDERS[d], 1 << (degree + 1).bit_length())
    k_size = 1 if d == 2 else orders
    for_moments, for_sums = partitions or default_partitions(d, orders)
    x = x.contiguous()
    weights = x if mass is None else mass.contiguous()
    shape = {"D": d, "ORDERS": orders, "BITS": orders.bit_length() - 1, "WEIGHTED": mass is not None}
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        table = _table(beta, degree, orders, d, x.device)
        parts, steps = for_moments.programs_and_steps(n)
        moments = x.new_empty(systems, parts, 2 * orders * k_size, dtype=torch.float64)
        moments_kernel[(systems * parts,)](
            x, weights, moments, n, parts, steps, **shape, TOKENS=for_moments.tokens, num_warps=for_moments.warps
        )
        series = x.new_empty(systems, d + 1, 2 * orders * k_size)
        coefficients_kernel[(systems * orders,)](
            *(moments, table, series, parts),
            ORDERS=orders,
            K=k_size,
            SUMS=d + 1,
            PARTS=min(64, 1_024 // k_size),
            num_warps=2 if d == 2 else 8,
        )
        parts, steps = for_sums.programs_and_steps(n)
        total, z, diagnostics = torch.empty_like(x), x.new_empty(systems, n, 1), x.new_empty(systems, 3, parts)
        sums_kernel[(systems * parts,)](
            *(x, weights, series, total, z, diagnostics, n, parts, steps),
            **shape,
            TOKENS=for_sums.tokens,
            SKIP_SELF=skip_self,
            num_warps=for_sums.warps,
        )
    return total, z, diagnostics


@lru_cache(maxsize=8)
def _table(
    beta: float, degree: int, orders: int, d: int, device: torch.device
) -> Float[Tensor, "sum order moment coefficient"]:
    """The linear map from the moments (m, cosine or sine of m phi, k) of the orders m' - 1 .. m' + 2 to the
    coefficients (cosine or sine, k) of order m', for every sum and every m'.

    The moment with e^{-i m phi} is R_cos - i R_sin, and the real part of S e^{i m phi} is Re S cos - Im S sin.
    """
    size, k_size = degree + 2, 1 if d == 2 else orders
    table = torch.zeros(d + 1, orders, 4, 2, k_size, 2, k_size, dtype=torch.float64, device="cpu")
    for m in range(size):
        rows = torch.eye(1 if d == 2 else size, dtype=torch.complex128, device="cpu")
        unit = torch.zeros(len(rows), size, len(rows), dtype=torch.complex128, device="cpu")
        unit[:, m] = rows
        for part, factor in enumerate((1.0, -1j)):
            if d == 2:
                series = circle_series(factor * unit.squeeze(-1), beta, degree).unsqueeze(2)
            else:
                series = sphere_series(factor * unit, beta, degree)
            for order in range(max(m - 1, 0), min(m + 2, degree + 1)):
                block = table[:, order, m - order + 1, part, : len(rows), :, : series.shape[2]]
                block.copy_(torch.stack([series[:, order].real, -series[:, order].imag], 1).permute(3, 0, 1, 2))
    return table.flatten(2, 4).flatten(3).to(device, torch.float32)
