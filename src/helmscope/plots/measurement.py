"""The figure of one or several Measurements: curves with intervals over depth, layer or time, and maps over heads."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.plots.families import CurveStyle, Family, label_colors, legend_handles
from helmscope.plots.limits import DrawnCurve, cut_outlying, tidy_axis
from helmscope.plots.maps import draw_map
from helmscope.plots.shown import Shown, reduced_by_label
from helmscope.plots.style import COLORS, blank_figure, spans_decades, styled
from helmscope.plots.variable_panel import (
    as_floats,
    axis_name,
    curve_labels,
    draw_curve,
    draw_singles,
    plain,
    positions,
    variables,
    whole_ticks,
)
from helmscope.stats.reduce import band_text
from helmscope.types import HelmscopeError, check_name, pluralized

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

    from helmscope.plots.figure import Figure

ACROSS, WIDTH, HEIGHT, HEADING, LINE = 3, 3.3, 2.7, 0.6, 0.16  # panels in a row; inches
MAX_VARIABLES, MAX_CURVES = 12, 12
LETTERS, LETTERS_OF_MAPS = 40, 32  # of a panel's title in a line; where color scales make panels narrower
ACROSS_INCH = 14.5  # letters of the caption


@dataclass(frozen=True)
class _Panel:
    """One panel: a variable of all Measurements as curves, or of one of them as a map."""

    name: str
    shown: Sequence[Shown]
    is_map: bool = False
    is_first: bool = True  # among the maps of the variable


def measurement_figure(
    measurements: xr.Dataset | Mapping[str, xr.Dataset],
    *,
    variables: str | Sequence[str] | None = None,
    log: str | Sequence[str] = (),
    title: str = "",
) -> Figure:
    """Figure of a Measurement, or of several by label, such as ``{"A": first, "untrained twin": second}``.

    Each variable has one panel with the mean over replicates and its interval over depth, layer, time or its only axis;
    NAME_null is dotted. Several Measurements are curves of different color in the same panel, and entries of a further
    axis have different line styles, or colors for a single Measurement. A variable with an axis ``head``, or with a
    second numeric axis of more than five entries, is a map, one for each Measurement, on a common color scale. The
    title is ``title`` or, for a single Measurement, its attributes model and title. A variable of ``paired_difference``
    has a line at 0. A few points far from the others are arrows at the edge with their values.
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
    shown = reduced_by_label(measurements)
    names, omitted = _choose_variables(shown, variables)
    logged = {_known_variable(name, shown) for name in ([log] if isinstance(log, str) else log)}
    return draw_figure(shown, names, omitted, logged=logged, title=title)


