"""Two clouds of weighted points, checked: the input of every transport problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import broadcast_shapes, check_dense_values, every
from helmscope.transport.cost import check_cost
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.transport.cost import Cost

# Totals closer than this are equal up to rounding; anything else is a mistake.
MASS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@dataclass(frozen=True)
class Clouds:
    """Points x with masses a and points y with masses b; the masses sum to 1 if the problem is balanced."""

    x: Float[Tensor, "*batch n d"]
    y: Float[Tensor, "*batch m d"]
    a: Float[Tensor, "*batch n"]
    b: Float[Tensor, "*batch m"]

    def double(self) -> Clouds:
        """The clouds in float64, with masses that sum to 1 to its rounding, not to that of float32.

        >>> clouds = Clouds(torch.zeros(3, 1), torch.zeros(1, 1), torch.full((3,), 1 / 3), torch.ones(1)).double()
        >>> clouds.a.sum().item() == 1
        True
        """
        a, b = self.a.double(), self.b.double()
        return Clouds(self.x.double(), self.y.double(), a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True))


def check_clouds(
    x: object,
    y: object,
    x_weights: object = None,
    y_weights: object = None,
    *,
    cost: Cost,
    balanced: bool = True,
    names: tuple[str, str, str, str] = ("x", "y", "x_weights", "y_weights"),
) -> Clouds:
    """Check two clouds and their weights, and return them on common batch axes.

    Weights are >= 0 and default to equal ones. In a balanced problem the totals of x and y must agree; they are then
    scaled to 1, so that every distance is one between probability measures. Raises ``HelmscopeError`` for an empty
    cloud, points that do not fit the cost, different dimensions, dtypes or devices, and negative or unequal masses;
    errors call the arguments by their ``names``.

    >>> from helmscope.transport.cost import Euclidean
    >>> check_clouds(torch.zeros(2, 1), torch.ones(4, 1), cost=Euclidean()).b
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    check_cost(cost)
    x_name, y_name, *weight_names = names
    points_x, points_y = cost.check(x, x_name), cost.check(y, y_name)
    for name in ("dtype", "device"):
        if getattr(points_x, name) != getattr(points_y, name):
            raise HelmscopeError(
                f"{y_name} has {name} {getattr(points_y, name)}, but it must have that of {x_name}, "
                f"{getattr(points_x, name)}"
            )
    if points_x.shape[-1] != points_y.shape[-1]:
        raise HelmscopeError(
            f"{y_name} has dimension {points_y.shape[-1]}, but it must have that of {x_name}, {points_x.shape[-1]}"
        )
    shapes = [points_x.shape[:-2], points_y.shape[:-2]]
    shapes += [weights.shape[:-1] for weights in (x_weights, y_weights) if isinstance(weights, torch.Tensor)]
    try:
        batch = broadcast_shapes(*shapes)
    except ValueError:
        raise HelmscopeError(
            f"{x_name} has shape {tuple(points_x.shape)} and {y_name} {tuple(points_y.shape)}, but their batch axes "
            "must broadcast, with those of the weights"
        ) from None
    points_x = points_x.expand(*batch, *points_x.shape[-2:])
    points_y = points_y.expand(*batch, *points_y.shape[-2:])
    a, b = _masses(points_x, x_weights, weight_names[0]), _masses(points_y, y_weights, weight_names[1])
    if not balanced:
        return Clouds(points_x, points_y, a, b)
    total_a, total_b = a.sum(-1, keepdim=True), b.sum(-1, keepdim=True)
    if isinstance(x_weights, torch.Tensor) and isinstance(y_weights, torch.Tensor):
        dtypes = (x_weights.dtype, y_weights.dtype, a.dtype)
        _check_equal_totals(total_a.detach(), total_b.detach(), max(MASS_TOLERANCE.get(kind, 0.0) for kind in dtypes))
    return Clouds(points_x, points_y, a / total_a, b / total_b)


def _masses(points: Tensor, weights: object, name: str) -> Tensor:
    """The mass of every point; 1/n without weights."""
    if weights is None:
        return torch.full(points.shape[:-1], 1 / points.shape[-2], dtype=points.dtype, device=points.device)
    if not isinstance(weights, torch.Tensor) or weights.shape[-1:] != points.shape[-2:-1]:
        shape = tuple(weights.shape) if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise HelmscopeError(f"{name} is {shape}, but it must be a tensor with one weight for each of the "
                             f"{points.shape[-2]} points")  # fmt: skip
    check_dense_values(name, weights)
    masses = weights.to(points)
    if not every((masses.detach() >= 0) & torch.isfinite(masses.detach())):
        bad = masses.detach()[~((masses.detach() >= 0) & torch.isfinite(masses.detach()))][0].item()
        raise HelmscopeError(f"{name} holds the entry {bad:g}, but every weight must be finite and >= 0")
    if not every(masses.detach().sum(-1) > 0):
        raise HelmscopeError(f"{name} sums to 0, but a cloud needs positive mass")
    return masses.expand(points.shape[:-1])


def _check_equal_totals(total_a: Tensor, total_b: Tensor, tol: float) -> None:
    gap = (total_a - total_b).abs()
    if not every(gap <= tol * total_a):
        worst = int(gap.flatten().argmax())
        raise HelmscopeError(
            f"x_weights sums to {total_a.flatten()[worst].item():.9g} and y_weights to "
            f"{total_b.flatten()[worst].item():.9g}, but balanced transport needs equal masses: normalize them, or "
            "relax them by sinkhorn(..., reach=...)"
        )
