"""Slow, obvious oracles for the attention family: hardmax, Sinkhorn, several heads, low rank, ALiBi.

As in ``oracles``: Python floats, nested lists, loops, nothing of helmscope. Tokens x are n lists of d floats, and
``weights``, ``mask``, ``query_key``, ``value``, ``bias`` and ``causal`` mean what they mean there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath

from support import oracles
from support.oracles import Extra, Mask, Matrix, Vector, Weights


def product(left: Matrix, right: Matrix) -> Matrix:
    """left right^T, entry by entry.

    >>> product([[1.0], [2.0]], [[3.0], [4.0]])
    [[3.0, 4.0], [6.0, 8.0]]
    """
    return [[math.fsum(a * b for a, b in zip(row, other, strict=True)) for other in right] for row in left]


def ambient(kernel: Matrix, x: Matrix, value: Extra = None) -> Matrix:
    """sum_j kernel_ij V x_j.

    >>> ambient([[0.5, 0.5], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    [[0.5, 0.5], [0.0, 1.0]]
    """
    d = len(x[0])
    values = [
        x_j if value is None else [math.fsum(value[a][b] * x_j[b] for b in range(d)) for a in range(d)] for x_j in x
    ]
    return [[math.fsum(row[j] * values[j][a] for j in range(len(x))) for a in range(d)] for row in kernel]


def tangent(x: Matrix, v: Matrix) -> Matrix:
    """v_i - <x_i, v_i> x_i.

    >>> tangent([[1.0, 0.0]], [[2.0, 3.0]])
    [[0.0, 3.0]]
    """
    along = [math.fsum(a * b for a, b in zip(x_i, v_i, strict=True)) for x_i, v_i in zip(x, v, strict=True)]
    return [[v[i][a] - along[i] * x[i][a] for a in range(len(x[i]))] for i in range(len(x))]


def alibi(n: int, slope: float) -> Matrix:
    """-slope |i - j|.

    >>> alibi(2, 0.5)
    [[0.0, -0.5], [-0.5, 0.0]]
    """
    return [[0.0 - slope * abs(i - j) for j in range(n)] for i in range(n)]


def masses(x: Matrix, weights: Weights, mask: Mask) -> Vector:
    """m_j, 0 at padding.

    >>> masses([[1.0], [1.0]], None, [True, False])
    [1.0, 0.0]
    """
    return [(1.0 if weights is None else weights[j]) if mask is None or mask[j] else 0.0 for j in range(len(x))]


def hardmax_kernel(x: Matrix, *, weights: Weights = None, tie: float = 1e-12, **options: Any) -> Matrix:
    """m_j over the sum of them, at the keys within ``tie`` of the greatest logit among those seen and of weight > 0.

    >>> hardmax_kernel([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], weights=[1.0, 1.0, 3.0])
    [[1.0, 0.0, 0.0], [0.0, 0.25, 0.75], [0.0, 0.25, 0.75]]
    """
    m = masses(x, weights, options.get("mask"))
    kernel = [[0.0] * len(x) for _ in x]
    for i, row in enumerate(oracles.logits(x, 1.0, **options)):
        seen = {j: logit for j, logit in enumerate(row) if logit is not None and m[j] > 0 and logit > -math.inf}
        best = [j for j, logit in seen.items() if logit >= max(seen.values()) - tie]
        for j in best:
            kernel[i][j] = m[j] / math.fsum(m[k] for k in best)
    return kernel


def sinkhorn_kernel(x: Matrix, beta: float, *, weights: Weights = None, mask: Mask = None, **options: Any) -> Matrix:
    """Sweeps over rows and columns of m_j e^{l_ij} until nothing changes; each query, of weight 0 too, has its row.

    >>> sinkhorn_kernel([[1.0, 0.0], [0.0, 1.0]], 0.0)
    [[0.5, 0.5], [0.5, 0.5]]
    """
    n, m = len(x), masses(x, weights, mask)
    real = [j for j in range(n) if m[j] > 0]
    logits = oracles.logits(x, beta, mask=mask, **options)
    raw = [[m[j] * math.exp(logits[i][j]) if j in real else 0.0 for j in range(n)] for i in range(n)]
    key = [1.0] * n
    for _ in range(100_000):
        before = key
        row = [1 / math.fsum(raw[i][j] * key[j] for j in real) if i in real else 0.0 for i in range(n)]
        key = [m[j] / math.fsum(m[i] * row[i] * raw[i][j] for i in real) if j in real else 0.0 for j in range(n)]
        if max(abs(key[j] / before[j] - 1) for j in real) < 2e-16:
            break
    totals = [math.fsum(raw[i][j] * key[j] for j in range(n)) for i in range(n)]
    return [[raw[i][j] * key[j] / totals[i] for j in range(n)] for i in range(n)]


def exact_sinkhorn_kernel(x: Matrix, beta: float, sweeps: int) -> Matrix:
    """The kernel for B = I and equal weights, by ``sweeps`` sweeps with 40 digits.

    >>> exact_sinkhorn_kernel([[1.0, 0.0], [0.0, 1.0]], 0.0, 1)
    [[0.5, 0.5], [0.5, 0.5]]
    """
    n = len(x)
    with mpmath.workdps(40):
        p = [[mpmath.exp(beta * mpmath.fdot(x_i, x_j)) for x_j in x] for x_i in x]
        for _ in range(sweeps):
            p = [[p[i][j] / mpmath.fsum(p[i]) for j in range(n)] for i in range(n)]
            columns = [mpmath.fsum(p[i][j] for i in range(n)) for j in range(n)]
            p = [[p[i][j] / columns[j] for j in range(n)] for i in range(n)]
        return [[float(p[i][j]) for j in range(n)] for i in range(n)]


def causal_crawl(n: int, sweeps: list[int]) -> Vector:
    """Mean of the diagonal of the uniform causal kernel of n tokens when its rows are normalized for the k-th time, k
    in ``sweeps`` (ascending), with its columns normalized in between.

    >>> causal_crawl(1, [1])
    [1.0]
    """
    p = [[1.0 if j <= i else 0.0 for j in range(n)] for i in range(n)]
    read = []
    for k in range(1, sweeps[-1] + 1):
        totals = [sum(row) for row in p]
        p = [[p[i][j] / totals[i] for j in range(n)] for i in range(n)]
        if k in sweeps:
            read.append(sum(p[i][i] for i in range(n)) / n)
        totals = [sum(p[i][j] for i in range(j, n)) for j in range(n)]
        p = [[p[i][j] / totals[j] for j in range(n)] for i in range(n)]
    return read


KERNELS: dict[str, Callable[..., Matrix]] = {
    "SA": oracles.sa_kernel,
    "USA": oracles.usa_kernel,
    "Hardmax": hardmax_kernel,
    "SinkhornAttention": sinkhorn_kernel,
}


def kernel(kind: str, x: Matrix, given: dict[str, Any], **measure: Any) -> Matrix:
    """The kernel of one head: ``given`` holds beta (unless hardmax), query_key, bias, causal, value.

    >>> kernel("SA", [[1.0, 0.0], [0.0, 1.0]], {"beta": 0.0, "value": None})
    [[0.5, 0.5], [0.5, 0.5]]
    """
    return KERNELS[kind](x, **{name: part for name, part in given.items() if name != "value"}, **measure)


def head(field: Any) -> dict[str, Any]:
    """What a field of one head holds, as lists; a matrix of low rank is multiplied out here."""
    given = {}
    for name in ("beta", "query_key", "value", "causal", "bias"):
        part = getattr(field, name, None)
        if hasattr(part, "left"):
            part = product(part.left.tolist(), part.right.tolist())
        given[name] = part.tolist() if hasattr(part, "tolist") else part
    kind = type(field).__name__
    if kind == "Hardmax":
        del given["beta"]
        if field.tie_tolerance is not None:
            given["tie"] = field.tie_tolerance
    if kind == "SinkhornAttention":
        del given["causal"]
    return given


def multihead_ambient(kind: str, x: Matrix, heads: list[dict[str, Any]], scale: float, **measure: Any) -> Matrix:
    """scale sum_h V_h sum_j p^h_ij x_j.

    >>> multihead_ambient("SA", [[1.0, 0.0], [0.0, 1.0]], [{"beta": 0.0}, {"beta": 0.0}], 0.5)
    [[0.5, 0.5], [0.5, 0.5]]
    """
    parts = [ambient(kernel(kind, x, given, **measure), x, given.get("value")) for given in heads]
    return [[scale * math.fsum(part[i][a] for part in parts) for a in range(len(x[0]))] for i in range(len(x))]


def multihead_velocity(kind: str, x: Matrix, heads: list[dict[str, Any]], scale: float, **measure: Any) -> Matrix:
    """scale sum_h P_{x_i} V_h sum_j p^h_ij x_j: every head is projected by itself.

    >>> multihead_velocity("SA", [[1.0, 0.0], [0.0, 1.0]], [{"beta": 0.0}], 1.0)
    [[0.0, 0.5], [0.5, 0.0]]
    """
    parts = [tangent(x, ambient(kernel(kind, x, given, **measure), x, given.get("value"))) for given in heads]
    return [[scale * math.fsum(part[i][a] for part in parts) for a in range(len(x[0]))] for i in range(len(x))]


def printed_ambient(
    kind: str, x: Matrix, heads: list[dict[str, Any]], mlps: list[Callable[[Vector], Vector]], **measure: Any
) -> Matrix:
    """(1/K) sum_h MLP_h(V_h sum_j p^h_ij x_j).

    >>> printed_ambient("SA", [[1.0, 0.0], [0.0, 1.0]], [{"beta": 0.0}], [lambda v: [2 * a for a in v]])
    [[1.0, 1.0], [1.0, 1.0]]
    """
    parts = [ambient(kernel(kind, x, given, **measure), x, given.get("value")) for given in heads]
    forces = [[mlp(row) for row in part] for mlp, part in zip(mlps, parts, strict=True)]
    return [[math.fsum(force[i][a] for force in forces) / len(heads) for a in range(len(x[0]))] for i in range(len(x))]
