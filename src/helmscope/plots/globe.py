"""A function on S^2 as the shading of a globe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.plots.canvas import draw_outline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

PIXELS = 160  # across the disc
AT_ONCE = 2_048  # points at which a function is evaluated at once, which bounds its tables of harmonics


def disc_points(view: tuple[float, float], pixels: int = PIXELS) -> Floats:
    """The points (pixels^2, 3) of the unit sphere behind the pixels of a disc, row by row from the bottom; pixels
    outside it have the nearest point of the edge.

    >>> disc_points((0.0, 0.0), pixels=1).tolist()
    [[1.0, 0.0, 0.0]]
    """
    ticks = (2 * np.arange(pixels) + 1) / pixels - 1
    right, up = (grid.ravel() for grid in np.meshgrid(ticks, ticks))
    radius = np.hypot(right, up)
    right, up = right / np.maximum(radius, 1), up / np.maximum(radius, 1)
    toward = np.sqrt(np.maximum(1 - right**2 - up**2, 0))
    a, e = np.deg2rad(view)
    axes = np.array(
        [
            [-np.sin(a), np.cos(a), 0.0],
            [-np.sin(e) * np.cos(a), -np.sin(e) * np.sin(a), np.cos(e)],
            [np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)],
        ]
    )
    points: Floats = np.stack([right, up, toward], -1) @ axes + 0.0  # + 0.0 makes -0 a plain 0
    return points


def values_on_disc(function: Callable[[Floats], Floats], view: tuple[float, float]) -> Floats:
    """The values (..., pixels, pixels) on the visible hemisphere of a function of points (n, 3) -> (..., n).

    >>> values_on_disc(lambda x: x[:, 2], (0.0, 90.0)).max().round(3).tolist()
    1.0
    """
    points = disc_points(view)
    parts = [function(points[k : k + AT_ONCE]) for k in range(0, len(points), AT_ONCE)]
    values = np.concatenate(parts, -1)
    return values.reshape(*values.shape[:-1], PIXELS, PIXELS)


def draw_globe(panel: Axes, values: Floats, view: tuple[float, float], colors: dict[str, Any]) -> AxesImage:
    """Draws the values of ``values_on_disc`` on an opaque globe with its meridians and parallels.

    >>> from helmscope.plots.style import new_figure
    >>> _, (panel,) = new_figure(1, 1)
    >>> draw_globe(panel, values_on_disc(lambda x: x[:, 2], (0.0, 20.0)), (0.0, 20.0), {"cmap": "viridis"}).get_zorder()
    0.5
    """
    from matplotlib.patches import Circle

    image = panel.imshow(values, extent=(-1, 1, -1, 1), origin="lower", interpolation="bilinear", zorder=0.5, **colors)
    image.set_clip_path(Circle((0, 0), 1, transform=panel.transData))
    draw_outline(panel, view, opaque=True)
    panel.set(xlim=(-1.06, 1.06), ylim=(-1.06, 1.06), aspect="equal")
    panel.set_axis_off()
    return image
