"""Triton code of ``fused``: one program integrates one system through all of its time steps in registers.

Tokens are columns, x[c, i] is coordinate c of token i, and pairs are indexed [key, query], so that every sum over keys
or coordinates runs down a column: in Triton's layout for 32 queries, a column belongs to one thread.

Padding: coordinates beyond d are 0 and remain 0; tokens beyond n start at e_1, attend to no token and receive no
attention, so they do not move, and no 0 / 0 occurs.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gram(x, PRODUCTS: tl.constexpr):
    """<x_j, x_i>, by matrix products or coordinate by coordinate; both avoid tensor cores, which truncate digits."""
    return tl.dot(tl.trans(x), x, input_precision="ieee") if PRODUCTS else tl.sum(x[:, :, None] * x[:, None, :], axis=0)


@triton.jit
def _weighted_sum(x, weight, PRODUCTS: tl.constexpr):
    """sum_j weight_ji x_j."""
    return tl.dot(x, weight, input_precision="ieee") if PRODUCTS else tl.sum(x[:, :, None] * weight[None, :, :], axis=1)


@triton.jit
def _displacement(x, gram, visible, exponent_scale, h, NORMALIZED: tl.constexpr, PRODUCTS: tl.constexpr):
    """P_x h sum_j e^{beta (<x_j, x_i> - 1)} x_j, divided by Z_i if NORMALIZED; exponent_scale = beta log2 e.

    A token's own term is omitted from the sum, where projection would remove it, and is 1 in Z.
    """
    weight = tl.where(visible, tl.exp2(tl.fma(gram, exponent_scale, -exponent_scale)), 0.0)
    total = _weighted_sum(x, weight, PRODUCTS)
    if NORMALIZED:
        h = h / (1.0 + tl.sum(weight, axis=0))
        total *= h[None, :]
    else:
        total *= h
    return total - tl.sum(x * total, axis=0)[None, :] * x


@triton.jit
def _normalize(y):
    """y / |y|."""
    return y * tl.rsqrt(tl.sum(y * y, axis=0))[None, :]


@triton.jit
def fused_kernel(
    starts,  # (sample, n, d)
    spans,  # (time,) lengths of the intervals
    exponent_scales,  # (beta,) beta log2 e
    scales,  # (beta,) the factor of the sums in one step, divided by the length of the interval
    queue,  # (beta,) indices of the betas in the order in which they start
    steps,  # (beta,) number of steps per interval
    may_stop,  # (beta,) whether the system stops once all of its pairs have met
    met,  # (beta, sample, time), initialized to the number of pairs
    lost,  # (beta, sample), initialized to the number of times
    final_states,  # (beta, sample, n, d), if KEEP
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
    """Integrate one system, and count the pairs that have met at every time."""
    flow, sample = tl.program_id(0) // samples, tl.program_id(0) % samples
    flow = tl.load(queue + flow)
    system = flow.to(tl.int64) * samples + sample
    exponent_scale, scale = tl.load(exponent_scales + flow), tl.load(scales + flow)
    step_count, stops = tl.load(steps + flow), tl.load(may_stop + flow)

    axis, token = tl.arange(0, D)[:, None], tl.arange(0, N)[None, :]
    inside = (axis < d) & (token < n)
    offsets = token * d + axis
    x = tl.load(starts + sample.to(tl.int64) * n * d + offsets, mask=inside, other=0.0)
    x = tl.where((token >= n) & (axis == 0), 1.0, x)

    key = tl.arange(0, N)[:, None]
    pair = (key < token) & (token < n)
    visible = pair if CAUSAL else (key != token) & (key < n) & (token < n)

    gram = _gram(x, PRODUCTS)
    t, running, is_lost = 0, True, False
    while running:
        span = tl.load(spans + t)
        h = scale * span
        remaining = tl.where(span > 0, step_count, 0)
        while remaining > 0:  # not range, whose bounds the interpreter needs as Python numbers
            y, total = x, tl.zeros_like(x)
            for stage in range(ORDER):
                # RK4: x + k1/2, x + k2/2, x + k3, x + (k1 + 2 k2 + 2 k3 + k4)/6; Heun: x + k1, x + (k1 + k2)/2
                final = stage == ORDER - 1
                stage_weight = tl.where(final, 0.0, tl.where(stage == ORDER - 2, 1.0, 0.5))
                total_weight = tl.where(final, 0.5 / (ORDER - 1), 0.0)
                k = _displacement(y, gram, visible, exponent_scale, h, NORMALIZED, PRODUCTS)
                total += tl.where((stage == 0) | final, 1.0, 2.0) * k
                y = _normalize(x + (stage_weight * k + total_weight * total))
                gram = _gram(y, PRODUCTS)
            x = y
            remaining -= 1
        # one reduction for both counts: pairs that have met in the low 16 bits, non-finite tokens above them
        close = tl.sum((pair & (gram >= near)).to(tl.int32), axis=0)
        non_finite = (tl.sum(x * 0.0, axis=0) != 0.0).to(tl.int32)
        counts = tl.sum(close + non_finite * 65536, axis=0)
        is_lost = counts >= 65536
        tl.store(met + system * times + t, counts)
        finished = (stops != 0) & (counts == n * (n - 1) // 2)
        t += 1
        running = (t < times) & (not finished) & (not is_lost)

    if is_lost:
        tl.store(lost + system, t - 1)
        while t <= times:
            tl.store(met + system * times + t - 1, 0)
            t += 1
    if KEEP:
        tl.store(final_states + system * n * d + offsets, x, mask=inside)
