"""Sinkhorn attention against sweeps in plain loops and with 40 digits, and the identities of [Helmholtz Transformer,
no. 2 and 11]."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

import support.attention_family_oracles as family
from helmscope.fields.attention import SA
from helmscope.fields.field import Field
from helmscope.fields.lowrank import LowRank
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.geometry.sphere import project, retract
from helmscope.solve.integrate import integrate
from helmscope.theory.equiangular import equiangular
from helmscope.types import HelmscopeError
from support.attention_cases import F32, F64, INF, NAN, measure, normal, parameters, rotation, tokens
from support.attention_family_cases import assert_oracle

# torch itself calls it when it first differentiates forward
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

COMBINATIONS = [
    *([], ["query_key"], ["value"], ["minus"], ["bias"], ["weights"], ["mask"], ["weights", "mask"]),
    *(["query_key", "value", "bias"], ["query_key", "value", "bias", "weights", "mask"]),
]


# ---- oracles


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_loop_oracle(names):
    for seed, (beta, n) in enumerate(product([0.0, 0.5, 2.0, 4.0], [1, 2, 3, 5])):
        d = 2 + seed % 3
        field = SinkhornAttention(beta, **parameters(names, n, d, seed))
        assert_oracle(field, tokens(n, d, seed=seed), measure(names, n, seed=seed))


def test_a_pattern_that_can_be_scaled():
    """A band, symmetric and with its diagonal: every visible pair lies on a cycle."""
    places = torch.arange(6)
    bias = normal(6, 6).masked_fill((places[:, None] - places).abs() > 2, -INF)
    field = SinkhornAttention(1.0, bias=bias)
    assert_oracle(field, tokens(6, 3), {})
    assert_oracle(field, tokens(6, 3), {"weights": torch.tensor([1.0, 2.0, 0.5, 0.0, 1.5, 1.0], dtype=F64)})
    assert torch.equal(field.kernel(tokens(6, 3)) > 0, bias > -INF)


@pytest.mark.parametrize(("beta", "sweeps"), [(0.5, 30), (3.0, 300)])
def test_forty_digits(beta, sweeps):
    x = tokens(4, 3)
    exact = torch.tensor(family.exact_sinkhorn_kernel(x.tolist(), beta, sweeps), dtype=F64)
    assert (SinkhornAttention(beta).kernel(x) - exact).abs().max() < 1e-15  # measured 2e-16


@pytest.mark.parametrize("beta", [0.0, 1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("with_weights", [False, True])
def test_rows_and_columns(beta, with_weights):
    """Also where plain sweeps crawl, 1 - O(1/beta) a sweep. Measured 5e-16 to beta = 10, 1.5e-14 at 1000."""
    x = tokens(4, 32, 2)
    weights = normal(4, 32, seed=1).exp() if with_weights else None
    kernel = SinkhornAttention(beta).kernel(x, weights)
    m = torch.ones(4, 32, dtype=F64) if weights is None else weights
    assert (kernel.sum(-1) - 1).abs().max() < 1e-15
    excess = (m.unsqueeze(-2) @ kernel).squeeze(-2) - m
    assert (excess.abs().sum(-1) / m.sum(-1)).max() < 5e-16 * (1 + beta / 10)
    assert (kernel >= 0).all()


def test_many_general_matrices():
    """Measured: at most 42 rounds at beta = 30, and 6e-15."""
    for seed in range(20):
        x, b = tokens(8, 16, 3, seed=seed), normal(3, 3, seed=seed)
        kernel = SinkhornAttention(30.0, query_key=b, max_iterations=60).kernel(x)
        assert (kernel.sum(-2) - 1).abs().max() < 5e-14


# ---- what is true of bistochastic kernels [Helmholtz Transformer, no. 2 and 11]


@pytest.mark.parametrize("with_weights", [False, True])
def test_attention_contracts_by_the_covariance_of_its_kernel(with_weights):
    """Cov(x) = Cov(m) + mean_i Cov_P(i), m_i = sum_j p_ij x_j [Helmholtz Transformer, no. 2]: measured 2e-16."""
    x = tokens(20, 12, 3)
    weights = normal(20, 12, seed=1).exp() if with_weights else torch.ones(20, 12, dtype=F64)
    kernel = SinkhornAttention(3.0, query_key=normal(3, 3)).kernel(x, weights)
    share = weights / weights.sum(-1, keepdim=True)
    means = kernel @ x

    def covariance(points):
        centered = points - (share.unsqueeze(-1) * points).sum(-2, keepdim=True)
        return torch.einsum("bi,bia,bic->bac", share, centered, centered)

    spread = x.unsqueeze(-3) - means.unsqueeze(-2)
    inner = torch.einsum("bi,bij,bija,bijc->bac", share, kernel, spread, spread)
    assert (covariance(x) - covariance(means) - inner).abs().max() < 1e-15
    softmax = SA(3.0, query_key=normal(3, 3)).kernel(x, weights) @ x
    assert (covariance(x) - covariance(softmax) - inner).abs().max() > 1e-2


def test_the_mean_drift_vanishes_and_the_velocities_do_not():
    """sum_i (m_i - x_i) = 0, but P_x m, the clustering drift, is not small [Helmholtz Transformer, no. 11]: its
    greatest is 0.25 here."""
    x = tokens(16, 3)
    field = SinkhornAttention(2.0)
    assert (field.ambient(x) - x).sum(0).abs().max() < 2e-15
    assert field(x).norm(dim=-1).max() > 0.2
    assert (SA(2.0).ambient(x) - x).sum(0).abs().max() > 0.1
    uniform = SinkhornAttention(0.0)
    assert (uniform(x) - project(x, x.mean(0).expand_as(x))).abs().max() < 1e-15


def test_a_causal_kernel_converges_slowly_to_the_identity():
    """The numbers of [Helmholtz Transformer, no. 11]: uniform causal attention of 32 tokens after 10, 1,000 and 200,000
    sweeps."""
    ten, thousand = family.causal_crawl(32, [10, 1000])
    assert ten == pytest.approx(0.3944093, abs=1e-7)
    assert thousand == pytest.approx(0.9372962, abs=1e-7)
    # the same sweeps on the factors of rows and columns, p_ij = a_i b_j for j <= i: sums along i and j are cumulative
    columns, diagonal = np.ones(32), {}
    for sweep in range(1, 200_001):
        rows = 1 / columns.cumsum()
        if sweep in (10, 1000, 200_000):
            diagonal[sweep] = float((rows * columns).mean())
        columns = 1 / rows[::-1].cumsum()[::-1]
    assert diagonal[10] == pytest.approx(ten, abs=1e-12)
    assert diagonal[1000] == pytest.approx(thousand, abs=1e-12)
    assert diagonal[200_000] == pytest.approx(0.99958, abs=1e-5)


def test_at_equal_angles_it_is_sa():
    """Rows of a kernel with one off-diagonal entry sum to the same: nothing is left to scale."""
    pair = tokens(2, 3)
    start = torch.eye(5, dtype=F64)
    moved = retract(start + 0.3)
    for x in (pair, start, moved):
        assert (SinkhornAttention(4.0)(x) - SA(4.0)(x)).abs().max() < 1e-15
    gamma = float(equiangular(SinkhornAttention(1.0), n=3, times=[1.5])[0])
    x = integrate(SinkhornAttention(1.0), torch.eye(3, dtype=F64), [1.5]).states[-1]
    assert (x[0] @ x[1]).item() == pytest.approx(gamma, abs=1e-8)


# ---- measures, symmetry


def test_weight_two_is_two_tokens():
    a, b, c = tokens(3, 3)
    field = SinkhornAttention(3.0, query_key=normal(3, 3))
    pair = field(torch.stack([a, a, b, c]))
    whole = field(torch.stack([a, b, c]), weights=torch.tensor([2.0, 1.0, 1.0]))
    assert (pair[1:] - whole).abs().max() < 1e-14
    assert (pair[0] - pair[1]).abs().max() < 1e-14


def test_padding_is_absent_and_a_tracer_attends():
    x, field = tokens(5, 3), SinkhornAttention(3.0, value=normal(3, 3))
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0], dtype=F64)
    padded = field(x, weights=weights)
    assert (padded[:4] - field(x[:4], weights=weights[:4])).abs().max() < 1e-14
    kernel = field.kernel(x, weights)
    assert torch.equal(kernel[:, 4], torch.zeros(5, dtype=F64))
    assert (kernel.sum(-1) - 1).abs().max() < 1e-15
    at_first = field(torch.cat([x[:4], x[:1]]), weights=weights)  # where a token is, the tracer moves with it
    assert (at_first[4] - at_first[0]).abs().max() < 1e-14


@pytest.mark.parametrize("scale", [1e-29, 1e29])
def test_only_shares_of_weights_matter(scale):
    x, weights = tokens(5, 3), torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=F64)
    field = SinkhornAttention(2.0)
    assert (field(x, weights=scale * weights) - field(x, weights=weights)).abs().max() < 1e-14
    mixed = torch.tensor([1e-30, 1.0, 1e30, 1.0, 1.0], dtype=F64)
    kernel = field.kernel(x, mixed)
    assert (kernel.sum(-1) - 1).abs().max() < 1e-15


def test_equivariance():
    x, b, turn, order = tokens(5, 3), normal(3, 3), rotation(3), torch.tensor([3, 0, 4, 1, 2])
    field = SinkhornAttention(2.0, query_key=b)
    assert field.exchangeable
    assert not SinkhornAttention(2.0, bias=normal(5, 5)).exchangeable
    assert (field(x[order]) - field(x)[order]).abs().max() < 1e-14
    turned = SinkhornAttention(2.0, query_key=turn @ b @ turn.mT)
    assert (turned(x @ turn.mT) - field(x) @ turn.mT).abs().max() < 1e-14


# ---- derivatives


@pytest.mark.parametrize("names", [[], ["query_key", "value"], ["bias", "weights"]], ids="+".join)
def test_gradients(names):
    """First derivatives are those of the implicit function, in tokens, weights and matrices."""
    given = parameters(names, 4, 3)
    weights = torch.tensor([1.0, 0.5, 2.0, 1.3], dtype=F64) if "weights" in names else None
    inputs = [tokens(4, 3), *given.values()] + ([] if weights is None else [weights])

    def velocity(x, *parts):
        named = dict(zip(given, parts, strict=False))
        return SinkhornAttention(2.0, **named).velocity(x, None if weights is None else parts[-1])

    inputs = [part.clone().requires_grad_() for part in inputs]
    assert torch.autograd.gradcheck(velocity, inputs, check_forward_ad=True)


def test_gradients_at_degenerate_points():
    eye = torch.eye(3, dtype=F64)
    clouds = [eye, tokens(1, 3).expand(3, 3), torch.stack([eye[0], -eye[0], eye[0]]), tokens(1, 3)]
    for x, beta in product(clouds, [0.0, 2.0, 300.0]):
        point = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(SinkhornAttention(beta)(point).square().sum(), point)
        assert torch.isfinite(gradient).all()
    assert torch.autograd.gradcheck(SinkhornAttention(2.0).velocity, eye.requires_grad_())
    weights = torch.tensor([1.0, 0.0, 2.0], dtype=F64, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(lambda m: SinkhornAttention(2.0).velocity(tokens(3, 3), m), weights)
    assert torch.isfinite(jacobian).all()
    assert jacobian[..., 1].abs().max() < 1e-15  # of an absent token
    assert jacobian[..., 0].abs().max() > 0.01


def test_the_last_step_determines_the_derivative():
    """A loose tolerance stops early; the step after it still squares the error and gives the derivative."""
    x, b = tokens(5, 3), normal(3, 3)
    tight, loose = (SinkhornAttention(2.0, query_key=b, tol=tol) for tol in (1e-13, 1e-5))
    assert (tight(x) - loose(x)).abs().max() < 1e-9
    one, other = (torch.func.jacrev(field.velocity)(x) for field in (tight, loose))
    assert one.abs().max() > 0.1
    assert (one - other).abs().max() < 1e-4


@pytest.mark.parametrize("names", [[], ["query_key", "value", "bias"]], ids="+".join)
def test_autograd_transforms(names):
    field, x = SinkhornAttention(1.5, **parameters(names, 4, 3)), tokens(5, 4, 3)
    assert (torch.func.vmap(field.velocity)(x) - field(x)).abs().max() < 1e-14
    backward = torch.func.vmap(torch.func.jacrev(field.velocity))(x)
    forward = torch.func.vmap(torch.func.jacfwd(field.velocity))(x)
    assert (backward - forward).abs().max() < 1e-14
    along = normal(5, 4, 3, seed=1)
    _, change = torch.func.jvp(field.velocity, (x,), (along,))
    assert (change - torch.einsum("bnamc,bmc->bna", backward, along)).abs().max() < 1e-13
    _, pull = torch.func.vjp(field.velocity, x)
    assert (pull(along)[0] - torch.einsum("bnamc,bna->bmc", backward, along)).abs().max() < 1e-13
    weights = normal(4, seed=2).exp()
    each = torch.func.vmap(field.velocity, in_dims=(0, None))(x, weights)  # one measure for all
    assert (each - field(x, weights=weights)).abs().max() < 1e-14


# ---- batches and dtypes


@pytest.mark.parametrize("names", [[], ["query_key"], ["weights"]], ids="+".join)
@pytest.mark.parametrize("dtype", [F64, F32])
def test_a_system_does_not_depend_on_its_batch_to_the_bit(names, dtype):
    """Nor on how many rounds the others take: the members need from 2 to 30."""
    for n, d in ((1, 2), (3, 3), (17, 2), (32, 8)):
        x = tokens(4, n, d).to(dtype)
        x[1] = x[1, :1]  # all tokens at one place
        field, given = SinkhornAttention(20.0, **parameters(names, n, d)), measure(names, 4, n)
        together = field(x, **given)
        assert together.dtype == dtype
        for b in range(4):
            alone = field(x[b : b + 1], **{name: part[b : b + 1] for name, part in given.items()})
            assert torch.equal(together[b], alone[0]), (n, d)


def test_single_precision():
    x, field = (
        tokens(3, 9, 3),
        SinkhornAttention(4.0, query_key=normal(3, 3), value=LowRank(normal(3, 1), normal(3, 1))),
    )
    assert (field(x.float()) - field(x)).abs().max() < 5e-6  # measured 1e-6
    kernel = field.kernel(x.float())
    assert (kernel.sum(-2) - 1).abs().max() < 2e-5


def test_properties_of_the_field():
    field = SinkhornAttention(1.0)
    assert isinstance(field, Field)
    assert field.attends
    assert field.isotropic
    assert field(torch.empty(0, 4, 3)).shape == (0, 4, 3)


# ---- refusals


def test_a_causal_mask_is_refused_with_the_reason():
    with pytest.raises(HelmscopeError, match=r"causal is True.*identity"):
        SinkhornAttention(1.0, causal=True)


PATTERNS = {
    "triangle": [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
    "one way": [[1, 1, 0], [0, 1, 1], [0, 1, 1]],
    "blind": [[0, 0, 0], [0, 1, 1], [0, 1, 1]],
    "unseen": [[0, 1, 1], [0, 1, 1], [0, 1, 1]],
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_without_a_scaling(name):
    bias = torch.zeros(3, 3, dtype=F64).masked_fill(torch.tensor(PATTERNS[name]) == 0, -INF)
    field = SinkhornAttention(1.0, bias=bias)
    with pytest.raises(HelmscopeError, match=r"bias holds entries -inf.*cycle") as caught:
        field(tokens(3, 3))
    assert "\n" not in str(caught.value)
    assert field.velocity(tokens(3, 3)).isnan().all()
    padded = torch.tensor([0.0, 1.0, 1.0], dtype=F64)  # without the first token nothing is wrong with it
    if name != "triangle":
        assert torch.isfinite(field.velocity(tokens(3, 3), padded)[1:]).all()


def test_weights_without_a_coupling():
    """Nobody sees itself, and token 0 is heavier than all others together: its mass has nowhere to go."""
    field = SinkhornAttention(1.0, bias=torch.zeros(3, 3, dtype=F64).fill_diagonal_(-INF), max_iterations=50)
    x = tokens(2, 3, 3)
    weights = torch.tensor([[1.0, 1.0, 1.0], [9.0, 1.0, 1.0]], dtype=F64)
    velocity = field.velocity(x, weights)
    assert torch.isfinite(velocity[0]).all()
    assert velocity[1].isnan().all()
    with pytest.raises(HelmscopeError, match=r"max_iterations is 50, but .* marginal error of .* raise"):
        field(x, weights=weights)


def test_too_few_sweeps():
    field = SinkhornAttention(100.0, query_key=normal(3, 3), max_iterations=2)
    with pytest.raises(
        HelmscopeError, match=r"max_iterations is 2, but the scaling has not converged.* error of 0\.\d+: raise"
    ):
        field(tokens(6, 3))
    assert torch.isfinite(SinkhornAttention(100.0, query_key=normal(3, 3))(tokens(6, 3))).all()


def test_an_infinite_velocity_is_refused():
    field = SinkhornAttention(1.0, value=torch.full((2, 2), 1e308, dtype=F64))
    with pytest.raises(HelmscopeError, match=r"velocity overflows torch.float64"):
        field(retract(torch.tensor([[1.0, 1.1], [1.0, 0.9]], dtype=F64)))


@pytest.mark.parametrize("beta", [-1.0, NAN, INF, "hot", None, True])
def test_bad_beta(beta):
    with pytest.raises(HelmscopeError, match="beta is"):
        SinkhornAttention(beta)


@pytest.mark.parametrize("tol", [0.0, -1.0, NAN, "fine"])
def test_bad_tol(tol):
    with pytest.raises(HelmscopeError, match="tol is"):
        SinkhornAttention(1.0, tol=tol)


@pytest.mark.parametrize("max_iterations", [0, 1.5, None, True])
def test_bad_max_iterations(max_iterations):
    with pytest.raises(HelmscopeError, match="max_iterations is"):
        SinkhornAttention(1.0, max_iterations=max_iterations)


def test_ten_times_the_weight_ten_times_the_mass():
    """A heavy token draws mass in proportion: sum_i m_i p_i0 = m_0, whatever the logits say."""
    weights = torch.tensor([10.0, 1.0, 1.0, 1.0], dtype=F64)
    kernel = SinkhornAttention(3.0).kernel(tokens(4, 3), weights)
    assert (weights @ kernel)[0].item() == pytest.approx(10.0, rel=1e-14)
    assert math.isclose((weights @ kernel).sum().item(), 13.0, rel_tol=1e-14)
