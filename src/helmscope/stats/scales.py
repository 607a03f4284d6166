"""Scales on which replicates are averaged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from helmscope.types import HelmscopeError
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]


class Scale:
    """Base class of scales: a strictly increasing map y = forward(x), with an open domain, on which replicates are
    averaged.

    ``forward`` maps the endpoints of the domain, and values beyond them, to -inf and inf; ``inverse`` is the inverse
    for one number, and ``inverse_array`` for an array, where NumPy may round differently. ``slope`` is the derivative
    dx/dy at x, which converts a small error on the scale to one of x. Only ``BoundedScale`` has a closed domain; its
    map is the identity.

    >>> isinstance(LogScale(), Scale), LogScale().domain
    (True, (0.0, inf))
    """

    domain: tuple[float, float] = (-math.inf, math.inf)

    def excludes(self, x: Numbers) -> NDArray[np.bool_]:
        """A mask of the numbers that are infinite or outside the domain; False for NaN.

        >>> LogScale().excludes(np.array([1.0, 0.0, np.inf, np.nan])).tolist()
        [False, True, True, False]
        """
        low, high = self.domain
        return (x <= low) | (x >= high) | np.isinf(x)

    @property
    def domain_text(self) -> str:
        """The domain in interval notation.

        >>> FisherZScale().domain_text
        '(-1, 1)'
        """
        return "({:g}, {:g})".format(*self.domain)

    def forward(self, x: Numbers) -> Numbers:
        """The values on this scale.

        >>> LogScale().forward(np.array([1.0, 0.0])).tolist()
        [0.0, -inf]
        """
        return x

    def inverse(self, y: float) -> float:
        """The number whose value on this scale is ``y``.

        >>> LogScale().inverse(0.0)
        1.0
        """
        return y

    def inverse_array(self, y: Numbers) -> Numbers:
        """``inverse`` of every entry.

        >>> LogScale().inverse_array(np.array([0.0, -np.inf])).tolist()
        [1.0, 0.0]
        """
        return y

    def slope(self, x: Numbers) -> Numbers:
        """The derivative dx/dy at x.

        >>> FisherZScale().slope(np.array([0.0, 0.5])).tolist()
        [1.0, 0.75]
        """
        return np.ones_like(x)

    def clip(self, end: Numbers) -> Numbers:
        """An endpoint of an interval, clipped to the possible values of the quantity.

        >>> BoundedScale((0.0, 1.0)).clip(np.array([-0.2, 0.5])).tolist()
        [0.0, 0.5]
        """
        return end


class LinearScale(Scale):
    """The identity: replicates are averaged as they are.

    >>> LinearScale().inverse(2.0)
    2.0
    """


class LogScale(Scale):
    """Logarithmic scale log x, for positive quantities; the mean on it is the log of the geometric mean.

    >>> LogScale().inverse(LogScale().forward(np.array([1.0, 10.0, 100.0])).mean())
    10.0...
    """

    domain = (0.0, math.inf)

    def forward(self, x: Numbers) -> Numbers:
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(x, 0.0))

    def inverse(self, y: float) -> float:
        return math.exp(y) if y < 709 else math.inf

    def inverse_array(self, y: Numbers) -> Numbers:
        with np.errstate(over="ignore"):
            return np.exp(y)

    def slope(self, x: Numbers) -> Numbers:
        return x


class FisherZScale(Scale):
    """Fisher's scale artanh c, for cosines and correlations, |c| < 1.

    >>> round(FisherZScale().inverse(FisherZScale().forward(np.array([0.0, 0.8])).mean()), 12)
    0.5
    """

    domain = (-1.0, 1.0)

    def forward(self, x: Numbers) -> Numbers:
        with np.errstate(divide="ignore"):
            return np.arctanh(np.clip(x, -1.0, 1.0))

    def inverse(self, y: float) -> float:
        return math.tanh(y)

    def inverse_array(self, y: Numbers) -> Numbers:
        return np.tanh(y)

    def slope(self, x: Numbers) -> Numbers:
        return 1.0 - x * x


class RemainderScale(Scale):
    """Scale of the unexplained rest, -log(1 - x), for explained shares such as a held-out R^2, which are at most 1 and
    have no lower bound: the mean on it is that of the logs of what is left unexplained.

    Bad predictions make R^2 very negative, and an interval on the linear scale misses its expectation in a third of
    cases (context_noise with 16 contexts). A remainder 1 - x below the rounding of 1 counts as that rounding.

    >>> round(RemainderScale().inverse(RemainderScale().forward(np.array([0.0, 0.75])).mean()), 12)
    0.5
    """

    domain = (-math.inf, 1.0)
    least = 2.0**-52

    def excludes(self, x: Numbers) -> NDArray[np.bool_]:
        return (x > 1.0) | np.isinf(x)

    @property
    def domain_text(self) -> str:
        return "(-inf, 1]"

    def forward(self, x: Numbers) -> Numbers:
        return -np.log(np.maximum(1.0 - x, self.least))

    def inverse(self, y: float) -> float:
        return -math.expm1(-y) if y > -709 else -math.inf

    def inverse_array(self, y: Numbers) -> Numbers:
        with np.errstate(over="ignore"):
            return -np.expm1(-y)

    def slope(self, x: Numbers) -> Numbers:
        return 1.0 - x


ROUNDING = 1e-3  # tolerated excess, from the rounding of a share or of token norms; a larger one is a mistake


@dataclass(frozen=True)
class BoundedScale(Scale, ConciseRepr):
    """The identity, with intervals clipped to the closed ``domain`` of a quantity that is bounded by definition, such
    as [0, 1] for a share.

    Clipping does not change the coverage: the true mean is in the domain, so the clipped interval covers it if and only
    if the unclipped one does; the mean and its standard error are those of the linear scale. A logit, in contrast, is
    undefined for the shares 0 and 1, and averages something other than shares; Wilson's interval is for counts of
    independent trials, and the pairs of tokens that make up a share are not independent. Raises ``HelmscopeError``
    unless the lower bound is below the upper one.

    >>> from helmscope.stats.intervals import mean_interval
    >>> mean_interval([0.0, 0.1, 0.9], scale=BoundedScale((0.0, 1.0)))
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

    def clip(self, end: Numbers) -> Numbers:
        return np.clip(end, *self.domain)


PLAIN = LinearScale()
