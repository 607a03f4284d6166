"""Slow, obvious oracles for attention fields and observables: Python floats, nested lists, loops, nothing else.

Nothing of helmscope is imported here, so that a fault in the library cannot repeat itself in what judges it. Tokens x
are n lists of d floats, |x_i| = 1; a test passes ``tensor.tolist()``. Wherever they appear: ``weights`` m_j >= 0
(default 1), ``mask`` True at real tokens (a padded key is seen by nobody and adds nothing to M = sum m_j, while a
padded query is computed like any other), ``query_key`` B and ``value`` V (default I), ``bias`` n x n, ``causal``: key j
is visible to query i iff j <= i. The oracles check no input: where a quantity is undefined, they divide by zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mpmath

Vector = list[float]
Matrix = list[Vector]
Extra = Matrix | None
Weights = Vector | None
Mask = list[bool] | None


def _dot(x: Vector, y: Vector) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def _apply(matrix: Extra, x: Vector) -> Vector:
    return x if matrix is None else [_dot(row, x) for row in matrix]


def _weighted_sum(coefficients: Vector, vectors: Matrix) -> Vector:
    return [_dot(coefficients, [v[a] for v in vectors]) for a in range(len(vectors[0]))]


def _normalize(x: Vector) -> Vector:
    norm = math.sqrt(_dot(x, x))
    return [a / norm for a in x]


def _project(x: Vector, v: Vector) -> Vector:
    along = _dot(x, v)
    return [v_a - along * x_a for x_a, v_a in zip(x, v, strict=True)]


def _angle(x: Vector, y: Vector) -> float:
    """Geodesic distance; arccos of the inner product would lose half of the digits near 0 and pi."""
    return 2 * math.atan2(math.dist(x, y), math.dist(x, [-y_a for y_a in y]))


def _real_weights(x: Matrix, weights: Weights, mask: Mask) -> Vector:
    """m_j, and 0 at padded tokens."""
    m = [1.0] * len(x) if weights is None else weights
    return [m[j] if mask is None or mask[j] else 0.0 for j in range(len(x))]


def logits(
    x: Matrix, beta: float, query_key: Extra = None, bias: Extra = None, causal: bool = False, mask: Mask = None
) -> list[list[float | None]]:
    """l_ij = beta x_i^T B x_j + bias_ij, and None where query i does not see key j.

    >>> logits([[1.0, 0.0], [0.6, 0.8]], 5.0, causal=True)
    [[5.0, None], [3.0, 5.0]]
    """
    rows: list[list[float | None]] = [[None] * len(x) for _ in x]
    for i in range(len(x)):
        for j in range(len(x)):
            if (j <= i or not causal) and (mask is None or mask[j]):
                rows[i][j] = beta * _dot(x[i], _apply(query_key, x[j])) + (0.0 if bias is None else bias[i][j])
    return rows


def sa_kernel(x: Matrix, beta: float, *, weights: Weights = None, **options: Any) -> Matrix:
    """p_ij = m_j e^{l_ij} / sum_k m_k e^{l_ik} over visible keys; all 0 where no visible key has weight.

    ``options`` are those of ``logits``. The greatest logit is taken out of a row first, so that no beta overflows.

    >>> sa_kernel([[1.0, 0.0], [0.0, 1.0]], 0.0, weights=[1.0, 3.0])
    [[0.25, 0.75], [0.25, 0.75]]
    """
    m = _real_weights(x, weights, options.get("mask"))
    kernel = [[0.0] * len(x) for _ in x]
    for i, row in enumerate(logits(x, beta, **options)):
        seen = {j: logit for j, logit in enumerate(row) if logit is not None and m[j] > 0 and logit > -math.inf}
        top = max(seen.values(), default=0.0)
        total = math.fsum(m[k] * math.exp(logit - top) for k, logit in seen.items())
        for j, logit in seen.items():
            kernel[i][j] = m[j] * math.exp(logit - top) / total
    return kernel


def usa_kernel(x: Matrix, beta: float, *, weights: Weights = None, **options: Any) -> Matrix:
    """m_j e^{l_ij} / M at visible keys and 0 elsewhere; M counts every real token, seen or not.

    >>> usa_kernel([[1.0, 0.0], [0.0, 1.0]], 0.0, weights=[1.0, 3.0], causal=True)
    [[0.25, 0.0], [0.25, 0.75]]
    """
    m = _real_weights(x, weights, options.get("mask"))
    rows = logits(x, beta, **options)
    return [[0.0 if row[j] is None else m[j] * math.exp(row[j]) / math.fsum(m) for j in range(len(x))] for row in rows]


def sa_ambient(x: Matrix, beta: float, *, value: Extra = None, **options: Any) -> Matrix:
    """sum_j p_ij V x_j, not projected; ``options`` are those of ``sa_kernel``.

    >>> sa_ambient([[1.0, 0.0], [0.0, 1.0]], 0.0)
    [[0.5, 0.5], [0.5, 0.5]]
    """
    values = [_apply(value, x_j) for x_j in x]
    return [_weighted_sum(row, values) for row in sa_kernel(x, beta, **options)]


def usa_ambient(x: Matrix, beta: float, *, value: Extra = None, **options: Any) -> Matrix:
    """(1/M) sum_j m_j e^{l_ij} V x_j, not projected; ``options`` are those of ``usa_kernel``.

    >>> usa_ambient([[1.0, 0.0], [0.0, 1.0]], 0.0, value=[[-1.0, 0.0], [0.0, -1.0]])
    [[-0.5, -0.5], [-0.5, -0.5]]
    """
    values = [_apply(value, x_j) for x_j in x]
    return [_weighted_sum(row, values) for row in usa_kernel(x, beta, **options)]


def sa_velocity(x: Matrix, beta: float, **options: Any) -> Matrix:
    """x_i' = P_{x_i} sum_j p_ij V x_j (SA, [Geshkovski et al. 2023]); ``options`` are those of ``sa_ambient``.

    >>> sa_velocity([[1.0, 0.0], [0.0, 1.0]], 0.0)
    [[0.0, 0.5], [0.5, 0.0]]
    """
    return [_project(x_i, v) for x_i, v in zip(x, sa_ambient(x, beta, **options), strict=True)]


def usa_velocity(x: Matrix, beta: float, **options: Any) -> Matrix:
    """x_i' = P_{x_i} (1/M) sum_j m_j e^{l_ij} V x_j (USA, [Geshkovski et al. 2023]); ``options`` are those of
    ``usa_ambient``.

    >>> usa_velocity([[1.0, 0.0], [0.0, 1.0]], 7.0)
    [[0.0, 0.5], [0.5, 0.0]]
    """
    return [_project(x_i, v) for x_i, v in zip(x, usa_ambient(x, beta, **options), strict=True)]


def layer(x: Matrix, beta: float) -> Matrix:
    """One post-norm layer: rows N(x_i + sum_j p_ij x_j).

    >>> layer([[1.0, 0.0], [1.0, 0.0]], 3.0)
    [[1.0, 0.0], [1.0, 0.0]]
    """
    return [_normalize(_weighted_sum([1.0, 1.0], [x_i, v])) for x_i, v in zip(x, sa_ambient(x, beta), strict=True)]


def flow(velocity: Callable[[Matrix], Matrix], x: Matrix, t: float, steps: int) -> Matrix:
    """x(t) of x' = velocity(x): classical RK4 of step t/steps, every token put back on the sphere after each step.

    >>> [[round(a, 6) for a in x_i] for x_i in flow(lambda x: [[-x[0][1], x[0][0]]], [[1.0, 0.0]], math.pi, 100)]
    [[-1.0, 0.0]]
    """
    h = t / steps

    def moved(by: float, v: Matrix) -> Matrix:
        return [_weighted_sum([1.0, by], [x[i], v[i]]) for i in range(len(x))]

    for _ in range(steps):
        k1 = velocity(x)
        k2 = velocity(moved(h / 2, k1))
        k3 = velocity(moved(h / 2, k2))
        k4 = velocity(moved(h, k3))
        mean = [_weighted_sum([1 / 6, 1 / 3, 1 / 3, 1 / 6], [k1[i], k2[i], k3[i], k4[i]]) for i in range(len(x))]
        x = [_normalize(x_i) for x_i in moved(h, mean)]
    return x


def interaction_energy(
    x: Matrix, beta: float, query_key: Extra = None, weights: Weights = None, mask: Mask = None
) -> float:
    """E = (1 / (2 beta M^2)) sum_ij m_i m_j e^{beta x_i^T B x_j} over real tokens, beta > 0 [Geshkovski et al. 2023].

    >>> interaction_energy([[1.0, 0.0], [1.0, 0.0]], 1.0) == math.e / 2
    True
    """
    m = _real_weights(x, weights, mask)
    pairs = [(i, j) for i in range(len(x)) for j in range(len(x))]
    total = math.fsum(m[i] * m[j] * math.exp(beta * _dot(x[i], _apply(query_key, x[j]))) for i, j in pairs)
    return total / (2 * beta * math.fsum(m) ** 2)


def interaction_energy_rate(
    x: Matrix, velocity: Matrix, beta: float, query_key: Extra = None, weights: Weights = None, mask: Mask = None
) -> float:
    """dE/dt: each e^{beta x_i^T B x_j} changes at e^{..} beta (x_i'^T B x_j + x_i^T B x_j'), B symmetric or not.

    >>> interaction_energy_rate([[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.5], [0.5, 0.0]], 7.0)
    0.25
    """
    m = _real_weights(x, weights, mask)
    total = 0.0
    for i in range(len(x)):
        for j in range(len(x)):
            term = m[i] * m[j] * math.exp(beta * _dot(x[i], _apply(query_key, x[j])))
            change = _dot(velocity[i], _apply(query_key, x[j])) + _dot(x[i], _apply(query_key, velocity[j]))
            total += term * beta * change
    return total / (2 * beta * math.fsum(m) ** 2)


def energy_sum(x: Matrix, beta: float) -> float:
    """E_sum = (1 / (2 beta)) sum_ij e^{beta <x_i, x_j>}, beta > 0 [Geshkovski et al. 2023].

    >>> energy_sum([[1.0, 0.0], [1.0, 0.0]], 1.0) == 2 * math.e
    True
    """
    return sum(math.exp(beta * _dot(x_i, x_j)) for x_i in x for x_j in x) / (2 * beta)


def gaussian_energy(x: Matrix, beta: float) -> float:
    """F = (1/2) sum_ij e^{-(beta/2) |x_i - x_j|^2} [Mean-field notes].

    >>> gaussian_energy([[1.0, 0.0], [1.0, 0.0]], 9.0)
    2.0
    """
    return sum(math.exp(-(beta / 2) * math.dist(x_i, x_j) ** 2) for x_i in x for x_j in x) / 2


def close_pair_share(x: Matrix, delta: float, mask: Mask = None) -> float:
    """Share of the ordered pairs i != j of real tokens with <x_i, x_j> >= 1 - delta.

    >>> close_pair_share([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], 0.1) == 2 / 6
    True
    """
    real = [i for i in range(len(x)) if mask is None or mask[i]]
    near = [_dot(x[i], x[j]) >= 1 - delta for i in real for j in real if i != j]
    return sum(near) / len(near)


def histogram(x: Matrix, edges: Vector) -> Vector:
    """Share of the ordered pairs i != j with <x_i, x_j> in [e_k, e_{k+1}), the last bin closed on the right.

    >>> histogram([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], [-1.0, 0.0, 1.0]) == [4 / 6, 2 / 6]
    True
    """
    # rounding may carry an inner product past +-1
    grams = [max(-1.0, min(1.0, _dot(x[i], x[j]))) for i in range(len(x)) for j in range(len(x)) if i != j]
    return [sum(a <= g < b or g == b == edges[-1] for g in grams) / len(grams) for a, b in pairwise(edges)]


def cluster_labels(x: Matrix, radius: float) -> list[int]:
    """Single linkage: tokens at geodesic distance <= radius are linked; a cluster's label is its smallest index.

    >>> cluster_labels([[1.0, 0.0], [-1.0, 0.0], [0.6, 0.8], [0.8, 0.6]], 0.7)
    [0, 1, 0, 0]
    """
    parent = list(range(len(x)))

    def root(i: int) -> int:
        return i if parent[i] == i else root(parent[i])

    for i in range(len(x)):
        for j in range(i):
            if _angle(x[i], x[j]) <= radius:
                parent[max(root(i), root(j))] = min(root(i), root(j))
    return [root(i) for i in range(len(x))]


def cluster_count(x: Matrix, radius: float) -> int:
    """Number of single-linkage clusters.

    >>> cluster_count([[1.0, 0.0], [-1.0, 0.0], [0.6, 0.8], [0.8, 0.6]], 0.7)
    2
    """
    return len(set(cluster_labels(x, radius)))


def merge_heights(x: Matrix) -> Vector:
    """The n - 1 distances at which single linkage merges, ascending: again and again the two nearest clusters.

    >>> [round(h, 4) for h in merge_heights([[1.0, 0.0], [-1.0, 0.0], [0.6, 0.8], [0.8, 0.6]])]
    [0.2838, 0.6435, 2.2143]
    """
    clusters = [[x_i] for x_i in x]
    heights = []
    while len(clusters) > 1:
        pairs = [(i, j) for i in range(len(clusters)) for j in range(i)]
        gaps = [min(_angle(a, b) for a in clusters[i] for b in clusters[j]) for i, j in pairs]
        heights.append(min(gaps))
        i, j = pairs[gaps.index(min(gaps))]
        clusters[j] += clusters.pop(i)
    return sorted(heights)


def merge(x: Matrix, weights: Vector, radius: float) -> list[tuple[Vector, float]]:
    """Each single-linkage cluster as one token, (N(sum m_i x_i), sum m_i), in the order of the labels.

    >>> merge([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [1.0, 2.0, 3.0], 0.1)
    [([1.0, 0.0], 4.0), ([0.0, 1.0], 2.0)]
    """
    labels = cluster_labels(x, radius)
    merged = []
    for label in sorted(set(labels)):
        m = [weights[i] if labels[i] == label else 0.0 for i in range(len(x))]
        merged.append((_normalize(_weighted_sum(m, x)), math.fsum(m)))
    return merged


def order_parameter(x: Matrix, weights: Weights = None) -> float:
    """|sum m_i x_i| / sum m_i.

    >>> order_parameter([[1.0, 0.0], [-1.0, 0.0]], [3.0, 1.0])
    0.5
    """
    m = _real_weights(x, weights, None)
    return math.hypot(*_weighted_sum(m, x)) / math.fsum(m)


def _singular_values(x: Matrix) -> Vector:
    """Of the n x d matrix X, from 30 digits: those that vanish stay below 1e-28."""
    with mpmath.workdps(30):
        return [abs(float(s)) for s in mpmath.svd_r(mpmath.matrix(x), compute_uv=False)]


def effective_rank(x: Matrix) -> float:
    """exp(-sum p log p), p = s / sum s (Roy & Vetterli 2007).

    >>> round(effective_rank([[1.0, 0.0], [0.0, 1.0]]), 12)
    2.0
    """
    s = _singular_values(x)
    shares = [value / math.fsum(s) for value in s]
    return math.exp(-math.fsum(p * math.log(p) for p in shares if p > 0))


def participation_ratio(x: Matrix) -> float:
    """(sum s^2)^2 / sum s^4.

    >>> round(participation_ratio([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), 12)
    1.8
    """
    s = _singular_values(x)
    return math.fsum(value**2 for value in s) ** 2 / math.fsum(value**4 for value in s)


def stable_rank(x: Matrix) -> float:
    """sum s^2 / max s^2.

    >>> round(stable_rank([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), 12)
    1.5
    """
    s = _singular_values(x)
    return math.fsum(value**2 for value in s) / max(s) ** 2


def nuclear_rank(x: Matrix) -> float:
    """sum s / max s.

    >>> round(nuclear_rank([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), 6)
    1.707107
    """
    s = _singular_values(x)
    return math.fsum(s) / max(s)


def numerical_rank(x: Matrix, tol: float) -> int:
    """Number of singular values above tol * max s.

    >>> numerical_rank([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], 1e-12)
    1
    """
    s = _singular_values(x)
    return sum(value > tol * max(s) for value in s)


def _residual(x: Matrix) -> Matrix:
    mean = [total / len(x) for total in _weighted_sum([1.0] * len(x), x)]
    return [_weighted_sum([1.0, -1.0], [x_i, mean]) for x_i in x]


def _composite(x: Matrix) -> float:
    """sqrt(|X|_1 |X|_inf), the greatest column sum and the greatest row sum of absolute values."""
    columns = [math.fsum(abs(x_i[a]) for x_i in x) for a in range(len(x[0]))]
    rows = [math.fsum(abs(value) for value in x_i) for x_i in x]
    return math.sqrt(max(columns) * max(rows))


def collapse_residual_frobenius(x: Matrix, relative: bool = False) -> float:
    """|R|_F of R = X - 1 xbar^T, xbar the mean token; relative: over |X|_F.

    >>> collapse_residual_frobenius([[1.0, 0.0], [0.0, 1.0]])
    1.0
    """
    size = math.hypot(*(math.hypot(*row) for row in _residual(x)))
    return size / math.hypot(*(math.hypot(*row) for row in x)) if relative else size


def collapse_residual_composite(x: Matrix, relative: bool = False) -> float:
    """sqrt(|R|_1 |R|_inf) (Dong, Cordonnier & Loukas 2021, arXiv:2103.03404); relative: over sqrt(|X|_1 |X|_inf).

    >>> collapse_residual_composite([[1.0, 0.0], [0.0, 1.0]])
    1.0
    """
    return _composite(_residual(x)) / (_composite(x) if relative else 1.0)
