"""The Triton code of ``flash``: ``split`` cuts the vectors into halves, then one program of ``stream`` sums over all
keys for one block of queries of one system.

Halves are float16, with rows of zeros up to whole blocks and columns of zeros up to a power of two. All logits are in
units of log 2.
"""
# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(math.log2(math.e))
_LOG_2 = tl.constexpr(math.log(2))


@triton.jit
def _power(k):
    """2^k for a whole number -126 <= k <= 127, from its bits: exact, which no exponential need be."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _room(largest):
    """The k for which 2^14 <= largest 2^k < 2^15, at most 112.

    Terms of at most 2^14 and numbers of less than 2^15 leave room for 22 bits each above the last digit of float16.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.where(exponent == 255, 0, 141 - tl.maximum(exponent, 29))  # 255: not finite, and so will the sums be


@triton.jit
def split(numbers, largest, halves, n, padded, d, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Fill halves (system, 2, padded, WIDTH): numbers (system, n, d) times a power of two of each system, which follows
    from the largest (system), rounded to float16, and what rounding left.
    """
    blocks = padded // ROWS
    system = (tl.program_id(0) // blocks).to(tl.int64)
    rows = (tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    a = tl.load(numbers + system * n * d + rows * d + columns, (rows < n) & (columns < d), 0.0)
    a *= _power(_room(tl.load(largest + system)))
    high = a.to(tl.float16)
    at = halves + system * 2 * padded * WIDTH + rows * WIDTH + columns
    tl.store(at, high)
    tl.store(at + padded * WIDTH, (a - high.to(tl.float32)).to(tl.float16))


@triton.jit
def _product(a, a_low, b, b_low):
    """(a + a_low) (b + b_low) without the product of the two low halves, which is below rounding.

    The small products come first: a tensor core cuts off digits whenever it adds to a large sum.
    """
    out = tl.dot(a_low, b)
    out = tl.dot(a, b_low, out)
    return tl.dot(a, b, out)


@triton.jit
def _load(halves, rows, padded, WIDTH: tl.constexpr):
    """A block of rows of both halves."""
    at = halves + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(at), tl.load(at + padded * WIDTH)


@triton.jit
def _absorb(
    total, rest, mass, top, start, rows, q, q_low, key, value, bias, unit, bound, n, padded,
    R: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, HEADROOM: tl.constexpr, CAUSAL: tl.constexpr,
    SKIP_SELF: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, FIXED: tl.constexpr, SHARED: tl.constexpr,
    COMPENSATED: tl.constexpr,
):  # fmt: skip
    """Add the terms of one block of keys, as multiples of 2^(top - HEADROOM).

    ``top`` is a whole number, so that rescaling by powers of two is exact; where FIXED it is ``bound`` throughout.
    ``rest`` is what rounding has cost ``total`` (Kahan): what projection leaves of a sum can be a hundredth of it.
    """
    keys = start + tl.arange(0, BLOCK_N)
    k, k_low = _load(key, keys, padded, R)
    if SHARED:
        v, v_low = k, k_low
    else:
        v, v_low = _load(value, keys, padded, D)
    offset = (HEADROOM - bound) if FIXED else 0.0
    if WEIGHTED:
        offset = (offset + tl.load(bias + keys, keys < n, float("-inf")))[None, :]
    elif RAGGED:
        offset = tl.where(keys < n, offset, float("-inf"))[None, :]
    s = _product(q, q_low, tl.trans(k), tl.trans(k_low)) * unit + offset
    if CAUSAL:
        s = tl.where(rows[:, None] >= keys[None, :], s, float("-inf"))
    if SKIP_SELF:
        s = tl.where(rows[:, None] != keys[None, :], s, float("-inf"))
    if not FIXED:
        higher = tl.maximum(top, tl.ceil(tl.max(s, 1)))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen so far
        decay = tl.exp2(top - level)
        top = higher
        s = s - (level - HEADROOM)[:, None]
        total *= decay[:, None]
        mass *= decay
        if COMPENSATED:
            rest *= decay[:, None]
    p = tl.exp2(s)
    mass += tl.sum(p, 1)
    high = p.to(tl.float16)
    part = _product(high, (p - high.to(tl.float32)).to(tl.float16), v, v_low)
    if COMPENSATED:
        part -= rest
        grown = total + part
        rest = (grown - total) - part
        total = grown
    else:
        total += part
    return total, rest, mass, top


@triton.jit
def stream(
    query, key, value, bias, owns, query_largest, key_largest, value_largest, heaviest,
    totals, shifts, masses, mass_shifts, sharp, n, padded, d,
    R: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADROOM: tl.constexpr,
    CAUSAL: tl.constexpr, SKIP_SELF: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, FIXED: tl.constexpr,
    SHARED: tl.constexpr, COMPENSATED: tl.constexpr,
):  # fmt: skip
    """Fill totals (system, n, d), shifts, masses and mass_shifts (system, n) with the parts of an ``AttentionSum``.

    In come the halves of query and key (system, 2, padded, R) and of value (system, 2, padded, D), unread where SHARED
    with the key, with the largest number of each (system), and ``sharp``, what makes a product a logit. Where WEIGHTED,
    bias (system, n) is the log2 of the weights over the heaviest (system); where SKIP_SELF, owns (system, n) is <query,
    key> of a token itself, whose term joins the mass alone, and mass_shifts, else unwritten, is the mass's own scale.
    RAGGED says that rows of padding are to be hidden, FIXED that no logit exceeds |sharp|.
    """
    blocks = tl.cdiv(n, BLOCK_M)
    program = tl.program_id(0)
    system = (program // blocks).to(tl.int64)
    block = blocks - 1 - program % blocks  # under a causal mask the last rows have the most to do, so they go first
    query += system * 2 * padded * R
    key += system * 2 * padded * R
    value += system * 2 * padded * D
    bias += system * n
    unit = sharp * _power(-_room(tl.load(query_largest + system))) * _power(-_room(tl.load(key_largest + system)))
    bound = tl.ceil(tl.abs(sharp))

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q, q_low = _load(query, rows, padded, R)
    total = tl.zeros([BLOCK_M, D], tl.float32)
    rest = tl.zeros([BLOCK_M, D], tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    top = mass + (bound if FIXED else float("-inf"))

    # single pairs are hidden in the blocks on the diagonal alone: those first, then all others or those before them
    SPAN: tl.constexpr = (BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N) if CAUSAL or SKIP_SELF else 0
    diagonal = block * BLOCK_M // BLOCK_N * BLOCK_N
    if SPAN > 0:
        for start in tl.range(diagonal, diagonal + SPAN, BLOCK_N, num_stages=1):
            total, rest, mass, top = _absorb(
                total, rest, mass, top, start, rows, q, q_low, key, value, bias, unit, bound, n, padded,
                R, D, BLOCK_N, HEADROOM, CAUSAL, SKIP_SELF, WEIGHTED, RAGGED, FIXED, SHARED, COMPENSATED,
            )  # fmt: skip
    for done in tl.range(0, diagonal if CAUSAL else padded - SPAN, BLOCK_N):
        start = done + (SPAN if done >= diagonal else 0)
        total, rest, mass, top = _absorb(
            total, rest, mass, top, start, rows, q, q_low, key, value, bias, unit, bound, n, padded,
            R, D, BLOCK_N, HEADROOM, False, False, WEIGHTED, RAGGED, FIXED, SHARED, COMPENSATED,
        )  # fmt: skip

    inside = rows < n
    at = system * n + rows
    total *= _power(-HEADROOM - _room(tl.load(value_largest + system)))
    mass *= 2.0**-HEADROOM
    level = top
    if SKIP_SELF:  # e^{l_ii} may be far above all others, so the mass has a scale of its own
        own = tl.load(owns + at, inside, 0.0) * _LOG2_E
        if WEIGHTED:
            own += tl.load(bias + rows, inside, 0.0)
        highest = tl.maximum(top, tl.ceil(own))
        whole = tl.where(highest == float("-inf"), 0.0, highest)
        mass = mass * tl.exp2(top - whole) + tl.exp2(own - whole)
        level = tl.where(top == float("-inf"), whole, top)
        tl.store(mass_shifts + at, whole * _LOG_2, inside)
    if WEIGHTED:
        weight = tl.load(heaviest + system)
        total *= weight
        mass *= weight
    columns = tl.arange(0, D)
    tl.store(totals + at[:, None] * d + columns[None, :], total, inside[:, None] & (columns < d)[None, :])
    tl.store(masses + at, mass, inside)
    tl.store(shifts + at, tl.where(level == float("-inf"), 0.0, level) * _LOG_2, inside)


INTERPRETED = not isinstance(stream, triton.JITFunction)
