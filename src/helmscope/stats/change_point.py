"""A change-point against a linear trend, by their errors at points that were left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.stats.replicates import numbers
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Numbers = NDArray[np.float64]

MIN_POINTS = 4  # so that without one of them a line and a step are both determined


def change_point_errors(x: ArrayLike, y: ArrayLike) -> tuple[Numbers, Numbers]:
    """Squared errors at each point, predicted from all others: by the line of least squares, and by two constants, the
    means of y on either side of a change-point, which is placed between two neighboring x by least squares.

    The point that is left out belongs to the side that has the nearest other point; if both sides are equally near,
    the prediction is the mean of the two constants. Raises HelmscopeError for
    fewer than four points, or for x that are not in increasing order.

    >>> trend, step = change_point_errors(range(8), [1, 1, 1, 1, 0, 0, 0, 0])
    >>> round(float(trend.sum()), 3), step.round(12).tolist()
    (0.735, [0.0, 0.0, 0.0, 0.25, 0.25, 0.0, 0.0, 0.0])
    """
    x, y = numbers("x", x), numbers("y", y)
    if x.ndim != 1 or x.shape != y.shape or len(x) < MIN_POINTS:
        raise HelmscopeError(f"x and y have {x.shape} and {y.shape} points, but both must have the same, four or more")
    if not (np.diff(x) > 0).all():
        raise HelmscopeError("x is not in increasing order, but it must be")
    found = []
    for k in range(len(x)):
        others = np.delete(x, k), np.delete(y, k)
        found.append([(_line(*others, x[k]) - y[k]) ** 2, (_step(*others, x[k]) - y[k]) ** 2])
    trend, step = np.array(found).T
    return trend, step


def _line(x: Numbers, y: Numbers, at: float) -> float:
    about = x - x.mean()
    return float(y.mean() + (about * (y - y.mean())).sum() / (about**2).sum() * (at - x.mean()))


def _step(x: Numbers, y: Numbers, at: float) -> float:
    """The mean of y on the side of the change-point to which ``at`` belongs."""
    sides = range(1, len(x))
    errors = [((y[:k] - y[:k].mean()) ** 2).sum() + ((y[k:] - y[k:].mean()) ** 2).sum() for k in sides]
    k = sides[int(np.argmin(errors))]
    near = abs(at - x[:k]).min(), abs(at - x[k:]).min()
    first, second = float(y[:k].mean()), float(y[k:].mean())
    return (first + second) / 2 if near[0] == near[1] else first if near[0] < near[1] else second
