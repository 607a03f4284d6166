"""Positions in attention, a second cloud and one field per layer, against loops and against transformers."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.field import as_field
from helmscope.fields.lowrank import LowRank
from helmscope.fields.multihead import MultiHead
from helmscope.kernels.blockwise import Blockwise
from helmscope.kernels.choose import token_sum, using_summation
from helmscope.kernels.dense import Dense
from helmscope.kernels.flash import Flash
from helmscope.kernels.request import Request
from helmscope.types import HelmscopeError
from support.attention_cases import normal, tokens

F64 = torch.float64
B, V = normal(4, 4, seed=1), normal(4, 4, seed=2)


def softmax_by_loops(logits, values, weights=None):
    out = []
    for row in logits:
        w = [math.exp(z) * (1.0 if weights is None else weights[j]) for j, z in enumerate(row)]
        out.append([sum(a * v[k] for a, v in zip(w, values, strict=True)) / sum(w) for k in range(len(values[0]))])
    return torch.tensor(out, dtype=F64)


def turned_by_loops(q, base):
    """Complex numbers turned by e^{i p theta_k}, pair by pair."""
    out, half = [], len(q[0]) // 2
    for p, row in enumerate(q):
        z = [complex(row[k], row[k + half]) for k in range(half)]
        z = [each * complex(math.cos(a), math.sin(a)) for k, each in enumerate(z) for a in [p * base ** (-k / half)]]
        out.append([each.real for each in z] + [each.imag for each in z])
    return out


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_positions_against_loops(causal):
    x, beta = tokens(5, 4), 1.7
    q, k = turned_by_loops((x @ B).tolist(), 100.0), turned_by_loops(x.tolist(), 100.0)
    logits = [
        [beta * dot(a, b) if j <= i or not causal else -math.inf for j, b in enumerate(k)] for i, a in enumerate(q)
    ]
    wanted = softmax_by_loops(logits, (x @ V.mT).tolist())
    field = hs.SA(beta, query_key=B, value=V, causal=causal, positions=hs.fields.Rotary(base=100.0))
    assert (field.ambient(x[None])[0] - wanted).abs().max() < 1e-13
    assert not field.exchangeable
    assert not field.isotropic


def test_rotary_positions_are_those_of_llama():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q = normal(2, 1, 7, 8, seed=3)
    angle = torch.arange(7, dtype=F64)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2, dtype=F64) / 8)
    cos, sin = (torch.cat([part, part], -1)[None] for part in (angle.cos(), angle.sin()))
    wanted = apply_rotary_pos_emb(q, q, cos, sin)[0]
    assert (hs.fields.Rotary().transform_queries(q) - wanted).abs().max() < 1e-14


def test_rotary_logits_depend_on_the_distance_alone():
    x = tokens(1, 4).expand(6, 4)
    kernel = hs.SA(2.0, query_key=B, positions=hs.fields.Rotary(10.0)).kernel(x[None])[0]
    ratio = kernel / kernel.diagonal().unsqueeze(-1)
    for shift in range(-3, 4):
        band = ratio.diagonal(shift)
        assert (band - band[0]).abs().max() < 1e-12


def test_additive_positions_against_loops():
    x, table, beta = tokens(5, 4), normal(7, 4, seed=4), 0.8
    z = (x + table[:5]).tolist()
    logits = [[beta * dot(a, b) for b in z] for a in (torch.tensor(z, dtype=F64) @ B).tolist()]
    wanted = softmax_by_loops(logits, x.tolist())
    assert (
        hs.SA(beta, query_key=B, positions=hs.fields.AdditivePositions(table)).ambient(x[None])[0] - wanted
    ).abs().max() < 1e-13


@pytest.mark.parametrize("positions", [hs.fields.Rotary(50.0), hs.fields.AdditivePositions(normal(5, 4, seed=6))])
def test_heads_share_their_positions(positions):
    x, thin = tokens(3, 5, 4), LowRank(normal(4, 2, seed=7), normal(4, 2, seed=8))
    heads = [hs.SA(beta, query_key=thin, value=V, positions=positions) for beta in (0.5, 2.0)]
    wanted = torch.stack([head.velocity(x) for head in heads]).mean(0)
    assert (MultiHead(heads).velocity(x) - wanted).abs().max() < 1e-13


def test_a_second_cloud_against_loops():
    x, y, m = tokens(3, 4), tokens(6, 4, seed=5), [1.0, 2.0, 0.0, 0.5, 1.0, 3.0]
    beta = 1.3
    logits = [[beta * dot(a, b) for b in y.tolist()] for a in (x @ B).tolist()]
    wanted = softmax_by_loops(logits, (y @ V.mT).tolist(), m)
    weights = torch.tensor(m, dtype=F64)
    field = hs.CrossAttention(beta, y, query_key=B, value=V, memory_weights=weights)
    assert (field.ambient(x[None])[0] - wanted).abs().max() < 1e-13
    assert (field.cross_kernel(x[None])[0, :, 2] == 0).all()
    torch.testing.assert_close(field(x), hs.sphere.project(x, wanted), rtol=0, atol=1e-13)


def test_tokens_gather_where_one_context_token_is():
    """x' = P y: the angle to y obeys theta' = -sin theta, tan(theta / 2) falls as e^{-t}."""
    x, y = tokens(2, 5, 3), tokens(1, 3, seed=9)
    end = hs.integrate(hs.CrossAttention(2.0, y), x, [1.5]).states[-1]
    before, after = (torch.tan(hs.sphere.angle(part, y.expand_as(part)) / 2) for part in (x, end))
    assert (after - before * math.exp(-1.5)).abs().max() < 1e-8


def test_one_context_per_system():
    x, y = tokens(4, 5, 3), tokens(4, 2, 3, seed=9)
    whole = hs.integrate(hs.CrossAttention(2.0, y), x, [0.7]).states[-1]
    for k in range(4):
        alone = hs.integrate(hs.CrossAttention(2.0, y[k]), x[k], [0.7]).states[-1]
        assert (whole[k] - alone).abs().max() < 1e-12


def test_one_field_per_layer():
    x = tokens(3, 5, 4)
    fields = [hs.SA(1.0, value=V), hs.SA(3.0, query_key=B), hs.SA(0.5)]
    stack = hs.integrate(hs.fields.LayerwiseField(fields), x, [0, 1, 2, 3], stepper=hs.Layer()).states
    state = x
    for k, field in enumerate(fields):
        state = hs.integrate(field, state, [1], stepper=hs.Layer()).states[-1]
        assert (stack[k + 1] - state).abs().max() < 1e-14
    flow = hs.integrate(hs.fields.LayerwiseField(fields), x, [0.5, 3.0], stepper=hs.DormandPrince(1e-10)).states[-1]
    state = x
    for field in fields:
        state = hs.integrate(field, state, [1.0], stepper=hs.DormandPrince(1e-10)).states[-1]
    assert (flow - state).abs().max() < 1e-7  # 5e-9: steps across the jumps
    run = hs.integrate(hs.fields.LayerwiseField(fields), x, [0.5, 1.5])
    assert torch.equal(run.kernel(layer=1), fields[1].kernel(run.trajectory.states[1]))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hs.SA(1.0, positions="rotary"), "positions is 'rotary'"),
        (lambda: hs.SA(1.0, positions=hs.fields.Rotary())(tokens(2, 3)), "queries have dimension 3.*even"),
        (
            lambda: hs.SA(1.0, positions=hs.fields.AdditivePositions(torch.zeros(2, 4)))(tokens(3, 4)),
            r"table has shape \(2, 4\)",
        ),
        (lambda: hs.fields.AdditivePositions(torch.zeros(2)), r"table is \(2,\)"),
        (lambda: hs.fields.Rotary(0.0), "base is 0.0"),
        (lambda: hs.CrossAttention(1.0, torch.zeros(3)), r"memory is \(3,\)"),
        (lambda: hs.CrossAttention(1.0, tokens(2, 4))(tokens(3, 3)), r"memory has shape \(2, 4\)"),
        (lambda: hs.CrossAttention(1.0, tokens(2, 4), memory_weights=torch.zeros(2)), "without any token"),
        (lambda: hs.fields.LayerwiseField([]), r"layers is \[\]"),
        (lambda: hs.fields.LayerwiseField([3]), r"layers is \[3\]"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


# A second cloud through the kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(2_100, 5), (7, 2_100)])
def test_large_clouds_store_no_pairs_and_match_loops(n, m):
    x, y = tokens(n, 4), tokens(m, 4, seed=1)
    weights = (normal(m, seed=3) + 1).clamp(min=0)
    field = hs.CrossAttention(3.0, y, query_key=B, value=V, memory_weights=weights)
    with using_summation() as kernels:
        seen = field.ambient(x[None])[0]
    assert kernels == {"Blockwise"}
    rows = x[[0, n // 2, n - 1]]
    logits = [[3.0 * dot((B.mT @ i).tolist(), j.tolist()) for j in y] for i in rows]
    expected = softmax_by_loops(logits, (y @ V.mT).tolist(), weights.tolist())
    assert (seen[[0, n // 2, n - 1]] - expected).abs().max() < 1e-12  # measured 1e-15


@pytest.mark.parametrize("kernel", [Dense(), Blockwise(), Blockwise(block=(2, 3))])
@pytest.mark.parametrize(("n", "m"), [(5, 7), (7, 5)])
def test_every_kernel_takes_a_second_cloud(kernel, n, m):
    """Weights, one of them 0, and a bias that hides all keys from the first query, in a batch."""
    query, key, value = normal(2, n, 4, seed=1), normal(2, m, 4, seed=2), normal(2, m, 3, seed=3)
    weights = torch.tensor([1.0, 2.0, 0.0, 0.5, 1.0, 1.0, 3.0], dtype=F64)[:m]
    bias = normal(n, m, seed=4)
    bias[0] = -math.inf
    with using_summation(kernel):
        sums = token_sum(Request(query, key, value, weights=weights, bias=bias))
    assert sums.mean[:, 0].abs().max() == 0
    for k in range(2):
        logits = [[dot(i.tolist(), j.tolist()) for j in key[k]] for i in query[k]]
        shifted = (torch.tensor(logits, dtype=F64) + bias)[1:].tolist()
        expected = softmax_by_loops(shifted, value[k].tolist(), weights.tolist())
        assert (sums.mean[k, 1:] - expected).abs().max() < 1e-12  # measured 1e-15
        mass = [math.log(sum(w * math.exp(z) for w, z in zip(weights.tolist(), row, strict=True))) for row in shifted]
        assert sums.log_mass[k, 1:, 0].tolist() == pytest.approx(mass, rel=1e-12)


@pytest.mark.parametrize("kernel", [Dense(), Blockwise()])
def test_a_second_cloud_has_its_gradient(kernel):
    x, y = tokens(3, 4), tokens(5, 4, seed=1)

    def f(x, y, b):
        with using_summation(kernel):
            return hs.CrossAttention(2.0, y, query_key=b).ambient(x[None])

    given = [each.clone().requires_grad_() for each in (x, y, B)]
    assert torch.autograd.gradcheck(f, given)


def test_flash_takes_one_cloud():
    x = torch.zeros(4, 3)
    assert Flash().unsupported_reason(Request(x, x[:2], x[:2])) == "it takes queries and keys of one cloud"


# One field per layer: scales, maps, and a field behind its method -----------------------------------------------------


def test_layers_whose_velocity_overflows_have_displacements():
    """e^97 is no float32, but the displacement over 1e-43 is; each system by the layer at its own time."""
    x = torch.stack([tokens(3, 4), tokens(3, 4, seed=1)]).float()
    x[:, 1] = torch.nn.functional.normalize(x[:, 0] + 0.1 * x[:, 2], dim=-1)
    layers = [hs.USA(beta=100.0), hs.SA(beta=1.0), hs.USA(beta=98.0)]
    field, h = hs.fields.LayerwiseField(layers), torch.full((2, 1, 1), 1e-43, dtype=F64)
    assert not layers[0].velocity(x).isfinite().all()
    assert torch.equal(field.displacement(x, h, t=0.5), layers[0].displacement(x, h))
    times = torch.tensor([2.5, 0.5], dtype=F64)[:, None, None]
    each = field.displacement(x, h, t=times)
    assert torch.equal(each[:1], layers[2].displacement(x[:1], h[:1]))
    assert torch.equal(each[1:], layers[0].displacement(x[1:], h[1:]))
    assert each.isfinite().all()
    assert each.abs().max() > 1e-6


def test_layers_whose_velocity_overflows_are_integrated():
    x = torch.stack([tokens(3, 4), tokens(3, 4, seed=1)]).float()
    x[:, 1] = torch.nn.functional.normalize(x[:, 0] + 0.1 * x[:, 2], dim=-1)
    stepper = hs.DormandPrince()
    alone = hs.integrate(hs.USA(beta=100.0), x, [3e-44], stepper=stepper)
    stack = hs.integrate(hs.fields.LayerwiseField([hs.USA(beta=100.0), hs.SA(beta=1.0)]), x, [3e-44], stepper=stepper)
    assert stack.outcome.ok
    torch.testing.assert_close(stack.states, alone.states, rtol=0, atol=1e-5)
    assert not torch.equal(stack.states[-1], x)


def test_a_discrete_map_has_no_velocity_in_any_position():
    mlp = hs.MLP(w_in=torch.eye(4, dtype=F64), w_out=torch.eye(4, dtype=F64), activation=hs.activations.ReLU())
    block = hs.Block(hs.SA(beta=1.0), mlp, placement=hs.fields.PostNorm(attention_norm=hs.fields.LayerNorm()))
    assert block.discrete_only
    for field in (block, hs.fields.LayerwiseField([block, block])):
        sentence = rf"^field is {field.name}, a discrete map that has no velocity: call layer$"
        with pytest.raises(HelmscopeError, match=sentence):
            field(tokens(3, 4))


def test_a_field_is_recovered_from_its_bound_velocity():
    class Half(hs.SA):
        def velocity(self, x, weights=None, *, t=0.0):
            return super().velocity(x, weights, t=t) / 2

        @property
        def whole(self):
            return super().velocity

    field = hs.SA(beta=1.0)
    assert as_field(field.velocity) is field
    assert as_field(field.__call__) is field
    assert as_field(field.velocity).autonomous
    assert as_field(Half(beta=1.0).whole) is not field
    plain = as_field(Half(beta=1.0).whole)
    x = tokens(3, 4)
    torch.testing.assert_close(plain.velocity(x), field.velocity(x))  # not what the subclass makes of it
    far = hs.integrate(field.velocity, x, [1e5])
    assert far.outcome.statuses == (hs.types.Status.AT_REST,)
