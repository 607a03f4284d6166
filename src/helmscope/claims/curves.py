"""Replicates as Measurements that ``plots.trial`` can draw."""

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
    """The Measurement NAME of values (replicate, *axes), with its replicates along the axis ``over``: system, prompt,
    seed or group. It is drawn with the mean and its interval, or with ``log``, for numbers >= 0 over several decades,
    with the median and the range.

    The first of ``axes`` is drawn along the picture, a second one as a family of curves. ``label`` says what is drawn.
    Join several with ``xarray.merge(..., join="outer")``; where they have different numbers of replicates, those that
    are missing are NaN and are left out.

    >>> seen = curve("energy", [[1.0, 2.0], [3.0, 4.0]], {"time": [0.0, 1.0]}, label="energy E")
    >>> seen.energy.dims, seen.energy.values.tolist()
    (('system', 'time'), [[1.0, 2.0], [3.0, 4.0]])
    """
    import xarray as xr

    numbers = np.asarray(values, dtype=np.float64)
    shape = tuple(len(axis) for axis in axes.values())
    if numbers.ndim != 1 + len(shape) or numbers.shape[1:] != shape or len(numbers) < 2:
        raise HelmscopeError(
            f"{name} has shape {numbers.shape}, but it must be (replicates, {', '.join(map(str, shape))}), two or more"
        )
    told = {"long_name": label, "scale": "log", "summary": "range"} if log else {"long_name": label, "scale": "linear"}
    coords = {over: np.arange(len(numbers)), **{axis: list(at) for axis, at in axes.items()}}
    return check_replicates(xr.Dataset({name: ((over, *axes), numbers, told)}, coords), over)
