"""SA and USA against loops, 500-digit arithmetic and the closed forms of the theory; their gradients; refusals."""

from __future__ import annotations

import math
from itertools import product

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from helmscope.fields.attention import SA, USA
from helmscope.fields.field import Field, ScaledField, ScaledVelocity, TokenField, check_weights
from helmscope.geometry.sphere import project, retract
from helmscope.types import HelmscopeError

F32, F64 = torch.float32, torch.float64
INF, NAN = math.inf, math.nan
# torch itself calls it when it first differentiates forward
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
BOTH = pytest.mark.parametrize("kind", [SA, USA])
FEATURES = ("query_key", "value", "minus", "causal", "bias", "hidden", "weights", "mask")
COMBINATIONS = [
    *([], *([name] for name in FEATURES)),
    *(["query_key", "value"], ["weights", "mask"], ["causal", "weights"], ["causal", "hidden", "mask"]),
    *(["minus", "query_key", "weights", "mask"], ["query_key", "value", "causal", "hidden", "weights", "mask"]),
]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return retract(normal(*shape, seed=seed))


def circle(angles: torch.Tensor) -> torch.Tensor:
    return torch.stack([angles.cos(), angles.sin()], -1)


def rotation(d: int, seed: int = 5) -> torch.Tensor:
    return torch.linalg.qr(normal(d, d, seed=seed)).Q


def parameters(names, n, d, seed=0):
    """Keyword arguments of a field with the named features."""
    given = {}
    if "query_key" in names:
        given["query_key"] = normal(d, d, seed=seed + 1) / math.sqrt(d)
    if "value" in names:
        given["value"] = normal(d, d, seed=seed + 2)
    if "minus" in names:
        given["value"] = -torch.eye(d, dtype=F64)
    if "causal" in names:
        given["causal"] = True
    if {"bias", "hidden"} & set(names):
        given["bias"] = normal(n, n, seed=seed + 3)
    if "hidden" in names:  # among them a row that sees nobody
        given["bias"][normal(n, n, seed=seed + 4) > 0.5] = -INF
        given["bias"][n - 1] = -INF
    return given


def measure(names, *shape, seed=0):
    """Keyword arguments of a call with the named features; token 0 always counts."""
    given = {}
    if "weights" in names:
        given["weights"] = normal(*shape, seed=seed + 6).clamp(min=0)
        given["weights"][..., 0] = 1.5
    if "mask" in names:
        given["mask"] = normal(*shape, seed=seed + 7) > -0.5
        given["mask"][..., 0] = True
    return given


def listed(given):
    return {name: part.tolist() if isinstance(part, torch.Tensor) else part for name, part in given.items()}


def oracle(field, quantity, x, given):
    """``quantity`` of one system by loops; every tensor goes in as lists."""
    options = {name: getattr(field, name) for name in ("query_key", "bias", "causal")}
    if quantity != "kernel":
        options["value"] = field.value
    loop = getattr(oracles, f"{type(field).__name__.lower()}_{quantity}")
    return torch.tensor(loop(x.tolist(), field.beta, **listed(options), **listed(given)), dtype=F64)


def assert_oracle(field, x, given):
    """1e-12 of the greatest value before projection, which is where the digits of the oracle end, or of 1."""
    combined = check_weights(x, given.get("weights"), given.get("mask"))
    ambient = oracle(field, "ambient", x, given)
    bound = 1e-12 * ambient.abs().max().clamp(min=1)
    assert (field.ambient(x, combined) - ambient).abs().max() <= bound
    assert (field(x, **given) - oracle(field, "velocity", x, given)).abs().max() <= bound
    kernel = oracle(field, "kernel", x, given)
    assert (field.kernel(x, combined) - kernel).abs().max() <= 1e-12 * kernel.abs().max().clamp(min=1)


def exact_velocity(kind, beta, x, weights=None):
    """The velocity for V = B = I at the unit vectors nearest to x, n lists of d mpf.

    With 500 digits, as the oracle keeps the own term, up to e^{2 beta} times larger than the rest.
    """
    n, d = len(x), len(x[0])
    with mpmath.workdps(500):
        rows = [[mpmath.mpf(a) for a in row] for row in x.tolist()]
        rows = [[a / mpmath.sqrt(mpmath.fsum(b * b for b in row)) for a in row] for row in rows]
        m = [mpmath.mpf(1)] * n if weights is None else [mpmath.mpf(w) for w in weights.tolist()]
        result = []
        for i in range(n):
            dots = [mpmath.fsum(rows[i][a] * rows[j][a] for a in range(d)) for j in range(n)]
            terms = [m[j] * mpmath.exp(mpmath.mpf(beta) * dots[j]) for j in range(n)]
            norm = mpmath.fsum(terms) if kind is SA else mpmath.fsum(m)
            tangents = [[rows[j][a] - dots[j] * rows[i][a] for a in range(d)] for j in range(n)]
            result.append([mpmath.fsum(terms[j] * tangents[j][a] for j in range(n)) / norm for a in range(d)])
        return result


