"""Slow, obvious oracles for MLPs and their Helmholtz split: one neuron after another, in 30 digits, nothing else.

Nothing of helmscope is imported here, so that a fault in the library cannot repeat itself in what judges it. An MLP is
a dict of nested lists: ``w_in`` (rows v_j), or ``w_gate`` and ``w_up`` (rows g_j, u_j) where gated; ``w_out`` (dim
rows, so w_j is a column); and biases, 0 where missing. Points x are d numbers. psi and Psi are integrated numerically.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import mpmath
from mpmath import mpf

DIGITS = 30

Vector = list[Any]
Parameters = dict[str, list[Any]]

ACTIVATIONS: dict[str, Callable[[mpf], mpf]] = {
    "Identity": lambda z: z,
    "ReLU": lambda z: max(z, mpf(0)),
    "SquaredReLU": lambda z: max(z, mpf(0)) ** 2,
    "Tanh": mpmath.tanh,
    "Sigmoid": lambda z: 1 / (1 + mpmath.exp(-z)),
    "SiLU": lambda z: z / (1 + mpmath.exp(-z)),
    "GELU": lambda z: z * mpmath.ncdf(z),
    "GELUTanh": lambda z: z / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (z + mpf("0.044715") * z**3))),
    "QuickGELU": lambda z: z / (1 + mpmath.exp(-mpf("1.702") * z)),
}


def parameters(hidden: int, dim: int, *, gated: bool, seed: int, biases: bool = True) -> Parameters:
    """Standard normal weights and biases.

    >>> sorted(parameters(2, 3, gated=True, seed=0))
    ['b_gate', 'b_out', 'b_up', 'w_gate', 'w_out', 'w_up']
    """
    rng = random.Random(seed)

    def normal(n: int) -> Vector:
        return [rng.gauss(0, 1) for _ in range(n)]

    rows, shifts = (("w_gate", "w_up"), ("b_gate", "b_up")) if gated else (("w_in",), ("b_in",))
    made = {name: [normal(dim) for _ in range(hidden)] for name in rows}
    made["w_out"] = [normal(hidden) for _ in range(dim)]
    if biases:
        made |= {name: normal(hidden) for name in shifts} | {"b_out": normal(dim)}
    return made


def dot(x: Vector, y: Vector) -> mpf:
    """x.y without any rounding but the last.

    >>> float(dot([1.0, 2.0], [3.0, 4.0]))
    11.0
    """
    with mpmath.workdps(DIGITS):
        return mpmath.fsum(mpf(a) * mpf(b) for a, b in zip(x, y, strict=True))


def psi(activation: str, z: mpf) -> mpf:
    """int_0^z s = z int_0^1 s(z v) dv.

    >>> float(psi("ReLU", mpf(4)))
    8.0
    """
    return _integral(activation, z, twice=False)


def double_psi(activation: str, z: mpf) -> mpf:
    """int_0^z psi = z^2 int_0^1 (1 - v) s(z v) dv.

    >>> float(double_psi("Identity", mpf(6)))
    36.0
    """
    return _integral(activation, z, twice=True)


@cache
def _integral(activation: str, z: mpf, twice: bool) -> mpf:
    """Over the unit interval: the quadrature's error is absolute, and z may be 1e-20."""
    s = ACTIVATIONS[activation]
    with mpmath.workdps(DIGITS):
        pieces = mpmath.linspace(0, 1, 1 + max(1, math.ceil(abs(z))))
        if twice:
            return z * z * mpmath.quad(lambda v: (1 - v) * s(z * v), pieces)
        return z * mpmath.quad(lambda v: s(z * v), pieces)


def neurons(mlp: Parameters) -> list[tuple[Vector, Vector, Vector, mpf, mpf]]:
    """(w, row, up, c, e) of each neuron: row is v or g; without a gate up is 0 and e is 1, so that up.x + e = 1.

    >>> [float(part) for part in neurons({"w_in": [[2.0]], "w_out": [[3.0]]})[0][3:]]
    [0.0, 1.0]
    """
    gated = "w_gate" in mlp
    rows = mlp["w_gate" if gated else "w_in"]
    hidden, dim = len(rows), len(rows[0])
    ups = mlp["w_up"] if gated else [[0.0] * dim] * hidden
    c = mlp.get("b_gate" if gated else "b_in", [0.0] * hidden)
    e = mlp.get("b_up", [0.0] * hidden) if gated else [1.0] * hidden
    return [([mlp["w_out"][a][j] for a in range(dim)], rows[j], ups[j], mpf(c[j]), mpf(e[j])) for j in range(hidden)]


