"""Brownian motion pinned at both ends has the density p_t(x, z) p_(T-t)(z, y) / p_T(x, y), by quadrature."""

from __future__ import annotations

import math

import pytest
import torch

from helmscope.geometry.heat_kernel import heat_kernel_series
from helmscope.transport.brownian import FlatBrownian, SphereBrownian
from support.transport_oracles import on_circle

F64 = torch.float64
NU, T, GAP = 0.15, 1.0, 0.8


@pytest.mark.parametrize("t", [0.25, 0.5, 0.8])
def test_pinned_on_the_circle_has_the_mean_and_the_variance_of_its_density(t: float) -> None:
    """Without the factor (r - h) / r of its noise, the variance is up to 3 % too large."""
    n = 200_000
    angles = (torch.arange(4000, dtype=F64) + 0.5) * 2 * math.pi / 4000 - math.pi
    density = heat_kernel_series(torch.cos(angles), dim=2, tau=NU * t)
    density = density * heat_kernel_series(torch.cos(angles - GAP), dim=2, tau=NU * (T - t))
    density = density / density.sum()
    mean = float(density @ angles)
    variance = float(density @ (angles - mean) ** 2)
    x, y = (on_circle(torch.full((n,), angle, dtype=F64)) for angle in (0.0, GAP))
    z = SphereBrownian(NU).pinned(x, y, t, T, torch.Generator().manual_seed(1))
    found = torch.atan2(z[:, 1], z[:, 0])
    assert float(found.mean()) == pytest.approx(mean, abs=4 * math.sqrt(variance / n))
    assert float(found.var()) == pytest.approx(variance, rel=4 * math.sqrt(2 / n))


@pytest.mark.parametrize("t", [0.5, 0.8])
def test_pinned_on_the_sphere_has_the_moments_of_its_density(t: float) -> None:
    """On S^2, by a sum over a grid of polar coordinates."""
    n, count = 100_000, 240
    theta = (torch.arange(count, dtype=F64) + 0.5) * math.pi / count
    turn = (torch.arange(count, dtype=F64) + 0.5) * 2 * math.pi / count
    parts = [theta.sin()[:, None] * turn.cos(), theta.sin()[:, None] * turn.sin(), theta.cos()[:, None] + 0 * turn]
    grid = torch.stack(parts, -1).reshape(-1, 3)
    start = torch.tensor([1.0, 0.0, 0.0], dtype=F64)
    end = torch.tensor([math.cos(GAP), math.sin(GAP), 0.0], dtype=F64)
    density = theta.sin().repeat_interleave(count)
    density = density * heat_kernel_series(grid @ start, dim=3, tau=NU * t)
    density = density * heat_kernel_series(grid @ end, dim=3, tau=NU * (T - t))
    density = density / density.sum()
    z = SphereBrownian(NU).pinned(start.expand(n, 3), end.expand(n, 3), t, T, torch.Generator().manual_seed(1))
    second = (grid**2 * density[:, None]).sum(0)
    fourth = (grid**4 * density[:, None]).sum(0)
    error = ((fourth - second**2) / n).sqrt()
    assert ((z**2).mean(0) - second).abs().max() < 4 * error.max() + 1e-3 * second.max()
    assert float((z[:, 2] ** 2).mean()) == pytest.approx(float(second[2]), rel=0.012)  # across the geodesic


@pytest.mark.parametrize("t", [0.25, 0.8])
def test_pinned_in_the_plane_has_its_mean_and_variance(t: float) -> None:
    n = 100_000
    x, y = torch.zeros(n, 2, dtype=F64), torch.tensor([1.0, -2.0], dtype=F64).expand(n, 2)
    z = FlatBrownian(NU).pinned(x, y, t, T, torch.Generator().manual_seed(1))
    variance = 2 * NU * t * (T - t) / T
    assert (z.mean(0) - t * y[0]).abs().max() < 4 * math.sqrt(variance / n)
    assert (z.var(0) / variance - 1).abs().max() < 4 * math.sqrt(2 / n)
