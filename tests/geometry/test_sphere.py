"""The sphere against 50 digits of mpmath, against loops, and by Hypothesis: 500 cases a property, in float64 and float32.

Bounds are in units of rounding, eps = 2^-52 or 2^-23, times the natural size of the quantity (``ulps``). The worst of
20,000 random cases stands behind each bound as a comment.
"""

from __future__ import annotations

import functools
import math

import mpmath
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helmscope.geometry import sphere
from helmscope.types import HelmscopeError

F64, F32 = torch.float64, torch.float32
PROPERTY = settings(max_examples=500, deadline=None, derandomize=True)
DIGITS = mpmath.workdps(50)


def ulps(error, dtype, scale=1.0):
    """The greatest error, in units of rounding times ``scale``."""
    return float(torch.as_tensor(error).double().abs().max()) / (torch.finfo(dtype).eps * scale)


def norm(v):
    return float(torch.linalg.vector_norm(v.double(), dim=-1))


def dot(x, y):
    return math.fsum((x.double() * y.double()).tolist())


# What the properties are tried on -------------------------------------------------------------------------------------


@st.composite
def directions(draw, d):
    """A vector of norm > 0.1 in float64 whose entries may tie, vanish or be tiny."""
    row = draw(st.lists(st.floats(-1, 1, width=32), min_size=d, max_size=d).filter(lambda row: math.hypot(*row) > 0.1))
    return torch.tensor(row, dtype=F64)


@st.composite
def pairs(draw, least_side=-1):
    """x, y on one sphere and a tangent at x: y generic, nearly or exactly coincident, nearly or exactly antipodal."""
    dtype, d = draw(st.sampled_from([F64, F32])), draw(st.integers(2, 8))
    x, v = sphere.retract(draw(directions(d))), draw(directions(d))
    toward = sphere.project(x, draw(directions(d).filter(lambda t: norm(sphere.project(x, t)) > 0.1)))
    side = draw(st.sampled_from([1, -1]).filter(lambda s: s >= least_side))
    digits = draw(st.one_of(st.none(), st.floats(-1, 12 if dtype is F64 else 6)))
    y = side * x if digits is None else sphere.retract(side * x + 10**-digits * toward)
    return x.to(dtype), y.to(dtype), sphere.project(x.to(dtype), v.to(dtype))


def exact(x):
    """x as a list of mpmath numbers, divided by its norm."""
    v = [mpmath.mpf(a) for a in x.tolist()]
    return scaled(v, 1 / mpmath.sqrt(inner(v, v)))


def inner(x, y):
    return mpmath.fdot(x, y)


def scaled(x, c):
    return [c * a for a in x]


def plus(x, y, c=1):
    return [a + c * b for a, b in zip(x, y, strict=True)]


def rest(x, v):
    """The tangential part of v at x."""
    return plus(v, x, -inner(x, v))


def exact_angle(x, y):
    return mpmath.acos(max(-1, min(1, inner(x, y))))


def exact_log(x, y):
    across = rest(x, y)
    size = mpmath.sqrt(inner(across, across))
    return scaled(across, exact_angle(x, y) / size) if size > 1e-40 else scaled(x, 0)


def exact_exp(x, w):
    t = mpmath.sqrt(inner(w, w))
    return plus(scaled(x, mpmath.cos(t)), w, mpmath.sin(t) / t if t else 1)


def off(value, expected):
    """value - expected, entry by entry, with the subtraction in 50 digits."""
    return torch.tensor([float(a - b) for a, b in zip(value.tolist(), expected, strict=True)], dtype=F64)


# Projection and retraction --------------------------------------------------------------------------------------------


@PROPERTY
@given(pairs())
def test_project_is_idempotent_tangent_and_symmetric(case):
    x, u, v = case
    scale = norm(v) + 1e-30
    p = sphere.project(x, v)
    assert ulps(sphere.project(x, p) - p, x.dtype, scale) <= 2
    assert ulps(dot(x, p), x.dtype, scale) <= 2
    assert ulps(dot(u, p) - dot(sphere.project(x, u), v), x.dtype, scale) <= 2


@PROPERTY
@given(pairs(), st.floats(0, 1))
@DIGITS
def test_retract_keeps_the_direction_of_tiny_and_huge_vectors(case, share):
    x, _, _ = case
    smallest, greatest = math.log10(torch.finfo(x.dtype).tiny) - 5, math.log10(torch.finfo(x.dtype).max) - 0.01
    y = (x.double() * 10 ** (smallest + share * (greatest - smallest))).to(x.dtype)
    assert ulps(off(sphere.retract(y), exact(y)), x.dtype) <= 2
    assert ulps(norm(sphere.retract(y)) - 1, x.dtype) <= 2


def test_retract_gives_the_printed_point_and_no_point_for_zero():
    y = torch.tensor([[1.1, 0.2, -0.2], [0.0, 0.0, 0.0]], dtype=F64)
    printed = torch.tensor([0.9684959969581862, 0.17609018126512476, -0.17609018126512476], dtype=F64)
    assert ulps(sphere.retract(y)[0] - printed, F64) <= 1
    assert sphere.retract(y)[1].isnan().all()


# Distance -------------------------------------------------------------------------------------------------------------


@PROPERTY
@given(pairs())
def test_angle_is_symmetric_bounded_and_exact_at_the_ends(case):
    x, y, _ = case
    pi = torch.tensor(torch.pi, dtype=x.dtype)
    assert sphere.angle(x, y) == sphere.angle(y, x)
    assert 0 <= sphere.angle(x, y) <= pi
    assert sphere.angle(x, x) == 0
    assert sphere.angle(x, -x) == pi


@PROPERTY
@given(pairs(), st.floats(0, 1))
def test_angle_obeys_the_triangle_inequality(case, share):
    x, y, v = case
    between = sphere.exp(x, share * sphere.log(x, y))
    for z in (sphere.retract(x + v), between):
        a, b, c = (float(sphere.angle(p, q)) for p, q in ((x, y), (x, z), (z, y)))
        assert ulps(max(0.0, a - b - c, b - a - c, c - a - b), x.dtype, math.pi) <= 2
    # on the geodesic it is an equality
    assert ulps(float(sphere.angle(x, between)) + float(sphere.angle(between, y)) - a, x.dtype, math.pi) <= 2


@PROPERTY
@given(pairs())
@DIGITS
def test_angle_agrees_with_50_digits(case):
    x, y, _ = case
    theta = exact_angle(exact(x), exact(y))
    # norms are 1 to rounding only, and |x - y|^2 sees their difference squared
    uneven = (norm(x) - norm(y)) ** 2 / (2 * float(theta)) if theta > 1e-20 else abs(norm(x) - norm(y))
    error = abs(float(mpmath.mpf(sphere.angle(x, y).item()) - theta))
    assert ulps(max(0.0, error - 1.01 * uneven), x.dtype, float(theta) + 1e-300) <= 3
