"""One variable of a Measurement on a panel: curves with bands, points with bars."""

from __future__ import annotations

import itertools
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.plots.style import COLORS
from helmscope.stats.reduce import band, band_text, reduced
from helmscope.types import HelmscopeError
from helmscope.types.measurement import COMPANIONS

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

MOST_MARKERS, MOST_WORDS = 40, 12
LETTERS = 100  # that fit across a panel


def variables(data: xr.Dataset) -> list[str]:
    """The variables of a Measurement, without the companions that say how sure each is.

    >>> import xarray as xr
    >>> variables(xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16}))
    ['order']
    """
    names = [str(name) for name in data.data_vars]
    return [name for name in names if not name.endswith(COMPANIONS)]


def draw_variable(panel: Axes, data: xr.Dataset, name: str) -> None:
    """NAME over its first axis, further axes as a family of curves, with its band (NAME_low to NAME_high, else two
    standard errors) and NAME_null dotted, on a panel of about eight inches. Replicates are reduced first.

    An axis of words is one of categories. The attribute scale = "log" asks for a log axis; an axis of positive numbers
    over more than two decades is one. What is not finite is not drawn; what is no number is refused.

    >>> import xarray as xr
    >>> from helmscope.plots.style import new_figure
    >>> _, (panel,) = new_figure(1, 1)
    >>> draw_variable(panel, xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16}), "order")
    >>> panel.lines[0].get_ydata()
    array([0.5])
    """
    data = reduced(data)
    value = data[name]
    numbers, low, high = (_numbers(each, name) for each in (value, *band(data, name)))
    x, words = _along(value)
    if value.attrs.get("scale") == "log" and bool((numbers > 0).any()):
        panel.set_yscale("log")
    if words is None and len(x) > 1 and x.min() > 0 and x.max() > 100 * x.min():
        panel.set_xscale("log")
    labels = _labels(value)
    colors = _colors(panel, value, labels)
    beside = min(0.12, 0.6 / len(labels)) if words is not None else 0.0
    for index, (label, color) in enumerate(zip(labels, colors, strict=True)):
        here = x + beside * (index - (len(labels) - 1) / 2)
        bars = (numbers[:, index], low[:, index], high[:, index])
        _curve(panel, here, bars, label, color, apart=words is not None)
    if f"{name}_null" in data:
        null = _numbers(data[f"{name}_null"].broadcast_like(value).transpose(*value.dims), name)
        for index, color in enumerate(colors):
            panel.plot(x, null[:, index], color=color, linestyle=":", marker="x", label="_null")
    if words is not None:
        panel.set_xticks(x, words)
        panel.set_xlim(-0.5, len(words) - 0.5)
        if sum(map(len, words)) > LETTERS:
            for text in panel.get_xticklabels():
                text.set(rotation=20, ha="right", rotation_mode="anchor")
    if value.ndim:
        panel.set_xlabel(plain(axis_name(value, value.dims[0])))
    _head(panel, data, name, labels)


def heading(data: xr.Dataset, name: str) -> list[str]:
    """The lines above a panel of a reduced Measurement: what is drawn, what the band is, and a line for each row of the
    legend.

    >>> import xarray as xr
    >>> heading(xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16}), "order")
    ['order', 'n = 16; bar: two standard errors']
    """
    value = data[name]
    n = int(value.attrs["n"] if "n" in value.attrs else data.attrs["n"])
    mark = "band" if _along(value)[1] is None else "bar"
    dotted = "; dotted: null" if f"{name}_null" in data else ""
    words = textwrap.wrap(str(value.attrs.get("long_name", name)), LETTERS)
    labels = _labels(value)
    legend = [""] * -(-len(labels) // _columns(labels)) if _has_legend(value, labels) else []
    return [*words, f"n = {n:,}; {mark}: {band_text(data, name)}{dotted}", *legend]


def plain(text: str) -> str:
    """Text in which a dollar is a dollar, not mathematics.

    >>> print(plain("$5"))
    \\$5
    """
    return text.replace("$", r"\$")


def axis_name(value: xr.DataArray, dim: Any) -> str:
    """The long_name of an axis, or its name with spaces.

    >>> import xarray as xr
    >>> axis_name(xr.DataArray([1.0], dims="half_step"), "half_step")
    'half step'
    """
    long_name = value[dim].attrs.get("long_name") if dim in value.coords else None
    return str(long_name or str(dim).replace("_", " "))


def _curve(panel: Axes, x: Any, bars: tuple[Any, Any, Any], label: str, color: Any, *, apart: bool) -> None:
    """A line with its band, or points with bars where the places are ``apart`` from each other."""
    value, low, high = bars
    if apart:
        panel.plot(x, value, marker="o", linestyle="none", color=color, label=plain(label))
        panel.plot(np.stack([x, x]), np.stack([low, high]), color=color, label="_bar")
        return
    marker = "o" if len(x) <= MOST_MARKERS else ""
    panel.plot(x, value, marker=marker, markersize=3, color=color, label=plain(label))
    panel.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _head(panel: Axes, data: xr.Dataset, name: str, labels: list[str]) -> None:
    """The heading and the legend, above the panel, where they hide no curve."""
    text = plain("\n".join(line for line in heading(data, name) if line))
    if not _has_legend(data[name], labels):
        panel.set_title(text, loc="left", fontsize=9)
        return
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0}
    panel.legend(title=text, ncols=_columns(labels), fontsize=8.5, title_fontsize=9, alignment="left", **place)


