"""The curve t*(beta) on a grid that is fine enough to plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from helmscope.fields.attention import SA, USA
from helmscope.theory.equiangular import EquiangularFlow, hitting_time
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from helmscope.fields.field import Field

POINTS = 201


def hitting_curve(field: Callable[[float], Field], *, betas: Sequence[float], n: int, delta: float) -> xr.Dataset:
    """Hitting time t*(beta) of n orthogonal tokens on a fine grid from the smallest to the largest of ``betas``.

    Returns the coordinates ``fine_hitting_time`` over ``fine_beta``, for ``diagram.assign_coords``: the time at which
    inner products reach 1 - delta. The grid includes ``betas``; values are NaN where the flow has no closed form or the
    time overflows float64.

    >>> from helmscope.fields.attention import SA
    >>> curve = hitting_curve(SA, betas=[1, 9], n=32, delta=1e-3)
    >>> len(curve.fine_beta) > 200, bool((curve.fine_hitting_time.diff("fine_beta") > 0).all())
    (True, True)
    """
    fine = np.unique(np.concatenate([np.linspace(min(betas), max(betas), POINTS), np.asarray(betas, dtype=float)]))
    times = [_hitting_time(field(float(beta)), n, delta) for beta in fine]
    return xr.Dataset(coords={"fine_beta": fine, "fine_hitting_time": ("fine_beta", times)})


def closed_form_curve(diagram: xr.Dataset) -> xr.Dataset | None:
    """``hitting_curve`` of a phase diagram, from its attributes ``tokens`` and ``delta``; None if it is unknown.

    The coordinate ``hitting_time`` of the diagram, t* at its own betas, decides between the closed forms of SA and USA.
    It is unknown if neither reproduces ``hitting_time``, as for a field whose inverse temperature is not the diagram's
    beta.

    >>> times = [hitting_time(SA(beta), n=32, delta=1e-3) for beta in (1.0, 4.0)]
    >>> coords = {"beta": [1.0, 4.0], "hitting_time": ("beta", times)}
    >>> curve = closed_form_curve(xr.Dataset(coords=coords, attrs={"tokens": 32, "delta": 1e-3}))
    >>> bool(curve.fine_hitting_time.sel(fine_beta=4.0) == times[1])
    True
    """
    if not {"tokens", "delta"} <= set(diagram.attrs) or not np.isfinite(diagram.hitting_time.values).any():
        return None
    n, delta, betas = int(diagram.attrs["tokens"]), float(diagram.attrs["delta"]), diagram.beta.values.tolist()
    for field in (SA, USA):
        times = [_hitting_time(field(beta), n, delta) for beta in betas]
        if np.allclose(times, diagram.hitting_time.values, rtol=1e-9, atol=0.0, equal_nan=True):
            return hitting_curve(field, betas=betas, n=n, delta=delta)
    return None


def _hitting_time(flow: Field, n: int, delta: float) -> float:
    if not isinstance(flow, EquiangularFlow) or not flow.isotropic:
        return math.nan
    try:
        return hitting_time(flow, n=n, delta=delta)
    except HelmscopeError:
        return math.nan
