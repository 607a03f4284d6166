"""The figure of the free energy of a density over time, with its rate of decrease."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.plots.canvas import GRAY
from helmscope.plots.style import COLORS, blank_figure, spans_decades, styled, use_log_scale
from helmscope.plots.variable_panel import plain
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import NDArray

    from helmscope.plots.figure import Figure

MAX_MARKED = 25  # differences drawn as markers


def free_energy_figure(measurement: xr.Dataset, *, title: str = "") -> Figure:
    """Figure of a ``density_overview`` with a free energy F: F over time, and its rate of decrease -dF/dt by its
    formula as a curve, with the differences of F between stored times as markers, which lie on it if the times are
    dense enough.

    Raises HelmscopeError for a Measurement without ``free_energy`` and ``free_energy_rate``, as that of SA, which has
    no free energy.

    >>> from helmscope.fields.attention import USA
    >>> from helmscope.meanfield import CircleGrid, Density, evolve
    >>> from helmscope.observe.density_overview import density_overview
    >>> start = Density.von_mises_fisher(CircleGrid(degree=32), kappa=0.5)
    >>> figure = free_energy_figure(density_overview(evolve(USA(beta=1.0), start, times=[0, 0.5, 1])))
    >>> [panel.get_title(loc="left") for panel in figure.axes]
    ['free energy F', 'rate of decrease -dF/dt']
    """
    variables = getattr(measurement, "data_vars", {})
    for name in ("free_energy", "free_energy_rate"):
        if name not in variables:
            raise HelmscopeError(
                f"measurement lacks {name}, but it must be a density_overview of USA, of a force or of pure diffusion: "
                "SA has no free energy"
            )
    data = measurement.isel(system=0) if "system" in measurement.dims else measurement
    times, energy, rate = (np.asarray(data[name].values) for name in ("time", "free_energy", "free_energy_rate"))
    with styled():
        figure = blank_figure(8.6, 3.3)
        left, right = figure.subplots(1, 2)
        left.plot(times, energy, color=COLORS[0], marker="o" if len(times) <= 12 else "", markersize=3)
        left.set_title("free energy F", loc="left", fontsize=9)
        middles, slopes = _differences(times, energy)
        right.plot(times, -rate, color=COLORS[1], label="by its formula")
        right.plot(
            middles, -slopes, "o", color=COLORS[0], markersize=3.5, markerfacecolor="none", label="differences of F"
        )
        right.set_title("rate of decrease -dF/dt", loc="left", fontsize=9)
        if (rate < 0).all() and spans_decades(-rate):
            use_log_scale(right)
        else:
            right.axhline(0, color=GRAY, linewidth=0.8, zorder=0, label="_zero")
        right.legend(fontsize=8, loc="best")
        for panel in (left, right):
            panel.set(xlabel="time")
        if title:
            figure.suptitle(plain(title), fontsize=9)
        return figure


def _differences(times: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """The slopes between neighboring times at their middles, thinned evenly."""
    middles, slopes = (times[1:] + times[:-1]) / 2, np.diff(values) / np.diff(times)
    every = max(1, -(-len(middles) // MAX_MARKED))
    return middles[::every], slopes[::every]
