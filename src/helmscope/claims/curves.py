"""Builds the Measurements that ``plots.trial`` plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.types import HelmscopeError, check_replicates

if TYPE_CHECKING:
    import xarray as xr


def curve(
    name: str,
    values: Any,
    axes: Mapping[str, Sequence[Any]],
    *,
    label: str,
    log: bool = False,
    over: str = "system",
) -> xr.Dataset:
    """A Measurement with one variable, ``name``, from values of shape (replicate, *axes).

    ``over`` names the replicate axis: system, prompt, seed or group. Plots show the mean with its confidence interval
    or, with ``log`` (for values >= 0 over several decades), the median with the range. The first of ``axes`` is the
    horizontal axis, a second one a family of curves; ``label`` describes the values.

    Merge several with ``xarray.merge(..., join="outer")``; if their numbers of replicates differ, the missing ones
    become NaN and are ignored. Values of another shape, or fewer than two replicates, raise HelmscopeError.

    >>> measurement = curve("energy", [[1.0, 2.0], [3.0, 4.0]], {"time": [0.0, 1.0]}, label="energy E")
    >>> measurement.energy.dims, measurement.energy.values.tolist()
    (('system', 'time'), [[1.0, 2.0], [3.0, 4.0]])
    """
    import xarray as xr

    array = np.asarray(values, dtype=np.float64)
    shape = tuple(len(axis) for axis in axes.values())
    if array.ndim != 1 + len(shape) or array.shape[1:] != shape or len(array) < 2:
        raise HelmscopeError(
            f"{name} has shape {array.shape}, but it must be (replicates, {', '.join(map(str, shape))}) with two or "
            "more replicates"
        )
    attrs = {"long_name": label, "scale": "log", "summary": "range"} if log else {"long_name": label, "scale": "linear"}
    coords = {over: np.arange(len(array)), **{axis: list(ticks) for axis, ticks in axes.items()}}
    return check_replicates(xr.Dataset({name: ((over, *axes), array, attrs)}, coords), over)
