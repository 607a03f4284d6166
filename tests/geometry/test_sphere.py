"""The sphere against mpmath with 50 digits, against loops, and by Hypothesis: 500 cases per property, float64 and
float32.

Bounds are in units of eps (``ulps``), 2^-52 or 2^-23, times the natural size of the quantity. A number in a comment
beside a bound is the largest error in 10,000 other cases.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helmscope.geometry import sphere
from helmscope.types import HelmscopeError

F64, F32 = torch.float64, torch.float32
PROPERTY = settings(max_examples=500, deadline=None, derandomize=True)
DIGITS = mpmath.workdps(50)


def ulps(error, dtype, scale=1.0):
    """The largest error, in units of eps times ``scale``."""
    return float(torch.as_tensor(error).double().abs().max()) / (torch.finfo(dtype).eps * scale)


def norm(v):
    return float(torch.linalg.vector_norm(v.double()))


def dot(x, y):
    return math.fsum((x.double() * y.double()).tolist())


def random(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def pairs(draw):
    """x and y on the sphere and a unit tangent at x: y is generic, or nearly or exactly coincident or antipodal."""
    dtype, d, seed = draw(st.sampled_from([F64, F32])), draw(st.integers(2, 8)), draw(st.integers(0, 2**32 - 1))
    x, w, v = random(3, d, seed=seed)
    if draw(st.booleans()):  # tied or zero entries
        x = x.round() + (x.round() == 0).all() * torch.eye(d, dtype=F64)[0]
    x = sphere.retract(x)
    w, v = sphere.retract(sphere.project(x, torch.stack([w, v])))
    side, digits = draw(st.sampled_from([1, -1])), draw(st.none() | st.floats(-1, 12 if dtype is F64 else 6))
    y = side * x if digits is None else sphere.retract(side * x + 10**-digits * w)
    return x.to(dtype), y.to(dtype), sphere.project(x.to(dtype), v.to(dtype))  # projected again: tangent to rounding


# The same with 50 digits ----------------------------------------------------------------------------------------------


def exact(v):
    return np.array([mpmath.mpf(a) for a in v.tolist()])


def unit(v):
    return v / mpmath.sqrt(v @ v)


def tangential(x, v):
    return v - x * (x @ v)


def exact_angle(x, y):
    tangent = tangential(x, y)
    return mpmath.atan2(mpmath.sqrt(tangent @ tangent), x @ y)


def exact_log(x, y):
    tangent = tangential(x, y)
    return unit(tangent) * exact_angle(x, y) if tangent @ tangent > 1e-80 else 0 * x


def exact_exp(x, w):
    t = mpmath.sqrt(w @ w)
    return x * mpmath.cos(t) + w * (mpmath.sin(t) / t if t else 1)


def error_of(value, expected):
    """value - expected, entry by entry, subtracted with 50 digits."""
    return torch.tensor((exact(value) - expected).astype(float))


def norm_mismatch(x, y):
    """(|x| - |y|)^2 / 2: norms are 1 only up to rounding, which lengthens the chord |x - y| by this over its length."""
    a, b = (mpmath.sqrt(v @ v) for v in (exact(x), exact(y)))
    return float((a - b) ** 2 / 2)


# Projection and retraction --------------------------------------------------------------------------------------------


@PROPERTY
@given(pairs())
def test_project_is_idempotent_tangent_and_symmetric(case):
    x, u, tangent = case
    v = u + tangent
    p, scale = sphere.project(x, v), norm(v)
    assert ulps(sphere.project(x, p) - p, x.dtype, scale) <= 2  # 1.5
    assert ulps(dot(x, p), x.dtype, scale) <= 2  # 1.8
    assert ulps(dot(u, p) - dot(sphere.project(x, u), v), x.dtype, scale) <= 2  # 1.4


@PROPERTY
@given(pairs(), st.floats(0, 1))
@DIGITS
def test_retract_keeps_the_direction_of_tiny_and_huge_vectors(case, share):
    x, _, _ = case
    smallest, greatest = math.log10(torch.finfo(x.dtype).tiny) - 5, math.log10(torch.finfo(x.dtype).max) - 0.01
    y = (x.double() * 10 ** (smallest + share * (greatest - smallest))).to(x.dtype)
    assert ulps(error_of(sphere.retract(y), unit(exact(y))), x.dtype) <= 1.5  # 1.0
    assert ulps(norm(sphere.retract(y)) - 1, x.dtype) <= 2  # 1.5


def test_retract_returns_the_printed_point_and_nan_for_zero():
    y = torch.tensor([[1.1, 0.2, -0.2], [0.0, 0.0, 0.0]], dtype=F64)
    printed = torch.tensor([0.9684959969581862, 0.17609018126512476, -0.17609018126512476], dtype=F64)
    assert ulps(sphere.retract(y)[0] - printed, F64) <= 1
    assert sphere.retract(y)[1].isnan().all()


# Distance, logarithm, exponential -------------------------------------------------------------------------------------


@PROPERTY
@given(pairs(), st.floats(0, 1))
def test_angle_is_a_distance_exact_at_both_ends(case, share):
    x, y, v = case
    pi = torch.tensor(torch.pi, dtype=x.dtype)
    assert sphere.angle(x, x) == 0
    assert sphere.angle(x, -x) == pi
    assert 0 <= sphere.angle(x, y) <= pi
    assert sphere.angle(x, y) == sphere.angle(y, x)
    between = sphere.exp(x, share * sphere.log(x, y))
    for z in (sphere.retract(x + v), between):
        a, b, c = (float(sphere.angle(p, q)) for p, q in ((x, y), (x, z), (z, y)))
        assert ulps(max(0.0, a - b - c, b - a - c, c - a - b), x.dtype, math.pi) <= 2  # 1.3
    assert ulps(a - b - c, x.dtype, math.pi) <= 2  # 1.5: on the geodesic it is an equality


@PROPERTY
@given(pairs())
@DIGITS
def test_angle_and_log_agree_with_50_digits(case):
    x, y, _ = case
    p, q = unit(exact(x)), unit(exact(y))
    theta = float(exact_angle(p, q))
    slack = norm_mismatch(x, y) / theta if theta > 1e-30 else 0.0
    error = abs(float(sphere.angle(x, y).item() - exact_angle(p, q)))
    assert ulps(max(0.0, error - slack), x.dtype, theta + 1e-30) <= 2  # 1.7
    if 1 + p @ q > 1e-30:  # otherwise every direction is valid
        error = norm(error_of(sphere.log(x, y), exact_log(p, q)))
        assert ulps(max(0.0, error - slack), x.dtype, theta + 1e-30) <= 3  # 2.2


@pytest.mark.parametrize(("dtype", "gap"), [(F64, 1e-9), (F32, 1e-4)])
def test_angle_is_accurate_where_arccos_is_not(dtype, gap):
    phi = torch.linspace(0, 3, 101, dtype=F64)
    x, y = (torch.stack([a.cos(), a.sin()], -1).to(dtype) for a in (phi, phi + gap))
    arccos = (x * y).sum(-1).clamp(-1, 1).arccos()
    true = 2 * torch.atan((x.double() - y.double()).norm(dim=-1) / 2)
    assert ((arccos - gap).abs() > 0.9 * gap).any()
    assert ulps((sphere.angle(x, y) - true) / true, dtype) <= 3
    if dtype is F32:
        assert (x * x).sum(-1).clamp(-1, 1).arccos().max() > 3e-4


@PROPERTY
@given(pairs())
def test_log_is_a_tangent_of_length_angle_and_exp_maps_it_to_y(case):
    x, y, _ = case
    w, theta = sphere.log(x, y), float(sphere.angle(x, y))
    assert ulps(dot(x, w), x.dtype, theta + 1e-30) <= 2  # 1.0
    assert ulps(norm(w) - theta, x.dtype, theta + 1e-30) <= 3  # 2.0
    assert ulps(sphere.exp(x, w) - y, x.dtype) <= 6  # 4.8, at the antipode


@PROPERTY
@given(pairs(), st.sampled_from([-1, 1]), st.integers(-2, 2))
def test_log_is_a_tangent_for_points_that_coincide_or_are_antipodal_up_to_the_rounding_of_their_norms(case, side, k):
    x, _, _ = case
    y = side * x * (1 + k * torch.finfo(x.dtype).eps)
    w = sphere.log(x, y)
    assert ulps(dot(x, w), x.dtype) <= 6  # 4.0
    assert ulps(norm(w) - (0 if side > 0 else math.pi), x.dtype) <= 8  # 5.2
    assert ulps(sphere.exp(x, w) - y, x.dtype) <= 8  # 5.3


@pytest.mark.parametrize(("dtype", "gap"), [(F64, 1e-12), (F32, 1e-6)])
@pytest.mark.parametrize("d", [2, 3, 8])
def test_log_keeps_its_direction_near_the_antipode(d, dtype, gap):
    x, w = sphere.retract(random(2, 4000, d))
    w = sphere.retract(sphere.project(x, w))
    v = sphere.log(x.to(dtype), sphere.retract(-x + gap * w).to(dtype))
    assert (v.double() * w).sum(-1).min() / math.pi >= 0.99  # 0.9968: the rounding of the points rotates the direction


@PROPERTY
@given(pairs(), st.floats(-12, 2))
@DIGITS
def test_exp_is_on_the_sphere_and_agrees_with_50_digits(case, digits):
    x, _, v = case
    w = v * 10**digits
    end, p = sphere.exp(x, w), unit(exact(x))
    assert ulps(norm(end) - 1, x.dtype, 1 + norm(w)) <= 2  # 1.5
    assert ulps(error_of(end, exact_exp(p, tangential(p, exact(w)))), x.dtype, 1 + norm(w)) <= 1.5  # 1.0


# Transport and frames -------------------------------------------------------------------------------------------------


@PROPERTY
@given(pairs())
@DIGITS
def test_transport_is_an_isometry_between_tangent_spaces_and_transport_back_is_its_inverse(case):
    x, y, v = case
    moved, w = sphere.parallel_transport(x, y, v), sphere.log(x, y)
    assert ulps(norm(moved) - norm(v), x.dtype) <= 8  # 6.0, at the antipode, like the next ones
    assert ulps(dot(y, moved), x.dtype) <= 8  # 6.7
    assert ulps(sphere.parallel_transport(y, x, moved) - v, x.dtype) <= 16  # 12.0
    assert ulps(sphere.parallel_transport(x, y, w) + sphere.log(y, x), x.dtype, norm(w) + 1e-30) <= 8  # 6.4
    p, q = unit(exact(x)), unit(exact(y))
    if 1 + p @ q > 1e-30:  # otherwise every geodesic is valid
        tangent = tangential(p, exact(v))
        expected = tangent - (p + q) * (q @ tangent / (1 + p @ q))
        assert ulps(error_of(moved, expected), x.dtype) <= 8  # 5.9


def transported_by_the_ode(x, w, v, steps=1000):
    """v' = -<x', v> x along the great circle x(s) = cos(ts) x + sin(ts) w / t, from s = 0 to 1, by RK4."""
    t, h = math.hypot(*w), 1 / steps

    def slope(s, v):
        here, speed = math.cos(t * s) * x + math.sin(t * s) / t * w, math.cos(t * s) * w - t * math.sin(t * s) * x
        return -(speed @ v) * here

    for s in np.arange(steps) * h:
        k1 = slope(s, v)
        k2 = slope(s + h / 2, v + h / 2 * k1)
        k3 = slope(s + h / 2, v + h / 2 * k2)
        k4 = slope(s + h, v + h * k3)
        v = v + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return v


@pytest.mark.parametrize("seed", range(12))
def test_transport_solves_its_ode_up_to_the_antipode(seed):
    x, y, v = sphere.retract(random(3, 2 + seed % 4, seed=seed))
    y, v = -x if seed % 3 == 0 else y, sphere.project(x, v)
    expected = transported_by_the_ode(x.numpy(), sphere.log(x, y).numpy(), v.numpy())
    assert (
        norm(sphere.parallel_transport(x, y, v) - torch.from_numpy(expected)) <= 5e-12
    )  # the error of the oracle at the antipode is 4.2e-12


@PROPERTY
@given(pairs())
@DIGITS
def test_pull_back_is_the_derivative_of_log_in_50_digits(case):
    x, y, v = case
    u = 0.95 * sphere.log(x, y)
    w = sphere.parallel_transport(x, sphere.exp(x, u), v)
    p = unit(exact(x))
    q = exact_exp(p, tangential(p, exact(u)))
    h = mpmath.mpf(10) ** -18
    ahead, behind = (exact_log(p, unit(q + tangential(q, exact(w)) * step)) for step in (h, -h))
    expected = (ahead - behind) / (2 * h)
    growth = norm(u) / math.sin(norm(u)) if norm(u) else 1.0
    assert ulps(error_of(sphere.pull_back(x, u, w), expected), x.dtype, growth**2) <= 3  # 2.2


@PROPERTY
@given(pairs(), st.sampled_from([1.0, -1.0, 0.0, -0.0]), st.floats(-12, 0))
def test_bases_are_orthonormal_and_tangent_for_any_first_entry(case, sign, digits):
    x, _, _ = case
    first, others = sign * x[:1].abs(), 10**digits * x[1:]
    x = sphere.retract(torch.cat([first, others + (first == 0) * (others == 0).all()]))
    basis, one = sphere.tangent_basis(x).double(), sphere.arbitrary_tangent(x)
    assert basis.shape == (len(x), len(x) - 1)
    assert ulps(basis.T @ basis - torch.eye(len(x) - 1), x.dtype) <= 4  # 3.0
    assert ulps(x.double() @ basis, x.dtype) <= 3  # 2.3
    assert ulps(norm(one) - 1, x.dtype) <= 1.5  # 1.0
    assert ulps(dot(x, one), x.dtype) <= 2  # 1.3


# Gradients ------------------------------------------------------------------------------------------------------------

DIFFERENTIABLE = [
    lambda x, y, v: sphere.project(x, y + v),
    lambda x, y, v: sphere.retract(x + v),
    lambda x, y, v: sphere.exp(x, v),
    lambda x, y, v: sphere.angle(x, y),
    lambda x, y, v: sphere.log(x, y),
    lambda x, y, v: sphere.parallel_transport(x, y, v),
    lambda x, y, v: sphere.pull_back(x, 0.9 * sphere.log(x, y), v),
    lambda x, y, v: sphere.tangent_basis(x),
    lambda x, y, v: sphere.arbitrary_tangent(x),
]


@PROPERTY
@given(pairs())
def test_gradients_are_finite_everywhere(case):
    x, y, v = (t.clone().requires_grad_() for t in case)
    zero = torch.zeros_like(x).requires_grad_()
    total = sum(f(x, y, v).sum() for f in DIFFERENTIABLE) + sphere.exp(x, zero).sum()
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(total, (x, y, v, zero)))


@pytest.mark.parametrize("d", [2, 5])
@pytest.mark.parametrize("f", DIFFERENTIABLE)
def test_gradients_are_right_at_generic_points(f, d):
    x, y, v = sphere.retract(random(3, 2, d, seed=d))
    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in (x, y, v)], atol=1e-7, rtol=1e-7)


@PROPERTY
@given(pairs())
@DIGITS
def test_the_gradient_of_angle_is_the_unit_tangent_away_from_the_other_point(case):
    x, y, _ = case
    (slope,) = torch.autograd.grad(sphere.angle(x, leaf := y.clone().requires_grad_()), leaf)
    if torch.equal(x, y) or torch.equal(x, -y):  # where angle is not differentiable
        assert torch.equal(slope, torch.zeros_like(slope))
    else:
        error = norm(sphere.project(y, slope) + sphere.log(y, x) / sphere.angle(x, y))
        gap = min(norm(x - y), norm(x + y))
        assert ulps(max(0.0, error - norm_mismatch(x, y) / gap**2), x.dtype) <= 4  # 3.1


@pytest.mark.parametrize("d", [2, 5])
def test_gradients_of_log_and_exp_at_coincident_and_antipodal_points(d):
    x, eye = sphere.retract(random(d, seed=d)), torch.eye(d, dtype=F64)
    p, jacobian = eye - x.outer(x), torch.autograd.functional.jacobian
    assert ulps(torch.cat(jacobian(sphere.log, (x, x))) - torch.cat([-p, p]), F64) <= 3
    assert torch.equal(torch.cat(jacobian(sphere.log, (x, -x))), torch.zeros(2 * d, d, dtype=F64))
    assert torch.equal(torch.cat(jacobian(sphere.exp, (x, 0 * x))), torch.cat([eye, eye]))


# Input checks ---------------------------------------------------------------------------------------------------------

FINITE = "but every token must be finite"


def changed(value, dtype=F64):
    """Two systems of the three coordinate axes, with token 2 of system 1 replaced by ``value``."""
    x = torch.eye(3, dtype=dtype).repeat(2, 1, 1)
    x[1, 2] = torch.tensor(value, dtype=dtype)
    return x


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        ([[1.0, 0.0]], "is a list, but it must be a torch tensor of shape (..., n, d)"),
        (np.eye(2), "is an ndarray, but it must be a torch tensor of shape (..., n, d): pass torch.from_numpy(tokens)"),
        (torch.eye(2, dtype=torch.long), "has dtype torch.int64, but it must be torch.float64 or torch.float32"),
        (torch.eye(2).half(), "has dtype torch.float16, but it must be torch.float64 or torch.float32"),
        (torch.ones(3), "has shape (3,), but it must be (..., n, d) with n >= 1 tokens"),
        (torch.ones(2, 0, 3), "has shape (2, 0, 3), but it must be (..., n, d) with n >= 1 tokens"),
        (torch.ones(3, 1), "has dimension d=1, but a sphere needs d >= 2"),
        (changed([0.0, math.nan, 1.0]), f"holds NaN or infinite entries (token 2 of system 1), {FINITE}"),
        (changed([math.inf, 0.0, 0.0])[1], f"holds NaN or infinite entries (token 2), {FINITE}"),
        (
            changed([0.0, 0.0, 0.0]),
            "holds a zero vector (token 2 of system 1), but every token must be nonzero: if it is the padding of a "
            "recording, pass the weights of its trajectory too",
        ),
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_check_tokens_raises_unless_given_a_finite_nonzero_cloud(x, sentence, normalize):
    with pytest.raises(HelmscopeError) as caught:
        sphere.check_tokens(x, name="tokens", normalize=normalize)
    assert str(caught.value) == f"tokens {sentence}"


@pytest.mark.parametrize(("dtype", "tol"), [(F64, 2e-6), (F32, 1e-4)])
def test_check_tokens_raises_for_tokens_off_the_sphere_unless_it_normalizes(dtype, tol):
    for accepted in (1 - 0.99 * tol, 1 + 0.99 * tol):
        assert sphere.check_tokens(x := changed([accepted, 0.0, 0.0], dtype)) is x
    for rejected in (1 - 1.02 * tol, 1 + 1.02 * tol, 2.5):
        x = changed([rejected, 0.0, 0.0], dtype)
        with pytest.raises(HelmscopeError) as caught:
            sphere.check_tokens(x)
        assert str(caught.value) == (
            f"x holds a token of norm {float(x[1, 2, 0]):.9g} (token 2 of system 1), but tokens must be on the unit "
            "sphere: divide by its norm"
        )
        assert torch.equal(sphere.check_tokens(x, normalize=True), changed([1.0, 0.0, 0.0], dtype))


@pytest.mark.parametrize(("dtype", "size"), [(F64, 1e-200), (F64, 1e200), (F32, 1e-30), (F32, 1e30)])
def test_check_tokens_normalizes_tiny_and_huge_tokens(dtype, size):
    x = size * changed([0.0, 3.0, 4.0], dtype)
    assert ulps(sphere.check_tokens(x, normalize=True) - changed([0.0, 0.6, 0.8], dtype), dtype) <= 1


def test_tokens_on_the_sphere_are_checked_by_their_norms_alone(monkeypatch):
    """A norm of 1 implies finite and nonzero entries, whose checks take twenty times as long."""

    def never(*_: object) -> None:
        raise AssertionError

    x = torch.eye(3)
    monkeypatch.setattr(torch, "isfinite", never)
    assert sphere.check_tokens(x) is x
