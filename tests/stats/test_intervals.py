"""Intervals against SciPy, closed forms and loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from helmscope.stats.intervals import bootstrap_t, jackknife_interval, mean_interval, proportion_interval
from helmscope.stats.scales import FisherZScale, LinearScale, LogScale, RemainderScale
from helmscope.types import HelmscopeError, Interval

Vector = np.ndarray


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
@pytest.mark.parametrize(
    ("scale", "forward", "back"),
    [
        (LinearScale(), float, float),
        (LogScale(), math.log, math.exp),
        (FisherZScale(), math.atanh, math.tanh),
        (RemainderScale(), lambda x: -math.log(1 - x), lambda y: 1 - math.exp(-y)),
    ],
)
def test_the_mean_interval_is_scipys_on_the_scale(scale, forward, back, confidence):
    values = np.random.default_rng(3).uniform(0.1, 0.9, 17)
    ours = mean_interval(values, scale=scale, confidence=confidence)
    y = [forward(v) for v in values]
    low, high = stats.t.interval(confidence, 16, np.mean(y), stats.sem(y))
    assert (ours.low, ours.estimate, ours.high) == pytest.approx((back(low), back(np.mean(y)), back(high)), rel=1e-13)
    assert ours.n == 17


@pytest.mark.parametrize("method", [mean_interval, bootstrap_t])
@pytest.mark.parametrize("scale", [LinearScale(), LogScale(), FisherZScale(), RemainderScale()])
def test_equal_replicates_come_back_unrounded(method, scale):
    assert method([0.1] * 49, scale=scale) == Interval(0.1, 0.1, 0.1, 49)


@pytest.mark.parametrize("unit", [1e-200, 1e150, 1e300])
def test_no_square_underflows_or_overflows(unit):
    ours = mean_interval(np.array([1.0, 2.0, 4.0]) * unit)
    one = mean_interval([1.0, 2.0, 4.0])
    assert (ours.low / unit, ours.high / unit) == pytest.approx((one.low, one.high), rel=1e-14)


def test_bootstrap_t_equals_a_plain_loop():
    x = np.random.default_rng(5).exponential(size=12)
    draws = np.random.default_rng(8).integers(0, 12, (1999, 12))
    ratios = sorted((x[d].mean() - x.mean()) / stats.sem(x[d]) for d in draws)
    ours = bootstrap_t(x, seed=8)
    # 0.025 * 1998 = 49.95: the 50th from below and the 50th from above
    expected = (x.mean() - ratios[1949] * stats.sem(x), x.mean() - ratios[49] * stats.sem(x))
    assert (ours.low, ours.high) == pytest.approx(expected, rel=1e-12)
    assert ours != bootstrap_t(x, seed=9)


def test_bootstrap_t_of_two_is_infinite_and_always_holds_its_estimate():
    assert bootstrap_t([1.0, 2.0]) == Interval(1.5, -math.inf, math.inf, 2)
    skewed = bootstrap_t(np.exp(np.arange(9.0)), confidence=0.01)  # both quantiles on one side of 0
    assert skewed.low == skewed.estimate or skewed.high == skewed.estimate


def test_clopper_pearson_is_scipys_and_solves_the_binomial_tails():
    for n in (1, 7, 32):
        for k in range(n + 1):
            ours = proportion_interval(k, n, confidence=0.9)
            exact = stats.binomtest(k, n).proportion_ci(0.9)
            assert (ours.estimate, ours.low, ours.high) == pytest.approx((k / n, *exact), abs=1e-11)
            assert k == 0 or stats.binom.sf(k - 1, n, ours.low) == pytest.approx(0.05, rel=1e-9)
            assert k == n or stats.binom.cdf(k, n, ours.high) == pytest.approx(0.05, rel=1e-9)


@pytest.mark.parametrize("scale", [LinearScale(), LogScale()])
def test_the_jackknife_of_a_mean_is_student(scale):
    x = np.random.default_rng(1).uniform(1, 2, 9).tolist()
    center = (lambda v: float(np.mean(v))) if isinstance(scale, LinearScale) else stats.gmean
    ours, student = jackknife_interval(center, x, scale=scale), mean_interval(x, scale=scale)
    assert (ours.low, ours.estimate, ours.high) == pytest.approx(
        (student.low, student.estimate, student.high), rel=1e-12
    )


def test_the_jackknife_of_a_variance_is_the_closed_form_without_duplicates():
    clouds = [np.full((2, 2), v) for v in (1.0, 2.0, 4.0, 8.0)]

    def variance(kept: list[Vector]) -> float:
        assert len({id(cloud) for cloud in kept}) == len(kept) >= 3
        return float(np.var([cloud[0, 0] for cloud in kept], ddof=1))

    ours = jackknife_interval(variance, clouds)
    left_out = np.array([np.var(kept, ddof=1) for kept in ([2, 4, 8], [1, 4, 8], [1, 2, 8], [1, 2, 4])])
    error = math.sqrt(3 / 4 * np.sum((left_out - left_out.mean()) ** 2))
    assert ours.estimate == pytest.approx(9.583333333333334, rel=1e-14)
    assert ours.high - ours.estimate == pytest.approx(stats.t.ppf(0.975, 3) * error, rel=1e-12)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: mean_interval([1.0]), r"values has shape \(1,\)"),
        (lambda: mean_interval([[1.0, 2.0]]), r"values has shape \(1, 2\)"),
        (lambda: mean_interval([1.0, math.nan]), r"values\[1\] is nan"),
        (lambda: mean_interval([1.0, math.inf]), r"values\[1\] is inf"),
        (lambda: mean_interval([[1.0], [1.0, 2.0]]), "values is a list"),
        (lambda: mean_interval([1.0, 0.0], scale=LogScale()), r"values\[1\] is 0, but it must be .* in \(0, inf\)"),
        (lambda: bootstrap_t([-1.0, 0.0], scale=FisherZScale()), r"values\[0\] is -1, but it must be .* in \(-1, 1\)"),
        (lambda: mean_interval([-1.7e308, 1.7e308]), "range must not overflow"),
        (lambda: mean_interval([1.0, 2.0], confidence=1.0), "confidence is 1,"),
        (lambda: mean_interval([1.0, 2.0], confidence=math.nan), "confidence is nan"),
        (lambda: bootstrap_t([1.0, 2.0], seed=-1), "seed is -1"),
        (lambda: proportion_interval(5, 4), "successes is 5, but it must be at most n = 4"),
        (lambda: proportion_interval(0, 0), "n is 0"),
        (lambda: jackknife_interval(sum, [1.0]), "number of replicates is 1"),
        (lambda: jackknife_interval(lambda x: math.nan, [1.0, 2.0]), r"statistic\[0\] is nan"),
    ],
)
def test_refusals_are_one_sentence(act, words):
    with pytest.raises(HelmscopeError, match=words) as refusal:
        act()
    assert "\n" not in str(refusal.value)
