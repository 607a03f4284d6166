"""Rules of evidence: from replicates to an interval, from an interval and a frozen region to a ruling.

Replicates are prompts or seeds, never tokens of one prompt. An interval is computed on the scale where replicates are
closest to normal (``Log`` for positive quantities, ``FisherZ`` for cosines) and mapped back, so what it covers is the
mean on that scale: the geometric mean under ``Log``, tanh E artanh c under ``FisherZ``. Student t is the default;
``bootstrap_t`` is for skewed replicates that no scale makes symmetric.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from scipy import special

from helmscope.claims.entry import Region
from helmscope.types import HelmscopeError, Ruling, real_number, whole_number

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Vector = NDArray[np.float64]

T = TypeVar("T")
EXACT_FLIPS = 40  # two halves of 2^20 sums each: under a second
RANDOM_FLIPS, RESAMPLES = 9_999, 1_999


class Scale:
    """A strictly increasing map on which replicates are averaged, with its open domain. ``forward`` takes the ends of
    the domain, and what lies beyond them, to -inf and inf; ``back`` is the inverse."""

    domain = (-math.inf, math.inf)

    def forward(self, x: Vector) -> Vector:
        return x

    def back(self, y: float) -> float:
        return y


class Plain(Scale):
    """The numbers as they are.

    >>> Plain().back(2.0)
    2.0
    """


class Log(Scale):
    """log x, for positive quantities; the mean on it is the log of the geometric mean.

    >>> round(mean_interval([1.0, 10.0, 100.0], scale=Log()).estimate, 12)
    10.0
    """

    domain = (0.0, math.inf)

    def forward(self, x: Vector) -> Vector:
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(x, 0.0))

    def back(self, y: float) -> float:
        return math.exp(y) if y < 709 else math.inf


class FisherZ(Scale):
    """artanh c, for cosines and correlations, |c| < 1.

    >>> round(mean_interval([0.0, 0.8, 0.0, 0.8], scale=FisherZ()).estimate, 12)
    0.5
    """

    domain = (-1.0, 1.0)

    def forward(self, x: Vector) -> Vector:
        with np.errstate(divide="ignore"):
            return np.arctanh(np.clip(x, -1.0, 1.0))

    def back(self, y: float) -> float:
        return math.tanh(y)


PLAIN = Plain()


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval, low <= estimate <= high, from n replicates; ends may be infinite, NaN is refused.

    >>> Interval(0.5, 0.4, 0.7, n=32).high
    0.7
    """

    estimate: float
    low: float
    high: float
    n: int

    def __post_init__(self) -> None:
        real_number("estimate", self.estimate)
        if not self.low <= self.estimate <= self.high:
            raise HelmscopeError(f"the interval is [{self.low}, {self.high}], but it must hold {self.estimate}")


def mean_interval(values: ArrayLike, *, scale: Scale = PLAIN, confidence: float = 0.95) -> Interval:
    """Student's interval of the mean on a scale g: g^-1(m +- t s / sqrt n), t the quantile with n - 1 degrees.

    Exact for replicates normal on that scale, 5 % outside for t3. Skew that the scale leaves makes it fail on one side
    (lognormal(1) at n = 32 on the plain scale: 11 %). Equal replicates give an interval of no width. Fewer than two,
    NaN and values outside the scale's domain are refused.

    >>> mean_interval([1.0, 2.0, 3.0, 4.0])
    Interval(estimate=2.5, low=0.4457..., high=4.5542..., n=4)
    """
    x = _replicates("values", values, scale)
    mean, error = _moments(x, scale)
    reach = -float(special.stdtrit(x.size - 1, _tail(confidence))) * error
    return _about(scale, mean, reach, reach, float(x[0]), x.size)


def bootstrap_t(values: ArrayLike, *, scale: Scale = PLAIN, confidence: float = 0.95, seed: int = 0) -> Interval:
    """The bootstrap-t interval of the mean on a scale (Efron 1979): m - q e to m - q' e, where e = s / sqrt n and
    q, q' are the upper and lower quantiles of (m* - m) / e* over 1,999 draws with replacement.

    Follows skew that Student t ignores: lognormal(1) at n = 32 on the plain scale, 8 % outside, 6 % on one side. For
    t3 it is the worse one, 8 % against 5 %. Not for statistics that duplicates break (nearest neighbors, W2). A draw
    of equal values counts as infinite, so few replicates give an infinite interval. Refuses as ``mean_interval``.

    >>> interval = bootstrap_t([1.0, 2.0, 2.5, 3.0, 9.0, 4.0, 2.0, 1.5])
    >>> interval.high - interval.estimate > interval.estimate - interval.low
    True
    """
    x = _replicates("values", values, scale)
    mean, error = _moments(x, scale)
    rng = np.random.default_rng(whole_number("seed", seed, at_least=0))
    draws = ((scale.forward(x) - mean) / (error or 1.0))[rng.integers(0, x.size, (RESAMPLES, x.size))]
    errors = np.where(np.ptp(draws, axis=1) == 0, 0.0, draws.std(1, ddof=1) / math.sqrt(x.size))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num(draws.mean(1) / errors, nan=0.0, posinf=math.inf, neginf=-math.inf)
    # order statistics, since an interpolation would make NaN of infinities
    down = float(np.quantile(ratio, 1.0 - _tail(confidence), method="higher"))
    up = -float(np.quantile(ratio, _tail(confidence), method="lower"))
    return _about(scale, mean, down * error, up * error, float(x[0]), x.size)


