"""Ranks and residuals against 30-digit singular values, loops and closed forms."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import helmscope as hs
from support import oracles

F64 = torch.float64
SIZES = [(1, 3), (2, 2), (3, 6), (6, 3)]
RANKS = {
    "entropy": (hs.rank.effective_rank, oracles.effective_rank),
    "participation": (hs.rank.participation_ratio, oracles.participation_ratio),
    "stable": (hs.rank.stable_rank, oracles.stable_rank),
    "nuclear": (hs.rank.nuclear_rank, oracles.nuclear_rank),
}
RESIDUALS = {
    "frobenius": (hs.rank.collapse_residual_frobenius, oracles.collapse_residual_frobenius),
    "composite": (hs.rank.collapse_residual_composite, oracles.collapse_residual_composite),
    "relative frobenius": (
        partial(hs.rank.collapse_residual_frobenius, relative=True),
        partial(oracles.collapse_residual_frobenius, relative=True),
    ),
    "relative composite": (
        partial(hs.rank.collapse_residual_composite, relative=True),
        partial(oracles.collapse_residual_composite, relative=True),
    ),
}
SMOOTH = {**RANKS, **RESIDUALS}
MASK = torch.tensor([[True, False, True, True], [False, True, True, False], [True, False, False, False]])


def circle(*angles: float) -> torch.Tensor:
    given = torch.tensor(angles, dtype=F64)
    return torch.stack([given.cos(), given.sin()], -1)


def plane(n: int, d: int) -> torch.Tensor:
    """n tokens in a plane of R^d: rank 2."""
    frame = hs.Orthonormal(2, d).sample(seed=3)
    return circle(*(0.7 * k + 0.1 for k in range(n))) @ frame


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_value_is_the_oracle(name, n, d):
    ours, oracle = SMOOTH[name]
    x = hs.Uniform(n, d).sample(4, seed=n)
    loops = [oracle(cloud) for cloud in x.tolist()]
    assert ours(x).tolist() == pytest.approx(loops, rel=5e-15, abs=1e-15)
    assert ours(x.reshape(2, 2, n, d)).flatten().tolist() == pytest.approx(loops, rel=5e-15, abs=1e-15)


@pytest.mark.parametrize("name", SMOOTH)
def test_padding_is_absence(name):
    ours, oracle = SMOOTH[name]
    x = hs.Uniform(4, 3).sample(3, seed=1)
    loops = [oracle(cloud[mask].tolist()) for cloud, mask in zip(x, MASK, strict=True)]
    assert ours(x, weights=MASK).tolist() == pytest.approx(loops, rel=5e-15, abs=1e-15)
    one = [oracle(cloud[MASK[0]].tolist()) for cloud in x]
    assert ours(x, weights=MASK[0]).tolist() == pytest.approx(one, rel=5e-15, abs=1e-15)


@pytest.mark.parametrize("name", SMOOTH)
def test_a_weight_is_a_multiplicity(name):
    ours, oracle = SMOOTH[name]
    x = hs.Uniform(4, 3).sample(seed=5)
    repeated = oracle(x[[0, 1, 1, 3, 3, 3]].tolist())
    weights = torch.tensor([1.0, 2.0, 0.0, 3.0], dtype=torch.float64)
    assert ours(x, weights=weights).item() == pytest.approx(repeated, rel=5e-15, abs=1e-15)


@pytest.mark.parametrize("tol", [0.0, 1e-12, 1e-6, 0.3, 0.9])
def test_numerical_rank_is_the_oracle(tol):
    clouds = [*hs.Uniform(5, 3).sample(3, seed=2), *hs.Uniform(3, 5).sample(3, seed=2)]
    if tol > 0:  # at 0, rounding alone decides about a rank-deficient cloud
        clouds += [plane(6, 5), circle(0.3, 0.3, 0.3 + math.pi)]
    for cloud in clouds:
        assert hs.rank.numerical_rank(cloud, tol=tol).item() == oracles.numerical_rank(cloud.tolist(), tol)
    x = hs.Uniform(4, 3).sample(3, seed=1)
    loops = [oracles.numerical_rank(cloud[mask].tolist(), 0.1) for cloud, mask in zip(x, MASK, strict=True)]
    assert hs.rank.numerical_rank(x, tol=0.1, weights=MASK).tolist() == loops


def test_closed_forms():
    # two tokens at the angle a have singular values sqrt(1 +- cos a)
    a = 0.7
    pair, c = circle(0.2, 0.2 + a), math.cos(a)
    assert hs.rank.stable_rank(pair).item() == pytest.approx(2 / (1 + c), rel=1e-15, abs=0)
    assert hs.rank.participation_ratio(pair).item() == pytest.approx(2 / (1 + c * c), rel=1e-15, abs=0)
    assert hs.rank.nuclear_rank(pair).item() == pytest.approx(1 + math.tan(a / 2), rel=1e-15, abs=0)
    p = 1 / (1 + math.tan(a / 2))
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert hs.rank.effective_rank(pair).item() == pytest.approx(math.exp(entropy), rel=1e-14, abs=0)
    # |x - y| = 2 sin(a / 2), and each lies half of that from the mean
    assert hs.rank.collapse_residual_frobenius(pair).item() == pytest.approx(
        math.sqrt(2) * math.sin(a / 2), rel=1e-14, abs=0
    )


@pytest.mark.parametrize("name", RANKS)
def test_ranks_at_their_ends(name):
    ours = RANKS[name][0]
    assert ours(hs.Orthonormal(5, 7).sample(3, seed=0)).tolist() == pytest.approx([5.0] * 3, rel=1e-14)
    one = hs.Uniform(1, 7).sample(3, seed=0).expand(3, 5, 7)
    assert ours(one).tolist() == pytest.approx([1.0] * 3, rel=0, abs=1e-13)
    generic = ours(hs.Uniform(5, 7).sample(200, seed=0))
    assert ((generic > 1) & (generic < 5)).all()


@pytest.mark.parametrize("name", RESIDUALS)
def test_residual_of_one_cluster_is_zero(name):
    ours = RESIDUALS[name][0]
    assert ours(torch.eye(3, dtype=F64)[[1, 1, 1, 1]]).item() == 0
    assert ours(hs.Uniform(1, 7).sample(3, seed=0).expand(3, 5, 7)).max() < 1e-15


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients(name):
    ours = SMOOTH[name][0]
    for n, d in ((4, 3), (3, 4)):
        assert torch.autograd.gradcheck(ours, hs.Uniform(n, d).sample(2, seed=5).requires_grad_())
    x = hs.Uniform(4, 3).sample(2, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ours(x, weights=MASK[:2]), x)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize(
    "cloud",
    [
        torch.eye(3, dtype=F64)[[0, 0, 0]],
        hs.Uniform(1, 4).sample(seed=1).expand(5, 4),
        torch.eye(3, dtype=F64),
        circle(0.0, math.pi),
        circle(0.4, 0.4, 1.1),
        plane(5, 6),
        circle(0.4),
    ],
    ids=["one exact", "one rounded", "equal values", "antipodal", "pair", "plane", "single"],
)
def test_gradients_are_finite_at_ties_and_deficient_ranks(name, cloud):
    x = cloud.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(SMOOTH[name][0](x), x)
    assert torch.isfinite(gradient).all()


X = hs.Uniform(4, 3).sample(3, seed=0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hs.rank.numerical_rank(X, tol=-1e-6), "tol is -1e-06.*>= 0"),
        (lambda: hs.rank.numerical_rank(X, tol=math.inf), "tol is inf.*finite"),
        *((lambda f=f: f(2 * X), "x holds a token of norm 2.*unit sphere") for f, _ in SMOOTH.values()),
        *((lambda f=f: f(X, weights=-MASK.double()), "weights holds the entry -1.*>= 0") for f, _ in SMOOTH.values()),
        (lambda: hs.rank.stable_rank(X, weights=MASK[:2]), r"weights .*\(2, 4\).*\(3, 4\)"),
        (lambda: hs.rank.effective_rank(X, weights=[True] * 4), "weights .*list.*tensor"),
        (lambda: hs.rank.effective_rank(X[0].tolist()), "x is a list.*tensor"),
        (lambda: hs.rank.collapse_residual_composite(torch.full((2, 3), math.nan)), "x holds NaN.*finite"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