def _columns(labels: list[str]) -> int:
    return max(1, min(len(labels), LETTERS // (max(map(len, labels), default=0) + 6)))


def _numbers(value: xr.DataArray, name: str) -> Any:
    """(places along the first axis, curves), NaN where a number is not finite."""
    if value.dtype.kind not in "fiub":
        raise HelmscopeError(f"measurement '{name}' holds {value.dtype}, but a picture shows real numbers only")
    rows = value.shape[0] if value.ndim else 1
    flat = value.values.astype(np.float64).reshape(rows, int(np.prod(value.shape[1:])))
    return np.where(np.isfinite(flat), flat, np.nan)


def _along(value: xr.DataArray) -> tuple[Any, list[str] | None]:
    """Places along the first axis, and the words there where they are no numbers."""
    if value.ndim == 0:
        return np.zeros(1), [""]
    at = value[value.dims[0]].values  # an axis without a coordinate counts from 0
    if at.dtype.kind in "fiu" and bool(np.isfinite(at).all()):
        return at.astype(np.float64), None
    return np.arange(len(at), dtype=np.float64), [plain(textwrap.shorten(str(each), 28)) for each in at]


def _labels(value: xr.DataArray) -> list[str]:
    """What each curve is: the places along every axis but the first."""
    axes = [[label(value, dim, each) for each in value[dim].values] for dim in value.dims[1:]]
    return [", ".join(each) for each in itertools.product(*axes)]


def label(value: xr.DataArray, dim: Any, at: Any) -> str:
    """A place along an axis in words.

    >>> import xarray as xr
    >>> label(xr.DataArray([1.0], {"beta": [2.0]}, "beta"), "beta", 2.0)
    'beta = 2'
    """
    number = value[dim].dtype.kind in "fiu"
    return f"{axis_name(value, dim)} = {at:.6g}" if number else str(at)


def _has_legend(value: xr.DataArray, labels: list[str]) -> bool:
    """Whether a legend tells the curves apart: a few of them, or not too many that only words tell apart."""
    return 1 < len(labels) <= (len(COLORS) if _measured(value) else MOST_WORDS)


def _measured(value: xr.DataArray) -> bool:
    """Whether the curves are told apart by one number."""
    return value.ndim == 2 and value[value.dims[1]].dtype.kind in "fiu"


def _colors(panel: Axes, value: xr.DataArray, labels: list[str]) -> list[Any]:
    """One color a curve; where a legend would not hold them, by a color scale beside the panel."""
    if len(labels) <= len(COLORS):
        return list(COLORS[: len(labels)])
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm, Normalize

    measured = _measured(value)
    places = (value[value.dims[1]].values if measured else np.arange(len(labels))).astype(np.float64)
    wide = bool(measured and places.min() > 0 and places.max() > 100 * places.min())
    dark = ListedColormap(colormaps["viridis"](np.linspace(0, 0.85, 256)))  # its yellow end is pale on white
    scale = ScalarMappable((LogNorm if wide else Normalize)(places.min(), places.max()), dark)
    if not _has_legend(value, labels):
        name = ", ".join(axis_name(value, dim) for dim in value.dims[1:])
        bar = panel.figure.colorbar(scale, ax=panel, label=plain(name))
        if not measured:
            kept = range(0, len(labels), -(-len(labels) // MOST_WORDS))
            bar.set_ticks(kept, labels=[plain(textwrap.shorten(labels[each], 28)) for each in kept])
    return list(scale.to_rgba(places))
