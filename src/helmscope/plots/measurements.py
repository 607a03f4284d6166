"""The figure of all measurements of a system, such as ``measure`` returns: one page of panels over depth."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.plots.families import title_and_legend
from helmscope.plots.limits import DrawnCurve, cut_outlying, tidy_axis
from helmscope.plots.maps import draw_map
from helmscope.plots.slopes import draw_slopes
from helmscope.plots.style import COLORS, blank_figure, styled
from helmscope.plots.variable_panel import (
    as_floats,
    axis_name,
    curve_labels,
    draw_curve,
    plain,
    positions,
    variables,
    whole_ticks,
)
from helmscope.stats.reduce import band, reduced
from helmscope.types import HelmscopeError, keeps_replicates, pluralized, replicate_axis, type_with_article

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

    from helmscope.plots.figure import Figure

STATE_AXES = ("depth", "layer", "time")
OTHER_AXES = ("sigma", "temperature", "edit", "kind")  # of measurements under edits
ACROSS, WIDTH, HEIGHT, HEADING = 4, 2.9, 2.15, 0.7  # panels in a row; inches
MAX_PANELS, MAX_CURVES, LETTERS = 6, 5, 37  # of a measurement; of a panel; of a title in a line
MANY, ACROSS_INCH = 8, 14.5  # measurements of which all variables fit on a page; letters of the caption in an inch
PANEL, FONT = 165.0, 8.0  # points across a panel; of a title
HALF_COLORS = {"attention": COLORS[0], "mlp": COLORS[1], "cross": COLORS[2]}
EDIT_COLORS = (*COLORS, "#8a8f98", "#b03060")
SPELLED = {"mlp": "MLP", "jko": "JKO", "jacobian": "Jacobian"}
# the variables of each measurement that are drawn where there are many measurements
PAGE: dict[str, tuple[str, ...]] = {
    "kernel_statistics": ("row_entropy", "effective_keys"),
    "attention_drift": ("total_drift",),
    "attention_diffusion": ("total_nu_token_sampling",),
    "mlp_force": ("force_length", "gradient_length_unit_sphere"),
    "depth_steps": ("median_angle", "update_cosine", "radius"),
    "bistochasticity": ("balance_kl",),
    "gate_sparsity": ("gate_sparsity",),
    "effective_beta": ("beta_without_self", "r_squared_without_self"),
    "transport_ratio": ("ratio_from_start",),
    "attention_diffusion_spectrum": ("total_sigma_rank",),
    "attention_surface_divergence": ("total_surface_divergence",),
    "mlp_jacobian": ("antisymmetric_share",),
    "free_energy_along_depth": ("free_energy",),
    "entropy_along_depth": ("gaussian_entropy", "neighbor_entropy"),
    "generator_test": ("explained_share",),
    "layer_whitening": ("antisymmetric_share_change",),
    "perturbation_growth": ("growth",),
    "jko_step_test": ("gap_closed_share",),
    "mobility_test": ("antisymmetric_share",),
    "mlp_swirl_bound": ("swirl_share_bound",),
}
# the variables that are drawn first, where a measurement has more than fit
FIRST = {
    "kernel_statistics": ("row_entropy", "effective_keys", "largest_weight", "first_token_mass", "bistochastic_defect"),
    "depth_steps": ("median_angle", "update_cosine", "net_angle", "radius"),
    "generator_test": (
        "explained_share",
        "explained_share_second_moment",
        "explained_share_by_kind",
        "splitting_defect",
        "explained_share_second_moment_and_sigma",
    ),
    "transport_ratio": ("ratio", "ratio_from_start", "relative_step"),
    "entropy_along_depth": ("gaussian_entropy", "matrix_entropy", "neighbor_entropy", "surface_fisher_information"),
    "free_energy_along_depth": (
        "free_energy",
        "free_energy_change",
        "gaussian_entropy",
        "gaussian_entropy_change",
        "nu",
    ),
    "mlp_entropy_change": ("entropy_change",),
    "effective_beta": ("beta_without_self", "r_squared_without_self"),
    "query_key_noise": ("ratio",),
    "query_key_noise_by_layer": ("ratio", "kl"),
    "query_key_edit_damage": ("ratio",),
    "query_key_metric": ("symmetric_share", "qk_ov_alignment"),
    "attention_sinks": ("first_token_mass", "sink_value_norm_ratio"),
    "sink_constancy": ("write_cosine", "write_explained_share"),
    "sink_damage": ("kl",),
    "layer_ablation_damage": ("kl", "repaired_share"),
    "head_ablation_damage": ("kl", "effective_keys"),
    "fourier_band_damage": ("kl",),
    "attention_temperature_damage": ("kl", "prediction_entropy_change"),
    "loss_gradient_cosine": ("cosine",),
    "cloud_projection": ("growth_ratio", "idempotence_defect"),
}
# of a variable with too many axes, the entries that are drawn
ENTRIES: dict[str, dict[str, Any]] = {
    "layer_ablation_damage": {"part": "layer"},
    "head_ablation_damage": {"kind": "zero"},
    "loss_gradient_cosine": {"scale": 0.0},
}
# what is drawn over a variable: its prediction, in a few words
OVER = {
    "free_energy_along_depth": {
        f"{kind}_{name}": (measured, text)
        for kind, text in (("predicted", "predicted"), ("gaussian_predicted", "predicted, Gaussian"))
        for change in ("", "_change")
        for name, measured in (
            (f"free_energy{change}", f"free_energy{change}"),
            (f"entropy{change}", f"gaussian_entropy{change}"),
        )
    },
    "mlp_entropy_change": {"first_order_entropy_change": ("entropy_change", "first order")},
}


def measurements_figure(measured: Mapping[str, xr.Dataset], *, title: str = "") -> Figure:
    """Figure of Measurements by name, as ``measure`` returns them: for each a few panels over depth, layer or time, and
    of edits over their size or kind.

    Each curve is the mean over replicates with its interval. Values over depth of a recording are marked by the half of
    a layer that they describe, attention and MLP; variables with heads are maps of layer and head. What is predicted is
    laid over what is measured, dashed, with its misfit. A few points far from the others, such as those of the first
    block, are arrows at the edge with their values. Of more than eight Measurements the main variables are drawn,
    without predictions and numbers in maps; of fewer up to six each, and ``measured["mlp_force"].plot()`` shows up to
    twelve. Raises HelmscopeError for anything else than Measurements, and if none of them has an axis depth, layer or
    time.

    >>> import xarray as xr
    >>> steps = xr.Dataset({"angle": (("depth", "prompt"), [[0.1, 0.2], [0.2, 0.2]])}, {"depth": [1, 2]})
    >>> [panel.get_title(loc="left") for panel in measurements_figure({"depth_steps": steps}).axes]
    ['depth steps: angle']
    """
    panels: list[tuple[str, xr.Dataset, str]] = []
    page = len(measured) > MANY
    for name, each in measured.items():
        if not hasattr(each, "data_vars"):
            raise HelmscopeError(f"measured['{name}'] is {type_with_article(each)}, but it must be a Measurement")
        data = each if _of_heads(each) else reduced(each)
        data = data.sel({axis: entry for axis, entry in ENTRIES.get(name, {}).items() if axis in data.dims})
        panels += [(name, data, variable) for variable in _chosen(name, data, page=page)]
        panels += [(name, data, "")] if "remainder" in data and "scale" in data.remainder.dims else []
    if not panels:
        raise HelmscopeError("measured has no variable over depth, layer or time, but a figure needs one")
    columns = min(ACROSS, len(panels))
    rows = -(-len(panels) // columns)
    caption = textwrap.fill(_caption(measured, [name for name, _, _ in panels]), round(ACROSS_INCH * WIDTH * columns))
    with styled():
        figure = blank_figure(WIDTH * columns, HEIGHT * rows + HEADING)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for place, (name, data, variable) in zip(axes, panels, strict=False):
            if variable:
                _draw(figure, place, name, data, variable, page=page)
            else:
                draw_slopes(place, data)
        for place in axes[len(panels) :]:
            place.set_axis_off()
        _draw_legend(figure, panels)
        figure.suptitle(plain(f"{title}\n{caption}" if title else caption), fontsize=9)
    return figure


def _of_heads(measurement: xr.Dataset) -> bool:
    """Whether the replicates are layers, so that there are values of single heads, without a band."""
    return keeps_replicates(measurement) and replicate_axis(measurement) == "layer" and "head" in measurement.dims


def _caption(measured: Mapping[str, xr.Dataset], drawn: Sequence[str]) -> str:
    """What the curves and bands are means of, and what the page does not have, in sentences."""
    by_count: dict[str, list[str]] = {}
    for name in dict.fromkeys(drawn):
        if not _of_heads(measured[name]):
            each = reduced(measured[name])
            replicate = str(each.attrs.get("replicate", replicate_name(measured[name])))
            by_count.setdefault(pluralized(int(each.attrs.get("n", 0)), replicate), []).append(_words(name))
    if not by_count:
        return "One value for each head."
    main = max(by_count, key=lambda count: len(by_count[count]))
    others = [f"over {count} for {', '.join(names)}" for count, names in by_count.items() if count != main]
    sentences = [", ".join([f"Means over {main}", *others]) + "; bands are 95 % intervals."]
    if len(measured) > MANY:
        sentences.append('The main variables are shown; measured["NAME"].plot() draws more of one measurement.')
    if missing := [_words(name) for name in measured if name not in drawn]:
        sentences.append(f"Not shown: {', '.join(missing)}.")
    return " ".join(sentences)


def _words(name: str) -> str:
    return " ".join(SPELLED.get(word, word) for word in name.split("_"))


def replicate_name(measurement: xr.Dataset) -> str:
    """The name of the replicates of a Measurement; "replicate" if it was reduced and does not say.

    >>> import xarray as xr
    >>> replicate_name(xr.Dataset({"rank": ("prompt", [1.0])}))
    'prompt'
    """
    try:
        return str(replicate_axis(measurement))
    except HelmscopeError:
        return "replicate"


def _chosen(name: str, data: xr.Dataset, *, page: bool) -> list[str]:
    """The variables to draw: those over depth, layer, time, or the size or kind of an edit, and at most one further
    axis; the main ones on a page of many measurements.
    """
    possible = []
    for variable in variables(data):
        axes = [str(dim) for dim in data[variable].dims if data[variable].sizes[dim] > 1]
        along = any(dim in (*STATE_AXES, *OTHER_AXES) for dim in axes)
        if along and len(axes) <= 2 and bool(data[variable].notnull().any()):
            possible.append(variable)
    main = [variable for variable in PAGE.get(name, possible[:1]) if variable in possible]
    if page:
        return main
    first = [variable for variable in FIRST.get(name, ()) if variable in possible]
    others = [variable for variable in possible if variable not in (*first, *OVER.get(name, ()))]
    return first if first else others[:MAX_PANELS]


def _draw(figure: Figure, panel: Axes, name: str, data: xr.Dataset, variable: str, *, page: bool) -> None:
    value = data[variable].squeeze([dim for dim in data[variable].dims if data[variable].sizes[dim] == 1], drop=True)
    axis = next(str(dim) for axes in (STATE_AXES, OTHER_AXES) for dim in axes if dim in value.dims)
    value = value.transpose(axis, ...)
    title = f"{_words(name)}: {value.attrs.get('long_name', _words(variable))}"
    title += f" ({value.attrs['units']})" if "units" in value.attrs else ""
    shown = "\n".join(textwrap.wrap(title, LETTERS))
    if axis in OTHER_AXES:
        handles = _draw_edits(panel, data, variable, value)
        panel.set_xlabel(axis, fontsize=8)
        tidy_axis(panel)
        _draw_title(panel, shown, handles)
        return
    if value.ndim == 2 and ("head" in value.dims or value.sizes[value.dims[1]] > MAX_CURVES):
        draw_map(figure, panel, value.rename(variable), as_floats(value, variable), title=shown, numbers=not page)
        panel.xaxis.label.set_fontsize(FONT)
        panel.yaxis.label.set_fontsize(FONT)
        panel.set_title(plain(shown), loc="left", fontsize=FONT)
        return
    curves = _draw_curves(panel, data, variable, value, axis)
    over = [] if page else _draw_over(panel, name, data, variable, axis)
    cut_outlying(panel, [*curves, *over], leading=curves[0] if over else None)
    tidy_axis(panel)
    _draw_title(panel, shown, [line for line in panel.lines if not str(line.get_label()).startswith("_")])
    panel.set_xlabel(plain(axis_name(value, axis)), fontsize=8)
    whole_ticks(panel.xaxis, value, axis)


def _draw_title(panel: Axes, title: str, handles: Sequence[Any]) -> None:
    """Writes the title, with a legend below it if there are curves to tell apart."""
    if handles:
        title_and_legend(panel, title, handles, size=FONT, wide=PANEL)
    else:
        panel.set_title(plain(title), loc="left", fontsize=FONT)


def _draw_edits(panel: Axes, data: xr.Dataset, variable: str, value: xr.DataArray) -> list[Any]:
    """Draws a variable over the size of an edit as curves, or over its kind as points with error bars; returns the
    lines that a legend needs.
    """
    low, high = (each.squeeze(drop=True).transpose(*value.dims) for each in band(data, variable))
    x, categories = positions(value)
    numbers, bottom, top = (as_floats(each, variable) for each in (value, low, high))
    labels = curve_labels(value)
    spacing = 0.1 if categories is not None else 0.0
    for k, label in enumerate(labels):
        if np.isnan(numbers[:, k]).all():
            continue
        shifted, bars = x + spacing * (k - (len(labels) - 1) / 2), (numbers[:, k], bottom[:, k], top[:, k])
        draw_curve(panel, shifted, bars, label, EDIT_COLORS[k % len(EDIT_COLORS)], categorical=categories is not None)
    if categories is not None:
        panel.set_xticks(x, categories)
        panel.set_xlim(-0.5, len(categories) - 0.5)
    elif len(x) > 1 and x.min() > 0 and x.max() >= 8 * x.min():
        panel.set_xscale("log")
    if value.attrs.get("averaged_as") == "log(x)":
        panel.set_yscale("log")
    if f"{variable}_null" in data:
        panel.axhline(float(data[f"{variable}_null"].max()), color="#c3c7cd", linewidth=0.8, zorder=0)
    return [line for line in panel.lines if not str(line.get_label()).startswith("_")] if len(labels) > 1 else []


def _draw_over(panel: Axes, name: str, data: xr.Dataset, variable: str, axis: str) -> list[DrawnCurve]:
    """Draws what is predicted for a variable over it."""
    drawn = []
    predictions = [(each, text) for each, (of, text) in OVER.get(name, {}).items() if of == variable and each in data]
    for (each, text), color in zip(predictions, COLORS[2:], strict=False):
        misfit = data.attrs.get(f"{each.removesuffix('_change')}_misfit")
        label = text if misfit is None or not np.isfinite(misfit) else f"{text} (misfit {misfit:.2g})"
        x, y = np.asarray(data[axis].values, dtype=np.float64), as_floats(data[each], each)[:, 0]
        panel.plot(x, y, color=color, linestyle="--", linewidth=1.2, label=plain(label))
        drawn.append(DrawnCurve(x, y, color))
    return drawn


def _draw_curves(panel: Axes, data: xr.Dataset, variable: str, value: xr.DataArray, axis: str) -> list[DrawnCurve]:
    """Draws a variable, one curve for each entry of its second axis."""
    x = np.asarray(value[axis].values, dtype=np.float64)
    low, high = (
        each.transpose(*data[variable].dims).squeeze(drop=True).transpose(axis, ...) for each in band(data, variable)
    )
    columns = [(), *value.dims[1:]]
    family = [None] if len(columns) == 1 else range(value.sizes[value.dims[1]])
    drawn: list[DrawnCurve] = []
    halves = np.asarray(data["half"].values).astype(str) if "half" in data.coords and axis == "depth" else None
    for k, member in enumerate(family):
        y, bottom, top = (
            np.asarray((each if member is None else each.isel({value.dims[1]: member})).values, dtype=np.float64)
            for each in (value, low, high)
        )
        color = COLORS[k % len(COLORS)] if halves is None or member is not None else "#8a8f98"
        label = None if member is None else curve_labels(value)[member]
        drawn.append(DrawnCurve(x, y, color, bottom, top))
        panel.plot(x, y, color=color, linewidth=1.0 if halves is not None else 1.6, label=label)
        panel.fill_between(x, bottom, top, color=color, alpha=0.2, linewidth=0)
        if halves is not None and member is None:
            for half in HALF_COLORS:
                here = halves == half
                style: dict[str, Any] = {"color": HALF_COLORS[half], "markersize": 3, "linestyle": ""}
                panel.plot(x[here], y[here], marker="o", **style)
    if bool(np.nanmin(value.values) < 0 < np.nanmax(value.values)):
        panel.axhline(0, color="#c3c7cd", linewidth=0.8, zorder=0)
    return drawn


def _draw_legend(figure: Figure, panels: list[tuple[str, xr.Dataset, str]]) -> None:
    """The colors of the halves of a layer, if some panel marks them."""
    from matplotlib.lines import Line2D

    halves = [data["half"] for _, data, _ in panels if "half" in data.coords and "depth" in data["half"].dims]
    marked = {str(half) for each in halves for half in np.unique(each.values)}
    handles = [
        Line2D(
            [],
            [],
            color=color,
            marker="o",
            markersize=4,
            linestyle="",
            label=f"{SPELLED.get(half, half)} half-step",
        )
        for half, color in HALF_COLORS.items()
        if half in marked
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
