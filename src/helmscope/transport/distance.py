"""Wasserstein distances between clouds of weighted points: W_p(mu, nu) = (min over plans of sum pi_ij dist_ij^p)^(1/p).

On the circle with the geodesic distance and on the line they cost O(n log n) (``circle``, ``line``); everything else is
a linear program (``exact``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.runs.bar import shows_progress
from helmscope.transport.circle import circle_cost
from helmscope.transport.clouds import Clouds, check_clouds
from helmscope.transport.cost import GEODESIC, Cost, Euclidean, Geodesic, check_power, root
from helmscope.transport.exact import exact_cost
from helmscope.transport.line import line_cost
from helmscope.types import HelmscopeError, check_progress

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import Progress, ProgressOption

SMALLEST = 1e-290  # a cost below has lost digits, or all of them


def w2(
    x: Float[Tensor, "*batch n d"],
    y: Float[Tensor, "*batch m d"],
    x_weights: Float[Tensor, "*batch n"] | None = None,
    y_weights: Float[Tensor, "*batch m"] | None = None,
    *,
    cost: Cost = GEODESIC,
    progress: ProgressOption = None,
) -> Float[Tensor, "*batch"]:
    """The 2-Wasserstein distance between two clouds, not its square; see ``wasserstein``.

    >>> w2(torch.eye(2), -torch.eye(2))
    tensor(1.5708)
    """
    return wasserstein(x, y, x_weights, y_weights, p=2.0, cost=cost, progress=progress)


@shows_progress("optimal transport")
def wasserstein(
    x: Float[Tensor, "*batch n d"],
    y: Float[Tensor, "*batch m d"],
    x_weights: Float[Tensor, "*batch n"] | None = None,
    y_weights: Float[Tensor, "*batch m"] | None = None,
    *,
    p: float = 2.0,
    cost: Cost = GEODESIC,
    progress: ProgressOption = None,
) -> Float[Tensor, "*batch"]:
    """The distance W_p between two clouds of weighted points, p >= 1, for every system of a batch.

    The cost defaults to ``Geodesic()``, the angle between unit vectors, because tokens are on the sphere; points of R^d
    need ``Euclidean()``, and other points than unit vectors raise an error without it. Weights default to equal ones.
    All costs are computed in float64 on the CPU, and the result has the dtype and device of x. It takes O(n log n) for
    ``Geodesic()`` on the circle (d = 2) and ``Euclidean()`` on the line (d = 1), and up to n^3 otherwise: by
    SciPy's assignment for equally many points of equal weight, else by POT.

    It is differentiable with respect to positions and weights where the optimal plan and potentials are unique;
    elsewhere the gradient is a subgradient, and 0 at distance 0. Raises ``HelmscopeError`` for p < 1, p so large that
    dist^p under- or overflows, and whatever ``check_clouds`` does not accept.

    >>> from helmscope.transport.cost import Euclidean
    >>> wasserstein(torch.zeros(1, 1), torch.tensor([[1.0], [3.0]]), p=1, cost=Euclidean())
    tensor(2.)
    """
    p = check_power(p)
    report = check_progress(progress)
    clouds = check_clouds(x, y, x_weights, y_weights, cost=cost)
    value = _least_cost(clouds, cost, p, report)
    fixed = value.detach()
    if not bool(torch.isfinite(fixed).all()):
        raise HelmscopeError(f"p is {p:g}, but dist^p must not overflow float64: take a smaller p or scale the points")
    if p > 2 and bool((fixed < SMALLEST).any()) and _underflows(clouds, cost, fixed):
        raise HelmscopeError(f"p is {p:g}, but dist^p must not underflow float64: take a smaller p or scale the points")
    return root(value, p).to(clouds.x.dtype)


def _least_cost(clouds: Clouds, cost: Cost, p: float, report: Progress) -> Float[Tensor, "*batch"]:
    """W_p^p by the fastest solver."""
    dimension, batch = clouds.x.shape[-1], clouds.x.shape[:-2]
    if isinstance(cost, Geodesic) and dimension == 2:
        return circle_cost(clouds, p)
    if isinstance(cost, Euclidean) and dimension == 1:
        return line_cost(clouds, p)
    flat = [part.reshape(-1, *part.shape[len(batch) :]) for part in (clouds.x, clouds.y, clouds.a, clouds.b)]
    values = []
    for system in zip(*flat, strict=True):
        values.append(exact_cost(Clouds(*system), cost, p))
        report(len(values) / len(flat[0]))
    return torch.stack(values).reshape(batch) if values else flat[0].new_zeros(batch, dtype=torch.float64)


@torch.no_grad()
def _underflows(clouds: Clouds, cost: Cost, value: Float[Tensor, "*batch"]) -> bool:
    """Whether W_p^p is tiny although W_1 is not the rounding of the coordinates."""
    scale = max(float(points.abs().max()) for points in (clouds.x, clouds.y))
    distance = _least_cost(clouds, cost, 1.0, lambda share: None)
    return bool(((value < SMALLEST) & (distance > 1e-12 * scale)).any())
