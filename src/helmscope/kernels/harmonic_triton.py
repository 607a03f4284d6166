"""The Triton code of ``harmonic_gpu``: ``moments`` of the tokens, their ``coefficients``, the sums ``at_tokens``.

Every token has a row P of cos m phi, sin m phi for m < ORDERS, and on S^2, where K = ORDERS, a row C of cos k theta and
a row S of sin k theta for k < K. Moments and coefficients lie as (m, cosine or sine of m phi, k): on S^2 even m go with
C and odd m with S, on the circle K = 1. Which rows exist beyond the degree does not matter: their coefficients are 0.

Rows are made of powers of unit complex numbers, squared in float64: of k angle no digits are lost to a large k. Each
block of tokens is summed in float32 and the blocks in float64, in an order that depends on n alone.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _direction(a, b):
    """(a + i b) / |a + i b| and |a + i b|; 1 and 0 below 1e-18, so close to a pole that its phi plays no part."""
    square = a * a + b * b
    nowhere = square < 1e-36
    square = tl.where(nowhere, 1.0, square)
    over = tl.rsqrt(square.to(tl.float32)).to(tl.float64)
    over *= 1.5 - 0.5 * square * over * over  # from 22 bits to 43
    return tl.where(nowhere, 1.0, a * over), tl.where(nowhere, 0.0, b * over), tl.where(nowhere, 0.0, square * over)


@triton.jit
def _column(a):
    return a.to(tl.float32)[:, None]


@triton.jit
def _powers(a, b, k, BITS: tl.constexpr):
    """Real and imaginary part of (a + i b)^k, (token, k), for k < 2^BITS, in float32: one product a bit of k."""
    taken = k % 2 == 1
    re, im = tl.where(taken, _column(a), 1.0), tl.where(taken, _column(b), 0.0)
    for bit in tl.static_range(1, BITS):
        a, b = a * a - b * b, 2.0 * a * b
        taken = (k >> bit) % 2 == 1
        c, s = tl.where(taken, _column(a), 1.0), tl.where(taken, _column(b), 0.0)
        re, im = re * c - im * s, re * s + im * c
    return re, im


@triton.jit
def _load(x, rows, inside, axis: tl.constexpr, D: tl.constexpr):
    """One coordinate in float64; 1 outside, which is no pole and no NaN."""
    return tl.load(x + rows * D + axis, inside, 1.0).to(tl.float64)


@triton.jit
def _circle(x, rows, inside, ORDERS: tl.constexpr, BITS: tl.constexpr):
    """P (token, 2 ORDERS), and |x|."""
    re, im, size = _direction(_load(x, rows, inside, 0, 2), _load(x, rows, inside, 1, 2))
    column = tl.arange(0, 2 * ORDERS)[None, :]
    c, s = _powers(re, im, column // 2, BITS)
    return tl.where(column % 2 == 1, s, c), size


@triton.jit
def _sphere(x, rows, inside, K: tl.constexpr, BITS: tl.constexpr):
    """P of the even and of the odd m, C and S, each (token, K), and |x|."""
    re, im, radius = _direction(_load(x, rows, inside, 0, 3), _load(x, rows, inside, 1, 3))
    cosine, sine, size = _direction(_load(x, rows, inside, 2, 3), radius)
    column = tl.arange(0, K)[None, :]
    c, s = _powers(re, im, column // 2 * 2, BITS)
    a, b = _column(re), _column(im)
    even = tl.where(column % 2 == 1, s, c)
    odd = tl.where(column % 2 == 1, c * b + s * a, c * a - s * b)
    cosines, sines = _powers(cosine, sine, column, BITS)
    return even, odd, cosines, sines, size


@triton.jit
def _row(column, parity: tl.constexpr):
    """Where (m, cosine or sine) of a column of P of the even or odd m lies among all of them."""
    return 2 * column - column % 2 + 2 * parity


@triton.jit(do_not_specialize=["n", "parts", "steps"])
def moments(
    x, weights, found, n, parts, steps,
    D: tl.constexpr, ORDERS: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Fill found (system, part, moment): sum_j m_j P_j^T (C_j or S_j) over the tokens of one part, ``steps`` blocks."""
    part = tl.program_id(0) % parts
    system = (tl.program_id(0) // parts).to(tl.int64)
    x += system * n * D
    weights += system * n
    found += tl.program_id(0).to(tl.int64) * (2 * ORDERS * (1 if D == 2 else ORDERS))
    if D == 2:
        total = tl.zeros([2 * ORDERS], tl.float64)
    else:
        total = tl.zeros([ORDERS, ORDERS], tl.float64)
        total_odd = tl.zeros([ORDERS, ORDERS], tl.float64)
    step = 0
    while step < steps:  # not range: the interpreter counts no further than a number known to Python
        rows = (part * steps + step) * TOKENS + tl.arange(0, TOKENS)
        inside = rows < n
        share = tl.load(weights + rows, inside, 0.0) if WEIGHTED else inside.to(tl.float32)
        if D == 2:
            p, _ = _circle(x, rows, inside, ORDERS, BITS)
            total += tl.sum((p * share[:, None]).to(tl.float64), 0)
        else:
            even, odd, cosines, sines, _ = _sphere(x, rows, inside, ORDERS, BITS)
            even *= share[:, None]
            odd *= share[:, None]
            total += tl.dot(tl.trans(even), cosines, input_precision="ieee").to(tl.float64)
            total_odd += tl.dot(tl.trans(odd), sines, input_precision="ieee").to(tl.float64)
        step += 1
    columns = tl.arange(0, ORDERS)
    if D == 2:
        tl.store(found + tl.arange(0, 2 * ORDERS), total)
    else:
        tl.store(found + _row(columns, 0)[:, None] * ORDERS + columns[None, :], total)
        tl.store(found + _row(columns, 1)[:, None] * ORDERS + columns[None, :], total_odd)


@triton.jit(do_not_specialize=["parts"])
def coefficients(
    found, table, series, parts,
    ORDERS: tl.constexpr, K: tl.constexpr, SUMS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Fill series (system, SUMS, coefficient), one order m a program. A factor x or y moves m by one, so that it takes
    the moments of the orders m - 1 .. m + 1, and m + 2 for a power of two, times table (SUMS, m, moment, coefficient).
    """
    ALL: tl.constexpr = 2 * ORDERS * K
    order = tl.program_id(0) % ORDERS
    system = (tl.program_id(0) // ORDERS).to(tl.int64)
    near, own = tl.arange(0, 8 * K), tl.arange(0, 2 * K)
    which = (order - 1) * 2 * K + near
    known = (which >= 0) & (which < ALL)
    each = tl.zeros([PARTS, 8 * K], tl.float64)
    first = 0
    while first < parts:
        part = first + tl.arange(0, PARTS)
        at = (system * parts + part)[:, None] * ALL + which[None, :]
        each += tl.load(found + at, (part < parts)[:, None] & known[None, :], 0.0)
        first += PARTS
    moment = tl.sum(each, 0)
    for s in tl.static_range(SUMS):
        at = table + (s * ORDERS + order) * (16 * K * K)
        weight = tl.load(at + near[:, None] * (2 * K) + own[None, :])
        out = tl.sum(moment[:, None] * weight.to(tl.float64), 0)
        tl.store(series + (system * SUMS + s) * ALL + order * 2 * K + own, out.to(tl.float32))


@triton.jit(do_not_specialize=["n", "parts", "steps"])
def at_tokens(
    x, weights, series, totals, masses, facts, n, parts, steps,
    D: tl.constexpr, ORDERS: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, WEIGHTED: tl.constexpr,
    SKIP_SELF: tl.constexpr,
):  # fmt: skip
    """Fill totals (system, n, D), masses (system, n) and facts (system, 3, part): over the tokens of one part the least
    mass of the others, the largest | |x| - 1 |, and the weight. A system that holds a NaN has no least and largest.
    """
    part = tl.program_id(0) % parts
    system = (tl.program_id(0) // parts).to(tl.int64)
    x += system * n * D
    weights += system * n
    series += system * ((D + 1) * 2 * ORDERS * (1 if D == 2 else ORDERS))
    totals += system * n * D
    masses += system * n
    least = tl.full([TOKENS], float("inf"), tl.float32)
    farthest = tl.zeros([TOKENS], tl.float32)
    weight = tl.zeros([TOKENS], tl.float32)
    column = tl.arange(0, ORDERS)
    step = 0
    while step < steps:
        rows = (part * steps + step) * TOKENS + tl.arange(0, TOKENS)
        inside = rows < n
        share = tl.load(weights + rows, inside, 0.0) if WEIGHTED else inside.to(tl.float32)
        if D == 2:
            p, size = _circle(x, rows, inside, ORDERS, BITS)
        else:
            even, odd, cosines, sines, size = _sphere(x, rows, inside, ORDERS, BITS)
        for s in tl.static_range(D + 1):
            if D == 2:
                f = tl.load(series + s * 2 * ORDERS + tl.arange(0, 2 * ORDERS))
                seen = tl.sum(p * f[None, :], 1)
            else:
                at = series + s * 2 * ORDERS * ORDERS + column[:, None]
                g = tl.dot(cosines, tl.load(at + _row(column, 0)[None, :] * ORDERS), input_precision="ieee")
                g_odd = tl.dot(sines, tl.load(at + _row(column, 1)[None, :] * ORDERS), input_precision="ieee")
                seen = tl.sum(g * even + g_odd * odd, 1)
            if s == 0:
                tl.store(masses + rows, seen, inside)
                counted = inside & (seen == seen)
                least = tl.minimum(least, tl.where(counted, seen - share, float("inf")))
                far = tl.abs(size - 1.0).to(tl.float32)
                farthest = tl.maximum(farthest, tl.where(counted, far, 0.0))
                weight += share
            else:
                if SKIP_SELF:  # in units of e^beta the own term is m_i x_i exactly
                    seen -= share * tl.load(x + rows * D + (s - 1), inside, 0.0)
                tl.store(totals + rows * D + (s - 1), seen, inside)
        step += 1
    facts += system * 3 * parts + part
    tl.store(facts, tl.min(least, 0))
    tl.store(facts + parts, tl.max(farthest, 0))
    tl.store(facts + 2 * parts, tl.sum(weight, 0))
