"""The best gradient in a basis, against closed forms of the Gaussian Hodge split and plain least squares."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.fields.activations import GELU, Identity, ReLU, SiLU, Tanh
from helmscope.fields.gradient_basis import GradientBasis
from helmscope.fields.gradient_fit import fit_gradient, gradient_residual_share
from helmscope.fields.mlp import MLP, GatedMLP

F64 = torch.float64
DRAW = torch.Generator().manual_seed(5)


def normal(*shape):
    return torch.randn(*shape, dtype=F64, generator=DRAW)


def line(count, corner):
    """Nodes and weights for N(0, 1); Gauss-Legendre on both sides of a corner at 0."""
    if not corner:
        z, mass = np.polynomial.hermite_e.hermegauss(count)
        return z, mass / mass.sum()
    t, w = np.polynomial.legendre.leggauss(count)
    z, mass = 5 * (t + 1), 5 * w
    z, mass = np.concatenate([-z, z]), np.concatenate([mass, mass])
    mass = mass * np.exp(-z * z / 2)
    return z, mass / mass.sum()


def plane(count=80, corner=False):
    """Nodes and weights for N(0, I) in two dimensions."""
    z, mass = line(count, corner)
    y, other = line(6, corner=False)
    points = [(a, b) for a, b in itertools.product(z, y)]
    return torch.tensor(points, dtype=F64), torch.tensor([p * q for p, q in itertools.product(mass, other)], dtype=F64)


ACROSS = [
    (ReLU(), 3 / 8, True),
    (Tanh(), 0.518716457384691, False),
    (SiLU(), 0.470147639803493, False),
    (GELU(), 0.445976301172781, False),
    (Identity(), 1 / 2, False),
]


@pytest.mark.parametrize(("activation", "share", "corner"), ACROSS)
def test_one_neuron_that_writes_across_what_it_reads(activation, share, corner):
    """[Helmholtz Transformer, no. 3]: the swirl share of a neuron that the algebraic split counts as all swirl."""
    e = torch.eye(2, dtype=F64)
    mlp = MLP(w_in=e[:1], w_out=e[:, 1:], activation=activation)
    x, mass = plane(corner=corner)
    assert gradient_residual_share(mlp, x, mass) == pytest.approx(share, abs=2e-10)


def test_a_linear_force_by_its_lyapunov_equation():
    """C = diag(1, 4), M = [[0, 1], [0, 0]]: S = [[0, .8], [.8, 0]] and the share 0.2."""
    mlp = MLP(
        w_in=torch.eye(2, dtype=F64), w_out=torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=F64), activation=Identity()
    )
    x, mass = plane(12)
    x = x * torch.tensor([1.0, 2.0], dtype=F64)
    assert gradient_residual_share(mlp, x, mass) == pytest.approx(0.2, abs=1e-12)
    moved = gradient_residual_share(MLP(w_in=mlp.w_in, w_out=mlp.w_out, activation=Identity()), x + 3, mass)
    f = x[:, 1] + 3  # the constant part is a gradient
    assert moved == pytest.approx(0.2 * 4 / float((mass * f * f).sum()), abs=1e-12)


def gradient_mlp(hidden=6, d=3):
    rows = normal(hidden, d)
    return MLP(w_in=rows, w_out=rows.T * normal(hidden), b_in=normal(hidden), b_out=normal(d), activation=Tanh())


def test_a_gradient_is_explained_and_a_rotated_one_is_not():
    mlp, x = gradient_mlp(), normal(400, 3)
    assert gradient_residual_share(mlp, x) < 1e-9
    turn = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=F64)
    rotated = MLP(w_in=mlp.w_in, w_out=turn @ mlp.w_out, b_in=mlp.b_in, activation=Tanh())
    assert gradient_residual_share(rotated, x) > 0.2


def test_a_gated_gradient_is_explained():
    """U = psi(g.x) (u.x) + 0.7 Psi(g.x): s(z) t g + psi(z) u + 0.7 psi(z) g, added to a gated MLP by hand."""
    g, u = normal(1, 3), normal(1, 3)
    mlp, x = GatedMLP(w_gate=g, w_up=u, w_out=g.T, activation=SiLU()), normal(300, 3)
    z, t = x @ g[0], x @ u[0]
    psi = SiLU().potential(z)
    f = (SiLU()(z) * t)[:, None] * g + psi[:, None] * (u + 0.7 * g)
    families = GradientBasis.of(mlp, 1.0).families(x)
    columns = torch.stack([family.combined(torch.ones(1, dtype=F64)).flatten() for family in families], -1)
    left = torch.linalg.lstsq(columns, f.flatten()[:, None]).solution
    assert left.flatten().tolist() == pytest.approx([1.0, 0.7], abs=1e-12)


@pytest.mark.parametrize("kind", ["ungated", "gated"])
def test_the_fit_is_plain_least_squares(kind):
    """All fields, all symmetric matrices and constants as columns of one matrix."""
    d, hidden = 3, 4
    weights = {"w_out": normal(d, hidden), "activation": Tanh() if kind == "ungated" else SiLU()}
    mlp = (
        MLP(w_in=normal(hidden, d), b_in=normal(hidden), **weights)
        if kind == "ungated"
        else GatedMLP(w_gate=normal(hidden, d), w_up=normal(hidden, d), b_up=normal(hidden), **weights)
    )
    x, mass = normal(60, d) + 0.3, torch.rand(60, dtype=F64, generator=DRAW)
    fitted = fit_gradient(mlp, x, mass, ridge=1e-14)
    columns = []
    for family in fitted.basis.families(x):
        for j in range(hidden):
            one = torch.zeros(hidden, dtype=F64)
            one[j] = 1
            columns.append(family.combined(one).flatten())
    for i, j in itertools.combinations_with_replacement(range(d), 2):
        matrix = torch.zeros(d, d, dtype=F64)
        matrix[i, j] = matrix[j, i] = 1
        columns.append((x @ matrix).flatten())
    columns += [torch.eye(d, dtype=F64)[i].expand(60, d).flatten() for i in range(d)]
    root = mass.sqrt().repeat_interleave(d)
    table, target = torch.stack(columns, -1) * root[:, None], mlp.ambient(x).flatten() * root
    best = target - table @ torch.linalg.lstsq(table, target[:, None], driver="gelsd").solution[:, 0]
    rest = (mlp.ambient(x) - fitted.at(x)).flatten() * root
    assert rest.square().sum().item() == pytest.approx(best.square().sum().item(), rel=1e-8)


def test_fields_of_the_basis_are_gradients():
    """Their Jacobians are symmetric."""
    mlp = MLP(w_in=normal(3, 2), w_out=normal(2, 3), b_in=normal(3), activation=GELU())
    for force in (mlp, GatedMLP(w_gate=normal(3, 2), w_up=normal(3, 2), w_out=normal(2, 3))):
        basis = GradientBasis.of(force, 0.7)
        for k in range(2):
            coefficients = normal(3)
            split = hs.fields.jacobian_split(
                lambda y, k=k, c=coefficients, b=basis: b.families(y)[k].combined(c), normal(5, 2)
            )
            assert split.antisymmetric.abs().max() < 1e-12 < split.symmetric.abs().max()


def test_bad_input_is_refused():
    with pytest.raises(hs.HelmscopeError, match=r"^mlp is a function, but it must be an MLP or a GatedMLP$"):
        fit_gradient(lambda x: x, normal(3, 2))
