"""The Triton code of ``fused``: one program carries one system through all of its time steps in registers.

Tokens are columns, x[c, i] the coordinate c of token i, and pairs are [key, query], so that every sum over keys and
over coordinates runs down a column: in Triton's layout for 32 queries a column belongs to one thread.

Padding: coordinates beyond d are 0 and stay so; tokens beyond n start at e_1, are seen by nobody and see nobody, so
they rest there, and no 0 / 0 arises.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gram(x, PRODUCTS: tl.constexpr):
    """<x_j, x_i>, by matrix products or coordinate by coordinate; both without tensor cores, which cut digits off."""
    return tl.dot(tl.trans(x), x, input_precision="ieee") if PRODUCTS else tl.sum(x[:, :, None] * x[:, None, :], axis=0)


@triton.jit
def _mix(x, weight, PRODUCTS: tl.constexpr):
    """sum_j weight_ji x_j."""
    return tl.dot(x, weight, input_precision="ieee") if PRODUCTS else tl.sum(x[:, :, None] * weight[None, :, :], axis=1)


@triton.jit
def _move(x, gram, seen, sharp, h, NORMALIZED: tl.constexpr, PRODUCTS: tl.constexpr):
    """The displacement P_x h sum_j e^{beta (<x_j, x_i> - 1)} x_j, over Z_i where NORMALIZED; sharp = beta log2 e.

    A token's own term is left out of the sum, where projection removes it, and is 1 in Z.
    """
    weight = tl.where(seen, tl.exp2(tl.fma(gram, sharp, -sharp)), 0.0)
    total = _mix(x, weight, PRODUCTS)
    if NORMALIZED:
        h = h / (1.0 + tl.sum(weight, axis=0))
        total *= h[None, :]
    else:
        total *= h
    return total - tl.sum(x * total, axis=0)[None, :] * x


@triton.jit
def _land(y):
    """y / |y|."""
    return y * tl.rsqrt(tl.sum(y * y, axis=0))[None, :]


@triton.jit
def fused_kernel(
    starts,  # (sample, n, d)
    spans,  # (time,) lengths of the intervals
    sharps,  # (beta,) beta log2 e
    scales,  # (beta,) h times what multiplies the sums, over the length of the interval
    queue,  # (beta,) which beta goes first
    steps,  # (beta,) how many steps an interval takes
    contracts,  # (beta,) whether a system whose pairs have all met is finished
    met,  # (beta, sample, time), filled with the number of pairs
    lost,  # (beta, sample), filled with the number of times
    ends,  # (beta, sample, n, d), where KEEP
    samples,
    times,
    near,  # 1 - delta
    n,
    d,
    N: tl.constexpr,
    D: tl.constexpr,
    ORDER: tl.constexpr,
    NORMALIZED: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEEP: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """All steps of one system, and the number of pairs that have met at every time."""
    which, sample = tl.program_id(0) // samples, tl.program_id(0) % samples
    which = tl.load(queue + which)
    system = which.to(tl.int64) * samples + sample
    sharp, scale = tl.load(sharps + which), tl.load(scales + which)
    count, contracting = tl.load(steps + which), tl.load(contracts + which)

    axis, token = tl.arange(0, D)[:, None], tl.arange(0, N)[None, :]
    inside = (axis < d) & (token < n)
    place = token * d + axis
    x = tl.load(starts + sample.to(tl.int64) * n * d + place, mask=inside, other=0.0)
    x = tl.where((token >= n) & (axis == 0), 1.0, x)

    key = tl.arange(0, N)[:, None]
    pair = (key < token) & (token < n)
    seen = pair if CAUSAL else (key != token) & (key < n) & (token < n)

    gram = _gram(x, PRODUCTS)
    t, going, broken = 0, True, False
    while going:
        span = tl.load(spans + t)
        h = scale * span
        left = tl.where(span > 0, count, 0)
        while left > 0:  # not range: the interpreter counts no further than a number known to Python
            y, total = x, tl.zeros_like(x)
            for stage in range(ORDER):
                # RK4: x + k1/2, x + k2/2, x + k3, x + (k1 + 2 k2 + 2 k3 + k4)/6; Heun: x + k1, x + (k1 + k2)/2
                final = stage == ORDER - 1
                ahead = tl.where(final, 0.0, tl.where(stage == ORDER - 2, 1.0, 0.5))
                share = tl.where(final, 0.5 / (ORDER - 1), 0.0)
                k = _move(y, gram, seen, sharp, h, NORMALIZED, PRODUCTS)
                total += tl.where((stage == 0) | final, 1.0, 2.0) * k
                y = _land(x + (ahead * k + share * total))
                gram = _gram(y, PRODUCTS)
            x = y
            left -= 1
        # one reduction for both: pairs in the low 16 bits, tokens that are not finite above them
        close = tl.sum((pair & (gram >= near)).to(tl.int32), axis=0)
        astray = (tl.sum(x * 0.0, axis=0) != 0.0).to(tl.int32)
        both = tl.sum(close + astray * 65536, axis=0)
        broken = both >= 65536
        tl.store(met + system * times + t, both)
        finished = (contracting != 0) & (both == n * (n - 1) // 2)
        t += 1
        going = (t < times) & (not finished) & (not broken)

    if broken:
        tl.store(lost + system, t - 1)
        while t <= times:
            tl.store(met + system * times + t - 1, 0)
            t += 1
    if KEEP:
        tl.store(ends + system * n * d + place, x, mask=inside)
