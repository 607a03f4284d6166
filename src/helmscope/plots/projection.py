"""From tokens in R^d to points of the plane: the circle as it is, the sphere as a globe, more dimensions projected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

ELEVATION = 20.0  # degrees above the equator: high enough to see parallels as ellipses
MOST_ROWS = 1024  # tokens from which principal directions are found


def orthographic(points: Numbers, *, azimuth: float = 0.0, elevation: float = 0.0) -> tuple[Numbers, NDArray[np.bool_]]:
    """Points of the unit sphere as seen from far away above (azimuth, elevation), in degrees: (..., 3) to places in
    the unit disc, (..., 2), and whether each lies on the hemisphere that faces the viewer.

    The viewer of (0, 0) looks along -x_1: x_2 points to the right and x_3 up.

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


def facing(points: Numbers) -> tuple[float, float]:
    """The view from which the mean of the points is in front: its azimuth in whole degrees, and a fixed elevation,
    above or below the equator as the mean is.

    >>> facing(np.array([[0.0, 1.0, -0.1]]))
    (90.0, -20.0)
    """
    x, y, z = points.mean(0)
    return float(np.round(np.rad2deg(np.arctan2(y, x)))) + 0.0, ELEVATION if z >= 0 else -ELEVATION


@dataclass(frozen=True, eq=False)
class Principal:
    """The plane of the two leading principal directions of a cloud: ``directions`` (d, 2), orthonormal, and ``share``,
    how much of the cloud's squared length (after ``center`` is taken away) lies in that plane.
    """

    directions: Numbers
    center: Numbers
    share: float

    @classmethod
    def of(cls, cloud: Numbers, *, centered: bool) -> Principal:
        """The plane of a cloud (points, d). Each direction is signed so that the cloud lies more on its positive side.

        Where the cloud has many points, directions are those of every k-th; the share is that of all.

        >>> plane = Principal.of(np.diag([3.0, 4.0, 1.0]), centered=False)
        >>> np.abs(plane.directions.T).round(6).tolist(), round(plane.share, 6)
        ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], 0.961538)
        """
        center = cloud.mean(0) if centered else np.zeros(cloud.shape[-1])
        rest = cloud - center
        some = rest[:: -(-len(rest) // MOST_ROWS)]
        _, _, rows = np.linalg.svd(some, full_matrices=False)
        directions = np.zeros((cloud.shape[-1], 2))
        directions[:, : min(2, len(rows))] = rows[:2].T
        side = (some * 1.0 if not centered else some**3).sum(0) @ directions  # a centered cloud has the sum 0
        directions = directions * np.where(side < 0, -1.0, 1.0)
        whole = float(np.square(rest).sum())
        share = float(np.square(rest @ directions).sum()) / whole if whole > 0 else 1.0
        return cls(directions, center, min(share, 1.0))

    def place(self, points: Numbers) -> Numbers:
        """Points of R^d in the plane, (..., 2)."""
        placed: Numbers = (points - self.center) @ self.directions
        return placed
