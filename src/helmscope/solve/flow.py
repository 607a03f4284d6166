"""The interface between fields and steppers: displacements of the active systems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, StateSpace
from helmscope.fields.parameters import selected
from helmscope.geometry.sphere import retract

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    Each = Float[Tensor, "batch 1 1"]  # one value per system


@dataclass(frozen=True, eq=False)
class Flow:
    """A field with the token weights of the active systems. Steppers use displacements h f(x, t), never f itself,
    because a velocity may overflow the dtype while the displacement does not. Every system has its own time.

    ``leader[i]`` is the token that token i moves with (itself, unless merged).
    """

    field: Field
    weights: Float[Tensor, "batch n"] | None = None
    leader: Int[Tensor, "batch n"] | None = None
    origin: float = 0.0  # the initial time; steppers count from 0

    @cached_property
    def on_sphere(self) -> bool:
        """Whether states are unit vectors."""
        return self.field.space is StateSpace.SPHERE

    @cached_property
    def is_stream(self) -> bool:
        """Whether states are a residual stream, whose radius must not vanish."""
        return self.field.space is StateSpace.STREAM

    def retract(self, y: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n d"]:
        """Map the end of a step to the state space: to the nearest unit vector on the sphere, otherwise unchanged."""
        return retract(y) if self.on_sphere else y

    def direction(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The states as observables use them: unit vectors, or points of R^d."""
        return self.field.direction(x)

    def relative_length(
        self, x: Float[Tensor, "batch n d"], step: Float[Tensor, "batch n d"]
    ) -> Float[Tensor, "batch n"]:
        """Length of a displacement relative to the radius of the state, which is 1 on the sphere."""
        length: Tensor = torch.linalg.vector_norm(step, dim=-1)
        return length if self.on_sphere else length / self.field.radius(x)

    def layer(self, x: Float[Tensor, "batch n d"], h: Each, t: Each) -> Float[Tensor, "batch n d"]:
        """One discrete layer."""
        after = self.field.layer(x, h.to(x.dtype), t=t + self.origin, weights=self.weights)
        return self._follow_leaders(after)

    def displacement(self, x: Float[Tensor, "batch n d"], h: Each, t: Each) -> Float[Tensor, "batch n d"]:
        """Displacement h f(x, t)."""
        return self._follow_leaders(self.field.displacement(x, h, t=t + self.origin, weights=self.weights))

    def ambient_displacement(self, x: Float[Tensor, "batch n d"], h: Each, t: Each) -> Float[Tensor, "batch n d"]:
        """Displacement before projection: what a layer adds to its residual stream."""
        return self._follow_leaders(h.to(x.dtype) * self.field.ambient(x, t=t + self.origin, weights=self.weights))

    def log_speed(self, x: Float[Tensor, "batch n d"], t: Each) -> Float[Tensor, " batch"]:
        """Logarithm of the speed of the fastest token of each system, relative to the radius of a state; float64."""
        scaled = self.field.scaled_velocity(x, t=t + self.origin, weights=self.weights)
        speed = self.relative_length(x, scaled.direction).to(torch.float64)
        return (torch.log(speed) + scaled.log_scale.to(torch.float64).squeeze(-1)).amax(-1)

    def select(self, which: Tensor) -> Flow:
        """The flow of some of the systems, by index or mask."""
        weights = None if self.weights is None else self.weights[which]
        leader = None if self.leader is None else self.leader[which]
        return replace(self, field=self.field.with_parameters(selected(which)), weights=weights, leader=leader)

    def _follow_leaders(self, step: Tensor) -> Tensor:
        if self.leader is None:
            return step
        return step.gather(-2, self.leader.unsqueeze(-1).expand_as(step))
