"""Plots one variable of a Measurement on a panel: curves with bands, or points with error bars."""

from __future__ import annotations

import itertools
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.plots.limits import DrawnCurve, cut_outlying, tidy_axis
from helmscope.plots.style import COLORS, spans_decades
from helmscope.stats.reduce import band, band_text, reduced
from helmscope.types import HelmscopeError, keeps_replicates, replicate_axis
from helmscope.types.measurement import COMPANIONS

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

MAX_MARKERS, MAX_WORDS = 40, 12
FEWEST = 3  # replicates that a band needs: with two, Student's interval is 13 times as wide as their distance


def letters_across(width: float) -> int:
    """The number of characters that fit across a panel of a figure of this width in inches, next to its axis.

    >>> letters_across(8.0), letters_across(4.0)
    (100, 47)
    """
    return round(100 * (width - 0.5) / 7.5)


LETTERS = letters_across(8.0)


def variables(data: xr.Dataset) -> list[str]:
    """The variables of a Measurement, without companions such as NAME_stderr and NAME_low.

    >>> import xarray as xr
    >>> variables(xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16}))
    ['order']
    """
    names = [str(name) for name in data.data_vars]
    return [name for name in names if not name.endswith(COMPANIONS)]


def single_replicates(data: xr.Dataset) -> list[xr.Dataset]:
    """The replicates of a Measurement that has two of them, too few for a band, so that each is drawn; empty otherwise.

    >>> import xarray as xr
    >>> len(single_replicates(xr.Dataset({"order": ("system", [0.2, 0.4])})))
    2
    >>> single_replicates(xr.Dataset({"order": ("system", [0.2, 0.4, 0.6])}))
    []
    """
    if not keeps_replicates(data):
        return []
    axis = replicate_axis(data)
    count = data.sizes[axis]
    return [data.isel({axis: k}, drop=True) for k in range(count)] if 1 < count < FEWEST else []


def draw_singles(panel: Axes, x: Any, singles: Any, color: Any, *, categorical: bool = False, line: Any = "-") -> None:
    """Draws each replicate as a thin line, or as a small point on a categorical axis.

    >>> from helmscope.plots.style import new_figure
    >>> _, (panel,) = new_figure(1, 1)
    >>> draw_singles(panel, np.arange(2.0), [np.zeros(2), np.ones(2)], "black")
    >>> len(panel.lines)
    2
    """
    style: Any = {"linestyle": "none", "marker": "."} if categorical else {"linewidth": 0.7, "linestyle": line}
    for values in singles:
        panel.plot(x, values, color=color, alpha=0.7, label="_single", **style)


def draw_variable(panel: Axes, data: xr.Dataset, name: str, *, letters: int = LETTERS) -> None:
    """Plots NAME over its first axis, with further axes as a family of curves, on a panel that is ``letters``
    characters wide (by default about eight inches).

    The band is NAME_low to NAME_high, else two standard errors; NAME_null is dotted. Replicates are reduced first. An
    axis of strings is categorical. The attribute scale = "log" selects a log axis for values that span more than a
    factor of 30; an axis of positive numbers over more than two decades is a log axis. Values that are not finite are
    not plotted; raises HelmscopeError for values that are not real numbers.

    >>> import xarray as xr
    >>> from helmscope.plots.style import new_figure
    >>> _, (panel,) = new_figure(1, 1)
    >>> draw_variable(panel, xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16}), "order")
    >>> panel.lines[0].get_ydata()
    array([0.5])
    """
    data = reduced(data)
    value = data[name]
    numbers, low, high = (as_floats(values, name) for values in (value, *band(data, name)))
    x, categories = positions(value)
    if value.attrs.get("scale") == "log" and bool((numbers > 0).any()) and spans_decades(numbers, low, high):
        panel.set_yscale("log")
    if categories is None and len(x) > 1 and x.min() > 0 and x.max() > 100 * x.min():
        panel.set_xscale("log")
    labels = curve_labels(value)
    colors = _colors(panel, value, labels)
    spacing = min(0.12, 0.6 / len(labels)) if categories is not None else 0.0
    drawn = []
    for index, (label, color) in enumerate(zip(labels, colors, strict=True)):
        shifted = x + spacing * (index - (len(labels) - 1) / 2)
        bars = (numbers[:, index], low[:, index], high[:, index])
        draw_curve(panel, shifted, bars, label, color, categorical=categories is not None)
        drawn.append(DrawnCurve(shifted, bars[0], color, *bars[1:]))
    if f"{name}_null" in data:
        null = as_floats(data[f"{name}_null"].broadcast_like(value).transpose(*value.dims), name)
        for index, color in enumerate(colors):
            panel.plot(x, null[:, index], color=color, linestyle=":", marker="x", label="_null")
    if categories is not None:
        panel.set_xticks(x, categories)
        panel.set_xlim(-0.5, len(categories) - 0.5)
        if sum(map(len, categories)) > letters:
            for text in panel.get_xticklabels():
                text.set(rotation=20, ha="right", rotation_mode="anchor")
    elif panel.get_yscale() == "linear":
        cut_outlying(panel, drawn, leading=drawn[0] if "predictions" in value.attrs else None)
    tidy_axis(panel)
    if value.ndim:
        panel.set_xlabel(textwrap.fill(plain(axis_name(value, value.dims[0])), letters))
    _draw_heading(panel, data, name, labels, letters)


