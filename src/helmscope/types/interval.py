"""An estimate with its confidence interval, and the region that it is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from helmscope.types.arguments import check_integer, check_real
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
        check_real("estimate", self.estimate)
        numeric = isinstance(self.low, Real) and isinstance(self.high, Real)
        if not numeric or not self.low <= self.estimate <= self.high:
            raise HelmscopeError(
                f"the interval is [{self.low}, {self.high}], but it must contain the estimate {self.estimate}"
            )
        check_integer("n", self.n, at_least=1)


@dataclass(frozen=True, kw_only=True)
class Region:
    """The region that supports a claim: in words, which may be empty, and as an interval for its statistic.

    ``low`` and ``high`` are bounds that belong to the region ("at least", "at most"), ``above`` and ``below`` bounds
    that do not; each side has at most one of them, and a side without one is unbounded. Raises ``HelmscopeError``
    unless the bounds are finite and in order.

    >>> Region(text="at least half", low=0.5).ends, Region(text="a growth", above=0.0).ends
    ((0.5, inf), (0.0, inf))
    """

    text: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def __post_init__(self) -> None:
        for closed, exclusive in (("low", "above"), ("high", "below")):
            if getattr(self, closed) is not None and getattr(self, exclusive) is not None:
                raise HelmscopeError(
                    f"{self._label} has {closed} = {getattr(self, closed)} and {exclusive} = "
                    f"{getattr(self, exclusive)}, but it must have at most one of the two"
                )
        for name, bound in self.bounds.items():
            if not isinstance(bound, int | float) or not math.isfinite(bound):
                raise HelmscopeError(f"{name} of {self._label} is {bound!r}, but it must be a finite number")
        low, high = self.ends
        if low > high or (low == high and not self._closed):
            raise HelmscopeError(f"region is {region_text(self)}, but its bounds must be finite and in order")

    @property
    def _label(self) -> str:
        return f"region '{self.text}'" if self.text else "the region"

    @property
    def comment(self) -> str:
        """What ``text`` adds to the bounds; empty if it only repeats them.

        >>> Region(text="At least 0.5.", low=0.5).comment, Region(text="A majority.", low=0.5).comment
        ('', 'A majority.')
        """
        return "" if self.text.rstrip(".").lower() == region_text(self) else self.text

    @property
    def _closed(self) -> bool:
        return self.above is None and self.below is None

    @property
    def bounded(self) -> bool:
        """Whether there is a bound on at least one side.

        >>> Region(text="descriptive").bounded
        False
        """
        return any(bound is not None for bound in (self.low, self.high, self.above, self.below))

    @property
    def ends(self) -> tuple[float, float]:
        """The lower and the upper bound as numbers, whether they belong to the region or not; a missing one is
        infinite.

        >>> Region(text="at most half", high=0.5).ends
        (-inf, 0.5)
        """
        low = self.low if self.above is None else self.above
        high = self.high if self.below is None else self.below
        return -math.inf if low is None else low, math.inf if high is None else high

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds by name, without the missing ones.

        >>> Region(text="a growth", above=0.0).bounds
        {'above': 0.0}
        """
        named = {"low": self.low, "high": self.high, "above": self.above, "below": self.below}
        return {name: bound for name, bound in named.items() if bound is not None}

    def contains(self, interval: Interval) -> bool:
        """Whether the whole interval is inside. An interval of width 0 on a bound is not, even if the bound belongs to
        the region: something that cannot vary is no evidence.

        >>> Region(text="above 0", above=0.0).contains(Interval(0.0, 0.0, 0.0, n=32))
        False
        """
        low, high = self.ends
        if interval.low == interval.high and interval.low in (low, high):
            return False
        left = interval.low > low if self.above is not None else interval.low >= low
        right = interval.high < high if self.below is not None else interval.high <= high
        return left and right

    def excludes(self, interval: Interval) -> bool:
        """Whether the interval is outside and does not touch the region's bounds.

        >>> Region(text="above 0", above=0.0).excludes(Interval(-1.0, -2.0, 0.0, n=32))
        False
        """
        low, high = self.ends
        return interval.high < low or high < interval.low


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
    >>> region_text(Region(text="", above=0.0)), region_text(Region(text="", above=0.0, high=1.0))
    ('above 0', 'above 0 and at most 1')
    >>> region_text(Region(text="described"))
    'no bounds'
    """
    words = {"low": "at least", "above": "above", "high": "at most", "below": "below"}
    bounds = region.bounds
    if set(bounds) == {"low", "high"}:
        return f"{bounds['low']:.12g} to {bounds['high']:.12g}"
    parts = [f"{word} {bounds[name]:.12g}" for name, word in words.items() if name in bounds]
    return " and ".join(parts) or "no bounds"
