"""The committor of a zonal landscape, in closed form [Helmholtz Transformer, no. 9].

The process has the generator L = grad U . grad + nu Lap_S on S^(d-1), and U depends on x through s = <x, e> only. The
probability q of reaching B = {s >= high} before A = {s <= low} solves L q = 0 with q = 0 on A and 1 on B:

    q'(s) ~ e^{V(s) / nu} (1 - s^2)^{-(d-1)/2},    V = -U.

A drift R that turns around the axis e changes nothing, since R . grad q = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.types import HelmscopeError, check_integer, check_real, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

ORDER = 16  # nodes per panel
FIRST_PANELS, MAX_PANELS = 16, 2**16
TOLERANCE = 1e-14


def zonal_committor(
    s: Float[Tensor, "*shape"] | float,
    *,
    dim: int,
    nu: float,
    low: float,
    high: float,
    potential: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "*shape"]:
    """Committor q(s) on S^(dim-1) as a function of s = <x, e>, by quadrature to about 1e-14, in float64.

    ``potential`` is U(s), a function of a float64 tensor with values in [low, high]; without it U = 0. Raises
    ``HelmscopeError`` unless nu > 0 (a deterministic flow has no committor), -1 < low < high < 1, s is in [-1, 1] and
    U is finite, and where U / nu varies too rapidly for the quadrature.

    >>> zonal_committor(0.3, dim=3, nu=1.0, low=-0.8, high=0.8)  # (atanh 0.3 + atanh 0.8) / (2 atanh 0.8)
    tensor(0.6409, dtype=torch.float64)
    >>> zonal_committor(0.3, dim=3, nu=0.5, low=-0.8, high=0.8, potential=lambda s: s)  # drawn to s = 1
    tensor(0.9288, dtype=torch.float64)
    """
    dim = check_integer("dim", dim, at_least=2)
    nu = check_real("nu", nu, above=0)
    low, high = check_real("low", low), check_real("high", high)
    if not -1 < low < high < 1:
        raise HelmscopeError(f"low is {low:g} and high is {high:g}, but they must satisfy -1 < low < high < 1")
    if potential is not None and not callable(potential):
        raise HelmscopeError(f"potential is {short_repr(potential)}, but it must be a function U(s)")
    heights = torch.as_tensor(s, dtype=torch.float64, device="cpu").detach()
    if not bool((heights.abs() <= 1).all()):
        raise HelmscopeError(f"s is {short_repr(s)}, but it must be in [-1, 1]")

    def log_density(y: np.ndarray) -> np.ndarray:
        """log of dq/dy up to a constant, y = atanh s, with 1 - s^2 = 1 / cosh^2 y."""
        log_cosh = np.abs(y) + np.log1p(np.exp(-2 * np.abs(y))) - math.log(2)
        result: np.ndarray = (dim - 3) * log_cosh
        return result if potential is None else result - _potential_values(potential, np.tanh(y)) / nu

    inside = np.clip(heights.numpy().ravel(), low, high)
    limits, y = (math.atanh(low), math.atanh(high)), np.arctanh(inside)
    share = share_below(log_density, y, limits)
    if share is None:
        raise HelmscopeError(f"nu is {nu:g}, but the quadrature does not converge for this potential: use a larger nu")
    return torch.from_numpy(share).reshape(heights.shape)


def share_below(
    log_density: Callable[[np.ndarray], np.ndarray], y: np.ndarray, limits: tuple[float, float]
) -> np.ndarray | None:
    """The integral of e^log_density from the lower limit to each y, divided by that to the upper limit, to about 1e-14;
    None if the quadrature does not converge.

    >>> share_below(np.log, np.array([0.5]), (0.0, 1.0))  # of the density y
    array([0.25])
    """
    panels, previous = FIRST_PANELS, _share_below(log_density, y, limits, FIRST_PANELS)
    while panels < MAX_PANELS:
        panels *= 2
        share = _share_below(log_density, y, limits, panels)
        if np.abs(share - previous).max(initial=0.0) <= TOLERANCE:
            return share
        previous = share
    return None


def _potential_values(potential: Callable[[Tensor], Tensor], s: np.ndarray) -> np.ndarray:
    values = potential(torch.from_numpy(s))
    if not isinstance(values, torch.Tensor) or values.shape != s.shape or not bool(torch.isfinite(values).all()):
        raise HelmscopeError(f"potential returns {short_repr(values)}, but it must return a finite number for every s")
    return values.detach().numpy().astype(np.float64)


def _share_below(
    log_density: Callable[[np.ndarray], np.ndarray], y: np.ndarray, limits: tuple[float, float], panels: int
) -> np.ndarray:
    """The integral of e^log_density from the lower limit to each y, divided by that to the upper limit: Gauss-Legendre
    quadrature in equal panels, and in the part of a panel up to y.
    """
    nodes, weights = np.polynomial.legendre.leggauss(ORDER)
    nodes, weights = (nodes + 1) / 2, weights / 2
    edges = np.linspace(*limits, panels + 1)
    width = (limits[1] - limits[0]) / panels
    whole = log_density((edges[:-1, None] + width * nodes).ravel()).reshape(panels, ORDER)
    shift = whole.max()
    cumulative = np.concatenate([[0.0], np.cumsum(width * (np.exp(whole - shift) * weights).sum(-1))])
    panel = np.clip(((y - limits[0]) / width).astype(int), 0, panels - 1)
    part = y - edges[panel]
    partial = log_density((edges[panel, None] + part[:, None] * nodes).ravel()).reshape(len(y), ORDER)
    below: np.ndarray = cumulative[panel] + part * (np.exp(partial - shift) * weights).sum(-1)
    return np.where(y >= limits[1], 1.0, below / cumulative[-1])
