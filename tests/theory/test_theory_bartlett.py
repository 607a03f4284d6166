"""Starts in the span of their tokens: the law of the Gram matrix, in closed form and against ``sample``."""

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
    """How far the mean over the systems lies from what is expected."""
    return float(((values.mean(0) - expected) / (values.std(0) / math.sqrt(len(values)))).abs().max())


@pytest.mark.parametrize("dim", [4, 5, 40, 10**6])
def test_moments_of_every_pair(dim):
    """E g = 0, E g^2 = 1/d, E g^4 = 3/(d (d + 2)), for all six pairs of four tokens (for dim = 4 it is ``sample``)."""
    g = grams(Uniform(n=4, dim=dim).sample_in_span(40_000, seed=1))
    pairs = torch.stack([g[:, i, j] for i, j in itertools.combinations(range(4), 2)], dim=-1)
    assert standard_errors(pairs, 0.0) < 4
    assert standard_errors(pairs**2, 1 / dim) < 4
    assert standard_errors(pairs**4, 3 / (dim * (dim + 2))) < 4


@pytest.mark.parametrize("dim", [4, 7, 2**20])
def test_three_tokens_are_jointly_right(dim):
    """E g_12 g_23 g_31 = 1/d^2: (x_2 x_2^T and x_3 x_3^T have the mean I/d)."""
    g = grams(Uniform(n=3, dim=dim).sample_in_span(40_000, seed=2))
    assert standard_errors(g[:, 0, 1] * g[:, 1, 2] * g[:, 2, 0], dim**-2) < 4
    assert standard_errors(g[:, 0, 1] * g[:, 1, 2], 0.0) < 4


@pytest.mark.parametrize(("n", "dim"), [(2, 3), (5, 6), (5, 64), (5, 10**6)])
def test_the_law_of_one_product(n, dim):
    """(1 + g)/2 is beta of (d-1)/2, (d-1)/2, whichever pair is looked at."""
    g = grams(Uniform(n=n, dim=dim).sample_in_span(8_000, seed=3))
    law = stats.beta((dim - 1) / 2, (dim - 1) / 2, loc=-1, scale=2)
    for i, j in ((0, 1), (0, n - 1), (n - 2, n - 1)):
        assert stats.kstest(g[:, i, j].numpy(), law.cdf).pvalue > 1e-3


@pytest.mark.parametrize("statistic", [torch.linalg.det, lambda g: torch.linalg.eigvalsh(g)[:, -1]])
def test_a_whole_gram_matrix_is_that_of_sample(statistic):
    start = Uniform(n=5, dim=7)
    mine, full = (statistic(grams(x)) for x in (start.sample_in_span(8_000, seed=4), start.sample(8_000, seed=5)))
    assert stats.ks_2samp(mine.numpy(), full.numpy()).pvalue > 1e-3


def test_the_determinant_is_a_product_of_beta_laws():
    """Row i of L has the squared sine chi^2_{d-i} / (chi^2_{d-i} + chi^2_i): E det g = prod (d-i)/d."""
    g = grams(Uniform(n=4, dim=6).sample_in_span(40_000, seed=6))
    assert standard_errors(torch.linalg.det(g), (5 / 6) * (4 / 6) * (3 / 6)) < 4


def test_unit_tokens_of_the_right_shape_from_a_seed_alone():
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
def test_where_dim_is_small_it_is_sample(start):
    assert torch.equal(start.sample_in_span(4, seed=1), start.sample(4, seed=1))


@pytest.mark.parametrize("start", [VonMisesFisher(5, 9, 4.0), Orthonormal(5, 9)])
def test_other_laws_are_turned_into_their_span(start):
    full, small = start.sample(6, seed=2), start.sample_in_span(6, seed=2)
    assert small.shape == (6, 5, 5)
    assert (grams(small) - grams(full)).abs().max() < 1e-14  # measured 9e-16


def test_tokens_that_lie_in_a_plane_keep_their_gram_matrix():
    x = torch.zeros(4, 9, dtype=torch.float64)
    angles = torch.tensor([0.0, 1.0, 1.0, 3.0], dtype=torch.float64)
    x[:, 2], x[:, 7] = angles.cos(), angles.sin()
    assert (grams(in_span(x)) - grams(x)).abs().max() < 1e-14
    assert in_span(x.mT).shape == (9, 4)


def test_a_million_dimensions_cost_what_n_dimensions_cost():
    def seconds(dim: int) -> float:
        begun = time.perf_counter()
        Uniform(n=32, dim=dim).sample_in_span(256, seed=0)
        return time.perf_counter() - begun

    seconds(64)
    assert min(seconds(2**20) for _ in range(5)) < 5 * min(seconds(33) for _ in range(5))


@pytest.mark.parametrize(("words", "said"), [({"batch": 0}, "batch is 0"), ({"seed": -1}, "seed is -1")])
def test_refusals_are_those_of_sample(words, said):
    with pytest.raises(HelmscopeError, match=said):
        Uniform(n=4, dim=9).sample_in_span(**words)
