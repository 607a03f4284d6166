"""Several heads against loops and heads alone, made of real weights, at large beta, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import helmscope.fields.multihead as module
from helmscope.fields.alibi import alibi_bias, alibi_slopes
from helmscope.fields.attention import SA, USA
from helmscope.fields.field import Field
from helmscope.fields.hardmax import Hardmax
from helmscope.fields.lowrank import LowRank
from helmscope.fields.multihead import MultiHead
from helmscope.fields.multihead_as_printed import MultiHeadAsPrinted
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.geometry.sphere import project, retract
from helmscope.types import HelmscopeError
from support.attention_cases import F32, F64, INF, NAN, measure, normal, rotation, tokens
from support.attention_family_cases import KINDS, assert_multihead_oracle, force, heads_of, thin

# torch itself calls it when it first differentiates forward
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


# ---- oracles


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", ["plain", "scales", "dense", "thin", "mixed", "bias", "all"])
@pytest.mark.parametrize("names", [[], ["weights", "mask"]], ids="+".join)
def test_loop_oracle(kind, make, names):
    for seed, (n, scale) in enumerate([(1, None), (3, 1.0), (5, -0.7)]):
        d = 3 + seed % 2
        field = MultiHead(heads_of(kind, make, n, d, seed), scale=scale)
        assert_multihead_oracle(field, tokens(n, d, seed=seed), measure(names, n, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
def test_batched_systems_equal_single_systems(kind):
    x, field = tokens(2, 3, 4, 3), MultiHead(heads_of(kind, "dense", 4, 3))
    given = measure(["weights", "mask"], 2, 3, 4)
    together = field(x, **given)
    assert together.shape == x.shape
    assert field.kernel(x).shape == (2, 3, 3, 4, 4)
    assert field.outputs(x).shape == (2, 3, 3, 4, 3)
    for a in range(2):
        for b in range(3):
            alone = field(x[a, b], **{name: part[a, b] for name, part in given.items()})
            assert (together[a, b] - alone).abs().max() < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_sum_of_its_heads(kind):
    """The mean of projections is the projection of the mean [Mean-field notes]: measured 2e-15."""
    x = tokens(6, 5, 3)
    for make in ("scales", "dense", "thin", "mixed"):
        heads = heads_of(kind, make, 5, 3)
        parts = torch.stack([head(x) for head in heads])
        mean = torch.stack([head.ambient(x) for head in heads]).mean(0)
        size = 1e-14 * max(1.0, parts.abs().max().item())
        assert (MultiHead(heads)(x) - parts.mean(0)).abs().max() < size
        assert (MultiHead(heads)(x) - project(x, mean)).abs().max() < 5 * size
        assert (MultiHead(heads, scale=1.0)(x) - parts.sum(0)).abs().max() < 3 * size
        assert (MultiHead(heads[:1])(x) - heads[0](x)).abs().max() < size


@pytest.mark.parametrize("make", ["plain", "dense", "thin"])
def test_heads_are_an_axis_not_a_loop(make, monkeypatch):
    calls = []

    def counted(request):
        calls.append(request.query.shape[:-1])
        return original(request)

    original = module.token_sum
    monkeypatch.setattr(module, "token_sum", counted)
    MultiHead(heads_of("sa", make, 4, 3, count=12))(tokens(2, 4, 3))
    assert calls == [(2, 12, 4)]


def test_low_rank_heads_are_not_expanded(monkeypatch):
    seen = []
    original = module.token_sum
    monkeypatch.setattr(module, "token_sum", lambda request: seen.append(request.value.shape) or original(request))
    MultiHead([SA(1.0, value=thin(50, r)) for r in (1, 4, 2)])(tokens(6, 50))
    assert seen == [(1, 3, 6, 4)]


# ---- real weights


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_from_weights(shared):
    """Heads that share a key and a value in groups, against the layer written out."""
    heads, dh, dv, d, n = 4, 3, 2, 6, 5
    query, out = normal(heads, dh, d), normal(heads, d, dv, seed=1)
    key, value = normal(heads // shared, dh, d, seed=2), normal(heads // shared, dv, d, seed=3)
    x, beta = tokens(2, n, d), 0.7
    field = MultiHead.from_weights(query, key, value, out, beta=beta, causal=True)
    total = torch.zeros_like(x)
    for h in range(heads):
        k, v = key[h // shared], value[h // shared]
        scores = beta * torch.einsum("bia,bja->bij", x @ query[h].mT, x @ k.mT)
        scores = scores.masked_fill(torch.ones(n, n).triu(1) > 0, -INF)
        total = total + scores.softmax(-1) @ (x @ v.mT) @ out[h].mT
    assert (field.ambient(x) - total).abs().max() < 1e-13
    assert field.scale == 1.0
    assert len(field.heads) == heads
    assert all(head.query_key.rank == dh and head.value.rank == dv for head in field.heads)
    assert not field.exchangeable


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"query": (4, 2, 5), "key": (3, 2, 5), "value": (3, 2, 5)}, ["4 heads", "3", "multiple"]),
        ({"key": (2, 3, 5)}, ["key", "(2, 3, 5)", "(2, 2, 5)"]),
        ({"key": (1, 2, 5)}, ["key", "(1, 2, 5)"]),
        ({"value": (2, 2, 4)}, ["value", "(2, 2, 4)"]),
        ({"out": (4, 2, 5)}, ["out", "(4, 2, 5)", "(4, 5, 2)"]),
        ({"query": (2, 5)}, ["query", "(2, 5)"]),
        ({"query": (0, 2, 5)}, ["query", "(0, 2, 5)"]),
    ],
)
def test_weights_that_do_not_fit(shapes, words):
    sizes = {"query": (4, 2, 5), "key": (2, 2, 5), "value": (2, 2, 5), "out": (4, 5, 2), **shapes}
    with pytest.raises(HelmscopeError) as caught:
        MultiHead.from_weights(**{name: torch.ones(size) for name, size in sizes.items()}, beta=1.0)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_alibi_heads():
    """The published layer: one slope a head, causal."""
    n = 5
    heads = [SA(1.0, bias=alibi_bias(n, slope), causal=True) for slope in alibi_slopes(4)]
    assert_multihead_oracle(MultiHead(heads, scale=1.0), tokens(n, 3), {})


# ---- derivatives, batches, dtypes, large beta


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", ["scales", "dense", "thin"])
def test_gradients(kind, make):
    weights = torch.tensor([1.0, 0.5, 2.0, 1.3], dtype=F64)
    field = MultiHead(heads_of(kind, make, 4, 3, count=2))
    inputs = (tokens(4, 3).requires_grad_(), weights.requires_grad_())
    assert torch.autograd.gradcheck(field.velocity, inputs, check_forward_ad=True)
    printed = MultiHeadAsPrinted(field.heads, [force(3, 4, 1)[0]] * 2)
    assert torch.autograd.gradcheck(printed.velocity, inputs, check_forward_ad=True)


@pytest.mark.parametrize("kind", ["sa", "usa"])
def test_gradients_of_parameters(kind):
    """A value that happens to be the identity is not taken for a number while it is differentiated."""
    eye = torch.eye(3, dtype=F64)
    parts = [part.clone().requires_grad_() for part in (eye, normal(3, 2), normal(3, 2, seed=1), normal(3, 3, seed=2))]

    def velocity(value, left, right, b):
        heads = [
            KINDS[kind](1.0, value=value),
            KINDS[kind](2.0, query_key=LowRank(left, right)),
            KINDS[kind](0.5, query_key=b),
        ]
        return MultiHead(heads).velocity(tokens(4, 3))

    assert torch.autograd.gradcheck(velocity, parts, check_forward_ad=True)


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_transforms(kind):
    field, x = MultiHead(heads_of(kind, "bias", 4, 3)), tokens(5, 4, 3)
    assert (torch.func.vmap(field.velocity)(x) - field(x)).abs().max() < 1e-13
    backward = torch.func.vmap(torch.func.jacrev(field.velocity))(x)
    forward = torch.func.vmap(torch.func.jacfwd(field.velocity))(x)
    assert (backward - forward).abs().max() < 1e-13
    along = normal(5, 4, 3, seed=1)
    _, change = torch.func.jvp(field.velocity, (x,), (along,))
    assert (change - torch.einsum("bnamc,bmc->bna", backward, along)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", ["scales", "dense", "thin"])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_a_system_does_not_depend_on_its_batch_to_the_bit(kind, make, dtype):
    for n, d in ((1, 3), (2, 128), (5, 128), (32, 3), (33, 8)):
        x, field = tokens(4, n, d).to(dtype), MultiHead(heads_of(kind, make, n, d, count=9))
        together = field(x)
        assert together.dtype == dtype
        for b in range(4):
            assert torch.equal(together[b], field(x[b : b + 1])[0]), (n, d)


def test_single_precision():
    for kind in ("sa", "usa", "sinkhorn"):
        field, x = MultiHead(heads_of(kind, "dense", 6, 3)), tokens(4, 6, 3)
        single = field(x.float())
        assert (single - field(x)).abs().max() < 2e-5


@pytest.mark.parametrize("kind", ["sa", "usa"])
def test_the_own_term_does_not_cancel_the_others(kind):
    """Metastable tokens at beta = 40, all V_h = c_h I: every digit stays."""
    x = torch.eye(2, dtype=F64)
    field = MultiHead([KINDS[kind](40.0), KINDS[kind](41.0, value=2 * torch.eye(2))])
    expected = {"sa": (1 / (1 + math.exp(40)) + 2 / (1 + math.exp(41))) / 2, "usa": 0.75}[kind]
    assert field(x)[0, 1].item() == pytest.approx(expected, rel=1e-15, abs=0)
    assert field(x)[0, 0] == 0


def test_scaled_heads_of_usa():
    """e^1000 overflows; the direction does not, and small heads vanish beside large ones."""
    x = retract(tokens(4, 3) + 2 * tokens(3, seed=9))
    heads = [USA(1000.0), USA(3.0, value=normal(3, 3))]
    with pytest.raises(HelmscopeError, match=r"in heads\[0\] beta is 1000, and .*\.scaled_velocity"):
        MultiHead(heads)(x)
    scaled, alone = MultiHead(heads, scale=1.0).scaled_velocity(x), USA(1000.0).scaled_velocity(x)
    assert torch.allclose(scaled.direction, alone.direction, rtol=1e-12, atol=0)
    assert torch.allclose(scaled.log_scale, alone.log_scale, rtol=1e-15, atol=0)
    calm = MultiHead(heads_of("usa", "dense", 4, 3)).scaled_velocity(x)
    field = MultiHead(heads_of("usa", "dense", 4, 3))
    assert torch.allclose(calm.displacement(1.0), field(x), rtol=1e-13, atol=1e-14)
    assert torch.equal(MultiHead([SA(1.0)]).scaled_velocity(x).log_scale, torch.zeros(4, 1, dtype=F64))


def test_a_head_without_visible_keys_does_not_set_the_scale():
    """Head 0 sees each token itself alone, at e^900; head 1 sees the others at e^0."""
    hidden = torch.full((3, 3), -INF, dtype=F64).fill_diagonal_(0.0)
    heads = [USA(900.0, bias=hidden), USA(0.0)]
    x = torch.eye(3, dtype=F64)
    assert (MultiHead(heads, scale=1.0)(x) - USA(0.0)(x)).abs().max() < 1e-15
    alone = MultiHead(heads[:1])(x)
    assert torch.equal(alone, torch.zeros_like(x))


def test_a_sum_that_vanishes_has_its_derivative():
    """Opposite neighbors cancel at a logit of 1: the velocity is 0, its derivative has the factor e."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=F64, requires_grad=True)
    bias = torch.ones(3, 3, dtype=F64)
    for field in (USA(1.0, bias=bias), MultiHead([USA(1.0, bias=bias)] * 2)):
        assert torch.equal(field(x)[0], torch.zeros(2, dtype=F64))
        assert torch.autograd.gradcheck(field.velocity, x)


