"""The expansion of a normalized layer against printed digits, against mpmath with 50 digits, and order by order.

Bounds are in units of eps (``ulps``), 2^-52 or 2^-23, times the natural size of the quantity. A number in a comment
beside a bound is the largest error that was measured.
"""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch

from helmscope.geometry import retraction, sphere

F64, F32 = torch.float64, torch.float32
DIGITS = mpmath.workdps(50)

# raised by torch itself on the first forward-mode derivative
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def layer_step(x, delta):
    """N(x + delta), the exact step that the expansions approximate."""
    return sphere.retract(x + delta)


def ulps(error, dtype, scale=1.0):
    """The largest error, in units of eps times ``scale``."""
    return float(torch.as_tensor(error).detach().double().abs().max()) / (torch.finfo(dtype).eps * scale)


def random(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(v):
    return np.array([mpmath.mpf(a) for a in v.tolist()])


def exact_length(v):
    return mpmath.sqrt(v @ v)


def error_of(value, expected):
    """value - expected, entry by entry, subtracted with 50 digits."""
    return torch.tensor((exact(value) - expected).astype(float))


X, DELTA = torch.tensor([1.0, 0.0, 0.0], dtype=F64), torch.tensor([0.1, 0.2, -0.2], dtype=F64)


@pytest.mark.parametrize(
    ("function", "printed"),
    [
        (layer_step, [0.9684959969581862, 0.17609018126512476, -0.17609018126512476]),
        (retraction.retract_second_order, [0.96, 0.18, -0.18]),
        (retraction.retract_first_order, [1.0, 0.2, -0.2]),
        (retraction.retraction_angle, 0.25167766681977399),  # atan2(0.2 sqrt 2, 1.1)
    ],
)
def test_the_printed_digits(function, printed):
    assert ulps(function(X, DELTA) - torch.tensor(printed, dtype=F64), F64) <= 1  # 0.5


# The expansion --------------------------------------------------------------------------------------------------------


def expansion_terms(x, delta):
    """a, p and |p|^2 of the expansion."""
    a, p = (x * delta).sum(-1, keepdim=True), sphere.project(x, delta)
    return a, p, (p * p).sum(-1, keepdim=True)


def distances_to_the_limit(residual, limit, order):
    """|residual(h) / h^order - limit| / (h |limit|) for small h: bounded if residual(h) / h^order tends to limit."""
    return [float((residual(h) / h**order - limit).norm() / limit.norm()) / h for h in (1e-1, 1e-2, 1e-3)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("function", "order", "next_term"),
    [
        (retraction.retract_first_order, 2, lambda x, a, p, pp: -a * p - pp / 2 * x),
        (retraction.retract_second_order, 3, lambda x, a, p, pp: a * pp * x + (a * a - pp / 2) * p),
    ],
)
def test_the_error_over_a_power_of_the_step_tends_to_the_next_term(function, order, next_term, seed):
    """error / h^2 of the first-order and error / h^3 of the second-order expansion tend to the first omitted term."""
    x, delta = sphere.retract(random(6, seed=seed)), sphere.retract(random(6, seed=seed + 100))

    def residual(h):
        return layer_step(x, h * delta) - function(x, h * delta)

    assert max(distances_to_the_limit(residual, next_term(x, *expansion_terms(x, delta)), order)) < 1.1  # 1.000


@pytest.mark.parametrize(("dtype", "d"), [(F64, 2), (F64, 9), (F32, 2), (F32, 9)])
@DIGITS
def test_point_and_angle_in_50_digits_for_short_and_long_steps_and_near_the_center(dtype, d):
    for seed in range(30):
        x, w = sphere.retract(random(2, d, seed=seed))
        for delta in (1e-5 * w, w, 1e3 * w, -x + 1e-5 * w, -2 * x + 1e-3 * w, 1e-3 * w - 1.5 * x):
            p, step = x.to(dtype), delta.to(dtype)
            point, angle = layer_step(p, step), retraction.retraction_angle(p, step)
            p = exact(p)
            moved = p + exact(step)
            assert ulps(error_of(point, moved / exact_length(moved)), dtype) <= 1  # 0.85
            p = p / exact_length(p)
            theta = mpmath.atan2(exact_length(moved - (p @ moved) * p), p @ moved)
            assert ulps(float(mpmath.mpf(angle.item()) - theta), dtype, float(theta)) <= 2.5  # 1.9


def test_the_closed_form_of_the_point():
    x, delta = sphere.retract(random(1000, 4)), random(1000, 4, seed=1)
    a, p, pp = expansion_terms(x, delta)
    expected = ((1 + a) * x + p) / torch.sqrt((1 + a) ** 2 + pp)
    condition = 1 / torch.linalg.vector_norm(x + delta, dim=-1).min()
    assert ulps(layer_step(x, delta) - expected, F64, float(condition)) <= 1  # 0.57


def test_the_angle_is_the_geodesic_distance_and_stays_accurate_where_the_end_point_rounds():
    x, delta = sphere.retract(random(1000, 4)), random(1000, 4, seed=1)
    moved = layer_step(x, delta)
    assert ulps(retraction.retraction_angle(x, delta) - sphere.angle(x, moved), F64) <= 3  # 2.0
    tiny = 1e-12 * sphere.project(x, delta)
    true = torch.linalg.vector_norm(tiny, dim=-1)  # atan2(t, 1) = t - t^3 / 3
    assert ulps((retraction.retraction_angle(x, tiny) - true) / true, F64) <= 3  # 2.4
    from_points = sphere.angle(x, layer_step(x, tiny))
    assert ((from_points - true) / true).abs().max() > 1e-5


def test_zero_steps_and_steps_parallel_to_x():
    x = torch.eye(3, dtype=F64)[0]
    angle = retraction.retraction_angle
    assert angle(x, 0 * x) == angle(x, 3 * x) == angle(x, -0.5 * x) == 0
    assert angle(x, -1.5 * x) == torch.pi
    assert angle(x, -x).isnan()
    assert layer_step(x, -x).isnan().all()
    assert torch.equal(layer_step(x, -1.5 * x), -x)


# The residual stream --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_direction_of_a_pre_norm_stream_moves_by_f_over_its_norm(seed):
    """Residuals / s^2, s the scale of f, tend to -a p - |p|^2 x / 2 and |y| |p|^2 / 2 for delta = f / |y|."""
    y, f = 3 * random(8, seed=seed), random(8, seed=seed + 50)
    norm = y.norm()
    a, p, pp = expansion_terms(y / norm, f / norm)
    for which, limit in enumerate([-a * p - pp / 2 * y / norm, norm * pp / 2]):

        def residual(s, which=which):
            full, first_order = retraction.direction_step(y, s * f), retraction.direction_step_first_order(y, s * f)
            return full[which] - first_order[which]

        assert max(distances_to_the_limit(residual, limit, 2)) < 0.6  # 0.53


def test_the_step_of_the_direction_shrinks_as_the_stream_grows():
    y, f = random(5), random(5, seed=1)
    x = sphere.retract(y)
    for growth in (1.0, 10.0, 1e3):
        direction, radius = retraction.direction_step_first_order(growth * y, f)
        expected = sphere.project(x, f) / (growth * y.norm())
        assert ulps(direction - x - expected, F64) <= 0.5  # 0.36
        assert ulps(radius - growth * y.norm() - x @ f, F64, growth * float(y.norm())) <= 0.5  # 0.34


def test_direction_and_norm_are_the_polar_form_of_the_sum():
    y, f = random(4, 3, 5), random(4, 3, 5, seed=1)
    direction, radius = retraction.direction_step(y, f)
    assert ulps(direction * radius.unsqueeze(-1) - (y + f), F64, 4) <= 1  # 0.5
    assert ulps(layer_step(sphere.retract(y), f / y.norm(dim=-1, keepdim=True)) - direction, F64) <= 2  # 1.0


@pytest.mark.parametrize(
    ("dtype", "sizes"), [(F64, [1e-300, 1e-13, 1.0, 1e13, 1e300]), (F32, [1e-36, 1e-13, 1.0, 1e13, 1e36])]
)
@DIGITS
def test_length_of_tiny_and_huge_vectors(dtype, sizes):
    for size in sizes:
        v = (size * random(7)).to(dtype)
        expected = exact_length(exact(v))
        assert abs(float(mpmath.mpf(retraction.length(v).item()) / expected - 1)) <= 2 * torch.finfo(dtype).eps  # 1.3
    zero = torch.zeros(3, 2, dtype=dtype, requires_grad=True)
    assert torch.equal(retraction.length(zero), torch.zeros(3, dtype=dtype))
    assert torch.equal(*torch.autograd.grad(retraction.length(zero).sum(), zero), torch.zeros(3, 2, dtype=dtype))


# Derivatives and batches ----------------------------------------------------------------------------------------------

FUNCTIONS = [
    layer_step,
    retraction.retract_first_order,
    retraction.retract_second_order,
    retraction.retraction_angle,
    lambda x, v: retraction.direction_step(2 * x, v),
    lambda x, v: retraction.direction_step_first_order(2 * x, v),
]


@pytest.mark.parametrize("d", [2, 5])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_right(function, d):
    x, delta = sphere.retract(random(3, d, seed=d)), random(3, d, seed=d + 1)
    inputs = (x.requires_grad_(), delta.requires_grad_())
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, atol=1e-7, rtol=1e-7)
    one_by_one = torch.func.vmap(function)(x, delta)
    for vmapped, batched in zip(
        *(r if isinstance(r, tuple) else (r,) for r in (one_by_one, function(*inputs))), strict=True
    ):
        assert torch.equal(vmapped, batched)


