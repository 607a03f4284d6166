"""Harmonic sums in float32 in three launches, for a GPU: the moments of parts of the cloud, the coefficients, the sums.

As in ``harmonic_matrix``, of which it is the fast form, but no row P or U ever leaves the registers, and what decides
whether the sums are to be believed is found on the way. A system is cut by n and d alone, so that its sums are the same
to the bit in every run and in every batch.
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

MOST_ORDERS = {2: 128, 3: 32}  # what the registers of one program hold, by the dimension of the tokens
_LEAST_ORDERS = {2: 8, 3: 16}  # a matrix product in Triton has at least 16 rows


@dataclass(frozen=True)
class Cut:
    """How one system is cut: tokens a step (a power of two from 16 on), programs at most, and the warps of each.

    >>> Cut(tokens=32, programs=4, warps=4).of(1_000)
    (4, 8)
    """

    tokens: int
    programs: int
    warps: int

    def of(self, n: int) -> tuple[int, int]:
        """How many programs, and how many steps each."""
        blocks = -(-n // self.tokens)
        steps = -(-blocks // self.programs)
        return -(-blocks // steps), steps


# on S^2 by the number of orders: the fastest on an H200 at n = 65,536, or within 1 % of it
_MOMENTS = {16: Cut(tokens=64, programs=256, warps=2), 32: Cut(tokens=32, programs=512, warps=4)}
_AT_TOKENS = {16: Cut(tokens=64, programs=4_096, warps=2), 32: Cut(tokens=64, programs=4_096, warps=4)}


def chosen_cuts(d: int, orders: int) -> tuple[Cut, Cut]:
    """How the moments are cut, and the sums: the more programs, the more is left to add up for the next step.

    >>> chosen_cuts(2, 128)[0]
    Cut(tokens=16, programs=512, warps=4)
    """
    if d == 3:
        return _MOMENTS[orders], _AT_TOKENS[orders]
    tokens = max(16, 2_048 // orders)
    return Cut(tokens, 512, 4), Cut(tokens, 4_096, 4)


def fits(x: Float[Tensor, "*batch n d"], degree: int) -> bool:
    """Whether these kernels serve tokens on the circle or S^2 in a series of this degree.

    >>> fits(torch.eye(3), 12)
    False
    """
    if not x.is_cuda or x.dtype != torch.float32 or not _has_triton():
        return False
    return degree + 2 <= MOST_ORDERS[x.shape[-1]] and x.shape[-2] * x.shape[-1] < 2**30


def gpu_sums(
    x: Float[Tensor, "batch n d"],
    mass: Float[Tensor, "batch n"] | None,
    beta: float,
    degree: int,
    *,
    skip_self: bool = False,
    cuts: tuple[Cut, Cut] | None = None,
) -> tuple[Float[Tensor, "batch n d"], Float[Tensor, "batch n 1"], Float[Tensor, "batch 3 part"]]:
    """The sum over e^beta, without a token's own term where ``skip_self``, its mass over e^beta, and for every part of
    the cloud the least mass of the others that a token sees, the largest | |x| - 1 | and the weight.
    """
    from helmscope.kernels.harmonic_triton import at_tokens, coefficients, moments

    systems, n, d = x.shape
    orders = max(_LEAST_ORDERS[d], 1 << (degree + 1).bit_length())
    waves = 1 if d == 2 else orders
    first, last = cuts or chosen_cuts(d, orders)
    x = x.contiguous()
    weights = x if mass is None else mass.contiguous()
    shape = {"D": d, "ORDERS": orders, "BITS": orders.bit_length() - 1, "WEIGHTED": mass is not None}
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        table = _table(beta, degree, orders, d, x.device)
        parts, steps = first.of(n)
        found = x.new_empty(systems, parts, 2 * orders * waves, dtype=torch.float64)
        moments[(systems * parts,)](
            x, weights, found, n, parts, steps, **shape, TOKENS=first.tokens, num_warps=first.warps
        )
        series = x.new_empty(systems, d + 1, 2 * orders * waves)
        coefficients[(systems * orders,)](
            *(found, table, series, parts),
            ORDERS=orders,
            K=waves,
            SUMS=d + 1,
            PARTS=min(64, 1_024 // waves),
            num_warps=2 if d == 2 else 8,
        )
        parts, steps = last.of(n)
        total, seen, facts = torch.empty_like(x), x.new_empty(systems, n, 1), x.new_empty(systems, 3, parts)
        at_tokens[(systems * parts,)](
            *(x, weights, series, total, seen, facts, n, parts, steps),
            **shape,
            TOKENS=last.tokens,
            SKIP_SELF=skip_self,
            num_warps=last.warps,
        )
    return total, seen, facts


@lru_cache(maxsize=8)
def _table(
    beta: float, degree: int, orders: int, d: int, device: torch.device
) -> Float[Tensor, "sum order moment coefficient"]:
    """What takes the moments (m, cosine or sine of m phi, k) of the orders m' - 1 .. m' + 2 to the coefficients (cosine
    or sine, k) of order m', for every sum and every m'.

    The moment with e^{-i m phi} is R_cos - i R_sin, and the real part of S e^{i m phi} is Re S cos - Im S sin.
    """
    size, waves = degree + 2, 1 if d == 2 else orders
    table = torch.zeros(d + 1, orders, 4, 2, waves, 2, waves, dtype=torch.float64, device="cpu")
    for m in range(size):
        rows = torch.eye(1 if d == 2 else size, dtype=torch.complex128, device="cpu")
        unit = torch.zeros(len(rows), size, len(rows), dtype=torch.complex128, device="cpu")
        unit[:, m] = rows
        for part, factor in enumerate((1.0, -1j)):
            if d == 2:
                series = circle_series(factor * unit.squeeze(-1), beta, degree).unsqueeze(2)
            else:
                series = sphere_series(factor * unit, beta, degree)
            for to in range(max(m - 1, 0), min(m + 2, degree + 1)):
                into = table[:, to, m - to + 1, part, : len(rows), :, : series.shape[2]]
                into.copy_(torch.stack([series[:, to].real, -series[:, to].imag], 1).permute(3, 0, 1, 2))
    return table.flatten(2, 4).flatten(3).to(device, torch.float32)
