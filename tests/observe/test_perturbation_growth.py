"""The flow of one token, the others frozen: against differences of ``resume``, linear flows and SA in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helmscope.fields.attention import SA
from helmscope.fields.block import Block
from helmscope.fields.mlp import MLP
from helmscope.fields.noise import IsotropicNoise
from helmscope.geometry.sphere import exp, project, retract, tangent_basis
from helmscope.models.record import record
from helmscope.observe import perturbation_growth
from helmscope.observe.frozen_token import flow_unsupported_reason, frozen_token
from helmscope.observe.perturbation_growth import _generator
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.solve.layer import Layer
from helmscope.types import HelmscopeError, Trajectory
from support.model_families import inputs_of, tiny_model

F64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def recording_of(family):
    return record(tiny_model(family, dtype=F64), inputs_of(family, batch=2))


# norms of some families compute in float32 whatever the model's dtype, which limits differences
@pytest.mark.parametrize(
    ("family", "step", "accuracy"),
    [
        ("gpt2", 1e-5, 1e-8),
        ("bert", 1e-5, 1e-8),
        ("gptj", 1e-3, 1e-4),
        ("bart", 1e-5, 1e-8),
        ("llama", 1e-3, 1e-4),
        ("t5-relu", 1e-3, 1e-4),
        ("mixtral", 1e-3, 1e-4),
        ("gpt_oss", 1e-3, 1e-4),
    ],
)
def test_derivatives_of_a_model_are_those_of_resume(family, step, accuracy):
    recording = recording_of(family)
    states = recording.residual.direction[0]
    tokens = torch.tensor([2, 1])
    token = frozen_token(recording, tokens)
    w = token.tangents(1, torch.Generator().manual_seed(0))[0]
    found = token.images(w)
    frozen = torch.ones(states.shape[:2], dtype=torch.bool)
    frozen[[0, 1], tokens] = False
    ends = []
    for sign in (step, -step):
        moved = states.clone()
        moved[[0, 1], tokens] = retract(states[[0, 1], tokens] + sign * w)
        later = recording.resume(depth=0, states=moved, frozen=frozen).trajectory.states
        ends.append(later[:, [0, 1], tokens])
    differences = (ends[0] - ends[1]) / (2 * step)
    scale = differences.norm(dim=-1).max()
    assert float((found - differences).abs().max() / scale) < accuracy
    assert float(found.norm(dim=-1)[0].sub(1).abs().max()) < 1e-12  # a unit tangent at the first depth


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_flow_of_a_mixture_of_experts_is_that_of_plain_operations(family):
    model = tiny_model(family)
    model.set_experts_implementation("grouped_mm")  # has no forward derivative
    recording = record(model, inputs_of(family, batch=2))
    measured = perturbation_growth(recording, directions=2, iterations=2, seed=3)
    assert model.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation("eager")
    plain = perturbation_growth(record(model, inputs_of(family, batch=2)), directions=2, iterations=2, seed=3)
    assert measured.stretch.values == pytest.approx(plain.stretch.values, rel=1e-4)
    assert measured.singular_value.values == pytest.approx(plain.singular_value.values, rel=1e-4)


def test_experts_whose_kernel_cannot_be_replaced_are_refused():
    model = tiny_model("mixtral")
    recording = record(model, inputs_of("mixtral", batch=2))
    model.config._experts_implementation_internal = "deepgemm_megamoe"
    refusal = flow_unsupported_reason(recording)
    assert refusal is not None
    assert refusal.startswith("model is a MixtralForCausalLM with experts computed by 'deepgemm_megamoe', which has no")
    assert model.config._experts_implementation == "deepgemm_megamoe"


@pytest.mark.parametrize(("family", "tol"), [("gpt2", 1e-11), ("bert", 1e-11), ("llama", 1e-6)])
def test_backward_products_are_the_transpose_of_forward_ones(family, tol):
    recording = recording_of(family)
    token = frozen_token(recording, torch.tensor([2, 1]))
    w = token.tangents(2, torch.Generator().manual_seed(0))
    v = randn(2, 2, recording.anatomy.dim, seed=1)
    forward = torch.stack([token.images(each)[-1] for each in w])
    back = token.transposed(v)
    for i in range(2):
        for j in range(2):
            assert ((v[i] * forward[j]).sum(-1) - (back[i] * w[j]).sum(-1)).abs().max() < tol


def test_singular_values_exponents_and_stretch_agree_with_the_whole_jacobian():
    recording = recording_of("gpt2")
    measured = perturbation_growth(recording, directions=2, iterations=40, seed=3)
    generator = _generator(3)
    weights = torch.ones(recording.trajectory.states.shape[1:3], dtype=F64)
    weights = weights if recording.trajectory.weights is None else recording.trajectory.weights[0].double().clone()
    weights[:, 0] = 0
    chosen = torch.multinomial(weights, 1, replacement=False, generator=generator)[:, 0]
    token = frozen_token(recording, chosen)
    start = token.tangents(2, generator)
    basis = token.tangents(token.dim, torch.Generator().manual_seed(9))
    whole = torch.stack([token.images(each) for each in basis])  # (dim, depth, prompt, d)
    exact = torch.linalg.svdvals(whole[:, -1].permute(1, 2, 0))
    # the two largest are close to each other and to the next, so that the iteration converges slowly, from below
    assert measured.singular_value.values == pytest.approx(exact[:, :2].numpy(), rel=0.02)
    assert (measured.singular_value.values <= exact[:, :2].numpy() + 1e-12).all()
    rough = perturbation_growth(recording, directions=2, iterations=1, seed=3)
    assert (rough.singular_value.values <= measured.singular_value.values + 1e-12).all()
    images = torch.stack([token.images(each) for each in start])
    for prompt in range(2):
        sums = np.zeros(2)
        for k in range(1, images.shape[1]):
            before, after = (np.linalg.qr(images[:, each, prompt].numpy().T)[1] for each in (k - 1, k))
            growth = np.log(np.abs(np.diag(after))) - np.log(np.abs(np.diag(before)))
            assert measured.growth.values[k, prompt] == pytest.approx(growth, abs=1e-9)
            sums += growth
        assert measured.lyapunov_exponent.values[prompt] == pytest.approx(sums / (images.shape[1] - 1), abs=1e-9)
    assert measured.stretch.values == pytest.approx(images.square().sum(-1).mean(0).sqrt().numpy(), rel=1e-12)


def test_the_squared_stretch_of_random_directions_estimates_the_frobenius_norm():
    matrix = torch.diag(torch.tensor([1.5, 1.0, 0.5, -1.0], dtype=F64))
    run = linear_flow(matrix, randn(1, 1, 4).expand(2000, 2, 4), times=(0.0, 0.5))
    token = frozen_token(linear_flow(matrix, randn(1, 1, 4).expand(1, 2, 4), times=(0.0, 0.5)), torch.tensor([1]))
    whole = torch.stack([token.images(each)[-1] for each in token.tangents(3, torch.Generator().manual_seed(5))])
    exact = float(whole.square().sum()) / 3
    squares = perturbation_growth(run, directions=1, iterations=0).stretch.values[-1] ** 2
    assert abs(squares.mean() - exact) < 4 * squares.std() / len(squares) ** 0.5
    assert squares.std() > 0.05 * exact


def linear_flow(matrix, start, times=(0.0, 0.5, 1.0)):
    """x' = P_x A x, whose solution is N(e^{At} x)."""
    return integrate(
        lambda x: project(x, x @ matrix.T), retract(start), times=list(times), stepper=DormandPrince(1e-11)
    )


