"""Scales on which replicates are averaged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]


class Scale:
    """A strictly increasing map y = forward(x) on which replicates are averaged, with its open domain. ``forward``
    takes the ends of the domain, and what lies beyond them, to -inf and inf; ``back`` is the inverse for one number,
    and ``back_all`` for an array, which NumPy may round to another last bit. ``slope`` is the derivative dx/dy at x,
    which turns a small error on the scale into one of x. ``Bounded`` alone has a closed domain, and maps nothing.
    """

    domain: tuple[float, float] = (-math.inf, math.inf)

    def excludes(self, x: Numbers) -> NDArray[np.bool_]:
        """Which numbers are infinite or outside the domain; NaN is neither.

        >>> LogScale().excludes(np.array([1.0, 0.0, np.inf, np.nan])).tolist()
        [False, True, True, False]
        """
        low, high = self.domain
        return (x <= low) | (x >= high) | np.isinf(x)

    @property
    def domain_text(self) -> str:
        """The domain as a mathematician writes it."""
        return "({:g}, {:g})".format(*self.domain)

    def forward(self, x: Numbers) -> Numbers:
        return x

    def back(self, y: float) -> float:
        return y

    def back_all(self, y: Numbers) -> Numbers:
        return y

    def slope(self, x: Numbers) -> Numbers:
        return np.ones_like(x)

    def cut(self, end: Numbers) -> Numbers:
        """The end of an interval, no farther out than the quantity can be."""
        return end


class LinearScale(Scale):
    """The numbers as they are.

    >>> LinearScale().back(2.0)
    2.0
    """


class LogScale(Scale):
    """log x, for positive quantities; the mean on it is the log of the geometric mean.

    >>> LogScale().back(LogScale().forward(np.array([1.0, 10.0, 100.0])).mean())
    10.0...
    """

    domain = (0.0, math.inf)

    def forward(self, x: Numbers) -> Numbers:
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(x, 0.0))

    def back(self, y: float) -> float:
        return math.exp(y) if y < 709 else math.inf

    def back_all(self, y: Numbers) -> Numbers:
        with np.errstate(over="ignore"):
            return np.exp(y)

    def slope(self, x: Numbers) -> Numbers:
        return x


class FisherZScale(Scale):
    """artanh c, for cosines and correlations, |c| < 1.

    >>> round(FisherZScale().back(FisherZScale().forward(np.array([0.0, 0.8])).mean()), 12)
    0.5
    """

    domain = (-1.0, 1.0)

    def forward(self, x: Numbers) -> Numbers:
        with np.errstate(divide="ignore"):
            return np.arctanh(np.clip(x, -1.0, 1.0))

    def back(self, y: float) -> float:
        return math.tanh(y)

    def back_all(self, y: Numbers) -> Numbers:
        return np.tanh(y)

    def slope(self, x: Numbers) -> Numbers:
        return 1.0 - x * x


ROUNDING = 1e-3  # a share may be off by its rounding, an order by the norms of its tokens; a larger excess is a mistake


@dataclass(frozen=True)
class Bounded(Scale):
    """The numbers as they are, with intervals cut to a closed ``domain`` in which the quantity lies by definition, such
    as [0, 1] for a share.

    Cutting is exact: the true mean lies in the domain, so the shorter interval covers it exactly when the whole one
    does, and the mean and its standard error are those of the plain scale. A logit would instead refuse the shares 0
    and 1, and average something other than shares; Wilson's interval is for counts of independent trials, and the
    pairs of tokens behind one share are not independent.

    >>> from helmscope.stats.intervals import mean_interval
    >>> mean_interval([0.0, 0.1, 0.9], scale=Bounded((0.0, 1.0)))
    Interval(estimate=0.333..., low=0.0, high=1.0, n=3)
    """

    domain: tuple[float, float]

    def __post_init__(self) -> None:
        low, high = self.domain
        if not low < high:
            raise HelmscopeError(f"domain is {self.domain}, but its lower end must be below its upper end")

    def excludes(self, x: Numbers) -> NDArray[np.bool_]:
        low, high = (end + sign * ROUNDING * max(1.0, abs(end)) for sign, end in zip((-1, 1), self.domain, strict=True))
        return (x < low) | (x > high) | np.isinf(x)

    @property
    def domain_text(self) -> str:
        return "[{:g}, {:g}]".format(*self.domain)

    def cut(self, end: Numbers) -> Numbers:
        return np.clip(end, *self.domain)


PLAIN = LinearScale()
