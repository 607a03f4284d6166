"""Attention on a density by sums of positive terms, in the log domain.

With the quadrature weights w_j and the values rho_j of the density at the points y_j of a grid,

    Z(x) = sum_j w_j rho_j K(x, y_j),       (1 / beta) grad_S log Z(x) = sum_j p_j(x) m(x, y_j),

where p_j are the terms of Z divided by their sum. On the circle and on S^2 the kernel K is e^{beta <x, y>} and m is the
tangential part of y. On a ``ZonalGrid`` a point stands for its parallel {s e + sqrt(1 - s^2) u}, and K is the mean of
e^{beta <x, y>} over that parallel and m the mean of the tangential part, weighted with e^{beta <x, y>}.

Z spans a factor of up to e^{2 |beta|}. Its series has an error of about 1e-16 of the largest value, so that at the
antipode of a narrow cluster no digit is left if beta > 18. Here all terms are positive, so that Z has the relative
accuracy of the values of the density everywhere, for the price of all pairs of points.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.harmonics import zonal_quadrature
from helmscope.meanfield.grid import Grid
from helmscope.meanfield.zonal_grid import ZonalGrid

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

BLOCK = 2**20  # numbers in a table that is computed at once


def attention_sums(
    grid: Grid, beta: float, values: Float[Tensor, " m"], at: Int[Tensor, " n"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n c"]]:
    """log Z and the components of (1 / beta) grad_S log Z, at the points of the grid with the indices ``at``, for a
    density with the relative ``values``; negative ones are clipped.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=64)
    >>> values = (40 * grid.points[:, 0] - 40).exp()  # e^{40 cos t}, up to a factor
    >>> opposite = torch.tensor([len(values) // 2])
    >>> attention_sums(grid, 40.0, values, opposite)[0]  # e^{40 cos t - 40} times e^{-40 cos t}
    tensor([-40.], dtype=torch.float64)
    """
    log_mass = (grid.weights * values).clamp(min=0).log()
    if isinstance(grid, ZonalGrid):
        cosines, shares = _parallel_nodes(grid.dim, beta)
        blocks = torch.split(at, max(1, BLOCK // (len(log_mass) * len(cosines))))
        sums = [_zonal_sums(grid, beta, log_mass, rows, cosines, shares) for rows in blocks]
    else:
        blocks = torch.split(at, max(1, BLOCK // len(log_mass)))
        sums = [_sums(grid, beta, log_mass, rows) for rows in blocks]
    log_z, pulls = zip(*sums, strict=True)
    return torch.cat(log_z), torch.cat(pulls)


@full_precision
def _sums(grid: Grid, beta: float, log_mass: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    logits = beta * grid.points[at] @ grid.points.mT + log_mass
    log_z = logits.logsumexp(-1)
    mean = (logits - log_z[:, None]).exp() @ grid.points
    return log_z, (grid.frame[at] @ mean[..., None])[..., 0]


@full_precision
def _zonal_sums(
    grid: ZonalGrid, beta: float, log_mass: Tensor, at: Tensor, cosines: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """With r = beta sin sin', K = e^{beta s s'} E e^{r c}, c the cosine between two directions orthogonal to e."""
    height, sine = grid.cosines, grid.points[:, 1]
    r = beta * sine[at][:, None] * sine
    terms = shares * (r[..., None] * cosines - r.abs()[..., None]).exp()
    total = terms.sum(-1)
    logits = beta * height[at][:, None] * height + r.abs() + total.log() + log_mass
    log_z = logits.logsumexp(-1)
    toward = sine[at][:, None] * height - height[at][:, None] * sine * (terms @ cosines) / total
    return log_z, ((logits - log_z[:, None]).exp() * toward).sum(-1, keepdim=True)


def _parallel_nodes(dim: int, beta: float) -> tuple[Tensor, Tensor]:
    """Quadrature of c = <u, u'> for uniform directions orthogonal to e: exact to rounding for e^{beta c}."""
    if dim == 2:  # a parallel of the circle has two points
        ends = torch.tensor([-1.0, 1.0], dtype=torch.float64, device="cpu")
        return ends, torch.full_like(ends, 0.5)
    return zonal_quadrature(24 + math.ceil(abs(beta)), dim=dim - 1)
