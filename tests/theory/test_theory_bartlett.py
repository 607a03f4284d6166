"""Starts in the span of their tokens: the distribution of the Gram matrix, in closed form and against ``sample``."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from scipy import stats

from helmscope.theory.starts import Orthonormal, Uniform, VonMisesFisher, in_span
from helmscope.types import HelmscopeError


def grams(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT


def standard_errors(values: torch.Tensor, expected: float) -> float:
    """The largest deviation of a mean over the systems from ``expected``, in standard errors."""
    return float(((values.mean(0) - expected) / (values.std(0) / math.sqrt(len(values)))).abs().max())


@pytest.mark.parametrize("dim", [4, 5, 40, 10**6])
def test_moments_of_the_inner_product_of_every_pair(dim):
    """E g = 0, E g^2 = 1/d, E g^4 = 3/(d (d + 2)), for all six pairs of four tokens (dim = 4 is plain ``sample``)."""
    g = grams(Uniform(n=4, dim=dim).sample_in_span(40_000, seed=1))
    pairs = torch.stack([g[:, i, j] for i, j in itertools.combinations(range(4), 2)], dim=-1)
    assert standard_errors(pairs, 0.0) < 4
    assert standard_errors(pairs**2, 1 / dim) < 4
    assert standard_errors(pairs**4, 3 / (dim * (dim + 2))) < 4


@pytest.mark.parametrize("dim", [4, 7, 2**20])
def test_joint_moments_of_three_tokens(dim):
    """E g_12 g_23 g_31 = 1/d^2, because x_2 x_2^T and x_3 x_3^T have mean I/d."""
    g = grams(Uniform(n=3, dim=dim).sample_in_span(40_000, seed=2))
    assert standard_errors(g[:, 0, 1] * g[:, 1, 2] * g[:, 2, 0], dim**-2) < 4
    assert standard_errors(g[:, 0, 1] * g[:, 1, 2], 0.0) < 4


@pytest.mark.parametrize(("n", "dim"), [(2, 3), (5, 6), (5, 64), (5, 10**6)])
def test_the_distribution_of_one_inner_product(n, dim):
    """(1 + g)/2 has the distribution Beta((d-1)/2, (d-1)/2) for every pair."""
    g = grams(Uniform(n=n, dim=dim).sample_in_span(8_000, seed=3))
    distribution = stats.beta((dim - 1) / 2, (dim - 1) / 2, loc=-1, scale=2)
    for i, j in ((0, 1), (0, n - 1), (n - 2, n - 1)):
        assert stats.kstest(g[:, i, j].numpy(), distribution.cdf).pvalue > 1e-3


@pytest.mark.parametrize("statistic", [torch.linalg.det, lambda g: torch.linalg.eigvalsh(g)[:, -1]])
def test_statistics_of_the_whole_gram_matrix_agree_with_sample(statistic):
    start = Uniform(n=5, dim=7)
    reduced, full = (statistic(grams(x)) for x in (start.sample_in_span(8_000, seed=4), start.sample(8_000, seed=5)))
    assert stats.ks_2samp(reduced.numpy(), full.numpy()).pvalue > 1e-3


def test_the_determinant_is_a_product_of_beta_variables():
    """The squared sine of row i of L is chi^2_{d-i} / (chi^2_{d-i} + chi^2_i), so E det g = prod (d-i)/d."""
    g = grams(Uniform(n=4, dim=6).sample_in_span(40_000, seed=6))
    assert standard_errors(torch.linalg.det(g), (5 / 6) * (4 / 6) * (3 / 6)) < 4


def test_shape_dtype_norms_and_seeds():
    start = Uniform(n=4, dim=10**6)
    x = start.sample_in_span(3, seed=9)
    assert (x.shape, x.dtype) == ((3, 4, 4), torch.float64)
    assert (torch.linalg.vector_norm(x, dim=-1) - 1).abs().max() < 1e-15
    state = torch.get_rng_state()
    assert torch.equal(start.sample_in_span(3, seed=9), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(start.sample_in_span(3, seed=9, dtype=torch.float32), x.float())
    assert not torch.isclose(start.sample_in_span(3, seed=10), x)[:, 1:, 0].any()
    assert torch.equal(start.sample_in_span(seed=9), start.sample_in_span(1, seed=9)[0])


@pytest.mark.parametrize("start", [Uniform(5, 5), Uniform(5, 3), VonMisesFisher(5, 4, 2.0)])
def test_for_dim_at_most_n_it_equals_sample(start):
    assert torch.equal(start.sample_in_span(4, seed=1), start.sample(4, seed=1))


@pytest.mark.parametrize("start", [VonMisesFisher(5, 9, 4.0), Orthonormal(5, 9)])
def test_other_distributions_are_rotated_into_their_span(start):
    full, small = start.sample(6, seed=2), start.sample_in_span(6, seed=2)
    assert small.shape == (6, 5, 5)
    assert (grams(small) - grams(full)).abs().max() < 1e-14  # measured 9e-16


def test_tokens_in_a_plane_keep_their_gram_matrix():
    x = torch.zeros(4, 9, dtype=torch.float64)
    angles = torch.tensor([0.0, 1.0, 1.0, 3.0], dtype=torch.float64)
    x[:, 2], x[:, 7] = angles.cos(), angles.sin()
    assert (grams(in_span(x)) - grams(x)).abs().max() < 1e-14
    assert in_span(x.mT).shape == (9, 4)


def test_a_million_dimensions_cost_no_more_than_n_dimensions():
    def seconds(dim: int) -> float:
        start = time.perf_counter()
        Uniform(n=32, dim=dim).sample_in_span(256, seed=0)
        return time.perf_counter() - start

    seconds(64)
    assert min(seconds(2**20) for _ in range(5)) < 5 * min(seconds(33) for _ in range(5))


@pytest.mark.parametrize(("arguments", "message"), [({"batch": 0}, "batch is 0"), ({"seed": -1}, "seed is -1")])
def test_bad_input_raises_as_in_sample(arguments, message):
    with pytest.raises(HelmscopeError, match=message):
        Uniform(n=4, dim=9).sample_in_span(**arguments)
