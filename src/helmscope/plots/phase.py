"""Figures of phase diagrams: heat maps of the close-pair probability, overlaid with the curve t*(beta)."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.observe.half_times import half_time
from helmscope.observe.hitting_curve import closed_form_curve
from helmscope.plots.style import blank_figure, styled
from helmscope.plots.variable_panel import plain
from helmscope.stats.reduce import reduced
from helmscope.types import HelmscopeError, MissingExtra, pluralized

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

    from helmscope.plots.figure import Figure

ACROSS = 3  # most panels in a row
WIDTH, HEIGHT, HEAD = 3.4, 2.7, 0.75  # inches
OURS, PUBLISHED = "probability", "probability_published"
CURVE = "t*(beta), closed form for orthogonal tokens"
HALF = "P = 1/2"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0 auto; max-width: 90rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #1c2126; }}
h1 {{ font-size: 1.4rem; margin: 0 0 .25rem; }}
p {{ margin: .25rem 0; color: #4d5660; max-width: 60rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{text}</p>
<main role="img" aria-label="{text}">{figure}</main>
</body>
</html>
"""


@dataclass(frozen=True, eq=False)
class _Line:
    """A line over a heat map: connected points, or markers, or both."""

    label: str
    time: Any
    beta: Any
    color: str
    dotted: bool
    connected: bool
    markers: bool

    def visible(self, data: xr.Dataset) -> bool:
        """Whether any of its points is within the times of a diagram; its betas always are."""
        return bool(((self.time >= data.time.values[0]) & (self.time <= data.time.values[-1])).any())


def phase_figure(diagram: xr.Dataset, *, title: str = "") -> Figure:
    """Figure of a phase diagram: heat maps over time and beta, one for each dim, with t*(beta) and the line P = 1/2.

    The curve t*(beta) is evaluated at 201 betas (``closed_form_curve``), the times at which P = 1/2 are interpolated at
    the betas of the diagram and marked there. A line without any point in a panel is omitted. With a single beta or
    time, that axis has one tick, and the lines are markers.

    ``diagram`` is over (beta, time), or over (dim, beta, time). If it contains ``probability_published``, each dim has
    a row of three panels: the probability by the stepper of the diagram, that by the published scheme, and the
    published one minus the other. The title of a panel gives its largest standard error. Raises HelmscopeError unless
    ``diagram`` has ``probability`` over these axes.

    >>> import xarray as xr
    >>> axes = ("beta", "time")
    >>> data = {"probability": (axes, [[0.0, 1.0], [0.0, 0.2]]), "probability_stderr": (axes, [[0.0, 0.0], [0.0, 0.1]])}
    >>> diagram = xr.Dataset(data, {"beta": [1.0, 4.0], "time": [0.0, 8.0]}, {"n": 9, "delta": 1e-3, "tokens": 32})
    >>> len(phase_figure(diagram).axes)  # the panel and its color scale
    2
    """
    data = reduced(diagram)
    slices = _slices(data)
    with styled():
        return _draw_figure(slices, data, title)