def test_equivariance_and_padding():
    x, turn, order = tokens(5, 3), rotation(3), torch.tensor([3, 0, 4, 1, 2])
    heads = heads_of("sa", "dense", 5, 3)
    field = MultiHead(heads)
    assert field.exchangeable
    assert not MultiHead(heads_of("sa", "bias", 5, 3)).exchangeable
    turned = MultiHead(
        [replace(h, query_key=turn @ h.query_key @ turn.mT, value=turn @ h.value @ turn.mT) for h in heads]
    )
    assert (turned(x @ turn.mT) - field(x) @ turn.mT).abs().max() < 1e-14
    assert (field(x[order]) - field(x)[order]).abs().max() < 1e-14
    padded = field(torch.cat([x, x[:2]]), mask=torch.tensor([True] * 5 + [False] * 2))
    assert (padded[:5] - field(x)).abs().max() < 1e-14


def test_properties_of_the_field():
    for field in (MultiHead([SA(1.0)]), MultiHeadAsPrinted([SA(1.0)], [force(3, 2, 0)[0]])):
        assert isinstance(field, Field)
        assert field.attends
    assert MultiHead([USA(1.0)]).normalized is False
    assert MultiHead([SA(1.0), SA(2.0)]).scale == 0.5
    assert MultiHead([SA(1.0)])(torch.empty(0, 4, 3)).shape == (0, 4, 3)


