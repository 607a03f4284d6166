"""A Measurement as a small text or HTML table: estimates with their intervals."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.stats.reduce import band, band_text, reduced
from helmscope.types import (
    HelmscopeError,
    Interval,
    check_integer,
    html_table,
    interval_text,
    one_line_repr,
    pluralized,
    type_with_article,
)
from helmscope.types.measurement import COMPANIONS

if TYPE_CHECKING:
    import xarray as xr

FEW = 8  # rows per variable unless all are requested


@dataclass(frozen=True)
class Row:
    """One entry of a variable, as text."""

    variable: str
    at: str
    estimate: str
    null: str


@dataclass(frozen=True, repr=False)
class Summary:
    """A table of estimates: prints as text, and as HTML in a notebook."""

    rows: tuple[Row, ...]
    note: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are not empty."""
        names = [field.name for field in fields(Row)]
        return tuple(name for name in names if any(getattr(row, name) for row in self.rows))

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The cells of each row, in the order of ``columns``."""
        return [tuple(getattr(row, name) for name in self.columns) for row in self.rows]

    def __repr__(self) -> str:
        names = list(dict.fromkeys(row.variable for row in self.rows))
        return one_line_repr(f"Summary of {pluralized(len(names), 'variable')}: {', '.join(names)}")

    def __str__(self) -> str:
        lines = [self.columns, *self.cells]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join(line.rstrip() for line in [*text, self.note])

    def _repr_html_(self) -> str:
        return html_table("", self.cells, header=self.columns, note=self.note)


def summary(measurement: xr.Dataset, *, rows: int | None = FEW) -> Summary:
    """Estimate, interval, number of replicates and null of every variable of a Measurement, as a table.

    An estimate reads ``0.123 [0.101, 0.146], n = 8``; a single replicate has no interval, and reads ``0.123, n = 1``.
    Equal replicates read ``0.123, all equal, n = 8``: their interval of width 0 does not show that others would agree.

    A Measurement with replicates is first reduced by ``reduce_replicates``. Of a variable with more than ``rows``
    entries only some are shown, and the last line gives the number of the others; ``rows=None`` shows all. These are
    the entries of largest magnitude, largest first, if it has an axis ``head``; otherwise the first and the last entry
    along each axis. Raises ``HelmscopeError`` unless it is a Measurement and ``rows`` is at least 1 or None.

    >>> import xarray as xr
    >>> print(summary(xr.Dataset({"rank": (("time", "system"), [[4.0, 6.0, 5.0]]), "rank_null": 3.0}, {"time": [2.0]})))
    variable  at        estimate               null
    rank      time = 2  5 [2.52, 7.48], n = 3  3
    in brackets: 95 % interval
    """
    if not hasattr(measurement, "data_vars"):
        raise HelmscopeError(f"measurement is {type_with_article(measurement)}, but it must be an xarray Dataset")
    most = None if rows is None else check_integer("rows", rows, at_least=1)
    names = [str(name) for name in measurement.data_vars if not str(name).endswith(COMPANIONS)]
    if not names:
        raise HelmscopeError("measurement has no variables, but a summary needs at least one")
    data = reduced(measurement)
    table = tuple(row for name in names for row in _rows(data, name, most))
    note = f"in brackets: {', '.join(dict.fromkeys(band_text(data, name) for name in names))}"
    hidden = sum(data[name].size for name in names) - len(table)
    if hidden:
        entries = "1 entry is" if hidden == 1 else f"{hidden:,} entries are"
        note += f"\n{entries} not shown: summary(measurement, rows=None) shows all"
    return Summary(table, note)


def _rows(data: xr.Dataset, name: str, most: int | None) -> list[Row]:
    value = data[name]
    n = int(value.attrs["n"] if "n" in value.attrs else data.attrs["n"])
    rows = []
    for place in _places(value, most):
        at: dict[Any, int] = dict(zip(value.dims, place, strict=True))
        null = data.get(f"{name}_null")
        null_here = None if null is None else null.isel({dim: k for dim, k in at.items() if dim in null.dims})
        null_text = "" if null_here is None else f"{float(null_here):.4g}" if null_here.size == 1 else "varies"
        rows.append(Row(name, _where(value, at), f"{_estimate(data, name, at)}, n = {n:,}", null_text))
    return rows


def _places(value: xr.DataArray, most: int | None) -> list[tuple[int, ...]]:
    """The indices of the entries to show: all of them, or at most ``most``."""
    if most is None or value.size <= most:
        return list(np.ndindex(value.shape))
    if "head" in value.dims:
        magnitude = np.nan_to_num(np.abs(value.values.ravel()), nan=-1.0)
        largest = np.argsort(-magnitude, kind="stable")[:most]
        return [tuple(map(int, place)) for place in np.transpose(np.unravel_index(largest, value.shape))]
    return list(itertools.product(*(sorted({0, size - 1}) for size in value.shape)))[:most]


def _where(value: xr.DataArray, at: dict[Any, int]) -> str:
    """The coordinates of an entry, as text."""
    coordinates = []
    for dim, k in at.items():
        place = value[dim].values[k]
        coordinates.append(f"{dim} = {place:.6g}" if value[dim].dtype.kind in "fiu" else f"{dim} = {place}")
    return ", ".join(coordinates)


def _estimate(data: xr.Dataset, name: str, at: dict[Any, int]) -> str:
    value = float(data[name].isel(at))
    low, high = (float(edge.isel(at)) for edge in band(data, name))
    if not math.isfinite(value) or math.isnan(low) or math.isnan(high):  # a single replicate has no interval
        return f"{value:.4g}"
    if low == high:
        return f"{value:.4g}, all equal"
    return interval_text(Interval(value, low, high, n=1))