def phase_page(diagram: xr.Dataset, *, title: str = "") -> str:
    """Interactive HTML page of a phase diagram, whose tooltips show P, its standard error and t*.

    The heat maps and errors are those of ``phase_figure``. The page is a single file of 5 MB that contains the code of
    plotly and loads nothing else. Raises MissingExtra if plotly is not installed.

    >>> import xarray as xr
    >>> axes = ("beta", "time")
    >>> data = {"probability": (axes, [[0.0, 1.0], [0.0, 0.2]]), "probability_stderr": (axes, [[0.0, 0.0], [0.0, 0.1]])}
    >>> diagram = xr.Dataset(data, {"beta": [1.0, 4.0], "time": [0.0, 8.0]}, {"n": 9, "delta": 1e-3, "tokens": 32})
    >>> phase_page(diagram, title="<b>").count("<title>&lt;b&gt;</title>")
    1
    """
    data = reduced(diagram)
    slices = _slices(data)
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ImportError:
        raise MissingExtra("plotly", "report") from None
    columns = _columns(slices)
    panels = [(part, name) for part in slices for name in _variables(part)]
    rows = math.ceil(len(panels) / columns)
    titles = [html.escape(_panel_title(*panel)).replace("\n", "<br>") for panel in panels]
    figure = make_subplots(rows, columns, subplot_titles=titles, vertical_spacing=0.35 / (rows + 1))
    legend: set[str] = set()
    for index, (part, name) in enumerate(panels):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        figure.add_trace(_heat_map_trace(go, part, name), **place)
        for line in _overlay_lines(part):
            options = {"showlegend": line.label not in legend, "legendgroup": line.label, "name": line.label}
            figure.add_trace(_line_trace(go, line, name, options), **place)
            legend.add(line.label)
        for update, axis in ((figure.update_xaxes, "time"), (figure.update_yaxes, "beta")):
            values = part[axis].values
            update(title_text=axis, range=list(_limits(values)), **place)
            if len(values) == 1:
                update(tickvals=values.tolist(), **place)
    height = 380 * rows + 80
    bar = {"len": 260, "lenmode": "pixels", "yanchor": "top", "y": 1}
    most = max((_extent(each) for each in slices if "difference" in each), default=1.0)
    figure.update_layout(
        height=height,
        template="plotly_white",
        legend={"orientation": "h", "y": -60 / height, "yanchor": "top", "bgcolor": "#9aa5b1"},
        coloraxis={"colorscale": "Viridis", "cmin": 0, "cmax": 1, "colorbar": bar | {"title": "P"}},
        coloraxis2={
            "colorscale": "RdBu_r",
            "cmin": -most,
            "cmax": most,
            "colorbar": bar | {"title": _difference(data).replace(" minus", "<br>minus"), "x": 1.1},
        },
    )
    figure.update_annotations(font_size=12)
    drawn = figure.to_html(full_html=False, include_plotlyjs=True, div_id="phase")
    return _PAGE.format(title=html.escape(title or _title(data)), text=html.escape(_describe_run(data)), figure=drawn)


def _slices(data: xr.Dataset) -> list[xr.Dataset]:
    """One Dataset over (beta, time) for each dim, with ``difference`` if there is a published probability."""
    if OURS not in data or not {"beta", "time"} <= set(data[OURS].dims) <= {"dim", "beta", "time"}:
        raise HelmscopeError(
            "diagram has no 'probability' over beta and time, but it must be a result of phase_diagram()"
        )
    if PUBLISHED in data:
        data = data.assign(difference=data[PUBLISHED] - data[OURS])
    parts = [data.sel(dim=dim) for dim in data.dim.values] if "dim" in data.dims else [data]
    parts = [part.assign_attrs(dim=int(part.dim)) if "dim" in part.coords else part for part in parts]
    return [part.transpose("beta", "time", ...) for part in parts]


def _variables(data: xr.Dataset) -> list[str]:
    return [name for name in (OURS, PUBLISHED, "difference") if name in data]


def _columns(slices: list[xr.Dataset]) -> int:
    return min(ACROSS, len(slices) * len(_variables(slices[0])))


def _panel_title(data: xr.Dataset, name: str) -> str:
    """The contents of a panel and its largest standard error."""
    dim = f"d = {data.attrs['dim']:,}" if "dim" in data.attrs else ""
    if name == "difference":
        return f"{dim}: {_difference(data)}".removeprefix(": ") + "\n"
    which = "" if PUBLISHED not in data else _method(data) if name == OURS else "published scheme (Euler, h = 0.1)"
    error = float(data[f"{name}_stderr"].max())
    accuracy = f"standard error <= {error:.2g}" if math.isfinite(error) else "no standard error"
    return "\n".join(filter(None, (": ".join(filter(None, (dim, which))), accuracy)))


