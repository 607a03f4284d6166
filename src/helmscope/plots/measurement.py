"""The figure of one or several Measurements: curves with intervals over depth, layer or time, and maps over heads."""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.plots.limits import DrawnCurve, cut_outlying
from helmscope.plots.maps import draw_map
from helmscope.plots.style import COLORS, blank_figure, spans_decades, styled
from helmscope.plots.variable_panel import (
    as_floats,
    axis_name,
    curve_labels,
    draw_curve,
    draw_singles,
    plain,
    positions,
    single_replicates,
    variables,
    whole_ticks,
)
from helmscope.stats.reduce import band, band_text, reduced
from helmscope.types import HelmscopeError, check_name, keeps_replicates, pluralized, replicate_axis, type_with_article

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

    from helmscope.plots.figure import Figure

STATE_AXES = ("depth", "layer", "time")  # the horizontal axis, if a variable has one of these
ACROSS, WIDTH, HEIGHT, HEADING = 3, 3.3, 2.7, 0.6  # panels in a row; inches
MAX_VARIABLES, MAX_CURVES = 12, 12
LETTERS = 40  # of a panel's title in a line


@dataclass(frozen=True, eq=False)
class _Shown:
    """A reduced Measurement, its label, the name of the replicates that it is the mean of, and the replicates
    themselves if they are too few for a band.
    """

    label: str
    data: xr.Dataset
    replicate: str
    singles: Sequence[xr.Dataset] = ()

    def has_band(self, name: str) -> bool:
        """Whether a band is drawn, rather than single replicates; a range needs no minimum number of replicates."""
        return not self.singles or self.data[name].attrs.get("summary") == "range"

    def single_values(self, name: str) -> list[xr.DataArray]:
        """The replicates of a variable, with the axes of ``value(name)``, if they are drawn instead of a band."""
        dims = self.value(name).dims
        return [] if self.has_band(name) else [_with_axes(single[name], dims) for single in self.singles]

    def count(self, name: str) -> int:
        """The number of replicates of a variable."""
        return int(self.data[name].attrs["n"] if "n" in self.data[name].attrs else self.data.attrs["n"])

    def value(self, name: str) -> xr.DataArray:
        """A variable with depth, layer or time as its first axis, and without axes of a single entry after it."""
        value = self.data[name]
        first = next((axis for axis in STATE_AXES if axis in value.dims), next(iter(value.dims), None))
        if first is None:
            return value
        value = value.transpose(first, ...)
        return value.squeeze([dim for dim in value.dims[1:] if value.sizes[dim] == 1], drop=True)


@dataclass(frozen=True)
class _Panel:
    """One panel: a variable of all Measurements as curves, or of one of them as a map."""

    name: str
    shown: Sequence[_Shown]
    is_map: bool = False


