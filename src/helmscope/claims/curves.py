"""Replicates as Measurements that ``plots.trial`` can draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.types import HelmscopeError, check_measurement

if TYPE_CHECKING:
    import xarray as xr


def curve(name: str, values: Any, axes: Mapping[str, Sequence[Any]], *, label: str, log: bool = False) -> xr.Dataset:
    """The Measurement NAME of values (replicate, *axes): mean and standard error over the replicates, or with ``log``,
    for positive numbers over several decades, the median with the smallest and the largest.

    The first axis is drawn along the picture, a second one as a family of curves. ``label`` says what is drawn. Join
    several with ``xarray.merge``.

    >>> seen = curve("energy", [[1.0, 2.0], [3.0, 4.0]], {"time": [0.0, 1.0]}, label="energy E")
    >>> seen.energy.values.tolist(), seen.energy_stderr.values.tolist(), seen.attrs["n"]
    ([2.0, 3.0], [1.0, 1.0], 2)
    """
    import xarray as xr

    numbers = np.asarray(values, dtype=np.float64)
    shape = tuple(len(axis) for axis in axes.values())
    if numbers.ndim != 1 + len(shape) or numbers.shape[1:] != shape or len(numbers) < 2:
        raise HelmscopeError(
            f"{name} has shape {numbers.shape}, but it must be (replicates, {', '.join(map(str, shape))}), two or more"
        )
    n = len(numbers)
    if log:
        parts = {"": np.median(numbers, 0), "_low": numbers.min(0), "_high": numbers.max(0)}
    else:
        parts = {"": numbers.mean(0), "_stderr": numbers.std(0, ddof=1) / n**0.5}
    data = xr.Dataset(
        {f"{name}{end}": (tuple(axes), part) for end, part in parts.items()},
        {axis: list(at) for axis, at in axes.items()},
        {"n": n},
    )
    data[name].attrs = {"long_name": label, "n": n, "scale": "log" if log else "linear"}
    return check_measurement(data)
