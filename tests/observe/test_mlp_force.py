"""Drift and swirl along a trajectory against loops over neurons and tokens, and closed forms of linear forces."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import helmscope as hs
import support.mechanism_oracles as oracles
import support.oracles as attention_oracles
from helmscope.fields.activations import Identity, ReLU, SiLU, Tanh
from helmscope.fields.block import Block
from helmscope.fields.helmholtz import helmholtz
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.fields.norms import LayerNorm, RMSNorm
from helmscope.fields.placement import PreNorm
from helmscope.geometry import surface
from helmscope.models.record import record
from helmscope.observe.mlp_force import mlp_force
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
DRAW = torch.Generator().manual_seed(0)
D, HIDDEN = 3, 6
W_IN, W_GATE = torch.randn(2, HIDDEN, D, dtype=F64, generator=DRAW)
W_OUT = torch.randn(D, HIDDEN, dtype=F64, generator=DRAW)
B_IN, B_OUT = torch.randn(HIDDEN, dtype=F64, generator=DRAW), torch.randn(D, dtype=F64, generator=DRAW)
TANH = MLP(w_in=W_IN, w_out=W_OUT, b_in=B_IN, b_out=B_OUT, activation=Tanh())
GATED = GatedMLP(w_gate=W_GATE, w_up=W_IN, w_out=W_OUT, b_gate=B_IN, b_out=B_OUT, activation=SiLU())
X = hs.Uniform(4, D).sample(3, seed=0)
MASK = torch.tensor([[True] * 4, [False, True, True, True], [True, True, False, False]])
TIMES = [0.0, 0.3]


def by_tokens(of_token, states, mask):
    """Mean over the real tokens of each system, (time, batch), of every quantity of a token."""
    rows = [
        [[of_token(x) for x, m in zip(cloud, real, strict=True) if m] for cloud, real in zip(clouds, mask, strict=True)]
        for clouds in states.tolist()
    ]
    return {
        name: np.array([[np.mean([t[name] for t in cloud]) for cloud in row] for row in rows]) for name in rows[0][0][0]
    }


def agrees(seen, values, rel=1e-13) -> None:
    for name, value in values.items():
        assert seen[name].values == pytest.approx(value.mean(1), rel=rel, abs=1e-14), name
        spread = value.std(1, ddof=1) / math.sqrt(value.shape[1])
        assert seen[f"{name}_stderr"].values == pytest.approx(spread, rel=1e-11, abs=1e-14), name


def measured(system, **options):
    """Means, errors and intervals over the systems."""
    return hs.reduce_replicates(mlp_force(system, **options))


@pytest.mark.parametrize("mask", [None, MASK])
def test_an_mlp_is_the_loop_over_neurons(mask):
    run = hs.integrate(TANH, X, times=TIMES, mask=mask)
    seen = measured(run)
    real = torch.ones(3, 4, dtype=torch.bool) if mask is None else mask
    weights = (W_IN.tolist(), W_OUT.tolist(), B_IN.tolist(), B_OUT.tolist())

    def of_token(x):
        return oracles.drift_of_token(x, oracles.tanh_force(x, *weights))

    agrees(seen, by_tokens(of_token, run.states, real))

    def squares(x):
        token = of_token(x)
        return {"swirl": token["swirl_length_unit_sphere"] ** 2, "force_length": token["force_length"] ** 2}

    sums = by_tokens(squares, run.states, real)
    agrees(seen, {"swirl_fraction_as_printed_unit_sphere": sums["swirl"] / sums["force_length"]})
    for name in (
        "potential",
        "energy",
        "gradient_length",
        "swirl_length",
        "swirl_fraction_as_printed",
    ):  # no norm: no other coordinates
        assert seen[f"{name}_mlp_input"].equals(seen[f"{name}_unit_sphere"])
    assert seen.attrs["n"] == 3
    assert "attention_tangential_length" not in seen
    assert seen.harmonic_length.values == pytest.approx([B_OUT.norm().item()] * 2, rel=1e-13)


def test_a_gated_mlp_in_a_block_with_attention():
    run = hs.integrate(Block(hs.SA(2.0), GATED), X, times=TIMES)
    seen, split = measured(run), helmholtz(GATED)

    def of_token(listed):
        x = torch.tensor(listed, dtype=F64)
        df = torch.autograd.functional.jacobian(GATED.ambient, x)
        return {
            "force_length": GATED(x).norm().item(),
            "gradient_length_unit_sphere": split.gradient(x).norm().item(),
            "swirl_length_unit_sphere": split.swirl(x).norm().item(),
            "potential_unit_sphere": split.potential(x).item(),
            "trace": df.trace().item(),
            "antisymmetric_share": ((df - df.T).norm() ** 2 / 4 / df.norm() ** 2).item(),
            "surface_divergence": surface.divergence(GATED.ambient, x).item(),
        }

    agrees(seen, by_tokens(of_token, run.states, torch.ones(3, 4, dtype=torch.bool)))
    speeds = [
        [np.mean([math.hypot(*v) for v in attention_oracles.sa_velocity(cloud, 2.0)]) for cloud in clouds]
        for clouds in run.states.tolist()
    ]
    agrees(seen, {"attention_tangential_length": np.array(speeds)})


def test_weights_reach_attention():
    mass = torch.tensor([1.0, 3.0, 0.5, 0.0], dtype=F64)
    run = hs.integrate(Block(hs.SA(2.0), TANH), X, times=[0.0], weights=mass)
    seen = measured(run)
    speed = (hs.SA(2.0)(X, weights=mass).norm(dim=-1) @ mass).mean() / mass.sum()
    assert seen.attention_tangential_length.item() == pytest.approx(speed.item(), rel=1e-14)


def test_a_residual_stream_has_the_force_on_its_directions():
    norm = RMSNorm(gain=torch.tensor([0.5, 1.0, 2.0], dtype=F64))
    soft = RMSNorm(eps=0.5)
    block = Block(hs.SA(2.0), TANH, placement=PreNorm(attention_norm=soft, mlp_norm=norm))
    y = 3 * X
    run = hs.integrate(block, y, times=[0.0])
    seen = measured(run)
    f = TANH(norm(y))
    assert seen.force_length.item() == pytest.approx(f.norm(dim=-1).mean().item(), rel=1e-13)
    a = hs.sphere.project(X, hs.SA(2.0).ambient(soft(y)))
    assert seen.attention_tangential_length.item() == pytest.approx(a.norm(dim=-1).mean().item(), rel=1e-13)


def test_under_a_layer_the_mlp_is_read_between_the_halves():
    """And speeds are those of a layer of size 1, whatever its size."""
    block = Block(hs.SA(2.0), TANH)
    run = hs.integrate(block, X, times=[0.0, 0.5], stepper=hs.Layer(0.5))
    seen = measured(run)
    middle = hs.sphere.retract(X + 0.5 * hs.SA(2.0).ambient(X))
    assert seen.force_length[0].item() == pytest.approx(TANH(middle).norm(dim=-1).mean().item(), rel=1e-13)
    speed = hs.SA(2.0)(X).norm(dim=-1).mean()
    assert seen.attention_tangential_length[0].item() == pytest.approx(speed.item(), rel=1e-13)


def test_the_norm_before_the_mlp_says_where_the_force_is_read():
    """LayerNorm before attention removes the mean, which RMSNorm before the MLP keeps."""
    placement = PreNorm(attention_norm=LayerNorm(), mlp_norm=RMSNorm())
    y = 3 * X + 1
    seen = measured(hs.integrate(Block(hs.SA(2.0), TANH, placement=placement), y, times=[0.0]))
    assert seen.force_length.item() == pytest.approx(TANH(RMSNorm()(y)).norm(dim=-1).mean().item(), rel=1e-13)


def linear(matrix):
    """x -> M x."""
    return MLP(w_in=torch.eye(2, dtype=F64), w_out=torch.tensor(matrix, dtype=F64), activation=Identity())


def test_closed_forms_of_linear_forces():
    """For M = [[a, -b], [b, a]]: |f| = sqrt(a^2 + b^2), antisymmetric share b^2 / (a^2 + b^2), U = a / 2."""
    x = hs.Uniform(5, 2).sample(2, seed=1)
    seen = measured(hs.integrate(linear([[3.0, -4.0], [4.0, 3.0]]), x, times=[0.0]))
    exact = {"force_length": 5, "tangential_force_length": 4, "radial_force": 3, "trace": 6}
    exact |= {"potential_unit_sphere": 1.5, "energy_unit_sphere": -1.5}
    exact |= {"gradient_length_unit_sphere": 3, "swirl_length_unit_sphere": 4}
    exact |= {
        "antisymmetric_share": 0.64,
        "swirl_fraction_as_printed_unit_sphere": 0.64,
        "surface_divergence": 0,
        "harmonic_length": 0,
    }
    for name, value in exact.items():
        assert seen[name].item() == pytest.approx(value, rel=1e-14, abs=1e-14), name


def test_the_printed_fraction_belongs_to_the_weights_and_the_index_to_the_function():
    """[Helmholtz Transformer, no. 3]: f(x) = (x_2, x_1) by axes is all swirl, by eigen-directions none; its Jacobian is
    symmetric."""
    axes = torch.eye(2, dtype=F64)
    by_axes = MLP(w_in=torch.cat([axes, -axes]), w_out=torch.cat([axes.flip(0), -axes.flip(0)], 1), activation=ReLU())
    eigen = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=F64) / math.sqrt(2)
    signed = eigen.T * torch.tensor([1.0, -1.0], dtype=F64)
    by_eigen = MLP(w_in=torch.cat([eigen, -eigen]), w_out=torch.cat([signed, -signed], 1), activation=ReLU())
    x = hs.Uniform(5, 2).sample(2, seed=1)
    assert (by_axes(x) - x.flip(-1)).abs().max() < 1e-15
    assert (by_eigen(x) - x.flip(-1)).abs().max() < 1e-15
    fractions = []
    for mlp in (by_axes, by_eigen):
        seen = measured(hs.integrate(mlp, x, times=[0.0]))
        fractions.append(seen.swirl_fraction_as_printed_unit_sphere.item())
        assert seen.antisymmetric_share.item() < 1e-30
    assert fractions == pytest.approx([1.0, 0.0], abs=1e-15)


def test_no_derivative_no_swirl():
    off = MLP(
        w_in=torch.eye(2, dtype=F64),
        w_out=torch.eye(2, dtype=F64),
        b_in=torch.full((2,), -5.0, dtype=F64),
        b_out=torch.ones(2, dtype=F64),
        activation=ReLU(),
    )
    seen = measured(hs.integrate(off, torch.eye(2, dtype=F64)[None], times=[0.0]))
    assert math.isnan(seen.antisymmetric_share.item())
    assert seen.surface_divergence.item() == pytest.approx(-1.0)
    assert math.isnan(seen.force_length_stderr.item())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: mlp_force(hs.integrate(hs.SA(1.0), X, times=[1.0])),
            r"^system has no MLP: force\(layer=0\) is None, but",
        ),
        (lambda: mlp_force(hs.Trajectory(torch.zeros(1), X[None])), "system is a Trajectory.*System"),
        (lambda: mlp_force(TANH), "system is an MLP.*System"),
        (lambda: mlp_force(hs.integrate(TANH, X, times=[1.0]), per_token=1), "per_token is 1.*True or False"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_speed_of_attention_before_a_layernorm_leaves_out_the_mean_over_coordinates():
    recording = record(tiny_model("gpt2", dtype=F64), inputs_of("gpt2", batch=2, n=5))
    seen = mlp_force(recording).attention_tangential_length.values[0]
    y, after = recording.residual_stream(depth=0), recording.residual_stream(depth=1)
    x = y - y.mean(-1, keepdim=True)
    x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    write = after - y
    write = write - write.mean(-1, keepdim=True)
    tangential = write - (x * write).sum(-1, keepdim=True) * x
    assert seen == pytest.approx(torch.linalg.vector_norm(tangential, dim=-1).mean(-1).numpy(), rel=1e-10)
