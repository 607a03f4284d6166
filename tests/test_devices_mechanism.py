"""Blocks, norms, noise and observables of the mechanism where their tensors lie, in both dtypes; as test_devices."""

from collections.abc import Callable

import pytest
import torch

import helmscope as hs
from test_devices import BOUND, FLOW_BOUND, MATRIX, PLACES, X, check_same

GENERATOR = torch.Generator().manual_seed(6)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


UNGATED = {
    name: hs.MLP(w_in=normal(5, 3), w_out=normal(3, 5), b_in=normal(5), b_out=normal(3), activation=activation)
    for name, activation in {
        "relu": hs.activations.ReLU(),
        "relu2": hs.activations.SquaredReLU(),
        "tanh": hs.activations.Tanh(),
        "sigmoid": hs.activations.Sigmoid(),
        "silu": hs.activations.SiLU(),
        "gelu": hs.activations.GELU(),
        "gelu tanh": hs.activations.GELUTanh(),
        "quick gelu": hs.activations.QuickGELU(),
    }.items()
}
GATED = hs.GatedMLP(w_gate=normal(5, 3), w_up=normal(5, 3), w_out=normal(3, 5), b_up=normal(5))
HEADS = [hs.SA(2.0, query_key=normal(3, 3), value=normal(3, 3)), hs.SA(1.0, query_key=normal(3, 3))]
LOW = hs.fields.LowRank(normal(3, 2), normal(3, 2))
FIELDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hardmax": hs.Hardmax(query_key=MATRIX),
    "sinkhorn": hs.SinkhornAttention(2.0, query_key=MATRIX),
    "low rank": hs.SA(2.0, query_key=LOW, value=LOW),
    "multi-head": hs.MultiHead(HEADS),
    "multi-head as printed": hs.fields.MultiHeadAsPrinted(HEADS, [GATED, UNGATED["silu"]]),
    "post": hs.Block(hs.SA(2.0), GATED),
    "pre": hs.Block(hs.SA(2.0), GATED, placement=hs.fields.PreNorm()),
    "sandwich": hs.Block(hs.MultiHead(HEADS), UNGATED["gelu"], placement=hs.fields.SandwichNorm()),
    "nGPT": hs.Block(hs.SA(2.0), GATED, placement=hs.fields.NGPT(attention_rate=0.5)),
    "layer norm": hs.fields.LayerNorm(gain=normal(3), bias=normal(3), eps=1e-5),
    "layer norm jacobian": hs.fields.LayerNorm(gain=normal(3), bias=normal(3), eps=1e-5).jacobian,
    "rms norm jacobian": hs.fields.RMSNorm(gain=normal(3), eps=1e-5).jacobian,
    "gated potential": lambda x: hs.helmholtz(GATED).potential(x),
    "gated swirl": lambda x: hs.helmholtz(GATED).swirl(x),
    "swirl on the sphere": lambda x: hs.fields.sphere_hodge_split(UNGATED["silu"]).swirl(x),
    "swirl for a Gaussian": lambda x: hs.fields.gaussian_hodge_split(UNGATED["relu"]).swirl(x),
    "Sigma A": lambda x: hs.observe.token_sampling_covariance(hs.SA(2.0).kernel(x), x, MATRIX),
    "effective keys": lambda x: hs.observe.effective_keys(hs.SA(2.0).kernel(x)),
    "generator": lambda x: hs.observe.sphere_generator(
        hs.SA(2.0), lambda y: torch.sin(y[..., 0]), x, noise=hs.noise.IsotropicNoise(0.3)
    ),
}
SYMMETRIC = MATRIX @ MATRIX.mT


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str, device: str, dtype: torch.dtype) -> None:
    wanted = FIELDS[name](X)
    bound = {key: value * float(1 + wanted.abs().max()) for key, value in BOUND.items()}
    check_same(FIELDS[name](X.to(device, dtype)), wanted, device, dtype, bound)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("name", UNGATED)
def test_activations_and_their_potentials(name: str, device: str, dtype: torch.dtype) -> None:
    activation, z = UNGATED[name].activation, torch.linspace(-9, 9, 181, dtype=torch.float64)
    for part in (activation, activation.potential, activation.double_potential, activation.slope):
        wanted = part(z)
        bound = {key: value * float(1 + wanted.abs().max()) for key, value in BOUND.items()}
        check_same(part(z.to(device, dtype)), wanted, device, dtype, bound)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(
    "stepper", [hs.solve.EulerMaruyama(0.05), hs.solve.StochasticHeun(0.05), hs.solve.NoisyLayer(0.05)]
)
@pytest.mark.parametrize("noise", [hs.noise.IsotropicNoise(0.2), hs.noise.MatrixNoise(0.1 * SYMMETRIC, common=True)])
def test_the_same_noise_everywhere(
    stepper: hs.solve.EulerMaruyama, noise: hs.noise.Noise, device: str, dtype: torch.dtype
) -> None:
    wanted = hs.integrate(hs.SA(2.0), X, [0.5, 1.0], stepper=stepper, noise=noise, seed=3)
    got = hs.integrate(hs.SA(2.0), X.to(device, dtype), [0.5, 1.0], stepper=stepper, noise=noise, seed=3)
    check_same(got.states, wanted.states, device, dtype, FLOW_BOUND)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_residual_stream_keeps_its_radius(device: str, dtype: torch.dtype) -> None:
    block = hs.Block(hs.SA(2.0), GATED, placement=hs.fields.PreNorm())
    wanted, got = (hs.integrate(block, x, [0.0, 1.0]) for x in (3 * X, 3 * X.to(device, dtype)))
    check_same(got.states, wanted.states, device, dtype, FLOW_BOUND)
    check_same(
        got.trajectory.radius, wanted.trajectory.radius, device, dtype, {k: 10 * v for k, v in FLOW_BOUND.items()}
    )
    seen = [hs.mlp_force(run) for run in (got, wanted)]
    for name in ("swirl_length_unit_sphere", "antisymmetric_share", "radial_force"):
        if name in seen[1]:
            assert abs(seen[0][name].values - seen[1][name].values).max() <= 10 * FLOW_BOUND[dtype]
