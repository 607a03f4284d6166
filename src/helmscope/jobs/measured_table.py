"""A Measurement as a table of means with intervals, for spreadsheets."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.stats.reduce import reduced
from helmscope.types import keeps_replicates, replicate_axis

if TYPE_CHECKING:
    import xarray as xr

LONG = frozenset({"sample", "token", "neuron"})  # axes whose quantities are only in the netCDF file


def csv_table(measurement: xr.Dataset) -> bytes:
    """The reduced values as a CSV file: columns for the axes and their coordinates, then NAME, NAME_low and NAME_high
    of every quantity; cells of axes that a quantity does not have are empty.

    A Measurement whose replicates are layers keeps them, without intervals. Quantities over tokens or neurons are left
    out.

    >>> import xarray as xr
    >>> rank = xr.Dataset({"rank": (("layer", "prompt"), [[1.0, 1.0], [3.0, 3.0]])}, {"layer": [0, 1]})
    >>> print(csv_table(rank).decode(), end="")
    layer,rank,rank_low,rank_high
    0,1.0,1.0,1.0
    1,3.0,3.0,3.0
    """
    of_layers = keeps_replicates(measurement) and replicate_axis(measurement) == "layer"
    data = measurement if of_layers else reduced(measurement)
    blocks: dict[tuple[str, ...], list[str]] = {}
    for name in _columns(data):
        dims = tuple(str(dim) for dim in data[name].dims)
        if not LONG & set(dims):
            blocks.setdefault(dims, []).append(name)
    axes = dict.fromkeys(dim for dims in blocks for dim in dims)
    labels = [str(name) for name, coord in data.coords.items() if coord.ndim == 1 and coord.dims[0] in axes]
    header = [*dict.fromkeys([*axes, *labels]), *(name for names in blocks.values() for name in names)]
    text = io.StringIO()
    writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
    writer.writeheader()
    for dims, names in blocks.items():
        for place in np.ndindex(*(data.sizes[dim] for dim in dims)):
            at = dict(zip(dims, place, strict=True))
            row: dict[str, Any] = at | {name: data[name].values[at[axis]] for name, axis in _axis_of(data, labels, at)}
            writer.writerow(row | {name: data[name].values[place] for name in names})
    return text.getvalue().encode()


def _columns(data: xr.Dataset) -> list[str]:
    """The names of quantities, each followed by the ends of its interval, without standard errors."""
    names = [str(name) for name in data.data_vars]
    ends = {f"{name}{end}" for name in names for end in ("_low", "_high", "_stderr")}
    return [
        column
        for name in names
        if name not in ends
        for column in (name, f"{name}_low", f"{name}_high")
        if column in data
    ]


def _axis_of(data: xr.Dataset, labels: list[str], axes: dict[str, int]) -> list[tuple[str, str]]:
    """The coordinates along one of some axes, each with its axis."""
    pairs = [(name, str(data[name].dims[0])) for name in labels]
    return [(name, axis) for name, axis in pairs if axis in axes]
