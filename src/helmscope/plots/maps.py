"""Maps of a variable over two numeric axes, such as layer and head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.plots.style import plain_ticks, short_exponent, spans_decades
from helmscope.plots.variable_panel import as_floats, axis_name, plain, whole_ticks

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

    from helmscope.plots.figure import Figure

MAX_NUMBERS = 100  # cells of a map that are labelled with their numbers
FONT, LETTER = 6.0, 0.62  # of the numbers, in points; the width of a digit
ROUNDING = 1e-12  # of the largest number: less than this reads 0
SMALL = 0.5  # share of the numbers that may be too small for the decimals of the others


def draw_map(
    figure: Figure,
    panel: Axes,
    value: xr.DataArray,
    shared: Any,
    *,
    title: str,
    log: bool = False,
    numbers: bool = True,
) -> None:
    """Draws a variable over two numeric axes as a map with its color scale, which covers the numbers in ``shared``.

    Numbers of both signs, and differences, have a diverging color map centered at 0; colors are proportional to the
    root of the numbers of a variable with the attribute scale = "sqrt". A map with the axis ``head`` is arranged like a
    table: heads are columns, layers or heads that were not chosen leave no gap, and the cells contain their numbers,
    unless ``numbers`` is False, if there are at most 100 and they fit. Any other map has its first axis horizontally,
    which ends at its first and last coordinates.

    >>> import xarray as xr
    >>> from helmscope.plots.style import new_figure
    >>> figure, (panel,) = new_figure(1, 1)
    >>> value = xr.DataArray([[0.1, -0.2], [0.0, 0.1]], dims=("layer", "head"))
    >>> draw_map(figure, panel, value, value.values, title="increase")
    >>> panel.get_xlabel(), panel.get_ylabel(), [text.get_text() for text in panel.texts]
    ('head', 'layer', ['0.10', '-0.20', '0.00', '0.10'])
    """
    from matplotlib.ticker import MaxNLocator

    name = str(value.name)
    is_table = "head" in value.dims
    vertical, horizontal = value.dims if is_table else value.dims[::-1]
    cells = as_floats(value.transpose(vertical, horizontal), name)
    logarithmic = log or (value.attrs.get("scale") == "log" and spans_decades(shared))
    colors = _color_scale(np.asarray(shared), logarithmic, value)
    x, y = (_cell_centers(value[dim].values, is_table=is_table) for dim in (horizontal, vertical))
    image = panel.pcolormesh(x, y, cells, shading="nearest", **colors)
    bar = figure.colorbar(image, ax=panel, label=plain(str(value.attrs.get("units", ""))))
    if not logarithmic:
        bar.locator = MaxNLocator(5)
        plain_ticks(bar.ax.yaxis)
    panel.grid(False)
    panel.set(xlabel=plain(axis_name(value, horizontal)), ylabel=plain(axis_name(value, vertical)))
    panel.set_title(plain(title), loc="left", fontsize=9)
    for axis, dim, centers in ((panel.xaxis, horizontal, x), (panel.yaxis, vertical, y)):
        if np.array_equal(centers, value[dim].values):
            whole_ticks(axis, value, dim)
        else:
            axis.set_ticks(centers, [f"{each:g}" for each in value[dim].values])
    if is_table:
        panel.invert_yaxis()
        if numbers and cells.size <= MAX_NUMBERS:
            _draw_numbers(panel, image, x, y, cells)
    else:
        panel.set(xlim=(x[0], x[-1]))  # the outer halves of the first and last cells are beyond the data


def _cell_centers(coordinates: Any, *, is_table: bool) -> Any:
    """Where the cells of a map are: at their coordinates; those of a table of chosen layers or heads side by side."""
    places = np.asarray(coordinates, dtype=np.float64)
    consecutive = len(places) > 1 and bool((np.diff(places) == 1).all())
    return places if consecutive or not is_table else np.arange(len(places), dtype=np.float64)


def _color_scale(numbers: Any, logarithmic: bool, value: xr.DataArray) -> dict[str, Any]:
    """Color map and normalization for the finite numbers of all maps of a variable."""
    from matplotlib.colors import LogNorm, Normalize, PowerNorm

    finite = numbers[np.isfinite(numbers) & ((numbers > 0) | (not logarithmic))]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if logarithmic:
        return {"cmap": "viridis", "norm": LogNorm(low, high)}
    if "difference" in value.attrs or low < 0 < high:
        extent = max(-low, high) or 1.0
        return {"cmap": "RdBu_r", "norm": Normalize(-extent, extent)}
    if value.attrs.get("scale") == "sqrt":
        return {"cmap": "viridis", "norm": PowerNorm(0.5, low, high)}
    return {"cmap": "viridis", "norm": Normalize(low, high)}


def cell_texts(numbers: Any) -> list[str]:
    """Numbers of a table as text, all in one format: with the decimals that show their range with two digits, where
    those that are too small for them are written "≈0"; with two significant digits if most of them are too small.

    >>> cell_texts([0.1, -0.2, 0.0, -1e-17])
    ['0.10', '-0.20', '0.00', '0.00']
    >>> cell_texts([0.0021, 0.31, 0.28]), cell_texts([3e-5, 0.31, 4.5e-6])
    (['≈0', '0.31', '0.28'], ['3.0e-5', '3.1e-1', '4.5e-6'])
    """
    values = np.asarray(numbers, dtype=np.float64).ravel()
    finite = values[np.isfinite(values)]
    extent = float(np.ptp(finite)) if finite.size else 0.0
    decimals = max(0, 1 - math.floor(math.log10(extent))) if 0 < extent < math.inf else 2
    nonzero = np.abs(values) > ROUNDING * float(np.abs(finite).max(initial=0.0))
    small = nonzero & (np.abs(values) < 0.5 * 10.0**-decimals)
    if decimals > 4 or small.sum() > SMALL * nonzero.sum():
        return ["0" if number == 0 else short_exponent(f"{number:.1e}") for number in values]
    texts = [f"{number if is_any else 0.0:.{decimals}f}" for number, is_any in zip(values, nonzero, strict=True)]
    return ["≈0" if is_small else text for text, is_small in zip(texts, small, strict=True)]


def _draw_numbers(panel: Axes, image: Any, x: Any, y: Any, numbers: Any) -> None:
    """Writes every number into its cell, if all of them fit."""
    texts = cell_texts(numbers)
    points = 72 / panel.figure.dpi
    width = panel.bbox.width * points / len(x)
    if LETTER * FONT * max(map(len, texts)) > width or panel.bbox.height * points / len(y) < FONT:
        return
    for ((row, column), number), text in zip(np.ndenumerate(numbers), texts, strict=True):
        if math.isnan(number):
            continue
        red, green, blue, _ = image.cmap(image.norm(number))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        style: Any = {"ha": "center", "va": "center", "fontsize": FONT, "color": "white" if dark else "black"}
        panel.text(x[column], y[row], text, **style)
