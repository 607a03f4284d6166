"""What a field is to the rest of the house: x' = f(x, t) for tokens x with weights.

Subclasses say what they are by properties with defaults; nobody asks which class a field has. Calling a field checks
its input. Everything else is the functional core: unchecked, differentiable, and what inner loops and training use.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from helmscope.fields.parameters import Change, copy_with
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.fields.weights import check_weights
from helmscope.geometry.arithmetic import check_dense_values, every
from helmscope.geometry.sphere import check_tokens, project, retract
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    Time = float | Tensor  # of all systems, or (*batch, 1, 1)


class Space(Enum):
    """Where the states of a field live.

    >>> [space.value for space in Space]
    ['unit vectors', 'a residual stream', 'points of R^d']
    """

    SPHERE = "unit vectors"
    STREAM = "a residual stream"  # seen through a norm: its direction and its radius are what is measured
    FLAT = "points of R^d"


class Field(ABC):
    """The velocity of every token: (*batch, n, d) -> (*batch, n, d), tangent at each token where states are unit
    vectors.

    A subclass implements ``velocity``, and overrides what is not as these defaults say: ``parameters`` names its
    parameters with the number of axes that one system's value has, ``parts`` the fields that it is made of.

    >>> class Turn(Field):
    ...     def velocity(self, x, weights=None, *, t=0.0):
    ...         return torch.stack([-x[..., 1], x[..., 0]], -1)
    >>> Turn()(torch.tensor([[1.0, 0.0]]))
    tensor([[-0., 1.]])
    """

    parameters: ClassVar[Mapping[str, int]] = {}
    parts: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """What an error calls this field."""
        return type(self).__name__

    @property
    def space(self) -> Space:
        """Where states live."""
        return Space.SPHERE

    @property
    def continuous(self) -> bool:
        """Whether the velocity is continuous."""
        return True

    @property
    def autonomous(self) -> bool:
        """Whether the velocity does not depend on time."""
        return True

    @property
    def exchangeable(self) -> bool:
        """Whether tokens can be relabelled, and so merged."""
        return False

    @property
    def isotropic(self) -> bool:
        """Whether this is the flow of Q = K = V = I with full attention, for which theory has closed forms."""
        return False

    @property
    def attends(self) -> bool:
        """Whether the field has a kernel: tokens see each other."""
        return False

    @property
    def takes_weights(self) -> bool:
        """Whether tokens may have weights: the measure sum_j m_j delta_{x_j} instead of a list of points."""
        return True

    @property
    def overflows(self) -> bool:
        """Whether the velocity may leave the dtype: then displacements are made of ``scaled``, which a field has."""
        return False

    @property
    def only_layers(self) -> bool:
        """Whether the field is a map without a flow: its norm changes the state even where nothing is added."""
        return False

    def __call__(
        self,
        x: Float[Tensor, "*batch n d"],
        *,
        t: Time = 0.0,
        weights: Float[Tensor, "*batch n"] | None = None,
        mask: Bool[Tensor, "*batch n"] | None = None,
    ) -> Float[Tensor, "*batch n d"]:
        """The velocity of every token at time ``t``. ``weights`` m_j >= 0 make the cloud a measure; ``mask`` is False
        at padding, which nobody attends to. Bad input, and a map without a velocity, is a ``HelmscopeError``.
        """
        if self.only_layers:
            raise HelmscopeError(f"field is {self.name}, a map that has layers and no velocity: call layer")
        self.check_size(check_states(self, x, "x"))
        combined = check_weights(x, weights, mask)
        if combined is not None and not self.takes_weights:
            raise HelmscopeError(f"weights or mask is given, but the field {self.name} takes none")
        if x.ndim == 2:  # as a batch of one: torch multiplies a single matrix in another way, with other last bits
            alone = None if combined is None else combined.unsqueeze(0)
            velocity = self.velocity(x.unsqueeze(0), t=t, weights=alone).squeeze(0)
        else:
            velocity = self.velocity(x, t=t, weights=combined)
        if not every(torch.isfinite(velocity.detach())):
            raise HelmscopeError(self.complaint(x, combined))
        return velocity

    @abstractmethod
    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The velocity, unchecked: for inner loops and autograd transforms."""

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The velocity before projection, what a layer adds to the residual stream; unchecked."""
        return self.velocity(x, t=t, weights=weights)

    def scaled(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0) -> ScaledVelocity:
        """The velocity as e^{log_scale} times a direction, for fields whose velocity can leave the dtype; unchecked."""
        velocity = self.velocity(x, t=t, weights=weights)
        return ScaledVelocity(velocity, torch.zeros_like(velocity[..., :1]))

    def displacement(
        self, x: Float[Tensor, "*batch n d"], h: Tensor, weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """h f(x, t), h (*batch, 1, 1); finite where it is, though the velocity may not be. Unchecked."""
        if self.overflows:
            return self.scaled(x, t=t, weights=weights).over(h)
        return h.to(x.dtype) * self.velocity(x, t=t, weights=weights)

    def layer(
        self, x: Float[Tensor, "*batch n d"], h: Tensor | float = 1.0, weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The state one discrete layer of size h later: N(x + h f), with f before projection; unchecked."""
        after = x + h * self.ambient(x, t=t, weights=weights)
        return retract(after) if self.space is Space.SPHERE else after

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n n"]:
        """The weight of key j for query i: (*batch, n, n), for several heads (*batch, heads, n, n)."""
        raise HelmscopeError(f"field is {self.name}, but a kernel is defined for attention fields only")

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Refuse tokens that do not fit the parameters of this field."""
        own, lead = self.batch, x.shape[:-2]
        try:
            fits = torch.broadcast_shapes(own, lead) == lead  # type: ignore[no-untyped-call]
        except RuntimeError:
            fits = False
        if not fits:
            raise HelmscopeError(
                f"the parameters of {type(self).__name__} have the batch axes {tuple(own)}, but tokens of shape "
                f"{tuple(x.shape)} have {tuple(lead)}"
            )

    def direction(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The unit vectors of a residual stream, as its norm makes them; other states are what they are."""
        return y

    def radius(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n"]:
        """The length of a state that a step is measured by: 1 for unit vectors, at least 1 for points of R^d, and of a
        residual stream the length that its norm divides out.
        """
        if self.space is Space.FLAT:
            length: Tensor = torch.linalg.vector_norm(y, dim=-1)
            return length.clamp(min=1.0)
        return torch.ones_like(y[..., 0])

    def restricted(self, dim: int) -> Field | None:
        """The same flow on R^dim, where it commutes with rotations; else None."""
        return None

    def complaint(self, x: Tensor, weights: Tensor | None) -> str:
        """Why the velocity is not finite, and the remedy."""
        return f"the velocity of {type(self).__name__} leaves {x.dtype}: take smaller parameters or weights"

    @property
    def batch(self) -> torch.Size:
        """The batch axes of the parameters, broadcast."""
        shapes: list[torch.Size] = []

        def look(value: Tensor, axes: int) -> Tensor:
            shapes.append(value.shape[: value.ndim - axes])
            return value

        self.with_parameters(look)
        try:
            return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
        except RuntimeError:
            raise HelmscopeError(
                f"the parameters of {type(self).__name__} have batch axes {[tuple(shape) for shape in shapes]}, which "
                "do not fit together"
            ) from None

    def with_parameters(self, change: Change) -> Self:
        """This field with every parameter that has batch axes changed; unchecked."""
        values: dict[str, Any] = {}
        for name, axes in self.parameters.items():
            value = getattr(self, name)
            if isinstance(value, torch.Tensor) and value.ndim > axes:
                values[name] = change(value, axes)
            elif hasattr(value, "with_parameters"):  # a matrix of low rank
                values[name] = value.with_parameters(change)
        for name in self.parts:
            part = getattr(self, name)
            if isinstance(part, Field):
                values[name] = part.with_parameters(change)
            else:
                values[name] = tuple(each.with_parameters(change) if isinstance(each, Field) else each for each in part)
        same = all(_same(getattr(self, name), value) for name, value in values.items())
        return self if same else copy_with(self, values)


def _same(old: object, new: object) -> bool:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return all(one is other for one, other in zip(old, new, strict=True))
    return old is new


@dataclass(frozen=True, eq=False)
class PlainField(Field):
    """A function of tokens, f(x) or f(x, t=...), as a field on the sphere: its tangential part is the velocity.

    >>> PlainField(lambda x, t: t * x.flip(-1))(torch.tensor([[1.0, 0.0]]), t=2.0)
    tensor([[0., 2.]])
    """

    function: Callable[..., Tensor]

    def __post_init__(self) -> None:
        if isinstance(self.function, type) or not callable(self.function):
            raise HelmscopeError(
                f"field is {self.function!r}, but it must be a field such as SA(beta=4.0), or a function of tokens"
            )
        try:
            names = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # of a built-in
            names = {}  # type: ignore[assignment]
        object.__setattr__(self, "_timed", "t" in names)

    @property
    def name(self) -> str:
        """What kind of function it is."""
        return type(self.function).__name__

    @property
    def autonomous(self) -> bool:
        """Whether the function takes no time."""
        return not self._timed  # type: ignore[attr-defined]

    @property
    def takes_weights(self) -> bool:
        """A plain function sees the points alone."""
        return False

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The function as it is."""
        return self.function(x, t=t) if self._timed else self.function(x)  # type: ignore[attr-defined]

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """Its tangential part."""
        return project(x, self.ambient(x, t=t))

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Refuse a function that does not give a velocity for each of these tokens."""
        with torch.no_grad():
            velocity = self.ambient(x)
        if not isinstance(velocity, torch.Tensor) or velocity.shape != x.shape:
            given = tuple(velocity.shape) if isinstance(velocity, torch.Tensor) else type(velocity).__name__
            raise HelmscopeError(
                f"field gives {given} for tokens of shape {tuple(x.shape)}, but a velocity has their shape"
            )


def as_field(field: object) -> Field:
    """A field as it is, also where its ``velocity`` is given; a function of tokens as a ``PlainField``; anything else
    is refused.

    >>> as_field(torch.zeros_like).takes_weights
    False
    """
    owner = getattr(field, "__self__", None)
    if isinstance(owner, Field) and field in (owner.velocity, owner.__call__):
        return owner
    return field if isinstance(field, Field) else PlainField(field)  # type: ignore[arg-type]


def check_states(field: Field, x: object, name: str, *, normalize: bool = False) -> Float[Tensor, "*batch n d"]:
    """States as a field takes them: unit vectors, a residual stream of any radius but 0, or any points of R^d."""
    if field.space is Space.SPHERE:
        return check_tokens(x, name=name, normalize=normalize)
    if field.space is Space.STREAM:
        check_tokens(x, name=name, normalize=True)
        assert isinstance(x, torch.Tensor)
        return x
    if not isinstance(x, torch.Tensor) or x.ndim < 2 or 0 in x.shape[-2:]:
        given = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise HelmscopeError(f"{name} is {given}, but it must be a tensor of points (..., n, d)")
    check_dense_values(name, x)
    if x.dtype not in (torch.float64, torch.float32) or not every(torch.isfinite(x.detach())):
        raise HelmscopeError(
            f"{name} holds {x.dtype}, but it must hold finite numbers of torch.float64 or torch.float32"
        )
    return x
