"""The interface of all fields: x' = f(x, t) for tokens x with weights.

Subclasses describe themselves by properties with defaults, so that no other code has to test the class of a field.
Calling a field checks its input. All other methods are unchecked and differentiable, for inner loops and training.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from helmscope.fields.parameters import Change, copy_with, shape_or_type
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.fields.weights import check_weights, fill_padding
from helmscope.geometry.arithmetic import broadcast_shapes, check_points, every
from helmscope.geometry.sphere import check_tokens, project, retract
from helmscope.types import ConciseRepr, HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    Time = float | Tensor  # the same for all systems, or (*batch, 1, 1)


class StateSpace(Enum):
    """The space in which the states of a field are defined.

    >>> [space.value for space in StateSpace]
    ['unit vectors', 'a residual stream', 'points of R^d']
    """

    SPHERE = "unit vectors"
    STREAM = "a residual stream"  # read through a norm: its direction and radius are measured separately
    FLAT = "points of R^d"


class Field(ConciseRepr, ABC):
    """Base class of all fields: the velocity of every token, (*batch, n, d) -> (*batch, n, d), tangent at each token
    where states are unit vectors.

    A subclass implements ``velocity`` and overrides the properties whose defaults do not describe it. ``t`` is a float
    if the caller passes one; during a run it is a float64 tensor (batch, 1, 1), one time per system. A field that uses
    it sets ``autonomous`` to False, or a run may end at a state that is at rest only now. A class with parameters of
    its own is a frozen dataclass whose ``parameters`` maps their names to the number of axes of one system's value;
    with more axes than that, a parameter has one value per system. ``parts`` names the attributes that hold fields.

    >>> @dataclass(frozen=True, eq=False)
    ... class Turn(Field):
    ...     rate: Tensor
    ...     parameters = {"rate": 0}
    ...     autonomous = False
    ...     def velocity(self, x, weights=None, *, t=0.0):
    ...         turned = torch.stack([-x[..., 1], x[..., 0]], -1)
    ...         return self.rate[..., None, None] * (1 + torch.as_tensor(t)) * turned
    >>> Turn(torch.tensor([1.0, 2.0]))(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]), t=1.0)
    tensor([[[-0., 2.]],
    <BLANKLINE>
            [[-0., 4.]]])
    """

    parameters: ClassVar[Mapping[str, int]] = {}
    parts: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """The name of this field in error messages."""
        return type(self).__name__

    @property
    def space(self) -> StateSpace:
        """The space of the states; the unit sphere by default."""
        return StateSpace.SPHERE

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
        """Whether the flow commutes with permutations of the tokens, so that coinciding tokens can be merged."""
        return False

    @property
    def isotropic(self) -> bool:
        """Whether this is the flow of Q = K = V = I with full attention, which has closed forms (``theory``)."""
        return False

    @property
    def attends(self) -> bool:
        """Whether tokens attend to each other, so that the field has a kernel."""
        return False

    @property
    def takes_weights(self) -> bool:
        """Whether tokens may have weights: the measure sum_j m_j delta_{x_j} instead of a list of points."""
        return True

    @property
    def may_overflow(self) -> bool:
        """Whether the velocity may overflow its dtype; displacements are then computed from ``scaled_velocity``."""
        return False

    @property
    def discrete_only(self) -> bool:
        """Whether the field is a discrete map without a flow: its norm changes the state even if nothing is added."""
        return False

    def __call__(
        self,
        x: Float[Tensor, "*batch n d"],
        *,
        t: Time = 0.0,
        weights: Float[Tensor, "*batch n"] | None = None,
        mask: Bool[Tensor, "*batch n"] | None = None,
    ) -> Float[Tensor, "*batch n d"]:
        """The velocity of every token at time ``t``, with checks of the input and of the result.

        Tokens with ``weights`` m_j >= 0 are a measure; ``mask`` is False at padding, which gets weight 0. Raises
        ``HelmscopeError`` for bad input, for a field without a velocity, and if the velocity is not finite.
        """
        if self.discrete_only:
            raise HelmscopeError(f"field is {self.name}, a discrete map that has no velocity: call layer")
        x = check_states(self, fill_padding(x, weights, mask), "x")
        self.check_size(x)
        combined = check_weights(x, weights, mask)
        if combined is not None and not self.takes_weights:
            raise HelmscopeError(f"weights or mask is given, but the field {self.name} does not take weights")
        if (
            x.ndim == 2
        ):  # as a batch of one: torch multiplies a single matrix by another algorithm, which rounds differently
            batched = None if combined is None else combined.unsqueeze(0)
            velocity = self.velocity(x.unsqueeze(0), t=t, weights=batched).squeeze(0)
        else:
            velocity = self.velocity(x, t=t, weights=combined)
        if not every(torch.isfinite(velocity.detach())):
            raise HelmscopeError(self.overflow_message(x, combined))
        return velocity

    @abstractmethod
    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The velocity, unchecked: for inner loops and autograd transforms.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=0.0).velocity(torch.eye(2))
        tensor([[0.0000, 0.5000],
                [0.5000, 0.0000]])
        """

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The velocity before projection, which is what a layer adds to the residual stream; unchecked.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=0.0).ambient(torch.eye(2))
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
        """
        return self.velocity(x, t=t, weights=weights)

    def scaled_velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> ScaledVelocity:
        """The velocity as e^{log_scale} times a direction, for fields whose velocity may overflow; unchecked.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=0.0).scaled_velocity(torch.eye(2)).displacement(torch.tensor(0.1))
        tensor([[0.0000, 0.0500],
                [0.0500, 0.0000]])
        """
        velocity = self.velocity(x, t=t, weights=weights)
        return ScaledVelocity(velocity, torch.zeros_like(velocity[..., :1]))

    def displacement(
        self, x: Float[Tensor, "*batch n d"], h: Tensor, weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """h f(x, t) with h (*batch, 1, 1), without overflow of the velocity itself; unchecked.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=0.0).displacement(torch.eye(2), torch.tensor(0.1))
        tensor([[0.0000, 0.0500],
                [0.0500, 0.0000]])
        """
        if self.may_overflow:
            return self.scaled_velocity(x, t=t, weights=weights).displacement(h)
        return h.to(x.dtype) * self.velocity(x, t=t, weights=weights)

    def layer(
        self, x: Float[Tensor, "*batch n d"], h: Tensor | float = 1.0, weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The state after one discrete layer of step size h: N(x + h f), with f before projection; unchecked.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=0.0).layer(torch.eye(2))
        tensor([[0.9487, 0.3162],
                [0.3162, 0.9487]])
        """
        after = x + h * self.ambient(x, t=t, weights=weights)
        return retract(after) if self.space is StateSpace.SPHERE else after

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n n"]:
        """The attention weight of key j for query i: (*batch, n, n), or (*batch, heads, n, n) for several heads.

        Raises ``HelmscopeError`` for fields without attention.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=0.0).kernel(torch.eye(2))
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
        """
        raise HelmscopeError(f"field is {self.name}, but a kernel is defined for attention fields only")

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the shape of the tokens fits the parameters of this field.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=torch.ones(3)).check_size(torch.eye(2).expand(3, 2, 2))
        """
        self._check_signature()
        batch, lead = self.batch, x.shape[:-2]
        try:
            fits = broadcast_shapes(batch, lead) == lead
        except ValueError:
            fits = False
        if not fits:
            raise HelmscopeError(
                f"the parameters of {type(self).__name__} have the batch axes {tuple(batch)}, but tokens of shape "
                f"{tuple(x.shape)} have {tuple(lead)}"
            )

    def check_times(self, times: Sequence[float], *, reads_end: bool) -> None:
        """Raise ``HelmscopeError`` unless the velocity is defined up to the last of the times, at which it is evaluated
        if ``reads_end``.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=1.0).check_times([1e9], reads_end=True)
        """

    def _check_signature(self) -> None:
        """Raise ``HelmscopeError`` unless ``velocity`` can be called as all code calls it."""
        signature = inspect.signature(self.velocity)
        try:
            signature.bind(None, weights=None, t=0.0)
        except TypeError as error:
            raise HelmscopeError(
                f"velocity of {self.name} has the arguments {signature}, but it must accept (x, weights=None, *, "
                f"t=0.0): {error}"
            ) from None

    def direction(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The directions of a residual stream, as its norm computes them; other states are returned unchanged.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=1.0).direction(torch.eye(2)[:1])
        tensor([[1., 0.]])
        """
        return y

    def radius(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n"]:
        """The length relative to which the error of a step is measured: 1 for unit vectors, max(1, |y|) for points of
        R^d, and for a residual stream the length that its norm divides out.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=1.0).radius(torch.eye(2))
        tensor([1., 1.])
        """
        if self.space is StateSpace.FLAT:
            length: Tensor = torch.linalg.vector_norm(y, dim=-1)
            return length.clamp(min=1.0)
        return torch.ones_like(y[..., 0])

    def restricted(self, dim: int) -> Field | None:
        """The same flow on R^dim if it commutes with rotations, else None.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=1.0).restricted(2), SA(beta=1.0, query_key=torch.ones(3, 3)).restricted(2)
        (SA(beta=1.0), None)
        """
        return None

    def overflow_message(self, x: Tensor, weights: Tensor | None) -> str:
        """The error message for a velocity that is not finite: the cause and the remedy.

        >>> FunctionField(torch.zeros_like).overflow_message(torch.eye(2), None)
        'the velocity of FunctionField overflows torch.float32: use smaller parameters or weights'
        """
        return f"the velocity of {type(self).__name__} overflows {x.dtype}: use smaller parameters or weights"

    @property
    def batch(self) -> torch.Size:
        """The broadcast batch axes of the parameters; raises ``HelmscopeError`` if they are declared wrongly.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=torch.tensor([1.0, 4.0])).batch
        torch.Size([2])
        """
        if not isinstance(self.parameters, Mapping):
            raise HelmscopeError(
                f"parameters of {self.name} is {self.parameters!r}, but it must map the names of parameters to their "
                "numbers of axes without a batch, such as {'beta': 0}"
            )
        if self.parameters and not is_dataclass(self):
            raise HelmscopeError(f"field {self.name} declares parameters, but its class is not a frozen dataclass")
        shapes: list[torch.Size] = []

        def record_shape(value: Tensor, axes: int) -> Tensor:
            shapes.append(value.shape[: value.ndim - axes])
            return value

        self.with_parameters(record_shape)
        try:
            return broadcast_shapes(*shapes)
        except ValueError:
            raise HelmscopeError(
                f"the parameters of {type(self).__name__} have batch axes {[tuple(shape) for shape in shapes]}, which "
                "do not broadcast"
            ) from None

    def with_parameters(self, change: Change) -> Self:
        """This field with ``change(value, axes)`` applied to every parameter that has batch axes; unchecked.

        >>> from helmscope.fields.attention import SA
        >>> SA(beta=torch.tensor([1.0, 4.0])).with_parameters(lambda value, axes: value[:1]).beta
        tensor([1.])
        """
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
                values[name] = tuple(item.with_parameters(change) if isinstance(item, Field) else item for item in part)
        unchanged = all(_identical(getattr(self, name), value) for name, value in values.items())
        return self if unchanged else copy_with(self, values)


def _identical(old: object, new: object) -> bool:
    """Whether two values, or all entries of two tuples, are the same objects."""
    if isinstance(old, tuple) and isinstance(new, tuple):
        return all(a is b for a, b in zip(old, new, strict=True))
    return old is new


@dataclass(frozen=True, eq=False)
class FunctionField(Field):
    """A plain function of tokens, f(x) or f(x, t=...), as a field on the sphere whose velocity is its tangential part.

    The function maps (*batch, n, d) to the same shape. Its ``t`` is a float64 tensor that broadcasts against x, of
    shape (batch, 1, 1) during a run, in which every system has its own time. Raises ``HelmscopeError`` if it is not
    callable, and when called if it returns another shape.

    >>> FunctionField(lambda x, t: t * x.flip(-1))(torch.tensor([[1.0, 0.0]]), t=2.0)
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
        except (TypeError, ValueError):  # built-ins may have no signature
            names = {}  # type: ignore[assignment]
        object.__setattr__(self, "_timed", "t" in names)

    @property
    def name(self) -> str:
        """The type of the wrapped function."""
        return type(self.function).__name__

    @property
    def autonomous(self) -> bool:
        """Whether the function has no argument ``t``."""
        return not self._timed  # type: ignore[attr-defined]

    @property
    def takes_weights(self) -> bool:
        """False: a plain function takes only the points."""
        return False

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The value of the function, unchecked."""
        if not self._timed:  # type: ignore[attr-defined]
            return self.function(x)
        return self.function(x, t=torch.as_tensor(t, dtype=torch.float64, device=x.device))

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The tangential part of the function, unchecked."""
        return project(x, self.ambient(x, t=t))

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the function returns one vector per token."""
        with torch.no_grad():
            velocity = self.ambient(x, t=torch.zeros((*x.shape[:-2], 1, 1), dtype=torch.float64, device=x.device))
        if not isinstance(velocity, torch.Tensor) or velocity.shape != x.shape:
            raise HelmscopeError(
                f"field returns {shape_or_type(velocity)} for tokens of shape {tuple(x.shape)}, but a velocity must "
                "have the same shape"
            )


def as_field(field: object) -> Field:
    """Convert the argument to a field: a field, or the field of a bound ``velocity``, is returned unchanged, and a
    function of tokens becomes a ``FunctionField``. Raises ``HelmscopeError`` for anything else.

    >>> as_field(torch.zeros_like).takes_weights
    False
    """
    owner = getattr(field, "__self__", None)
    if isinstance(owner, Field) and field in (owner.velocity, owner.__call__):
        return owner
    return field if isinstance(field, Field) else FunctionField(field)  # type: ignore[arg-type]


def check_states(
    field: Field, x: object, name: str, *, normalize: bool = False, remedy: str = ""
) -> Float[Tensor, "*batch n d"]:
    """Return ``x`` if it has valid states of the field, else raise ``HelmscopeError``.

    Depending on ``field.space`` these are unit vectors (with ``normalize``, vectors of any nonzero length, which are
    normalized), a residual stream of nonzero radius, or finite points of R^d. ``remedy`` is that of ``check_tokens``.
    """
    if field.space is StateSpace.SPHERE:
        return check_tokens(x, name=name, normalize=normalize, remedy=remedy)
    if field.space is StateSpace.STREAM:
        check_tokens(x, name=name, normalize=True)
        assert isinstance(x, torch.Tensor)
        return x
    return check_points(x, name)
