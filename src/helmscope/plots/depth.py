"""The picture of a recorded model: how its tokens cluster over depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.plots.curves import CLUSTERING, RANK, band_words, complete, draw_curves, measured, radius_curves
from helmscope.plots.measured import plain
from helmscope.plots.style import new_figure, styled
from helmscope.types import HelmscopeError, Trajectory

if TYPE_CHECKING:
    from helmscope.plots.figure import Figure

WIDTH, HEIGHT = 3.3, 3.0  # inches of a panel


def depth_figure(trajectory: Trajectory, *, title: str = "") -> Figure:
    """Mean inner product and order parameter, effective rank, and mean radius of the tokens over depth: the mean over
    prompts and its interval.

    Tokens count by the weights of the trajectory: padding and special tokens do not. Prompts with states that are not
    finite are left out, and refused where there is no other.

    >>> import torch
    >>> path = Trajectory(torch.arange(3.0), torch.eye(4).expand(3, 2, 4, 4), axis="depth")
    >>> [panel.get_xlabel() for panel in depth_figure(path).axes]
    ['depth (half-layers)', 'depth (half-layers)']
    """
    if not isinstance(trajectory, Trajectory):
        raise HelmscopeError(f"trajectory is a {type(trajectory).__name__}, but it must be a Trajectory")
    path = complete(trajectory)
    if path is None:
        raise HelmscopeError("trajectory has no prompt whose states are all finite, and there is nothing to draw")
    curves = [CLUSTERING, RANK, *radius_curves(path)]
    seen = measured(path, curves)
    with styled():
        figure, panels = new_figure(1, len(curves), width=WIDTH * len(curves), height=HEIGHT)
        draw_curves(panels, curves, seen)
        words = band_words(seen, path.replicate)
        figure.suptitle(plain(f"{title}\n{words}" if title else words), fontsize=9)
    return figure
