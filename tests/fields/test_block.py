"""Blocks: every placement of norms, sequential and parallel, against plain loops, a textbook layer and SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from helmscope.fields.activations import GELU, Identity, ReLU, SiLU
from helmscope.fields.attention import SA, USA
from helmscope.fields.block import Block
from helmscope.fields.field import StateSpace
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.fields.norms import LayerNorm, RMSNorm, UnitNorm
from helmscope.fields.placement import NGPT, Half, PostNorm, PreNorm, SandwichNorm, folded
from helmscope.geometry.sphere import project
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.events import HittingTime
from helmscope.solve.geodesic_euler import GeodesicEuler
from helmscope.solve.integrate import integrate
from helmscope.solve.layer import Layer
from helmscope.solve.rk4 import RK4
from helmscope.types import HelmscopeError, Status
from support import oracles
from support.attention_cases import normal, tokens

F64 = torch.float64
N, D, HIDDEN = 5, 4, 7


def relu_mlp(seed=0, scale=0.4):
    return MLP(
        w_in=scale * normal(HIDDEN, D, seed=seed),
        w_out=scale * normal(D, HIDDEN, seed=seed + 1),
        b_in=scale * normal(HIDDEN, seed=seed + 2),
        b_out=scale * normal(D, seed=seed + 3),
        activation=ReLU(),
    )


def gated(seed=0, scale=0.4):
    return GatedMLP(
        w_gate=scale * normal(HIDDEN, D, seed=seed),
        w_up=scale * normal(HIDDEN, D, seed=seed + 1),
        w_out=scale * normal(D, HIDDEN, seed=seed + 2),
        b_gate=scale * normal(HIDDEN, seed=seed + 3),
        b_up=scale * normal(HIDDEN, seed=seed + 4),
        activation=SiLU(),
    )


def layer_norms(seed=0):
    """Norms with everything a real one has."""
    return {
        "attention_norm": LayerNorm(gain=1 + 0.3 * normal(D, seed=seed), bias=0.2 * normal(D, seed=seed + 1), eps=1e-5),
        "mlp_norm": RMSNorm(gain=1 + 0.3 * normal(D, seed=seed + 2), eps=1e-6),
    }


# the same block with Python floats, row by row -----------------------------------------------------------------------


def unit(y):
    size = math.sqrt(math.fsum(a * a for a in y))
    return [a / size for a in y]


def plain_norm(norm, y):
    if isinstance(norm, UnitNorm):
        return unit(y)
    mean = math.fsum(y) / len(y) if isinstance(norm, LayerNorm) else 0.0
    centered = [a - mean for a in y]
    scale = math.sqrt(math.fsum(a * a for a in centered) / len(y) + norm.eps)
    gain = [1.0] * len(y) if norm.gain is None else norm.gain.tolist()
    bias = getattr(norm, "bias", None)
    shift = [0.0] * len(y) if bias is None else bias.tolist()
    return [g * a / scale + b for g, a, b in zip(gain, centered, shift, strict=True)]


def plain_mlp(mlp, x):
    def affine(w, b):
        rows = w.tolist()
        shift = [0.0] * len(rows) if b is None else b.tolist()
        return [math.fsum(p * q for p, q in zip(row, x, strict=True)) + s for row, s in zip(rows, shift, strict=True)]

    if isinstance(mlp, GatedMLP):
        gate, up = affine(mlp.w_gate, mlp.b_gate), affine(mlp.w_up, mlp.b_up)
        hidden = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
    else:
        hidden = [max(z, 0.0) for z in affine(mlp.w_in, mlp.b_in)]
    out = [math.fsum(p * q for p, q in zip(row, hidden, strict=True)) for row in mlp.w_out.tolist()]
    return out if mlp.b_out is None else [a + b for a, b in zip(out, mlp.b_out.tolist(), strict=True)]


def plain_halves(block):
    """(what attention adds, what the MLP adds, what closes each) as functions of all rows."""
    place = block.placement
    kind = oracles.sa_ambient if isinstance(block.attention, SA) else oracles.usa_ambient
    reads = isinstance(place, PreNorm)

    def write(half, rows):
        norm = place.attention_norm if half is Half.ATTENTION else place.mlp_norm
        seen = [plain_norm(norm, y) if reads else y for y in rows]
        if half is Half.ATTENTION:
            out = kind(seen, block.attention.beta, causal=block.attention.causal)
        else:
            out = [plain_mlp(block.mlp, x) for x in seen]
        if isinstance(place, SandwichNorm):
            outer = place.attention_out_norm if half is Half.ATTENTION else place.mlp_out_norm
            out = [plain_norm(outer, o) for o in out]
        if isinstance(place, NGPT):
            rate = place.attention_rate if half is Half.ATTENTION else place.mlp_rate
            rates = rate.tolist() if isinstance(rate, torch.Tensor) else [rate] * len(rows[0])
            out = [
                [r * (a - b) for r, a, b in zip(rates, unit(o), y, strict=True)] for o, y in zip(out, rows, strict=True)
            ]
        return out

    def close(half, rows):
        if reads:
            return rows
        norm = place.attention_norm if half is Half.ATTENTION else place.mlp_norm
        return [plain_norm(norm, y) for y in rows]

    return write, close


def add(rows, writes, h):
    return [[a + h * b for a, b in zip(y, w, strict=True)] for y, w in zip(rows, writes, strict=True)]


def plain_layer(block, rows, h):
    write, close = plain_halves(block)
    if block.parallel:
        total = add(add(rows, write(Half.ATTENTION, rows), h), write(Half.MLP, rows), h)
        return close(Half.ATTENTION, total)
    for half in (Half.ATTENTION, Half.MLP):
        rows = close(half, add(rows, write(half, rows), h))
    return rows


PLACEMENTS = {
    "post": PostNorm(),
    "post real": PostNorm(**layer_norms()),
    "pre": PreNorm(),
    "pre real": PreNorm(**layer_norms()),
    "sandwich": SandwichNorm(),
    "sandwich real": SandwichNorm(
        **layer_norms(),
        attention_out_norm=RMSNorm(eps=1e-6),
        mlp_out_norm=RMSNorm(gain=1 + 0.1 * normal(D, seed=9), eps=1e-6),
    ),
    "nGPT": NGPT(attention_rate=0.7, mlp_rate=0.3 + 0.1 * normal(D, seed=4).abs()),
}


@pytest.mark.parametrize("mlp", [relu_mlp(), gated()], ids=["ungated", "gated"])
@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_layer_and_flow_against_loops(name, parallel, mlp):
    place = PLACEMENTS[name]
    for attention in (SA(beta=1.5, causal=True), USA(beta=0.8)):
        block = Block(attention, mlp, placement=place, parallel=parallel)
        x = tokens(N, D, seed=3)
        if block.space is not StateSpace.SPHERE:
            x = x * (1 + normal(N, seed=8).abs())[:, None]
        expected = torch.tensor(plain_layer(block, x.tolist(), 0.6), dtype=F64)
        assert (block.layer(x, 0.6) - expected).abs().max() < 1e-12
        write, _ = plain_halves(block)
        both = add(write(Half.ATTENTION, x.tolist()), write(Half.MLP, x.tolist()), 1.0)
        written = torch.tensor(both, dtype=F64)
        assert (block.ambient(x) - written).abs().max() < 1e-12
        moved = project(x, written) if block.space is StateSpace.SPHERE else written
        assert (block.velocity(x) - moved).abs().max() < 1e-12


def test_the_layer_equals_a_layer_of_torch():
    """A GPT-2 half-block from torch's own pieces: layer_norm, softmax attention, gelu."""
    heads = SA(beta=1.0 / math.sqrt(D), causal=True)
    mlp = MLP(w_in=normal(HIDDEN, D), w_out=normal(D, HIDDEN, seed=1), b_in=normal(HIDDEN, seed=2), activation=GELU())
    norms = {
        "attention_norm": LayerNorm(gain=normal(D, seed=3), bias=normal(D, seed=4), eps=1e-5),
        "mlp_norm": LayerNorm(gain=normal(D, seed=5), bias=normal(D, seed=6), eps=1e-5),
    }
    y = normal(N, D, seed=7)
    seen = torch.nn.functional.layer_norm(y, (D,), norms["attention_norm"].gain, norms["attention_norm"].bias, 1e-5)
    after = y + torch.nn.functional.scaled_dot_product_attention(seen, seen, seen, is_causal=True)
    seen = torch.nn.functional.layer_norm(after, (D,), norms["mlp_norm"].gain, norms["mlp_norm"].bias, 1e-5)
    after = after + torch.nn.functional.gelu(seen @ mlp.w_in.T + mlp.b_in) @ mlp.w_out.T
    assert (Block(heads, mlp, placement=PreNorm(**norms)).layer(y) - after).abs().max() < 1e-12


