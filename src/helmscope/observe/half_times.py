"""When half of the pairs have met."""

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
    """t_half, the first time at which the probability reaches 1/2, for each beta (and each further axis).

    Linear between the times of the diagram, which is a guess: ``half_time_low`` is the last time before the upper edge
    of the band about P reaches 1/2, ``_high`` the first at which the lower edge has, so that the interval is never
    narrower than the grid. The band is ``probability_low`` to ``_high``, or where there are none, as in a phase
    diagram, two standard errors. The diagram is a reduced one, because its time belongs to the probability over all
    samples; one with replicates is reduced first.

    A row that does not reach 1/2, or is past it at its first time > 0, is ``censored``: half_time is NaN and the
    interval is what is known, up to infinity or down to 0. ``relative_error`` = t_half / t* - 1, with its interval, NaN
    where there is no ``curve``.

    >>> made = {"probability": (("beta", "time"), [[0.0, 1.0]]), "probability_stderr": (("beta", "time"), [[0.0, 0.1]])}
    >>> made = xr.Dataset(made, {"beta": [1.0], "time": [0.0, 8.0], "curve": ("beta", [5.0])}, {"n": 9})
    >>> found = half_time(made)
    >>> float(found.half_time[0]), float(found.half_time_high[0]), round(float(found.relative_error[0]), 9)
    (4.0, 8.0, -0.2)
    """
    diagram = reduced(diagram)
    if "probability" not in diagram or "time" not in diagram.probability.dims:
        raise HelmscopeError("diagram has no 'probability' over time, but it must be one that phase_diagram() gives")
    clock = diagram.time.values.astype(np.float64)

    def reaches(curve: xr.DataArray, which: int) -> xr.DataArray:
        found: xr.DataArray = xr.apply_ufunc(
            lambda p: _crossing(clock, p)[which],
            curve,
            input_core_dims=[["time"]],
            vectorize=True,
            output_dtypes=[float],
        )
        return found

    lower, upper = band(diagram, "probability")
    low, middle, high = (reaches(edge, k) for k, edge in enumerate((upper, diagram.probability, lower)))
    unknown = upper.isnull().any("time")  # nothing was carried, or one sample alone
    began = middle <= clock[0] if clock[0] > 0 else middle < 0
    censored = began | ~np.isfinite(middle)
    low = low.where(np.isfinite(low), clock[-1])
    data = {"half_time": middle.where(~censored), "half_time_low": low.where(~unknown)}
    data["half_time_high"] = high.where(~unknown)
    if "curve" in diagram.coords:
        relative = {
            name.replace("half_time", "relative_error"): each / diagram.curve - 1 for name, each in data.items()
        }
        data |= relative
    found = xr.Dataset(data, attrs={key: diagram.attrs[key] for key in ("n", "delta", "flow") if key in diagram.attrs})
    return check_reduced(found.assign_coords(censored=censored))


def _crossing(clock: Float[np.ndarray, " time"], p: Float[np.ndarray, " time"]) -> tuple[float, float, float]:
    """The time before p reaches 1/2, when it does, linearly, and the time by which it has; inf where it does not."""
    above = np.flatnonzero(p >= 0.5)
    if not len(above):
        return math.inf, math.inf, math.inf
    k = int(above[0])
    after = float(clock[k])
    if k == 0:
        return 0.0, after, after
    before = float(clock[k - 1])
    return before, before + (after - before) * float((0.5 - p[k - 1]) / (p[k] - p[k - 1])), after