def _method(data: xr.Dataset) -> str:
    """The name of the stepper of a diagram."""
    return str(data.attrs.get("stepper", "helmscope")).partition("(")[0]


def _difference(data: xr.Dataset) -> str:
    return f"published minus {_method(data)}"


def _title(data: xr.Dataset) -> str:
    return f"{data.attrs.get('flow', 'Phase diagram')}: probability P that two tokens have met"


def _describe_run(data: xr.Dataset) -> str:
    parts = []
    if "tokens" in data.attrs:
        parts.append(pluralized(int(data.attrs["tokens"]), "token"))
    if "delta" in data.attrs:
        parts.append(f"met: <x, y> >= 1 - {data.attrs['delta']:g}")
    parts.append(pluralized(int(data.attrs["n"]), "sample"))
    if "seed" in data.attrs:
        parts.append(f"seed {data.attrs['seed']}")
    return ", ".join(parts)


def _overlay_lines(data: xr.Dataset) -> list[_Line]:
    """The lines over a heat map that are visible."""
    beta, single = data.beta.values, data.sizes["beta"] == 1
    half = half_time(data[[OURS, f"{OURS}_stderr"]]).half_time.values
    label = f"{HALF} ({_method(data)})" if PUBLISHED in data else HALF
    lines = [_Line(label, half, beta, "#ffffff", dotted=True, connected=not single, markers=True)]
    if "hitting_time" in data.coords:
        curve = None if single else closed_form_curve(data)
        if curve is None:  # t* between the betas is unknown
            points = (data.hitting_time.values, beta)
            lines.append(_Line(CURVE, *points, "#ff3b30", dotted=False, connected=False, markers=True))
        else:
            points = (curve.fine_hitting_time.values, curve.fine_beta.values)
            lines.append(_Line(CURVE, *points, "#ff3b30", dotted=False, connected=True, markers=False))
    return [line for line in lines if line.visible(data)]


def _line_color(name: str, color: str) -> str:
    """Black instead of white on a map of differences, where white would be invisible."""
    return "#000000" if name == "difference" and color == "#ffffff" else color


def _edges(centers: Any) -> Any:
    """The edges of cells around increasing centers."""
    if len(centers) == 1:
        return np.array([centers[0] - 0.5, centers[0] + 0.5])
    inner = (centers[1:] + centers[:-1]) / 2
    return np.concatenate([[2 * centers[0] - inner[0]], inner, [2 * centers[-1] - inner[-1]]])


def _limits(centers: Any) -> tuple[float, float]:
    """The limits of an axis: the first and the last value, without the outer halves of their cells, so that no time or
    beta appears that was not computed. A single value has a cell of arbitrary width around it.
    """
    ends = _edges(centers) if len(centers) == 1 else centers
    return float(ends[0]), float(ends[-1])


def _extent(data: xr.Dataset) -> float:
    return max(1e-6, float(np.nanmax(np.abs(data["difference"].values), initial=0.0)))


def _draw_figure(slices: list[xr.Dataset], data: xr.Dataset, title: str) -> Figure:
    panels = [(part, name) for part in slices for name in _variables(part)]
    columns = _columns(slices)
    rows = math.ceil(len(panels) / columns)
    figure = blank_figure(max(WIDTH * columns + 0.6, 5.2), HEIGHT * rows + HEAD)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[len(panels) :]:
        spare.set_axis_off()
    images: dict[str, Any] = {}
    most = max((_extent(each) for each in slices if "difference" in each), default=1.0)
    for panel, (part, name) in zip(axes, panels, strict=False):
        scale: Any = {"cmap": "viridis", "vmin": 0, "vmax": 1}
        if name == "difference":
            scale = {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
        images["difference" if name == "difference" else OURS] = _draw_panel(panel, part, name, scale)
    shrink = min(0.9, 2 / rows)
    probabilities = [panel for panel, (_, name) in zip(axes, panels, strict=False) if name != "difference"]
    figure.colorbar(images[OURS], ax=probabilities, label="probability P", shrink=shrink)
    if "difference" in images:
        differences = [panel for panel, (_, name) in zip(axes, panels, strict=False) if name == "difference"]
        figure.colorbar(images["difference"], ax=differences, label=_difference(data), shrink=shrink)
    handles: dict[str, Any] = {}
    for panel in axes:  # in the color of the first panel: on a map of differences a white line is black
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, line)
    if handles:
        place: Any = {"loc": "outside lower center", "ncols": 2, "frameon": True, "facecolor": "#9aa5b1"}
        legend = figure.legend(handles.values(), handles.keys(), **place)
        legend.get_frame().set_linewidth(0)
    figure.suptitle(plain(f"{title or _title(data)}\n{_describe_run(data)}"), fontsize=9)
    return figure