def heading(data: xr.Dataset, name: str, *, letters: int = LETTERS) -> list[str]:
    """The lines above a panel of a reduced Measurement, of at most ``letters`` characters: the variable, the kind of
    band, and an empty line for each row of the legend.

    >>> import xarray as xr
    >>> heading(xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16}), "order")
    ['order', 'n = 16; bar: two standard errors']
    >>> heading(xr.Dataset({"order": 0.5, "order_stderr": 0.0}, attrs={"n": 16}), "order")
    ['order', 'the same in all 16']
    """
    value = data[name]
    n, most = int(value.attrs.get("n", data.attrs["n"])), int(data.attrs["n"])
    count = f"n = {n:,}" if n == most else f"n >= {n:,}"  # n is that of the point with the fewest replicates
    mark = "band" if positions(value)[1] is None else "bar"
    dotted = "; dotted: null" if f"{name}_null" in data else ""
    title = textwrap.wrap(str(value.attrs.get("long_name", name)), letters)
    labels = curve_labels(value)
    legend = [""] * -(-len(labels) // _columns(labels, letters)) if _has_legend(value, labels) else []
    low, high = (as_floats(edge, name) for edge in band(data, name))
    constant = n > 1 and bool(np.isfinite(low).any()) and np.array_equal(low, high, equal_nan=True)
    spread = f"the same in all {n:,}" if constant else f"{count}; {mark}: {band_text(data, name)}"
    return [*title, *textwrap.wrap(spread + dotted, letters), *legend]


def plain(text: str) -> str:
    """Escapes dollar signs, which matplotlib would interpret as mathematics.

    >>> print(plain("$5"))
    \\$5
    """
    return text.replace("$", r"\$")


def axis_name(value: xr.DataArray | xr.Dataset, dim: Any) -> str:
    """The long_name of an axis, or its name with spaces; with its units, if it has any.

    >>> import xarray as xr
    >>> axis_name(xr.DataArray([1.0], dims="half_step"), "half_step")
    'half step'
    >>> axis_name(xr.DataArray([1.0], {"depth": ("depth", [0], {"units": "half-layers"})}), "depth")
    'depth (half-layers)'
    """
    attributes = value[dim].attrs if dim in value.coords else {}
    name = str(attributes.get("long_name") or str(dim).replace("_", " "))
    return f"{name} ({attributes['units']})" if "units" in attributes else name


def draw_curve(
    panel: Axes,
    x: Any,
    bars: tuple[Any, Any, Any],
    label: str,
    color: Any,
    *,
    categorical: bool,
    line: Any = "-",
    marker: str = "o",
) -> None:
    """Draws a line of a style with its band, or markers with error bars on a categorical axis; ``bars`` are value, low
    and high.

    >>> from helmscope.plots.style import new_figure
    >>> _, (panel,) = new_figure(1, 1)
    >>> draw_curve(panel, np.arange(2.0), (np.ones(2), np.zeros(2), np.ones(2)), "A", "black", categorical=False)
    >>> panel.lines[0].get_label()
    'A'
    """
    value, low, high = bars
    if categorical:
        panel.plot(x, value, marker=marker, linestyle="none", color=color, label=plain(label))
        panel.plot(np.stack([x, x]), np.stack([low, high]), color=color, label="_bar")
        return
    marker = marker if len(x) <= MAX_MARKERS else ""
    panel.plot(x, value, marker=marker, markersize=3, color=color, linestyle=line, label=plain(label))
    panel.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _draw_heading(panel: Axes, data: xr.Dataset, name: str, labels: list[str], letters: int) -> None:
    """Draws the heading and the legend above the panel, where they do not cover the curves."""
    text = plain("\n".join(line for line in heading(data, name, letters=letters) if line))
    if not _has_legend(data[name], labels):
        panel.set_title(text, loc="left", fontsize=9)
        return
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0}
    panel.legend(title=text, ncols=_columns(labels, letters), fontsize=8.5, title_fontsize=9, alignment="left", **place)