def force(mlp: Parameters, activation: str, x: Vector) -> Vector:
    """f(x) = sum_j w_j s(row_j.x + c_j) (up_j.x + e_j) + b_out.

    >>> [float(a) for a in force({"w_in": [[1.0, 1.0]], "w_out": [[2.0], [0.0]]}, "ReLU", [1.0, 2.0])]
    [6.0, 0.0]
    """
    with mpmath.workdps(DIGITS):
        total = [mpf(b) for b in mlp.get("b_out", [0.0] * len(x))]
        for w, row, up, c, e in neurons(mlp):
            value = ACTIVATIONS[activation](dot(row, x) + c) * (dot(up, x) + e)
            total = [total[a] + w[a] * value for a in range(len(x))]
        return total


def potential(mlp: Parameters, activation: str, x: Vector) -> mpf:
    """U(x) = sum_j alpha psi(z) t + kappa Psi(z) [Helmholtz Transformer, no. 3]; ungated t = 1, kappa = 0. No row may
    be 0.

    >>> float(potential({"w_in": [[2.0]], "w_out": [[3.0]]}, "Identity", [1.0]))
    3.0
    """
    with mpmath.workdps(DIGITS):
        total = mpf(0)
        for w, row, up, c, e in neurons(mlp):
            alpha, kappa = _coefficients(w, row, up)
            z, t = dot(row, x) + c, dot(up, x) + e
            total += alpha * psi(activation, z) * t + kappa * double_psi(activation, z)
        return total


def gradient(mlp: Parameters, activation: str, x: Vector) -> Vector:
    """grad U(x) = sum_j alpha s(z) t g + (alpha u + kappa g) psi(z).

    >>> [float(a) for a in gradient({"w_in": [[2.0]], "w_out": [[3.0]]}, "Identity", [1.0])]
    [6.0]
    """
    with mpmath.workdps(DIGITS):
        total = [mpf(0)] * len(x)
        for w, row, up, c, e in neurons(mlp):
            alpha, kappa = _coefficients(w, row, up)
            z, t = dot(row, x) + c, dot(up, x) + e
            s, primitive = ACTIVATIONS[activation](z), psi(activation, z)
            for a in range(len(x)):
                total[a] += alpha * s * t * row[a] + (alpha * up[a] + kappa * row[a]) * primitive
        return total


def swirl(mlp: Parameters, activation: str, x: Vector) -> Vector:
    """R(x) = f(x) - b_out - grad U(x).

    >>> [float(a) for a in swirl({"w_in": [[2.0]], "w_out": [[3.0]]}, "Identity", [1.0])]
    [0.0]
    """
    with mpmath.workdps(DIGITS):
        parts = zip(force(mlp, activation, x), gradient(mlp, activation, x), strict=True)
        constant = mlp.get("b_out", [0.0] * len(x))
        return [f - g - b for (f, g), b in zip(parts, constant, strict=True)]


def _coefficients(w: Vector, row: Vector, up: Vector) -> tuple[mpf, mpf]:
    square = dot(row, row)
    alpha = dot(w, row) / square
    return alpha, (dot(w, up) - 2 * alpha * dot(row, up)) / square


def divergence(field: Callable[[Vector], Vector], x: Vector) -> mpf:
    """sum_a d field_a / d x_a by central differences of width 1e-9 in 30 digits: exact to about 1e-17.

    >>> float(divergence(lambda x: [x[0] ** 2, x[0] * x[1]], [2.0, 5.0]))
    6.0
    """
    with mpmath.workdps(DIGITS):
        h, total = mpf("1e-9"), mpf(0)
        for a in range(len(x)):
            ahead, behind = ([*x[:a], mpf(x[a]) + side, *x[a + 1 :]] for side in (h, -h))
            total += (field(ahead)[a] - field(behind)[a]) / (2 * h)
        return total
