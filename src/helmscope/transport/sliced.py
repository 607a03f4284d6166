"""Sliced transport on the sphere: the circular W2 of projections on random great circles.

    SSW_2(mu, nu)^2 = E W_2(P_U mu, P_U nu)^2,        P_U x = U^T x / |U^T x|

where U (d, 2) is a uniformly random orthonormal frame (Bonet et al. 2023, arXiv:2206.08780). Each slice costs
O(n log n), so it is affordable where an exact plan is not, and for d = 2 it is W2 itself. It is another distance than
W2 for d > 2, and may be larger, because projections can increase angles: compare it only with other sliced
distances.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.stats.intervals import mean_interval
from helmscope.transport.circle import circle_cost
from helmscope.transport.clouds import Clouds, check_clouds
from helmscope.transport.cost import Geodesic, root
from helmscope.types import HelmscopeError, Interval, check_integer, check_seed

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

POINTS_PER_CHUNK = 1 << 22  # projected points that are kept at a time


def sliced_w2(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    x_weights: Float[Tensor, " n"] | None = None,
    y_weights: Float[Tensor, " m"] | None = None,
    *,
    slices: int = 128,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """The sliced distance SSW_2 between two clouds on the sphere, in radians, with its interval over random slices.

    The interval is that of Student for the mean of the squares. POT's ``sliced_wasserstein_sphere`` measures on circles
    of circumference 1, so it is 2 pi times smaller. Raises ``HelmscopeError`` for fewer than two slices, batch axes and
    whatever ``check_clouds`` does not accept.

    >>> interval = sliced_w2(torch.eye(3), -torch.eye(3))
    >>> interval.low < interval.estimate < interval.high
    True
    """
    count = check_integer("slices", slices, at_least=2)
    clouds = check_clouds(x, y, x_weights, y_weights, cost=Geodesic())
    if clouds.x.ndim != 2:
        raise HelmscopeError(
            f"x and y have batch axes {tuple(clouds.x.shape[:-2])}, but an interval is computed for one pair of "
            "clouds: use w2_on_great_circles"
        )
    frames = random_frames(count, clouds.x.shape[-1], seed=seed)
    with torch.no_grad():
        distances = w2_on_great_circles(x, y, x_weights, y_weights, frames=frames)
    squares = mean_interval((distances.double() ** 2).cpu().numpy(), confidence=confidence)
    low, high = math.sqrt(max(squares.low, 0.0)), math.sqrt(squares.high)
    return Interval(math.sqrt(squares.estimate), low, high, n=count)


def random_frames(slices: int, dim: int, *, seed: int = 0) -> Float[Tensor, "slices d 2"]:
    """Uniformly random orthonormal frames of planes in R^d, float64: the QR factors of Gaussian matrices.

    >>> frames = random_frames(5, 3)
    >>> torch.allclose(frames.mT @ frames, torch.eye(2, dtype=torch.float64))
    True
    """
    count = check_integer("slices", slices, at_least=1)
    d = check_integer("dim", dim, at_least=2)
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    gaussian = torch.randn(count, d, 2, generator=generator, dtype=torch.float64, device="cpu")
    frames: Tensor = torch.linalg.qr(gaussian)[0]
    return frames


@full_precision
def w2_on_great_circles(
    x: Float[Tensor, "*batch n d"],
    y: Float[Tensor, "*batch m d"],
    x_weights: Float[Tensor, "*batch n"] | None = None,
    y_weights: Float[Tensor, "*batch m"] | None = None,
    *,
    frames: Float[Tensor, "slices d 2"],
) -> Float[Tensor, "*batch slices"]:
    """Circular W2 of two clouds projected on each great circle, in radians; differentiable, for batches.

    The root mean square over random ``frames`` estimates SSW_2. A point orthogonal to a plane has no projection and is
    placed at angle 0. Raises ``HelmscopeError`` for frames of another dimension.

    >>> w2_on_great_circles(torch.eye(2), -torch.eye(2), frames=random_frames(3, 2))
    tensor([1.5708, 1.5708, 1.5708])
    """
    clouds = check_clouds(x, y, x_weights, y_weights, cost=Geodesic())
    d = clouds.x.shape[-1]
    if not isinstance(frames, torch.Tensor) or frames.ndim != 3 or frames.shape[1:] != (d, 2) or len(frames) < 1:
        what = tuple(frames.shape) if isinstance(frames, torch.Tensor) else type(frames).__name__
        raise HelmscopeError(f"frames is {what}, but it must be a tensor (slices, {d}, 2): use random_frames")
    frames = frames.to(clouds.x.device, torch.float64)
    points = clouds.x.shape[:-1].numel() + clouds.y.shape[:-1].numel()
    size = max(1, POINTS_PER_CHUNK // points)
    squares = [_projected_cost(clouds, frames[begin : begin + size]) for begin in range(0, len(frames), size)]
    return root(torch.cat(squares, -1), 2.0).to(clouds.x.dtype)


@full_precision
def _projected_cost(clouds: Clouds, frames: Float[Tensor, "slices d 2"]) -> Float[Tensor, "*batch slices"]:
    """W_2^2 on every great circle."""
    masses = (part.double().unsqueeze(-2).expand(*part.shape[:-1], len(frames), -1) for part in (clouds.a, clouds.b))
    projected = []
    for points in (clouds.x, clouds.y):
        flat = points.double().unsqueeze(-3) @ frames
        zero = (flat == 0).all(-1, keepdim=True)
        projected.append(torch.where(zero, flat.new_tensor([1.0, 0.0]), flat))
    return circle_cost(Clouds(projected[0], projected[1], *masses), 2.0)
