"""Slow, obvious oracles for the observables of a mechanism: kernels, covariances, generators, Jacobians, forces.

Nothing of helmscope is imported here, so that a fault in the library cannot repeat itself in what judges it. Kernels
are n lists of n floats, tokens n lists of d floats; a test passes ``tensor.tolist()``. Covariances are those of the
increments, drawn one by one; derivatives are mpmath's in 30 digits, along great circles where they are on the sphere,
or written out by hand for one activation (tanh).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import mpmath

Vector = list[Any]
Matrix = list[Vector]
Probe = Callable[[Vector], Any]
DIGITS = 30


def dot(x: Vector, y: Vector) -> Any:
    """x.y, exactly rounded for floats.

    >>> dot([1.0, 2.0], [3.0, 4.0])
    11.0
    """
    pairs = [a * b for a, b in zip(x, y, strict=True)]
    return math.fsum(pairs) if all(isinstance(p, float) for p in pairs) else mpmath.fsum(pairs)


def apply(matrix: Matrix | None, x: Vector) -> Vector:
    """M x, x where M is None."""
    return x if matrix is None else [dot(row, x) for row in matrix]


# kernels --------------------------------------------------------------------------------------------------------------


def normalized(kernel: Matrix) -> Matrix:
    """Rows divided by their sum; rows of zeros stay.

    >>> normalized([[1.0, 3.0], [0.0, 0.0]])
    [[0.25, 0.75], [0.0, 0.0]]
    """
    return [[k / math.fsum(row) if math.fsum(row) else 0.0 for k in row] for row in kernel]


def kernel_rows(kernel: Matrix, first: int = 0) -> dict[str, Vector]:
    """What each query does, NaN where it sees nothing; ``first`` is the place of the first real token.

    >>> kernel_rows([[1.0, 1.0], [0.0, 1.0]])["effective_keys"]
    [2.0, 1.0]
    """
    seen: dict[str, Vector] = {name: [] for name in ("row_entropy", "effective_keys", "largest_weight")}
    seen |= {"first_token_mass": [], "future_mass": []}
    for i, row in enumerate(normalized(kernel)):
        blind = not any(row)
        seen["row_entropy"].append(math.nan if blind else -math.fsum(p * math.log(p) for p in row if p > 0))
        seen["effective_keys"].append(math.nan if blind else 1 / math.fsum(p * p for p in row))
        seen["largest_weight"].append(math.nan if blind else max(row))
        seen["first_token_mass"].append(math.nan if blind else row[first])
        seen["future_mass"].append(math.nan if blind else math.fsum(row[i + 1 :]))
    return seen


def received(kernel: Matrix, mask: list[bool]) -> Vector:
    """Column sums over the real queries.

    >>> received([[1.0, 3.0], [1.0, 1.0]], [True, True])
    [0.75, 1.25]
    """
    rows = normalized(kernel)
    return [math.fsum(rows[i][j] for i in range(len(rows)) if mask[i]) for j in range(len(rows))]


def kernel_system(kernel: Matrix, mask: list[bool]) -> dict[str, float]:
    """The quantities of one system: means over real queries that see a key, deviations and defects.

    >>> kernel_system([[1.0, 3.0], [1.0, 1.0]], [True, True])["bistochastic_defect"]
    0.25
    """
    real = [i for i in range(len(kernel)) if mask[i]]
    sighted = [i for i in real if any(kernel[i])]
    rows = kernel_rows(kernel, first=real[0])
    seen = {name: math.fsum(values[i] for i in sighted) / len(sighted) for name, values in rows.items()}
    seen["row_mass"] = math.fsum(math.fsum(kernel[i]) for i in real) / len(real)
    seen["bistochastic_defect"] = max(abs(received(kernel, mask)[j] - 1) for j in real)
    off = [math.fsum(kernel[i]) - 1 for i in real]
    seen["row_sum_deviation_max"] = max(abs(each) for each in off)
    seen["row_sum_deviation_rms"] = math.sqrt(math.fsum(each**2 for each in off) / len(real))
    columns = [received(kernel, mask)[j] - 1 for j in real]
    seen["column_sum_deviation_rms"] = math.sqrt(math.fsum(each**2 for each in columns) / len(real))
    skew = math.fsum((kernel[i][j] - kernel[j][i]) ** 2 for i, j in product(real, real))
    whole = math.fsum(kernel[i][j] ** 2 for i, j in product(real, real))
    seen["symmetry_defect"] = math.sqrt(skew / whole) / 2
    return seen


# covariances ----------------------------------------------------------------------------------------------------------


def half_covariance(outcomes: list[tuple[float, Vector]]) -> Matrix:
    """(1/2) Cov of a vector with finitely many outcomes (probability, value).

    >>> half_covariance([(0.5, [1.0]), (0.5, [-1.0])])
    [[0.5]]
    """
    d = len(outcomes[0][1])
    mean = [math.fsum(p * v[a] for p, v in outcomes) for a in range(d)]
    return [
        [math.fsum(p * (v[a] - mean[a]) * (v[b] - mean[b]) for p, v in outcomes) / 2 for b in range(d)]
        for a in range(d)
    ]


def draws(rows: Matrix, x: Matrix, values: list[Matrix | None], *, shared: bool = False) -> list[tuple[float, Vector]]:
    """The increments sum_h B_h x_{J_h} of one query whose heads have the kernel rows ``rows``, with their probability:
    heads draw independently, or all use the draw of the first.
    """
    keys, made = range(len(x)), []
    picks = [(j,) * len(rows) for j in keys] if shared else list(product(keys, repeat=len(rows)))
    for pick in picks:
        chance = rows[0][pick[0]] if shared else math.prod(row[j] for row, j in zip(rows, pick, strict=True))
        parts = [apply(value, x[j]) for value, j in zip(values, pick, strict=True)]
        made.append((chance, [math.fsum(part[a] for part in parts) for a in range(len(parts[0]))]))
    return made


def random_values(row: Vector, x: Matrix, value: Matrix | None) -> Matrix:
    """Mode (B) entry by entry: (1/2) sum_j p_j^2 (V x_j - V m)_a (V x_j - V m)_b."""
    keys, d = range(len(x)), len(x[0])
    mean = [math.fsum(row[j] * x[j][a] for j in keys) for a in range(d)]
    off = [apply(value, [x[j][a] - mean[a] for a in range(d)]) for j in keys]
    size = len(off[0])
    return [
        [math.fsum(row[j] ** 2 * off[j][a] * off[j][b] for j in keys) / 2 for b in range(size)] for a in range(size)
    ]


# generators -----------------------------------------------------------------------------------------------------------


def ambient_generator(probe: Probe, x: Vector, drift: Vector, sigma: Matrix) -> float:
    """b.grad phi + Sigma:Hess phi by partial derivatives.

    >>> ambient_generator(lambda x: x[0] ** 3, [2.0, 3.0], [1.0, 0.0], [[1.0, 0.0], [0.0, 1.0]])
    24.0
    """
    with mpmath.workdps(DIGITS):
        d, at = len(x), tuple(mpmath.mpf(a) for a in x)

        def partial(*axes: int) -> Any:
            return mpmath.diff(lambda *y: probe(list(y)), at, tuple(axes.count(a) for a in range(d)))

        first = mpmath.fsum(drift[a] * partial(a) for a in range(d))
        return float(first + mpmath.fsum(sigma[a][b] * partial(a, b) for a in range(d) for b in range(d)))


def sphere_generator(probe: Probe, x: Vector, drift: Vector, matrix: Matrix) -> float:
    """<v, grad_S phi> + tr(P M P Hess_S phi), |x| = 1: derivatives along great circles with orthonormal tangents e_a,
    Hess_S(e_a, e_b) from those along e_a, e_b and e_a + e_b.
    """
    with mpmath.workdps(DIGITS):
        at = [mpmath.mpf(a) for a in x]
        norm = mpmath.sqrt(dot(at, at))
        at = [a / norm for a in at]
        frame = tangents(at)

        def along(v: Vector, order: int) -> Any:
            """d^order/ds^order of phi on the great circle with tangent v."""
            size = mpmath.sqrt(dot(v, v))

            def on_circle(s: Any) -> Any:
                return probe(
                    [mpmath.cos(size * s) * a + mpmath.sin(size * s) / size * b for a, b in zip(at, v, strict=True)]
                )

            return mpmath.diff(on_circle, 0, order)

        total = mpmath.fsum(dot(drift, e) * along(e, 1) for e in frame)
        for i, j in product(range(len(frame)), repeat=2):
            together = along([a + b for a, b in zip(frame[i], frame[j], strict=True)], 2)
            curvature = (together - along(frame[i], 2) - along(frame[j], 2)) / 2
            total += dot(frame[i], apply(matrix, frame[j])) * curvature
        return float(total)


def tangents(x: Vector) -> Matrix:
    """Orthonormal tangents at x, by Gram-Schmidt on the axes, the one nearest to x left out."""
    d = len(x)
    nearest = max(range(d), key=lambda a: abs(x[a]))
    frame: Matrix = [x]
    for a in range(d):
        if a != nearest:
            v = [mpmath.mpf(b == a) for b in range(d)]
            for _ in range(2):
                for e in frame:
                    along = dot(v, e)
                    v = [v_b - along * e_b for v_b, e_b in zip(v, e, strict=True)]
            norm = mpmath.sqrt(dot(v, v))
            frame.append([v_b / norm for v_b in v])
    return frame[1:]


# Jacobians ------------------------------------------------------------------------------------------------------------


def sa_jacobian(
    x: Matrix, beta: float, *, query_key: Matrix | None = None, value: Matrix | None = None, causal: bool = False
) -> Any:
    """The covariant derivative of SA's velocity in orthonormal tangents, n (d-1) square, in 30 digits:

    P_i D m_i[w] - <x_i, m_i> w_i,   D m_i[w] = sum_j p_ij (V w_j + (dl_ij - sum_k p_ik dl_ik) V x_j),
    dl_ij = beta (w_i^T B x_j + x_i^T B w_j).
    """
    with mpmath.workdps(DIGITS):
        tokens = [[mpmath.mpf(a) for a in token] for token in x]
        frames = [tangents(token) for token in tokens]
        moves = [(i, e) for i, frame in enumerate(frames) for e in frame]
        result = mpmath.zeros(len(moves))
        for column, (mover, w) in enumerate(moves):
            change = [_sa_change(tokens, mover, w, i, beta, query_key, value, causal) for i in range(len(x))]
            for row, (i, e) in enumerate(moves):
                result[row, column] = dot(e, change[i])
        return result


def _sa_change(
    x: Matrix, mover: int, w: Vector, i: int, beta: float, b: Matrix | None, v: Matrix | None, causal: bool
) -> Vector:
    """How the velocity of token i changes as the token ``mover`` moves by w, up to what is along x_i."""
    keys = range(i + 1 if causal else len(x))
    levels = [mpmath.exp(beta * dot(x[i], apply(b, x[j]))) for j in keys]
    p = [level / mpmath.fsum(levels) for level in levels]
    steps = []
    for j in keys:
        query = dot(w, apply(b, x[j])) if i == mover else 0
        key = dot(x[i], apply(b, w)) if j == mover else 0
        steps.append(beta * (query + key))
    mean_step = dot(p, steps)
    values = [apply(v, x[j]) for j in keys]
    mean = [mpmath.fsum(p[j] * values[j][a] for j in keys) for a in range(len(w))]
    moved = apply(v, w)
    total = []
    for a in range(len(w)):
        change = mpmath.fsum(p[j] * (steps[j] - mean_step) * values[j][a] for j in keys)
        change += p[mover] * moved[a] if mover in keys else 0
        change -= dot(x[i], mean) * w[a] if i == mover else 0
        total.append(change)
    return total


def spectrum(matrix: Any) -> tuple[list[complex], list[float]]:
    """Eigenvalues by falling real part, above the axis first, and falling singular values."""
    with mpmath.workdps(DIGITS):
        values = [complex(v) for v in mpmath.eig(matrix, left=False, right=False)]
        singular = [float(s) for s in mpmath.svd(matrix, compute_uv=False)]
    # the two of a pair differ in the 30th digit of their real part
    return sorted(values, key=lambda v: (-round(v.real, 12), -v.imag)), sorted(singular, reverse=True)


# forces ---------------------------------------------------------------------------------------------------------------


def tanh_force(x: Vector, w_in: Matrix, w_out: Matrix, b_in: Vector, b_out: Vector) -> dict[str, Any]:
    """f = sum_j w_j tanh(v_j.x + c_j) + b at one point, its split and its derivative, neuron by neuron."""
    d = len(x)
    seen: dict[str, Any] = {"f": list(b_out), "gradient": [0.0] * d, "swirl": [0.0] * d, "potential": 0.0}
    seen["df"] = [[0.0] * d for _ in range(d)]
    for j, v in enumerate(w_in):
        z = dot(v, x) + b_in[j]
        w = [w_out[a][j] for a in range(d)]
        share = dot(w, v) / dot(v, v)
        seen["potential"] += share * math.log(math.cosh(z))
        for a in range(d):
            seen["f"][a] += w[a] * math.tanh(z)
            seen["gradient"][a] += share * v[a] * math.tanh(z)
            seen["swirl"][a] += (w[a] - share * v[a]) * math.tanh(z)
            for b in range(d):
                seen["df"][a][b] += w[a] * v[b] / math.cosh(z) ** 2
    return seen


def drift_of_token(x: Vector, force: dict[str, Any]) -> dict[str, float]:
    """The quantities of one token, |x| = 1, from its force as ``tanh_force`` gives it."""
    f, df, d = force["f"], force["df"], len(x)
    radial = dot(x, f)
    skew = math.fsum(((df[a][b] - df[b][a]) / 2) ** 2 for a in range(d) for b in range(d))
    whole = math.fsum(df[a][b] ** 2 for a in range(d) for b in range(d))
    rest = [f[a] - force["gradient"][a] - force["swirl"][a] for a in range(d)]
    return {
        "force_length": math.hypot(*f),
        "tangential_force_length": math.hypot(*[f[a] - radial * x[a] for a in range(d)]),
        "radial_force": radial,
        "gradient_length_unit_sphere": math.hypot(*force["gradient"]),
        "swirl_length_unit_sphere": math.hypot(*force["swirl"]),
        "harmonic_length": math.hypot(*rest),
        "potential_unit_sphere": force["potential"],
        "energy_unit_sphere": -force["potential"],
        "trace": math.fsum(df[a][a] for a in range(d)),
        "antisymmetric_share": skew / whole,
        "surface_divergence": math.fsum(df[a][a] for a in range(d)) - dot(x, apply(df, x)) - (d - 1) * radial,
    }