def test_a_linear_flow_in_closed_form():
    matrix = randn(4, 4)
    run = linear_flow(matrix, randn(2, 3, 4, seed=1))
    measured = perturbation_growth(run, directions=3, seed=1)
    weights = torch.ones(2, 3, dtype=F64)
    weights[:, 0] = 0
    tokens = torch.multinomial(weights, 1, generator=_generator(1))[:, 0]
    for b in range(2):
        x = run.states[0, b, tokens[b]]
        power = torch.linalg.matrix_exp(matrix)
        y = power @ x
        jacobian = (power - torch.outer(retract(y), retract(y)) @ power) / y.norm() @ tangent_basis(x)
        exact = torch.linalg.svdvals(jacobian)
        assert measured.singular_value.values[b] == pytest.approx(exact.numpy(), rel=1e-6)
        # the product of all singular values is the volume growth, and so the sum of all exponents
        assert float(measured.lyapunov_exponent[b].sum()) == pytest.approx(float(exact.log().sum()), abs=1e-6)


def test_one_token_of_sa_among_frozen_ones_in_closed_form():
    # at beta = 0 the velocity of a token is P_x of the mean token, of which it is itself one n-th
    x = retract(randn(1, 5, 3))
    h = 1e-3
    run = integrate(SA(beta=0.0), x, times=[0.0, h])
    token = frozen_token(run, torch.tensor([2]))
    w = project(x[:, 2], randn(1, 3, seed=1))
    mean = x[0].mean(0)
    # d/dx P_x m = -<x, m> w - <w, m> x for the others' mean, and the token's own share has no tangential part
    rate = -(x[0, 2] @ mean) * w[0] + w[0] / 5
    found = token.images(w)
    assert project(x[0, 2], (found[1, 0] - found[0, 0]) / h) == pytest.approx(rate.numpy(), abs=3 * h)


