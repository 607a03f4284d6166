"""Jacobian spectra against derivatives by hand in 30 digits, closed forms at equilibria, and products against the
matrix.
"""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
import support.mechanism_oracles as oracles
from helmscope.fields.activations import Tanh
from helmscope.fields.block import Block
from helmscope.fields.mlp import MLP
from helmscope.fields.multihead import MultiHead
from helmscope.fields.placement import PreNorm
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.geometry import surface
from helmscope.observe import jacobian
from helmscope.observe.jacobian import _Jacobian, jacobian_spectrum

F64 = torch.float64
DRAW = torch.Generator().manual_seed(0)
A, B = torch.randn(2, 3, 3, dtype=F64, generator=DRAW)
FIELDS = {
    "sa": {"beta": 2.0},
    "matrices": {"beta": 1.5, "query_key": A, "value": B},
    "causal": {"beta": 1.5, "query_key": A, "value": B, "causal": True},
    "repulsive": {"beta": 4.0, "value": -torch.eye(3, dtype=F64)},
}


def apart(ours: torch.Tensor, exact: list) -> float:
    return (ours - torch.tensor(exact, dtype=ours.dtype)).abs().max().item()


def clusters(a: int, b: int, d: int) -> torch.Tensor:
    """a tokens at a point and b tokens at its antipode."""
    point = hs.Uniform(1, d).sample(seed=3)
    return torch.cat([point.expand(a, d), -point.expand(b, d)])


@pytest.mark.parametrize("name", FIELDS)
def test_spectrum_is_that_of_the_derivative_by_hand(name):
    x, options = hs.Uniform(3, 3).sample(2, seed=1), FIELDS[name]
    ours = jacobian_spectrum(hs.SA(**options), x)
    for s in range(2):
        listed = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        values, singular = oracles.spectrum(oracles.sa_jacobian(x[s].tolist(), **listed))
        assert apart(ours.eigenvalues[s], values) < 2e-13
        assert apart(ours.singular_values[s], singular) < 2e-14


@pytest.mark.parametrize(("field", "rate"), [(hs.SA(4.0), 1.0), (hs.USA(1.7), math.exp(1.7))])
@pytest.mark.parametrize(("n", "d"), [(2, 2), (5, 4)])
def test_one_cluster(field, rate, n, d):
    """x_i' = mean(xi) - xi_i to first order: rates 0, for the d - 1 common moves, and -1 (USA -e^beta)."""
    seen = jacobian_spectrum(field, clusters(n, 0, d))
    rates = [0.0] * (d - 1) + [-rate] * ((n - 1) * (d - 1))
    assert apart(seen.eigenvalues, rates) < 4e-15 * rate
    assert apart(seen.singular_values, sorted((-r for r in rates), reverse=True)) < 4e-15 * rate


@pytest.mark.parametrize(("a", "b", "beta"), [(1, 1, 1.0), (3, 2, 0.5), (4, 1, 2.0)])
def test_two_antipodal_clusters(a, b, beta):
    """Tokens of a cluster of a contract at (b e^-beta - a e^beta) / Z_a, Z_a = a e^beta + b e^-beta; the clusters part
    from each other's antipode at b e^-beta / Z_a + a e^-beta / Z_b, and turn together at 0.
    """
    d = 3
    seen = jacobian_spectrum(hs.SA(beta), clusters(a, b, d)).eigenvalues
    near, far = math.exp(beta), math.exp(-beta)
    z_a, z_b = a * near + b * far, b * near + a * far
    rates = [b * far / z_a + a * far / z_b, 0.0]
    rates += [(b * far - a * near) / z_a] * (a - 1) + [(a * far - b * near) / z_b] * (b - 1)
    assert apart(seen, sorted(rates * (d - 1), reverse=True)) < 4e-15


def test_linear_field():
    """x' = P M x at an eigenvector of M with eigenvalue lam: mu_k - lam for the other eigenvalues mu_k, for each token
    alone.
    """
    m = torch.tensor([[2.0, 5.0, 1.0], [0.0, 0.5, -3.0], [0.0, 3.0, 0.5]], dtype=F64)
    x = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], dtype=F64)
    seen = jacobian_spectrum(lambda x: x @ m.T, x).eigenvalues
    assert apart(seen, [-1.5 + 3j, -1.5 + 3j, -1.5 - 3j, -1.5 - 3j]) < 2e-15


