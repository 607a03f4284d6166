"""The time at which half of the pairs have met."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from helmscope.stats.reduce import band, reduced
from helmscope.types import HelmscopeError, check_reduced

if TYPE_CHECKING:
    from jaxtyping import Float


def half_time(diagram: xr.Dataset) -> xr.Dataset:
    """Half time t_half, the first time at which the probability reaches 1/2, for each beta (and each further axis).

    ``half_time`` interpolates linearly between the times of the diagram. ``half_time_low`` is the last time before the
    upper edge of the band around P reaches 1/2, ``half_time_high`` the first time at which the lower edge has reached
    it, so that the interval is never narrower than the time grid. The band is ``probability_low`` to
    ``probability_high``, or two standard errors where these are missing, as in a phase diagram. A diagram with
    replicates is reduced first, because the half time is defined by the probability over all samples.

    A row that does not reach 1/2, or has already reached it at its first time > 0, is ``censored``: half_time is NaN
    and the interval extends to infinity or down to 0. With the coordinate ``hitting_time`` of t*(beta), the result also
    has ``relative_error`` = t_half / t* - 1 with its interval. Raises HelmscopeError if ``diagram`` has no
    ``probability`` over ``time``.

    >>> data = {"probability": (("beta", "time"), [[0.0, 1.0]]), "probability_stderr": (("beta", "time"), [[0.0, 0.1]])}
    >>> diagram = xr.Dataset(data, {"beta": [1.0], "time": [0.0, 8.0], "hitting_time": ("beta", [5.0])}, {"n": 9})
    >>> half = half_time(diagram)
    >>> float(half.half_time[0]), float(half.half_time_high[0]), round(float(half.relative_error[0]), 9)
    (4.0, 8.0, -0.2)
    """
    diagram = reduced(diagram)
    if "probability" not in diagram or "time" not in diagram.probability.dims:
        raise HelmscopeError("diagram has no 'probability' over time, but it must be a result of phase_diagram()")
    clock = diagram.time.values.astype(np.float64)

    def crossing_time(curve: xr.DataArray, which: int) -> xr.DataArray:
        times: xr.DataArray = xr.apply_ufunc(
            lambda p: _crossing(clock, p)[which],
            curve,
            input_core_dims=[["time"]],
            vectorize=True,
            output_dtypes=[float],
        )
        return times

    lower, upper = band(diagram, "probability")
    low, middle, high = (crossing_time(edge, k) for k, edge in enumerate((upper, diagram.probability, lower)))
    unknown = upper.isnull().any("time")  # at most one sample was integrated: no band
    left_censored = middle <= clock[0] if clock[0] > 0 else middle < 0
    censored = left_censored | ~np.isfinite(middle)
    low = low.where(np.isfinite(low), clock[-1])
    data = {"half_time": middle.where(~censored), "half_time_low": low.where(~unknown)}
    data["half_time_high"] = high.where(~unknown)
    if "hitting_time" in diagram.coords:
        data |= {
            name.replace("half_time", "relative_error"): time / diagram.hitting_time - 1 for name, time in data.items()
        }
    attributes = {key: diagram.attrs[key] for key in ("n", "replicate", "delta", "flow") if key in diagram.attrs}
    return check_reduced(xr.Dataset(data, attrs=attributes).assign_coords(censored=censored))


def _crossing(clock: Float[np.ndarray, " time"], p: Float[np.ndarray, " time"]) -> tuple[float, float, float]:
    """The last grid time before p reaches 1/2, the interpolated time of crossing, and the first grid time after it; inf
    where p stays below 1/2.
    """
    above = np.flatnonzero(p >= 0.5)
    if not len(above):
        return math.inf, math.inf, math.inf
    k = int(above[0])
    after = float(clock[k])
    if k == 0:
        return 0.0, after, after
    before = float(clock[k - 1])
    return before, before + (after - before) * float((0.5 - p[k - 1]) / (p[k] - p[k - 1])), after
