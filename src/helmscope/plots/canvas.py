"""Where points are drawn: on the unit circle, on a globe, or on the plane of two principal directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from helmscope.plots.projection import PrincipalPlane, orthographic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

GRAY, PALE = "#8a8f98", "#c3c7cd"
NORM_TOLERANCE = 1e-3  # of unit vectors in any precision


@dataclass(frozen=True, eq=False)
class Canvas:
    """A projection of points of R^d to a panel, the same for all panels of a figure.

    Unit vectors are drawn on the circle (d = 2), on a globe seen from ``view`` (d = 3), or on the plane of the two
    leading principal directions; other points on the plane of largest variance, within ``limits``. ``description`` says
    which.
    """

    description: str
    dim: int
    view: tuple[float, float] | None = None
    plane: PrincipalPlane | None = None
    limits: tuple[Floats, float] | None = None  # the middle and half the width of the panel, for points of R^d

    @classmethod
    def of(cls, points: Floats, *, on_sphere: bool, view: tuple[float, float] | None = None) -> Canvas:
        """The canvas for all points (n, d) of a figure.

        >>> Canvas.of(np.eye(2), on_sphere=True).description
        'on the unit circle'
        """
        dim = points.shape[-1]
        if not on_sphere:
            return cls._flat(points)
        if dim == 2:
            return cls("on the unit circle", dim)
        if dim == 3 and view is not None:
            seen = f"seen from azimuth {view[0]:g}°, elevation {view[1]:g}°; hollow: far side"
            return cls(f"on the unit sphere, {seen}", dim, view=view)
        plane = PrincipalPlane.of(points, centered=False)
        share = f"{plane.share:.0%} of the squared length"
        return cls(f"projected on 2 principal directions of {dim:,}: {share}", dim, plane=plane)

    @classmethod
    def _flat(cls, points: Floats) -> Canvas:
        dim, plane, description = points.shape[-1], None, f"in R^{points.shape[-1]}"
        if dim > 2:
            plane = PrincipalPlane.of(points, centered=True)
            description = f"projected on 2 principal directions of {dim:,}: {plane.share:.0%} of the variance"
        places = _in_plane(points) if plane is None else plane.place(points)
        low, high = places.min(0), places.max(0)
        half = 0.56 * max(float((high - low).max()), 1e-9)
        return cls(description, dim, plane=plane, limits=((low + high) / 2, half))

    @classmethod
    def on_two_levels(cls, x: Floats, y: Floats) -> Canvas:
        """The canvas for two clouds of the line, drawn as points (value, level) of the plane.

        >>> Canvas.on_two_levels(np.array([[0.0, 1.0]]), np.array([[2.0, 0.0]])).description
        'in R^1'
        """
        return cls("in R^1", 1, limits=cls._flat(np.concatenate([x, y])).limits)

    def place(self, points: Floats) -> tuple[Floats, NDArray[np.bool_]]:
        """Coordinates (..., 2) of points (..., d), and whether each is in front: False only on the far side of a globe.

        >>> place, front = Canvas("on the unit circle", 2).place(np.eye(2))
        >>> front.tolist()
        [True, True]
        """
        if self.view is not None:
            return orthographic(points, azimuth=self.view[0], elevation=self.view[1])
        places = _in_plane(points) if self.plane is None else self.plane.place(points)
        return places, np.ones(points.shape[:-1], dtype=bool)

    def prepare(self, panel: Axes) -> None:
        """Draw the outline of the sphere, or set the limits of the plane."""
        if self.limits is None:
            draw_outline(panel, self.view)
            panel.set(xlim=(-1.12, 1.12), ylim=(-1.12, 1.12), aspect="equal")
            panel.set_axis_off()
            return
        (x, y), half = self.limits
        panel.set(xlim=(x - half, x + half), ylim=(y - half, y + half), aspect="equal")
        panel.yaxis.set_visible(self.dim > 1)
        panel.label_outer()


def are_unit_vectors(points: Floats) -> bool:
    """Whether points of R^d, d > 1, are on the unit sphere.

    >>> are_unit_vectors(np.eye(3)), are_unit_vectors(2 * np.eye(3))
    (True, False)
    """
    return points.shape[-1] > 1 and bool((np.abs(np.linalg.norm(points, axis=-1) - 1) < NORM_TOLERANCE).all())


def _in_plane(points: Floats) -> Floats:
    """Points of R^1, on one level, or R^2 as points of R^2."""
    return np.concatenate([points, np.zeros_like(points)], -1)[..., :2]


def draw_outline(panel: Axes, view: tuple[float, float] | None, *, opaque: bool = False) -> None:
    """Draws the unit circle and, with a ``view``, meridians and parallels of the globe, dotted on the far side, which
    an ``opaque`` globe hides.
    """
    turn = np.linspace(0, 2 * np.pi, 181)
    panel.plot(np.cos(turn), np.sin(turn), color=GRAY, linewidth=0.9, zorder=1)
    if view is None:
        return
    lines = [
        np.stack([np.cos(b) * np.cos(turn), np.cos(b) * np.sin(turn), np.full_like(turn, np.sin(b))], -1)
        for b in np.deg2rad([-60, -30, 0, 30, 60])
    ]
    lines += [
        np.stack([np.cos(turn) * np.cos(a), np.cos(turn) * np.sin(a), np.sin(turn)], -1)
        for a in np.deg2rad([0, 30, 60, 90, 120, 150])
    ]
    for line in lines:
        place, front = orthographic(line, azimuth=view[0], elevation=view[1])
        near, far = (np.where(side[:, None], place, np.nan) for side in (front, ~front))
        if opaque:
            panel.plot(*near.T, color="white", linewidth=0.5, alpha=0.35, zorder=1)
            continue
        panel.plot(*far.T, color=PALE, linewidth=0.4, linestyle=":", zorder=0)
        panel.plot(*near.T, color=PALE, linewidth=0.5, zorder=0)