def measurement_figure(
    measurements: xr.Dataset | Mapping[str, xr.Dataset],
    *,
    variables: str | Sequence[str] | None = None,
    log: str | Sequence[str] = (),
    title: str = "",
) -> Figure:
    """Figure of a Measurement, or of several by label, such as ``{"A": first, "untrained twin": second}``.

    Each variable has one panel with the mean over replicates and its interval over depth, layer, time or its only axis;
    NAME_null is dotted. Several Measurements are curves of different color in the same panel. A variable with an axis
    ``head``, or with a second numeric axis of more than five entries, is a map, one for each Measurement, on a common
    color scale. The title is ``title`` or, for a single Measurement, its attributes model and title. A variable of
    ``paired_difference`` has a line at 0. A few points far from the others are arrows at the edge with their values.
    Two replicates are drawn as thin lines or dots instead of a band. Replicates are reduced first
    (``reduce_replicates``).

    ``variables`` selects the variables by name; by default all that the Measurements have in common, at most 12.
    ``log`` names variables to draw on a log axis; otherwise an axis is a log axis only if the variable has the
    attribute scale = "log" and spans more than a factor of 30.

    Raises HelmscopeError for anything but Measurements, for unknown names, and for a variable with more axes than a
    panel can show: select some of its entries first.

    >>> import xarray as xr
    >>> width = xr.Dataset({"width": (("layer", "prompt"), [[1.0, 2.0, 4.0], [3.0, 4.0, 5.0]])})
    >>> figure = measurement_figure({"A": width, "twin": width + 1})
    >>> [panel.get_title(loc="left") for panel in figure.axes], [len(panel.lines) for panel in figure.axes]
    (['width'], [2])
    """
    shown = _reduced_by_label(measurements)
    names, omitted = _choose_variables(shown, variables)
    panels = [panel for name in names for panel in _panels(name, shown)]
    logged = {_known_variable(name, shown) for name in ([log] if isinstance(log, str) else log)}
    # maps of the same variable are side by side
    columns = (
        min(ACROSS, len(panels)) if len(shown) == 1 or not any(panel.is_map for panel in panels) else min(4, len(shown))
    )
    rows = -(-len(panels) // columns)
    with styled():
        figure = blank_figure(max(WIDTH * columns, 4.6), max(map(_panel_height, panels)) * rows + HEADING)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for place, panel in zip(axes, panels, strict=False):
            if panel.is_map:
                (each,), name = panel.shown, panel.name
                value = each.value(name)
                heading = ": ".join(filter(None, (each.label, _panel_title(value, name))))
                shared = np.concatenate([as_floats(other.value(name), name).ravel() for other in shown])
                draw_map(figure, place, value, shared, title=heading, log=name in logged)
            else:
                _draw_curves(place, panel, log=panel.name in logged)
        for place in axes[len(panels) :]:
            place.remove()
        title = title or (_own_title(shown[0].data) if len(shown) == 1 else "")
        figure.suptitle(plain("\n".join(filter(None, (title, _caption(shown, panels, omitted))))), fontsize=9)
        if len(shown) > 1:
            _draw_legend(figure, axes, panels)
    return figure


def _reduced_by_label(measurements: Any) -> list[_Shown]:
    """The Measurements, reduced; raises HelmscopeError for anything else."""
    by_label = measurements if isinstance(measurements, Mapping) and not _is_dataset(measurements) else None
    if by_label is not None and not by_label:
        raise HelmscopeError("measurements is empty, but it must hold at least one Measurement")
    shown = []
    for label, data in ({"": measurements} if by_label is None else by_label).items():
        if not _is_dataset(data):
            name = "measurements" if by_label is None else f"measurements['{label}']"
            raise HelmscopeError(
                f"{name} is {type_with_article(data)}, but it must be a Measurement (xarray Dataset), such as "
                "hs.track(recording, order=hs.order_parameter)"
            )
        replicate = replicate_axis(data) if keeps_replicates(data) else str(data.attrs.get("replicate", "replicate"))
        shown.append(_Shown(str(label), reduced(data), replicate, single_replicates(data)))
    return shown


def _is_dataset(value: object) -> bool:
    return hasattr(value, "data_vars")


def _known_variable(name: object, shown: Sequence[_Shown]) -> str:
    return check_name("variable of the measurements", str(name), _common_variables(shown))


def _common_variables(shown: Sequence[_Shown]) -> list[str]:
    return [name for name in variables(shown[0].data) if all(name in each.data for each in shown)]


def _choose_variables(shown: Sequence[_Shown], chosen: str | Sequence[str] | None) -> tuple[list[str], int]:
    """The variables to draw, and the number of those that are left out."""
    if chosen is not None:
        names = [_known_variable(name, shown) for name in ([chosen] if isinstance(chosen, str) else chosen)]
        obstacles = list(filter(None, (_obstacle(name, shown) for name in names)))
        if obstacles or not names:
            raise HelmscopeError(obstacles[0] if obstacles else "variables is empty, but it must name at least one")
        return names, 0
    common = _common_variables(shown)
    if not common:
        held = " and ".join(str(variables(each.data)) for each in shown)
        raise HelmscopeError(f"measurements hold {held}, but they must have a variable in common to be compared")
    drawn = [name for name in common if _obstacle(name, shown) is None][:MAX_VARIABLES]
    if not drawn:
        raise HelmscopeError(str(_obstacle(common[0], shown)))
    return drawn, len(common) - len(drawn)


def _obstacle(name: str, shown: Sequence[_Shown]) -> str | None:
    """Why a variable cannot be drawn, in one sentence; None if it can."""
    values = [each.value(name) for each in shown]
    dims = [tuple(map(str, value.dims)) for value in values]
    for other in dims[1:]:
        if other != dims[0]:
            return f"'{name}' has the axes {dims[0]} and {other}, but Measurements in one panel need the same axes"
    if not any(bool(value.notnull().any()) for value in values):
        return f"'{name}' holds no number, but at least one is needed for a picture"
    remedy = "select some entries with measurement.isel(...)"
    if len(dims[0]) > 2:
        return f"'{name}' has the axes {dims[0]} besides replicates, but a panel shows at most two: {remedy}"
    curves = sum(value.shape[1] if value.ndim == 2 else 1 for value in values)
    if curves > MAX_CURVES and not _is_map(values[0]):
        return f"'{name}' has {curves} curves along '{dims[0][1]}', but a panel shows at most {MAX_CURVES}: {remedy}"
    return None


def _is_map(value: xr.DataArray) -> bool:
    """Whether a variable is drawn as a map: it has two numeric axes, the second one of heads or with many entries."""
    if value.ndim != 2 or any(value[dim].dtype.kind not in "fiu" for dim in value.dims) or value.shape[0] < 2:
        return False
    return value.dims[1] == "head" or value.shape[1] > len(COLORS)


def _panels(name: str, shown: Sequence[_Shown]) -> Iterator[_Panel]:
    if _is_map(shown[0].value(name)):
        yield from (_Panel(name, [each], is_map=True) for each in shown)
    else:
        yield _Panel(name, shown)


def _panel_height(panel: _Panel) -> float:
    """The height of a panel in inches; a map of heads needs a line of text for every layer."""
    value = panel.shown[0].value(panel.name)
    return max(HEIGHT, 0.17 * value.shape[0] + 0.9) if panel.is_map and "head" in value.dims else HEIGHT


def _draw_points(panel: Axes, content: _Panel, *, log: bool) -> None:
    """Draws a variable without axes: one point with its interval for each Measurement."""
    for k, (each, color) in enumerate(zip(content.shown, _colors(len(content.shown)), strict=True)):
        bars = [
            as_floats(entry, content.name)[:, 0] for entry in (each.value(content.name), *_band(each, content.name))
        ]
        draw_curve(panel, np.array([float(k)]), (bars[0], bars[1], bars[2]), each.label, color, categorical=True)
        singles = [as_floats(single, content.name)[:, 0] for single in each.single_values(content.name)]
        draw_singles(panel, np.array([float(k)]), singles, color, categorical=True)
        if (null := _null(each, content.name)) is not None:
            panel.plot([k - 0.3, k + 0.3], [float(null)] * 2, color=color, linestyle=":", label="_null")
    panel.set_xticks(range(len(content.shown)), [plain(textwrap.shorten(each.label, 28)) for each in content.shown])
    panel.set_xlim(-0.6, len(content.shown) - 0.4)
    _draw_zero_line(panel, content.shown[0].value(content.name))
    if log:
        panel.set_yscale("log")
    panel.set_title(plain(_panel_title(content.shown[0].value(content.name), content.name)), loc="left", fontsize=9)


def _draw_curves(panel: Axes, content: _Panel, *, log: bool) -> None:
    """Draws a variable of every Measurement: one curve each, or one for each entry of its second axis."""
    name, values = content.name, [each.value(content.name) for each in content.shown]
    if not values[0].ndim:
        _draw_points(panel, content, log=log)
        return
    families = [curve_labels(value) for value in values]
    colors = iter(_colors(sum(map(len, families))))
    drawn: list[Any] = []
    curves: list[DrawnCurve] = []
    for each, value, family in zip(content.shown, values, families, strict=True):
        x, categories = positions(value)
        bars = [as_floats(entry, name) for entry in (value, *_band(each, name))]
        singles = [as_floats(single, name) for single in each.single_values(name)]
        null, drawn = _null(each, name), drawn + bars
        for k, entry in enumerate(family):
            color, label = next(colors), ", ".join(filter(None, (each.label, entry))) or "_only"
            categorical = categories is not None
            place = x + (_sidestep(content.shown.index(each), k, len(families), len(family)) if categorical else 0)
            edges = (bars[0][:, k], bars[1][:, k], bars[2][:, k])
            draw_curve(panel, place, edges, label, color, categorical=categorical)
            draw_singles(panel, place, [single[:, k] for single in singles], color, categorical=categorical)
            curves += [] if categorical else [DrawnCurve(place, bars[0][:, k], color)]
            if null is not None:
                level = as_floats(null.broadcast_like(value).transpose(*value.dims), name)[:, k]
                panel.plot(x, level, color=color, linestyle=":", label="_null")
        if categories is not None:
            panel.set_xticks(x, categories)
            panel.set_xlim(-0.5, len(categories) - 0.5)
    panel.set_xlabel(plain(axis_name(values[0], values[0].dims[0])))
    whole_ticks(panel.xaxis, values[0], values[0].dims[0])
    _draw_zero_line(panel, values[0])
    if max(map(len, families)) > 1:
        panel.legend(fontsize=7, loc="best")
    if log or (values[0].attrs.get("scale") == "log" and spans_decades(*drawn)):
        panel.set_yscale("log")
    elif curves:
        cut_outlying(panel, curves)
    panel.set_title(plain(_panel_title(values[0], name)), loc="left", fontsize=9)


def _draw_zero_line(panel: Axes, value: xr.DataArray) -> None:
    """Marks 0, where the two Measurements of a difference are equal."""
    if "difference" in value.attrs:
        panel.axhline(0.0, color="#8a8f98", linewidth=0.9, zorder=0, label="_zero")


def _sidestep(measurement: int, entry: int, measurements: int, entries: int) -> float:
    """The shift by which points of the same category stand side by side."""
    total, index = measurements * entries, measurement * entries + entry
    return min(0.12, 0.6 / total) * (index - (total - 1) / 2)


def _band(shown: _Shown, name: str) -> Iterator[xr.DataArray]:
    """The edges of the band of a variable, with the axes of ``shown.value(name)``."""
    dims, hidden = shown.value(name).dims, not shown.has_band(name)
    for edge in band(shown.data, name):
        yield _with_axes(edge * np.nan if hidden else edge, dims)


def _with_axes(value: xr.DataArray, dims: Sequence[Hashable]) -> xr.DataArray:
    """The variable without its axes of a single entry that are not among ``dims``, and with these in order."""
    return value.squeeze([dim for dim in value.dims if dim not in dims], drop=True).transpose(*dims)


def _null(shown: _Shown, name: str) -> xr.DataArray | None:
    """The null of a variable; None if it has none, or one with other axes."""
    null = shown.data.get(f"{name}_null")
    return null if null is not None and set(null.dims) <= set(shown.value(name).dims) else None


def _own_title(data: xr.Dataset) -> str:
    """The model of a Measurement, and what was done to it, as far as its attributes say so."""
    return ": ".join(str(data.attrs[name]) for name in ("model", "title") if data.attrs.get(name))


def _panel_title(value: xr.DataArray, name: str) -> str:
    """The name of a variable with its unit and, for a difference, what was subtracted from what."""
    title = str(value.attrs.get("long_name", name.replace("_", " ")))
    title += f" ({value.attrs['units']})" if "units" in value.attrs else ""
    title += f": {value.attrs['difference']}" if "difference" in value.attrs else ""
    return textwrap.fill(title, LETTERS)


def _colors(count: int) -> list[Any]:
    if count <= len(COLORS):
        return list(COLORS[:count])
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0, 0.85, count)))  # without the yellow end, pale on white


