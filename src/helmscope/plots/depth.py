"""The figure of a recorded model: clustering, rank and radius of its tokens over depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.plots.curves import CLUSTERING, RANK, complete, describe_bands, draw_curves, measured, radius_curves
from helmscope.plots.style import new_figure, styled
from helmscope.plots.variable_panel import plain
from helmscope.types import HelmscopeError, Trajectory, type_with_article

if TYPE_CHECKING:
    from helmscope.plots.figure import Figure

WIDTH, HEIGHT = 3.3, 3.0  # of a panel, in inches


def depth_figure(trajectory: Trajectory, *, title: str = "") -> Figure:
    """Figure of the clustering of tokens over depth: mean inner product and order parameter, effective rank, radius.

    Each curve is the mean over prompts with its interval. Tokens count by the weights of the trajectory, which are 0
    for padding and special tokens. Prompts with states that are not finite are excluded; raises HelmscopeError if none
    is left.

    >>> import torch
    >>> path = Trajectory(torch.arange(3.0), torch.eye(4).expand(3, 2, 4, 4), axis="depth", unit="half-layers")
    >>> [panel.get_xlabel() for panel in depth_figure(path).axes]
    ['depth (half-layers)', 'depth (half-layers)']
    """
    if not isinstance(trajectory, Trajectory):
        raise HelmscopeError(f"trajectory is {type_with_article(trajectory)}, but it must be a Trajectory")
    path = complete(trajectory)
    if path is None:
        raise HelmscopeError("trajectory has no prompt whose states are all finite, but at least one is needed")
    curves = [CLUSTERING, RANK, *radius_curves(path)]
    means = measured(path, curves)
    with styled():
        figure, panels = new_figure(1, len(curves), width=WIDTH * len(curves), height=HEIGHT)
        draw_curves(panels, curves, means)
        bands = describe_bands(means, path.replicate)
        figure.suptitle(plain(f"{title}\n{bands}" if title else bands), fontsize=9)
    return figure