def _columns(labels: list[str], letters: int) -> int:
    return max(1, min(len(labels), letters // (max(map(len, labels), default=0) + 6)))


def as_floats(value: xr.DataArray, name: str) -> Any:
    """The values as (position along the first axis, curve), NaN where they are not finite; raises HelmscopeError for
    values that are not real numbers.

    >>> import xarray as xr
    >>> as_floats(xr.DataArray([[1.0, np.inf]]), "x")
    array([[ 1., nan]])
    """
    if value.dtype.kind not in "fiub":
        raise HelmscopeError(f"measurement '{name}' holds {value.dtype}, but only real numbers can be plotted")
    rows = value.shape[0] if value.ndim else 1
    flat = value.values.astype(np.float64).reshape(rows, int(np.prod(value.shape[1:])))
    return np.where(np.isfinite(flat), flat, np.nan)


def positions(value: xr.DataArray) -> tuple[Any, list[str] | None]:
    """Positions along the first axis, and the names of its categories if its coordinates are not numbers.

    >>> import xarray as xr
    >>> positions(xr.DataArray([1.0, 2.0], {"model": ["A", "B"]}, "model"))
    (array([0., 1.]), ['A', 'B'])
    """
    if value.ndim == 0:
        return np.zeros(1), [""]
    coordinates = value[value.dims[0]].values  # an axis without a coordinate counts from 0
    if coordinates.dtype.kind in "fiu" and bool(np.isfinite(coordinates).all()):
        return coordinates.astype(np.float64), None
    names = [plain(textwrap.shorten(str(coordinate), 28)) for coordinate in coordinates]
    return np.arange(len(names), dtype=np.float64), names


def curve_labels(value: xr.DataArray) -> list[str]:
    """The label of each curve: its coordinates along all axes but the first.

    >>> import xarray as xr
    >>> curve_labels(xr.DataArray([[1.0, 2.0]], {"beta": [1.0, 4.0]}, ("time", "beta")))
    ['beta = 1', 'beta = 4']
    """
    axes = [[label(value, dim, coordinate) for coordinate in value[dim].values] for dim in value.dims[1:]]
    return [", ".join(labels) for labels in itertools.product(*axes)]


def label(value: xr.DataArray, dim: Any, coordinate: Any) -> str:
    """Label of a coordinate along an axis.

    >>> import xarray as xr
    >>> label(xr.DataArray([1.0], {"beta": [2.0]}, "beta"), "beta", 2.0)
    'beta = 2'
    """
    numeric = value[dim].dtype.kind in "fiu"
    return f"{axis_name(value, dim)} = {coordinate:.6g}" if numeric else str(coordinate)


def whole_ticks(axis: Any, value: xr.DataArray, dim: Any) -> None:
    """Sets ticks at whole numbers only, if the coordinate counts something.

    >>> import xarray as xr
    >>> from helmscope.plots.style import new_figure
    >>> _, (panel,) = new_figure(1, 1)
    >>> whole_ticks(panel.xaxis, xr.DataArray([1.0, 2.0], dims="layer"), "layer")
    """
    from matplotlib.ticker import MaxNLocator

    coordinate = value[dim].values
    if coordinate.dtype.kind in "iu" or (coordinate.dtype.kind == "f" and dim == "depth"):
        axis.set_major_locator(MaxNLocator(integer=True))


def _has_legend(value: xr.DataArray, labels: list[str]) -> bool:
    """Whether the curves have a legend rather than a color scale: there are few, or they have no numeric coordinate."""
    return 1 < len(labels) <= (len(COLORS) if _numeric_family(value) else MAX_WORDS)


def _numeric_family(value: xr.DataArray) -> bool:
    """Whether the curves differ by a single numeric coordinate."""
    return value.ndim == 2 and value[value.dims[1]].dtype.kind in "fiu"


def _colors(panel: Axes, value: xr.DataArray, labels: list[str]) -> list[Any]:
    """One color per curve; adds a color scale next to the panel where there is no legend."""
    if len(labels) <= len(COLORS):
        return list(COLORS[: len(labels)])
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm, Normalize

    numeric = _numeric_family(value)
    places = (value[value.dims[1]].values if numeric else np.arange(len(labels))).astype(np.float64)
    wide = bool(numeric and places.min() > 0 and places.max() > 100 * places.min())
    dark = ListedColormap(colormaps["viridis"](np.linspace(0, 0.85, 256)))  # without the yellow end, pale on white
    scale = ScalarMappable((LogNorm if wide else Normalize)(places.min(), places.max()), dark)
    if not _has_legend(value, labels):
        name = ", ".join(axis_name(value, dim) for dim in value.dims[1:])
        bar = panel.figure.colorbar(scale, ax=panel, label=plain(name))
        if not numeric:
            kept = range(0, len(labels), -(-len(labels) // MAX_WORDS))
            bar.set_ticks(kept, labels=[plain(textwrap.shorten(labels[index], 28)) for index in kept])
    return list(scale.to_rgba(places))
