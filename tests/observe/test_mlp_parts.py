"""Drift and swirl in both coordinates, on the sphere of a LayerNorm, by token, and of mixtures of experts, against
loops over tokens with autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.fields.activations import SiLU, Tanh
from helmscope.fields.block import Block
from helmscope.fields.helmholtz import helmholtz
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.fields.norms import LayerNorm, RMSNorm
from helmscope.fields.placement import PreNorm
from helmscope.models.experts import ClampedGatedMLP, MixtureOfExperts
from helmscope.models.record import record
from helmscope.observe.mlp_force import MlpForce, mlp_force
from helmscope.observe.mlp_mixture import prepare
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
DRAW = torch.Generator().manual_seed(3)
D, HIDDEN = 4, 6


def normal(*shape):
    return torch.randn(*shape, dtype=F64, generator=DRAW)


GAIN, SHIFT = 1 + normal(D) / 3, normal(D) / 2
PLAIN = MLP(w_in=normal(HIDDEN, D), w_out=normal(D, HIDDEN), b_in=normal(HIDDEN), b_out=normal(D), activation=Tanh())
GATED = GatedMLP(
    w_gate=torch.cat([normal(HIDDEN - 2, D), torch.zeros(2, D, dtype=F64)]),  # two neurons have no gate row
    w_up=torch.cat([normal(HIDDEN - 1, D), torch.zeros(1, D, dtype=F64)]),  # one of them is constant
    w_out=normal(D, HIDDEN),
    b_gate=normal(HIDDEN),
    b_up=normal(HIDDEN),
    b_out=normal(D),
    activation=SiLU(),
)
Y = 3 * normal(2, 3, D) + 1


@pytest.mark.parametrize("mlp", [PLAIN, GATED])
@pytest.mark.parametrize("norm", [LayerNorm(gain=GAIN, bias=SHIFT), RMSNorm(gain=GAIN)])
def test_both_coordinates_and_the_sphere_of_the_norm(mlp, norm):
    """Folded, the split is that of f(x) = F(sqrt(d) G x + b); not folded, that of F at the norm's output."""
    block = Block(hs.SA(1.0), mlp, placement=PreNorm(mlp_norm=norm))
    seen = mlp_force(hs.integrate(block, Y, times=[0.0]))
    folded, unfolded = helmholtz(block.force), helmholtz(mlp)
    centered = isinstance(norm, LayerNorm)
    for system in range(2):
        rows = []
        for y in Y[system]:
            x, z = norm.direction(y), norm(y)
            f, jacobian = mlp(z), torch.autograd.functional.jacobian(block.force.ambient, x)
            # an orthonormal basis of the tangent space, by hand
            normals = torch.stack([x, torch.ones(D, dtype=F64) / 2]) if centered else x[None]
            basis = torch.linalg.svd(normals).Vh[len(normals) :]
            rows.append(
                {
                    "potential_unit_sphere": folded.potential(x),
                    "potential_mlp_input": unfolded.potential(z),
                    "energy_mlp_input": -unfolded.potential(z),
                    "gradient_length_unit_sphere": folded.gradient(x).norm(),
                    "gradient_length_mlp_input": unfolded.gradient(z).norm(),
                    "swirl_length_unit_sphere": folded.swirl(x).norm(),
                    "swirl_length_mlp_input": unfolded.swirl(z).norm(),
                    "harmonic_length": folded.harmonic(x).norm(),
                    "force_length": f.norm(),
                    "tangential_force_length": (basis @ f).norm(),
                    "surface_divergence": sum(b @ jacobian @ b for b in basis) - len(basis) * (x @ f),
                    "trace": jacobian.trace(),
                }
            )
        for name in rows[0]:
            mean = sum(row[name].item() for row in rows) / 3
            assert seen[name][0, system].item() == pytest.approx(mean, rel=1e-11, abs=1e-12), name
    assert seen.attrs["tangent_dimension"] == str(D - 2 if centered else D - 1)
    label = "length |grad U| of the MLP's gradient part (norm folded in: unit sphere)"
    assert seen.gradient_length_unit_sphere.attrs["long_name"] == label
    assert abs(seen.potential_unit_sphere - seen.potential_mlp_input).max() > 1e-3


def test_values_of_tokens_on_request():
    mask = torch.tensor([[True] * 3, [True, False, True]])
    x = hs.sphere.retract(Y)
    seen = mlp_force(hs.integrate(PLAIN, x, times=[0.0], mask=mask), per_token=True)
    split = helmholtz(PLAIN).potential(x).where(mask, torch.nan)
    np.testing.assert_allclose(seen.token_potential_unit_sphere[0].values, split, rtol=1e-13)
    np.testing.assert_allclose(seen.token_energy_unit_sphere[0].values, -split, rtol=1e-13)
    means = seen.token_antisymmetric_share.mean("token")
    np.testing.assert_allclose(means, seen.antisymmetric_share, rtol=1e-14)


