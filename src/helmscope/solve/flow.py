"""The field as a stepper sees it: displacements of the systems at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, LayeredField, ScaledField, StreamField, TokenField, lives_on_sphere
from helmscope.geometry.sphere import project, retract
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Flow:
    """A field with the token weights of the systems at hand. Steppers ask for displacements h f(x), never for f(x)
    alone, because a velocity may leave the dtype while the displacement does not.

    ``leader[i]`` is the token that token i moves with (itself, unless merged).
    """

    field: Field
    weights: Float[Tensor, "batch n"] | None = None
    leader: Int[Tensor, "batch n"] | None = None

    @cached_property
    def on_sphere(self) -> bool:
        """Whether states are unit vectors; else they are a residual stream in R^d."""
        return lives_on_sphere(self.field)

    def land(self, y: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n d"]:
        """From where a step ends to where states live: the nearest unit vector; a residual stream stays as it is."""
        return retract(y) if self.on_sphere else y

    def direction(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The states as unit vectors."""
        return self.field.direction(x) if not self.on_sphere and isinstance(self.field, StreamField) else x

    def size(self, x: Float[Tensor, "batch n d"], step: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n"]:
        """Length of a displacement in units of the state's: the radius of a residual stream sets the scale."""
        length: Tensor = torch.linalg.vector_norm(step, dim=-1)
        return length if self.on_sphere else length / self.radius(x)

    def radius(self, x: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n"]:
        """The radius of a residual stream; 1 where states are unit vectors."""
        if self.on_sphere or not isinstance(self.field, StreamField):
            return torch.ones_like(x[..., 0])
        return self.field.radius(x)

    def layer(self, x: Float[Tensor, "batch n d"], h: Float[Tensor, "batch 1 1"]) -> Float[Tensor, "batch n d"]:
        """One discrete layer: the field's own where it has one, else N(x + h f(x)) with f before projection."""
        if isinstance(self.field, LayeredField):
            return self.field.layer(x, h.to(x.dtype), self.weights)
        return self.land(x + self.move_ambient(x, h))

    def move(self, x: Float[Tensor, "batch n d"], h: Float[Tensor, "batch 1 1"]) -> Float[Tensor, "batch n d"]:
        """Tangent displacement h f(x)."""
        return self._together(self._displacement(x, h))

    @cached_property
    def _displacement(self) -> Callable[[Tensor, Tensor], Tensor]:
        """(x, h) -> h f(x), chosen once: looking at what a field can do costs more than a small sum."""
        field, weights = self.field, self.weights
        if isinstance(field, ScaledField):
            return lambda x, h: field.scaled(x, weights).over(h)
        if isinstance(field, TokenField):
            return lambda x, h: h.to(x.dtype) * field.velocity(x, weights)
        return lambda x, h: h.to(x.dtype) * project(x, field(x))

    def move_ambient(self, x: Float[Tensor, "batch n d"], h: Float[Tensor, "batch 1 1"]) -> Float[Tensor, "batch n d"]:
        """Displacement before projection, what a layer adds to its residual stream."""
        if not isinstance(self.field, TokenField):
            raise HelmscopeError(
                f"field is {type(self.field).__name__}, but this stepper needs one with an ambient(x) method: the "
                "velocity before projection"
            )
        return self._together(h.to(x.dtype) * self.field.ambient(x, self.weights))

    def log_speed(self, x: Float[Tensor, "batch n d"]) -> Float[Tensor, " batch"]:
        """Logarithm of the speed of the fastest token of each system, relative to the radius of a stream; float64."""
        if isinstance(self.field, ScaledField):
            scaled = self.field.scaled(x, self.weights)
            step, log_scale = scaled.direction, scaled.log_scale.to(torch.float64).squeeze(-1)
        else:
            step = self.move(x, torch.ones(len(x), 1, 1, dtype=torch.float64, device=x.device))
            log_scale = torch.zeros(step.shape[:-1], dtype=torch.float64, device=x.device)
        speed = self.size(x, step).to(torch.float64)
        return (torch.log(speed) + log_scale).amax(-1)

    def select(self, which: Tensor) -> Flow:
        """The flow of some of the systems, by index or mask."""
        weights = None if self.weights is None else self.weights[which]
        leader = None if self.leader is None else self.leader[which]
        return replace(self, weights=weights, leader=leader)

    def _together(self, step: Tensor) -> Tensor:
        if self.leader is None:
            return step
        return step.gather(-2, self.leader.unsqueeze(-1).expand_as(step))
