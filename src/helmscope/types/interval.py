"""An estimate with its confidence interval, and the region that it is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from helmscope.types.arguments import real_number, whole_number
from helmscope.types.errors import HelmscopeError


@dataclass(frozen=True)
class Interval:
    """An estimate from n replicates with its confidence interval, low <= estimate <= high. The endpoints may be
    infinite; raises ``HelmscopeError`` for NaN.

    >>> Interval(0.5, 0.4, 0.7, n=32).high
    0.7
    """

    estimate: float
    low: float
    high: float
    n: int

    def __post_init__(self) -> None:
        real_number("estimate", self.estimate)
        numeric = isinstance(self.low, Real) and isinstance(self.high, Real)
        if not numeric or not self.low <= self.estimate <= self.high:
            raise HelmscopeError(
                f"the interval is [{self.low}, {self.high}], but it must contain the estimate {self.estimate}"
            )
        whole_number("n", self.n, at_least=1)


@dataclass(frozen=True, kw_only=True)
class Region:
    """The region that supports a claim: in words, and as a closed interval [low, high] for its statistic.

    None means that there is no bound on that side; both are None if the region is not an interval. Raises
    ``HelmscopeError`` unless the bounds are finite and low <= high.

    >>> Region(text="at least half", low=0.5).high is None
    True
    """

    text: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        real = all(isinstance(bound, int | float) and math.isfinite(bound) for bound in bounds)
        if not real or bounds != sorted(bounds):
            raise HelmscopeError(f"region is [{self.low}, {self.high}], but its bounds must be finite and low <= high")

    @property
    def bounded(self) -> bool:
        """Whether there is a bound on at least one side.

        >>> Region(text="descriptive").bounded
        False
        """
        return self.low is not None or self.high is not None

    @property
    def ends(self) -> tuple[float, float]:
        """Both bounds as numbers; a missing one is infinite.

        >>> Region(text="at least half", low=0.5).ends
        (0.5, inf)
        """
        return -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high


def interval_text(interval: Interval | None) -> str:
    """An estimate with its interval as text, with at least three digits and enough to distinguish the endpoints.

    >>> interval_text(Interval(1.00000012, 1.0000001, 1.00000014, n=32))
    '1.00000012 [1.0000001, 1.00000014]'
    >>> interval_text(None)
    'no interval'
    """
    if interval is None:
        return "no interval"
    size, width = max(abs(interval.low), abs(interval.high)), interval.high - interval.low
    # an infinite width needs no more digits: an endpoint is infinite, or the width overflows
    digits = min(12, max(3, 2 + math.ceil(math.log10(size / width)))) if 0 < width < math.inf else 3
    return f"{interval.estimate:.{digits}g} [{interval.low:.{digits}g}, {interval.high:.{digits}g}]"


def region_text(region: Region) -> str:
    """The bounds of a region as text.

    >>> region_text(Region(text="", low=0.9, high=1.1)), region_text(Region(text="", high=1e-12))
    ('0.9 to 1.1', 'at most 1e-12')
    >>> region_text(Region(text="", low=0.0)), region_text(Region(text="described"))
    ('at least 0', 'no bounds')
    """
    if not region.bounded:
        return "no bounds"
    if region.low is None:
        return f"at most {region.high:.12g}"
    return f"at least {region.low:.12g}" if region.high is None else f"{region.low:.12g} to {region.high:.12g}"
