"""Rulings: compare confidence intervals with a region, for one statistic or over layers."""

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
    """Supported if the interval is inside the region [low, high], refuted if the two are disjoint, otherwise
    inconclusive.

    The region is closed: a strict bound x > a is low = nextafter(a, inf). Raises ``HelmscopeError`` for a region
    without bounds.

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
    """The number of replicates that would make the ruling conclusive: the smallest m >= n (half-width / distance to the
    bound)^2, because half-widths decrease as 1 / sqrt m.

    Returns the interval's n if it is conclusive already; None if the estimate is on a bound or an endpoint is infinite.

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
    # a side of width 0 needs no more replicates, and an estimate on the bound is never decided
    ratios = [width / gap if gap > 0 and width < math.inf else math.inf for width, gap in sides if width > 0]
    ratio = max(ratios, default=math.inf)
    # 1e-9: (.2 / .1)^2 exceeds 4 by rounding, which must not ask for one more replicate
    return max(interval.n + 1, math.ceil(interval.n * ratio**2 * (1 - 1e-9))) if ratio < 1e150 else None


@dataclass(frozen=True)
class Layers:
    """A ruling over layers, the interval of each layer (not adjusted), and the layers that are significant under Holm's
    correction: those outside the region for ``rule_every``, those inside for ``rule_some``.

    >>> Layers(Ruling.REFUTED, (Interval(1.0, 0.9, 1.1, n=32),), (0,)).named
    (0,)
    """

    ruling: Ruling
    intervals: tuple[Interval, ...]
    named: tuple[int, ...]


def rule_every(samples: Sequence[ArrayLike], region: Region, *, scale: Scale = PLAIN) -> Layers:
    """Whether every layer is in the region: supported if each 95 % interval is inside, refuted if at least one
    Holm-adjusted interval is outside, otherwise inconclusive. ``samples`` holds one vector of replicates per layer.

    The p-value of a layer is the smallest alpha at which its 1 - alpha Student interval is outside. Raises
    ``HelmscopeError`` for an empty sequence.

    >>> rule_every([[1.0, 1.1, 0.9], [-5.0, -5.1, -4.9]], Region(text="above 0", low=0.0)).named
    (1,)
    """
    return _over_layers(samples, region, scale, Ruling.REFUTED, Ruling.SUPPORTED)


def rule_some(samples: Sequence[ArrayLike], region: Region, *, scale: Scale = PLAIN) -> Layers:
    """Whether some layer is in the region: supported if at least one Holm-adjusted interval is inside, refuted if each
    95 % interval is outside, otherwise inconclusive; p-values and errors as in ``rule_every``.

    >>> rule_some([[1.0, 1.1, 0.9], [-5.0, -5.1, -4.9]], Region(text="above 0", low=0.0)).named
    (0,)
    """
    return _over_layers(samples, region, scale, Ruling.SUPPORTED, Ruling.REFUTED)


def _bounds(region: Region) -> tuple[float, float]:
    if not region.bounded:
        raise HelmscopeError(f"region is '{region.text}' without bounds, but a ruling needs low, high or both")
    return region.ends


def _over_layers(samples: Sequence[ArrayLike], region: Region, scale: Scale, one: Ruling, every: Ruling) -> Layers:
    """The ruling ``one`` if some layer is significant under Holm's correction, ``every`` if all intervals agree."""
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
