"""Times for the simulation of a bridge whose control grows like 1/(horizon - t)."""

from __future__ import annotations

LAST = 1e-3  # the share of the horizon after which the end point is sampled
RATIO = 0.1  # the longest step as a share of the time left
STEP = 0.02  # the longest step as a share of the horizon


def graded_times(horizon: float, until: float) -> list[float]:
    """Times below ``until`` whose gaps are at most STEP of the horizon and RATIO of the time left, the last at
    (1 - LAST) horizon at most.

    >>> len(graded_times(1.0, 1.0)), graded_times(1.0, 0.05)
    (91, [0.02, 0.04])
    """
    times: list[float] = []
    now = 0.0
    while True:
        now += min(STEP * horizon, RATIO * (horizon - now))
        if now >= until:
            return times
        if horizon - now <= LAST * horizon:
            return [*times, horizon * (1 - LAST)]
        times.append(now)
