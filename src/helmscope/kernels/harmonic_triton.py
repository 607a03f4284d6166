"""Triton code of ``harmonic_gpu``: ``moments_kernel``, ``coefficients_kernel`` and ``sums_kernel``, run in that order.

Every token has a row P of cos m phi, sin m phi for m < ORDERS, and on S^2, where K = ORDERS, a row C of cos k theta and
a row S of sin k theta for k < K. Moments and coefficients are stored as (m, cosine or sine of m phi, k): on S^2 even m
are paired with C and odd m with S, on the circle K = 1. Rows beyond the degree do not matter: their coefficients are 0.

Rows are powers of unit complex numbers, by repeated squaring in float64, so that a large k costs no digits of k times
the angle. Each block of tokens is summed in float32 and the blocks in float64, in an order that depends only on n.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _direction(a, b):
    """(a + i b) / |a + i b| and |a + i b|; 1 and 0 below 1e-18, so close to a pole that phi does not matter."""
    square = a * a + b * b
    at_pole = square < 1e-36
    square = tl.where(at_pole, 1.0, square)
    inverse = tl.rsqrt(square.to(tl.float32)).to(tl.float64)
    inverse *= 1.5 - 0.5 * square * inverse * inverse  # a Newton step, from 22 bits to 43
    re, im = tl.where(at_pole, 1.0, a * inverse), tl.where(at_pole, 0.0, b * inverse)
    return re, im, tl.where(at_pole, 0.0, square * inverse)


@triton.jit
def _column(a):
    return a.to(tl.float32)[:, None]


@triton.jit
def _powers(a, b, k, BITS: tl.constexpr):
    """Real and imaginary part of (a + i b)^k, (token, k), for k < 2^BITS, in float32: one product per bit of k."""
    is_set = k % 2 == 1
    re, im = tl.where(is_set, _column(a), 1.0), tl.where(is_set, _column(b), 0.0)
    for bit in tl.static_range(1, BITS):
        a, b = a * a - b * b, 2.0 * a * b
        is_set = (k >> bit) % 2 == 1
        c, s = tl.where(is_set, _column(a), 1.0), tl.where(is_set, _column(b), 0.0)
        re, im = re * c - im * s, re * s + im * c
    return re, im


@triton.jit
def _load(x, rows, inside, axis: tl.constexpr, D: tl.constexpr):
    """One coordinate in float64; 1 for padding tokens, which is neither a pole nor NaN."""
    return tl.load(x + rows * D + axis, inside, 1.0).to(tl.float64)


@triton.jit
def _circle(x, rows, inside, ORDERS: tl.constexpr, BITS: tl.constexpr):
    """P, (token, 2 ORDERS), and |x|."""
    re, im, norm = _direction(_load(x, rows, inside, 0, 2), _load(x, rows, inside, 1, 2))
    column = tl.arange(0, 2 * ORDERS)[None, :]
    c, s = _powers(re, im, column // 2, BITS)
    return tl.where(column % 2 == 1, s, c), norm


@triton.jit
def _sphere(x, rows, inside, K: tl.constexpr, BITS: tl.constexpr):
    """P for even and for odd m, C and S, each (token, K), and |x|."""
    re, im, radius = _direction(_load(x, rows, inside, 0, 3), _load(x, rows, inside, 1, 3))
    cosine, sine, norm = _direction(_load(x, rows, inside, 2, 3), radius)
    column = tl.arange(0, K)[None, :]
    c, s = _powers(re, im, column // 2 * 2, BITS)
    a, b = _column(re), _column(im)
    even = tl.where(column % 2 == 1, s, c)
    odd = tl.where(column % 2 == 1, c * b + s * a, c * a - s * b)
    cosines, sines = _powers(cosine, sine, column, BITS)
    return even, odd, cosines, sines, norm


@triton.jit
def _row(column, parity: tl.constexpr):
    """The index among all (m, cosine or sine) of a column of P for even (parity 0) or odd (parity 1) m."""
    return 2 * column - column % 2 + 2 * parity


@triton.jit(do_not_specialize=["n", "parts", "steps"])
def moments_kernel(
    x, weights, moments, n, parts, steps,
    D: tl.constexpr, ORDERS: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Fill moments (system, part, moment) with sum_j m_j P_j^T (C_j or S_j) over the ``steps`` blocks of a part."""
    part = tl.program_id(0) % parts
    system = (tl.program_id(0) // parts).to(tl.int64)
    x += system * n * D
    weights += system * n
    moments += tl.program_id(0).to(tl.int64) * (2 * ORDERS * (1 if D == 2 else ORDERS))
    if D == 2:
        total = tl.zeros([2 * ORDERS], tl.float64)
    else:
        total = tl.zeros([ORDERS, ORDERS], tl.float64)
        total_odd = tl.zeros([ORDERS, ORDERS], tl.float64)
    step = 0
    while step < steps:  # not range, whose bounds the interpreter needs as Python numbers
        rows = (part * steps + step) * TOKENS + tl.arange(0, TOKENS)
        inside = rows < n
        token_weight = tl.load(weights + rows, inside, 0.0) if WEIGHTED else inside.to(tl.float32)
        if D == 2:
            p, _ = _circle(x, rows, inside, ORDERS, BITS)
            total += tl.sum((p * token_weight[:, None]).to(tl.float64), 0)
        else:
            even, odd, cosines, sines, _ = _sphere(x, rows, inside, ORDERS, BITS)
            even *= token_weight[:, None]
            odd *= token_weight[:, None]
            total += tl.dot(tl.trans(even), cosines, input_precision="ieee").to(tl.float64)
            total_odd += tl.dot(tl.trans(odd), sines, input_precision="ieee").to(tl.float64)
        step += 1
    columns = tl.arange(0, ORDERS)
    if D == 2:
        tl.store(moments + tl.arange(0, 2 * ORDERS), total)
    else:
        tl.store(moments + _row(columns, 0)[:, None] * ORDERS + columns[None, :], total)
        tl.store(moments + _row(columns, 1)[:, None] * ORDERS + columns[None, :], total_odd)


@triton.jit(do_not_specialize=["parts"])
def coefficients_kernel(
    moments, table, series, parts,
    ORDERS: tl.constexpr, K: tl.constexpr, SUMS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Fill series (system, SUMS, coefficient), one order m per program, with the product of the moments of the orders
    m - 1 .. m + 2 and of table (SUMS, m, moment, coefficient).

    A factor x or y shifts m by one, so that only m - 1 .. m + 1 contribute; m + 2 makes the block size a power of two.
    """
    SIZE: tl.constexpr = 2 * ORDERS * K
    order = tl.program_id(0) % ORDERS
    system = (tl.program_id(0) // ORDERS).to(tl.int64)
    rows, columns = tl.arange(0, 8 * K), tl.arange(0, 2 * K)
    index = (order - 1) * 2 * K + rows
    inside = (index >= 0) & (index < SIZE)
    partial = tl.zeros([PARTS, 8 * K], tl.float64)
    first = 0
    while first < parts:
        part = first + tl.arange(0, PARTS)
        offsets = (system * parts + part)[:, None] * SIZE + index[None, :]
        partial += tl.load(moments + offsets, (part < parts)[:, None] & inside[None, :], 0.0)
        first += PARTS
    moment = tl.sum(partial, 0)
    for s in tl.static_range(SUMS):
        block = table + (s * ORDERS + order) * (16 * K * K)
        factor = tl.load(block + rows[:, None] * (2 * K) + columns[None, :])
        out = tl.sum(moment[:, None] * factor.to(tl.float64), 0)
        tl.store(series + (system * SUMS + s) * SIZE + order * 2 * K + columns, out.to(tl.float32))


@triton.jit(do_not_specialize=["n", "parts", "steps"])
def sums_kernel(
    x, weights, series, totals, masses, diagnostics, n, parts, steps,
    D: tl.constexpr, ORDERS: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, WEIGHTED: tl.constexpr,
    SKIP_SELF: tl.constexpr,
):  # fmt: skip
    """Fill totals (system, n, D), masses (system, n) and diagnostics (system, 3, part).

    The diagnostics of a part are the smallest mass that a token receives from the others, the largest | |x| - 1 | and
    the total weight. Tokens whose mass is NaN do not enter the first two.
    """
    part = tl.program_id(0) % parts
    system = (tl.program_id(0) // parts).to(tl.int64)
    x += system * n * D
    weights += system * n
    series += system * ((D + 1) * 2 * ORDERS * (1 if D == 2 else ORDERS))
    totals += system * n * D
    masses += system * n
    smallest_mass = tl.full([TOKENS], float("inf"), tl.float32)
    largest_deviation = tl.zeros([TOKENS], tl.float32)
    weight = tl.zeros([TOKENS], tl.float32)
    column = tl.arange(0, ORDERS)
    step = 0
    while step < steps:
        rows = (part * steps + step) * TOKENS + tl.arange(0, TOKENS)
        inside = rows < n
        token_weight = tl.load(weights + rows, inside, 0.0) if WEIGHTED else inside.to(tl.float32)
        if D == 2:
            p, norm = _circle(x, rows, inside, ORDERS, BITS)
        else:
            even, odd, cosines, sines, norm = _sphere(x, rows, inside, ORDERS, BITS)
        for s in tl.static_range(D + 1):
            if D == 2:
                f = tl.load(series + s * 2 * ORDERS + tl.arange(0, 2 * ORDERS))
                value = tl.sum(p * f[None, :], 1)
            else:
                block = series + s * 2 * ORDERS * ORDERS + column[:, None]
                g = tl.dot(cosines, tl.load(block + _row(column, 0)[None, :] * ORDERS), input_precision="ieee")
                g_odd = tl.dot(sines, tl.load(block + _row(column, 1)[None, :] * ORDERS), input_precision="ieee")
                value = tl.sum(g * even + g_odd * odd, 1)
            if s == 0:
                tl.store(masses + rows, value, inside)
                counted = inside & (value == value)
                smallest_mass = tl.minimum(smallest_mass, tl.where(counted, value - token_weight, float("inf")))
                deviation = tl.abs(norm - 1.0).to(tl.float32)
                largest_deviation = tl.maximum(largest_deviation, tl.where(counted, deviation, 0.0))
                weight += token_weight
            else:
                if SKIP_SELF:  # in units of e^beta the self-term is exactly m_i x_i
                    value -= token_weight * tl.load(x + rows * D + (s - 1), inside, 0.0)
                tl.store(totals + rows * D + (s - 1), value, inside)
        step += 1
    diagnostics += system * 3 * parts + part
    tl.store(diagnostics, tl.min(smallest_mass, 0))
    tl.store(diagnostics + parts, tl.max(largest_deviation, 0))
    tl.store(diagnostics + 2 * parts, tl.sum(weight, 0))