@pytest.mark.parametrize("name", [name for name in PLACEMENTS if name != "post real"])
def test_layers_converge_to_the_flow(name):
    """Sequential and parallel layers of size h reach the same flow, with an error of order h."""
    block = Block(SA(beta=1.0), relu_mlp(), placement=PLACEMENTS[name])
    x = tokens(N, D, seed=2)
    exact = integrate(block, x, [1.0], stepper=DormandPrince(tol=1e-11))
    for parallel in (False, True):
        other = Block(SA(beta=1.0), relu_mlp(), placement=PLACEMENTS[name], parallel=parallel)
        errors = []
        for h in (0.02, 0.01):
            run = integrate(other, x, [1.0], stepper=Layer(h))
            errors.append(float((run.residual_stream(depth=0) - exact.residual_stream(depth=0)).abs().max()))
        assert errors[0] < 0.1
        assert abs(math.log2(errors[0] / errors[1]) - 1) < 0.1


def test_sequential_and_parallel_differ_by_the_commutator():
    """Per layer y_seq - y_par = h^2 Dm a + O(h^3), [Helmholtz Transformer, no. 8], on a pre-norm stream."""
    block = Block(SA(beta=1.0), gated(), placement=PreNorm())
    y = normal(N, D, seed=1)
    _, slope = torch.func.jvp(lambda y: block.write(Half.MLP, y), (y,), (block.write(Half.ATTENTION, y),))
    gaps = []
    for h in (1e-2, 5e-3):
        together = Block(SA(beta=1.0), gated(), placement=PreNorm(), parallel=True).layer(y, h)
        gaps.append(float(((block.layer(y, h) - together) / h**2 - slope).abs().max()))
    assert gaps[0] < 0.05
    assert abs(gaps[0] / gaps[1] - 2) < 0.1


