"""The committor of a zonal landscape: known digits, independent quadrature, the differential equation, faults."""

from __future__ import annotations

import itertools
import math

import mpmath
import pytest
import torch

import helmscope as hs
from helmscope import meanfield
from helmscope.meanfield.committor_zonal import zonal_committor
from support.planting import Plant, outcome

CAPS = {"low": -0.8, "high": 0.8}


def known_values() -> bool:
    """V = -s, that is U = s, at nu = 1/2 on S^2."""
    s = torch.tensor([0.0, 0.3], dtype=torch.float64)
    q = meanfield.zonal_committor(s, dim=3, nu=0.5, potential=lambda s: s, **CAPS)  # through the package: see Plant
    return bool((q - torch.tensor([0.86399388470944, 0.92882396384766], dtype=torch.float64)).abs().max() < 1e-13)


def test_known_digits() -> None:
    free = float(zonal_committor(0.3, dim=3, nu=1.0, **CAPS))
    assert abs(free - 0.6408684425778426) < 4e-16
    assert abs(free - (math.atanh(0.3) + math.atanh(0.8)) / (2 * math.atanh(0.8))) < 4e-16
    assert known_values()


@pytest.mark.parametrize("dim", [2, 3, 5, 64])
@pytest.mark.parametrize("nu", [0.02, 0.5])
def test_quadrature_with_thirty_digits(dim: int, nu: float) -> None:
    potential = lambda s: torch.sin(3 * s) + s * s  # noqa: E731
    mpmath.mp.dps = 30

    def density(s: mpmath.mpf) -> mpmath.mpf:
        return mpmath.exp(-(mpmath.sin(3 * s) + s * s) / nu) * (1 - s * s) ** (-mpmath.mpf(dim - 1) / 2)

    grid = [mpmath.mpf(k) / 20 for k in range(-14, 17)]  # low = -0.7, high = 0.8
    pieces = [mpmath.quad(density, [u, v]) for u, v in itertools.pairwise(grid)]
    s = torch.tensor([float(v) for v in grid], dtype=torch.float64)
    q = zonal_committor(s, dim=dim, nu=nu, low=-0.7, high=0.8, potential=potential)
    expected = [float(sum(pieces[:k], mpmath.mpf(0)) / sum(pieces)) for k in range(len(grid))]
    assert float((q - torch.tensor(expected, dtype=torch.float64)).abs().max()) < 2e-14


def test_it_solves_the_backward_equation() -> None:
    """L q = 0 with the surface Laplacian and gradient of autograd, for a landscape on S^3."""
    e = torch.tensor([0.0, 0.6, 0.0, 0.8], dtype=torch.float64)
    nu, h = 0.3, 1e-4
    q = lambda s: zonal_committor(s, dim=4, nu=nu, potential=torch.sin, **CAPS)  # noqa: E731
    x = hs.Uniform(n=40, dim=4).sample(seed=0)
    s = (x @ e)[(x @ e).abs() < 0.7]
    slope, bend = (q(s + h) - q(s - h)) / (2 * h), (q(s + h) - 2 * q(s) + q(s - h)) / h**2
    laplacian = (1 - s * s) * bend - 3 * s * slope
    assert float((nu * laplacian + (1 - s * s) * torch.cos(s) * slope).abs().max()) < 1e-5


def test_boundary_values_and_monotonicity() -> None:
    s = torch.linspace(-1, 1, 201, dtype=torch.float64)
    q = zonal_committor(s, dim=3, nu=0.05, potential=lambda s: -s * s, **CAPS)
    assert (q[s <= -0.8] == 0).all()
    assert (q[s >= 0.8] == 1).all()
    assert (q.diff() >= 0).all()
    assert torch.allclose(q + q.flip(0), torch.ones_like(q), atol=1e-14)  # by symmetry
    assert zonal_committor(0.5, dim=3, nu=1.0, **CAPS).shape == ()


def test_a_small_nu_neither_overflows_nor_loses_the_step() -> None:
    q = zonal_committor(torch.tensor([-0.1, 0.0, 0.1]), dim=3, nu=1e-4, potential=lambda s: s * s, **CAPS)
    # V = -s^2 has a barrier at 0, where q jumps like an error function of s / sqrt(nu)
    assert torch.allclose(q, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nu": 0.0}, "nu is 0.0, but it must be a finite number > 0"),
        ({"low": 0.9}, "low is 0.9 and high is 0.8, but they must satisfy"),
        ({"high": 1.0}, "high is 1, but they must satisfy"),
        ({"dim": 1}, "dim is 1, but it must be a whole number >= 2"),
        ({"s": 1.5}, r"s is 1.5, but it must be in \[-1, 1\]"),
        ({"s": math.nan}, "s is nan"),
        ({"potential": 2.0}, "potential is 2.0, but it must be a function"),
        ({"potential": lambda s: s / 0}, "must return a finite number for every s"),
        ({"potential": lambda s: torch.sin(1e9 * s)}, "nu is 1, but the quadrature does not converge"),
    ],
)
def test_bad_input_is_refused(options: dict, message: str) -> None:
    arguments = {"s": 0.0, "dim": 3, "nu": 1.0, **CAPS, **options}
    with pytest.raises(hs.HelmscopeError, match=message):
        zonal_committor(arguments.pop("s"), **arguments)


FAULTS = {
    "sign of U": lambda right, s, **options: right(s, **{**options, "potential": lambda z: -z}),
    "factor in nu": lambda right, s, **options: right(s, **{**options, "nu": 2 * options["nu"]}),
    "power of 1 - s^2": lambda right, s, **options: right(s, **{**options, "dim": options["dim"] + 1}),
    "sets exchanged": lambda right, s, **options: 1 - right(s, **options),
    "axis": lambda right, s, **options: right(-torch.as_tensor(s), **options),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str) -> None:
    assert outcome(Plant(FAULTS[name], zonal_committor), known_values) == "seen"
