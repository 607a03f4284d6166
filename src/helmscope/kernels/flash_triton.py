"""Triton code of ``flash``: ``split_kernel`` splits the vectors into float16 halves; then each program of
``flash_kernel`` sums over all keys for one block of queries of one system.

Halves are padded with zero rows to whole blocks and with zero columns to a power of two. Logits are in units of log 2.
"""
# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(math.log2(math.e))
_LOG_2 = tl.constexpr(math.log(2))


@triton.jit
def _power_of_two(k):
    """2^k for an integer -126 <= k <= 127, built from its bits, because ``exp2`` need not be exact."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_exponent(largest):
    """The k with 2^14 <= largest 2^k < 2^15, at most 112.

    With terms of at most 2^14 and numbers below 2^15, 22 bits of each are above the smallest float16 number.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.where(exponent == 255, 0, 141 - tl.maximum(exponent, 29))  # 255: not finite, as the sums will be


@triton.jit
def split_kernel(numbers, largest, halves, n, padded, d, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Fill halves (system, 2, padded, WIDTH) with numbers (system, n, d), times a power of two per system determined by
    largest (system): first rounded to float16, then the remainder of that rounding.
    """
    blocks = padded // ROWS
    system = (tl.program_id(0) // blocks).to(tl.int64)
    rows = (tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    a = tl.load(numbers + system * n * d + rows * d + columns, (rows < n) & (columns < d), 0.0)
    a *= _power_of_two(_scale_exponent(tl.load(largest + system)))
    high = a.to(tl.float16)
    offsets = halves + system * 2 * padded * WIDTH + rows * WIDTH + columns
    tl.store(offsets, high)
    tl.store(offsets + padded * WIDTH, (a - high.to(tl.float32)).to(tl.float16))


@triton.jit
def _product(a, a_low, b, b_low):
    """(a + a_low) (b + b_low) without the product of the two low halves, which is below rounding.

    The small products come first, because a tensor core truncates digits when it adds to a large sum.
    """
    out = tl.dot(a_low, b)
    out = tl.dot(a, b_low, out)
    return tl.dot(a, b, out)


@triton.jit
def _load(halves, rows, padded, WIDTH: tl.constexpr):
    """Load a block of rows of both halves."""
    offsets = halves + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(offsets), tl.load(offsets + padded * WIDTH)


@triton.jit
def _add_block(
    total, compensation, mass, running_max, start, rows, q, q_low, key, value, bias, product_scale, bound, n, padded,
    R: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, TERM_EXPONENT: tl.constexpr, CAUSAL: tl.constexpr,
    SKIP_SELF: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, BOUNDED: tl.constexpr, SHARED: tl.constexpr,
    COMPENSATED: tl.constexpr,
):  # fmt: skip
    """Add the terms of one block of keys, as multiples of 2^(running_max - TERM_EXPONENT).

    ``running_max`` is an integer, so that rescaling by powers of two is exact; if BOUNDED it is always ``bound``.
    ``compensation`` is the accumulated rounding error of ``total`` (Kahan): it matters because the tangential part of a
    sum can be a hundredth of it.
    """
    keys = start + tl.arange(0, BLOCK_N)
    k, k_low = _load(key, keys, padded, R)
    if SHARED:
        v, v_low = k, k_low
    else:
        v, v_low = _load(value, keys, padded, D)
    offset = (TERM_EXPONENT - bound) if BOUNDED else 0.0
    if WEIGHTED:
        offset = (offset + tl.load(bias + keys, keys < n, float("-inf")))[None, :]
    elif RAGGED:
        offset = tl.where(keys < n, offset, float("-inf"))[None, :]
    s = _product(q, q_low, tl.trans(k), tl.trans(k_low)) * product_scale + offset
    if CAUSAL:
        s = tl.where(rows[:, None] >= keys[None, :], s, float("-inf"))
    if SKIP_SELF:
        s = tl.where(rows[:, None] != keys[None, :], s, float("-inf"))
    if not BOUNDED:
        higher = tl.maximum(running_max, tl.ceil(tl.max(s, 1)))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: no visible key so far
        decay = tl.exp2(running_max - level)
        running_max = higher
        s = s - (level - TERM_EXPONENT)[:, None]
        total *= decay[:, None]
        mass *= decay
        if COMPENSATED:
            compensation *= decay[:, None]
    p = tl.exp2(s)
    mass += tl.sum(p, 1)
    high = p.to(tl.float16)
    part = _product(high, (p - high.to(tl.float32)).to(tl.float16), v, v_low)
    if COMPENSATED:
        part -= compensation
        new_total = total + part
        compensation = (new_total - total) - part
        total = new_total
    else:
        total += part
    return total, compensation, mass, running_max


@triton.jit
def flash_kernel(
    query, key, value, bias, self_products, query_largest, key_largest, value_largest, heaviest,
    totals, shifts, masses, mass_shifts, logit_scale, n, padded, d,
    R: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TERM_EXPONENT: tl.constexpr,
    CAUSAL: tl.constexpr, SKIP_SELF: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, BOUNDED: tl.constexpr,
    SHARED: tl.constexpr, COMPENSATED: tl.constexpr,
):  # fmt: skip
    """Fill totals (system, n, d), shifts, masses and mass_shifts (system, n) with the parts of an ``AttentionSum``.

    Inputs are the halves of query and key (system, 2, padded, R) and of value (system, 2, padded, D), which is not read
    if SHARED with the key, the largest absolute value of each (system), and ``logit_scale``, the factor from products
    to logits. If WEIGHTED, bias (system, n) is log2 of the weights relative to the heaviest (system). If SKIP_SELF,
    self_products (system, n) is <query_i, key_i>, whose term enters only the mass, and mass_shifts is the scale of the
    mass; otherwise mass_shifts is not written. RAGGED: padding rows must be masked. BOUNDED: no logit exceeds
    |logit_scale|.
    """
    blocks = tl.cdiv(n, BLOCK_M)
    program = tl.program_id(0)
    system = (program // blocks).to(tl.int64)
    block = blocks - 1 - program % blocks  # under a causal mask the last rows take longest, so they start first
    query += system * 2 * padded * R
    key += system * 2 * padded * R
    value += system * 2 * padded * D
    bias += system * n
    query_scale = _power_of_two(-_scale_exponent(tl.load(query_largest + system)))
    key_scale = _power_of_two(-_scale_exponent(tl.load(key_largest + system)))
    product_scale = logit_scale * query_scale * key_scale
    bound = tl.ceil(tl.abs(logit_scale))

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q, q_low = _load(query, rows, padded, R)
    total = tl.zeros([BLOCK_M, D], tl.float32)
    compensation = tl.zeros([BLOCK_M, D], tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    running_max = mass + (bound if BOUNDED else float("-inf"))

    # only blocks on the diagonal mask single pairs: these come first, then all others, or if CAUSAL those before them
    SPAN: tl.constexpr = (BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N) if CAUSAL or SKIP_SELF else 0
    diagonal = block * BLOCK_M // BLOCK_N * BLOCK_N
    if SPAN > 0:
        for start in tl.range(diagonal, diagonal + SPAN, BLOCK_N, num_stages=1):
            total, compensation, mass, running_max = _add_block(
                total, compensation, mass, running_max, start, rows, q, q_low, key, value, bias, product_scale, bound,
                n, padded, R, D, BLOCK_N, TERM_EXPONENT, CAUSAL, SKIP_SELF, WEIGHTED, RAGGED, BOUNDED, SHARED,
                COMPENSATED,
            )  # fmt: skip
    for done in tl.range(0, diagonal if CAUSAL else padded - SPAN, BLOCK_N):
        start = done + (SPAN if done >= diagonal else 0)
        total, compensation, mass, running_max = _add_block(
            total, compensation, mass, running_max, start, rows, q, q_low, key, value, bias, product_scale, bound,
            n, padded, R, D, BLOCK_N, TERM_EXPONENT, False, False, WEIGHTED, RAGGED, BOUNDED, SHARED, COMPENSATED,
        )  # fmt: skip

    inside = rows < n
    offsets = system * n + rows
    total *= _power_of_two(-TERM_EXPONENT - _scale_exponent(tl.load(value_largest + system)))
    mass *= 2.0**-TERM_EXPONENT
    level = running_max
    if SKIP_SELF:  # e^{l_ii} may be far larger than all other terms, so the mass has its own scale
        self_logit = tl.load(self_products + offsets, inside, 0.0) * _LOG2_E
        if WEIGHTED:
            self_logit += tl.load(bias + rows, inside, 0.0)
        highest = tl.maximum(running_max, tl.ceil(self_logit))
        mass_level = tl.where(highest == float("-inf"), 0.0, highest)
        mass = mass * tl.exp2(running_max - mass_level) + tl.exp2(self_logit - mass_level)
        level = tl.where(running_max == float("-inf"), mass_level, running_max)
        tl.store(mass_shifts + offsets, mass_level * _LOG_2, inside)
    if WEIGHTED:
        weight = tl.load(heaviest + system)
        total *= weight
        mass *= weight
    columns = tl.arange(0, D)
    tl.store(totals + offsets[:, None] * d + columns[None, :], total, inside[:, None] & (columns < d)[None, :])
    tl.store(masses + offsets, mass, inside)
    tl.store(shifts + offsets, tl.where(level == float("-inf"), 0.0, level) * _LOG_2, inside)


INTERPRETED = not isinstance(flash_kernel, triton.JITFunction)
