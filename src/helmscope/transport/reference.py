"""Fields as the drift of a reference process of independent points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, StateSpace, as_field
from helmscope.fields.noise import IsotropicNoise
from helmscope.geometry.arithmetic import every, full_precision
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time
    from helmscope.fields.noise import Noise


@dataclass(frozen=True, eq=False)
class FlatFunction(Field):
    """A function of points, f(x) or f(x, t=...), as a drift of R^d.

    >>> FlatFunction(as_field(lambda x: -x))(torch.tensor([[1.0, 2.0]]))
    tensor([[-1., -2.]])
    """

    function: Field

    @property
    def space(self) -> StateSpace:
        """R^d."""
        return StateSpace.FLAT

    @property
    def autonomous(self) -> bool:
        """Whether the function has no argument ``t``."""
        return self.function.autonomous

    @property
    def takes_weights(self) -> bool:
        """False: a plain function takes only the points."""
        return False

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The value of the function, unchecked."""
        return self.function.ambient(x, t=t)


def check_reference(reference: object, space: StateSpace | None) -> Field | None:
    """The field of the reference in its space, or None."""
    if reference is None:
        return None
    field = as_field(reference)
    if space is StateSpace.FLAT and not isinstance(reference, Field):
        field = FlatFunction(field)
    if space is not None and field.space is not space:
        raise HelmscopeError(
            f"reference is {field.name}, a field of {field.space.value}, but space is {space!r}: pass a field of that "
            "space, or for R^d a plain function of points"
        )
    return field


@full_precision
def interacts(field: Field, points: Tensor) -> bool:
    """Whether the velocity at a point depends on the other points; raises ``HelmscopeError`` unless it is finite."""
    sample = points[:: max(1, len(points) // 4)][:4]
    field.check_size(sample.unsqueeze(0))
    together = field.velocity(sample.unsqueeze(0))
    alone = torch.cat([field.velocity(point[None, None]) for point in sample], 1)
    if not every(torch.isfinite(together)):
        raise HelmscopeError(f"reference is {field.name}, whose velocity at x or y is not finite, but it must be")
    return not every((together - alone).abs() <= 1e-6 * (1 + together.abs()))


def velocity_of(field: Field | None, noise: Noise, *, on_sphere: bool) -> Callable[[Tensor, float], Tensor] | None:
    """The drift of the reference as a function of points (n, d) and time; None for 0."""
    curved = on_sphere and not isinstance(noise, IsotropicNoise)  # isotropic noise adds no drift
    if field is None and not curved:
        return None

    def velocity(x: Tensor, t: float) -> Tensor:
        value = torch.zeros_like(x) if field is None else field.velocity(x.unsqueeze(0), t=t).squeeze(0)
        return value + noise.process.drift(noise, x) if curved else value

    return velocity