def test_on_the_circle_it_is_the_derivative_of_angles():
    angles = torch.tensor([0.3, 1.4, 2.9, 5.0], dtype=F64)

    def turn(angles):
        gap = angles.unsqueeze(-2) - angles.unsqueeze(-1)
        p = torch.softmax(2.0 * torch.cos(gap), -1)
        return (p * torch.sin(gap)).sum(-1)

    matrix = torch.autograd.functional.jacobian(turn, angles)
    seen = jacobian_spectrum(hs.SA(2.0), torch.stack([angles.cos(), angles.sin()], -1))
    exact = sorted(torch.linalg.eigvals(matrix).tolist(), key=lambda v: (-v.real, -v.imag))
    assert apart(seen.eigenvalues, exact) < 1e-14
    assert (seen.singular_values - torch.linalg.svdvals(matrix)).abs().max() < 1e-15


@pytest.mark.parametrize(
    "field",
    [
        hs.USA(1.0, query_key=A, causal=True),
        SinkhornAttention(2.0, value=B),
        MultiHead([hs.SA(1.0), hs.SA(4.0, value=B)]),
        Block(hs.SA(2.0), MLP(w_in=A, w_out=B, activation=Tanh())),
    ],
    ids=lambda field: type(field).__name__,
)
def test_products_are_differences_along_great_circles(field):
    x, h = hs.Uniform(4, 3).sample(seed=6), 1e-4
    derivative = _Jacobian(field.velocity, x)
    matrix = derivative.matrix()
    basis = hs.sphere.tangent_basis(x)
    for k, w in enumerate(torch.eye(8, dtype=F64)):
        step = (basis @ w.reshape(4, 2, 1)).squeeze(-1)
        ahead, behind = (field(hs.sphere.exp(x, t * step)) for t in (h, -h))
        change = (basis.mT @ ((ahead - behind) / (2 * h)).unsqueeze(-1)).flatten()
        assert (matrix[:, k] - change).abs().max() < 2e-7
        assert (derivative.apply_transposed(w) - matrix[k]).abs().max() < 1e-13


def test_the_extension_off_the_sphere_does_not_matter():
    x = hs.Uniform(4, 3).sample(seed=2)
    plain = jacobian_spectrum(hs.SA(2.0), x)
    other = jacobian_spectrum(lambda y: (2 - (y * y).sum(-1, keepdim=True)) * hs.SA(2.0).velocity(y) + 5 * y, x)
    assert (plain.eigenvalues - other.eigenvalues).abs().max() < 1e-14


def test_the_trace_is_the_surface_divergence():
    draw = torch.Generator().manual_seed(4)
    w_in, w_out = torch.randn(2, 7, 4, dtype=F64, generator=draw)
    mlp = MLP(w_in=w_in, w_out=w_out.mT, activation=Tanh())
    x = hs.Uniform(3, 4).sample(2, seed=1)
    seen = jacobian_spectrum(mlp, x).eigenvalues.sum(-1)
    assert (seen.real - surface.divergence(mlp.ambient, x).sum(-1)).abs().max() < 1e-13
    block = jacobian_spectrum(Block(hs.SA(1.0), mlp), x)
    assert block.eigenvalues.shape == block.singular_values.shape == (2, 9)


@pytest.mark.parametrize(("name", "count"), [("sa", 5), ("causal", 4), ("matrices", 12)])
def test_products_agree_with_the_matrix(name, count, monkeypatch):
    x, field = hs.Uniform(7, 3).sample(1, seed=5), hs.SA(**FIELDS[name])
    dense = jacobian_spectrum(field, x, count=count)
    assert torch.equal(dense.eigenvalues, jacobian_spectrum(field, x).eigenvalues[:, :count])
    monkeypatch.setattr(jacobian, "DENSE_BYTES", 0)
    krylov = jacobian_spectrum(field, x, count=count)
    assert (dense.eigenvalues - krylov.eigenvalues).abs().max() < 1e-12
    assert (dense.singular_values - krylov.singular_values).abs().max() < 1e-13