def _draw_panel(panel: Axes, data: xr.Dataset, name: str, scale: dict[str, Any]) -> Any:
    """Draws one heat map with its lines."""
    time, beta = _edges(data.time.values), _edges(data.beta.values)
    image = panel.pcolormesh(time, beta, data[name].values, rasterized=True, **scale)
    for line in _overlay_lines(data):
        style: Any = {"color": _line_color(name, line.color), "linewidth": 1.4, "label": line.label}
        style["linestyle"] = (":" if line.dotted else "-") if line.connected else "none"
        panel.plot(line.time, line.beta, marker="o" if line.markers else "", markersize=3, **style)
    panel.grid(False)
    panel.set(xlim=_limits(data.time.values), ylim=_limits(data.beta.values), xlabel="time", ylabel="beta")
    for axis, values in ((panel.xaxis, data.time.values), (panel.yaxis, data.beta.values)):
        if len(values) == 1:
            axis.set_ticks(values, labels=[f"{values[0]:g}"])
    panel.set_title(plain(_panel_title(data, name)), fontsize=8.5)
    return image


def _line_trace(go: Any, line: _Line, name: str, options: dict[str, Any]) -> Any:
    """One line over the heat map of a variable, without tooltips."""
    color = _line_color(name, line.color)
    mode = "+".join(kind for kind, used in (("lines", line.connected), ("markers", line.markers)) if used)
    style = {"line": {"color": color, "dash": "dot" if line.dotted else "solid", "width": 2}}
    marker = {"marker": {"color": color, "size": 5}} if line.markers else {}
    return go.Scatter(x=line.time, y=line.beta, mode=mode, hoverinfo="skip", **style, **marker, **options)


def _heat_map_trace(go: Any, data: xr.Dataset, name: str) -> Any:
    """One heat map with tooltips."""
    value = data[name].values
    curve = data.hitting_time.values if "hitting_time" in data.coords else np.full(len(data.beta), np.nan)
    hitting_times = np.where(np.isfinite(curve), [f"{t:.4g}" for t in curve], "no closed form")
    stderr = data[f"{name}_stderr"].values if f"{name}_stderr" in data else np.full(value.shape, np.nan)
    errors = np.where(np.isfinite(stderr), np.char.add("+- ", np.char.mod("%.2g", stderr)), "")
    custom = np.stack([errors, np.broadcast_to(hitting_times[:, None], value.shape)], axis=-1)
    quantity = _difference(data) if name == "difference" else "P"
    position, times = "t = %{x:.4g}, beta = %{y:.4g}", "t* = %{customdata[1]}"
    tooltip = f"{position}<br>{quantity} = %{{z:.4f}} %{{customdata[0]}}<br>{times}"
    scale = {"coloraxis": "coloraxis2" if name == "difference" else "coloraxis"}
    place = {"x": data.time.values, "y": data.beta.values, "z": value, "customdata": custom}
    return go.Heatmap(**place, hovertemplate=f"{tooltip}<extra></extra>", **scale)