def test_an_attracting_cluster_and_its_repulsive_mirror():
    north = torch.eye(3, dtype=F64)[:1].expand(1, 4, 3)
    times = [0.0, 0.5, 1.0]
    found = perturbation_growth(integrate(SA(beta=3.0), north, times=times))
    # 3 of 4 tokens pull it back
    assert found.lyapunov_exponent.values == pytest.approx(np.full((1, 2), -0.75), abs=1e-6)
    pushed = perturbation_growth(integrate(SA(beta=3.0, value=-torch.eye(3, dtype=F64)), north, times=times))
    assert pushed.lyapunov_exponent.values == pytest.approx(np.full((1, 2), 0.75), abs=1e-6)
    assert found.growth.values[1:] == pytest.approx(np.full((2, 1, 2), -0.375), abs=1e-6)


def test_layers_are_differentiated_as_maps():
    block = Block(SA(beta=1.0), MLP(w_in=0.5 * randn(6, 3), w_out=0.5 * randn(3, 6, seed=1)))
    x = retract(randn(2, 4, 3, seed=2))
    run = integrate(block, x, times=[0.0, 1.0, 2.0], stepper=Layer(1.0))
    token = frozen_token(run, torch.tensor([1, 3]))
    w = project(token.start, randn(2, 3, seed=3))
    found = token.images(w)
    states = x
    for k in range(2):
        ends = []
        for step in (1e-6, -1e-6):
            moved = states.clone()
            moved[[0, 1], [1, 3]] = exp(states[[0, 1], [1, 3]], step * found[k])
            ends.append(block.layer(moved, 1.0)[[0, 1], [1, 3]])
        assert ((ends[0] - ends[1]) / 2e-6).numpy() == pytest.approx(found[k + 1].numpy(), abs=1e-7)
        states = run.states[k + 1]


def test_angles_that_double_have_the_exponent_log_two():
    class Doubling:
        def __call__(self, x):  # N(x + f(x)) is the point at twice the angle
            a, b = x[..., 0], x[..., 1]
            return torch.stack([a * a - b * b, 2 * a * b], -1) - x

    start = retract(randn(1, 2, 2))
    run = integrate(Doubling(), start, times=list(range(7)), stepper=Layer(1.0))
    measured = perturbation_growth(run, directions=1)
    assert float(measured.lyapunov_exponent[0, 0]) == pytest.approx(math.log(2), abs=1e-9)


def test_directions_are_independent_of_a_start_with_the_same_seed():
    start = retract(randn(1, 2, 2, seed=0))
    run = integrate(SA(beta=1.0), start, times=[0.0, 1e-6])
    assert float(perturbation_growth(run, directions=1, seed=0).stretch[1, 0]) == pytest.approx(1, abs=1e-5)


def test_several_tokens_are_averaged():
    recording = recording_of("gpt2")
    two = perturbation_growth(recording, directions=1, iterations=0, sampled_tokens=2)
    assert "singular_value" not in two
    assert two.attrs["sampled_tokens"] == 2
    assert two.growth.shape == (len(recording.trajectory.times), 2, 1)


def test_what_is_refused():
    start = retract(randn(1, 3, 3))
    with pytest.raises(HelmscopeError, match="System with a mechanism"):
        perturbation_growth(Trajectory(torch.zeros(1), start[None]))
    with pytest.raises(HelmscopeError, match="without noise and merging"):
        perturbation_growth(integrate(SA(beta=1.0), start, times=[0.0, 0.1], noise=IsotropicNoise(nu=0.1)))
    run = integrate(SA(beta=1.0), start, times=[0.0, 0.1])
    with pytest.raises(HelmscopeError, match="directions is 3, but the tangent space has dimension 2"):
        perturbation_growth(run, directions=3)
    with pytest.raises(HelmscopeError, match="has no token that counts besides the first"):
        perturbation_growth(integrate(SA(beta=1.0), start[:, :1], times=[0.0, 0.1]))