def proportion_interval(successes: int, n: int, *, confidence: float = 0.95) -> Interval:
    """Clopper and Pearson's (1934) exact interval of a proportion, with beta quantiles of k and n - k.

    Each side misses at most (1 - confidence) / 2 whatever the truth. More successes than trials are refused.

    >>> interval = proportion_interval(32, 32)
    >>> round(interval.low, 4), interval.high
    (0.8911, 1.0)
    """
    n = whole_number("n", n, at_least=1)
    k = whole_number("successes", successes, at_least=0)
    if k > n:
        raise HelmscopeError(f"successes is {k}, but it must be at most n = {n}")
    low = 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, _tail(confidence)))
    high = 1.0 if k == n else float(special.betaincinv(k + 1, n - k, 1.0 - _tail(confidence)))
    return Interval(k / n, low, high, n)


def jackknife_interval(
    statistic: Callable[[list[T]], float], replicates: Sequence[T], *, scale: Scale = PLAIN, confidence: float = 0.95
) -> Interval:
    """The delete-one interval theta +- t e, e^2 = (n - 1) / n sum_i (theta_i - mean theta)^2 (Tukey 1958).

    ``statistic`` gets a list of replicates (numbers, or whole clouds), never one twice. For the mean this is Student's
    interval; it fails for statistics that are not smooth, such as the median. A statistic outside the scale is refused.

    >>> round(jackknife_interval(lambda x: sum(x) / len(x), [1.0, 2.0, 3.0, 4.0]).high, 4)
    4.5543
    """
    items = list(replicates)
    n = whole_number("the number of replicates", len(items), at_least=2)
    left_out = [statistic(items[:i] + items[i + 1 :]) for i in range(n)]
    theta = _replicates("statistic", [statistic(items), *left_out], scale)
    reach = -float(special.stdtrit(n - 1, _tail(confidence))) * _moments(theta[1:], scale)[1] * (n - 1)
    return _about(scale, float(scale.forward(theta)[0]), reach, reach, float(theta[0]), n)


@dataclass(frozen=True)
class SignFlip:
    """p-values of a sign-flip test, for a center other than, above and below 0; ``exact`` if all 2^n flips count.

    >>> SignFlip(0.25, 0.125, 1.0, exact=True).greater
    0.125
    """

    two_sided: float
    greater: float
    less: float
    exact: bool


