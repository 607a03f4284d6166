"""Rulings: an interval against a region, the sample size that would decide, and layers after Holm."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from helmscope.stats.intervals import mean_interval, proportion_interval
from helmscope.stats.ruling import rule, rule_every, rule_some, sample_size
from helmscope.stats.scales import FisherZScale, LinearScale, LogScale
from helmscope.types import HelmscopeError, Interval, Region, Ruling
from support.regions import above, below

SUPPORTED, REFUTED, INCONCLUSIVE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
N = 32
Vector = np.ndarray


@pytest.mark.parametrize(
    ("low", "high", "ruling"),
    [
        *((low, high, SUPPORTED) for low, high in ((1, 2), (1.2, 1.3), (1.5, 1.5))),
        *((low, high, REFUTED) for low, high in ((2.1, 3), (0, 0.9), (-math.inf, 0.5))),
        *((low, high, INCONCLUSIVE) for low, high in ((0, 1), (0, 3), (2, 3), (2, 2), (1, 1), (1.5, math.inf))),
    ],
)
def test_rule(low, high, ruling):
    assert rule(Interval(max(low, -9.0), low, high, N), Region(text="", low=1, high=2)) is ruling


@pytest.mark.parametrize(
    ("low", "high", "ruling"),
    [
        *((low, high, SUPPORTED) for low, high in ((1.1, 1.9), (1.5, 1.5))),
        *((low, high, REFUTED) for low, high in ((2.1, 3), (0, 0.9))),
        *((low, high, INCONCLUSIVE) for low, high in ((1, 2), (1, 1.5), (1.5, 2), (0, 1), (2, 3), (1, 1), (2, 2))),
    ],
)
def test_an_exclusive_bound_must_not_be_touched(low, high, ruling):
    assert rule(Interval((low + high) / 2, low, high, N), Region(text="", above=1, below=2)) is ruling


@pytest.mark.parametrize(
    ("interval", "region", "n"),
    [
        (Interval(0.5, 0.3, 0.7, 32), above(0.4), 128),
        (Interval(0.5, 0.3, 0.7, 32), above(0.6), 128),
        (Interval(0.5, 0.3, 0.6, 10), Region(text="", low=0.4, high=0.6), 40),
        (Interval(0.5, 0.3, 0.7, 10), Region(text="", low=0.45, high=0.6), 160),
        (Interval(0.5, 0.3, 0.7, 32), above(0.2), 32),
        (Interval(0.5, 0.3, 0.7, 32), above(0.5), None),
        (Interval(0.5, 0.25, 0.75, 32), above(0.75), 33),
        (Interval(0.5, -math.inf, 0.7, 32), above(0.4), None),
        (proportion_interval(32, 32), Region(text="", low=0.95, high=1), 152),  # 32 (.1089 / .05)^2 = 151.7
    ],
)
def test_sample_size(interval, region, n):
    assert sample_size(interval, region) == n


def test_sample_size_on_its_scale():
    interval = Interval(1.0, math.exp(-0.4), math.exp(0.4), 8)
    assert sample_size(interval, above(math.exp(-0.2)), scale=LogScale()) == 32
    assert sample_size(interval, Region(text="", low=-1, high=math.exp(0.1)), scale=LogScale()) == 128
    assert (
        sample_size(Interval(0.0, -0.9, 0.9, 8), above(math.tanh(math.atanh(0.9) / 3) * -1), scale=FisherZScale()) == 72
    )


def test_the_sample_size_decides_when_the_interval_shrinks():
    interval, region = mean_interval(np.random.default_rng(2).normal(0.1, 1, N)), above(-0.05)
    n = sample_size(interval, region)
    assert n is not None

    def at(m: int) -> Ruling:
        shrink = math.sqrt(N / m)
        low, high = (interval.estimate + shrink * (end - interval.estimate) for end in (interval.low, interval.high))
        return rule(Interval(interval.estimate, low, high, m), region)

    assert at(n) is not INCONCLUSIVE
    assert at(n - 1) is INCONCLUSIVE


def layer(center: float, t: float) -> Vector:
    """32 replicates whose mean is t standard errors above the center."""
    x = stats.zscore(np.arange(N), ddof=1)
    return center + x + t / math.sqrt(N)


def test_layers_follow_holm_adjusted_intervals():
    """Four layers at 2.5 standard errors decide nothing at alpha / 4, where one alone would; at 3 they do."""
    few, many = layer(0, -2.5), layer(0, -3.0)
    inside = layer(0, 2.2)
    assert rule(mean_interval(few), above(0)) is REFUTED
    assert rule(mean_interval(few, confidence=1 - 0.05 / 4), above(0)) is INCONCLUSIVE
    assert rule(mean_interval(many, confidence=1 - 0.05 / 4), above(0)) is REFUTED
    assert rule_every([inside] * 3 + [few], above(0)).ruling is INCONCLUSIVE
    assert rule_every([inside] * 3 + [many], above(0)).ruling is REFUTED
    assert rule_every([inside] * 4, above(0)).ruling is SUPPORTED
    assert rule_every([inside] * 4, below(0)).ruling is INCONCLUSIVE  # each alone is outside, none after Holm
    assert rule_every([layer(0, 0), *[inside] * 3], above(0)).ruling is INCONCLUSIVE
    assert rule_some([few] * 3 + [inside], above(0)).ruling is INCONCLUSIVE
    assert rule_some([few] * 3 + [-many], above(0)).named == (3,)
    assert rule_some([few] * 4, above(0)).ruling is REFUTED
    # the step down: 2.5 is enough once the three others are rejected
    assert rule_every([many - 9, many - 9, many - 9, few], above(0)).named == (0, 1, 2, 3)


@pytest.mark.parametrize("scale", [LinearScale(), LogScale()])
def test_named_layers_are_those_whose_adjusted_interval_is_outside(scale):
    rng = np.random.default_rng(6)
    samples = [np.exp(rng.normal(0.12 * i - 0.5, 0.5, N)) for i in range(9)]
    region = Region(text="", low=0.8, high=1.2)
    for ruler, ruling in ((rule_every, REFUTED), (rule_some, SUPPORTED)):
        left, named = set(range(9)), set()
        while left:
            hits = {
                i
                for i in left
                if rule(mean_interval(samples[i], scale=scale, confidence=1 - 0.05 / len(left)), region) is ruling
            }
            if not hits:
                break
            left, named = left - hits, named | hits
        assert set(ruler(samples, region, scale=scale).named) == named
    assert rule_every([[0.1] * 3], above(0.1), scale=scale).ruling is INCONCLUSIVE
    assert rule_every([[0.1] * 3], above(0.09), scale=scale).ruling is SUPPORTED
    assert rule_every([[0.1] * 3], above(0.11), scale=scale).ruling is REFUTED


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: rule(Interval(1.0, 1.0, 1.0, 4), Region(text="all")), "'all' without bounds"),
        (lambda: rule_every([], above(0)), r"samples is \[\], but it must hold"),
    ],
)
def test_refusals_are_one_sentence(act, words):
    with pytest.raises(HelmscopeError, match=words) as refusal:
        act()
    assert "\n" not in str(refusal.value)