EXPERTS = (GATED, GatedMLP(w_gate=normal(5, D), w_up=normal(5, D), w_out=normal(D, 5)), GATED)
ROUTED = torch.tensor([[0, 1], [1, 0], [0, 0]])  # the third expert reads nothing


def route(x):
    return torch.tensor([[0.7, 0.2], [0.5, 0.4], [1.0, 0.0]], dtype=F64), ROUTED


def test_a_mixture_of_experts_as_routed_and_by_expert():
    x = hs.sphere.retract(normal(1, 3, D))
    mixture = MixtureOfExperts(EXPERTS, route)
    parts = prepare(mixture).at(x)
    assert sorted(parts.experts) == [0, 1]
    for token in range(3):
        point, weights = x[0, token], [0.0, 0.0]
        for share, expert in zip(route(x)[0][token].tolist(), ROUTED[token].tolist(), strict=True):
            weights[expert] += share
        jacobian = sum(w * torch.autograd.functional.jacobian(EXPERTS[e].ambient, point) for e, w in enumerate(weights))
        split = parts.splits["unit_sphere"]
        expected = sum(w * helmholtz(EXPERTS[e]).gradient(point) for e, w in enumerate(weights))
        assert (split.gradient[0, token] - expected).abs().max() < 1e-13
        rest = split.gradient[0, token] + split.swirl[0, token] + parts.harmonic[0, token]
        assert (rest - mixture.ambient(x)[0, token]).abs().max() < 1e-13
        share = ((jacobian - jacobian.T).square().sum() / 4 / jacobian.square().sum()).item()
        assert parts.jacobian.antisymmetric_share[0, token].item() == pytest.approx(share, abs=1e-13)
        assert parts.radial_slope[0, token].item() == pytest.approx((point @ jacobian @ point).item(), abs=1e-12)
    assert parts.experts[1][0].tolist() == [[0.2, 0.5, 0.0]]
    assert parts.experts[1][1].force.isnan().any(-1).tolist() == [[False, False, True]]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_recording_of_a_mixture(family):
    model = tiny_model(family, dtype=F64)
    ids = inputs_of(family)
    recording = record(model, ids)
    seen = mlp_force(recording)
    force, points = recording.force(layer=1), hs.sphere.retract(recording.force_points(layer=1))
    assert seen.force_length[1].values == pytest.approx(force.ambient(points).norm(dim=-1).mean(-1).numpy(), rel=1e-10)
    assert seen.expert_weight.dims == ("layer", "prompt", "expert")
    total = seen.expert_weight.sum("expert").values
    shares = force.select(points)[0].sum(-1).mean(-1).double()
    assert total[1] == pytest.approx(shares.numpy(), rel=1e-6)
    assert ("potential_unit_sphere" in seen) == (family == "mixtral")  # clamped neurons have no potential
    assert (seen.attrs["routing_weights"][:6], float(seen.antisymmetric_share.max()) <= 1) == ("frozen", True)
    again = record(model, ids, batch_size=1).replay(MlpForce())["mlp_force"]
    for name, value in seen.data_vars.items():
        np.testing.assert_allclose(again[name].values, value.values, rtol=1e-10, atol=1e-12)


def test_clamped_neurons_have_a_jacobian_and_no_potential():
    one = ClampedGatedMLP(w_gate=normal(HIDDEN, D), w_up=normal(HIDDEN, D), w_out=normal(D, HIDDEN), limit=0.5)
    parts = prepare(one).at(hs.sphere.retract(normal(2, D)))
    assert parts.splits == {}
    assert parts.jacobian.antisymmetric_share.isfinite().all()


def test_a_state_that_is_not_finite_is_named():
    instrument, x = MlpForce(), hs.sphere.retract(normal(2, 3, D))
    x[1, 2, 0] = math.nan
    instrument.start(hs.types.ReplayPlan(range(6), "layer", list(range(6)), "prompt", 7))
    context = hs.types.ReplayContext(5, hs.types.Half.MLP, 0.0, slice(4, 6))
    with pytest.raises(hs.HelmscopeError, match=r"not finite, at prompt 5, layer 5, token 2, but mlp_force"):
        instrument.mlp(context, hs.types.MlpTensors(x, x, PLAIN, x))


def test_identical_tokens():
    x = hs.sphere.retract(normal(1, 1, D)).expand(1, 4, D)
    seen, one = (mlp_force(hs.integrate(PLAIN, each, times=[0.0])) for each in (x, x[:, :1]))
    assert all(np.allclose(seen[name], one[name], rtol=1e-13) for name in seen.data_vars)
