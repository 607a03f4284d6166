"""Scales on which replicates are averaged."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]


class Scale:
    """A strictly increasing map y = forward(x) on which replicates are averaged, with its open domain. ``forward``
    takes the ends of the domain, and what lies beyond them, to -inf and inf; ``back`` is the inverse for one number,
    and ``back_all`` for an array, which NumPy may round to another last bit. ``slope`` is the derivative dx/dy at x,
    which turns a small error on the scale into one of x.
    """

    domain = (-math.inf, math.inf)

    def forward(self, x: Numbers) -> Numbers:
        return x

    def back(self, y: float) -> float:
        return y

    def back_all(self, y: Numbers) -> Numbers:
        return y

    def slope(self, x: Numbers) -> Numbers:
        return np.ones_like(x)


class Plain(Scale):
    """The numbers as they are.

    >>> Plain().back(2.0)
    2.0
    """


class Log(Scale):
    """log x, for positive quantities; the mean on it is the log of the geometric mean.

    >>> Log().back(Log().forward(np.array([1.0, 10.0, 100.0])).mean())
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


class FisherZ(Scale):
    """artanh c, for cosines and correlations, |c| < 1.

    >>> round(FisherZ().back(FisherZ().forward(np.array([0.0, 0.8])).mean()), 12)
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


PLAIN = Plain()
