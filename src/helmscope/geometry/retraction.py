"""What a normalized layer does to a point of the sphere, exactly and order by order (source 000-1).

Post-norm: x -> N(x + delta) with N(y) = y / |y| and |x| = 1. With a = <x, delta> and p = P_x delta,

    N(x + delta) = ((1 + a) x + p) / sqrt((1 + a)^2 + |p|^2)
                 = x + p - a p - |p|^2 x / 2 + O(|delta|^3).

-a p is what the retraction takes from the tangent step, -|p|^2 x / 2 the curvature of the sphere. The source prints
x + p alone.

Pre-norm: y -> y + f with y in R^d. Its direction x = y / |y| makes the post-norm step of delta = f / |y|.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.geometry.sphere import angle_from_chords, project, retract

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def length(y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """The norm |y| over the last axis, of tiny and huge vectors too, whose squares leave the dtype.

    At y = 0, where the norm has a corner, the gradient is the subgradient 0.

    >>> length(torch.tensor([3e30, 4e30])).item() == torch.tensor(5e30).item()
    True
    """
    scale = y.detach().abs().amax(-1, keepdim=True)
    ordinary = (scale == 0) | ((scale > 1e-12) & (scale < 1e12))
    scale = torch.where(ordinary, 1.0, scale)
    norm: Tensor = torch.linalg.vector_norm(y / scale, dim=-1)
    return norm * scale.squeeze(-1)


def retract_first_order(x: Float[Tensor, "*batch d"], delta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """x + P_x delta = N(x + delta) + O(|delta|^2), |x| = 1: the expansion that the source prints. It leaves the sphere:
    its norm is sqrt(1 + |p|^2).

    >>> retract_first_order(torch.tensor([1.0, 0.0]), torch.tensor([0.1, 0.2]))
    tensor([1.0000, 0.2000])
    """
    return x + project(x, delta)


def retract_second_order(x: Float[Tensor, "*batch d"], delta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """x + p - a p - |p|^2 x / 2 = N(x + delta) + O(|delta|^3), |x| = 1.

    >>> retract_second_order(torch.tensor([1.0, 0.0]), torch.tensor([0.1, 0.2]))
    tensor([0.9800, 0.1800])
    """
    a = (x * delta).sum(-1, keepdim=True)
    p = project(x, delta)
    return x + p - a * p - 0.5 * (p * p).sum(-1, keepdim=True) * x


def retraction_angle(x: Float[Tensor, "*batch d"], delta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """The geodesic distance from x to N(x + delta), atan2(|p|, 1 + a) in [0, pi], |x| = 1.

    Where p = 0 it is 0 or pi, with the subgradient 0; at delta = -x it is NaN.

    >>> retraction_angle(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 3.0])).item()  # a right angle
    1.5707963705062866
    """
    moved = x + delta
    ahead = (x * moved).sum(-1)  # 1 + a
    # p = P delta = P (x + delta): from the shorter of the two, which loses fewer digits
    shorter = length(moved.detach()) < length(delta.detach())
    aside = length(project(x, torch.where(shorter.unsqueeze(-1), moved, delta)))
    # not abs, whose derivative at a right angle is 0; not atan2, whose last bit depends on the place in the tensor
    behind = ahead < 0
    acute = angle_from_chords(aside, torch.where(behind, -ahead, ahead)) / 2
    return torch.where(behind, torch.pi - acute, acute)


def direction_step(
    y: Float[Tensor, "*batch d"], f: Float[Tensor, "*batch d"]
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
    """The residual stream y -> y + f in polar form: its new direction and its new norm.

    The direction of y + f = 0 is NaN.

    >>> direction_step(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 4.0]))
    (tensor([0.6000, 0.8000]), tensor(5.))
    """
    return retract(y + f), length(y + f)


def direction_step_first_order(
    y: Float[Tensor, "*batch d"], f: Float[Tensor, "*batch d"]
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
    """x + P_x f / |y| and |y| + <x, f> with x = y / |y|: ``direction_step`` but for O(|f|^2 / |y|^2) in the direction
    and O(|f|^2 / |y|) in the norm.

    The direction makes steps of 1 / |y|, which shrink as the stream grows with depth. At y = 0 all is NaN.

    >>> direction_step_first_order(torch.tensor([2.0, 0.0]), torch.tensor([0.1, 0.2]))
    (tensor([1.0000, 0.1000]), tensor(2.1000))
    """
    x, radius = retract(y), length(y)
    return retract_first_order(x, f / radius.unsqueeze(-1)), radius + (x * f).sum(-1)
