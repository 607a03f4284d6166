"""The oracles against printed numbers and identities of theory [Geshkovski et al. 2023; Mean-field notes], so that they
may judge."""

from __future__ import annotations

import math
import random

import pytest

from support import oracles

BOTH = [oracles.sa_velocity, oracles.usa_velocity]
ASYMMETRIC = [[0.9, 0.7, -0.2], [-0.4, 0.3, 0.5], [0.1, -0.8, 1.1]]
SYMMETRIC = [[0.9, 0.3, -0.2], [0.3, -0.6, 0.5], [-0.2, 0.5, 1.1]]


def close(value, abs=1e-14):
    """Absolute error only: pytest's default would add a relative 1e-6."""
    return pytest.approx(value, rel=0, abs=abs)


def unit(v):
    return [a / math.hypot(*v) for a in v]


def tokens(n, d, seed):
    rng = random.Random(seed)
    return [unit([rng.gauss(0, 1) for _ in range(d)]) for _ in range(n)]


def circle(angles):
    return [[math.cos(a), math.sin(a)] for a in angles]


def angles_of(x):
    return [math.atan2(x_i[1], x_i[0]) for x_i in x]


def identity(d, sign=1.0):
    return [[sign if a == b else 0.0 for b in range(d)] for a in range(d)]


