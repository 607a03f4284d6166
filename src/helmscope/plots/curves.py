"""Curves over time or depth: the mean over the systems of a trajectory, with its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.observe.inner_products import mean_inner_product
from helmscope.observe.order import order_parameter
from helmscope.observe.overview import BOUNDS
from helmscope.observe.rank import effective_rank
from helmscope.observe.track import AT_LEAST_0, token_mean, token_weights, track, with_bounds
from helmscope.plots.limits import tidy_axis
from helmscope.plots.style import COLORS, spans_decades
from helmscope.plots.variable_panel import MAX_MARKERS, axis_name, draw_singles, single_replicates
from helmscope.stats.reduce import band, band_text, reduced
from helmscope.types import Trajectory, pluralized
from helmscope.types.measurement import COMPANIONS

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from torch import Tensor


@dataclass(frozen=True)
class Curves:
    """One panel: its title, functions of tokens by name, and the label of each in the legend."""

    title: str
    quantities: Mapping[str, Callable[..., Tensor]]
    labels: Mapping[str, str] = field(default_factory=dict)


CLUSTERING = Curves(
    "clustering",
    {"mean_inner_product": mean_inner_product, "order_parameter": order_parameter},
    {"mean_inner_product": "mean inner product", "order_parameter": "order parameter |mean x|"},
)
LENGTHS = dict.fromkeys(("radius", "spread", "size"), AT_LEAST_0)
RANK = Curves("effective rank (entropy)", {"effective_rank": effective_rank})


def radius_curves(path: Trajectory) -> list[Curves]:
    """The panel of the mean radius of the tokens, if the trajectory has radii.

    >>> radius_curves(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2)))
    []
    """
    radius = path.radius
    if radius is None:
        return []

    def mean_radius(x: Tensor, weights: Tensor | None = None) -> Tensor:
        return token_mean(radius, token_weights(x, weights))

    return [Curves("mean radius |x|", {"radius": mean_radius})]


def spread_and_size(x: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Root mean square of the distances of points of R^d from their mean, and of their lengths.

    >>> [float(value) for value in spread_and_size(torch.tensor([[3.0, 1.0], [3.0, -1.0]]))]
    [1.0, 3.16227...]
    """
    m = token_weights(x, weights)
    center = (m.unsqueeze(-1) * x).sum(-2, keepdim=True) / m.sum(-1)[..., None, None]
    spread, size = ((points.square().sum(-1) * m).sum(-1) / m.sum(-1) for points in (x - center, x))
    return spread.sqrt(), size.sqrt()


FLAT = Curves(
    "clustering in R^d",
    {
        "spread": lambda x, weights=None: spread_and_size(x, weights)[0],
        "size": lambda x, weights=None: spread_and_size(x, weights)[1],
    },
    {"spread": "rms distance from the mean", "size": "rms length"},
)


def complete(path: Trajectory) -> Trajectory | None:
    """The systems whose states are finite at all times; None if there are none.

    >>> states = torch.eye(2).repeat(2, 3, 1, 1)
    >>> states[1, 0] = torch.nan
    >>> complete(Trajectory(torch.arange(2.0), states))
    <Trajectory: 2 systems x 2 tokens, dimension 2; 2 times, 0 to 1>
    """
    known = _finite_states(path)
    systems = known.all(0)
    return _select(path, torch.ones_like(known[:, 0]), systems) if bool(systems.any()) else None


def single(path: Trajectory, system: int) -> Trajectory:
    """One system at the times at which its states are finite.

    >>> single(Trajectory(torch.arange(2.0), torch.eye(2).repeat(2, 3, 1, 1)), 1)
    <Trajectory: 1 system x 2 tokens, dimension 2; 2 times, 0 to 1>
    """
    known = _finite_states(path)
    return _select(path, known[:, system], torch.arange(known.shape[1], device=known.device) == system)


def measured(path: Trajectory, curves: Sequence[Curves]) -> xr.Dataset:
    """All quantities of every system, as a Measurement with its replicates.

    A quantity without any value, such as the mean over pairs of a single token, is omitted.

    >>> systems = measured(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 3, 2, 2)), [CLUSTERING])
    >>> systems.order_parameter.values.round(4).tolist()
    [[0.7071, 0.7071, 0.7071]]
    """
    functions: dict[str, Any] = {name: function for panel in curves for name, function in panel.quantities.items()}
    tracked = track(path, **functions)
    kept = tracked[[name for name in tracked.data_vars if bool(tracked[name].notnull().any())]]
    return with_bounds(kept, {**BOUNDS, **LENGTHS})


