"""The figure of an overview of a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from helmscope.plots.style import COLORS, new_figure, styled
from helmscope.plots.variable_panel import axis_name, draw_singles, single_replicates
from helmscope.stats.reduce import band, band_text, reduced
from helmscope.types import HelmscopeError, keeps_replicates, pluralized, replicate_axis, type_with_article

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

    from helmscope.plots.figure import Figure


def overview_figure(measurement: xr.Dataset, *, title: str = "") -> Figure:
    """Figure of an ``overview`` in four panels over time or depth: share of close or aligned pairs and order, clusters
    and rank, energy, inner products.

    Bands are 95 % intervals of the mean over systems (two systems are thin lines instead), or two standard errors for a
    Measurement that was reduced without intervals. Raises HelmscopeError unless ``measurement`` is a result of
    ``overview``.

    >>> import torch
    >>> from helmscope.observe.overview import overview
    >>> from helmscope.types import Trajectory
    >>> states = torch.eye(3).expand(2, 4, 3, 3)
    >>> len(overview_figure(overview(Trajectory(torch.tensor([0.0, 1.0]), states), beta=1.0)).axes)
    5
    """
    attributes, variables = getattr(measurement, "attrs", None), getattr(measurement, "data_vars", None)
    if attributes is None or variables is None:
        raise HelmscopeError(f"measurement is {type_with_article(measurement)}, but it must be a result of overview()")
    missing = {"delta", "max_angle", "beta"} - set(attributes)
    if missing or "inner_product_histogram" not in variables:
        raise HelmscopeError(
            f"measurement lacks {sorted(missing) or 'inner_product_histogram'}, but it must be a result of overview()"
        )
    kept = keeps_replicates(measurement)
    replicate = replicate_axis(measurement) if kept else str(measurement.attrs.get("replicate", "replicate"))
    singles = single_replicates(measurement)
    measurement = reduced(measurement)
    lines = f"thin: each {replicate}" if singles else f"bands: {band_text(measurement, 'order_parameter')}"
    caption = f"{pluralized(int(measurement.attrs['n']), replicate)}; {lines}"
    title = f"{title}   ({caption})" if title else caption
    with styled():
        return _draw_figure(measurement, singles, title)


def _draw_figure(measurement: xr.Dataset, singles: Sequence[xr.Dataset], title: str) -> Figure:
    figure, (meeting, clusters, energy, products) = new_figure(2, 2)
    kind = "aligned" if "aligned_pair_share" in measurement else "close"
    _curve(
        meeting,
        measurement,
        singles,
        f"{kind}_pair_share",
        f"{kind} pairs, <x,y> >= {1 - measurement.attrs['delta']:.10g}",
        COLORS[0],
    )
    _curve(meeting, measurement, singles, "order_parameter", "order parameter |mean x|", COLORS[1])
    meeting.set(ylim=(-0.02, 1.05), title="do tokens meet?")
    _curve(
        clusters,
        measurement,
        singles,
        "cluster_count",
        f"clusters within an angle of {measurement.attrs['max_angle']:g}",
        COLORS[2],
    )
    _curve(clusters, measurement, singles, "effective_rank", "effective rank (entropy)", COLORS[4])
    clusters.set(ylim=(0, None), title="how many groups, how many directions?")
    if "interaction_energy" in measurement:
        _curve(
            energy,
            measurement,
            singles,
            "interaction_energy",
            f"interaction energy, beta = {measurement.attrs['beta']:g}",
            COLORS[3],
        )
    energy.set(title="does the energy rise?")
    for panel in (meeting, clusters, energy):
        panel.set(xlabel=_state_axis(measurement)[1])
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="best")
    _heat_map(figure, products, measurement)
    figure.suptitle(title, fontsize=10)
    return figure


def _state_axis(measurement: xr.Dataset) -> tuple[str, str]:
    """The axis of the states and its label."""
    axis = "depth" if "depth" in measurement.dims else "time"
    return axis, axis_name(measurement, axis)


def _curve(
    panel: Axes, measurement: xr.Dataset, singles: Sequence[xr.Dataset], name: str, label: str, color: str
) -> None:
    time, value = measurement[_state_axis(measurement)[0]].values, measurement[name].values
    panel.plot(time, value, color=color, label=label)
    if singles:
        draw_singles(panel, time, [single[name].values for single in singles], color)
        return
    low, high = (edge.values for edge in band(measurement, name))
    panel.fill_between(time, low, high, color=color, alpha=0.2, linewidth=0)


def _heat_map(figure: Figure, panel: Axes, measurement: xr.Dataset) -> None:
    axis, label = _state_axis(measurement)
    share = measurement["inner_product_histogram"].transpose("inner_product", axis)
    if share.sizes[axis] > 1:
        image = panel.pcolormesh(
            share[axis].values, share.inner_product.values, share.values**0.5, shading="nearest", cmap="magma"
        )
        figure.colorbar(image, ax=panel, label="sqrt of the share of pairs")
        # the outer halves of the first and last cells extend beyond the stored times
        panel.set(xlim=share[axis].values[[0, -1]], xlabel=label, ylabel="<x_i, x_j>")
    else:
        panel.plot(share.inner_product.values, share.values[:, 0], color=COLORS[0])
        panel.set(xlabel="<x_i, x_j>", ylabel="share of pairs")
    panel.grid(False)
    panel.set(title="inner products of different tokens")
