"""Invariants of the Jacobian of an MLP against autograd, loops over coordinates, and closed forms."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

import helmscope as hs
from helmscope.fields.activations import GELU, Identity, ReLU, SiLU, Tanh
from helmscope.fields.hodge_jacobian import jacobian_split
from helmscope.fields.jacobian_algebra import JacobianInvariants, jacobian_algebra, slopes_of
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.models.experts import ClampedGatedMLP

F64 = torch.float64
DRAW = torch.Generator().manual_seed(0)
D, HIDDEN = 5, 7


def normal(*shape):
    return torch.randn(*shape, dtype=F64, generator=DRAW)


X = hs.sphere.retract(normal(3, 4, D))
W = {"w_out": normal(D, HIDDEN), "b_out": normal(D)}
FORCES = {
    "tanh": MLP(w_in=normal(HIDDEN, D), b_in=normal(HIDDEN), activation=Tanh(), **W),
    "gelu": MLP(w_in=normal(HIDDEN, D), b_in=normal(HIDDEN), activation=GELU(), **W),
    "gated": GatedMLP(w_gate=normal(HIDDEN, D), w_up=normal(HIDDEN, D), b_up=normal(HIDDEN), activation=SiLU(), **W),
    "clamped": ClampedGatedMLP(w_gate=2 * normal(HIDDEN, D), w_up=2 * normal(HIDDEN, D), limit=1.0, **W),
}


def by_loops(jacobian):
    """tr J, tr J^2, |J|^2 of one matrix, and |A|^2 / |J|^2, by sums over entries."""
    n = len(jacobian)
    pairs = list(itertools.product(range(n), range(n)))
    norm = sum(jacobian[i][j] ** 2 for i, j in pairs)
    square = sum(jacobian[i][j] * jacobian[j][i] for i, j in pairs)
    turning = sum(((jacobian[i][j] - jacobian[j][i]) / 2) ** 2 for i, j in pairs)
    return [sum(jacobian[i][i] for i in range(n)), square, norm, turning / norm]


def agrees(seen: JacobianInvariants, matrices) -> None:
    exact = torch.tensor([by_loops(j) for j in matrices.reshape(-1, *matrices.shape[-2:]).tolist()], dtype=F64)
    numbers = [seen.trace, seen.trace_of_square, seen.squared_norm, seen.antisymmetric_share]
    assert torch.stack([n.reshape(-1) for n in numbers], -1) == pytest.approx(exact, rel=1e-11, abs=1e-11)


def autograd_jacobian(force, x=X):
    split = jacobian_split(force.ambient, x)
    return split.symmetric + split.antisymmetric


@pytest.mark.parametrize("name", FORCES)
@pytest.mark.parametrize("block", [2, 256])
def test_invariants_are_those_of_the_autograd_jacobian(name, block, monkeypatch):
    monkeypatch.setattr(sys.modules[jacobian_algebra.__module__], "BLOCK", block)
    force = FORCES[name]
    algebra, c, jacobian = jacobian_algebra(force), slopes_of(force, X), autograd_jacobian(force)
    assert (algebra.matrices(c) - jacobian).abs().max() < 1e-13
    agrees(algebra.invariants(c), jacobian)
    radial = [sum(x[i] * j[i][k] * x[k] for i in range(D) for k in range(D)) for x, j in pairs_of(jacobian)]
    assert algebra.radial(c, X).flatten().tolist() == pytest.approx(radial, abs=1e-12)


def pairs_of(jacobian):
    return zip(X.reshape(-1, D).tolist(), jacobian.reshape(-1, D, D).tolist(), strict=True)


@pytest.mark.parametrize("name", FORCES)
@pytest.mark.parametrize("centered", [False, True])
def test_the_tangent_space_and_the_space_without_mean(name, centered):
    """P J P with projections as matrices; after a LayerNorm tokens have no mean."""
    force, x = FORCES[name], X
    without_mean = torch.eye(D, dtype=F64) - 1 / D
    if centered:
        x = hs.sphere.retract(X - X.mean(-1, keepdim=True))
    algebra, c = jacobian_algebra(force, centered=centered), slopes_of(force, x)
    jacobian = autograd_jacobian(force, x)
    jacobian = without_mean @ jacobian @ without_mean if centered else jacobian
    agrees(algebra.invariants(c), jacobian)
    tangent = torch.eye(D, dtype=F64) - x.unsqueeze(-1) * x.unsqueeze(-2)
    agrees(algebra.tangent_invariants(c, x), tangent @ jacobian @ tangent)


@pytest.mark.parametrize("name", FORCES)
def test_weighted_by_a_covariance(name):
    force, factor = FORCES[name], normal(4, D)  # of rank 4 < 5
    value, basis = torch.linalg.eigh(factor.T @ factor)
    root = basis @ torch.diag(value.clamp(min=0).sqrt()) @ basis.T
    seen = jacobian_algebra(force).weighted_invariants(slopes_of(force, X), factor)
    agrees(seen, root @ autograd_jacobian(force) @ root)


def test_closed_forms_of_linear_maps():
    """[[a, -b], [b, a]] has the share b^2 / (a^2 + b^2); C = diag(1, 4) leaves that of a shear at 1/2."""
    turn = MLP(w_in=torch.eye(2, dtype=F64), w_out=torch.tensor([[3.0, -4.0], [4.0, 3.0]], dtype=F64))
    ones = torch.ones(2, dtype=F64)
    assert jacobian_algebra(turn).invariants(ones).antisymmetric_share.item() == pytest.approx(0.64, rel=1e-15)
    symmetric = MLP(w_in=torch.eye(2, dtype=F64), w_out=torch.tensor([[1.0, 2.0], [2.0, 3.0]], dtype=F64))
    assert jacobian_algebra(symmetric).invariants(ones).antisymmetric_share.item() == 0
    stretch = torch.diag(
        torch.tensor([1.0, 2.0], dtype=F64)
    )  # makes a rotation non-normal: [[0, -2], [2, 0]] stays one
    rotation = MLP(w_in=torch.eye(2, dtype=F64), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=F64))
    weighted = jacobian_algebra(rotation).weighted_invariants(ones, stretch)
    assert (weighted.squared_norm.item(), weighted.antisymmetric_share.item()) == (8.0, 1.0)


def test_constant_neurons_do_nothing_and_a_silent_mlp_has_no_share():
    rows = normal(3, D)
    dead = MLP(
        w_in=torch.cat([rows, torch.zeros(2, D, dtype=F64)]), w_out=normal(D, 5), b_in=normal(5), activation=Tanh()
    )
    live = MLP(w_in=rows, w_out=dead.w_out[:, :3], b_in=dead.b_in[:3], activation=Tanh())
    seen, alone = (jacobian_algebra(f).invariants(slopes_of(f, X)) for f in (dead, live))
    assert (seen.antisymmetric_share - alone.antisymmetric_share).abs().max() < 1e-14
    off = MLP(w_in=rows, w_out=dead.w_out[:, :3], b_in=torch.full((3,), -9.0, dtype=F64), activation=ReLU())
    assert jacobian_algebra(off).invariants(slopes_of(off, X)).antisymmetric_share.isnan().all()


def test_a_system_alone_is_bitwise_that_of_a_batch():
    force = FORCES["gated"]
    algebra, c = jacobian_algebra(force), slopes_of(force, X)
    whole = algebra.invariants(c).antisymmetric_share
    assert torch.equal(whole[1], algebra.invariants(slopes_of(force, X[1:2])).antisymmetric_share[0])


@pytest.mark.parametrize(
    ("force", "said"),
    [
        (lambda x: x, "^force is a function, but it must be an MLP or a GatedMLP$"),
        (MLP(w_in=torch.ones(2, 3, 3), w_out=torch.ones(3, 3), activation=Identity()), "^force has batch axes, but"),
    ],
)
def test_bad_input_is_refused(force, said):
    with pytest.raises(hs.HelmscopeError, match=said):
        jacobian_algebra(force)
