"""The simplest force with a potential and a swirl: a constant pull along the first axis, and a rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field
from helmscope.geometry.sphere import project
from helmscope.types import check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time


@dataclass(frozen=True)
class AxisForce(Field):
    """A force along an axis with a rotation: x' = P_x (h e) + s J x = grad_S U + R, with U = h <x, e>, e the first
    axis, h = ``strength``, s = ``swirl``, and J the rotation from the first axis to the second.

    With noise nu I and no swirl its stationary density is ~ e^{h <x, e> / nu}. R = s J x is free of divergence, but
    does work: <R, grad U> = -h s x_2, so that the free energy need not fall. Raises ``HelmscopeError`` unless both are
    finite.

    >>> AxisForce(strength=2.0, swirl=1.0)(torch.tensor([[0.0, 1.0]]))
    tensor([[1., 0.]])
    """

    strength: float = 1.0
    swirl: float = 0.0

    def __post_init__(self) -> None:
        for name in ("strength", "swirl"):
            object.__setattr__(self, name, check_real(name, getattr(self, name)))

    @property
    def exchangeable(self) -> bool:
        """True: every token moves by itself."""
        return True

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """h e + s J x, before projection."""
        first, second = self.strength - self.swirl * x[..., 1:2], self.swirl * x[..., :1]
        return torch.cat([first, second, torch.zeros_like(x[..., 2:])], -1)

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The tangential part, unchecked."""
        return project(x, self.ambient(x))

    def potential(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """U = h <x, e>.

        >>> AxisForce(strength=2.0).potential(torch.eye(2))
        tensor([2., 0.])
        """
        return self.strength * x[..., 0]
