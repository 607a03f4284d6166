"""The figure of one or several overviews of trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from helmscope.plots.measurement import draw_figure
from helmscope.plots.shown import Shown, reduced_by_label
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.plots.figure import Figure

VARIABLES = (
    "inner_product_quantile",
    "close_pair_share",
    "order_parameter",
    "cluster_count",
    "clusters_per_token",
    "effective_rank",
    "interaction_energy",
    "inner_product_histogram",
)
PARAMETERS = {
    "max_angle": "clusters within an angle of {:.3g}",
    "delta": "close pairs: inner product >= 1 - {:.3g}",
    "beta": "energy at beta = {:.4g}",
}
WITHOUT_ENERGY = {True: "no energy, which is infinite at beta = 0", False: "beta=... adds the energy"}


def overview_figure(measurements: xr.Dataset | Mapping[str, xr.Dataset], *, title: str = "") -> Figure:
    """Figure of an ``overview``, or of several by label, over time or depth: inner products or close pairs of tokens,
    order parameter, clusters, rank, energy, and the histogram of inner products, whose colors are proportional to the
    root of the share of pairs.

    Bands are 95 % intervals of the mean over systems (two systems are thin lines instead), or two standard errors for a
    Measurement that was reduced without intervals. Several overviews have the same panels, with a color for each, and a
    histogram each. The caption has the parameters of the overview. Raises HelmscopeError unless ``measurements`` is a
    result of ``overview`` or several with variables in common.

    >>> import torch
    >>> from helmscope.observe.overview import overview
    >>> from helmscope.types import Trajectory
    >>> states = torch.eye(3).expand(2, 4, 3, 3)
    >>> figure = overview_figure(overview(Trajectory(torch.tensor([0.0, 1.0]), states), beta=1.0))
    >>> [panel.get_title(loc="left") for panel in figure.axes][:3]
    ['share of pairs that have met', 'order parameter |mean x|', 'number of clusters']
    """
    several = isinstance(measurements, Mapping) and not hasattr(measurements, "data_vars")
    for label, each in (measurements if several else {"": measurements}).items():
        if not is_overview(each):
            name = f"measurements['{label}']" if several else "measurements"
            held = (
                f"a Dataset of {list(each.data_vars)!r:.60}" if hasattr(each, "data_vars") else type_with_article(each)
            )
            raise HelmscopeError(f"{name} is {held}, but it must be a result of overview()")
    shown = reduced_by_label(measurements)
    names = [name for name in VARIABLES if all(name in each.data for each in shown)]
    return draw_figure(shown, names, title=title, note=_parameters(shown))


def is_overview(measurement: object) -> bool:
    """Whether this is a result of ``overview``.

    >>> is_overview(3)
    False
    """
    return {"max_angle", "token_stride"} <= set(getattr(measurement, "attrs", ())) and (
        "inner_product_histogram" in getattr(measurement, "data_vars", ())
    )


def _parameters(shown: list[Shown]) -> str:
    """The parameters of the overviews, and what they lack for want of a parameter."""
    has_energy = all("interaction_energy" in each.data for each in shown)
    parts = []
    for name, text in PARAMETERS.items():
        values = list(dict.fromkeys(each.data.attrs[name] for each in shown if name in each.data.attrs))
        parts += [text.format(values[0])] if len(values) == 1 and (has_energy or name != "beta") else []
    parts += [] if has_energy else [WITHOUT_ENERGY[all("beta" in each.data.attrs for each in shown)]]
    return "; ".join(parts)
