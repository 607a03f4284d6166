"""One field per layer: the mechanism changes with depth, as that of a real transformer does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from helmscope.fields.field import Field, Space
from helmscope.fields.parameters import selected
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time


@dataclass(frozen=True, eq=False)
class Depthwise(Field):
    """Field k acts for k <= t < k + 1, the first one before and the last one after: x' = f_{floor t}(x, t).

    Under ``Layer()`` it is a stack of layers with weights of their own. The velocity jumps at whole times, so
    ``integrate`` takes fixed steps unless told otherwise. All fields must live in the same space.

    >>> from helmscope.fields.attention import SA
    >>> Depthwise([SA(beta=0.0), SA(beta=4.0)]).at(1.5).beta
    4.0
    """

    parts: ClassVar[tuple[str, ...]] = ("layers",)

    layers: Sequence[Field]

    def __post_init__(self) -> None:
        layers = tuple(self.layers) if isinstance(self.layers, Sequence) else ()
        if not layers or not all(isinstance(layer, Field) for layer in layers):
            raise HelmscopeError(f"layers is {self.layers!r:.80}, but it must be a sequence of fields")
        if len({layer.space for layer in layers}) > 1:
            raise HelmscopeError("layers live in different spaces, but the states of all must be of one kind")
        object.__setattr__(self, "layers", layers)

    def at(self, t: float) -> Field:
        """The field that acts at a time. A time below a whole one by rounding alone counts as that one."""
        return self.layers[min(max(int(t + 1e-9), 0), len(self.layers) - 1)]

    @property
    def space(self) -> Space:
        """Where the states of all layers live."""
        return self.layers[0].space

    @property
    def continuous(self) -> bool:
        """The velocity jumps from layer to layer."""
        return len(self.layers) == 1 and self.layers[0].continuous

    @property
    def autonomous(self) -> bool:
        """Whether there is one layer alone."""
        return len(self.layers) == 1 and self.layers[0].autonomous

    @property
    def exchangeable(self) -> bool:
        """Whether all layers are."""
        return all(layer.exchangeable for layer in self.layers)

    @property
    def attends(self) -> bool:
        """Whether all layers do."""
        return all(layer.attends for layer in self.layers)

    @property
    def only_layers(self) -> bool:
        """Whether a layer is a map without a flow."""
        return any(layer.only_layers for layer in self.layers)

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Refuse tokens that do not fit a layer."""
        for layer in self.layers:
            layer.check_size(x)

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """f_{floor t}(x, t)."""
        return self._each(x, weights, t, lambda layer, y, m, s: layer.velocity(y, m, t=s))

    def scaled(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0) -> ScaledVelocity:
        """The velocity of the layer at time t, with the log scale that it has."""

        def both(layer: Field, y: Tensor, m: Tensor | None, s: Time) -> Tensor:
            found = layer.scaled(y, m, t=s)
            return torch.cat([found.direction, found.log_scale], -1)

        found = self._each(x, weights, t, both)
        return ScaledVelocity(found[..., :-1], found[..., -1:])

    @property
    def overflows(self) -> bool:
        """Whether the velocity of a layer may leave the dtype."""
        return any(layer.overflows for layer in self.layers)

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """What the layer adds, before projection."""
        return self._each(x, weights, t, lambda layer, y, m, s: layer.ambient(y, m, t=s))

    def layer(
        self, x: Float[Tensor, "*batch n d"], h: Tensor | float = 1.0, weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The discrete layer that stands at time t, the same for all systems."""
        now = float(t.flatten()[0]) if isinstance(t, torch.Tensor) else t
        return self.at(now).layer(x, h, weights, t=t)

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n n"]:
        """The kernel of the layer at time t, which must be one number."""
        return self.at(float(t)).kernel(x, weights, t=t)

    def direction(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """As the first layer reads the state."""
        return self.layers[0].direction(y)

    def radius(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n"]:
        """As the first layer measures the state."""
        return self.layers[0].radius(y)

    def _each(
        self,
        x: Tensor,
        weights: Tensor | None,
        t: Time,
        call: Callable[[Field, Tensor, Tensor | None, Time], Tensor],
    ) -> Tensor:
        """Every system by the layer at its own time."""
        if not isinstance(t, torch.Tensor) or t.numel() == 1 or bool((t == t.flatten()[0]).all()):
            return call(self.at(float(t if not isinstance(t, torch.Tensor) else t.flatten()[0])), x, weights, t)
        index = (t.flatten() + 1e-9).long().clamp(0, len(self.layers) - 1)
        groups = [(index == number).nonzero().flatten() for number in sorted(set(index.tolist()))]
        parts = []
        for rows in groups:
            layer = self.layers[int(index[rows[0]])].with_parameters(selected(rows))
            parts.append(call(layer, x[rows], None if weights is None else weights[rows], t[rows]))
        return torch.cat(parts)[torch.cat(groups).argsort()]
