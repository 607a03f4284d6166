"""SA and USA against loops, 500-digit arithmetic and the closed forms of theory."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helmscope.fields.attention import SA, USA
from helmscope.fields.field import Field
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.geometry.sphere import project, retract
from helmscope.types import HelmscopeError
from support.attention_cases import (
    BOTH,
    COMBINATIONS,
    F32,
    F64,
    FEATURES,
    assert_oracle,
    circle,
    exact_velocity,
    measure,
    normal,
    oracle,
    parameters,
    relative_errors,
    rotation,
    tokens,
)

# ---- oracles


@BOTH
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_loop_oracle(kind, names):
    for seed, (beta, n) in enumerate(product([0.0, 0.5, 4.0, 20.0], [1, 2, 3, 4, 6])):
        d = 2 + seed % 3
        assert_oracle(
            kind(beta, **parameters(names, n, d, seed)), tokens(n, d, seed=seed), measure(names, n, seed=seed)
        )


@BOTH
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    names=st.sets(st.sampled_from(FEATURES)),
    n=st.integers(1, 6),
    d=st.integers(2, 4),
    beta=st.sampled_from([0.0, 0.5, 4.0, 20.0]),
    seed=st.integers(0, 2**16),
)
def test_loop_oracle_of_any_combination(kind, names, n, d, beta, seed):
    assert_oracle(kind(beta, **parameters(names, n, d, seed)), tokens(n, d, seed=seed), measure(names, n, seed=seed))


@BOTH
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_batched_systems_equal_single_systems(kind, names):
    x = tokens(2, 3, 4, 3)
    field, given = kind(4.0, **parameters(names, 4, 3)), measure(names, 2, 3, 4)
    together = field(x, **given)
    for a, b in product(range(2), range(3)):
        expected = oracle(field, "velocity", x[a, b], {name: part[a, b] for name, part in given.items()})
        assert (together[a, b] - expected).abs().max() <= 1e-12 * max(1, math.exp(4) * (kind is USA))
    row = {name: part[0, 0] for name, part in given.items()}  # one row of weights serves all members
    assert torch.equal(field(x, **row), field(x, **{name: part.expand(2, 3, 4) for name, part in row.items()}))


@BOTH
def test_relative_accuracy_of_the_velocity(kind):
    """The own term, left out, cannot swallow the rest: every digit stays, also where SA is metastable."""
    for seed, beta in product(range(5), [0.5, 4.0, 20.0, 40.0]):
        x, weights = tokens(4, 3, seed=seed), normal(4, seed=seed).abs()
        assert max(relative_errors(kind(beta)(x), exact_velocity(kind, beta, x))) < 5e-14  # measured 1.2e-14
        exact = exact_velocity(kind, beta, x, weights)
        assert max(relative_errors(kind(beta)(x, weights=weights), exact)) < 5e-14


@pytest.mark.parametrize("angle", [math.pi / 2, 2.0, 3.0])
def test_metastable_pair(angle):
    x = circle(torch.tensor([0.0, angle], dtype=F64))
    v = SA(40.0)(x)
    assert v.norm(dim=-1).max() < 5e-18
    assert max(relative_errors(v, exact_velocity(SA, 40.0, x))) < 3e-14  # measured 1.1e-14
    exact = torch.eye(2, dtype=F64).flip(0) / (1 + math.exp(40))
    assert torch.allclose(SA(40.0)(torch.eye(2, dtype=F64)), exact, rtol=2e-16, atol=0)


# ---- closed forms of theory


def test_zero_beta_is_the_projected_mean():
    x = tokens(7, 4)
    assert (SA(0.0)(x) - project(x, x.mean(0).expand_as(x))).abs().max() < 3e-16
    assert (USA(0.0)(x) - SA(0.0)(x)).abs().max() < 3e-16


@pytest.mark.parametrize("n", [2, 3, 32])
@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0, 9.0])
@pytest.mark.parametrize("g", [0.0, 0.3, 0.9])
def test_equiangular_rate(n, beta, g):
    c = (-1 + math.sqrt(1 + n * g / (1 - g))) / n  # N(e_i + c 1) have <x_i, x_j> = g
    x = retract(torch.eye(n, dtype=F64) + c)
    pull = math.exp(beta * g) * (1 - g) * ((n - 1) * g + 1)
    expected = {SA: 2 * pull / (math.exp(beta) + (n - 1) * math.exp(beta * g)), USA: 2 / n * pull}
    for kind, rate in expected.items():
        v = kind(beta)(x)
        rates = (v @ x.mT + x @ v.mT)[~torch.eye(n, dtype=torch.bool)]
        assert torch.allclose(rates, torch.full_like(rates, rate), rtol=2e-14, atol=0)  # measured 6e-15


def test_the_circle_is_kuramoto():
    angles = torch.tensor([0.0, 1.0, 2.5, -2.0, 0.3], dtype=F64)
    x, tangent = circle(angles), circle(angles + math.pi / 2)
    gap = angles - angles[:, None]
    sin, cos = gap.sin(), gap.cos()

    def speed(field):
        v = field(x)
        assert (v - (v * tangent).sum(-1, keepdim=True) * tangent).abs().max() < 1e-15 * (1 + v.abs().max())
        return (v * tangent).sum(-1)

    assert (speed(SA(0.0)) - sin.mean(-1)).abs().max() < 1e-15
    assert (speed(USA(0.7)) - ((0.7 * cos).exp() * sin).mean(-1)).abs().max() < 1e-15
    first = (sin * cos).mean(-1) - sin.mean(-1) * cos.mean(-1)
    left = [(speed(SA(beta)) - sin.mean(-1) - beta * first).abs().max().item() for beta in (1e-2, 1e-3)]
    assert left[0] < 1e-4
    assert left[0] / left[1] == pytest.approx(100, rel=0.01)  # what is left is of second order


def test_sa_is_the_gradient_of_log_z_and_usa_of_z():
    x, beta = tokens(5, 3), 3.0
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.5], dtype=F64)
    query = x.clone().requires_grad_()
    z = (weights * torch.exp(beta * query @ x.mT)).sum(-1)
    (of_log,) = torch.autograd.grad(z.log().sum(), query, retain_graph=True)
    (of_z,) = torch.autograd.grad(z.sum(), query)
    assert (SA(beta)(x, weights=weights) - project(x, of_log) / beta).abs().max() < 1e-15
    assert (USA(beta)(x, weights=weights) - project(x, of_z) / (beta * weights.sum())).abs().max() < 2e-14


@BOTH
@pytest.mark.parametrize("beta", [0.0, 1.0, 20.0, 800.0])
def test_one_token_stays(kind, beta):
    for x in (tokens(1, 3), tokens(6, 1, 3)):
        assert torch.equal(kind(beta)(x), torch.zeros_like(x))
        assert torch.equal(kind(beta, value=-torch.eye(3), causal=True)(x), torch.zeros_like(x))


# ---- beyond the range of exponentials


@pytest.mark.parametrize(("dtype", "beta", "bound"), [(F64, 1000.0, 1e-12), (F32, 200.0, 5e-5)])
def test_scaled_velocity(dtype, beta, bound):
    """Digits end where those of beta <x_i, x_j> do; measured 2e-13 and 1.7e-5."""
    for seed in range(3):
        x = retract(tokens(4, 3, seed=seed) + 2 * tokens(3, seed=9)).to(
            dtype
        )  # in a cap: e^{beta <x_i, x_j>} overflows
        scaled = USA(beta).scaled_velocity(x)
        assert scaled.direction.dtype == scaled.log_scale.dtype == dtype
        assert scaled.direction.abs().max() < 1
        assert max(relative_errors(scaled.direction, exact_velocity(USA, beta, x), scaled.log_scale)) < bound
        with pytest.raises(HelmscopeError, match=r"beta is \d+, and the velocity overflows torch.*\.scaled_velocity"):
            USA(beta)(x)


def test_scaled_velocity_of_moderate_size_is_the_velocity():
    x, weights = tokens(2, 4, 3), normal(2, 4).abs()
    scaled = USA(4.0).scaled_velocity(x, weights)
    assert torch.allclose(scaled.log_scale.exp() * scaled.direction, USA(4.0)(x, weights=weights), rtol=1e-15, atol=0)
    half = scaled.displacement(0.5)
    assert torch.allclose(half, USA(4.0)(x, weights=weights) / 2, rtol=1e-14, atol=0)
    steps = torch.tensor([0.0, 2.0], dtype=F64)[:, None, None]  # one duration a system
    assert torch.allclose(scaled.displacement(steps), half * 2 * steps, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_displacement_is_finite_where_the_product_is(dtype):
    scaled = ScaledVelocity(torch.tensor([[1e-30, 0.0]], dtype=dtype), torch.full((1, 1), 100.0, dtype=dtype))
    expected = torch.tensor([[1e-30 * math.exp(100), 0.0]], dtype=dtype)
    assert torch.allclose(scaled.displacement(1.0), expected, rtol=2e-6, atol=0)
    huge = ScaledVelocity(torch.tensor([[0.5, 0.0]], dtype=dtype), torch.full((1, 1), 700.0, dtype=dtype))
    expected = huge.direction * math.exp(700 - 300 * math.log(10))
    assert torch.allclose(huge.displacement(1e-300), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("names", [[], ["causal"], ["minus"]], ids="+".join)
def test_usa_raises_only_where_it_overflows(names):
    """Orthogonal tokens move at the rate 1/n whatever beta is, and .scaled_velocity keeps them under any mask."""
    x = torch.eye(3, dtype=F64)
    field, calm = (USA(beta, **parameters(names, 3, 3)) for beta in (1000.0, 1.0))
    assert torch.allclose(field(x), calm(x), rtol=1e-15, atol=0)
    scaled = field.scaled_velocity(x)
    assert torch.allclose(scaled.displacement(1.0), calm(x), rtol=1e-15, atol=0)


# ---- measures: weights, padding, order


@BOTH
def test_weight_two_is_two_tokens(kind):
    a, b, c = tokens(3, 3)
    pair = kind(4.0)(torch.stack([a, a, b, c]))
    whole = kind(4.0)(torch.stack([a, b, c]), weights=torch.tensor([2.0, 1.0, 1.0]))
    parts = kind(4.0)(torch.stack([a, a, b, c]), weights=torch.tensor([1.5, 0.5, 1.0, 1.0]))
    size = 2e-15 * max(1, math.exp(4) * (kind is USA))  # the own term of e^beta is only rounded away
    assert (pair[1:] - whole).abs().max() < size
    assert (parts[1:] - whole).abs().max() < size
    assert (parts[0] - parts[1]).abs().max() < size


@BOTH
@pytest.mark.parametrize("names", [[], ["query_key", "value"], ["causal"]], ids="+".join)
def test_padding_changes_nothing(kind, names):
    x, field = tokens(4, 3), kind(4.0, **parameters(names, 4, 3))
    mask = torch.tensor([True] * 4 + [False] * 3)
    padded = [field(torch.cat([x, garbage]), mask=mask)[:4] for garbage in (tokens(3, 3, seed=1), x[[0, 0, 2]])]
    size = 1e-15 * max(1, math.exp(4) * (kind is USA))
    assert (padded[0] - field(x)).abs().max() < size
    assert torch.equal(padded[0], padded[1])
    zero = field(torch.cat([x, x[:3]]), weights=torch.tensor([1.0] * 4 + [0.0] * 3))
    assert torch.equal(padded[0], zero[:4])


def test_padding_beside_a_token_changes_nothing_at_large_beta():
    x = torch.eye(3, dtype=F64)
    velocity = USA(800.0).velocity(torch.cat([x, x[:1]]), torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=F64))
    assert torch.allclose(velocity[:3], USA(800.0)(x), rtol=1e-15, atol=0)


@BOTH
@pytest.mark.parametrize("names", [["causal"], ["causal", "query_key", "value", "bias"]], ids="+".join)
def test_causal_velocity_ignores_later_tokens(kind, names):
    x, field = tokens(6, 3), kind(4.0, **parameters(names, 6, 3))
    for i in range(6):
        for later in (tokens(5 - i, 3, seed=1), x[:1].expand(5 - i, 3)):
            assert torch.equal(field(torch.cat([x[: i + 1], later]))[: i + 1], field(x)[: i + 1])


@BOTH
def test_equivariance(kind):
    x, given = tokens(5, 3), measure(["weights", "mask"], 5)
    turn, order = rotation(3), torch.tensor([3, 0, 4, 1, 2])
    bound = 1e-14 * (50 if kind is USA else 1)
    b, v = normal(3, 3, seed=1), normal(3, 3, seed=2)
    turned = kind(3.0, query_key=turn @ b @ turn.mT, value=turn @ v @ turn.mT, causal=True)
    plain = kind(3.0, query_key=b, value=v, causal=True)
    assert (turned(x @ turn.mT, **given) - plain(x, **given) @ turn.mT).abs().max() < bound
    for field in (kind(3.0), kind(3.0, query_key=b, value=v)):
        assert field.exchangeable
        permuted = {name: part[order] for name, part in given.items()}
        assert (field(x[order], **permuted) - field(x, **given)[order]).abs().max() < bound
    assert (plain(x[order]) - plain(x)[order]).abs().max() > 1e-2  # not exchangeable


@BOTH
def test_dtypes(kind):
    field = kind(2.0, **parameters(["query_key", "value", "bias"], 4, 3))  # float64 matrices
    x, weights = tokens(4, 3), torch.tensor([1, 2, 0, 3])  # whole numbers serve as weights
    single, double = field(x.float(), weights=weights), field(x, weights=weights)
    assert (single.dtype, double.dtype) == (F32, F64)
    assert (single - double).abs().max() < 1e-6 * (10 if kind is USA else 1)
    combined = weights.float()
    assert field.ambient(x.float(), combined).dtype == field.kernel(x.float(), combined).dtype == F32
    assert kind(2.0, value=-torch.eye(3))(x).dtype == F64


@BOTH
def test_empty_batch_and_protocols(kind):
    assert kind(1.0)(torch.empty(0, 4, 3)).shape == (0, 4, 3)
    assert isinstance(kind(1.0), Field)
    assert kind(1.0).attends
    assert kind(1.0).takes_weights
    assert kind(1.0).normalized == (kind is SA)


@pytest.mark.parametrize(
    ("given", "scale", "exchangeable", "isotropic"),
    [
        ({}, 1.0, True, True),
        ({"value": torch.eye(3), "query_key": torch.eye(3)}, 1.0, True, True),
        ({"value": -torch.eye(3)}, -1.0, True, False),
        ({"value": 0.1 * torch.eye(3, dtype=F64)}, 0.1, True, False),
        ({"value": torch.zeros(3, 3)}, 0.0, True, False),
        ({"value": torch.diag(torch.tensor([1.0, 1.0, 2.0]))}, None, True, False),
        ({"value": torch.ones(3, 3)}, None, True, False),
        ({"value": torch.eye(3, requires_grad=True)}, None, True, False),
        ({"query_key": -torch.eye(3)}, 1.0, True, False),
        ({"query_key": torch.ones(3, 3)}, 1.0, True, False),
        ({"query_key": torch.eye(3, requires_grad=True)}, 1.0, True, False),
        ({"causal": True}, 1.0, False, False),
        ({"bias": torch.zeros(3, 3)}, 1.0, False, False),
    ],
)
@BOTH
def test_properties(kind, given, scale, exchangeable, isotropic):
    field = kind(2, **given)
    assert (field.value_scale, field.exchangeable, field.isotropic) == (scale, exchangeable, isotropic)
    assert field.beta == 2.0
    assert isinstance(field.beta, float)
    with pytest.raises(AttributeError):
        field.beta = 3.0


@BOTH
@pytest.mark.parametrize("names", [[], ["query_key"], ["value"], ["causal", "bias"], ["weights"]], ids="+".join)
@pytest.mark.parametrize("dtype", [F64, F32])
def test_a_system_does_not_depend_on_its_batch_to_the_bit(kind, names, dtype):
    for n, d in product([1, 2, 3, 5, 32, 64], [2, 3, 8, 128]):
        x = tokens(4, n, d).to(dtype)
        field, given = kind(1.5, **parameters(names, n, d)), measure(names, 4, n)
        together = field(x, **given)
        for b in range(4):
            alone = field(x[b : b + 1], **{name: part[b : b + 1] for name, part in given.items()})
            assert torch.equal(together[b], alone[0]), (n, d)
            bare = field(x[b], **{name: part[b] for name, part in given.items()})
            size = torch.finfo(dtype).eps * max(1.0, float(together[b].abs().max()))
            assert (together[b] - bare).abs().max() < 20 * size, (n, d)


def test_a_single_cloud_equals_a_batch_of_one_to_the_bit():
    field, x = SA(beta=3.0, query_key=normal(7, 7), value=normal(7, 7, seed=1)), tokens(40, 9, 7, seed=2)
    weights = normal(40, 9, seed=3).abs() + 0.1
    together, weighted = field(x), field(x, weights=weights)
    for k in range(40):
        assert torch.equal(field(x[k]), together[k])
        assert torch.equal(field(x[k], weights=weights[k]), weighted[k])
