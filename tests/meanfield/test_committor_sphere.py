"""The committor on S^2: known digits, L q = 0 by differences, a slow solver, simulation, a cloud, spectral accuracy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.sparse.linalg import spsolve

from helmscope.fields.attention import SA
from helmscope.fields.field import as_field
from helmscope.fields.noise import IsotropicNoise
from helmscope.geometry.sphere import exp, project, tangent_basis
from helmscope.meanfield import Cap, cloud_committor, simulated_committor, sphere_committor, zonal_committor
from helmscope.meanfield.committor_sphere import BetweenCaps, _evaluate, _series, _solve
from helmscope.solve.euler_maruyama import EulerMaruyama
from helmscope.theory.starts import Uniform
from helmscope.types import HelmscopeError


def vector(*coordinates: float) -> torch.Tensor:
    return torch.tensor(coordinates, dtype=torch.float64)


UP = vector(0, 0, 1)
POLAR = {"a": Cap(-UP, min_cosine=0.8), "b": Cap(UP, min_cosine=0.8)}
OBLIQUE = {"a": Cap(vector(1, 0.2, 0.1), min_cosine=0.75), "b": Cap(vector(-0.3, 1, 0.6), min_cosine=0.9)}
MATRIX = torch.tensor([[0.4, 1.0, -0.3], [-0.8, 0.1, 0.6], [0.5, -0.2, 0.7]], dtype=torch.float64)


def upward(x: torch.Tensor) -> torch.Tensor:
    return UP.expand_as(x)


def swirling(x: torch.Tensor) -> torch.Tensor:
    """A linear drift that is no gradient, plus a rotation about an oblique axis."""
    return x @ MATRIX.mT + torch.linalg.cross(vector(0.3, 0.5, -0.8).expand_as(x), x)


def test_known_digits() -> None:
    x = torch.stack([vector(math.sqrt(0.91), 0, 0.3), vector(0, -1, 0), vector(0, math.sqrt(0.91), 0.3)])
    free = sphere_committor(torch.zeros_like, x, nu=1.0, **POLAR)
    assert abs(float(free[0]) - 0.6408684425778426) < 1e-13
    drawn = sphere_committor(upward, x, nu=0.5, **POLAR)
    assert float((drawn - vector(0.92882396384766, 0.86399388470944, 0.92882396384766)).abs().max()) < 1e-12
    turned = sphere_committor(lambda x: upward(x) + 3 * torch.linalg.cross(upward(x), x), x, nu=0.5, **POLAR)
    assert float((turned - drawn).abs().max()) < 1e-11  # rotation about the axis changes nothing


def test_zonal_landscapes_about_any_axis() -> None:
    axis = vector(0.6, -0.48, 0.64)
    x = Uniform(n=60, dim=3).sample(seed=0)
    s = x @ axis
    q = sphere_committor(
        lambda x: axis * torch.cos(3 * x @ axis)[..., None],
        x,
        nu=0.2,
        a=Cap(-axis, min_cosine=0.6),
        b=Cap(axis, min_cosine=0.9),
    )
    expected = zonal_committor(s, dim=3, nu=0.2, low=-0.6, high=0.9, potential=lambda s: torch.sin(3 * s) / 3)
    assert float((q - expected).abs().max()) < 1e-10


def test_the_coordinates_are_conformal_and_bound_the_caps() -> None:
    region = BetweenCaps.of(**OBLIQUE)
    phi = torch.linspace(0, 6.2, 40, dtype=torch.float64)
    for t, cap in ((region.low, OBLIQUE["a"]), (region.high, OBLIQUE["b"])):
        x, x_t, x_phi = region.points(torch.full_like(phi, t), phi)
        assert float((x.norm(dim=-1) - 1).abs().max()) < 1e-14
        assert float((x @ cap.center - cap.min_cosine).abs().max()) < 1e-14
        assert float((x_t * x_phi).sum(-1).abs().max()) < 1e-13
        assert float((x_t.norm(dim=-1) - x_phi.norm(dim=-1)).abs().max()) < 1e-13
    middle = torch.full_like(phi, (region.low + region.high) / 2)
    t, angle = region.coordinates(region.points(middle, phi)[0])
    assert float((t - middle).abs().max()) < 1e-14
    assert float(((angle - phi + 1) % (2 * math.pi) - 1).abs().max()) < 1e-13


@pytest.mark.parametrize("nu", [0.3, 1.0])
def test_it_solves_the_backward_equation(nu: float) -> None:
    """L q = 0 by differences along geodesics, with the values 0 and 1 on oblique caps."""
    x = Uniform(n=120, dim=3).sample(seed=1)
    margins = torch.stack([OBLIQUE[name].signed_distance(x) for name in "ab"])
    x = x[(margins < -0.05).all(0)][:40]
    basis = tangent_basis(x)
    h = 2e-3
    moved = [exp(x, sign * h * basis[..., k]) for k in (0, 1) for sign in (1, -1)]
    q = sphere_committor(swirling, torch.cat([x, *moved]), nu=nu, tol=1e-11, **OBLIQUE).reshape(5, -1)
    laplacian = (q[1:].sum(0) - 4 * q[0]) / h**2
    slopes = torch.stack([q[1] - q[2], q[3] - q[4]], -1) / (2 * h)
    drift = (project(x, swirling(x))[:, None] @ basis)[:, 0]
    residual = nu * laplacian + (drift * slopes).sum(-1)
    assert float(residual.abs().max()) < 2e-4  # h^2 / 12 times fourth derivatives
    assert float((drift * slopes).sum(-1).abs().max()) > 0.3


def test_slow_finite_differences() -> None:
    """A drift with swirl, not zonal, between concentric caps: second order in latitude and longitude, extrapolated."""
    nu, high = 0.4, math.acos(0.8)

    def coarse(rows: int) -> np.ndarray:
        columns = 2 * rows
        theta = np.linspace(high, np.pi - high, rows + 1)
        phi = 2 * np.pi * np.arange(columns) / columns
        dt, dp = theta[1] - theta[0], phi[1]
        grid = [g.ravel() for g in np.meshgrid(theta[1:-1], phi, indexing="ij")]
        sin, cos = np.sin(grid[0]), np.cos(grid[0])
        x = torch.from_numpy(np.stack([sin * np.cos(grid[1]), sin * np.sin(grid[1]), cos], -1))
        south = np.stack([cos * np.cos(grid[1]), cos * np.sin(grid[1]), -sin], -1)
        east = np.stack([-np.sin(grid[1]), np.cos(grid[1]), 0 * sin], -1)
        b = swirling(x).numpy()
        down, around = (b * south).sum(-1) + nu * cos / sin, (b * east).sum(-1) / sin
        size = len(sin)
        j = np.arange(size)
        left, right = j - j % columns + (j - 1) % columns, j - j % columns + (j + 1) % columns
        matrix = sparse.coo_array(
            (
                np.concatenate([nu / (sin * dp) ** 2 - around / (2 * dp), nu / (sin * dp) ** 2 + around / (2 * dp)]),
                (np.concatenate([j, j]), np.concatenate([left, right])),
            ),
            shape=(size, size),
        ).tolil()
        matrix.setdiag(-2 * nu / dt**2 - 2 * nu / (sin * dp) ** 2)
        upper, lower = nu / dt**2 - down / (2 * dt), nu / dt**2 + down / (2 * dt)
        matrix = matrix.tocsr() + sparse.diags_array([upper[columns:], lower[:-columns]], offsets=[-columns, columns])
        known = np.where(j < columns, -upper, 0.0)  # q = 1 at the north cap, b
        return spsolve(sparse.csc_array(matrix), known).reshape(rows - 1, columns)

    fine, rough = coarse(48)[1::2, ::2], coarse(24)
    extrapolated = (4 * fine - rough) / 3
    theta = np.linspace(high, np.pi - high, 25)[1:-1]
    phi = 2 * np.pi * np.arange(48) / 48
    grid = np.meshgrid(theta, phi, indexing="ij")
    x = np.stack([np.sin(grid[0]) * np.cos(grid[1]), np.sin(grid[0]) * np.sin(grid[1]), np.cos(grid[0])], -1)
    q = sphere_committor(swirling, torch.from_numpy(x.reshape(-1, 3)), nu=nu, **POLAR).numpy().reshape(rough.shape)
    assert np.abs(q - rough).max() > 1e-4
    assert np.abs(q - extrapolated).max() < 1e-6  # 1.4e-7 measured


def test_spectral_accuracy() -> None:
    region, field = BetweenCaps.of(**OBLIQUE), as_field(swirling)
    x = Uniform(n=50, dim=3).sample(seed=2)
    values = [_evaluate(_series(_solve(field, region, 0.5, degree)), region, x) for degree in (12, 24, 36, 60)]
    errors = [float((q - values[-1]).abs().max()) for q in values[:-1]]
    assert errors[1] < 0.03 * errors[0]
    assert errors[2] < 0.03 * errors[1]
    assert errors[2] < 1e-7
    q = sphere_committor(swirling, x, nu=0.5, **OBLIQUE)
    free = ~(OBLIQUE["a"].contains(x) | OBLIQUE["b"].contains(x))
    assert float((q - values[-1])[free].abs().max()) < 1e-9


def test_simulation_and_cloud() -> None:
    cloud = Uniform(n=1500, dim=3).sample(seed=4)
    q = sphere_committor(swirling, cloud, nu=0.5, **OBLIQUE)
    on_cloud = cloud_committor(swirling, cloud, nu=0.5, duration=1.5e-2, **OBLIQUE)
    assert float((q - on_cloud).abs().mean()) < 0.02  # 0.011 measured
    free = ~(OBLIQUE["a"].contains(cloud, margin=0.2) | OBLIQUE["b"].contains(cloud, margin=0.2))
    starts = torch.nonzero(free)[:2, 0]
    shares = simulated_committor(
        swirling,
        cloud[starts],
        noise=IsotropicNoise(0.5),
        horizon=30,
        paths=150,
        stepper=EulerMaruyama(0.02),
        seed=5,
        **OBLIQUE,
    )
    for interval, value in zip(shares.intervals(confidence=0.999), q[starts].tolist(), strict=True):
        assert interval.low < value < interval.high


def test_exchange_and_values_in_the_sets() -> None:
    x = Uniform(n=60, dim=3).sample(seed=6)
    q = sphere_committor(swirling, x, nu=0.7, **OBLIQUE)
    exchanged = sphere_committor(swirling, x, nu=0.7, a=OBLIQUE["b"], b=OBLIQUE["a"])
    assert float((q + exchanged - 1).abs().max()) < 1e-9
    assert (q[OBLIQUE["a"].contains(x)] == 0).all()
    assert (q[OBLIQUE["b"].contains(x)] == 1).all()
    assert ((q >= 0) & (q <= 1)).all()


def test_bad_input() -> None:
    x = torch.eye(3, dtype=torch.float64)
    for field, given, message in (
        (upward, {"nu": 0.0}, "nu is 0"),
        (upward, {"x": torch.eye(2, dtype=torch.float64)}, "dimension 2"),
        (upward, {"a": None}, "a is None"),
        (upward, {"a": Cap(UP, min_cosine=0.5)}, "b overlaps with a"),
        (upward, {"a": Cap(-UP, min_cosine=0.0), "b": Cap(UP, min_cosine=0.0)}, "b touches a|b overlaps"),
        (upward, {"max_degree": 8}, "max_degree is 8"),
        (upward, {"tol": 0.0}, "tol is 0"),
        (SA(beta=1.0), {}, "attend to each other"),
        (lambda x: x / 0, {}, "not finite"),
        (lambda x: 40 * swirling(x), {"nu": 0.01, "max_degree": 16}, "not resolved to 1e-09 with max_degree=16"),
    ):
        arguments = {"x": x, "nu": 0.5, **POLAR, **given}
        with pytest.raises(HelmscopeError, match=message):
            sphere_committor(field, arguments.pop("x"), **arguments)
