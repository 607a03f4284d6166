"""Where tokens are drawn: closed forms of the globe and of the plane that more dimensions are projected on."""

from __future__ import annotations

import numpy as np
import pytest

from helmscope.plots.projection import ELEVATION, MAX_ROWS, PrincipalPlane, facing, orthographic

AXES = np.eye(3)


def test_the_globe_seen_from_the_equator():
    place, front = orthographic(np.concatenate([AXES, -AXES]))
    assert place.tolist() == [[0, 0], [1, 0], [0, 1], [0, 0], [-1, 0], [0, -1]]
    assert front.tolist() == [True, True, True, False, True, True]  # the rim is in front
    assert place[2].tolist() == [0.0, 1.0]  # the north pole


@pytest.mark.parametrize("elevation", [-70.0, -20.0, 15.0, 90.0])
def test_the_pole_moves_with_the_elevation(elevation):
    place, front = orthographic(AXES[2], azimuth=33.0, elevation=elevation)
    assert np.allclose(place, [0.0, np.cos(np.deg2rad(elevation))], atol=1e-15)
    assert front == (elevation >= 0)


def test_the_viewer_faces_its_own_direction():
    for azimuth, elevation in ((0, 0), (90, 0), (-120, 35), (200, -80)):
        a, e = np.deg2rad(azimuth), np.deg2rad(elevation)
        toward = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
        place, front = orthographic(np.stack([toward, -toward]), azimuth=azimuth, elevation=elevation)
        assert np.abs(place).max() < 1e-15
        assert front.tolist() == [True, False]


def test_lengths_in_the_disc_and_depth_make_unit_vectors():
    points = np.random.default_rng(0).normal(size=(50, 3))
    points /= np.linalg.norm(points, axis=-1, keepdims=True)
    place, front = orthographic(points, azimuth=40, elevation=25)
    a, e = np.deg2rad(40), np.deg2rad(25)
    depth = points @ np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
    assert np.allclose((place**2).sum(-1) + depth**2, 1, atol=1e-14)
    assert np.array_equal(front, depth >= 0)


def test_a_cloud_is_faced():
    for point in ([1, 0, 0.2], [0, -1, -0.5], [-1, 1, 0.0]):
        cloud = np.array([point, point], dtype=float) / np.linalg.norm(point)
        azimuth, elevation = facing(cloud)
        assert abs(elevation) == ELEVATION
        assert orthographic(cloud, azimuth=azimuth, elevation=elevation)[1].all()
    assert facing(np.array([[0.0, 0.0, 0.0]])) == (0.0, ELEVATION)


def test_the_principal_plane_of_known_clouds():
    plane = PrincipalPlane.of(np.diag([2.0, 3.0, 1.0, 0.5]), centered=False)
    assert np.allclose(plane.directions, np.eye(4)[:, [1, 0]], atol=1e-12)
    assert plane.share == pytest.approx(13 / 14.25, rel=1e-12)
    assert np.allclose(plane.place(np.array([1.0, 2.0, 3.0, 4.0])), [2.0, 1.0])
    cloud = 7 + np.array([[2.0, 0, 0], [-2, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 0.5], [0, 0, -0.5]])
    plane = PrincipalPlane.of(cloud, centered=True)
    assert np.allclose(np.abs(plane.directions), np.eye(3)[:, :2], atol=1e-12)
    assert plane.share == pytest.approx(10 / 10.5, rel=1e-12)
    assert np.allclose(plane.place(np.full(3, 7.0)), 0)


def test_a_direction_points_to_where_the_cloud_is():
    for sign in (1.0, -1.0):
        cloud = sign * np.array([[1.0, 0.1, 0.0], [1.0, -0.1, 0.05], [0.9, 0.0, 0.0]])
        plane = PrincipalPlane.of(cloud, centered=False)
        assert (plane.place(cloud)[:, 0] > 0).all()


def test_one_point_and_coinciding_points_have_a_plane():
    one = PrincipalPlane.of(np.array([[0.6, 0.8, 0.0, 0.0]]), centered=False)
    assert np.allclose(one.place(np.array([[0.6, 0.8, 0.0, 0.0]])), [[1.0, 0.0]])
    assert one.share == pytest.approx(1.0)
    still = PrincipalPlane.of(np.ones((4, 5)), centered=True)
    assert still.share == 1.0
    assert np.allclose(still.place(np.ones((4, 5))), 0)


def test_many_points_are_thinned_for_the_directions_only():
    points = np.random.default_rng(1).normal(size=(3 * MAX_ROWS, 4)) * [5.0, 3.0, 1.0, 0.1]
    plane = PrincipalPlane.of(points, centered=False)
    assert np.abs(plane.directions[[0, 1], [0, 1]]).min() > 0.99
    inside = np.square(points @ plane.directions).sum() / np.square(points).sum()
    assert plane.share == pytest.approx(inside, rel=1e-12)
