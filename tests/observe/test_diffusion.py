"""Covariances against increments drawn one by one, the digits of [Helmholtz Transformer, no. 2], and what is true of
deterministic attention instead.
"""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch

import helmscope as hs
import support.mechanism_oracles as oracles
from helmscope.fields.lowrank import LowRank
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.geometry import surface
from helmscope.observe.diffusion import (
    anisotropy,
    context_covariance,
    diffusivity,
    diffusivity_as_printed,
    independent_draws_covariance,
    random_value_covariance,
    shared_draw_covariance,
    token_sampling_covariance,
)
from helmscope.observe.generator import ambient_generator, discrete_generator
from helmscope.observe.kernel import effective_keys

F64 = torch.float64
DRAW = torch.Generator().manual_seed(0)
X = hs.Uniform(5, 3).sample(3, seed=0)
KERNEL = hs.SA(2.0).kernel(X)
VALUE = torch.randn(3, 3, dtype=F64, generator=DRAW)
HEADS = torch.randn(2, 3, 3, dtype=F64, generator=DRAW)
KERNELS = torch.stack([KERNEL, hs.SA(0.5).kernel(X)], 1)

# the example of [Helmholtz Transformer, no. 2]
TOKENS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=F64)
ROW = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
W_V = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=F64)
POINT, DRIFT = torch.tensor([0.3, -0.2], dtype=F64), torch.tensor([0.4, -0.1], dtype=F64)
L_PHI = 1.4502301351067006


def phi(x):
    return torch.sin(x[..., 0] + 2 * x[..., 1]) + x[..., 0] ** 3


def close(ours: torch.Tensor, loops: list, bound: float = 2e-15) -> bool:
    return bool((ours - torch.tensor(loops, dtype=F64)).abs().max() < bound)


@pytest.mark.parametrize("value", [None, VALUE, VALUE[:2], LowRank(VALUE[:, :1], VALUE[:, 1:2])])
def test_modes_a_and_b_are_the_loops(value):
    matrix = value.dense() if isinstance(value, LowRank) else value
    listed = None if matrix is None else matrix.tolist()
    ours_a, ours_b = token_sampling_covariance(KERNEL, X, value), random_value_covariance(KERNEL, X, value)
    for s, i in product(range(3), range(5)):
        row, x = KERNEL[s, i].tolist(), X[s].tolist()
        assert close(ours_a[s, i], oracles.half_covariance(oracles.draws([row], x, [listed])))
        assert close(ours_b[s, i], oracles.random_values(row, x, listed))


def test_heads_are_the_loops():
    apart, shared = independent_draws_covariance(KERNELS, X, HEADS), shared_draw_covariance(KERNEL, X, HEADS)
    for s, i in product(range(3), range(5)):
        rows, x = KERNELS[s, :, i].tolist(), X[s].tolist()
        assert close(apart[s, i], oracles.half_covariance(oracles.draws(rows, x, HEADS.tolist())), 4e-15)
        once = oracles.draws([rows[0], rows[0]], x, HEADS.tolist(), shared=True)
        assert close(shared[s, i], oracles.half_covariance(once), 4e-15)
    # one draw is the sum and the cross terms
    cross = sum(HEADS[g] @ token_sampling_covariance(KERNEL, X) @ HEADS[1 - g].mT for g in range(2))
    both = KERNEL.unsqueeze(1).expand(3, 2, 5, 5)
    assert (independent_draws_covariance(both, X, HEADS) + cross - shared).abs().max() < 4e-15


def test_digits_of_the_source():
    kernel = ROW.expand(3, 3)
    assert close((kernel @ TOKENS)[0], [0.3, 0.3], 1e-16)
    assert close(2 * token_sampling_covariance(kernel, TOKENS)[0], [[0.61, -0.09], [-0.09, 0.21]], 1e-15)
    sigma = token_sampling_covariance(kernel, TOKENS, W_V)[0]
    assert close(sigma, [[0.545, 0.165], [0.165, 0.105]], 1e-15)
    assert close(random_value_covariance(kernel, TOKENS, W_V)[0], [[0.1279, 0.0423], [0.0423, 0.0351]], 1e-15)
    assert effective_keys(kernel)[0].item() == 2.6315789473684212
    assert ambient_generator(DRIFT, sigma, phi, POINT).item() == pytest.approx(L_PHI, rel=0, abs=1e-15)


def sampled(epsilon: float, draws: int) -> float:
    """(E phi(x') - phi(x)) / epsilon of x' = x + sqrt(epsilon) W_V (mean of some draws - m) + epsilon b, exactly."""
    total, m = 0.0, ROW @ TOKENS
    for picks in product(range(3), repeat=draws):
        jump = W_V @ (TOKENS[list(picks)].mean(0) - m)
        moved = POINT + math.sqrt(epsilon) * jump + epsilon * DRIFT
        total += math.prod(ROW[list(picks)].tolist()) * float(phi(moved) - phi(POINT))
    return total / epsilon


