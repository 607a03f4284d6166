"""The step of a normalized layer on the sphere, exactly and expanded order by order [Helmholtz Transformer, no. 1].

Post-norm: x -> N(x + delta) with N(y) = y / |y| and |x| = 1. With a = <x, delta> and p = P_x delta,

    N(x + delta) = ((1 + a) x + p) / sqrt((1 + a)^2 + |p|^2)
                 = x + p - a p - |p|^2 x / 2 + O(|delta|^3).

The term -a p is the shrinkage of the tangent step by the retraction, -|p|^2 x / 2 the curvature of the sphere. The
source prints only x + p.

Pre-norm: y -> y + f with y in R^d. The direction x = y / |y| takes the post-norm step with delta = f / |y|.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.geometry.sphere import angle_from_chords, project, retract
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = [
    "direction_step",
    "direction_step_first_order",
    "length",
    "retract_first_order",
    "retract_second_order",
    "retraction_angle",
]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)


def length(y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Norm |y| over the last axis, without overflow or underflow for huge and tiny vectors.

    At y = 0, where the norm is not differentiable, the gradient is the subgradient 0.

    >>> length(torch.tensor([3e30, 4e30])).item() == torch.tensor(5e30).item()
    True
    """
    scale = y.detach().abs().amax(-1, keepdim=True)
    ordinary = (scale == 0) | ((scale > 1e-12) & (scale < 1e12))
    scale = torch.where(ordinary, 1.0, scale)
    norm: Tensor = torch.linalg.vector_norm(y / scale, dim=-1)
    return norm * scale.squeeze(-1)


def retract_first_order(x: Float[Tensor, "*batch d"], delta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """First-order expansion x + P_x delta = N(x + delta) + O(|delta|^2), |x| = 1, as printed in the source.

    The result is off the sphere: its norm is sqrt(1 + |p|^2).

    >>> retract_first_order(torch.tensor([1.0, 0.0]), torch.tensor([0.1, 0.2]))
    tensor([1.0000, 0.2000])
    """
    return x + project(x, delta)


def retract_second_order(x: Float[Tensor, "*batch d"], delta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Second-order expansion x + p - a p - |p|^2 x / 2 = N(x + delta) + O(|delta|^3), |x| = 1.

    >>> retract_second_order(torch.tensor([1.0, 0.0]), torch.tensor([0.1, 0.2]))
    tensor([0.9800, 0.1800])
    """
    a = (x * delta).sum(-1, keepdim=True)
    p = project(x, delta)
    return x + p - a * p - 0.5 * (p * p).sum(-1, keepdim=True) * x


def retraction_angle(x: Float[Tensor, "*batch d"], delta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Geodesic distance from x to N(x + delta): atan2(|p|, 1 + a) in [0, pi], |x| = 1.

    Where p = 0 the distance is 0 or pi and its gradient is the subgradient 0; at delta = -x it is NaN.

    >>> retraction_angle(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 3.0])).item()  # a right angle
    1.5707963705062866
    """
    moved = x + delta
    normal = (x * moved).sum(-1)  # 1 + a
    # p = P delta = P (x + delta): projecting the shorter of the two loses fewer digits
    shorter = length(moved.detach()) < length(delta.detach())
    tangential = length(project(x, torch.where(shorter.unsqueeze(-1), moved, delta)))
    # not abs, whose derivative at a right angle is 0; not atan2, whose last bit depends on the position in the tensor
    obtuse = normal < 0
    acute = angle_from_chords(tangential, torch.where(obtuse, -normal, normal)) / 2
    return torch.where(obtuse, torch.pi - acute, acute)


def direction_step(
    y: Float[Tensor, "*batch d"], f: Float[Tensor, "*batch d"]
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
    """The residual update y -> y + f in polar form: the new direction and the new norm.

    Where y + f = 0 the direction is NaN.

    >>> direction_step(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 4.0]))
    (tensor([0.6000, 0.8000]), tensor(5.))
    """
    return retract(y + f), length(y + f)


def direction_step_first_order(
    y: Float[Tensor, "*batch d"], f: Float[Tensor, "*batch d"]
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
    """First-order expansion of ``direction_step``: x + P_x f / |y| and |y| + <x, f> with x = y / |y|.

    The errors are O(|f|^2 / |y|^2) in the direction and O(|f|^2 / |y|) in the norm. The direction takes steps of order
    1 / |y|, which shrink as the residual stream grows with depth. At y = 0 both results are NaN.

    >>> direction_step_first_order(torch.tensor([2.0, 0.0]), torch.tensor([0.1, 0.2]))
    (tensor([1.0000, 0.1000]), tensor(2.1000))
    """
    x, radius = retract(y), length(y)
    return retract_first_order(x, f / radius.unsqueeze(-1)), radius + (x * f).sum(-1)
