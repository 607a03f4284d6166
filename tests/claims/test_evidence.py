"""Evidence against SciPy, closed forms and enumeration; and its calibration with the truth on the threshold.

A false verdict is a supported or a refuted where the truth sits on the threshold, so a 95 % interval gives 5 % of them.
Thresholds from below and from above are counted apart, and so are the two rulings, each of which has half of the band.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from scipy import stats

from helmscope.claims.entry import Region
from helmscope.claims.evidence import (
    FisherZ,
    Interval,
    Log,
    Plain,
    bootstrap_t,
    halves,
    holm,
    jackknife_interval,
    mean_interval,
    proportion_interval,
    rule,
    rule_every,
    rule_some,
    sample_size,
    sign_flip,
)
from helmscope.types import HelmscopeError, Ruling

SUPPORTED, REFUTED, INCONCLUSIVE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
N = 32
Vector = np.ndarray


def above(low: float) -> Region:
    return Region(text="above", low=low)


def below(high: float) -> Region:
    return Region(text="below", high=high)


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
@pytest.mark.parametrize(
    ("scale", "forward", "back"),
    [(Plain(), float, float), (Log(), math.log, math.exp), (FisherZ(), math.atanh, math.tanh)],
)
def test_the_mean_interval_is_scipys_on_the_scale(scale, forward, back, confidence):
    values = np.random.default_rng(3).uniform(0.1, 0.9, 17)
    ours = mean_interval(values, scale=scale, confidence=confidence)
    y = [forward(v) for v in values]
    low, high = stats.t.interval(confidence, 16, np.mean(y), stats.sem(y))
    assert (ours.low, ours.estimate, ours.high) == pytest.approx((back(low), back(np.mean(y)), back(high)), rel=1e-13)
    assert ours.n == 17


@pytest.mark.parametrize("method", [mean_interval, bootstrap_t])
@pytest.mark.parametrize("scale", [Plain(), Log(), FisherZ()])
def test_equal_replicates_come_back_unrounded(method, scale):
    assert method([0.1] * 49, scale=scale) == Interval(0.1, 0.1, 0.1, 49)


@pytest.mark.parametrize("unit", [1e-200, 1e150, 1e300])
def test_no_square_underflows_or_overflows(unit):
    ours = mean_interval(np.array([1.0, 2.0, 4.0]) * unit)
    one = mean_interval([1.0, 2.0, 4.0])
    assert (ours.low / unit, ours.high / unit) == pytest.approx((one.low, one.high), rel=1e-14)


def test_bootstrap_t_is_the_loop_it_stands_for():
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


@pytest.mark.parametrize("scale", [Plain(), Log()])
def test_the_jackknife_of_a_mean_is_student(scale):
    x = np.random.default_rng(1).uniform(1, 2, 9).tolist()
    center = (lambda v: float(np.mean(v))) if isinstance(scale, Plain) else stats.gmean
    ours, student = jackknife_interval(center, x, scale=scale), mean_interval(x, scale=scale)
    assert (ours.low, ours.estimate, ours.high) == pytest.approx(
        (student.low, student.estimate, student.high), rel=1e-12
    )


def test_the_jackknife_of_a_variance_is_the_closed_form_and_sees_no_replicate_twice():
    clouds = [np.full((2, 2), v) for v in (1.0, 2.0, 4.0, 8.0)]

    def variance(kept: list[Vector]) -> float:
        assert len({id(cloud) for cloud in kept}) == len(kept) >= 3
        return float(np.var([cloud[0, 0] for cloud in kept], ddof=1))

    ours = jackknife_interval(variance, clouds)
    left_out = np.array([np.var(kept, ddof=1) for kept in ([2, 4, 8], [1, 4, 8], [1, 2, 8], [1, 2, 4])])
    error = math.sqrt(3 / 4 * np.sum((left_out - left_out.mean()) ** 2))
    assert ours.estimate == pytest.approx(9.583333333333334, rel=1e-14)
    assert ours.high - ours.estimate == pytest.approx(stats.t.ppf(0.975, 3) * error, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 6, 11])
@pytest.mark.parametrize("ties", [False, True])
def test_sign_flips_are_the_enumeration(n, ties):
    rng = np.random.default_rng(n)
    d = rng.integers(-2, 4, n) * 0.1 if ties else rng.normal(0.5, 1, n)
    sums = [round(float(np.dot(e, d)), 9) for e in itertools.product((1, -1), repeat=n)]
    seen = sums[0]
    ours = sign_flip(d)
    assert ours.exact
    assert ours.greater == sum(s >= seen for s in sums) / 2**n
    assert ours.less == sum(s <= seen for s in sums) / 2**n
    assert ours.two_sided == sum(abs(s) >= abs(seen) for s in sums) / 2**n


def test_sign_flips_stay_exact_at_32_and_turn_random_beyond_40():
    assert sign_flip(np.ones(N)).greater == 2.0**-32
    ones = np.where(np.arange(N) < 22, 1.0, -1.0)  # of equal size: the sign test
    assert sign_flip(ones).two_sided == pytest.approx(stats.binomtest(22, N).pvalue, rel=1e-12)
    d = np.where(np.arange(60) < 36, 1.0, -1.0)
    ours, exact = sign_flip(d, seed=4), stats.binomtest(36, 60).pvalue
    assert not ours.exact
    # four standard errors of 9,999 patterns
    assert ours.two_sided == pytest.approx(exact, abs=4 * math.sqrt(exact / 9_999))
    assert ours == sign_flip(d, seed=4) != sign_flip(d, seed=5)
    assert sign_flip(np.ones(60)).two_sided == 1e-4
    assert sign_flip(np.zeros(5)).two_sided == 1
    assert sign_flip(np.full(3, 1e308)).greater == 1 / 8


@pytest.mark.parametrize(
    ("low", "high", "ruling"),
    [
        *((low, high, SUPPORTED) for low, high in ((1, 2), (1.2, 1.3), (2, 2))),
        *((low, high, REFUTED) for low, high in ((2.1, 3), (0, 0.9), (-math.inf, 0.5))),
        *((low, high, INCONCLUSIVE) for low, high in ((0, 1), (0, 3), (2, 3), (1.5, math.inf))),
    ],
)
def test_rule(low, high, ruling):
    assert rule(Interval(max(low, -9.0), low, high, N), Region(text="", low=1, high=2)) is ruling


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
    assert sample_size(interval, above(math.exp(-0.2)), scale=Log()) == 32
    assert sample_size(interval, Region(text="", low=-1, high=math.exp(0.1)), scale=Log()) == 128
    assert sample_size(Interval(0.0, -0.9, 0.9, 8), above(math.tanh(math.atanh(0.9) / 3) * -1), scale=FisherZ()) == 72


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


def test_holm_is_the_step_down_loop():
    p = np.random.default_rng(0).uniform(0, 0.2, 9)
    for alpha in (0.01, 0.05, 0.2, 0.5):
        rejected: set[int] = set()
        for i, at in enumerate(np.argsort(p)):
            if p[at] > alpha / (9 - i):
                break
            rejected.add(int(at))
        assert set(np.flatnonzero(holm(p) <= alpha).tolist()) == rejected


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


@pytest.mark.parametrize("scale", [Plain(), Log()])
def test_named_layers_are_those_whose_adjusted_interval_lies_outside(scale):
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
    assert rule_every([[0.1] * 3], above(0.1), scale=scale).ruling is SUPPORTED
    assert rule_every([[0.1] * 3], above(0.11), scale=scale).ruling is REFUTED


@pytest.mark.parametrize("n", [4, 5, 33])
def test_halves_are_disjoint_random_and_whole(n):
    first, second = halves(n, seed=1)
    assert sorted([*first, *second]) == list(range(n))
    assert (len(first), len(second)) == (n // 2, n - n // 2)
    often = sum(0 in halves(n, seed=seed)[0] for seed in range(400))
    assert abs(often - 400 * (n // 2) / n) < 4 * math.sqrt(100)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: mean_interval([1.0]), r"values has shape \(1,\)"),
        (lambda: mean_interval([[1.0, 2.0]]), r"values has shape \(1, 2\)"),
        (lambda: mean_interval([1.0, math.nan]), r"values\[1\] is nan"),
        (lambda: mean_interval([1.0, math.inf]), r"values\[1\] is inf"),
        (lambda: mean_interval([[1.0], [1.0, 2.0]]), "values is a list"),
        (lambda: mean_interval([1.0, 0.0], scale=Log()), r"values\[1\] is 0, but it must be .* in \(0, inf\)"),
        (lambda: bootstrap_t([-1.0, 0.0], scale=FisherZ()), r"values\[0\] is -1, but it must be .* in \(-1, 1\)"),
        (lambda: mean_interval([-1.7e308, 1.7e308]), "range must not overflow"),
        (lambda: mean_interval([1.0, 2.0], confidence=1.0), "confidence is 1,"),
        (lambda: mean_interval([1.0, 2.0], confidence=math.nan), "confidence is nan"),
        (lambda: bootstrap_t([1.0, 2.0], seed=-1), "seed is -1"),
        (lambda: proportion_interval(5, 4), "successes is 5, but it must be at most n = 4"),
        (lambda: proportion_interval(0, 0), "n is 0"),
        (lambda: jackknife_interval(sum, [1.0]), "number of replicates is 1"),
        (lambda: jackknife_interval(lambda x: math.nan, [1.0, 2.0]), r"statistic\[0\] is nan"),
        (lambda: sign_flip([1.0, math.nan]), r"differences\[1\] is nan"),
        (lambda: Interval(1.0, 2.0, 3.0, 4), r"interval is \[2.0, 3.0\], but it must hold 1.0"),
        (lambda: Interval(1.0, math.nan, 3.0, 4), "must hold"),
        (lambda: rule(Interval(1.0, 1.0, 1.0, 4), Region(text="all")), "'all' without bounds"),
        (lambda: holm([0.1, 1.1]), "each in"),
        (lambda: holm([math.nan]), "each in"),
        (lambda: rule_every([], above(0)), r"samples is \[\], but it must hold"),
        (lambda: halves(3), "n is 3"),
    ],
)
def test_refusals_are_one_sentence(act, words):
    with pytest.raises(HelmscopeError, match=words) as refusal:
        act()
    assert "\n" not in str(refusal.value)


def percentile(x: Vector) -> Interval:
    means = np.random.default_rng(0).choice(x, (999, x.size)).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(x.mean()), float(low), float(high), x.size)


def normal(rng: np.random.Generator) -> Vector:
    return rng.normal(size=N)


def lognormal(rng: np.random.Generator) -> Vector:
    return rng.lognormal(size=N)


LAWS = {
    "normal": (normal, partial(mean_interval, scale=Plain()), 0.0),
    "lognormal": (lognormal, partial(mean_interval, scale=Log()), 1.0),
    "t3": (lambda rng: rng.standard_t(3, N), partial(mean_interval, scale=Plain()), 0.0),
    "cosines": (lambda rng: np.tanh(rng.normal(1, 0.5, N)), partial(mean_interval, scale=FisherZ()), math.tanh(1)),
    **{
        f"count-{p}": (lambda rng, p=p: rng.random(N) < p, lambda x: proportion_interval(int(x.sum()), N), p)
        for p in (0.1, 0.5, 0.9)
    },
}


def verdicts(name: str, trials: int, region: Callable[[float], Region]) -> tuple[int, int]:
    """How many of the trials came out supported, and refuted, with the truth on the threshold."""
    draw, method, truth = LAWS[name]
    rng = np.random.default_rng([trials, region is below, *name.encode()])
    rulings = [rule(method(draw(rng)), region(truth)) for _ in range(trials)]
    return rulings.count(SUPPORTED), rulings.count(REFUTED)


@pytest.mark.parametrize("region", [above, below])
@pytest.mark.parametrize("name", LAWS)
def test_calibration_on_200(name, region):
    """200 trials: the counts lie between the .001 and .999 quantiles of the binomial with the nominal rate, 5 % in all
    and 2.5 % a ruling (2 to 21, and at most 13). The percentile bootstrap's 12 % would give 24 of 200."""
    supported, refuted = verdicts(name, 200, region)
    assert max(supported, refuted) <= stats.binom.ppf(0.999, 200, 0.025)
    assert supported + refuted <= stats.binom.ppf(0.999, 200, 0.05)
    if name == "normal":
        assert supported + refuted >= stats.binom.ppf(0.001, 200, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("region", [above, below])
@pytest.mark.parametrize("name", LAWS)
def test_calibration_on_1000(name, region):
    supported, refuted = verdicts(name, 1000, region)
    band = {"normal": (32, 68), "lognormal": (0, 80), "t3": (0, 80)}.get(name, (0, 68))
    assert band[0] <= supported + refuted <= band[1]
    assert max(supported, refuted) <= band[1] / 2
    assert min(supported, refuted) >= band[0] / 2


@pytest.mark.slow
def test_why_student_on_the_scale():
    """lognormal(1) about its arithmetic mean: Student t and the percentile bootstrap fail, bootstrap-t holds."""
    rng = np.random.default_rng(7)
    samples = [lognormal(rng) for _ in range(1000)]
    truth = above(math.exp(0.5))
    misses = {
        method: sum(rule(method(x), truth) is not INCONCLUSIVE for x in samples)
        for method in (percentile, mean_interval, bootstrap_t)
    }
    assert misses[percentile] > 100
    assert misses[mean_interval] > 90
    assert misses[bootstrap_t] <= 80


@pytest.mark.slow
def test_every_and_some_err_at_most_5_percent_over_layers():
    """Twelve layers on the threshold: wrongly refuting "every" or supporting "some" is half of a two-sided error."""
    rng = np.random.default_rng(9)
    trials = [rng.normal(size=(12, N)) for _ in range(1000)]
    assert sum(rule_every(x, above(0)).ruling is REFUTED for x in trials) <= 34
    assert sum(rule_some(x, above(0)).ruling is SUPPORTED for x in trials) <= 34


@pytest.mark.parametrize(("effect", "percent"), [(0.5, 78), (0.75, 98)])
def test_power_on_a_planted_effect(effect, percent):
    """Standard deviations from the threshold at n = 32: the noncentral t's power, to four binomial errors."""
    power = stats.nct.sf(stats.t.ppf(0.975, N - 1), N - 1, effect * math.sqrt(N))
    assert round(100 * power) == percent
    rng = np.random.default_rng(11)
    for region, ruling in ((above, SUPPORTED), (below, REFUTED)):
        count = sum(rule(mean_interval(effect + normal(rng)), region(0)) is ruling for _ in range(400))
        assert count / 400 == pytest.approx(power, abs=4 * math.sqrt(power * (1 - power) / 400))