@pytest.mark.parametrize("draws", [1, 2, 4])
def test_sampling_tokens_has_the_generator_of_mode_a_over_the_number_of_draws(draws):
    sigma = token_sampling_covariance(ROW.expand(3, 3), TOKENS, W_V)[0] / draws
    limit = ambient_generator(DRIFT, sigma, phi, POINT).item()
    errors = [sampled(4.0**-k, draws) - limit for k in range(8, 12)]
    # the draw is skewed: the error is c sqrt(epsilon), and halves as epsilon falls by 4
    assert [a / b for a, b in pairwise(errors)] == pytest.approx([2.0] * 3, abs=0.02)
    extrapolated = 2 * sampled(4.0**-11, draws) - sampled(4.0**-10, draws)
    assert extrapolated == pytest.approx(limit, rel=0, abs=2e-6)
    if draws == 1:  # c = E D^3 phi[jump, jump, jump] / 6, here -1.22075
        jumps = (TOKENS - ROW @ TOKENS) @ W_V.T
        along = jumps @ torch.tensor([1.0, 2.0], dtype=F64)
        skew = ROW @ (6 * jumps[:, 0] ** 3 - math.cos(0.1) * along**3) / 6
        assert skew.item() == pytest.approx(-1.2207510413195064, rel=1e-14)
        assert errors[-1] * 2.0**11 == pytest.approx(skew.item(), abs=6e-4)


def test_deterministic_attention_has_no_second_order_term():
    """[Helmholtz Transformer, no. 8]: fed with Sigma_A, the generator fails by exactly Sigma_A:Hess phi."""
    field = hs.SA(2.0, value=VALUE)
    drift = field.ambient(X)

    def probe(x):
        return torch.sin(x[..., 0] + 2 * x[..., 1]) * torch.exp(x[..., 2])

    def layer(epsilon):
        return discrete_generator(lambda x: x + epsilon * field.ambient(x), probe, X, epsilon=epsilon)

    h = 2.0**-10  # extrapolated twice, so that the remainder is of order h^3
    measured = (layer(h) - 6 * layer(h / 2) + 8 * layer(h / 4)) / 3
    zero, sigma = torch.zeros(3, 3, dtype=F64), token_sampling_covariance(KERNEL, X, VALUE)
    assert (ambient_generator(drift, zero, probe, X) - measured).abs().max() < 1e-8
    hess = torch.stack([torch.autograd.functional.hessian(probe, x) for x in X.reshape(-1, 3)]).reshape(3, 5, 3, 3)
    missing = (sigma * hess).sum((-1, -2))
    assert (ambient_generator(drift, sigma, probe, X) - measured - missing).abs().max() < 1e-8
    assert missing.abs().min() > 1e-3


def test_moving_a_query_is_the_covariance():
    """D_q m = beta Cov_P."""
    beta = 2.0

    def mean(q):
        return torch.softmax(beta * X[0] @ q, 0) @ X[0]

    for i in range(5):
        slope = torch.autograd.functional.jacobian(mean, X[0, i])
        assert (slope - 2 * beta * token_sampling_covariance(KERNEL[0], X[0])[i]).abs().max() < 2e-15


@pytest.mark.parametrize("beta", [0.5, 4.0, 30.0])
def test_the_flow_is_the_gradient_of_log_z(beta):
    """X[mu] = (1/beta) grad_S log Z for a fixed measure mu, at its points and at a tracer."""
    cloud = hs.Uniform(6, 4).sample(seed=2)
    mass = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 0.0], dtype=F64)

    def log_z(x):
        return torch.logsumexp(beta * x @ cloud.mT + mass.log(), -1)

    assert (hs.SA(beta)(cloud, weights=mass) - surface.gradient(log_z, cloud) / beta).abs().max() < 1e-14


def test_bistochastic_attention_contracts_by_what_sampling_would_add():
    """Cov(x) = Cov(m) + mean_i Cov_P(i), and the mean drift does not vanish [Helmholtz Transformer, no. 11]."""
    draw = torch.Generator().manual_seed(4)
    shuffles = torch.stack([torch.eye(5, dtype=F64)[torch.randperm(5, generator=draw)] for _ in range(6)])
    mixed = torch.einsum("k,kij->ij", torch.softmax(torch.randn(6, dtype=F64, generator=draw), 0), shuffles)
    for kernel, bound in ((mixed, 1e-15), (SinkhornAttention(2.0).kernel(X[0]), 1e-15)):
        m = kernel @ X[0]
        spread = 2 * token_sampling_covariance(kernel, X[0]).mean(0)
        assert (torch.cov(X[0].T, correction=0) - torch.cov(m.T, correction=0) - spread).abs().max() < bound
        assert (m - X[0]).sum(0).abs().max() < 2e-15
        assert hs.sphere.project(X[0], m).norm(dim=-1).max() > 0.1
    assert torch.linalg.eigvalsh(spread).min() > 0