def draw_figure(
    shown: Sequence[Shown],
    names: Sequence[str],
    omitted: Sequence[str] = (),
    *,
    logged: Collection[str] = (),
    title: str = "",
    note: str = "",
) -> Figure:
    """Draws the variables of these names, with a caption that names those ``omitted`` and ends with a ``note``.

    >>> import xarray as xr
    >>> width = xr.Dataset({"width": (("layer", "prompt"), [[1.0, 2.0, 4.0], [3.0, 4.0, 5.0]])})
    >>> draw_figure(reduced_by_label(width), ["width"], note="of A").get_suptitle()
    'mean over 3 prompts; band: 95 % interval; of A'
    """
    panels = [panel for name in names for panel in _panels(name, shown)]
    columns, slots = _layout(panels, len(shown))
    rows = -(-len(slots) // columns)
    width = max(WIDTH * columns, 4.6)
    title = textwrap.fill(title or (_own_title(shown[0].data) if len(shown) == 1 else ""), round(ACROSS_INCH * width))
    caption = textwrap.fill(
        "; ".join(filter(None, (_caption(shown, panels, omitted), note))), round(ACROSS_INCH * width)
    )
    above = HEADING + LINE * (title + caption).count("\n")
    letters = LETTERS if not any(panel.is_map for panel in panels) else LETTERS_OF_MAPS
    with styled():
        figure = blank_figure(width, max(map(_panel_height, panels)) * rows + above)
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for place, panel in itertools.zip_longest(axes, slots):
            if panel is None:
                place.remove()
            elif panel.is_map:
                (each,), name = panel.shown, panel.name
                value = each.value(name)
                heading = ": ".join(filter(None, (each.label, _panel_title(value, name, letters))))
                shared = np.concatenate([as_floats(other.value(name), name).ravel() for other in shown])
                draw_map(figure, place, value, shared, title=heading, log=name in logged)
            else:
                _draw_curves(place, panel, log=panel.name in logged, letters=letters)
        figure.suptitle(plain("\n".join(filter(None, (title, caption)))), fontsize=9)
        if len(shown) > 1:
            _draw_legend(figure, panels)
    return figure


def _layout(panels: Sequence[_Panel], count: int) -> tuple[int, list[_Panel | None]]:
    """The number of panels in a row, and what each place holds: maps of the same variable are side by side."""
    if count == 1 or not any(panel.is_map for panel in panels):
        return min(ACROSS, len(panels)), list(panels)
    choices = []
    for columns in (min(count, 4), 4) if all(panel.is_map for panel in panels) else (ACROSS, 4):
        slots: list[_Panel | None] = []
        for panel in panels:
            if panel.is_map and panel.is_first:
                left = -len(slots) % columns
                slots += [None] * (left if 0 < left < min(count, columns) else 0)
            slots.append(panel)
        choices.append((-len(slots) % columns + slots.count(None), columns, slots))
    _, columns, slots = min(choices, key=lambda choice: choice[0])
    return min(columns, len(slots)), slots


def _known_variable(name: object, shown: Sequence[Shown]) -> str:
    return check_name("variable of the measurements", str(name), _common_variables(shown))


def _common_variables(shown: Sequence[Shown]) -> list[str]:
    return [name for name in variables(shown[0].data) if all(name in each.data for each in shown)]


def _choose_variables(shown: Sequence[Shown], chosen: str | Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The variables to draw, and those that are left out."""
    if chosen is not None:
        names = [_known_variable(name, shown) for name in ([chosen] if isinstance(chosen, str) else chosen)]
        obstacles = list(filter(None, (_obstacle(name, shown) for name in names)))
        if obstacles or not names:
            raise HelmscopeError(obstacles[0] if obstacles else "variables is empty, but it must name at least one")
        return names, []
    common = _common_variables(shown)
    if not common:
        held = " and ".join(str(variables(each.data)) for each in shown)
        raise HelmscopeError(f"measurements hold {held}, but they must have a variable in common to be compared")
    drawn = [name for name in common if _obstacle(name, shown) is None][:MAX_VARIABLES]
    if not drawn:
        raise HelmscopeError(str(_obstacle(common[0], shown)))
    return drawn, [name for name in common if name not in drawn]


def _obstacle(name: str, shown: Sequence[Shown]) -> str | None:
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


def _panels(name: str, shown: Sequence[Shown]) -> Iterator[_Panel]:
    if _is_map(shown[0].value(name)):
        yield from (_Panel(name, [each], is_map=True, is_first=each is shown[0]) for each in shown)
    else:
        yield _Panel(name, shown)


def _panel_height(panel: _Panel) -> float:
    """The height of a panel in inches; a map of heads needs a line of text for every layer."""
    value = panel.shown[0].value(panel.name)
    return max(HEIGHT, 0.17 * value.shape[0] + 0.9) if panel.is_map and "head" in value.dims else HEIGHT


def _draw_points(panel: Axes, content: _Panel, *, log: bool, letters: int) -> None:
    """Draws a variable without axes: one point with its interval for each Measurement."""
    for k, (each, color) in enumerate(zip(content.shown, label_colors(len(content.shown)), strict=True)):
        bars = [as_floats(entry, content.name)[:, 0] for entry in (each.value(content.name), *each.band(content.name))]
        draw_curve(panel, np.array([float(k)]), (bars[0], bars[1], bars[2]), each.label, color, categorical=True)
        singles = [as_floats(single, content.name)[:, 0] for single in each.single_values(content.name)]
        draw_singles(panel, np.array([float(k)]), singles, color, categorical=True)
        if (null := each.null(content.name)) is not None:
            panel.plot([k - 0.3, k + 0.3], [float(null)] * 2, color=color, linestyle=":", label="_null")
    panel.set_xticks(range(len(content.shown)), [plain(textwrap.shorten(each.label, 28)) for each in content.shown])
    panel.set_xlim(-0.6, len(content.shown) - 0.4)
    _draw_zero_line(panel, content.shown[0].value(content.name))
    if log:
        panel.set_yscale("log")
    tidy_axis(panel)
    panel.set_title(
        plain(_panel_title(content.shown[0].value(content.name), content.name, letters)), loc="left", fontsize=9
    )


def _draw_curves(panel: Axes, content: _Panel, *, log: bool, letters: int) -> None:
    """Draws a variable of every Measurement: one curve each, or one for each entry of its second axis."""
    name, values = content.name, [each.value(content.name) for each in content.shown]
    if not values[0].ndim:
        _draw_points(panel, content, log=log, letters=letters)
        return
    family = _family(content)
    drawn: list[Any] = []
    curves: list[DrawnCurve] = []
    for m, (each, value, styles) in enumerate(zip(content.shown, values, family.styles, strict=True)):
        x, categories = positions(value)
        bars = [as_floats(entry, name) for entry in (value, *each.band(name))]
        singles = [as_floats(single, name) for single in each.single_values(name)]
        null, drawn = each.null(name), drawn + bars
        for k, (entry, style) in enumerate(zip(family.entries, styles, strict=True)):
            label = ", ".join(filter(None, (each.label, entry))) or "_only"
            categorical = categories is not None
            place = x + (_sidestep(m, k, len(content.shown), len(styles)) if categorical else 0)
            edges = (bars[0][:, k], bars[1][:, k], bars[2][:, k])
            look: Any = {"categorical": categorical, "line": style.style}
            marker = style.marker if categorical else ("o" if style.line == 0 else "")  # which would hide the dashes
            draw_curve(panel, place, edges, label, style.color, **look, marker=marker)
            draw_singles(panel, place, [single[:, k] for single in singles], style.color, **look)
            curves += [] if categorical else [DrawnCurve(place, edges[0], style.color, *edges[1:])]
            if null is not None:
                level = as_floats(null.broadcast_like(value).transpose(*value.dims), name)[:, k]
                panel.plot(x, level, color=style.color, linestyle=":", label="_null")
        if categories is not None:
            panel.set_xticks(x, categories)
            panel.set_xlim(-0.5, len(categories) - 0.5)
    panel.set_xlabel(plain(axis_name(values[0], values[0].dims[0])))
    whole_ticks(panel.xaxis, values[0], values[0].dims[0])
    _draw_zero_line(panel, values[0])
    if log or (values[0].attrs.get("scale") == "log" and spans_decades(*drawn)):
        panel.set_yscale("log")
    elif curves:
        cut_outlying(panel, curves)
    tidy_axis(panel)
    family.draw_legend(panel, _panel_title(values[0], name, letters), categorical=positions(values[0])[1] is not None)


def _family(content: _Panel) -> Family:
    """The curves of a panel."""
    value = content.shown[0].value(content.name)
    labels = tuple(each.label for each in content.shown)
    if "quantile" not in value.dims[1:]:
        return Family(tuple(curve_labels(value)), labels)
    quantiles = tuple(value["quantile"].values.tolist())
    return Family(tuple(f"{100 * each:g} %" for each in quantiles), labels, quantiles)


def _draw_zero_line(panel: Axes, value: xr.DataArray) -> None:
    """Marks 0, where the two Measurements of a difference are equal."""
    if "difference" in value.attrs:
        panel.axhline(0.0, color="#8a8f98", linewidth=0.9, zorder=0, label="_zero")


def _sidestep(measurement: int, entry: int, measurements: int, entries: int) -> float:
    """The shift by which points of the same category stand side by side."""
    total, index = measurements * entries, measurement * entries + entry
    return min(0.12, 0.6 / total) * (index - (total - 1) / 2)


def _own_title(data: xr.Dataset) -> str:
    """The model of a Measurement, and what was done to it, as far as its attributes say so."""
    return ": ".join(str(data.attrs[name]) for name in ("model", "system", "title") if data.attrs.get(name))


def _panel_title(value: xr.DataArray, name: str, letters: int) -> str:
    """The name of a variable with its unit and, for a difference, what was subtracted from what."""
    title = str(value.attrs.get("long_name", name.replace("_", " ")))
    title += f" ({value.attrs['units']})" if "units" in value.attrs else ""
    title += f": {value.attrs['difference']}" if "difference" in value.attrs else ""
    return textwrap.fill(title, letters)


def _caption(shown: Sequence[Shown], panels: Sequence[_Panel], omitted: Sequence[str]) -> str:
    """What lines, bands and maps are, the number of replicates, and the variables left out."""
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
    if any(each.null(name) is not None for name in curves for each in shown):
        parts.append("dotted: null")
    if omitted:
        parts.append(f"not shown: {', '.join(omitted)}")
    return "; ".join(parts)


def _draw_legend(figure: Figure, panels: Sequence[_Panel]) -> None:
    """One legend of the Measurements below all panels, unless no panel has curves in their colors."""
    for panel in panels:
        if panel.is_map or not panel.shown[0].value(panel.name).ndim:
            continue
        family = _family(panel)
        if family.colored_by_label:
            styles = [CurveStyle(each[0].color) for each in family.styles]
            categorical = positions(panel.shown[0].value(panel.name))[1] is not None
            handles = legend_handles(styles, family.labels, categorical=categorical)
            figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
            return