def _caption(shown: Sequence[_Shown], panels: Sequence[_Panel], omitted: int) -> str:
    """What lines, bands and maps are, the number of replicates, and the number of variables left out."""
    names = dict.fromkeys(panel.name for panel in panels)
    counts = sorted({each.count(name) for each in shown for name in names})
    number = pluralized(counts[-1], shown[0].replicate)
    number = number if len(counts) == 1 else f"{counts[0]:,} to {number}"
    bands = list(dict.fromkeys(band_text(each.data, name) for name in names for each in shown if each.has_band(name)))
    medians = [text.endswith("median") for text in bands] or [False]
    center = "median" if all(medians) else "mean or median" if any(medians) else "mean"
    curves = [panel.name for panel in panels if not panel.is_map]
    parts = [f"{number}: no interval" if counts == [1] else f"{center} over {number}"]
    if curves and counts != [1] and bands:
        parts.append(f"band: {', '.join(bands)}")
    singles = [each for each in shown if not all(map(each.has_band, curves))]
    if singles:
        parts.append(f"thin lines or dots: each {singles[0].replicate}")
    if any(_null(each, name) is not None for name in curves for each in shown):
        parts.append("dotted: null")
    if omitted:
        parts.append(f"{pluralized(omitted, 'variable')} not shown")
    return "; ".join(parts)


def _draw_legend(figure: Figure, axes: Sequence[Axes], panels: Sequence[_Panel]) -> None:
    """One legend of the Measurements below all panels, unless the panels have legends or labels of their own."""
    for place, panel in zip(axes, panels, strict=False):
        if not panel.is_map and place.get_legend() is None and panel.shown[0].value(panel.name).ndim:
            handles, labels = place.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
            return