BACKWARD = {10: (-0.2075526, 0.93171), 100: (-0.21629262, 0.99314), 1000: (-0.21713679, 0.99931)}


@pytest.mark.parametrize("beta", BACKWARD)
def test_sharp_attention_on_the_circle_is_the_backward_heat_equation(beta):
    """beta X -> +d log rho for V = +I, and beta Cov_P -> 1 along the circle, at a tracer in a smooth density."""
    angles = torch.arange(400, dtype=F64) * (2 * math.pi / 400)
    mass = torch.cat([1 + 0.3 * angles.cos(), torch.zeros(1, dtype=F64)])
    angles = torch.cat([angles, torch.ones(1, dtype=F64)])
    cloud = torch.stack([angles.cos(), angles.sin()], -1)
    along = torch.tensor([-math.sin(1), math.cos(1)], dtype=F64)
    speed, spread = BACKWARD[beta]
    field = hs.SA(float(beta))
    assert beta * (field(cloud, weights=mass)[-1] @ along).item() == pytest.approx(speed, rel=0, abs=5e-8)
    sigma = token_sampling_covariance(field.kernel(cloud, mass), cloud)[-1]
    assert 2 * beta * (along @ sigma @ along).item() == pytest.approx(spread, rel=0, abs=5e-6)
    exact = -0.3 * math.sin(1) / (1 + 0.3 * math.cos(1))
    assert exact == pytest.approx(-0.21723028781854162, rel=1e-15)
    assert abs(speed - exact) < 0.1 / beta


@pytest.mark.parametrize(("n", "d", "head"), [(3, 6, 6), (8, 6, 2), (2, 4, 3)])
def test_the_rank_is_bounded_by_keys_and_head(n, d, head):
    x, draw = hs.Uniform(n, d).sample(seed=1), torch.Generator().manual_seed(5)
    left, right = torch.randn(2, d, head, dtype=F64, generator=draw)
    value = LowRank(left, right)
    sigma = token_sampling_covariance(hs.SA(1.0).kernel(x), x, value)
    ranks = torch.linalg.matrix_rank(sigma, rtol=1e-12, hermitian=True)
    assert ranks.tolist() == [min(n - 1, head)] * n


def test_strength_and_shape_on_the_tangent_space():
    sigma = token_sampling_covariance(KERNEL, X, VALUE)
    for s, i in product(range(3), range(5)):
        frame = hs.sphere.tangent_basis(X[s, i])
        tangent = frame.mT @ sigma[s, i] @ frame
        assert diffusivity(sigma, X)[s, i].item() == pytest.approx(tangent.trace().item() / 2, rel=1e-13)
        shape = (tangent @ tangent).trace() / tangent.trace() ** 2
        assert anisotropy(sigma, X)[s, i].item() == pytest.approx(shape.item(), rel=1e-13)
    seen = anisotropy(sigma, X)
    assert ((seen >= 0.5) & (seen <= 1)).all()
    # nu I has the diffusivity nu; what is printed misses by (d - 1) / d once only the tangential part is there
    p = torch.eye(3, dtype=F64) - X.unsqueeze(-1) * X.unsqueeze(-2)
    assert (diffusivity(0.7 * p, X) - 0.7).abs().max() < 1e-15
    assert (anisotropy(0.7 * p, X) - 0.5).abs().max() < 1e-15
    assert (diffusivity_as_printed(0.7 * p) - 0.7 * 2 / 3).abs().max() < 1e-15
    line = hs.sphere.arbitrary_tangent(X)
    assert (anisotropy(line.unsqueeze(-1) * line.unsqueeze(-2), X) - 1).abs().max() < 1e-14
    assert anisotropy(torch.zeros_like(sigma), X).isnan().all()


