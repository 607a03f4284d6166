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
def pairs(draw):
    """x, y on one sphere and a unit tangent at x: y generic, nearly or exactly coincident, nearly or exactly antipodal."""
    dtype, d = draw(st.sampled_from([F64, F32])), draw(st.integers(2, 8))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x, w, v = torch.randn(3, d, dtype=F64, generator=source)
    if draw(st.booleans()):  # entries that tie or vanish
        x = x.round() + (x.round() == 0).all() * torch.eye(d, dtype=F64)[0]
    x = sphere.retract(x)
    side, digits = draw(st.sampled_from([1, -1])), draw(st.none() | st.floats(-1, 12 if dtype is F64 else 6))
    w = sphere.retract(sphere.project(x, w))
    y = side * x if digits is None else sphere.retract(side * x + 10**-digits * w)
    v = sphere.retract(sphere.project(x, v))
    return x.to(dtype), y.to(dtype), sphere.project(x.to(dtype), v.to(dtype))  # projected again: tangent to rounding


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
    across = rest(x, y)
    return mpmath.atan2(mpmath.sqrt(inner(across, across)), inner(x, y))


def exact_log(x, y):
    across = rest(x, y)
    size = mpmath.sqrt(inner(across, across))
    return scaled(across, exact_angle(x, y) / size) if size > 1e-40 else scaled(x, 0)


def exact_exp(x, w):
    t = mpmath.sqrt(inner(w, w))
    return plus(scaled(x, mpmath.cos(t)), w, mpmath.sin(t) / t if t else 1)


def uneven(x, y):
    """(|x| - |y|)^2 / 2: norms are 1 to rounding only, and the chord |x - y| sees this, divided by its length."""
    x, y = ([mpmath.mpf(a) for a in v.tolist()] for v in (x, y))
    return float((mpmath.sqrt(inner(x, x)) - mpmath.sqrt(inner(y, y))) ** 2 / 2)


def off(value, expected):
    """value - expected, entry by entry, with the subtraction in 50 digits."""
    return torch.tensor([float(a - b) for a, b in zip(value.tolist(), expected, strict=True)], dtype=F64)


# Projection and retraction --------------------------------------------------------------------------------------------


@PROPERTY
@given(pairs())
def test_project_is_idempotent_tangent_and_symmetric(case):
    x, u, tangent = case
    v = u + tangent
    scale = norm(v)
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
    error = abs(float(mpmath.mpf(sphere.angle(x, y).item()) - theta))
    theta = max(float(theta), 1e-30)
    assert ulps(max(0.0, error - uneven(x, y) / theta), x.dtype, theta) <= 3


@pytest.mark.parametrize(("dtype", "gap"), [(F64, 1e-9), (F32, 1e-4)])
def test_arccos_would_lose_what_angle_keeps(dtype, gap):
    turn = torch.linspace(0, 3, 101, dtype=F64)
    x, y = (torch.stack([a.cos(), a.sin()], -1).to(dtype) for a in (turn, turn + gap))
    arccos = (x * y).sum(-1).clamp(-1, 1).arccos()
    true = 2 * torch.atan((x.double() - y.double()).norm(dim=-1) / 2)
    assert ((arccos - gap).abs() > 0.9 * gap).any()
    assert ulps((sphere.angle(x, y) - true) / true, dtype) <= 3
    if dtype is F32:
        assert (x * x).sum(-1).clamp(-1, 1).arccos().max() > 3e-4


# Logarithm and exponential --------------------------------------------------------------------------------------------


@PROPERTY
@given(pairs())
@DIGITS
def test_log_agrees_with_50_digits(case):
    x, y, _ = case
    p, q = exact(x), exact(y)
    theta = float(exact_angle(p, q))
    if theta < 1e-30 or 1 + inner(p, q) < 1e-30:
        return
    # near the antipode the direction hangs on x + y, which rounding of x and y has moved by eps / |x + y|
    error = float(off(sphere.log(x, y), exact_log(p, q)).norm())
    assert ulps(max(0.0, error - uneven(x, y) / theta), x.dtype, theta) <= 3


@PROPERTY
@given(pairs())
def test_log_is_a_tangent_as_long_as_the_angle_and_exp_leads_along_it_to_y(case):
    x, y, _ = case
    w, theta = sphere.log(x, y), float(sphere.angle(x, y))
    assert ulps(dot(x, w), x.dtype, theta + 1e-30) <= 3
    assert ulps(norm(w) - theta, x.dtype, theta + 1e-30) <= 3
    assert ulps(sphere.exp(x, w) - y, x.dtype) <= 3


@PROPERTY
@given(pairs(), st.floats(-12, 2))
@DIGITS
def test_exp_lands_on_the_sphere_where_50_digits_say(case, digits):
    x, _, v = case
    w = v * 10**digits
    arrived = sphere.exp(x, w)
    p = exact(x)
    w_exact = rest(p, [mpmath.mpf(a) for a in w.tolist()])
    assert ulps(norm(arrived) - 1, x.dtype, 1 + norm(w)) <= 3
    assert ulps(off(arrived, exact_exp(p, w_exact)), x.dtype, 1 + norm(w)) <= 3


# Parallel transport ---------------------------------------------------------------------------------------------------


@PROPERTY
@given(pairs())
@DIGITS
def test_transport_is_an_isometry_between_tangent_spaces_with_the_way_back_as_its_inverse(case):
    x, y, v = case
    there, size = sphere.transport(x, y, v), norm(v)
    assert ulps(norm(there) - size, x.dtype, size) <= 3
    assert ulps(dot(y, there), x.dtype, size) <= 3
    assert ulps(sphere.transport(y, x, there) - v, x.dtype, size) <= 3
    out, back = sphere.log(x, y), sphere.log(y, x)
    assert ulps(sphere.transport(x, y, out) + back, x.dtype, norm(out) + 1e-30) <= 3


@PROPERTY
@given(pairs())
@DIGITS
def test_transport_agrees_with_50_digits(case):
    x, y, v = case
    p, q = exact(x), exact(y)
    if 1 + inner(p, q) < 1e-30:
        return
    tangent = rest(p, [mpmath.mpf(a) for a in v.tolist()])
    expected = plus(tangent, plus(p, q), -inner(q, tangent) / (1 + inner(p, q)))
    assert ulps(off(sphere.transport(x, y, v), expected), x.dtype, norm(v)) <= 3


@PROPERTY
@given(pairs(), st.floats(-12, math.log10(3)))
@DIGITS
def test_pull_back_is_the_derivative_of_log_in_50_digits(case, digits):
    x, y, v = case
    u = sphere.project(x, sphere.retract(v) * 10**digits)
    w = sphere.transport(x, sphere.exp(x, u), sphere.project(x, y + v))
    p = exact(x)
    q = exact_exp(p, rest(p, [mpmath.mpf(a) for a in u.tolist()]))
    moving = rest(q, [mpmath.mpf(a) for a in w.tolist()])

    def at(step):
        moved = plus(q, moving, step)
        return exact_log(p, scaled(moved, 1 / mpmath.sqrt(inner(moved, moved))))

    step = mpmath.mpf(10) ** -18
    expected = scaled(plus(at(step), at(-step), -1), 1 / (2 * step))
    growth = norm(u) / math.sin(norm(u))
    assert ulps(off(sphere.pull_back(x, u, w), expected), x.dtype, growth**2 * norm(w)) <= 3
