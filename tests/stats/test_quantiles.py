"""Intervals of quantiles: order statistics by hand, their coverage, and infinite values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from helmscope.stats import quantile_interval
from helmscope.types import HelmscopeError


@pytest.mark.parametrize("n", [8, 32, 100])
@pytest.mark.parametrize("level", [0.1, 0.5, 0.75])
def test_the_ends_are_order_statistics_that_cover(n: int, level: float) -> None:
    interval = quantile_interval(np.arange(1, n + 1)[::-1], level)
    r, s = interval.low, interval.high  # the values are their ranks
    below = stats.binom(n, level)
    covered = below.cdf(min(s, n + 1) - 1) - below.cdf(max(r, 0) - 1)
    assert covered >= 0.95
    inner = below.cdf(min(s, n + 1) - 2) - below.cdf(max(r, 0))
    assert inner < 0.95  # one step less on each side would not do
    assert interval.estimate == math.ceil(level * n - 1e-9)


def test_it_covers_the_quantile_of_a_heavy_tail() -> None:
    rng = np.random.default_rng(0)
    truth = stats.cauchy.ppf(0.75)
    missed = 0
    for _ in range(1000):
        interval = quantile_interval(rng.standard_cauchy(40), 0.75)
        missed += not interval.low <= truth <= interval.high
    assert missed <= 65


def test_infinite_values_count() -> None:
    interval = quantile_interval([1.0, 2.0, math.inf, math.inf, 3.0, 4.0, 5.0, 6.0], 0.5)
    assert interval.estimate == 4.0
    assert math.isinf(interval.high)
    assert math.isinf(quantile_interval([1.0, 2.0, 3.0], 0.9).high)


@pytest.mark.parametrize(
    ("values", "level", "text"),
    [
        ([1.0], 1.0, "level is 1, but it must be above 0 and below 1"),
        ([], 0.5, "values is empty, but quantiles need numbers"),
        ([1.0, math.nan], 0.5, "values is NaN in part, but quantiles need numbers"),
        (["a"], 0.5, "values is a list, but it must hold real numbers only"),
    ],
)
def test_bad_input_is_refused(values: list[float], level: float, text: str) -> None:
    with pytest.raises(HelmscopeError, match=text):
        quantile_interval(values, level)
