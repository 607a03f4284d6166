"""Brackets of the minima of convex functions, one function per row, from their slopes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Rows = NDArray[np.float64]


class Bracket:
    """Two points per row between which a convex function is minimal: its slope is < 0 at ``low``, >= 0 at ``high``.

    ``slope`` returns derivatives from the right at multiples of ``step``. The search begins at ``guess`` +- ``radius``.
    With ``step`` = 1 all kinks are at whole numbers, and the minimum is found exactly.

    >>> bracket = Bracket(lambda t: 2 * t - 0.6, np.zeros(1), 1.0, step=1e-9)
    >>> bracket.shrink(np.full(1, 1e-12))
    >>> abs(bracket.best - 0.3) < 1e-6
    array([ True])
    """

    def __init__(self, slope: Callable[[Rows], Rows], guess: Rows, radius: float, *, step: float) -> None:
        self.slope, self.step = slope, step
        guess, radius = np.round(guess / step) * step, max(round(radius / step), 1) * step
        self.low, self.high = guess - radius, guess + radius
        self.low_slope, self.high_slope = slope(self.low), slope(self.high)
        while (wrong := self.low_slope >= 0).any():
            radius *= 2
            self.low = np.where(wrong, self.low - radius, self.low)
            self.low_slope = slope(self.low)
        while (wrong := self.high_slope < 0).any():
            radius *= 2
            self.high = np.where(wrong, self.high + radius, self.high)
            self.high_slope = slope(self.high)

    @property
    def width(self) -> Rows:
        """The distance of both ends."""
        return self.high - self.low

    @property
    def best(self) -> Rows:
        """The end with the smaller slope; of whole numbers the upper one, the first with a slope >= 0."""
        if self.step == 1:
            return self.high
        return np.where(-self.low_slope < self.high_slope, self.low, self.high)

    @property
    def error(self) -> Rows:
        """A bound of the value at ``best`` minus the minimum: the slope times the width; 0 or inf for whole numbers."""
        if self.step == 1:
            return np.where((self.width > 1) & (self.high_slope > 0), np.inf, 0.0)
        return np.minimum(-self.low_slope, self.high_slope) * self.width

    def shrink(self, tol: Rows) -> None:
        """Narrow every bracket until its error is at most the tolerance, or its ends are adjacent.

        Secants are fast where the function is smooth on the scale of the bracket. If one moves the same end as the step
        before, the slope of the other end counts half (the Illinois rule); three steps that do not halve a bracket are
        followed by a bisection.
        """
        low_weight, high_weight = self.low_slope.copy(), self.high_slope.copy()
        moved_low, moved_high = (np.zeros(len(self.low), dtype=bool) for _ in range(2))
        slow = np.zeros(len(self.low), dtype=np.int64)
        step = self.step
        while (active := (self.error > tol) & (self.width > step)).any():
            width = self.width
            share = np.where(slow > 2, 0.5, -low_weight / (high_weight - low_weight))
            middle = self.low + np.round(share * width / step) * step
            middle = np.where(active, np.clip(middle, self.low + step, self.high - step), self.high)
            slope = self.slope(middle)
            below, above = active & (slope < 0), active & (slope >= 0)
            self.low, self.high = np.where(below, middle, self.low), np.where(above, middle, self.high)
            self.low_slope = np.where(below, slope, self.low_slope)
            self.high_slope = np.where(above, slope, self.high_slope)
            low_weight = np.where(below, slope, np.where(above & moved_high, low_weight / 2, low_weight))
            high_weight = np.where(above, slope, np.where(below & moved_low, high_weight / 2, high_weight))
            moved_low, moved_high = below, above
            slow = np.where(self.width > width / 2, np.where(slow > 2, 0, slow + 1), 0)
