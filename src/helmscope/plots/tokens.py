"""The figure of a simulation: tokens at a few times, side by side, and curves of their clustering [Geshkovski et al.
2023]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helmscope.plots.canvas import Canvas, are_unit_vectors
from helmscope.plots.curves import (
    CLUSTERING,
    FLAT,
    complete,
    describe_bands,
    draw_curves,
    measured,
    radius_curves,
    single,
)
from helmscope.plots.projection import facing
from helmscope.plots.style import blank_figure, styled
from helmscope.plots.variable_panel import plain
from helmscope.types import HelmscopeError, Trajectory, check_integer, check_real, pluralized, type_with_article

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure
    from numpy.typing import NDArray

    from helmscope.plots.curves import Curves
    from helmscope.plots.figure import Figure

    Floats = NDArray[np.float64]

MAX_PANELS, ACROSS = 6, 3
MAX_TOKENS = 2_000  # plotted in one panel
PANEL, CURVES, SIDE = 2.6, 2.3, 0.9  # inches


def tokens_figure(
    trajectory: Trajectory,
    *,
    system: int = 0,
    panels: int = MAX_PANELS,
    view: tuple[float, float] | None = None,
    title: str = "",
) -> Figure:
    """Figure of the tokens of one system at up to ``panels`` evenly chosen stored times, with curves of all systems.

    The first and the last time are included. Unit vectors in d = 2 are plotted on the circle, in d = 3 on a globe seen
    from ``view``, (azimuth, elevation) in degrees, filled on the near hemisphere and hollow on the far one; by default
    the final mean of the tokens is in front. In higher dimensions they are projected on the two leading principal
    directions of all plotted points, and points of R^d on the plane of largest variance; the title gives the share of
    the squared length or variance in that plane. The color of a token is its index; its area grows with its weight, and
    tokens of weight 0 are not plotted. With more than 2,000 tokens only every k-th is plotted.

    The curves below are the mean inner product and the order parameter (in R^d the spread and the size), and the radius
    of a residual stream: the mean over systems with its interval, and the plotted system dashed. Systems that stopped
    early are excluded from the mean. Raises HelmscopeError for a system without finite states, and for a ``view`` of
    tokens that are not on a globe.

    >>> states = torch.eye(3).expand(4, 2, 3, 3)
    >>> figure = tokens_figure(Trajectory(torch.arange(4.0), states))
    >>> [panel.get_title() for panel in figure.axes[:4]]
    ['t = 0', 't = 1', 't = 2', 't = 3']
    """
    if not isinstance(trajectory, Trajectory):
        raise HelmscopeError(f"trajectory is {type_with_article(trajectory)}, but it must be a Trajectory")
    if not all(trajectory.states.shape):
        raise HelmscopeError(f"states has shape {tuple(trajectory.states.shape)}, but no axis may be empty")
    number = check_integer("system", system, at_least=0)
    if number >= trajectory.states.shape[1]:
        last = trajectory.states.shape[1] - 1
        raise HelmscopeError(f"system is {number}, but the trajectory has the systems 0 to {last}")
    cloud = _Cloud.of(trajectory, number, check_integer("panels", panels, at_least=1))
    with styled():
        return _draw_figure(trajectory, cloud, _check_view(view, cloud), title)


@dataclass(frozen=True, eq=False)
class _Cloud:
    """The plotted points of one system, (panel, token, dim), with the indices and the weights of the tokens."""

    system: int
    steps: list[int]
    points: Floats
    weights: Floats
    numbers: NDArray[np.int64]
    every: int
    on_sphere: bool

    @classmethod
    def of(cls, path: Trajectory, system: int, panels: int) -> _Cloud:
        """Tokens whose weight is positive at some time, thinned, at times at which all their states are finite."""
        states = path.states[:, system].detach()
        weights = torch.ones_like(states[..., 0]) if path.weights is None else path.weights[:, system].detach()
        counted = (weights > 0).any(0).nonzero().flatten()
        finite = torch.isfinite(states[:, counted]).all(-1).all(-1).nonzero().flatten().tolist()
        if not finite or not len(counted):
            raise HelmscopeError(f"system {system} has no token of positive weight with finite states to draw")
        steps = [finite[round(index)] for index in np.linspace(0, len(finite) - 1, min(panels, len(finite)))]
        every = -(-len(counted) // MAX_TOKENS)
        kept = counted[::every]
        points = states[steps][:, kept].cpu().double().numpy()
        shares = weights.expand(len(states), -1)[steps][:, kept].cpu().double().numpy()
        return cls(system, steps, points, shares, kept.cpu().numpy(), every, are_unit_vectors(points))

    @property
    def dim(self) -> int:
        return int(self.points.shape[-1])

    def areas(self, panel: int) -> Floats:
        """The area of each marker in points^2; 0 for a token of weight 0 at that time."""
        standard = 28.0 if len(self.numbers) <= 64 else 13.0 if len(self.numbers) <= 400 else 5.0
        weights = self.weights[panel]
        typical = weights[weights > 0].mean() if (weights > 0).any() else 1.0
        return np.where(weights > 0, standard * np.clip(weights / typical, 0.3, 4.0), 0.0)


def _check_view(view: tuple[float, float] | None, cloud: _Cloud) -> tuple[float, float]:
    globe = cloud.on_sphere and cloud.dim == 3
    if view is None:
        return facing(cloud.points[-1]) if globe else (0.0, 0.0)
    if not globe:
        raise HelmscopeError(f"view is {view!r}, but only unit vectors in d = 3 are plotted on a globe: omit it")
    if not isinstance(view, tuple | list) or len(view) != 2:
        raise HelmscopeError(f"view is {view!r}, but it must be (azimuth, elevation) in degrees")
    azimuth, elevation = (check_real(f"view[{i}]", angle) for i, angle in enumerate(view))
    return azimuth, elevation


def _draw_figure(path: Trajectory, cloud: _Cloud, view: tuple[float, float], title: str) -> Figure:
    columns = 2 if len(cloud.steps) == 4 else min(len(cloud.steps), ACROSS)
    rows = math.ceil(len(cloud.steps) / columns)
    above = 0.3 + PANEL * rows
    across = max(PANEL * columns, 5.4)
    figure = blank_figure(across + SIDE, above + CURVES)
    upper, bottom = figure.subfigures(2, 1, height_ratios=[above, CURVES], squeeze=False)[:, 0]
    top, side = upper.subfigures(1, 2, width_ratios=[across, SIDE], squeeze=False)[0]
    axes = list(top.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[len(cloud.steps) :]:
        spare.set_axis_off()
    projection = _draw_panels(axes[: len(cloud.steps)], cloud, view)
    for panel, step in zip(axes, cloud.steps, strict=False):
        panel.set_title(_panel_title(path, step), fontsize=9)
    _draw_color_scale(side, cloud)
    top.suptitle(plain("\n".join([*([title] if title else []), _caption(path, cloud, projection)])), fontsize=9)
    _draw_mean_curves(bottom, path, cloud)
    return figure


def _draw_mean_curves(bottom: SubFigure, path: Trajectory, cloud: _Cloud) -> None:
    """Draws the mean curves of all systems, and those of the system plotted above."""
    all_systems, one_system = complete(path), single(path, cloud.system)

    def curves(selected: Trajectory) -> list[Curves]:
        return [CLUSTERING if cloud.on_sphere else FLAT, *radius_curves(selected)]

    means = None if all_systems is None else measured(all_systems, curves(all_systems))
    dashed = measured(one_system, curves(one_system)) if path.states.shape[1] > 1 or means is None else None
    contents = curves(path)
    panels = bottom.subplots(1, len(contents), squeeze=False)[0]
    draw_curves(panels, contents, means, dashed, path.times[cloud.steps].tolist())
    notes = [] if means is None else [describe_bands(means, path.replicate)]
    notes += [] if dashed is None else [f"dashed: {path.replicate} {cloud.system}"]
    stopped = path.states.shape[1] - (0 if all_systems is None else all_systems.states.shape[1])
    notes += [f"{pluralized(stopped, path.replicate)} stopped early and left out"] if stopped else []
    bottom.suptitle("; ".join(notes), fontsize=8.5, x=0.01, ha="left")


def _panel_title(path: Trajectory, step: int) -> str:
    return f"{'depth' if path.axis == 'depth' else 't ='} {float(path.times[step]):g}"


def _caption(path: Trajectory, cloud: _Cloud, projection: str) -> str:
    batch, total = path.states.shape[1], path.states.shape[2]
    which = f"{path.replicate} {cloud.system} (of 0 to {batch - 1}), " if batch > 1 else ""
    drawn = pluralized(len(cloud.numbers), "token")
    if cloud.every > 1:
        drawn = f"{drawn} (1 in {cloud.every} of {total:,})"
    elif len(cloud.numbers) < total:
        drawn = f"{drawn} of positive weight, of {total:,}"
    return f"{which}{drawn}\n{projection}"


def _draw_panels(axes: list[Axes], cloud: _Cloud, view: tuple[float, float]) -> str:
    """Draws every panel and returns a description of the projection."""
    globe = cloud.on_sphere and cloud.dim == 3
    points = cloud.points.reshape(-1, cloud.dim)
    canvas = Canvas.of(points, on_sphere=cloud.on_sphere, view=view if globe else None)
    places, front = canvas.place(cloud.points)
    for index, panel in enumerate(axes):
        canvas.prepare(panel)
        _scatter(panel, places[index], front[index], cloud, index)
    return canvas.description


def _scatter(panel: Axes, places: Floats, front: NDArray[np.bool_], cloud: _Cloud, index: int) -> None:
    """Plots tokens on the far side as hollow markers, those on the near side filled and on top."""
    from matplotlib import colormaps

    areas = cloud.areas(index)
    tint = colormaps["viridis"](0.9 * cloud.numbers / max(int(cloud.numbers[-1]), 1))
    many = len(places) > 500  # vector files with so many markers open slowly
    for near in (False, True):
        mask = (areas > 0) & (front if near else ~front)
        style: Any = {"facecolors": tint[mask]} if near else {"facecolors": "none", "edgecolors": tint[mask]}
        style |= {"linewidths": 0.0 if near else 0.7, "alpha": 0.85 if near else 0.6, "rasterized": many}
        marks = panel.scatter(places[mask, 0], places[mask, 1], s=areas[mask], zorder=3 if near else 2, **style)
        marks.set_gid("near" if near else "far")


def _draw_color_scale(place: SubFigure, cloud: _Cloud) -> None:
    """Draws the color scale of the tokens in a separate subfigure, where it does not disturb the equal axes."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    if len(cloud.numbers) < 2:
        return
    colors = ListedColormap(colormaps["viridis"](np.linspace(0, 0.9, 256)))
    scale = ScalarMappable(Normalize(0, int(cloud.numbers[-1])), colors)
    ticks = MaxNLocator(6, integer=True)
    bar = place.colorbar(scale, cax=place.add_axes((0.05, 0.2, 0.13, 0.6)), ticks=ticks, label="token")
    bar.outline.set_visible(False)
    bar.ax.grid(False)