def relative_errors(velocity, exact, log_scale=None):
    """|v_i - exact_i| / |exact_i| for each token, v_i taken times e^{log_scale_i}."""
    with mpmath.workdps(500):
        errors = []
        for i, row in enumerate(velocity.tolist()):
            scale = 1 if log_scale is None else mpmath.exp(log_scale.expand(len(exact), 1)[i].item())
            gap = mpmath.norm([scale * a - b for a, b in zip(row, exact[i], strict=True)])
            errors.append(float(gap / mpmath.norm(exact[i])))
        return errors


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
def test_members_of_a_batch_are_the_systems_alone(kind, names):
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


# ---- closed forms of the theory


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
        scaled = USA(beta).scaled(x)
        assert scaled.direction.dtype == scaled.log_scale.dtype == dtype
        assert scaled.direction.abs().max() < 1
        assert max(relative_errors(scaled.direction, exact_velocity(USA, beta, x), scaled.log_scale)) < bound
        with pytest.raises(HelmscopeError, match=r"beta is \d+, and the velocity leaves torch.float.*\.scaled"):
            USA(beta)(x)


def test_scaled_velocity_of_ordinary_size_is_the_velocity():
    x, weights = tokens(2, 4, 3), normal(2, 4).abs()
    scaled = USA(4.0).scaled(x, weights)
    assert torch.allclose(scaled.log_scale.exp() * scaled.direction, USA(4.0)(x, weights=weights), rtol=1e-15, atol=0)
    half = scaled.over(0.5)
    assert torch.allclose(half, USA(4.0)(x, weights=weights) / 2, rtol=1e-14, atol=0)
    steps = torch.tensor([0.0, 2.0], dtype=F64)[:, None, None]  # one duration a system
    assert torch.allclose(scaled.over(steps), half * 2 * steps, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_displacement_is_finite_where_the_product_is(dtype):
    scaled = ScaledVelocity(torch.tensor([[1e-30, 0.0]], dtype=dtype), torch.full((1, 1), 100.0, dtype=dtype))
    expected = torch.tensor([[1e-30 * math.exp(100), 0.0]], dtype=dtype)
    assert torch.allclose(scaled.over(1.0), expected, rtol=2e-6, atol=0)
    huge = ScaledVelocity(torch.tensor([[0.5, 0.0]], dtype=dtype), torch.full((1, 1), 700.0, dtype=dtype))
    expected = huge.direction * math.exp(700 - 300 * math.log(10))
    assert torch.allclose(huge.over(1e-300), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("names", [[], ["causal"], ["minus"]], ids="+".join)
def test_usa_is_refused_only_where_it_leaves_the_dtype(names):
    """Orthogonal tokens move at the rate 1/n whatever beta is, and .scaled keeps them under any mask."""
    x = torch.eye(3, dtype=F64)
    field, calm = (USA(beta, **parameters(names, 3, 3)) for beta in (1000.0, 1.0))
    assert torch.allclose(field(x), calm(x), rtol=1e-15, atol=0)
    scaled = field.scaled(x)
    assert torch.allclose(scaled.over(1.0), calm(x), rtol=1e-15, atol=0)


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
    assert isinstance(kind(1.0), TokenField)
    assert isinstance(kind(1.0), ScaledField) == (kind is USA)
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
    assert (field.value_scale, field.exchangeable, field.is_isotropic) == (scale, exchangeable, isotropic)
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


# ---- gradients


def everything(kind, names, n=4, d=3):
    """The velocity as a function of all tensors that it depends on, and those tensors."""
    given, masses = parameters(names, n, d), measure(names, n).get("weights")
    tensors = {name: part for name, part in given.items() if isinstance(part, torch.Tensor) and "minus" not in names}
    fixed = {name: part for name, part in given.items() if name not in tensors}
    if masses is not None:
        tensors["weights"] = masses + 0.1

    def velocity(x, *parts):
        named = dict(zip(tensors, parts, strict=True))
        weights = named.pop("weights", None)
        return kind(1.5, **named, **fixed).velocity(x, weights)

    return velocity, tuple(tensors.values())


@BOTH
@pytest.mark.parametrize("names", [c for c in COMBINATIONS if not {"hidden", "mask"} & set(c)], ids="+".join)
def test_gradients_at_generic_points(kind, names):
    velocity, parts = everything(kind, names)
    inputs = [part.clone().requires_grad_() for part in (tokens(4, 3), *parts)]
    assert torch.autograd.gradcheck(velocity, inputs, check_forward_ad=True)


DEGENERATE = {
    "coincident": (tokens(1, 3).expand(3, 3), None),
    "pair": (tokens(2, 3)[[0, 1, 0]], None),
    "antipodal": (torch.stack([tokens(3), -tokens(3), tokens(3)]), None),
    "ties": (torch.eye(3, dtype=F64), None),
    "weight 0": (tokens(3, 3), torch.tensor([1.0, 0.0, 2.0], dtype=F64)),
    "first unseen": (tokens(3, 3), torch.tensor([0.0, 1.0, 1.0], dtype=F64)),
    "one token": (tokens(1, 3), None),
}


@BOTH
@pytest.mark.parametrize("beta", [0.0, 2.0])
@pytest.mark.parametrize("names", [[], ["minus"], ["value", "query_key"], ["causal"], ["hidden"]], ids="+".join)
@pytest.mark.parametrize("place", DEGENERATE)
def test_gradients_at_degenerate_points(kind, beta, names, place):
    """Projection divides by nothing, so the field is smooth at coincident, antipodal, tied and blind tokens too."""
    x, weights = DEGENERATE[place]
    field = kind(beta, **parameters(names, *x.shape))
    point = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: field.velocity(y, weights), point, check_undefined_grad=False)
    (gradient,) = torch.autograd.grad(field(point, weights=weights).square().sum(), point)
    assert torch.isfinite(gradient).all()


@BOTH
@pytest.mark.parametrize("beta", [40.0, 300.0])
def test_gradients_are_finite_at_large_beta(kind, beta):
    for x, weights in DEGENERATE.values():
        point = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(kind(beta)(point, weights=weights).sum(), point)
        assert torch.isfinite(gradient).all()


@BOTH
def test_gradient_of_a_weight_at_zero_is_that_of_an_absent_token(kind):
    """A token of weight 0 is not seen: only its part in M remains, and the other weights have their full gradient."""
    x, weights = tokens(4, 3), torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=F64, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(lambda m: kind(1.5).velocity(x, m), weights)
    velocity = kind(1.5)(x, weights=weights.detach())
    assert torch.allclose(jacobian[..., 1], -velocity / 3.5 if kind is USA else 0 * velocity, rtol=0, atol=1e-15)
    for j in (0, 2, 3):
        step = torch.zeros(4, dtype=F64)
        step[j] = 1e-5
        high, low = (kind(1.5).velocity(x, weights.detach() + s * step) for s in (1, -1))
        assert torch.allclose(jacobian[..., j], (high - low) / 2e-5, rtol=0, atol=1e-9)


@BOTH
def test_tangential_derivative_does_not_miss_the_own_term(kind):
    """P_x V x = 0 on the sphere alone; leaving it out must not change a derivative along the sphere."""
    x = tokens(4, 3)
    along = project(x, normal(4, 3, seed=1))
    kept = kind(2.0, value=torch.eye(3, dtype=F64).requires_grad_())  # taken for a general V
    for field in (kind(2.0), kind(2.0, value=torch.eye(3))):
        (v, dv), (w, dw) = (torch.func.jvp(f.velocity, (x,), (along,)) for f in (field, kept))
        assert (v - w).abs().max() < 1e-14
        assert (dv - dw).abs().max() < 1e-14


@BOTH
@pytest.mark.parametrize("names", [[], ["query_key", "value", "causal", "bias"]], ids="+".join)
def test_autograd_transforms(kind, names):
    field, x = kind(1.5, **parameters(names, 4, 3)), tokens(5, 4, 3)
    each = torch.func.vmap(field.velocity)(x)
    assert (each - field(x)).abs().max() < 1e-14
    backward = torch.func.vmap(torch.func.jacrev(field.velocity))(x)
    forward = torch.func.vmap(torch.func.jacfwd(field.velocity))(x)
    assert backward.shape == (5, 4, 3, 4, 3)
    assert (backward - forward).abs().max() < 1e-14
    along = normal(5, 4, 3, seed=1)
    _, change = torch.func.jvp(field.velocity, (x,), (along,))
    assert (change - torch.einsum("bnamc,bmc->bna", backward, along)).abs().max() < 1e-13


@BOTH
@pytest.mark.parametrize("derivative", [torch.func.jacrev, torch.func.jacfwd])
def test_derivative_with_respect_to_a_value_that_is_the_identity(kind, derivative):
    """The velocity is linear in V: its derivative does not vanish where V happens to be a multiple of I."""
    x, general = tokens(4, 3), normal(3, 3)

    def velocity(value):
        return kind(1.5, value=value).velocity(x)

    at_identity, elsewhere = derivative(velocity)(torch.eye(3, dtype=F64)), derivative(velocity)(general)
    assert (at_identity - elsewhere).abs().max() < 1e-14
    assert at_identity.abs().max() > 0.1


# ---- refusals


def assert_refused(call, *words):
    """One sentence that holds the argument's name and its value or shape."""
    with pytest.raises(HelmscopeError) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@BOTH
@pytest.mark.parametrize(
    "beta",
    [-1.0, -1e-300, NAN, INF, -INF, "hot", "4", None, True, [1.0], torch.ones(2), 1j, 10**400],
    ids=lambda b: repr(b)[:9],
)
def test_bad_beta(kind, beta):
    assert_refused(lambda: kind(beta), "beta", " ".join(repr(beta).split())[:60])


@BOTH
@pytest.mark.parametrize("name", ["query_key", "value", "bias"])
@pytest.mark.parametrize(
    ("matrix", "word"),
    [
        (torch.ones(2, 3), "(2, 3)"),
        (torch.ones(3), "(3,)"),
        (torch.ones(1, 3, 3), "(1, 3, 3)"),
        (torch.empty(0, 0), "(0, 0)"),
        (torch.ones(3, 3, dtype=torch.int64), "torch.int64"),
        (torch.ones(3, 3, dtype=torch.bool), "torch.bool"),
        (torch.ones(3, 3, dtype=torch.complex64), "torch.complex64"),
        (torch.full((3, 3), NAN), "nan"),
        (torch.full((3, 3), INF), "inf"),
        ([[1.0, 0.0], [0.0, 1.0]], "list"),
        (2.0, "float"),
    ],
)
def test_bad_matrix(kind, name, matrix, word):
    assert_refused(lambda: kind(1.0, **{name: matrix}), name, word)


@BOTH
def test_matrix_that_does_not_fit_the_tokens(kind):
    for name in ("query_key", "value", "bias"):
        field = kind(1.0, **{name: torch.eye(5)})
        assert_refused(lambda field=field: field(tokens(2, 4, 3)), name, "(5, 5)", "(2, 4, 3)")
    for name in ("query_key", "value"):
        assert_refused(lambda name=name: kind(1.0, **{name: torch.full((3, 3), -INF)}), name, "-inf")


@BOTH
@pytest.mark.parametrize("causal", ["no", 2, None])
def test_bad_causal(kind, causal):
    assert_refused(lambda: kind(1.0, causal=causal), "causal", repr(causal))


@BOTH
@pytest.mark.parametrize(
    ("x", "word"),
    [
        ([[1.0, 0.0]], "list"),
        (None, "NoneType"),
        (torch.ones(2, 2, dtype=torch.int64), "torch.int64"),
        (torch.eye(2).half(), "torch.float16"),
        (torch.tensor([1.0, 0.0]), "(2,)"),
        (torch.empty(0, 3), "(0, 3)"),
        (torch.ones(3, 1), "d=1"),
        (torch.tensor([[1.0, 0.0], [NAN, 0.0]]), "token 1"),
        (torch.tensor([[INF, 0.0]]), "token 0"),
        (torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "zero"),
        (torch.tensor([[2.0, 0.0]]), "norm 2"),
        (torch.tensor([[[1.0, 0.0]], [[1.001, 0.0]]]), "norm 1.001"),
    ],
)
def test_bad_tokens(kind, x, word):
    assert_refused(lambda: kind(1.0)(x), "x ", word)


@BOTH
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"weights": torch.tensor([1.0, -2.5, 1.0])}, ["weights", "-2.5"]),
        ({"weights": torch.tensor([1.0, NAN, 1.0])}, ["weights", "nan"]),
        ({"weights": torch.tensor([1.0, INF, 1.0])}, ["weights", "inf"]),
        ({"weights": torch.zeros(3)}, ["weights", "positive"]),
        ({"weights": torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])}, ["weights", "positive"]),
        ({"weights": torch.ones(4)}, ["weights", "(4,)"]),
        ({"weights": torch.ones(3, 2)}, ["weights", "(3, 2)"]),
        ({"weights": torch.ones(2, 3, 1)}, ["weights", "(2, 3, 1)"]),
        ({"weights": [1.0, 1.0, 1.0]}, ["weights", "list"]),
        ({"mask": torch.ones(3)}, ["mask", "torch.float32"]),
        ({"mask": torch.ones(4, dtype=torch.bool)}, ["mask", "(4,)"]),
        ({"mask": [True, True, True]}, ["mask", "list"]),
        ({"mask": torch.zeros(3, dtype=torch.bool)}, ["mask", "positive"]),
        (
            {"weights": torch.tensor([1.0, 0.0, 0.0]), "mask": torch.tensor([False, True, True])},
            ["weights", "mask", "positive"],
        ),
    ],
)
def test_bad_measure(kind, given, words):
    assert_refused(lambda: kind(1.0)(tokens(2, 3, 3), **given), *words)