# the residual stream -------------------------------------------------------------------------------------------------


def test_direction_and_radius_obey_their_equations():
    """x' = P f(x) / r, r' = <x, f(x)> [Helmholtz Transformer, no. 1], integrated by SciPy in those coordinates."""
    block = Block(SA(beta=2.0), gated(), placement=PreNorm())
    x0, r0 = tokens(N, D, seed=5), torch.linspace(0.7, 2.0, N, dtype=F64)
    run = integrate(block, r0[:, None] * x0, [0.5, 1.5], stepper=DormandPrince(tol=1e-12))

    def slope(_, state):
        x, r = torch.tensor(state[: N * D].reshape(N, D)), torch.tensor(state[N * D :])
        f = block.attention.ambient(x) + block.mlp.ambient(x)
        along = (x * f).sum(-1)
        return np.concatenate([((f - along[:, None] * x) / r[:, None]).flatten().numpy(), along.numpy()])

    start = np.concatenate([x0.flatten().numpy(), r0.numpy()])
    seen = solve_ivp(slope, (0, 1.5), start, t_eval=[0.5, 1.5], rtol=1e-12, atol=1e-13, method="DOP853").y.T
    for k in range(2):
        assert np.abs(run.states[k].numpy() - seen[k, : N * D].reshape(N, D)).max() < 1e-9
        assert np.abs(run.trajectory.radius[k, 0].numpy() - seen[k, N * D :]).max() < 1e-9


def test_a_large_radius_slows_the_direction():
    """The effective step is 1/|y|: a stream ten times as long takes ten times as long, as its radius hardly changes."""
    block = Block(SA(beta=1.0), relu_mlp(scale=0.05), placement=PreNorm())
    x0 = tokens(N, D, seed=6)
    slow = integrate(block, 1e4 * x0, [10.0]).states[-1]
    fast = integrate(block, 1e5 * x0, [100.0]).states[-1]
    assert (slow - fast).abs().max() < 1e-12
    assert (slow - x0).abs().max() > 1e-4


def test_radius_sets_the_tolerance():
    """The adaptive step looks at relative errors: scaled by c in radius and time, a run takes the same steps."""
    block = Block(USA(beta=1.0), gated(), placement=PreNorm())
    x0 = tokens(3, N, D, seed=7)
    small, large = integrate(block, x0, [2.0]), integrate(block, 8 * x0, [16.0])
    assert (small.states - large.states).abs().max() < 1e-12
    assert (8 * small.trajectory.radius - large.trajectory.radius).abs().max() < 1e-10


def test_a_stream_resumes_with_its_radius_and_has_a_kernel():
    block = Block(
        SA(beta=2.0), gated(), placement=PreNorm(mlp_norm=RMSNorm(eps=1e-3), attention_norm=RMSNorm(eps=1e-3))
    )
    y0 = 3 * tokens(2, N, D, seed=8)
    run = integrate(block, y0, [0.0, 1.0, 2.0])
    again = run.resume(depth=1, states=run.trajectory.states[1])
    assert (again.states[-1] - run.states[-1]).abs().max() < 1e-8
    assert (again.trajectory.radius[-1] - run.trajectory.radius[-1]).abs().max() < 1e-8
    assert (run.residual_stream(depth=0) - y0).abs().max() < 1e-15
    seen = block.placement.attention_norm(y0)
    assert (run.kernel(layer=0) - SA(beta=2.0).kernel(seen)).abs().max() < 1e-14


