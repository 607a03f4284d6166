"""Triton code of ``streaming``: log2 sum_j 2^{<q_i, k_j> + bias_j} in float32, each program for one block of queries.

Keys are stored by coordinates, (d, m), and padded to whole blocks with bias -1e30. Up to 4 coordinates the products are
written out; otherwise they are matrix products with d padded to a power of two >= 16, in full float32 precision.
"""
# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN_BIAS = -1e30
MAX_WRITTEN_OUT = 4  # coordinates


@dataclass(frozen=True)
class LaunchConfig:
    """Queries and keys per block, and warps per program."""

    queries: int
    keys: int
    warps: int


TILINGS = {"guess": LaunchConfig(64, 64, 4), "maximum": LaunchConfig(64, 128, 4), "product": LaunchConfig(64, 64, 4)}


@triton.jit
def _query_coordinate(queries, rows, n, c: tl.constexpr, D: tl.constexpr):
    """Coordinate c of a block of queries; coordinate 0, which is not used then, if there is none."""
    return tl.load(queries + (c if c < D else 0) * n + rows, rows < n, 0.0)


@triton.jit
def _written_out(s, q0, q1, q2, q3, keys, columns, padded, D: tl.constexpr):
    """s + <q_i, k_j> for a block in D <= 4 dimensions, by multiply-adds."""
    s += q0[:, None] * tl.load(keys + columns)[None, :]
    if D > 1:
        s += q1[:, None] * tl.load(keys + padded + columns)[None, :]
    if D > 2:
        s += q2[:, None] * tl.load(keys + 2 * padded + columns)[None, :]
    if D > 3:
        s += q3[:, None] * tl.load(keys + 3 * padded + columns)[None, :]
    return s


@triton.jit
def _matrix_product(s, q, keys, columns, padded, d, D: tl.constexpr):
    """s + <q_i, k_j> for a block by a matrix product."""
    coordinates = tl.arange(0, D)
    k = tl.load(keys + coordinates[:, None] * padded + columns[None, :], coordinates[:, None] < d, 0.0)
    return tl.dot(q, k, s, input_precision="ieee")


@triton.jit
def log2_sum_exp2_kernel(
    queries, keys, biases, guesses, squares, results, means, n, padded, d,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WRITTEN_OUT: tl.constexpr, GUESSED: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """Fill results (n) from queries (d, n), keys (d, padded) and biases (padded). If GUESSED, terms are relative to
    guesses (n); otherwise to the running maximum. If MEAN, fill means (n) with the mean of <q_i, k_j> - squares_j under
    the terms as weights.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < n
    if WRITTEN_OUT:
        q0 = _query_coordinate(queries, rows, n, 0, D)
        q1 = _query_coordinate(queries, rows, n, 1, D)
        q2 = _query_coordinate(queries, rows, n, 2, D)
        q3 = _query_coordinate(queries, rows, n, 3, D)
    else:
        coordinates = tl.arange(0, D)[None, :]
        q = tl.load(queries + coordinates * n + rows[:, None], inside[:, None] & (coordinates < d), 0.0)
    guess = tl.load(guesses + rows, inside, 0.0) if GUESSED else tl.zeros([BLOCK_M], tl.float32)
    highest = tl.zeros([BLOCK_M], tl.float32) + float("-inf")
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M], tl.float32)
    # partial sums per column: no reduction within the loop, and shorter sums have smaller rounding errors
    partial = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.range(0, padded, BLOCK_N):
        columns = begin + tl.arange(0, BLOCK_N)
        bias = tl.load(biases + columns)
        s = bias[None, :] - guess[:, None]
        if WRITTEN_OUT:
            s = _written_out(s, q0, q1, q2, q3, keys, columns, padded, D)
        else:
            s = _matrix_product(s, q, keys, columns, padded, d, D)
        if GUESSED:
            partial += tl.exp2(s)
        else:
            higher = tl.maximum(highest, tl.max(s, 1))
            decay = tl.exp2(highest - higher)
            terms = tl.exp2(s - higher[:, None])
            total = total * decay + tl.sum(terms, 1)
            if MEAN:
                logits = s - (bias + tl.load(squares + columns))[None, :]
                weighted = weighted * decay + tl.sum(terms * logits, 1)
            highest = higher
    if GUESSED:
        tl.store(results + rows, guess + tl.log2(tl.sum(partial, 1)), inside)
    else:
        tl.store(results + rows, highest + tl.log2(total), inside)
        if MEAN:
            tl.store(means + rows, weighted / total, inside)


def log2_sum_exp2(
    query: Tensor,
    key: Tensor,
    bias: Tensor,
    guess: Tensor | None,
    squares: Tensor | None = None,
    *,
    tiling: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log2 sum_j 2^{<query_i, key_j> + bias_j}; with ``squares`` also the mean of <query_i, key_j> - squares_j.

    All are float32 on one device; ``guess`` must be None with ``squares``.
    """
    n, d = query.shape
    written_out = d <= MAX_WRITTEN_OUT
    if tiling is None:
        tiling = TILINGS["product" if not written_out else "maximum" if guess is None else "guess"]
    padded = -(-len(key) // tiling.keys) * tiling.keys
    rest = padded - len(key)
    keys = torch.nn.functional.pad(key.mT, (0, rest)).contiguous()
    biases = torch.nn.functional.pad(bias.clamp(min=HIDDEN_BIAS), (0, rest), value=HIDDEN_BIAS).contiguous()
    padded_squares = biases if squares is None else torch.nn.functional.pad(squares, (0, rest)).contiguous()
    results = query.new_empty(n)
    means = results if squares is None else torch.empty_like(results)
    log2_sum_exp2_kernel[(-(-n // tiling.queries),)](
        *(query.mT.contiguous(), keys, biases, results if guess is None else guess.contiguous(), padded_squares),
        *(results, means, n, padded, d),
        D=d if written_out else max(16, 1 << (d - 1).bit_length()),
        BLOCK_M=tiling.queries,
        BLOCK_N=tiling.keys,
        WRITTEN_OUT=written_out,
        GUESSED=guess is not None,
        MEAN=squares is not None,
        num_warps=tiling.warps,
    )
    return results, None if squares is None else means


INTERPRETED = not isinstance(log2_sum_exp2_kernel, triton.JITFunction)
