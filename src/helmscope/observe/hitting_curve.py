"""The curve t*(beta) on a grid that is fine enough to plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from helmscope.theory.equiangular import EquiangularFlow, hitting_time
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from helmscope.fields.field import Field

POINTS = 201


def hitting_curve(field: Callable[[float], Field], *, betas: Sequence[float], n: int, delta: float) -> xr.Dataset:
    """Hitting time t*(beta) of n orthogonal tokens on a fine grid from the smallest to the largest of ``betas``.

    Returns the coordinates ``fine_curve`` over ``fine_beta``, for ``diagram.assign_coords``: the time at which inner
    products reach 1 - delta. The grid includes ``betas``; values are NaN where the flow has no closed form or the time
    overflows float64.

    >>> from helmscope.fields.attention import SA
    >>> curve = hitting_curve(SA, betas=[1, 9], n=32, delta=1e-3)
    >>> len(curve.fine_beta) > 200, bool((curve.fine_curve.diff("fine_beta") > 0).all())
    (True, True)
    """
    fine = np.unique(np.concatenate([np.linspace(min(betas), max(betas), POINTS), np.asarray(betas, dtype=float)]))
    times = [_hitting_time(field(float(beta)), n, delta) for beta in fine]
    return xr.Dataset(coords={"fine_beta": fine, "fine_curve": ("fine_beta", times)})


def _hitting_time(flow: Field, n: int, delta: float) -> float:
    if not isinstance(flow, EquiangularFlow) or not flow.isotropic:
        return math.nan
    try:
        return hitting_time(flow, n=n, delta=delta)
    except HelmscopeError:
        return math.nan