def test_what_the_norm_before_attention_removes_is_kept():
    """LayerNorm removes the mean, which an RMSNorm before the MLP reads."""
    norms = {"attention_norm": LayerNorm(), "mlp_norm": RMSNorm()}
    block = Block(SA(beta=1.5), gated(), placement=PreNorm(**norms))
    y0 = normal(2, N, D, seed=3) + 2
    run = integrate(block, y0, [0.0, 0.5, 1.0])
    again = run.resume(depth=1, states=run.trajectory.states[1])
    assert torch.equal(again.residual_stream(depth=0), run.residual_stream(depth=1))
    assert (again.residual_stream(depth=-1) - run.residual_stream(depth=-1)).abs().max() < 1e-7
    turned = run.trajectory.states[1].flip(-2)
    other = run.resume(depth=1, states=turned)
    assert (other.states[0] - turned).abs().max() < 1e-14
    assert (other.trajectory.radius[0] - run.trajectory.radius[1]).abs().max() < 1e-14
    assert (other.residual_stream(depth=0).mean(-1) - run.residual_stream(depth=1).mean(-1)).abs().max() < 1e-14


def test_a_stream_that_reaches_zero_stops_and_reports_it():
    """y' = -y/|y| ends at t = |y_0|, where no direction is left."""
    inward = MLP(w_in=torch.eye(D, dtype=F64), w_out=-torch.eye(D, dtype=F64), activation=Identity())
    nothing = SA(beta=0.0, value=torch.zeros(D, D, dtype=F64))
    y0 = torch.stack([2 * tokens(N, D), 0.5 * tokens(N, D)])
    run = integrate(Block(nothing, inward, placement=PreNorm()), y0, [0.25, 1.0])
    assert run.outcome.statuses == (Status.FINISHED, Status.NO_RADIUS)
    assert "radius of a residual stream fell to 0 at t=0.5" in str(run.outcome)
    assert (run.trajectory.radius[1, 0] - 1).abs().max() < 1e-8
    assert run.trajectory.radius[1, 1].isnan().all()


def test_events_receive_directions():
    """Two tokens of different radius that attend: the hitting time is that of their directions."""
    block = Block(
        SA(beta=0.0), MLP(w_in=torch.zeros(1, 2), w_out=torch.zeros(2, 1), activation=ReLU()), placement=PreNorm()
    )
    y0 = torch.tensor([[2.0, 0.0], [0.0, 0.5]], dtype=F64)
    run = integrate(block, y0, [200.0], events=[HittingTime(1e-2)])
    when = float(run.event_times[0])
    at = integrate(block, y0, [when]).states[-1]
    assert abs(float(at[0] @ at[1]) - 0.99) < 1e-8


def test_layernorm_streams_are_on_the_smaller_sphere():
    block = Block(SA(beta=1.0), gated(), placement=PreNorm(attention_norm=LayerNorm(), mlp_norm=LayerNorm()))
    run = integrate(block, normal(2, N, D, seed=9) + 3, [0.0, 1.0])
    assert run.states.sum(-1).abs().max() < 1e-14
    assert (torch.linalg.vector_norm(run.states, dim=-1) - 1).abs().max() < 1e-14


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_block_does_not_depend_on_its_batch_to_the_bit(name):
    block = Block(SA(beta=1.0), gated(), placement=PLACEMENTS[name])
    x = tokens(4, N, D, seed=10)
    stepper = Layer(0.5) if block.discrete_only else None
    whole = integrate(block, x, [1.0], stepper=stepper).states
    for k in range(4):
        assert torch.equal(integrate(block, x[k : k + 1], [1.0], stepper=stepper).states[:, 0], whole[:, k])


# the force -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm", [RMSNorm(gain=normal(D, seed=1)), LayerNorm(gain=normal(D, seed=2), bias=normal(D, seed=3))]
)
@pytest.mark.parametrize("mlp", [relu_mlp(), gated()], ids=["ungated", "gated"])
def test_folded_norms(norm, mlp):
    x = norm.direction(normal(20, D, seed=4))
    assert (folded(mlp, norm)(x) - mlp(norm(x))).abs().max() < 1e-13


