"""One field per layer: a mechanism that changes with depth, as in a real transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from helmscope.fields.field import Field, StateSpace
from helmscope.fields.parameters import selected
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time


@dataclass(frozen=True, eq=False)
class LayerwiseField(Field):
    """A sequence of fields, of which field k acts for k <= t < k + 1: x' = f_{floor t}(x, t). The first one also acts
    before, the last one also after.

    Under the stepper ``Layer()`` it is a stack of layers with separate weights. The velocity jumps at integer times, so
    ``integrate`` uses fixed steps by default. Raises ``HelmscopeError`` unless ``layers`` is a nonempty sequence of
    fields on the same space.

    >>> from helmscope.fields.attention import SA
    >>> LayerwiseField([SA(beta=0.0), SA(beta=4.0)]).layer_at(1.5).beta
    4.0
    """

    parts: ClassVar[tuple[str, ...]] = ("layers",)

    layers: Sequence[Field]

    def __post_init__(self) -> None:
        layers = tuple(self.layers) if isinstance(self.layers, Sequence) else ()
        if not layers or not all(isinstance(layer, Field) for layer in layers):
            raise HelmscopeError(f"layers is {self.layers!r:.80}, but it must be a sequence of fields")
        if len({layer.space for layer in layers}) > 1:
            raise HelmscopeError("layers have different spaces, but all must have the same")
        object.__setattr__(self, "layers", layers)

    def layer_at(self, t: float) -> Field:
        """The field that acts at time t. A time that is below an integer only by rounding counts as that integer.

        >>> from helmscope.fields.attention import SA
        >>> LayerwiseField([SA(beta=1.0), SA(beta=4.0)]).layer_at(1.5).beta
        4.0
        """
        return self.layers[min(max(int(t + 1e-9), 0), len(self.layers) - 1)]

    @property
    def space(self) -> StateSpace:
        """The space of the states of all layers."""
        return self.layers[0].space

    @property
    def continuous(self) -> bool:
        """Whether there is only one layer, and its velocity is continuous."""
        return len(self.layers) == 1 and self.layers[0].continuous

    @property
    def autonomous(self) -> bool:
        """Whether there is only one layer, and its velocity does not depend on time."""
        return len(self.layers) == 1 and self.layers[0].autonomous

    @property
    def exchangeable(self) -> bool:
        """Whether all layers commute with permutations of the tokens."""
        return all(layer.exchangeable for layer in self.layers)

    @property
    def attends(self) -> bool:
        """Whether all layers have a kernel."""
        return all(layer.attends for layer in self.layers)

    @property
    def discrete_only(self) -> bool:
        """Whether any layer is a discrete map without a flow."""
        return any(layer.discrete_only for layer in self.layers)

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the tokens fit all layers."""
        for layer in self.layers:
            layer.check_size(x)

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """f_{floor t}(x, t)."""
        return self._by_layer(x, weights, t, lambda layer, y, m, s: layer.velocity(y, m, t=s))

    def scaled_velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> ScaledVelocity:
        """The velocity of the layer at time t, with its log scale."""

        def direction_and_scale(layer: Field, y: Tensor, m: Tensor | None, s: Time) -> Tensor:
            scaled = layer.scaled_velocity(y, m, t=s)
            return torch.cat([scaled.direction, scaled.log_scale], -1)

        combined = self._by_layer(x, weights, t, direction_and_scale)
        return ScaledVelocity(combined[..., :-1], combined[..., -1:])

    @property
    def may_overflow(self) -> bool:
        """Whether the velocity of any layer may overflow."""
        return any(layer.may_overflow for layer in self.layers)

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The write of the layer at time t, before projection."""
        return self._by_layer(x, weights, t, lambda layer, y, m, s: layer.ambient(y, m, t=s))

    def layer(
        self, x: Float[Tensor, "*batch n d"], h: Tensor | float = 1.0, weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The state after the discrete layer at time t, which is the same for all systems."""
        now = float(t.flatten()[0]) if isinstance(t, torch.Tensor) else t
        return self.layer_at(now).layer(x, h, weights, t=t)

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n n"]:
        """The kernel of the layer at time t, which must be a single number."""
        return self.layer_at(float(t)).kernel(x, weights, t=t)

    def direction(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The direction of the state as the first layer reads it."""
        return self.layers[0].direction(y)

    def radius(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n"]:
        """The length of the state as the first layer measures it."""
        return self.layers[0].radius(y)

    def _by_layer(
        self,
        x: Tensor,
        weights: Tensor | None,
        t: Time,
        call: Callable[[Field, Tensor, Tensor | None, Time], Tensor],
    ) -> Tensor:
        """Apply ``call`` to every system with the layer at its time."""
        if not isinstance(t, torch.Tensor) or t.numel() == 1 or bool((t == t.flatten()[0]).all()):
            return call(self.layer_at(float(t if not isinstance(t, torch.Tensor) else t.flatten()[0])), x, weights, t)
        index = (t.flatten() + 1e-9).long().clamp(0, len(self.layers) - 1)
        groups = [(index == layer).nonzero().flatten() for layer in sorted(set(index.tolist()))]
        results = []
        for rows in groups:
            field = self.layers[int(index[rows[0]])].with_parameters(selected(rows))
            results.append(call(field, x[rows], None if weights is None else weights[rows], t[rows]))
        return torch.cat(results)[torch.cat(groups).argsort()]
