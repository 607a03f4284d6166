"""Dense attention sums against loops with 60 digits, for ordinary logits and for logits whose exponentials overflow."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from helmscope.kernels.dense import attention_sum, logits

F64 = torch.float64
INF = math.inf
SIZES = [(1, 1), (2, 3), (3, 2), (5, 4)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def exact_sum(pairs, value, weights=None, skip_self=False):
    """sum_j m_j e^{l_ij} v_j and sum_j m_j e^{l_ij} with 60 digits, in nested lists."""
    n, d = len(value), len(value[0])
    m = [1.0] * n if weights is None else weights
    with mpmath.workdps(60):
        terms = [[mpmath.mpf(m[j]) * mpmath.exp(mpmath.mpf(pairs[i][j])) for j in range(n)] for i in range(n)]
        mass = [mpmath.fsum(row) for row in terms]
        total = [
            [mpmath.fsum(terms[i][j] * value[j][a] for j in range(n) if j != i or not skip_self) for a in range(d)]
            for i in range(n)
        ]
    return total, mass


def assert_exact(pairs, value, weights=None, skip_self=False, rel=1e-14):
    """Compare total, mass and mean on their true scale, relative to the sum of the absolute values of their terms."""
    sums = attention_sum(pairs, value, weights=weights, skip_self=skip_self)
    weight_list = None if weights is None else weights.tolist()
    total, mass = exact_sum(pairs.tolist(), value.tolist(), weight_list, skip_self)
    size, _ = exact_sum(pairs.tolist(), value.abs().tolist(), weight_list, skip_self)
    with mpmath.workdps(60):
        for i in range(len(value)):
            scale, mass_scale = mpmath.exp(sums.shift[i].item()), mpmath.exp(sums.mass_shift[i].item())
            assert abs(mass_scale * sums.mass[i].item() - mass[i]) <= rel * mass[i]
            for a in range(value.shape[1]):
                assert abs(scale * sums.total[i, a].item() - total[i][a]) <= rel * size[i][a]
                mean, mean_size = (total[i][a] / mass[i], size[i][a] / mass[i]) if mass[i] else (0, 0)
                # below 1e-300 the mean itself underflows to 0
                assert abs(sums.mean[i, a].item() - mean) <= rel * mean_size + 1e-300


@pytest.mark.parametrize("skip_self", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_sums_are_exact(n, d, spread, weighted, skip_self):
    for seed in range(3):
        pairs, value = spread * normal(n, n, seed=seed), normal(n, d, seed=seed + 10)
        weights = torch.arange(n, dtype=F64) / 2 + 0.25 if weighted else None
        # a difference of logits has a rounding error of 1e-16 times their size, which an exponential makes relative
        assert_exact(pairs, value, weights, skip_self, rel=1e-15 + 2e-16 * spread)


@pytest.mark.parametrize("skip_self", [False, True])
@pytest.mark.parametrize(
    "pairs",
    [
        [[1000.0, -1000.0], [-1000.0, 1000.0]],
        [[-1000.0, 1000.0], [1000.0, -1000.0]],
        [[1000.0, 1000.0], [1000.0, 1000.0]],
        [[-1000.0, -1000.0], [-1000.0, -1000.0]],
        [[0.0, -INF], [-INF, 0.0]],
        [[-INF, 1000.0], [-1000.0, -INF]],
        [[-INF, -INF], [-INF, -1000.0]],
        [[-INF, -INF], [-INF, -INF]],
    ],
)
def test_extreme_logits(pairs, skip_self):
    value = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=F64)
    pairs = torch.tensor(pairs, dtype=F64)
    assert_exact(pairs, value, skip_self=skip_self)
    assert_exact(pairs, value, torch.tensor([0.25, 3.0], dtype=F64), skip_self=skip_self)
    sums = attention_sum(pairs, value, skip_self=skip_self)
    assert all(torch.isfinite(part).all() for part in (sums.total, sums.shift, sums.mass, sums.mass_shift, sums.mean))
    # the scale is factored out completely: the totals are of order 1, or there was no term
    skipped = torch.eye(2, dtype=torch.bool) & torch.tensor(skip_self)
    summed = (pairs > -INF) & ~skipped
    assert torch.equal((sums.total.abs().amax(-1) > 0.1), summed.any(-1))
    assert torch.equal((sums.mass[:, 0] >= 1), (pairs > -INF).any(-1))


def test_float32_sums_have_float32_accuracy():
    pairs, value = (10 * normal(4, 4)).float(), normal(4, 3, seed=1).float()
    sums = attention_sum(pairs, value, skip_self=True)
    assert sums.total.dtype == sums.mass.dtype == sums.mean.dtype == torch.float32
    assert_exact(pairs, value, skip_self=True, rel=5e-7)  # measured 1e-7


def test_fully_masked_rows_are_zero_and_have_zero_gradients():
    pairs = normal(3, 3).masked_fill(torch.tensor([[True], [False], [True]]), -INF).requires_grad_()
    value = normal(3, 2, seed=1).requires_grad_()
    weights = torch.ones(3, dtype=F64, requires_grad=True)
    for skip_self in (False, True):
        sums = attention_sum(pairs, value, weights=weights, skip_self=skip_self)
        masked = [0, 2]
        assert torch.equal(sums.total[masked], torch.zeros(2, 2, dtype=F64))
        assert torch.equal(sums.mass[masked], torch.zeros(2, 1, dtype=F64))
        assert torch.equal(sums.mean[masked], torch.zeros(2, 2, dtype=F64))
        d_pairs, d_value, d_weights = torch.autograd.grad(sums.mean.sum(), (pairs, value, weights))
        assert torch.equal(d_pairs[masked], torch.zeros(2, 3, dtype=F64))
        assert torch.isfinite(torch.cat([d_pairs, d_value, d_weights[:, None]], 1)).all()
        assert d_value.abs().max() > 0.1


@pytest.mark.parametrize("skip_self", [False, True])
@pytest.mark.parametrize("level", [0.0, 600.0, -600.0])
def test_gradients_of_the_mean(level, skip_self):
    """The gradient is exact although the shifts are detached, also for equal logits."""
    weights = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=F64, requires_grad=True)
    value = normal(4, 2, seed=1).requires_grad_()
    for pairs in (level + normal(4, 4), torch.full((4, 4), level, dtype=F64)):
        assert torch.autograd.gradcheck(
            lambda p, v, m: attention_sum(p, v, weights=m, skip_self=skip_self).mean,
            (pairs.requires_grad_(), value, weights),
        )


def test_skip_self_keeps_the_digits_that_the_self_term_would_absorb():
    """Self-logit 50, the other -50: a weight of e^{-100} = 3.7e-44 beside the weight 1 that projection removes."""
    pairs = torch.tensor([[50.0, -50.0], [-50.0, 50.0]], dtype=F64)
    mean = attention_sum(pairs, torch.eye(2, dtype=F64), skip_self=True).mean
    share = math.exp(-100) / (1 + math.exp(-100))
    assert mean[0, 0] == mean[1, 1] == 0
    assert mean[0, 1].item() == pytest.approx(share, rel=1e-15, abs=0)
    full = attention_sum(pairs, torch.eye(2, dtype=F64)).mean
    assert full[0, 0] == 1


def test_sums_do_not_depend_on_the_batch():
    pairs, value = normal(2, 3, 5, 5), normal(2, 3, 5, 4, seed=1)
    weights = normal(2, 3, 5, seed=2).abs()
    batched = attention_sum(pairs, value, weights=weights, skip_self=True)
    for a in range(2):
        for b in range(3):
            alone = attention_sum(pairs[a, b][None], value[a, b][None], weights=weights[a, b][None], skip_self=True)
            for part in ("total", "shift", "mass", "mass_shift", "mean"):
                assert torch.equal(getattr(batched, part)[a, b], getattr(alone, part)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("weights", [None, [1.0, 0.0, 2.0, 0.0]])
def test_logits_agree_with_a_loop(causal, with_bias, weights):
    query, key = normal(2, 4, 3), normal(2, 4, 3, seed=1)
    bias = normal(4, 4, seed=2)
    bias[1, 2] = bias[3, 0] = -INF
    m = None if weights is None else torch.tensor(weights, dtype=F64).expand(2, 4)
    pairs = logits(query, key, bias=bias if with_bias else None, causal=causal, weights=m)
    for b in range(2):
        for i in range(4):
            for j in range(4):
                dot = sum(query[b, i, a].item() * key[b, j, a].item() for a in range(3))
                expected = dot + (bias[i, j].item() if with_bias else 0.0)
                hidden = (causal and j > i) or (weights is not None and weights[j] == 0) or expected == -INF
                assert pairs[b, i, j] == -INF if hidden else abs(pairs[b, i, j] - expected) < 1e-14


def test_a_key_of_weight_0_does_not_set_the_scale():
    """Otherwise its logit of 1000 would make every other term underflow."""
    query, key = torch.tensor([[1.0]], dtype=F64).expand(3, 1), torch.tensor([[-1000.0], [1000.0], [-999.0]], dtype=F64)
    weights = torch.tensor([1.0, 0.0, 1.0], dtype=F64)
    mean = attention_sum(logits(query, key, weights=weights), torch.eye(3, dtype=F64), weights=weights).mean
    share = 1 / (1 + math.exp(-1))
    expected = torch.tensor([1 - share, 0, share], dtype=F64).expand(3, 3)
    assert torch.allclose(mean, expected, rtol=0, atol=2e-16)
