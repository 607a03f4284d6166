"""Spearman's correlation over layers: SciPy's value, an interval that covers it, and planted falls that are found."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from scipy import stats

from helmscope.claims.rank_correlation import SpearmanCorrelation, rank_correlation, spearman_interval
from helmscope.types import HelmscopeError, Region, Ruling

BELOW = Region(text="below 0", below=0.0)


def test_value_and_interval_are_those_of_the_formula():
    draw = np.random.default_rng(0)
    first, second = draw.integers(0, 6, (2, 12)).astype(float)  # with ties
    interval = SpearmanCorrelation(first, second).weigh(BELOW).interval
    r = stats.spearmanr(first, second).statistic
    assert interval.estimate == pytest.approx(r, abs=1e-14)
    reach = 1.959963984540054 * np.sqrt((1 + r * r / 2) / 9)
    assert np.arctanh([interval.low, interval.high]) == pytest.approx([np.arctanh(r) - reach, np.arctanh(r) + reach])
    perfect = spearman_interval(-1.0, 7)
    assert -1 <= perfect.low <= perfect.estimate == -1.0 < perfect.high < -0.9


def test_without_a_correlation_the_share_of_intervals_that_miss_is_that_of_all_permutations():
    shares = {}
    for n in (5, 7, 8):
        order, squares = np.arange(n), n * (n * n - 1) / 6
        values = [1 - ((order - each) ** 2).sum() / squares for each in map(np.array, permutations(range(n)))]
        ends = {r: spearman_interval(r, n) for r in set(values)}
        shares[n] = sum(not ends[r].low <= 0 <= ends[r].high for r in values) / len(values)
    assert shares[5] == pytest.approx(2 / 120)  # only perfect orders decide
    assert 0.032 < shares[7] < 0.05
    assert 0.032 < shares[8] < 0.05


@pytest.mark.parametrize("n", [11, 31])
@pytest.mark.parametrize("rho", [0.0, -0.8])
def test_intervals_of_normal_pairs_cover_their_correlation(n, rho):
    draw, count = np.random.default_rng(n), 4000
    first = draw.standard_normal((count, n))
    second = rho * first + np.sqrt(1 - rho**2) * draw.standard_normal((count, n))
    truth = 6 / np.pi * np.arcsin(rho / 2)
    found = [spearman_interval(stats.spearmanr(a, b).statistic, n) for a, b in zip(first, second, strict=True)]
    low, high = (sum(each) for each in zip(*((i.high < truth, i.low > truth) for i in found), strict=True))
    assert 0.028 * count < low + high < 0.068 * count  # 3.6 to 4.9 %, 3.2 to 6.8 within the error of this sample
    assert max(low, high) < 0.04 * count


@pytest.mark.parametrize("n", [7, 11])
def test_planted_falls_are_found_where_a_jackknife_misses_many(n):
    depth = np.arange(float(n))
    falls = [np.linspace(1, 0, n) + 0.1 * np.random.default_rng(seed).standard_normal(n) for seed in range(200)]
    rulings = [SpearmanCorrelation(fall, depth).weigh(BELOW).ruling for fall in falls]
    assert rulings.count(Ruling.SUPPORTED) >= 199
    before = [rank_correlation(fall[:, None], depth[:, None]).weigh(BELOW).ruling for fall in falls]
    assert before.count(Ruling.SUPPORTED) < 180


def test_refusals():
    with pytest.raises(HelmscopeError, match="n is 4, but an interval of a rank correlation needs at least 5 pairs"):
        spearman_interval(0.5, 4)
    assert SpearmanCorrelation(np.ones(7), np.arange(7.0)).weigh(BELOW).ruling is Ruling.IMPOSSIBLE
