"""What an interval says of a region, for one statistic and over layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from helmscope.stats.holm import holm
from helmscope.stats.intervals import mean_interval
from helmscope.stats.replicates import moments, replicate_vector
from helmscope.stats.scales import PLAIN, Scale
from helmscope.types import HelmscopeError, Interval, Region, Ruling

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


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
    interval lies outside, else inconclusive. ``samples`` holds one vector of replicates per layer.

    A layer's p-value is the least alpha at which its 1 - alpha Student interval lies outside. An empty sequence is
    refused.

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


def _bounds(region: Region) -> tuple[float, float]:
    if not region.bounded:
        raise HelmscopeError(f"region is '{region.text}' without bounds, but a ruling needs low, high or both")
    return region.ends


def _over_layers(samples: Sequence[ArrayLike], region: Region, scale: Scale, one: Ruling, every: Ruling) -> Layers:
    """The ruling ``one`` where Holm finds it for one layer, ``every`` where each interval gives it."""
    if not hasattr(samples, "__len__") or len(samples) < 1:
        raise HelmscopeError(f"samples is {samples!r:.80}, but it must hold one vector of replicates per layer")
    low, high = scale.forward(np.array(_bounds(region))).tolist()
    intervals, alphas = [], []
    for values in samples:
        x = replicate_vector("values", values, scale)
        intervals.append(mean_interval(x, scale=scale))
        mean, error = map(float, moments(x, scale))
        gap = min(mean - low, high - mean)  # at least 0 inside the region, below 0 outside
        alpha = 2.0 * float(special.stdtr(x.size - 1, -abs(gap) / error)) if error > 0 else 0.0
        alphas.append(alpha if one is (Ruling.SUPPORTED if gap >= 0 else Ruling.REFUTED) else 1.0)
    named = tuple(np.flatnonzero(holm(alphas) <= 0.05).tolist())
    unanimous = all(rule(interval, region) is every for interval in intervals)
    return Layers(one if named else every if unanimous else Ruling.INCONCLUSIVE, tuple(intervals), named)