def inner(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def equiangular(n, g):
    """n tokens with <x_i, x_j> = g: N(e_i + c 1) with (2c + n c^2) / (1 + 2c + n c^2) = g."""
    c = (-1 + math.sqrt(1 + n * g / (1 - g))) / n
    return [unit([(i == j) + c for j in range(n)]) for i in range(n)]


def gram_rate(x, v, i=0, j=1):
    return inner(v[i], x[j]) + inner(x[i], v[j])


# Printed numbers ------------------------------------------------------------------------------------------------------


def test_layer_is_the_printed_post_norm_step():
    x = [[1.0, 0.0], [0.0, 1.0], [-0.6, 0.8]]
    after = oracles.layer(x, 1.0)
    printed = [
        [0.977417347820763, 0.211318073479352],
        [-0.032094863198758, 0.999484827176608],
        [-0.445633128164676, 0.895215680761997],
    ]
    for row, expected in zip(after, printed, strict=True):
        assert row == close(expected, 1e-15)
    assert oracles.interaction_energy(x, 1.0) == close(0.872419478586118, 1e-15)
    assert oracles.interaction_energy(after, 1.0) == close(0.9486713872291129, 4e-16)


@pytest.mark.parametrize(
    ("velocity", "beta", "expected"),
    [
        (oracles.sa_velocity, 0.0, [0.524505838228189557, 1.07067600493301722, 1.90481815683879322]),
        (oracles.sa_velocity, 1.0, [0.359879726038076557, 0.965195865808413172, 2.12615488595524937]),
        (oracles.sa_velocity, 4.0, [0.146847902074826631, 0.872015509371833433, 2.4795475960362641]),
        (oracles.usa_velocity, 1.0, [0.66555976081394756, 1.00335041729748177, 1.83108982188857067]),
    ],
)
def test_flow_reaches_the_printed_particles(velocity, beta, expected):
    """The 13 printed digits, continued by a 25-digit Taylor solution of the equations of the angles."""
    x = oracles.flow(lambda x: velocity(x, beta), circle([0.0, 1.0, 2.5]), 1.0, 1280)
    assert angles_of(x) == close(expected, 1.5e-14)  # measured 1.1e-14


def test_energy_has_the_printed_extremes():
    printed = {
        1.0: (0.633032938876004, 1.35914091422952),
        4.0: (1.41274024401704, 6.82476875414303),
        9.0: (60.7549085839653, 450.171329309744),
    }
    even = circle([2 * math.pi * k / 48 for k in range(48)])  # equal to the uniform law up to I_48(9) ~ 1e-30
    for beta, (least, greatest) in printed.items():
        assert oracles.interaction_energy(even, beta) == pytest.approx(least, rel=5e-15, abs=0)
        assert oracles.interaction_energy([[0.6, 0.8]] * 3, beta) == pytest.approx(greatest, rel=5e-15, abs=0)
    triangle = circle([2 * math.pi * k / 3 for k in range(3)])
    assert oracles.interaction_energy(triangle, 1.0) == close(0.6552238579807187, 2e-16)


def test_two_tokens_meet_at_the_printed_time():
    x = oracles.flow(lambda x: oracles.sa_velocity(x, 1.0), circle([0.0, math.pi / 2]), 4.27106768030934, 400)
    assert inner(*x) == close(0.999, 1e-12)  # measured 6e-13


def test_orthonormal_tokens_follow_the_printed_gamma():
    x = oracles.flow(lambda x: oracles.sa_velocity(x, 1.0), identity(32), 1.0, 32)
    assert [inner(x[0], x[1]), inner(x[5], x[30])] == close([0.15184933554388] * 2, 2e-9)  # RK4 of step 1/32: 1.3e-9


# Identities -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0, 9.0])
def test_equiangular_tokens_move_by_the_closed_form(beta):
    n, g = 7, 0.3
    x = equiangular(n, g)
    common = 2 * math.exp(beta * g) * (1 - g) * ((n - 1) * g + 1)
    z = math.exp(beta) + (n - 1) * math.exp(beta * g)
    assert gram_rate(x, oracles.sa_velocity(x, beta), 2, 5) == close(common / z, 1e-15)
    # the projection takes out a radial part of about z / n, and leaves its rounding
    assert gram_rate(x, oracles.usa_velocity(x, beta), 2, 5) == close(common / n, math.ulp(1.0) * z / n)
    if beta > 0:
        assert oracles.interaction_energy(x, beta) == pytest.approx(z / (2 * beta * n), rel=1e-14, abs=0)


def test_kuramoto_in_the_plane():
    theta = [0.3, 1.1, 2.9, -2.0, -0.4]
    x = circle(theta)

    def turning(v):
        return [x_i[0] * v_i[1] - x_i[1] * v_i[0] for x_i, v_i in zip(x, v, strict=True)]

    def mean(f):
        return [sum(f(b - a) for b in theta) / len(theta) for a in theta]

    sin, cos = mean(math.sin), mean(math.cos)
    product = mean(lambda a: math.sin(a) * math.cos(a))
    assert turning(oracles.sa_velocity(x, 0.0)) == close(sin, 4e-16)
    assert turning(oracles.usa_velocity(x, 0.0)) == close(sin, 4e-16)
    assert turning(oracles.usa_velocity(x, 3.0)) == close(
        mean(lambda a: math.exp(3 * math.cos(a)) * math.sin(a)), 1e-14
    )
    first_order = [s + 1e-3 * (p - s * c) for s, c, p in zip(sin, cos, product, strict=True)]
    assert turning(oracles.sa_velocity(x, 1e-3)) == close(first_order, 3e-7)
    assert turning(oracles.sa_velocity(x, 1e-3)) != close(sin, 1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("matrix", [None, SYMMETRIC])
def test_energy_changes_by_the_squared_speed(sign, matrix):
    """(1/M) sum m_i (Z_i/M) |x_i'|^2 for SA, (1/M) sum m_i |x_i'|^2 for USA, where V = +-B and B = B^T."""
    x, beta, n = tokens(6, 3, seed=1), 1.7, 6
    m, mask = [0.5, 2.0, 1.0, 3.0, 1.5, 0.7], [True, True, False, True, True, True]
    value = [[sign * a for a in row] for row in matrix or identity(3)]
    for weights, real in ((None, None), (m, mask)):
        options = {"weights": weights, "mask": real, "query_key": matrix}
        share = [(weights[i] if weights else 1.0) * (real is None or real[i]) for i in range(n)]
        total = sum(share)
        z = [total * sum(row) for row in oracles.usa_kernel(x, beta, **options)]
        sa = oracles.sa_velocity(x, beta, value=value, **options)
        usa = oracles.usa_velocity(x, beta, value=value, **options)
        by_sa = sum(share[i] * z[i] * inner(sa[i], sa[i]) for i in range(n)) / total**2
        by_usa = sum(share[i] * inner(usa[i], usa[i]) for i in range(n)) / total
        assert by_sa > 0.01
        assert oracles.interaction_energy_rate(x, sa, beta, **options) == close(sign * by_sa)
        assert oracles.interaction_energy_rate(x, usa, beta, **options) == close(sign * by_usa)


def test_energy_rate_is_the_derivative_of_the_energy():
    x, v, beta = tokens(5, 3, seed=2), tokens(5, 3, seed=3), 1.3
    options = {"query_key": ASYMMETRIC, "weights": [1.0, 0.5, 2.0, 1.5, 3.0], "mask": [True, True, True, False, True]}

    def energy(h):
        moved = [[a + h * b for a, b in zip(x_i, v_i, strict=True)] for x_i, v_i in zip(x, v, strict=True)]
        return oracles.interaction_energy(moved, beta, **options)

    h = 1e-3
    slope = (8 * (energy(h) - energy(-h)) - (energy(2 * h) - energy(-2 * h))) / (12 * h)
    assert oracles.interaction_energy_rate(x, v, beta, **options) == close(slope, 1e-12)


def test_gaussian_energy_is_the_scaled_sum():
    for seed, beta in ((4, 0.5), (5, 2.0), (6, 9.0)):
        x = tokens(8, 4, seed)
        assert oracles.gaussian_energy(x, beta) == close(beta * math.exp(-beta) * oracles.energy_sum(x, beta))
        assert oracles.energy_sum(x, beta) == pytest.approx(64 * oracles.interaction_energy(x, beta), rel=1e-15, abs=0)


def test_sa_is_the_gradient_of_log_z():
    """With V = B, beta times the ambient field is the gradient in the query of log sum_j m_j e^{beta q^T B x_j}."""
    x, beta, h, m = tokens(5, 3, seed=7), 1.6, 1e-3, [1.0, 0.5, 2.0, 1.5, 3.0]
    ambient = oracles.sa_ambient(x, beta, query_key=ASYMMETRIC, value=ASYMMETRIC, weights=m)
    keys = [[inner(row, x_j) for row in ASYMMETRIC] for x_j in x]
    for i in range(5):
        for a in range(3):

            def log_z(step, i=i, a=a):
                q = [x[i][b] + step * (a == b) for b in range(3)]
                return math.log(sum(m[j] * math.exp(beta * inner(q, keys[j])) for j in range(5)))

            slope = (8 * (log_z(h) - log_z(-h)) - (log_z(2 * h) - log_z(-2 * h))) / (12 * h)
            assert beta * ambient[i][a] == close(slope, 1e-11)


def test_kernels_normalize_as_they_say():
    x = tokens(6, 3, seed=8)
    for row in oracles.sa_kernel(x, 3.0, query_key=ASYMMETRIC, causal=True, weights=[1.0, 2.0, 0.5, 0.0, 1.0, 4.0]):
        assert sum(row) == close(1.0, 4e-16)
    assert [sum(row) for row in oracles.usa_kernel(x, 0.0)] == close([1.0] * 6, 4e-16)
    assert oracles.sa_kernel(x, 1e6) == [[float(i == j) for j in range(6)] for i in range(6)]
    assert sum(oracles.sa_kernel(x, 1e6, weights=[0.0] + [1.0] * 5)[0]) == 1.0  # the nearest key has no weight
    blind = [[-math.inf] * 6, *[[0.0] * 6] * 5]
    assert oracles.sa_kernel(x, 1.0, bias=blind) == [[0.0] * 6, *oracles.sa_kernel(x, 1.0)[1:]]
    assert oracles.sa_kernel(x, 1.0, causal=True, mask=[False] + [True] * 5)[0] == [0.0] * 6
    assert oracles.usa_kernel(x, 1.0, causal=True, mask=[False] + [True] * 5)[0] == [0.0] * 6


# Symmetries of weights, mask, order and bias --------------------------------------------------------------------------


@pytest.mark.parametrize("velocity", BOTH)
def test_a_token_of_weight_two_is_two_tokens(velocity):
    x = tokens(4, 3, seed=9)
    twice, m = [*x, x[1]], [1.0, 2.0, 1.0, 1.0]
    options = {"query_key": ASYMMETRIC, "value": SYMMETRIC}
    heavy, split = velocity(x, 2.0, weights=m, **options), velocity(twice, 2.0, **options)
    for i in range(4):
        assert heavy[i] == close(split[i], 2e-15)
    assert split[4] == split[1]
    assert oracles.interaction_energy(x, 2.0, weights=m) == close(oracles.interaction_energy(twice, 2.0), 1e-15)
    assert oracles.order_parameter(x, m) == close(oracles.order_parameter(twice), 1e-15)
    merged = oracles.merge(twice, [1.0] * 5, 1e-9)
    assert [weight for _, weight in merged] == m
    for (position, _), x_i in zip(merged, x, strict=True):
        assert position == close(x_i, 4e-16)


@pytest.mark.parametrize("velocity", BOTH)
def test_a_padded_token_is_a_passive_tracer(velocity):
    x, m = tokens(5, 3, seed=10), [1.0, 2.0, 5.0, 0.5, 1.5]
    mask, kept = [True, True, False, True, True], [0, 1, 3, 4]
    padded = velocity(x, 2.0, weights=m, mask=mask)
    without = velocity([x[i] for i in kept], 2.0, weights=[m[i] for i in kept])
    weightless = velocity(x, 2.0, weights=[1.0, 2.0, 0.0, 0.5, 1.5])
    for i, row in zip(kept, without, strict=True):
        assert padded[i] == close(row, 1e-15)
    for row, expected in zip(padded, weightless, strict=True):
        assert row == close(expected, 1e-15)
    assert math.hypot(*padded[2]) > 0.1


def test_a_causal_query_sees_its_prefix():
    x, bias = tokens(5, 3, seed=11), [[0.1 * i - 0.3 * j for j in range(5)] for i in range(5)]
    sa = oracles.sa_velocity(x, 2.0, bias=bias, causal=True)
    usa = oracles.usa_velocity(x, 2.0, bias=bias, causal=True)
    for i in range(5):
        prefix, shown = x[: i + 1], [row[: i + 1] for row in bias[: i + 1]]
        assert sa[i] == close(oracles.sa_velocity(prefix, 2.0, bias=shown)[i], 1e-15)
        scaled = [5 / (i + 1) * a for a in usa[i]]  # M stays the number of all tokens
        assert scaled == close(oracles.usa_velocity(prefix, 2.0, bias=shown)[i], 2e-14)


def test_a_bias_is_the_logarithm_of_a_weight():
    x, m = tokens(4, 3, seed=12), [0.5, 2.0, 1.0, 3.0]
    bias = [[math.log(m_j) for m_j in m] for _ in x]
    for row, expected in zip(oracles.sa_kernel(x, 2.0, bias=bias), oracles.sa_kernel(x, 2.0, weights=m), strict=True):
        assert row == close(expected, 1e-15)
    uneven = oracles.logits(x, 2.0, bias=[[10.0 * i + j for j in range(4)] for i in range(4)])
    assert uneven[3][1] - oracles.logits(x, 2.0)[3][1] == close(31.0)


def test_logits_put_the_query_on_the_left_and_hide_padded_keys():
    x, matrix = [[1.0, 0.0], [0.0, 1.0]], [[1.0, 3.0], [5.0, 7.0]]
    assert oracles.logits(x, 2.0, query_key=matrix) == [[2.0, 6.0], [10.0, 14.0]]
    assert oracles.logits(x, 2.0, query_key=matrix, mask=[True, False]) == [[2.0, None], [10.0, None]]


def test_flow_is_of_fourth_order_and_stays_on_the_sphere():
    def end(steps):
        return oracles.flow(lambda x: oracles.usa_velocity(x, 1.0), tokens(4, 3, seed=13), 2.0, steps)

    best = end(320)
    errors = [max(math.dist(a, b) for a, b in zip(end(steps), best, strict=True)) for steps in (20, 40)]
    assert math.log2(errors[0] / errors[1]) == close(4.0, 0.2)
    assert [math.hypot(*x_i) for x_i in best] == close([1.0] * 4, 4e-16)


# The shape of a cloud of tokens ---------------------------------------------------------------------------------------


def test_pairs_on_an_even_circle():
    x = circle([2 * math.pi * k / 12 for k in range(12)])
    assert oracles.close_pair_share(x, 0.14) == 2 / 11  # cos 30 = 0.866
    assert oracles.close_pair_share(x, 0.13) == 0.0
    assert oracles.close_pair_share(x, 0.51, mask=[True] * 3 + [False] * 9) == 1.0
    # per token: 180; 150, 120 twice; 90 twice; 60, 30 twice
    shares = oracles.histogram(x, [-1.0, -0.9, -0.1, 0.1, 1.0])
    assert shares == close([1 / 11, 4 / 11, 2 / 11, 4 / 11])
    assert oracles.histogram([[1.0, 0.0], [0.0, 1.0]], [-1.0, 0.0, 1.0]) == [0.0, 1.0]  # a bin holds its left edge
    twin = unit([0.1, 0.7, 0.3])
    assert oracles.histogram([twin] * 3, [0.0, 0.5, 1.0]) == [0.0, 1.0]  # the last bin holds its right edge
    assert oracles.order_parameter(x) == close(0.0, 1e-16)


def test_single_linkage_on_the_circle():
    x = circle([0.0, 3.0, 0.5, 3.2, 1.1, 5.0])  # gaps in order of angle: 0.5, 0.6, 1.9, 0.2, 1.8, 1.283 (around)
    around = 2 * math.pi - 5.0
    assert oracles.merge_heights(x) == close([0.2, 0.5, 0.6, around, 1.8], 1e-15)
    assert oracles.cluster_labels(x, 0.55) == [0, 1, 0, 1, 4, 5]
    assert oracles.cluster_labels(x, 0.65) == [0, 1, 0, 1, 0, 5]
    assert oracles.cluster_labels(x, 1.5) == [0, 1, 0, 1, 0, 0]
    positions = oracles.merge(x, [1.0, 1.0, 1.0, 3.0, 1.0, 1.0], 0.3)
    expected = math.atan2(math.sin(3.0) + 3 * math.sin(3.2), math.cos(3.0) + 3 * math.cos(3.2))
    assert positions[1] == (close([math.cos(expected), math.sin(expected)], 4e-16), 4.0)


def test_counts_and_merge_heights_tell_one_story():
    x = tokens(12, 3, seed=14)
    heights = oracles.merge_heights(x)
    assert len(heights) == 11
    for k in range(10):
        radius = (heights[k] + heights[k + 1]) / 2
        assert oracles.cluster_count(x, radius) == 11 - k


# Ranks and residuals --------------------------------------------------------------------------------------------------


def test_ranks_of_known_singular_values():
    """X = (columns of a rotation) diag(4, 2, 1) (a reflection), tall and wide."""
    u, v = unit([1.0, -2.0, 0.5, 3.0, 1.0]), unit([1.0, 2.0, -3.0])
    left = [[(i == a) - 2 * u[i] * u[a] for a in range(3)] for i in range(5)]
    right = [[(a == b) - 2 * v[a] * v[b] for b in range(3)] for a in range(3)]
    s = [4.0, 2.0, 1.0]
    tall = [[sum(left[i][a] * s[a] * right[a][b] for a in range(3)) for b in range(3)] for i in range(5)]
    for x in (tall, [list(column) for column in zip(*tall, strict=True)]):
        assert oracles.participation_ratio(x) == close(21**2 / 273)
        assert oracles.stable_rank(x) == close(21 / 16)
        assert oracles.nuclear_rank(x) == close(7 / 4)
        entropy = math.log(7) - (4 * math.log(4) + 2 * math.log(2)) / 7
        assert oracles.effective_rank(x) == close(math.exp(entropy))
        assert [oracles.numerical_rank(x, tol) for tol in (0.2, 0.3, 0.6)] == [3, 2, 1]


def test_ranks_at_the_extremes():
    same, apart = [unit([1.0, 2.0, 2.0])] * 4, identity(4)
    for rank in (oracles.effective_rank, oracles.participation_ratio, oracles.stable_rank, oracles.nuclear_rank):
        assert rank(same) == close(1.0)
        assert rank(apart) == close(4.0)
    assert oracles.numerical_rank(same, 1e-25) == 1
    assert oracles.numerical_rank(apart, 1e-25) == 4


def test_residuals_by_hand():
    x = [
        [1.0, 0.0],
        [0.0, 1.0],
        [-1.0, 0.0],
        [0.0, 1.0],
    ]  # mean (0, 1/2): R = (1, -1/2), (0, 1/2), (-1, -1/2), (0, 1/2)
    assert oracles.collapse_residual_frobenius(x) == close(math.sqrt(3), 4e-16)
    assert oracles.collapse_residual_frobenius(x, relative=True) == close(math.sqrt(3) / 2, 4e-16)
    assert oracles.collapse_residual_composite(x) == close(math.sqrt(2 * 1.5), 4e-16)  # column 2 against 2, row 3/2
    assert oracles.collapse_residual_composite(x, relative=True) == close(math.sqrt(3) / math.sqrt(2), 4e-16)
    assert oracles.collapse_residual_composite([[0.6, 0.8]] * 3) == close(0.0, 2e-16)