def sign_flip(differences: ArrayLike, *, seed: int = 0) -> SignFlip:
    """The paired test under the null that each difference is symmetric about 0: the share of all 2^n sign patterns e
    with sum e_i d_i at least (``greater``), at most (``less``) or as far from 0 as (``two_sided``) the sum observed.

    Exact up to n = 40: the sums of two halves are sorted and matched (Horowitz and Sahni 1974). Beyond, 9,999 seeded
    patterns and p = (1 + hits) / (1 + patterns) (Phipson and Smyth 2010). Sums equal up to rounding are ties and count
    as hits. No p-value is below 2^-n, so five differences decide nothing at 5 % two-sided. Refuses NaN and n < 2.

    >>> sign_flip([1.0, 2.0, 3.0])
    SignFlip(two_sided=0.25, greater=0.125, less=1.0, exact=True)
    """
    d = _replicates("differences", differences, PLAIN)
    d = d / (np.abs(d).max() or 1.0)
    seen, slack = float(d.sum()), 1e-12 * float(np.abs(d).sum())
    if d.size <= EXACT_FLIPS:
        first, second = _sums(d[: d.size // 2]), np.sort(_sums(d[d.size // 2 :]))
        # the law of the sums is symmetric, so P(S <= s) = P(S >= -s)
        misses = [int(np.searchsorted(second, at - slack - first).sum()) for at in (seen, -seen)]
        greater, less = (1.0 - miss / 2**d.size for miss in misses)
        return SignFlip(min(1.0, 2.0 * min(greater, less)), greater, less, exact=True)
    rng = np.random.default_rng(whole_number("seed", seed, at_least=0))
    sums = np.array([rng.choice((-1.0, 1.0), d.size) @ d for _ in range(RANDOM_FLIPS)])
    hits = (np.abs(sums) >= abs(seen) - slack, sums >= seen - slack, sums <= seen + slack)
    two_sided, greater, less = ((1 + int(hit.sum())) / (1 + RANDOM_FLIPS) for hit in hits)
    return SignFlip(two_sided, greater, less, exact=False)


def rule(interval: Interval, region: Region) -> Ruling:
    """Supported if the whole interval lies in [low, high], refuted if the whole lies outside, else inconclusive.

    The region is closed: a strict bound x > a is low = nextafter(a, inf). A region without bounds is refused.

    >>> rule(Interval(0.5, 0.4, 0.7, n=32), Region(text="at least .3", low=0.3)).value
    'supported'
    """
    low, high = _bounds(region)
    if low <= interval.low and interval.high <= high:
        return Ruling.SUPPORTED
    if interval.high < low or high < interval.low:
        return Ruling.REFUTED
    return Ruling.INCONCLUSIVE


def sample_size(interval: Interval, region: Region, *, scale: Scale = PLAIN) -> int | None:
    """The least m >= n (half-width / distance to the bound)^2, which would decide: half-widths fall as 1 / sqrt m.

    The interval's own n where it decides already; None where the estimate sits on a bound or an end is infinite.

    >>> sample_size(Interval(0.5, 0.3, 0.7, n=32), Region(text="at least .4", low=0.4))
    128
    """
    if rule(interval, region) is not Ruling.INCONCLUSIVE:
        return interval.n
    ends = np.array([interval.low, interval.estimate, interval.high, *_bounds(region)])
    left, estimate, right, low, high = scale.forward(ends).tolist()
    down, up = estimate - left, right - estimate
    sides = [(down, estimate - low), (up, high - estimate)]
    if not low <= estimate <= high:
        sides = [(up, low - estimate) if estimate < low else (down, estimate - high)]
    # a side without width needs nothing, and one that starts on its bound never ends
    ratios = [reach / gap if gap > 0 and reach < math.inf else math.inf for reach, gap in sides if reach > 0]
    ratio = max(ratios, default=math.inf)
    # 1e-9: (.2 / .1)^2 is not 4 in floating point, and nobody should run one more prompt for that
    return max(interval.n + 1, math.ceil(interval.n * ratio**2 * (1 - 1e-9))) if ratio < 1e150 else None


def holm(p_values: ArrayLike) -> Vector:
    """Holm's (1979) adjusted p-values: in rising order, the running maximum of (m - i + 1) p_(i), at most 1.

    Those at most alpha hold a false one with probability at most alpha, however dependent.

    >>> holm([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or p.size < 1 or not bool(((p >= 0) & (p <= 1)).all()):
        raise HelmscopeError(f"p_values is {p.tolist()}, but it must hold one number or more, each in [0, 1]")
    order = np.argsort(p, kind="stable")
    rising = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)))
    return rising[np.argsort(order)]


@dataclass(frozen=True)
class Layers:
    """A ruling over layers, the interval of each layer (not adjusted), and the layers that Holm's rule names: those
    outside the region for "every layer", those inside for "some layer".

    >>> Layers(Ruling.REFUTED, (Interval(1.0, 0.9, 1.1, n=32),), (0,)).named
    (0,)
    """

    ruling: Ruling
    intervals: tuple[Interval, ...]
    named: tuple[int, ...]


def rule_every(samples: Sequence[ArrayLike], region: Region, *, scale: Scale = PLAIN) -> Layers:
    """Whether every layer lies in the region: supported if each 95 % interval lies in it, refuted if one Holm-adjusted
    interval lies outside, else inconclusive. ``samples`` holds one vector of replicates a layer.

    A layer's p-value is the least alpha at which its 1 - alpha Student interval lies outside. No layers are refused.

    >>> rule_every([[1.0, 1.1, 0.9], [-5.0, -5.1, -4.9]], Region(text="above 0", low=0.0)).named
    (1,)
    """
    return _over_layers(samples, region, scale, Ruling.REFUTED, Ruling.SUPPORTED)


def rule_some(samples: Sequence[ArrayLike], region: Region, *, scale: Scale = PLAIN) -> Layers:
    """Whether some layer lies in the region: supported if one Holm-adjusted interval lies in it, refuted if each 95 %
    interval lies outside, else inconclusive; p-values and refusals as in ``rule_every``.

    >>> rule_some([[1.0, 1.1, 0.9], [-5.0, -5.1, -4.9]], Region(text="above 0", low=0.0)).named
    (0,)
    """
    return _over_layers(samples, region, scale, Ruling.SUPPORTED, Ruling.REFUTED)


def halves(n: int, *, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two random disjoint halves of range(n), sorted: choose on the first, test on the second, which is the larger
    where n is odd. n < 4 is refused, for a test needs two replicates.

    >>> sorted(np.concatenate(halves(6)).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    n = whole_number("n", n, at_least=4)
    order = np.random.default_rng(whole_number("seed", seed, at_least=0)).permutation(n)
    return np.sort(order[: n // 2]), np.sort(order[n // 2 :])


def numbers(name: str, values: ArrayLike) -> Vector:
    """``values``, of Python, NumPy or torch, as float64; anything but real numbers is refused by name."""
    try:
        raw = np.asarray(getattr(values, "detach", lambda: values)())
        if raw.dtype.kind not in "iuf":
            raise TypeError
    except (TypeError, ValueError, RuntimeError):
        raise HelmscopeError(f"{name} is a {type(values).__name__}, but it must hold real numbers alone") from None
    return raw.astype(np.float64)


def _replicates(name: str, values: ArrayLike, scale: Scale) -> Vector:
    if not isinstance(scale, Scale):
        raise HelmscopeError(f"scale is {scale!r}, but it must be Plain(), Log() or FisherZ()")
    x = numbers(name, values)
    if x.ndim != 1 or x.size < 2:
        raise HelmscopeError(f"{name} has shape {x.shape}, but it must be a vector of at least 2 replicates")
    low, high = scale.domain
    bad = ~(np.isfinite(x) & (x > low) & (x < high))
    if bool(bad.any()):
        at = int(bad.argmax())
        raise HelmscopeError(f"{name}[{at}] is {x[at]:g}, but it must be a finite number in ({low:g}, {high:g})")
    return x


def _moments(x: Vector, scale: Scale) -> tuple[float, float]:
    """The mean on the scale and its standard error, which rounding neither lifts from 0 nor lets underflow to it."""
    y = scale.forward(x)
    with np.errstate(over="ignore"):
        spread = float(np.ptp(y))
    if not math.isfinite(spread):
        raise HelmscopeError(f"replicates lie between {x.min():g} and {x.max():g}, but their range must not overflow")
    unit = (y - y[0]) / (spread or 1.0)
    return float(y[0]) + spread * float(unit.mean()), spread * float(unit.std(ddof=1)) / math.sqrt(y.size)


def _about(scale: Scale, center: float, down: float, up: float, raw: float, n: int) -> Interval:
    """Back from the scale; what has no width comes back as it went in, without the rounding of the two maps."""
    if down == up == 0:
        return Interval(raw, raw, raw, n)
    estimate = scale.back(center)  # bootstrap quantiles may lie on one side, and rounding too
    return Interval(estimate, min(estimate, scale.back(center - down)), max(estimate, scale.back(center + up)), n)


def _tail(confidence: float) -> float:
    if not 0 < real_number("confidence", confidence) < 1:
        raise HelmscopeError(f"confidence is {confidence:g}, but it must lie between 0 and 1")
    return 0.5 * (1.0 - confidence)


def _bounds(region: Region) -> tuple[float, float]:
    if region.low is None and region.high is None:
        raise HelmscopeError(f"region is '{region.text}' without bounds, but a ruling needs low, high or both")
    return -math.inf if region.low is None else region.low, math.inf if region.high is None else region.high


def _sums(d: Vector) -> Vector:
    """All 2^n sums of +-d_i."""
    return functools.reduce(lambda sums, each: np.concatenate([sums + each, sums - each]), d, np.zeros(1))


def _over_layers(samples: Sequence[ArrayLike], region: Region, scale: Scale, one: Ruling, every: Ruling) -> Layers:
    """The ruling ``one`` where Holm finds it for one layer, ``every`` where each interval gives it."""
    if not hasattr(samples, "__len__") or len(samples) < 1:
        raise HelmscopeError(f"samples is {samples!r:.80}, but it must hold one vector of replicates a layer")
    low, high = scale.forward(np.array(_bounds(region))).tolist()
    intervals, alphas = [], []
    for values in samples:
        x = _replicates("values", values, scale)
        intervals.append(mean_interval(x, scale=scale))
        mean, error = _moments(x, scale)
        gap = min(mean - low, high - mean)  # at least 0 inside the region, below 0 outside
        alpha = 2.0 * float(special.stdtr(x.size - 1, -abs(gap) / error)) if error > 0 else 0.0
        alphas.append(alpha if one is (Ruling.SUPPORTED if gap >= 0 else Ruling.REFUTED) else 1.0)
    named = tuple(np.flatnonzero(holm(alphas) <= 0.05).tolist())
    unanimous = all(rule(interval, region) is every for interval in intervals)
    return Layers(one if named else every if unanimous else Ruling.INCONCLUSIVE, tuple(intervals), named)
