"""Quantiles of replicates, for quantities whose mean says nothing, such as condition numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from helmscope.stats.intervals import tail
from helmscope.stats.replicates import numbers
from helmscope.types import HelmscopeError, Interval, check_real

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def quantile_interval(values: ArrayLike, level: float, *, confidence: float = 0.95) -> Interval:
    """The quantile ``level`` of the law of the replicates, with the interval between two of their order statistics:

        [x_(r), x_(s)],    r and s - 1 the quantiles (1 -+ confidence) / 2 of the law Binomial(n, level),

    which holds for every law, since the number of replicates below the quantile is binomial (David & Nagaraja, Order
    Statistics, 2003, section 7.1). The estimate is the smallest replicate with at least this level at or below it.
    Values may be infinite; with few replicates an end is infinite too. Raises ``HelmscopeError`` for a level that is
    not between 0 and 1, for NaN and for no values.

    >>> quantile_interval([3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 7.0], 0.5)
    Interval(estimate=4.0, low=1.0, high=7.0, n=7)
    """
    level = check_real("level", level, above=0)
    if level >= 1:
        raise HelmscopeError(f"level is {level:g}, but it must be above 0 and below 1")
    x = np.sort(numbers("values", values).ravel())
    if not x.size or bool(np.isnan(x).any()):
        raise HelmscopeError(f"values is {'empty' if not x.size else 'NaN in part'}, but quantiles need numbers")
    below = special.bdtr(np.arange(x.size + 1), x.size, level)  # P(at most k of them are below the quantile)
    first, last = (int((below >= level).argmax()) for level in (tail(confidence), 1 - tail(confidence)))
    last += 1
    low = -math.inf if first < 1 else float(x[first - 1])
    high = math.inf if last > x.size else float(x[last - 1])
    return Interval(float(np.quantile(x, level, method="inverted_cdf")), low, high, x.size)
