"""The panel of a generator test: how fast the remainder of its expansion falls with the size of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.plots.families import title_and_legend
from helmscope.plots.style import COLORS
from helmscope.plots.variable_panel import plain

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

ORDERS = (2, 3)  # of the remainder after the drift, and after drift and second moment
GRAY = "#8a8f98"
ACROSS = 165.0  # points


def draw_slopes(panel: Axes, data: xr.Dataset) -> None:
    """Draws the remainders of a reduced ``generator_test`` over the scale s of its steps, medians over layers, by kind
    of probe: after the drift as lines, after drift and second moment dashed, and gray lines of slope 2 and 3.

    >>> import helmscope as hs
    >>> from helmscope.plots.style import new_figure
    >>> run = hs.integrate(hs.SA(beta=1.0), hs.Uniform(8, 3).sample(4, seed=0), times=[0.0, 1.0], stepper=hs.Layer())
    >>> _, (panel,) = new_figure(1, 1)
    >>> draw_slopes(panel, hs.reduce_replicates(hs.observe.generator_test(run)))
    >>> panel.get_xscale(), panel.get_yscale()
    ('log', 'log')
    """
    scales = np.asarray(data["scale"].values, dtype=np.float64)
    kinds = [str(kind) for kind in data["kind"].values]
    layers = [dim for dim in data["remainder"].dims if dim not in ("scale", "kind")]
    for name, style in (("remainder", "-"), ("remainder_second_moment", "--")):
        medians = data[name].median(layers).transpose("scale", "kind").values
        for k, kind in enumerate(kinds):
            label = plain(kind) if style == "-" else "_second"
            panel.plot(scales, medians[:, k], style, color=COLORS[k % len(COLORS)], linewidth=1.2, label=label)
        last = medians[-1][np.isfinite(medians[-1])]
        start = np.median(last) / 3 if len(last) else np.nan  # below the curves, which would cover it
        panel.plot(scales, start * (scales / scales[-1]) ** ORDERS[style == "--"], ":", color=GRAY, label="_slope")
    panel.set(xscale="log", yscale="log")
    panel.set_xticks(scales[::2], [f"1/{round(1 / s)}" if s < 1 else "1" for s in scales[::2]])
    panel.minorticks_off()
    panel.set_xlabel("size s of the step", fontsize=8)
    title = "generator test: remainder after the drift\n(dashed: and second moment; gray: slopes\n2 and 3)"
    handles = [line for line in panel.lines if not str(line.get_label()).startswith("_")]
    title_and_legend(panel, title, handles, size=8.0, wide=ACROSS)
