"""Slow oracles of optimal transport, and random clouds."""

from __future__ import annotations

import numpy as np
import ot
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from torch import Tensor

Array = NDArray[np.float64]


def unit_cloud(n: int, d: int, seed: int) -> Tensor:
    """Uniform random points on the sphere."""
    gaussian = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(gaussian, dim=-1)


def normal_cloud(n: int, seed: int) -> Tensor:
    """n normal points of the plane with little sampling noise: quasi-random."""
    uniform = torch.quasirandom.SobolEngine(2, scramble=True, seed=seed).draw(n, dtype=torch.float64)
    return 2**0.5 * torch.erfinv(2 * uniform.clamp(1e-9, 1 - 1e-9) - 1)


def relative_gap(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|."""
    return float((found - wanted).norm() / wanted.norm())


def random_weights(n: int, seed: int) -> Tensor:
    """Random masses with total 1."""
    weights = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
    return weights / weights.sum()


def on_circle(angles: Tensor) -> Tensor:
    """Points of the circle with these angles."""
    return torch.stack([angles.cos(), angles.sin()], -1)


def costs(x: Tensor, y: Tensor, p: float, metric: str) -> Array:
    """dist^p between all points, from plain formulas."""
    u, v = x.detach().double().numpy(), y.detach().double().numpy()
    if metric == "geodesic":
        return np.arccos(np.clip(u @ v.T, -1, 1)) ** p
    return np.linalg.norm(u[:, None] - v[None], axis=-1) ** p


def pot_cost(c: Array, a: Tensor | None = None, b: Tensor | None = None) -> float:
    """W_p^p by POT's network simplex."""
    masses = [
        np.full(size, 1 / size) if weights is None else weights.numpy()
        for weights, size in zip((a, b), c.shape, strict=True)
    ]
    return float(ot.emd2(*masses, c))


def linear_program_cost(c: Array, a: Tensor, b: Tensor) -> float:
    """W_p^p by SciPy's interior-point or simplex solver."""
    n, m = c.shape
    rows = np.kron(np.eye(n), np.ones((1, m)))
    columns = np.kron(np.ones((1, n)), np.eye(m))
    result = linprog(c.ravel(), A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([a.numpy(), b.numpy()]))
    assert result.success
    return float(result.fun)


def central_difference(function, point: Tensor, direction: Tensor, step: float = 1e-6) -> float:
    """The derivative of a scalar function along a direction."""
    return float(function(point + step * direction) - function(point - step * direction)) / (2 * step)
