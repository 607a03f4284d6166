"""The committor on the circle: closed forms on both arcs, finite differences, simulation, weak noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import solve_banded

from helmscope.fields.attention import SA
from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield import Cap, circle_committor, simulated_committor, zonal_committor
from helmscope.solve.euler_maruyama import EulerMaruyama
from helmscope.types import HelmscopeError


def points(*angles: float) -> torch.Tensor:
    t = torch.tensor(angles, dtype=torch.float64)
    return torch.stack([t.cos(), t.sin()], -1)


def arc(center: float, half_width: float) -> Cap:
    return Cap(points(center)[0], min_cosine=math.cos(half_width))


def eastward(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([1.0, 0.0], dtype=torch.float64).expand_as(x)


def turning(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([-x[..., 1], x[..., 0]], -1)


def uneven(x: torch.Tensor) -> torch.Tensor:
    """No gradient: it drives around the circle, with a speed that is not symmetric."""
    return turning(x) * (0.7 + 0.8 * x[..., :1] + 0.5 * x[..., :1] * x[..., 1:])


SETS = {"a": arc(math.pi, math.acos(0.8)), "b": arc(0.0, math.acos(0.8))}


def test_zonal_closed_form_on_both_arcs() -> None:
    s = torch.linspace(-0.99, 0.99, 41, dtype=torch.float64)
    height = (1 - s * s).sqrt()
    expected = zonal_committor(s, dim=2, nu=0.2, low=-0.8, high=0.8, potential=lambda s: s)
    for sign in (1, -1):
        q = circle_committor(eastward, torch.stack([s, sign * height], -1), nu=0.2, **SETS)
        assert float((q - expected).abs().max()) < 1e-13


def test_constant_turning() -> None:
    """q = (1 - e^{-w s / nu}) / (1 - e^{-w l / nu}) on each arc, s the distance from a or b along the drift."""
    a, b, nu, speed = arc(0.3, 0.2), arc(2.0, 0.5), 0.4, 1.5
    first, second = np.linspace(0.5, 1.5, 11), np.linspace(2.5, 2 * np.pi + 0.1, 31)
    length = 2 * np.pi + 0.1 - 2.5
    expected = np.concatenate([
        np.expm1(-speed * (first - 0.5) / nu) / np.expm1(-speed * 1.0 / nu),
        1 - np.expm1(-speed * (second - 2.5) / nu) / np.expm1(-speed * length / nu),
    ])  # fmt: skip
    q = circle_committor(lambda x: speed * turning(x), points(*first, *second), a=a, b=b, nu=nu)
    assert np.abs(q.numpy() - expected).max() < 1e-13


def test_finite_differences() -> None:
    a, b, nu, n = arc(-2.0, 0.4), arc(1.0, 0.3), 0.15, 4000
    start, length = -1.6, 2.3
    t = np.linspace(start, start + length, n + 1)
    h = length / n
    drift = 0.7 + 0.8 * np.cos(t) + 0.5 * np.cos(t) * np.sin(t)
    q = np.linspace(0, 1, n + 1)
    lower, upper = nu / h**2 - drift / (2 * h), nu / h**2 + drift / (2 * h)
    inner = slice(1, n)
    right = np.zeros(n - 1)
    right[-1] = -upper[n - 1]
    bands = np.stack([np.append(0, upper[1 : n - 1]), np.full(n - 1, -2 * nu / h**2), np.append(lower[2:n], 0)])
    q[inner] = solve_banded((1, 1), bands, right)
    ours = circle_committor(uneven, points(*t[::100]), a=a, b=b, nu=nu).numpy()
    assert np.abs(ours - q[::100]).max() < 1e-6  # h^2 times the fourth derivative


def test_simulation() -> None:
    x = points(math.pi / 2, -math.pi / 2)
    shares = simulated_committor(
        uneven, x, noise=IsotropicNoise(0.5), horizon=20, paths=250, stepper=EulerMaruyama(0.02), seed=3, **SETS
    )
    q = circle_committor(uneven, x, nu=0.5, **SETS).tolist()
    assert abs(q[0] - q[1]) > 0.2
    for interval, value in zip(shares.intervals(confidence=0.999), q, strict=True):
        assert interval.low < value < interval.high


def test_values_in_the_sets_and_exchange() -> None:
    x = points(*np.linspace(-3, 3, 50).tolist())
    q = circle_committor(uneven, x, nu=0.3, **SETS)
    assert (q[SETS["a"].contains(x)] == 0).all()
    assert (q[SETS["b"].contains(x)] == 1).all()
    exchanged = circle_committor(uneven, x, nu=0.3, a=SETS["b"], b=SETS["a"])
    assert float((q + exchanged - 1).abs().max()) < 1e-13
    weak = circle_committor(eastward, points(math.pi / 2), nu=1e-3, **SETS)
    assert abs(weak.item() - 1) < 1e-12


def test_bad_input() -> None:
    x = points(1.0, 2.0)
    touching = {"a": arc(0.0, 0.5), "b": arc(1.0, 0.5)}
    for field, given, message in (
        (eastward, {"nu": 0.0}, "nu is 0"),
        (eastward, {"x": torch.eye(3, dtype=torch.float64)}, "points of S.1 have dimension 2"),
        (eastward, {"a": 3}, "a is 3"),
        (eastward, {"a": arc(0.1, 0.5)}, "b overlaps with a"),
        (eastward, touching, "b touches a|b overlaps"),
        (SA(beta=1.0), {}, "attend to each other"),
        (lambda x, t: x, {}, "depends on time"),
        (lambda x: torch.sign(x), {}, "not smooth"),
        (lambda x: x / 0, {}, "not finite"),
    ):
        arguments = {"x": x, "nu": 0.5, **SETS, **given}
        with pytest.raises(HelmscopeError, match=message):
            circle_committor(field, arguments.pop("x"), **arguments)
