"""Matrices as thin products: the same numbers as the dense ones, at the cost of thin ones."""

from __future__ import annotations

import pytest
import torch

import support.attention_family_oracles as family
from helmscope.fields.attention import SA
from helmscope.fields.lowrank import LowRank, as_dense, query_and_key
from helmscope.types import HelmscopeError
from support.attention_cases import F32, F64, INF, NAN, measure, normal, parameters, tokens
from support.attention_family_cases import KINDS, assert_oracle, thin

# torch itself calls it when it first differentiates forward
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.mark.parametrize("r", [1, 2, 5])
def test_the_matrix_is_the_product(r):
    matrix = thin(4, r)
    loop = torch.tensor(family.product(matrix.left.tolist(), matrix.right.tolist()), dtype=F64)
    assert (matrix.dense() - loop).abs().max() < 1e-15 * 10
    assert (matrix.shape, matrix.rank) == ((4, 4), r)
    assert torch.linalg.matrix_rank(matrix.dense()) == min(r, 4)
    assert LowRank(matrix.left, matrix.right.float()).dense().dtype == F64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("r", [1, 2, 6])
@pytest.mark.parametrize("names", [["query_key"], ["value"], ["query_key", "value"]], ids="+".join)
def test_low_rank_equals_dense(kind, r, names):
    """Measured 3e-15 of the greatest value."""
    for seed in range(5):
        x, given = tokens(2, 5, 4, seed=seed), measure(["weights", "mask"], 2, 5, seed=seed)
        matrices = {name: thin(4, r, seed=seed + 10 * len(name)) for name in names}
        low, full = KINDS[kind](2.0, **matrices), KINDS[kind](2.0, **{name: m.dense() for name, m in matrices.items()})
        pairs = [(low(x, **given), full(x, **given))]
        pairs += [(getattr(low, name)(x), getattr(full, name)(x)) for name in ("ambient", "kernel")]
        assert all((a - b).abs().max() <= 2e-14 * b.abs().max().clamp(min=1) for a, b in pairs)


@pytest.mark.parametrize("kind", ["sa", "usa", "hardmax"])
@pytest.mark.parametrize("names", [[], ["causal"], ["bias", "weights"], ["causal", "hidden", "weights", "mask"]])
def test_loop_oracle(kind, names):
    for seed in range(4):
        n, d = 5, 3
        given = parameters(names, n, d, seed)
        low = KINDS[kind](1.5, query_key=thin(d, 2, seed), value=thin(d, 1, seed + 5), **given)
        assert_oracle(low, tokens(n, d, seed=seed), measure(names, n, seed=seed))


def test_logits_of_rank_r_have_r_terms():
    """The cost of x^T B y is that of vectors of length r: no d x d matrix is formed."""
    query, key = query_and_key(tokens(7, 50), thin(50, 3))
    assert query.shape == key.shape == (7, 3)
    assert (query @ key.mT - tokens(7, 50) @ thin(50, 3).dense() @ tokens(7, 50).mT).abs().max() < 1e-14
    plain, same = query_and_key(tokens(7, 50), None)
    assert plain is same
    assert as_dense(thin(50, 3), tokens(1, 50).float()).dtype == F32


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    factors = [normal(3, 2, seed=s).requires_grad_() for s in range(4)]

    def velocity(x, a, b, c, e):
        return KINDS[kind](2.0, query_key=LowRank(a, b), value=LowRank(c, e)).velocity(x)

    assert torch.autograd.gradcheck(velocity, (tokens(4, 3).requires_grad_(), *factors), check_forward_ad=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_low_rank_identity_is_the_identity(kind):
    eye = torch.eye(3, dtype=F64)
    x = tokens(5, 3)
    low = KINDS[kind](2.0, query_key=LowRank(eye, eye), value=LowRank(eye, eye))
    assert (low(x) - KINDS[kind](2.0)(x)).abs().max() < 1e-14
    assert low.value_scale is None
    assert not low.isotropic


@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_a_system_does_not_depend_on_its_batch_to_the_bit(r, dtype):
    for n, d in ((3, 2), (5, 128), (32, 3), (64, 8)):
        x, field = tokens(4, n, d).to(dtype), SA(1.5, query_key=thin(d, r), value=thin(d, r, 7))
        together = field(x)
        for b in range(4):
            assert torch.equal(together[b], field(x[b : b + 1])[0]), (n, d)


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        (torch.ones(3, 2), torch.ones(3, 1), ["left", "right", "(3, 2)", "(3, 1)"]),
        (torch.ones(3, 2), torch.ones(4, 2), ["left", "right", "(4, 2)"]),
        (torch.ones(3, 0), torch.ones(3, 0), ["left", "(3, 0)", "r >= 1"]),
        (torch.ones(3), torch.ones(3, 1), ["left", "(3,)"]),
        ([[1.0]], torch.ones(1, 1), ["left", "list"]),
        (torch.ones(3, 1), torch.ones(3, 1, dtype=torch.int64), ["right", "torch.int64"]),
        (torch.full((3, 1), NAN), torch.ones(3, 1), ["left", "nan", "finite"]),
        (torch.ones(3, 1), torch.full((3, 1), -INF), ["right", "-inf", "finite"]),
    ],
)
def test_refusals(left, right, words):
    with pytest.raises(HelmscopeError) as caught:
        LowRank(left, right)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_low_rank_matrix_that_does_not_fit():
    for name in ("query_key", "value"):
        with pytest.raises(HelmscopeError, match=rf"{name} has shape \(5, 5\).*\(3, 3\)"):
            SA(1.0, **{name: thin(5, 2)})(tokens(4, 3))
    with pytest.raises(HelmscopeError, match="bias is a LowRank"):
        SA(1.0, bias=thin(3, 2))
