"""Entropy of a law from a sample of it, by the distances of nearest neighbors (Kozachenko and Leonenko 1987)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@full_precision
def nearest_neighbor_entropy(x: Float[Tensor, "n d"], *, on_sphere: bool) -> float:
    """H = -int rho log rho in nats with respect to volume (area on the sphere), from n independent points:

        H = log(n - 1) + gamma + log V_k + (k / n) sum_i log r_i,

    where r_i is the distance to the nearest other point, k the dimension of the space and V_k the volume of the unit
    ball. Balls are taken as flat, and the density as constant in them: in high dimension the bias is large. Points that
    are not independent, such as regular or quasi-random ones, repel each other, and H comes out too large. Raises
    ``HelmscopeError`` for fewer than two points and for equal points.

    >>> x = torch.randn(4000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> abs(nearest_neighbor_entropy(x, on_sphere=False) - 1.4189) < 0.1  # log(2 pi e) / 2
    True
    """
    n, d = x.shape
    if n < 2:
        raise HelmscopeError(f"x has {n} point, but an entropy needs at least two")
    k = d - 1 if on_sphere else d
    nearest = torch.empty(n, dtype=x.dtype, device=x.device)
    rows = max(1, 2**22 // n)
    for first in range(0, n, rows):
        distance = torch.cdist(x[first : first + rows], x, compute_mode="donot_use_mm_for_euclid_dist")
        index = torch.arange(len(distance), device=x.device)
        distance[index, first + index] = torch.inf
        nearest[first : first + rows] = distance.amin(1)
    if not bool((nearest > 0).all()):
        raise HelmscopeError("x holds equal points, but the entropy of a law with atoms is not defined")
    if on_sphere:
        nearest = 2 * torch.asin((nearest / 2).clamp(max=1))
    volume = k / 2 * math.log(math.pi) - math.lgamma(k / 2 + 1)
    return math.log(n - 1) + 0.5772156649015329 + volume + k * float(torch.log(nearest).mean())