def test_the_gradient_of_the_angle_at_a_right_angle_and_for_parallel_steps():
    """d atan2(P, A) = (A dP - P dA) / (A^2 + P^2), which at A = 0 is -dA / P; at P = 0 the subgradient is 0."""
    x = torch.eye(3, dtype=F64)[0]
    right = torch.tensor([-1.0, 2.0, 0.0], dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(retraction.retraction_angle(x, right), right)
    assert torch.equal(slope, torch.tensor([-0.5, 0.0, 0.0], dtype=F64))
    for factor in (0.0, 3.0, -1.5):
        parallel = (factor * x).requires_grad_()
        (slope,) = torch.autograd.grad(retraction.retraction_angle(x, parallel), parallel)
        assert torch.equal(slope, torch.zeros(3, dtype=F64))


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("d", [2, 3, 8, 33])
def test_a_system_alone_and_in_a_batch_give_the_same_bits(dtype, d):
    x, delta = sphere.retract(random(11, 5, d, dtype=dtype)), random(11, 5, d, seed=1, dtype=dtype)
    for function in FUNCTIONS:
        batched = function(x, delta)
        for i in range(11):
            alone = function(x[i], delta[i])
            pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (batched, alone)), strict=True)
            assert all(torch.equal(many[i], one) for many, one in pairs)
