"""Hardmax against loops, and as the limit of SA."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from helmscope.fields.attention import SA
from helmscope.fields.field import Field
from helmscope.fields.hardmax import Hardmax
from helmscope.fields.weights import check_weights
from helmscope.kernels.dense import untransformed_logits
from helmscope.theory.equiangular import EquiangularFlow
from helmscope.types import HelmscopeError
from support.attention_cases import COMBINATIONS, F32, F64, circle, measure, normal, parameters, rotation, tokens
from support.attention_family_cases import assert_oracle

# torch itself calls it when it first differentiates forward
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_loop_oracle(names):
    for seed, n in product(range(4), [1, 2, 3, 6]):
        d = 2 + seed % 3
        field = Hardmax(**parameters(names, n, d, seed))
        assert_oracle(field, tokens(n, d, seed=seed), measure(names, n, seed=seed))


def gap_of(field, x, weights):
    """Least distance of the greatest logit of a query from the next one, over the queries."""
    pairs = untransformed_logits(field.request(x, weights, tangent=False))
    ordered = pairs.sort(-1, descending=True).values
    return (ordered[..., 0] - ordered[..., 1]).min().item()


@pytest.mark.parametrize(
    "names", [["query_key"], ["query_key", "value", "bias"], ["query_key", "weights", "mask"]], ids="+".join
)
def test_sa_tends_to_it_at_the_rate_of_the_gap(names):
    """SA(beta, bias=beta bias) - hardmax falls like e^{-beta gap}: measured slopes within 1 % of -gap."""
    n, d, seen = 5, 3, 0
    for seed in range(20):
        given = parameters(names, n, d, seed)
        bias = given.pop("bias", None)
        x, masses = tokens(n, d, seed=seed), measure(names, n, seed=seed)
        weights = check_weights(x, masses.get("weights"), masses.get("mask"))
        limit = Hardmax(bias=bias, **given)
        gap = gap_of(limit, x, weights)
        if not 0.02 < gap < math.inf:
            continue
        seen += 1

        def distance(beta, bias=bias, given=given, x=x, weights=weights, limit=limit):
            field = SA(beta, bias=None if bias is None else beta * bias, **given)
            return (field.ambient(x, weights) - limit.ambient(x, weights)).abs().max().item()

        near, far = 12 / gap, 24 / gap
        assert math.log(distance(far) / distance(near)) / (far - near) == pytest.approx(-gap, rel=0.05)
        assert distance(1e3) <= 100 * math.exp(-1e3 * gap) + 1e-15
        assert max(distance(1e4), distance(1e5)) < 1e-15
    assert seen >= 3


def test_a_causal_limit():
    x, b = tokens(6, 3), normal(3, 3)
    limit = Hardmax(query_key=b, causal=True)
    assert (SA(1e5, query_key=b, causal=True)(x) - limit(x)).abs().max() < 1e-14
    assert torch.equal(limit(x)[0], SA(1.0, query_key=b, causal=True)(x)[0])  # one key: no choice
    assert not limit.exchangeable
    assert Hardmax(query_key=b).exchangeable
    assert not Hardmax(bias=normal(6, 6)).exchangeable


def test_ties_are_averaged_by_weight():
    """Tokens 1 and 2 lie at +-1 rad from token 0, which is hidden from itself; token 3 is farther."""
    x = circle(torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=F64))
    bias = torch.zeros(4, 4, dtype=F64)
    bias[0, 0] = -math.inf
    weights = torch.tensor([1.0, 3.0, 1.0, 1.0], dtype=F64)
    field = Hardmax(bias=bias)
    expected = torch.tensor([0.0, 0.75, 0.25, 0.0], dtype=F64)
    assert torch.equal(field.kernel(x, weights)[0], expected)
    assert (field(x, weights=weights)[0] - torch.tensor([0.0, math.sin(1) / 2], dtype=F64)).abs().max() < 1e-15
    beta = 1e4
    assert (SA(beta, bias=bias)(x, weights=weights)[0] - field(x, weights=weights)[0]).abs().max() < 1e-11


@pytest.mark.parametrize(("tie", "keys"), [(None, 1), (0.0, 1), (1e-6, 1), (1e-3, 2), (0.1, 3), (10.0, 4)])
def test_the_tolerance_of_ties(tie, keys):
    x = circle(torch.tensor([0.0, 1.0, -1.0 - 1e-4, 2.0], dtype=F64))
    bias = torch.zeros(4, 4, dtype=F64)
    bias[0, 0] = -0.5  # <x_0, x_1> = 0.54 beats 1 - 0.5
    kernel = Hardmax(bias=bias, tie_tolerance=tie).kernel(x)[0]
    assert (kernel > 0).sum() == keys
    assert kernel.max() == 1 / keys


@pytest.mark.parametrize("dtype", [F32, F64])
def test_rounding_breaks_no_tie(dtype):
    """Turned, the two nearest keys have logits that differ in their last bits; both are kept."""
    for seed in range(50):
        x = circle(torch.tensor([0.0, 1.0, -1.0], dtype=F64))
        x = (torch.cat([x, torch.zeros(3, 6)], -1) @ rotation(8, seed=seed).mT).to(dtype)
        kernel = Hardmax(query_key=-torch.eye(8)).kernel(x)
        assert kernel[0].tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("given", [{}, {"query_key": 2 * torch.eye(3)}, {"causal": True}, {"value": -torch.eye(3)}])
def test_with_an_isotropic_query_key_no_token_moves(given):
    x = tokens(3, 7, 3)
    assert torch.equal(Hardmax(**given)(x), torch.zeros_like(x))
    assert torch.equal(Hardmax(**given).kernel(x), torch.eye(7, dtype=F64).expand(3, 7, 7))


def test_weight_two_is_two_tokens_and_padding_is_absent():
    a, b, c = tokens(3, 3)
    field = Hardmax(query_key=normal(3, 3), value=normal(3, 3, seed=1))
    pair = field(torch.stack([a, a, b, c]))
    whole = field(torch.stack([a, b, c]), weights=torch.tensor([2.0, 1.0, 1.0]))
    assert (pair[1:] - whole).abs().max() < 1e-15
    padded = field(torch.stack([a, b, c, a]), mask=torch.tensor([True, True, True, False]))
    assert (padded[:3] - field(torch.stack([a, b, c]))).abs().max() < 1e-15


@pytest.mark.parametrize("names", [["query_key"], ["query_key", "value", "causal", "bias"]], ids="+".join)
def test_derivatives(names):
    """Away from ties the best keys stay the best: the velocity is smooth."""
    field, x = Hardmax(**parameters(names, 4, 3)), tokens(2, 4, 3)
    weights = torch.tensor([[1.0, 2.0, 0.5, 1.0]] * 2, dtype=F64)
    inputs = (x.clone().requires_grad_(), weights.clone().requires_grad_())
    assert torch.autograd.gradcheck(field.velocity, inputs, check_forward_ad=True)
    forward = torch.func.vmap(torch.func.jacfwd(field.velocity))(x)
    backward = torch.func.vmap(torch.func.jacrev(field.velocity))(x)
    assert (forward - backward).abs().max() < 1e-15


def test_a_tie_and_a_token_without_visible_keys_have_finite_gradients():
    x = torch.eye(3, dtype=F64).requires_grad_()
    bias = torch.zeros(3, 3, dtype=F64)
    bias[2] = -math.inf
    velocity = Hardmax(query_key=-torch.eye(3), bias=bias)(x)
    assert torch.equal(velocity[2], torch.zeros(3, dtype=F64))
    (gradient,) = torch.autograd.grad(velocity.sum(), x)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [F64, F32])
def test_a_system_does_not_depend_on_its_batch_to_the_bit(dtype):
    for n, d in ((1, 2), (3, 8), (32, 3), (64, 128)):
        x, field = tokens(4, n, d).to(dtype), Hardmax(query_key=normal(d, d))
        together = field(x)
        assert together.dtype == dtype
        for b in range(4):
            assert torch.equal(together[b], field(x[b : b + 1])[0]), (n, d)


def test_properties_of_the_field():
    field = Hardmax()
    assert isinstance(field, Field)
    assert field.attends
    assert not field.continuous
    assert not isinstance(field, EquiangularFlow)  # no beta, no closed form


@pytest.mark.parametrize("tie", [-1e-3, math.nan, math.inf, "close", True])
def test_bad_tie(tie):
    with pytest.raises(HelmscopeError, match=r"tie_tolerance is .*>= 0"):
        Hardmax(tie_tolerance=tie)


def test_an_infinite_velocity_is_refused():
    field = Hardmax(query_key=-torch.eye(2), value=torch.full((2, 2), 1e308, dtype=F64))
    with pytest.raises(HelmscopeError, match=r"velocity overflows torch.float64: use a smaller value"):
        field(circle(torch.tensor([0.7, 0.8], dtype=F64)))
