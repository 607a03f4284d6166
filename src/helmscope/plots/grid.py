"""Small multiples of a variable over three axes: columns along the second axis, rows along the third."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from helmscope.plots.style import COLORS, spans_decades
from helmscope.plots.variable_panel import LETTERS, axis_name, heading, label, plain
from helmscope.stats.reduce import band, reduced

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import SubFigure

ROW = 1.3  # inches


def draw_grid(place: SubFigure, data: xr.Dataset, name: str, *, letters: int = LETTERS) -> None:
    """Plots NAME (x, column, row) as a grid of panels, which share their axes along a row, below a heading with lines
    of at most ``letters`` characters.

    Each panel shows the values with their band, and NAME_null dotted. The attribute scale = "log" selects a log axis
    where values span more than a factor of 30. Replicates are reduced first. Values that are not finite are not
    plotted.

    >>> import xarray as xr
    >>> from matplotlib.figure import Figure
    >>> share = (("x", "layer", "model"), np.ones((3, 2, 1)))
    >>> data = xr.Dataset({"share": share, "share_stderr": share}, attrs={"n": 16})
    >>> figure = Figure()
    >>> draw_grid(figure.subfigures(1, 1), data, "share")
    >>> len(figure.subfigs[0].axes)
    2
    """
    from matplotlib.ticker import MaxNLocator

    data = reduced(data)
    value = data[name]
    along, columns, rows = value.dims
    x = np.asarray(value[along].values, dtype=np.float64)
    low, high = (edge.transpose(*value.dims).values for edge in band(data, name))
    null = data[f"{name}_null"].broadcast_like(value).transpose(*value.dims).values if f"{name}_null" in data else None
    panels = place.subplots(value.sizes[rows], value.sizes[columns], squeeze=False, sharex=True, sharey="row")
    titles, across = _titles(value, columns, letters)
    for i, row in enumerate(value[rows].values):
        color = COLORS[i % len(COLORS)]
        for j in range(value.sizes[columns]):
            panel = panels[i, j]
            panel.fill_between(x, value.values[:, j, i], step="mid", color=color, alpha=0.5, linewidth=0)
            panel.fill_between(x, low[:, j, i], high[:, j, i], step="mid", color=color, linewidth=0)
            panel.tick_params(labelsize=7)
            if null is not None:
                panel.plot(x, null[:, j, i], color=color, linestyle=":", linewidth=1, label="_null")
            if value.attrs.get("scale") == "log" and spans_decades(value.values):
                panel.set_yscale("log")
            panel.xaxis.set_major_locator(MaxNLocator(2))
            if i == 0:
                panel.set_title(plain(titles[j]), fontsize=7.5)
        panels[i, 0].set_ylabel(plain(label(value, rows, row)), fontsize=7.5)
    place.supxlabel(plain(f"{axis_name(value, along)}{across}"), fontsize=9)
    lines = [line for line in heading(data, name, letters=letters) if line]
    place.suptitle(plain("\n".join(lines)), fontsize=9, x=0.01, ha="left")


def _titles(value: xr.DataArray, columns: Hashable, letters: int) -> tuple[list[str], str]:
    """The titles of the columns, and what the label of the axis says of them where only their coordinates fit."""
    titles = [label(value, columns, each) for each in value[columns].values]
    if max(map(len, titles)) <= letters // len(titles) or value[columns].dtype.kind not in "fiu":
        return titles, ""
    return [f"{each:.6g}" for each in value[columns].values], f"; columns: {axis_name(value, columns)}"


def is_grid(value: xr.DataArray) -> bool:
    """Whether a variable is plotted as a grid: it has three axes, the first of them numeric.

    >>> import xarray as xr
    >>> is_grid(xr.DataArray(np.zeros((2, 3, 2)))), is_grid(xr.DataArray(np.zeros((2, 3))))
    (True, False)
    """
    return value.ndim == 3 and value[value.dims[0]].dtype.kind in "fiu"


def grid_height(value: xr.DataArray) -> float:
    """The height of the rows of a grid in inches.

    >>> import xarray as xr
    >>> grid_height(xr.DataArray(np.zeros((2, 3, 2))))
    2.6
    """
    return ROW * value.shape[2]
