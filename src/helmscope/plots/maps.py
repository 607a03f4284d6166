"""Maps of a variable over two numeric axes, such as layer and head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.plots.style import spans_decades
from helmscope.plots.variable_panel import as_floats, axis_name, plain, whole_ticks

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

    from helmscope.plots.figure import Figure

MAX_NUMBERS = 100  # cells of a map that are labelled with their numbers
ROUNDING = 1e-12  # of the largest number: less than this reads 0


def draw_map(figure: Figure, panel: Axes, value: xr.DataArray, shared: Any, *, title: str, log: bool = False) -> None:
    """Draws a variable over two numeric axes as a map with its color scale, which covers the numbers in ``shared``.

    Numbers of both signs, and differences, have a diverging color map centered at 0. A map with the axis ``head`` is
    arranged like a table, with heads as columns, and its cells contain their numbers if there are at most 100. Any
    other map has its first axis horizontally, which ends at its first and last coordinates.

    >>> import xarray as xr
    >>> from helmscope.plots.style import new_figure
    >>> figure, (panel,) = new_figure(1, 1)
    >>> value = xr.DataArray([[0.1, -0.2], [0.0, 0.1]], dims=("layer", "head"))
    >>> draw_map(figure, panel, value, value.values, title="increase")
    >>> panel.get_xlabel(), panel.get_ylabel(), [text.get_text() for text in panel.texts]
    ('head', 'layer', ['0.10', '-0.20', '0.00', '0.10'])
    """
    name = str(value.name)
    is_table = "head" in value.dims
    vertical, horizontal = value.dims if is_table else value.dims[::-1]
    numbers = as_floats(value.transpose(vertical, horizontal), name)
    logarithmic = log or (value.attrs.get("scale") == "log" and spans_decades(shared))
    colors = _color_scale(np.asarray(shared), logarithmic, is_difference="difference" in value.attrs)
    x, y = (np.asarray(value[dim].values, dtype=np.float64) for dim in (horizontal, vertical))
    image = panel.pcolormesh(x, y, numbers, shading="nearest", **colors)
    figure.colorbar(image, ax=panel, label=plain(str(value.attrs.get("units", ""))))
    panel.grid(False)
    panel.set(xlabel=plain(axis_name(value, horizontal)), ylabel=plain(axis_name(value, vertical)))
    panel.set_title(plain(title), loc="left", fontsize=9)
    for axis, dim in ((panel.xaxis, horizontal), (panel.yaxis, vertical)):
        whole_ticks(axis, value, dim)
    if is_table:
        panel.invert_yaxis()
        if numbers.size <= MAX_NUMBERS:
            _draw_numbers(panel, image, x, y, numbers)
    else:
        panel.set(xlim=(x[0], x[-1]))  # the outer halves of the first and last cells are beyond the data


def _color_scale(numbers: Any, logarithmic: bool, *, is_difference: bool) -> dict[str, Any]:
    """Color map and normalization for the finite numbers of all maps of a variable."""
    from matplotlib.colors import LogNorm, Normalize

    finite = numbers[np.isfinite(numbers) & ((numbers > 0) | (not logarithmic))]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if logarithmic:
        return {"cmap": "viridis", "norm": LogNorm(low, high)}
    if is_difference or low < 0 < high:
        extent = max(-low, high) or 1.0
        return {"cmap": "RdBu_r", "norm": Normalize(-extent, extent)}
    return {"cmap": "viridis", "norm": Normalize(low, high)}


def cell_texts(numbers: Any) -> list[str]:
    """Numbers of a table as text: with the decimals that show their range with two digits, and those that would read 0
    so, though they are not 0 within rounding, with two significant digits of their own.

    >>> cell_texts([0.1, -0.2, 0.0, -1e-17])
    ['0.10', '-0.20', '0.00', '0.00']
    >>> cell_texts([0.0021, 0.31, 0.000043])
    ['2.1e-03', '0.31', '4.3e-05']
    """
    values = np.asarray(numbers, dtype=np.float64).ravel()
    finite = values[np.isfinite(values)]
    extent = float(np.ptp(finite)) if finite.size else 0.0
    decimals = max(0, 1 - math.floor(math.log10(extent))) if 0 < extent < math.inf else 2
    rounding = ROUNDING * float(np.abs(finite).max(initial=0.0))
    texts = []
    for number in values:
        text = f"{number:.{decimals}f}" if decimals <= 4 else f"{number:.1e}"
        if float(text) == 0:
            text = f"{number:.1e}" if abs(number) > rounding else text.removeprefix("-")
        texts.append(text)
    return texts


def _draw_numbers(panel: Axes, image: Any, x: Any, y: Any, numbers: Any) -> None:
    """Writes every number into its cell."""
    for ((row, column), number), text in zip(np.ndenumerate(numbers), cell_texts(numbers), strict=True):
        if math.isnan(number):
            continue
        red, green, blue, _ = image.cmap(image.norm(number))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        style: Any = {"ha": "center", "va": "center", "fontsize": 6, "color": "white" if dark else "black"}
        panel.text(x[column], y[row], text, **style)