def draw_curves(
    panels: Sequence[Axes],
    curves: Sequence[Curves],
    systems: xr.Dataset | None,
    single_system: xr.Dataset | None = None,
    marks: Sequence[float] = (),
) -> None:
    """Draws each of ``curves`` on a panel: the mean over ``systems`` with its band, or each of two systems as a thin
    line, ``single_system`` dashed, and vertical lines at ``marks``.

    >>> from helmscope.plots.style import new_figure
    >>> path = Trajectory(torch.arange(2.0), torch.eye(2).expand(2, 3, 2, 2), axis="depth")
    >>> _, panels = new_figure(1, 1)
    >>> draw_curves(panels, [CLUSTERING], measured(path, [CLUSTERING]))
    >>> panels[0].get_xlabel(), len(panels[0].lines)
    ('depth', 2)
    """
    means = None if systems is None else reduced(systems)
    singles = [] if systems is None else single_replicates(systems)
    single_means = None if single_system is None else reduced(single_system)
    for panel, content in zip(panels, curves, strict=True):
        for mark in marks:
            panel.axvline(mark, color="#c3c7cd", linewidth=0.7, zorder=0, label="_mark")
        for name, color in zip(content.quantities, COLORS, strict=False):
            label = content.labels.get(name, name)
            if means is not None and name in means:
                _draw_mean(panel, name, label, color, means, singles)
                label = "_one"
            if single_means is not None and name in single_means:
                _draw_dashed(panel, single_means[name], label, color)
        shown = next((data for data in (means, single_means) if data is not None), None)
        panel.set(xlabel="time" if shown is None else axis_name(shown, next(iter(shown.dims))))
        tidy_axis(panel)
        if content.labels and panel.get_legend_handles_labels()[0]:
            # above the panel, so that it does not cover the curves
            place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0}
            panel.legend(ncols=2 if len(panels) == 1 else 1, fontsize=8, **place)
        else:
            panel.set_title(content.title, loc="left", fontsize=9)


def describe_bands(systems: xr.Dataset, replicate: str) -> str:
    """Description of lines and bands for a caption.

    >>> systems = measured(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 3, 2, 2)), [CLUSTERING])
    >>> describe_bands(systems, "system")
    'mean over 3 systems, band: 95 % interval'
    """
    means = reduced(systems)
    n = int(means.attrs["n"])
    if n == 1:
        return f"1 {replicate}: no interval"
    if single_replicates(systems):
        return f"mean over {pluralized(n, replicate)}, thin: each {replicate}"
    bands = dict.fromkeys(band_text(means, str(name)) for name in means.data_vars if not str(name).endswith(COMPANIONS))
    return f"mean over {pluralized(n, replicate)}, band: {', '.join(bands)}"


def _draw_mean(
    panel: Axes, name: str, label: str, color: str, means: xr.Dataset, singles: Sequence[xr.Dataset]
) -> None:
    """Draws the mean of a quantity with its band, or with the single systems if they are too few for one."""
    value = means[name]
    x, y = value[value.dims[0]].values, value.values
    marker = "o" if len(x) <= MAX_MARKERS else ""  # lines between few stored times are only interpolation
    panel.plot(x, y, color=color, label=label, marker=marker, markersize=3)
    if singles:
        draw_singles(panel, x, [single[name].values for single in singles], color)
    else:
        low, high = (edge.values for edge in band(means, name))
        panel.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    if name in LENGTHS and y.min() > 0 and spans_decades(y):
        panel.set_yscale("log")


def _draw_dashed(panel: Axes, value: xr.DataArray, label: str, color: str) -> None:
    """Draws a quantity of the system that is plotted above."""
    style: Any = {"color": color, "linestyle": "--", "linewidth": 0.9, "marker": "x" if len(value) == 1 else ""}
    panel.plot(value[value.dims[0]].values, value.values, label=label, **style)


def _finite_states(path: Trajectory) -> Tensor:
    """Where the states of all tokens of positive weight are finite, (time, batch)."""
    finite = torch.isfinite(path.states).all(-1)
    return (finite if path.weights is None else finite | (path.weights <= 0)).all(-1)


def _select(path: Trajectory, times: Tensor, systems: Tensor) -> Trajectory:
    """The trajectory at some times, for some systems."""
    weights = path.weights
    if weights is not None:
        weights = weights[:, systems] if len(weights) == 1 else weights[times][:, systems]
    return replace(
        path,
        times=path.times[times.to(path.times.device)],
        states=path.states[times][:, systems],
        weights=weights,
        radius=None if path.radius is None else path.radius[times][:, systems],
        tokens=None,
        identities=None,
        outcome=None,
    )