def test_products_find_every_copy_of_a_multiple_value(monkeypatch):
    x = clusters(5, 5, 4)
    dense = jacobian_spectrum(hs.SA(1.0), x, count=9)
    monkeypatch.setattr(jacobian, "DENSE_BYTES", 0)
    krylov = jacobian_spectrum(hs.SA(1.0), x, count=9)
    assert (dense.eigenvalues - krylov.eigenvalues).abs().max() < 1e-14
    assert (dense.singular_values - krylov.singular_values).abs().max() < 1e-14
    assert krylov.singular_values.min() > 0.7  # 24 copies of tanh 1


def test_a_cloud_too_large_for_a_matrix():
    """One cluster of 60 tokens in 60 dimensions: 3540 variables, 59 common moves at 0 and the rest at -e^beta."""
    x = clusters(60, 0, 60)
    seen = jacobian_spectrum(hs.USA(1.0), x, count=2)
    assert seen.eigenvalues.abs().max() < 1e-13
    assert apart(seen.singular_values, [math.e] * 2) < 1e-13


def test_columns_come_in_parts_and_systems_alone(monkeypatch):
    x = hs.Uniform(6, 3).sample(3, seed=7)
    whole = jacobian_spectrum(hs.SA(2.0), x)
    alone = jacobian_spectrum(hs.SA(2.0), x[1])
    assert torch.equal(whole.eigenvalues[1], alone.eigenvalues)
    monkeypatch.setattr(jacobian, "CHUNK_ENTRIES", 100)
    parts = jacobian_spectrum(hs.SA(2.0), x.reshape(3, 1, 6, 3))
    assert parts.eigenvalues.shape == (3, 1, 12)
    assert (parts.singular_values[:, 0] - whole.singular_values).abs().max() < 1e-14


def test_weights_and_single_precision(monkeypatch):
    """A token of weight 2 is two tokens, but for their relative move."""
    twice = hs.Uniform(3, 3).sample(seed=8)
    mass = torch.tensor([2.0, 1.0, 1.0], dtype=F64)
    merged = jacobian_spectrum(hs.SA(2.0), twice, weights=mass).eigenvalues
    apart_ = jacobian_spectrum(hs.SA(2.0), twice[[0, 0, 1, 2]]).eigenvalues
    assert all((apart_ - value).abs().min() < 1e-13 for value in merged)
    single = jacobian_spectrum(hs.SA(2.0), twice.float(), weights=mass)
    assert single.eigenvalues.dtype == torch.complex64
    assert (single.eigenvalues - merged).abs().max() < 1e-5
    monkeypatch.setattr(jacobian, "DENSE_BYTES", 0)
    krylov = jacobian_spectrum(hs.SA(2.0), twice.float(), weights=mass, count=2)
    assert krylov.eigenvalues.dtype == torch.complex64
    assert krylov.singular_values.dtype == torch.float32
    assert (krylov.eigenvalues - merged[:2]).abs().max() < 1e-5


X = hs.Uniform(4, 3).sample(2, seed=0)
PRE = Block(hs.SA(1.0), MLP(w_in=torch.eye(3), w_out=torch.eye(3)), placement=PreNorm())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: jacobian_spectrum(hs.SA(1.0), X, count=9), "count is 9, but for 8 tangent variables.*at most 8"),
        (lambda: jacobian_spectrum(hs.SA(1.0), X, count=0), "count is 0.*>= 1"),
        (lambda: jacobian_spectrum(hs.SA(1.0), clusters(60, 0, 60)), "count is None.*given and at most 3538"),
        (lambda: jacobian_spectrum(hs.SA(1.0), X[0, 0]), r"x has shape \(3,\)"),
        (lambda: jacobian_spectrum(hs.SA, X), "field is .*SA"),
        (lambda: jacobian_spectrum(hs.SA(1.0), X[:0]), r"x has shape \(0, 4, 3\).*at least one system"),
        (lambda: jacobian_spectrum(PRE, X), "residual stream"),
        (lambda: jacobian_spectrum(hs.USA(800.0), clusters(2, 0, 3)), "derivative that is not finite"),
        (lambda: jacobian_spectrum(hs.USA(800.0), clusters(60, 0, 60), count=1), "derivative that is not finite"),
        (lambda: jacobian_spectrum(torch.zeros_like, X, weights=torch.ones(4)), "weights is given"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