def test_the_force_of_a_simulation():
    mlp = relu_mlp()
    x = tokens(N, D)
    assert integrate(Block(SA(beta=1.0), mlp), x, [0.1]).force(layer=0) is mlp
    assert integrate(mlp, x, [0.1]).force(layer=-1) is mlp
    assert integrate(SA(beta=1.0), x, [0.1]).force(layer=0) is None
    block = Block(SA(beta=1.0), mlp, placement=PreNorm(mlp_norm=RMSNorm(gain=2 * torch.ones(D, dtype=F64))))
    run = integrate(block, 3 * x, [0.0, 0.1])
    written = block.write(Half.MLP, run.residual_stream(depth=1))
    assert (run.force(layer=1)(run.trajectory.states[1]) - written).abs().max() < 1e-13
    with pytest.raises(HelmscopeError, match="stored times are numbered 0 to 1"):
        run.force(layer=2)


def test_an_mlp_is_a_field():
    mlp = gated()
    x = tokens(2, N, D, seed=3)
    fine = integrate(mlp, x, [1.0], stepper=DormandPrince(tol=1e-11)).states
    assert (integrate(mlp, x, [1.0], stepper=RK4(0.01)).states - fine).abs().max() < 1e-8
    first = integrate(mlp, x, [1e-6]).states[0]
    assert ((first - x) / 1e-6 - project(x, mlp(x))).abs().max() < 1e-5


# refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Block(SA, relu_mlp()), "attention is SA, but it must be an attention field"),
        (lambda: Block(relu_mlp(), relu_mlp()), "attention is MLP, but it must be an attention field"),
        (lambda: Block(SA(beta=1.0), torch.nn.Linear(2, 2)), "mlp is .*but it must be an MLP or a GatedMLP"),
        (lambda: Block(SA(beta=1.0), relu_mlp(), placement=PostNorm), "placement is .*such as PreNorm"),
        (lambda: Block(SA(beta=1.0), relu_mlp(), parallel=1), "parallel is 1, but it must be True or False"),
        (
            lambda: Block(SA(beta=1.0), relu_mlp()).write(Half.CROSS, tokens(N, D)),
            "half is Half.CROSS, but .*two halves",
        ),
        (lambda: PreNorm(mlp_norm=torch.nn.LayerNorm(3)), "mlp_norm is .*UnitNorm"),
        (lambda: NGPT(attention_rate=-1.0), "attention_rate is -1.0, but it must be a finite number >= 0"),
        (lambda: NGPT(mlp_rate=torch.tensor([1.0, math.nan])), "an entry of mlp_rate is nan"),
        (lambda: NGPT(attention_norm=RMSNorm()), "attention_norm is RMSNorm.*must be UnitNorm"),
        (lambda: SandwichNorm(mlp_out_norm=3), "mlp_out_norm is 3, but it must be a norm"),
        (lambda: Block(SA(beta=1.0), relu_mlp())(tokens(N, 3)), "need"),
        (lambda: Block(SA(beta=1.0), relu_mlp())(2 * tokens(N, D)), "norm 2"),
        (lambda: Block(SA(beta=1.0), relu_mlp(), placement=PLACEMENTS["post real"])(tokens(N, D)), "a discrete map"),
        (lambda: Block(SA(beta=1.0), relu_mlp(), placement=NGPT(mlp_rate=torch.ones(2)))(tokens(N, D)), "mlp_rate has"),
        (
            lambda: integrate(Block(SA(beta=1.0), relu_mlp(), placement=PLACEMENTS["post real"]), tokens(N, D), [1.0]),
            r"DormandPrince.*is a map, not a flow.*use Layer\(\)",
        ),
        (
            lambda: integrate(
                Block(SA(beta=1.0), relu_mlp(), placement=PreNorm()), tokens(N, D), [1.0], stepper=GeodesicEuler(0.1)
            ),
            "GeodesicEuler, which follows great circles",
        ),
        (
            lambda: integrate(Block(SA(beta=1.0), relu_mlp(), placement=PreNorm()), tokens(N, D), [1.0], merge=1e-6),
            "merge is 1e-06",
        ),
        (
            lambda: integrate(Block(SA(beta=1.0), relu_mlp(), placement=PreNorm()), torch.zeros(N, D), [1.0]),
            "zero vector",
        ),
    ],
)
def test_refusals(make, sentence):
    with pytest.raises(HelmscopeError, match=sentence):
        make()


def test_gradients_pass_through_a_block():
    block = Block(SA(beta=1.0), gated(), placement=SandwichNorm())
    x = normal(3, D, seed=2).requires_grad_(True)
    assert torch.autograd.gradcheck(block.layer, (x,))
    assert torch.autograd.gradcheck(block.velocity, (x,))
