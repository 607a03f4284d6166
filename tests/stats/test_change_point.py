"""Held-out errors of a change-point and a trend against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from helmscope.stats.change_point import change_point_errors
from helmscope.types import HelmscopeError


@pytest.mark.parametrize("n", [4, 7, 12])
def test_errors_agree_with_loops(n):
    draw = np.random.default_rng(n)
    x, y = np.cumsum(draw.uniform(0.5, 2.0, n)), draw.normal(size=n)
    trend, step = change_point_errors(x, y)
    for k in range(n):
        rows = [i for i in range(n) if i != k]
        slope, level = np.polyfit(x[rows], y[rows], 1)
        assert trend[k] == pytest.approx((slope * x[k] + level - y[k]) ** 2, rel=1e-8, abs=1e-12)
        best = None
        for cut in range(1, n - 1):
            sides = [y[rows[:cut]], y[rows[cut:]]]
            error = sum(((side - side.mean()) ** 2).sum() for side in sides)
            if best is None or error < best[0]:
                nearest = min(rows, key=lambda i: abs(x[i] - x[k]))
                best = error, sides[0].mean() if nearest in rows[:cut] else sides[1].mean()
        assert step[k] == pytest.approx((best[1] - y[k]) ** 2, rel=1e-12)


def test_each_wins_where_it_is_true():
    x = np.arange(12.0)
    trend, step = change_point_errors(x, 3 * x)
    assert trend.sum() < 1e-20 < step.sum()
    trend, step = change_point_errors(x, np.where(x < 5, 2.0, -1.0))
    assert step.sum() == pytest.approx(2 * 1.5**2)  # only at the two points beside the change
    assert trend.sum() > 2 * step.sum()


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [([1, 2, 3], [1, 2, 3], "four or more"), ([1, 2, 2, 3], [1, 2, 3, 4], "increasing"), ([1, 2], [1], "the same")],
)
def test_wrong_points_are_refused(x, y, message):
    with pytest.raises(HelmscopeError, match=message):
        change_point_errors(x, y)
