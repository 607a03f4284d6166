"""Projections of tokens in R^d to the plane: orthographic for the sphere, principal directions for more dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ELEVATION = 20.0  # degrees above the equator: high enough to show parallels as ellipses
MAX_ROWS = 1024  # most tokens from which principal directions are computed


def orthographic(points: Floats, *, azimuth: float = 0.0, elevation: float = 0.0) -> tuple[Floats, NDArray[np.bool_]]:
    """Orthographic projection of points (..., 3) of the unit sphere, seen from (azimuth, elevation) in degrees.

    Returns points (..., 2) of the unit disc, and whether each is on the hemisphere that faces the viewer. The line of
    sight of (0, 0) is -x_1: x_2 points to the right and x_3 up.

    >>> place, front = orthographic(np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]))
    >>> place.tolist(), front.tolist()
    ([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]], [True, True, False])
    """
    a, e = np.deg2rad(azimuth), np.deg2rad(elevation)
    right = np.array([-np.sin(a), np.cos(a), 0.0])
    up = np.array([-np.sin(e) * np.cos(a), -np.sin(e) * np.sin(a), np.cos(e)])
    toward = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
    place = np.stack([(points * right).sum(-1), (points * up).sum(-1)], -1) + 0.0  # + 0.0 makes -0 a plain 0
    return place, (points * toward).sum(-1) >= 0


def facing(points: Floats) -> tuple[float, float]:
    """The view (azimuth, elevation) with the mean of the points in front: its azimuth in whole degrees, and a fixed
    elevation on its side of the equator.

    >>> facing(np.array([[0.0, 1.0, -0.1]]))
    (90.0, -20.0)
    """
    x, y, z = points.mean(0)
    return float(np.round(np.rad2deg(np.arctan2(y, x)))) + 0.0, ELEVATION if z >= 0 else -ELEVATION


@dataclass(frozen=True, eq=False)
class PrincipalPlane:
    """The plane of the two leading principal directions of a cloud: ``directions`` (d, 2), orthonormal, and ``share``,
    the share of the cloud's squared length (after subtracting ``center``) in that plane.
    """

    directions: Floats
    center: Floats
    share: float

    @classmethod
    def of(cls, cloud: Floats, *, centered: bool) -> PrincipalPlane:
        """The plane of a cloud (points, d). Signs are chosen so that most of the cloud is on the positive side.

        For a cloud of many points the directions are computed from every k-th; the share is that of all points.

        >>> plane = PrincipalPlane.of(np.diag([3.0, 4.0, 1.0]), centered=False)
        >>> np.abs(plane.directions.T).round(6).tolist(), round(plane.share, 6)
        ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], 0.961538)
        """
        center = cloud.mean(0) if centered else np.zeros(cloud.shape[-1])
        deviation = cloud - center
        thinned = deviation[:: -(-len(deviation) // MAX_ROWS)]
        _, _, rows = np.linalg.svd(thinned, full_matrices=False)
        directions = np.zeros((cloud.shape[-1], 2))
        directions[:, : min(2, len(rows))] = rows[:2].T
        side = (thinned * 1.0 if not centered else thinned**3).sum(0) @ directions  # a centered cloud has the sum 0
        directions = directions * np.where(side < 0, -1.0, 1.0)
        total = float(np.square(deviation).sum())
        share = float(np.square(deviation @ directions).sum()) / total if total > 0 else 1.0
        return cls(directions, center, min(share, 1.0))

    def place(self, points: Floats) -> Floats:
        """Coordinates (..., 2) of points of R^d in the plane."""
        coordinates: Floats = (points - self.center) @ self.directions
        return coordinates