def test_contexts_are_measured():
    draw = torch.Generator().manual_seed(6)
    mix, shift = torch.randn(2, 3, 3, dtype=F64, generator=draw), torch.randn(2, 3, dtype=F64, generator=draw)
    moves = (mix @ torch.randn(2000, 2, 3, 1, dtype=F64, generator=draw)).squeeze(-1) + shift
    seen = context_covariance(moves)
    for token in range(2):
        table = moves[:, token].numpy()
        assert seen.covariance.values[token] == pytest.approx(np.cov(table.T) / 2, rel=1e-12, abs=1e-14)
        assert seen.drift.values[token] == pytest.approx(table.mean(0), rel=1e-12)
    truth = (mix @ mix.mT / 2).numpy()
    assert (np.abs(seen.covariance.values - truth) < 4 * seen.covariance_stderr.values).all()
    assert (np.abs(seen.drift.values - shift.numpy()) < 4 * seen.drift_stderr.values).all()
    # a Gaussian sample covariance has the variance (C_aa C_bb + C_ab^2) / n
    c = 2 * truth
    scale = np.sqrt(np.einsum("taa,tbb->tab", c, c) + c**2) / 2 / math.sqrt(2000)
    assert seen.covariance_stderr.values == pytest.approx(scale, rel=0.12)
    assert seen.attrs["n"] == 2000
    assert context_covariance(torch.ones(3, 1, 2)).covariance.values.max() == 0


def test_attention_that_does_not_look_at_the_context_has_no_context_noise():
    """Mode (C) of a field: the token stays, its context changes; beta = 0 spreads as Cov(mean) of the others."""
    others = hs.Uniform(4, 3).sample(4000, seed=8)
    here = torch.tensor([[1.0, 0.0, 0.0]], dtype=F64).expand(4000, 1, 3)
    seen = context_covariance(hs.SA(0.0).ambient(torch.cat([here, others], 1))[:, :1])
    # mean over 5 tokens of 4 uniform ones: covariance 4 / 25 / d, halved
    assert seen.covariance.values[0] == pytest.approx(np.eye(3) * 2 / 75, rel=0, abs=4 * 0.0006)
    alone = context_covariance(hs.SA(2.0, causal=True).ambient(torch.cat([here, others], 1))[:, :1])
    assert alone.covariance.values.max() == 0


def test_bits_and_gradients():
    together = token_sampling_covariance(KERNEL, X, VALUE)
    alone = [token_sampling_covariance(KERNEL[s : s + 1], X[s : s + 1], VALUE) for s in range(3)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together, together.mT)
    x = X[:1].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_sampling_covariance(hs.SA(2.0).kernel(x), x, VALUE), x)
    assert torch.autograd.gradcheck(lambda x: diffusivity(together[:1], hs.sphere.retract(x)), x)
    blind = KERNEL[0].clone()
    blind[1] = 0.0
    assert token_sampling_covariance(blind, X[0])[1].abs().max() == 0


def test_rows_of_a_softmax_in_single_precision_are_laws():
    """A Llama of float64 takes its softmax in float32: its rows sum to 1 within 3e-7, and are normalized."""
    rounded = KERNEL.float().double()
    assert 1e-9 < (rounded.sum(-1) - 1).abs().max() < 1e-6
    exact = rounded / rounded.sum(-1, keepdim=True)
    assert (token_sampling_covariance(rounded, X) - token_sampling_covariance(exact, X)).abs().max() < 1e-15
    assert (token_sampling_covariance(rounded, X) - token_sampling_covariance(KERNEL, X)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: token_sampling_covariance(hs.USA(2.0).kernel(X), X), "kernel has a row of mass .*normalized_rows"),
        (lambda: token_sampling_covariance(KERNEL[0], X), r"kernel has shape \(5, 5\).*\(..., n, n\)"),
        (lambda: token_sampling_covariance(KERNEL.float(), X), "kernel .*float32.*float64"),
        (lambda: token_sampling_covariance(KERNEL, X, VALUE[:, :2]), r"value has shape \(3, 2\).*\(k, 3\)"),
        (lambda: random_value_covariance(KERNEL, X.tolist()), "x is a list"),
        (lambda: random_value_covariance(KERNEL, X * math.nan), "x holds NaN"),
        (lambda: independent_draws_covariance(KERNELS, X, VALUE), r"value has shape \(3, 3\).*\(heads, k, d\)"),
        (lambda: independent_draws_covariance(KERNEL[:, None], X, HEADS), r"kernel is \(3, 1, 5, 5\).*2 heads"),
        (lambda: shared_draw_covariance(KERNELS, X, HEADS), r"kernel has shape \(3, 2, 5, 5\)"),
        (lambda: context_covariance(X[:1]), r"increments has shape \(1, 5, 3\).*contexts >= 2"),
        (lambda: context_covariance(X[0]), r"increments has shape \(5, 3\)"),
        (lambda: diffusivity(torch.eye(3, dtype=F64), X), r"diffusion has shape \(3, 3\).*\(..., n, d, d\)"),
        (lambda: diffusivity(KERNEL, 2 * X), "norm 2"),
        (lambda: diffusivity_as_printed(X[0]), r"diffusion has shape \(5, 3\)"),
        (lambda: anisotropy([[1.0]], X), "diffusion is a list"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
