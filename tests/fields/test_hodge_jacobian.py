"""The Jacobian split against sums written out by hand. Bounds are a few times what was measured."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helmscope.fields.activations import GELU, ReLU, Tanh
from helmscope.fields.attention import SA
from helmscope.fields.block import Block
from helmscope.fields.hodge_jacobian import jacobian_split
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.types import HelmscopeError

F64 = torch.float64


def random_mlp(hidden: int, dim: int, seed: int = 0, activation=None) -> MLP:
    g = torch.Generator().manual_seed(seed)
    v, w, c = (torch.randn(*size, dtype=F64, generator=g) for size in ((hidden, dim), (dim, hidden), (hidden,)))
    return MLP(w_in=v, w_out=w, b_in=c, activation=activation or Tanh())


def points(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def test_the_parts_of_an_mlp_are_sums_over_its_neurons():
    mlp, x = random_mlp(5, 3), points(4, 3)
    split = jacobian_split(mlp, x)
    for p in range(4):
        for i in range(3):
            for j in range(3):
                df, transposed = 0.0, 0.0
                for n in range(5):
                    v, w = mlp.w_in[n].tolist(), mlp.w_out[:, n].tolist()
                    z = sum(a * b for a, b in zip(v, x[p].tolist(), strict=True)) + mlp.b_in[n].item()
                    slope = 1 / math.cosh(z) ** 2
                    df, transposed = df + w[i] * slope * v[j], transposed + w[j] * slope * v[i]
                assert split.symmetric[p, i, j].item() == pytest.approx((df + transposed) / 2, abs=4e-15)
                assert split.antisymmetric[p, i, j].item() == pytest.approx((df - transposed) / 2, abs=4e-15)


def test_the_index_of_known_cases():
    turn = torch.tensor([[0.0, -2.0], [2.0, 0.0]], dtype=F64)
    x = points(6, 2)
    assert torch.equal(jacobian_split(lambda y: y @ turn.mT, x).antisymmetric_share, torch.ones(6, dtype=F64))
    assert torch.equal(jacobian_split(lambda y: 3 * y, x).antisymmetric_share, torch.zeros(6, dtype=F64))
    # a neuron with w perpendicular to v is free of divergence, and yet half symmetric [Helmholtz Transformer, no. 3]
    v, w = torch.tensor([[3.0, 4.0, 0.0]], dtype=F64), torch.tensor([[-4.0], [3.0], [5.0]], dtype=F64)
    split = jacobian_split(MLP(w_in=v, w_out=w, activation=GELU()), points(6, 3))
    assert (split.antisymmetric_share - 0.5).abs().max() < 2e-15
    assert split.symmetric.diagonal(dim1=-2, dim2=-1).sum(-1).abs().max() < 2e-14


def test_the_index_of_two_weightings_of_one_function_is_one():
    """[Helmholtz Transformer, no. 3]: f(x) = (x_2, x_1) by ReLU pairs along its eigenvectors or along the axes."""
    axes = torch.eye(2, dtype=F64)
    eigen = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=F64) / math.sqrt(2)
    for rows, out in ((axes, axes.flip(0)), (eigen, eigen * torch.tensor([[1.0], [-1.0]], dtype=F64))):
        mlp = MLP(w_in=torch.cat([rows, -rows]), w_out=torch.cat([out, -out]).mT, activation=ReLU())
        split = jacobian_split(mlp, points(5, 2))
        assert split.antisymmetric_share.max() < 1e-30
        assert (split.symmetric - axes.flip(0)).abs().max() < 1e-15


def test_a_zero_jacobian_has_no_index_and_a_small_one_has():
    assert jacobian_split(torch.zeros_like, points(3, 2)).antisymmetric_share.isnan().all()
    for size in (1e-200, 1e200):
        shear = size * torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=F64)
        assert jacobian_split(lambda y, m=shear: y @ m.mT, points(2)).antisymmetric_share.item() == 0.5


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_the_parts_of_a_matrix(seed, dim):
    m = points(dim, dim, seed=seed)
    split = jacobian_split(lambda y: y @ m.mT, points(dim, seed=seed + 1))
    assert torch.equal(split.symmetric, (m + m.mT) / 2)
    assert torch.equal(split.antisymmetric, (m - m.mT) / 2)
    anti = ((m - m.mT) / 2).square().sum()
    assert split.antisymmetric_share.item() == pytest.approx((anti / m.square().sum()).item(), abs=1e-15)
    assert 0 <= split.antisymmetric_share.item() <= 1


def test_points_do_not_interact():
    mlp, x = random_mlp(4, 3), points(2, 5, 3)
    together = jacobian_split(mlp, x)
    assert together.symmetric.shape == (2, 5, 3, 3)
    assert together.antisymmetric_share.shape == (2, 5)
    moved = jacobian_split(mlp, torch.cat([x[:1], 5 * x[1:]]))
    assert torch.equal(moved.symmetric[0], together.symmetric[0])
    assert torch.equal(moved.antisymmetric_share[0], together.antisymmetric_share[0])
    assert not torch.allclose(moved.symmetric[1], together.symmetric[1])
    alone = jacobian_split(mlp, x[1, 2])
    assert (alone.antisymmetric - together.antisymmetric[1, 2]).abs().max() < 4e-15


def test_other_forces_and_dtypes():
    g = torch.Generator().manual_seed(3)
    gate, up, out = (torch.randn(4, 4, generator=g) for _ in range(3))
    force = GatedMLP(w_gate=gate, w_up=up, w_out=out)
    split = jacobian_split(force.ambient, points(7, 4).float())
    assert split.symmetric.dtype == torch.float32
    step = 1e-6
    x = points(7, 4)
    numeric = torch.stack(
        [(force(x + step * axis) - force(x - step * axis)) / (2 * step) for axis in torch.eye(4, dtype=F64)], -1
    )
    exact = jacobian_split(force, x)
    assert (exact.symmetric + exact.antisymmetric - numeric).abs().max() < 1e-8  # 5e-10: the differences
    assert (split.symmetric - exact.symmetric).abs().max() < 1e-5


def test_the_index_can_be_differentiated():
    mlp, x = random_mlp(4, 3), points(3, 3).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda y: jacobian_split(mlp.ambient, y).antisymmetric_share, (x,))


@pytest.mark.parametrize(
    ("force", "x", "words"),
    [
        (lambda x: x, [1.0, 2.0], "x is a list"),
        (lambda x: x, torch.zeros(2, 2, dtype=torch.long), "x is torch.int64"),
        (lambda x: x, torch.tensor(1.0), "shape \\(\\)"),
        (lambda x: x.sum(-1), torch.zeros(3, 2), "force returns shape \\(3,\\)"),
        (lambda x: 3.0, torch.zeros(3, 2), "force returns a float at points"),
        (3.0, torch.zeros(3, 2), "force is a float, but it must be a callable"),
        (torch.eye(2), torch.zeros(3, 2), "force is a Tensor, but it must be a callable"),
        (MLP, torch.zeros(3, 2), r"force is an ABCMeta, but it must be a callable"),
        (SA(1.0), torch.eye(2), "force is an SA, which mixes points, but it must act on each point separately"),
        (SA(1.0).velocity, torch.eye(2), "force is an SA, which mixes points"),
        (Block(SA(1.0), random_mlp(3, 2)), torch.eye(2), "force is a Block, which mixes points"),
    ],
)
def test_bad_input_is_refused(force, x, words):
    with pytest.raises(HelmscopeError, match=words) as caught:
        jacobian_split(force, x)
    assert "\n" not in str(caught.value)