# ---- refusals


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ([], ["heads", "[]"]),
        (None, ["heads", "NoneType"]),
        (SA(1.0), ["heads", "is an SA,", "sequence"]),
        ("SA", ["heads", "str"]),
        ([SA(1.0, value=torch.eye(3)), 2], ["heads", "[SA, int]"]),
        ([SA(1.0), USA(1.0)], ["heads[1]", "USA", "SA", "one class"]),
        ([SA(1.0), SA(1.0), SA(1.0, causal=True)], ["heads[2]", "causal=True", "causal=False"]),
        ([Hardmax(), Hardmax(tie_tolerance=0.1)], ["heads[1]", "tie_tolerance=0.1", "tie_tolerance=None"]),
        ([SinkhornAttention(1.0), SinkhornAttention(1.0, tol=1e-3)], ["heads[1]", "tol=0.001"]),
        ([SA(1.0, value=torch.eye(3)), SA(1.0, query_key=torch.eye(4))], ["heads[1]", "(4, 4)", "heads[0]", "(3, 3)"]),
        ([SA(1.0, bias=torch.zeros(3, 3)), SA(1.0, bias=torch.zeros(4, 4))], ["bias", "(4, 4)", "(3, 3)"]),
    ],
)
def test_bad_heads(heads, words):
    for make in (MultiHead, lambda given: MultiHeadAsPrinted(given, [])):
        with pytest.raises(HelmscopeError) as caught:
            make(heads)
        assert "\n" not in str(caught.value)
        assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("scale", [NAN, INF, "half", True])
def test_bad_scale(scale):
    with pytest.raises(HelmscopeError, match="scale is"):
        MultiHead([SA(1.0)], scale=scale)


def test_bad_tokens():
    field = MultiHead([SA(1.0), SA(1.0, value=torch.eye(4))])
    with pytest.raises(HelmscopeError, match=r"value has shape \(4, 4\).*\(5, 3\)"):
        field(tokens(5, 3))
    with pytest.raises(HelmscopeError, match="x holds a token of norm 2"):
        field(2 * tokens(5, 4))
    with pytest.raises(HelmscopeError, match="weights"):
        field(tokens(5, 4), weights=-torch.ones(5))
    with pytest.raises(HelmscopeError, match="scale is 1e\\+308"):
        MultiHead([SA(0.0, value=100 * torch.eye(2))], scale=1e308)(torch.eye(2, dtype=F64))
    with pytest.raises(HelmscopeError, match=r"in heads\[1\] max_iterations is 1"):
        MultiHead([SinkhornAttention(0.0, max_iterations=1), SinkhornAttention(50.0, max_iterations=1)])(tokens(5, 3))
