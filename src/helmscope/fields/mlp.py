"""The MLP of a transformer as a force on R^d [Helmholtz Transformer, no. 3], defined everywhere and not only on the
sphere:

    MLP         f(x) = sum_j w_j s(v_j.x + c_j) + b
    GatedMLP    f(x) = sum_j w_j s(g_j.x + c_j) (u_j.x + e_j) + b

v_j, g_j, u_j are the rows of ``w_in``, ``w_gate``, ``w_up``; w_j the columns of ``w_out``; c_j, e_j, b the biases, 0
if None. The force acts on each token separately.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from helmscope.fields import activations
from helmscope.fields.activations import GELU, Activation, SiLU
from helmscope.fields.field import Field
from helmscope.geometry.arithmetic import check_dense_values, every
from helmscope.geometry.sphere import project
from helmscope.kernels.dense import matrix_product
from helmscope.types import HelmscopeError, type_with_article
from helmscope.types.display import ALWAYS_SHOWN

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time

POINTS = (torch.float64, torch.float32)
PARAMETERS = (*POINTS, torch.float16, torch.bfloat16)


class Force(Field):
    """Base class of MLP and GatedMLP. Parameters are cast to the dtype and device of the points, may require gradients,
    and may have batch axes, one MLP per system. As a field on the sphere its velocity is its tangential part.
    """

    w_out: Float[Tensor, "dim hidden"]
    b_out: Float[Tensor, " dim"] | None

    @property
    def dim(self) -> int:
        """The dimension d of the space R^d on which the force acts.

        >>> mlp = MLP(w_in=torch.ones(3, 2), w_out=torch.ones(2, 3))
        >>> mlp.dim
        2
        """
        return self.w_out.shape[-2]

    @property
    def hidden(self) -> int:
        """The number of neurons.

        >>> mlp = MLP(w_in=torch.ones(3, 2), w_out=torch.ones(2, 3))
        >>> mlp.hidden
        3
        """
        return self.w_out.shape[-1]

    @property
    def exchangeable(self) -> bool:
        """True: the force acts on each token separately."""
        return True

    def __call__(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:  # type: ignore[override]
        """The force f(x) at any points of R^d, not projected.

        Raises ``HelmscopeError`` for points of another dimension or dtype, and if x or f(x) is not finite.
        """
        self.check_points(x)
        if not every(torch.isfinite(x.detach())):
            raise HelmscopeError("x holds NaN or infinite entries, but every point must be finite")
        force = self.ambient(x)
        if not every(torch.isfinite(force.detach())):
            largest = float(x.detach().abs().max())
            raise HelmscopeError(
                f"x holds entries up to {largest:g}, where the force overflows {x.dtype}: scale x down"
            )
        return force

    @abstractmethod
    def neurons(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch hidden"]:
        """The activations of the hidden layer, unchecked: s(w_in x + b_in), or s(w_gate x + b_gate) (w_up x + b_up).

        >>> mlp = MLP(w_in=torch.ones(3, 2), w_out=torch.ones(2, 3))
        >>> mlp.neurons(torch.tensor([1.0, 1.0])).shape
        torch.Size([3])
        """

    @property
    @abstractmethod
    def input_rows(self) -> tuple[Float[Tensor, "hidden dim"], ...]:
        """The matrices whose rows the neurons read: (w_in,), or (w_gate, w_up).

        >>> mlp = MLP(w_in=torch.ones(3, 2), w_out=torch.ones(2, 3))
        >>> [rows.shape for rows in mlp.input_rows]
        [torch.Size([3, 2])]
        """

    @abstractmethod
    def neuron_slopes(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch hidden"], ...]:
        """The derivatives of the neurons along each of ``input_rows``, unchecked: the Jacobian of f is

            Df = w_out sum_k diag(slopes_k) rows_k.

        >>> mlp = MLP(w_in=torch.ones(3, 2), w_out=torch.ones(2, 3))
        >>> [slope.shape for slope in mlp.neuron_slopes(torch.tensor([1.0, 1.0]))]
        [torch.Size([3])]
        """

    def ambient(
        self, x: Float[Tensor, "*batch d"], weights: Float[Tensor, "*batch"] | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch d"]:
        """The force f(x), unchecked: for inner loops and autograd transforms. Token ``weights`` are ignored."""
        return affine(self.neurons(x), self.w_out, self.b_out)

    def velocity(
        self, x: Float[Tensor, "*batch d"], weights: Float[Tensor, "*batch"] | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch d"]:
        """The tangential part P_x f(x) at unit vectors x, unchecked."""
        return project(x, self.ambient(x))

    def check_size(self, x: Float[Tensor, "*batch d"]) -> None:
        """Raise ``HelmscopeError`` unless the points have the dimension of the parameters."""
        if x.ndim < 1 or x.shape[-1] != self.dim:
            raise HelmscopeError(f"x has shape {tuple(x.shape)}, but the parameters need (..., {self.dim})")
        if self.batch:
            super().check_size(x)

    def check_points(self, x: object) -> None:
        """Raise ``HelmscopeError`` unless x is a float tensor (..., dim). Values are not read, so torch.func works.

        >>> mlp = MLP(w_in=torch.ones(3, 2), w_out=torch.ones(2, 3))
        >>> mlp.check_points(torch.ones(5))
        Traceback (most recent call last):
        helmscope.types.HelmscopeError: x has shape (5,), but the parameters need (..., 2)
        """
        if not isinstance(x, torch.Tensor):
            raise HelmscopeError(
                f"x is {type_with_article(x)}, but it must be a torch tensor of shape (..., {self.dim})"
            )
        if x.dtype not in POINTS:
            raise HelmscopeError(f"x has dtype {x.dtype}, but it must be torch.float64 or torch.float32")
        self.check_size(x)


@dataclass(frozen=True, eq=False, kw_only=True)
class MLP(Force):
    """Multilayer perceptron with one hidden layer: f(x) = w_out s(w_in x + b_in) + b_out [Helmholtz Transformer, no.
    3], at any x of R^d.

    ``w_in`` (hidden, dim) has rows v_j, ``w_out`` (dim, hidden) columns w_j. A row v_j = 0 is allowed: that neuron is
    constant. Calling returns the ambient force, ``velocity`` its tangential part; ``helmholtz`` splits it. Raises
    ``HelmscopeError`` for parameters that are not finite floats or do not fit each other.

    >>> from helmscope.fields.activations import ReLU
    >>> MLP(w_in=torch.eye(2), w_out=2 * torch.eye(2), activation=ReLU())(torch.tensor([3.0, -1.0]))
    tensor([6., 0.])
    """

    parameters: ClassVar[Mapping[str, int]] = {"w_in": 2, "w_out": 2, "b_in": 1, "b_out": 1}

    w_in: Float[Tensor, "*batch hidden dim"]
    w_out: Float[Tensor, "*batch dim hidden"]
    b_in: Float[Tensor, " hidden"] | None = None
    b_out: Float[Tensor, " dim"] | None = None
    activation: Activation = field(default_factory=GELU, metadata={ALWAYS_SHOWN: True})

    def __post_init__(self) -> None:
        hidden, dim = _check_input_matrix("w_in", self.w_in)
        source = f"w_in of shape {(hidden, dim)}"
        _check_parameter("w_out", self.w_out, (dim, hidden), source)
        _check_bias("b_in", self.b_in, hidden, source)
        _check_bias("b_out", self.b_out, dim, source)
        _check_activation(self.activation)
        _ = self.batch  # raises if batch axes do not broadcast

    def neurons(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch hidden"]:
        """s(w_in x + b_in), unchecked."""
        return self.activation(affine(x, self.w_in, self.b_in))

    @property
    def input_rows(self) -> tuple[Float[Tensor, "*batch hidden dim"], ...]:
        """(w_in,)."""
        return (self.w_in,)

    def neuron_slopes(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch hidden"], ...]:
        """(s'(w_in x + b_in),), unchecked."""
        return (self.activation.slope(affine(x, self.w_in, self.b_in)),)


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedMLP(Force):
    """Gated multilayer perceptron, such as SwiGLU: f(x) = w_out [ s(w_gate x + b_gate) * (w_up x + b_up) ] + b_out
    [Helmholtz Transformer, no. 3], at any x of R^d.

    ``w_gate`` (hidden, dim) has rows g_j, ``w_up`` (hidden, dim) rows u_j, ``w_out`` (dim, hidden) columns w_j; any
    row may be 0. Calling returns the ambient force, ``velocity`` its tangential part; ``helmholtz`` splits it. Raises
    ``HelmscopeError`` for parameters that are not finite floats or do not fit each other.

    >>> from helmscope.fields.activations import ReLU
    >>> one = torch.eye(2)
    >>> GatedMLP(w_gate=one, w_up=one, w_out=one, activation=ReLU())(torch.tensor([3.0, -1.0]))
    tensor([9., 0.])
    """

    parameters: ClassVar[Mapping[str, int]] = {"w_gate": 2, "w_up": 2, "w_out": 2, "b_gate": 1, "b_up": 1, "b_out": 1}

    w_gate: Float[Tensor, "*batch hidden dim"]
    w_up: Float[Tensor, "*batch hidden dim"]
    w_out: Float[Tensor, "*batch dim hidden"]
    b_gate: Float[Tensor, " hidden"] | None = None
    b_up: Float[Tensor, " hidden"] | None = None
    b_out: Float[Tensor, " dim"] | None = None
    activation: Activation = field(default_factory=SiLU, metadata={ALWAYS_SHOWN: True})

    def __post_init__(self) -> None:
        hidden, dim = _check_input_matrix("w_gate", self.w_gate)
        source = f"w_gate of shape {(hidden, dim)}"
        _check_parameter("w_up", self.w_up, (hidden, dim), source)
        _check_parameter("w_out", self.w_out, (dim, hidden), source)
        _check_bias("b_gate", self.b_gate, hidden, source)
        _check_bias("b_up", self.b_up, hidden, source)
        _check_bias("b_out", self.b_out, dim, source)
        _check_activation(self.activation)
        _ = self.batch  # raises if batch axes do not broadcast

    def neurons(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch hidden"]:
        """s(w_gate x + b_gate) * (w_up x + b_up), unchecked."""
        return self.activation(affine(x, self.w_gate, self.b_gate)) * affine(x, self.w_up, self.b_up)

    @property
    def input_rows(self) -> tuple[Float[Tensor, "*batch hidden dim"], ...]:
        """(w_gate, w_up)."""
        return self.w_gate, self.w_up

    def neuron_slopes(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch hidden"], ...]:
        """(s'(g) t, s(g)) with g = w_gate x + b_gate and t = w_up x + b_up, unchecked."""
        gate, up = affine(x, self.w_gate, self.b_gate), affine(x, self.w_up, self.b_up)
        return self.activation.slope(gate) * up, self.activation(gate)


def affine(
    x: Float[Tensor, "*batch d"], weight: Float[Tensor, "k d"], bias: Float[Tensor, " k"] | None
) -> Float[Tensor, "*batch k"]:
    """W x + b at each point, in the dtype of x; bitwise the same for a system alone and in a batch.

    >>> affine(torch.ones(2), torch.eye(2), torch.tensor([0.0, 1.0]))
    tensor([1., 2.])
    """
    product = linear(x, weight.to(x).mT)
    if bias is None:
        return product
    return product + (bias if bias.ndim == 1 else bias.unsqueeze(-2)).to(x)


def linear(x: Float[Tensor, "*batch d"], matrix: Float[Tensor, "d k"]) -> Float[Tensor, "*batch k"]:
    """x @ matrix by ``matrix_product``, also for a single point.

    >>> linear(torch.ones(2), torch.eye(2))
    tensor([1., 1.])
    """
    return matrix_product(x, matrix) if x.ndim > 1 else matrix_product(x[None], matrix)[0]


def _check_input_matrix(name: str, value: object) -> tuple[int, int]:
    """(hidden, dim) of the matrix that defines the sizes. Raises ``HelmscopeError`` if it is not a valid parameter."""
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or 0 in value.shape:
        given = (
            f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is {type_with_article(value)}"
        )
        raise HelmscopeError(f"{name} {given}, but it must be a torch tensor (hidden, dim) with hidden, dim >= 1")
    _check_parameter(name, value, tuple(value.shape[-2:]), "it")
    return value.shape[-2], value.shape[-1]


def _check_parameter(name: str, value: object, shape: tuple[int, ...], source: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be a torch tensor of shape {shape}")
    if tuple(value.shape[-len(shape) :]) != shape:
        raise HelmscopeError(f"{name} has shape {tuple(value.shape)}, but {source} requires {shape}")
    check_dense_values(name, value)
    if value.dtype not in PARAMETERS:
        allowed = ", ".join(str(dtype) for dtype in PARAMETERS)
        raise HelmscopeError(f"{name} has dtype {value.dtype}, but it must be one of {allowed}")
    entries = value.detach()
    good = torch.isfinite(entries)
    if not every(good):
        raise HelmscopeError(f"{name} holds the entry {entries[~good][0].item()}, but every entry must be finite")


def _check_bias(name: str, value: object, size: int, source: str) -> None:
    if value is not None:
        _check_parameter(name, value, (size,), source)


def _check_activation(activation: object) -> None:
    if not isinstance(activation, Activation):
        known = (kind for kind in vars(activations).values() if isinstance(kind, type) and issubclass(kind, Activation))
        allowed = ", ".join(sorted(f"{kind.__name__}()" for kind in known if not inspect.isabstract(kind)))
        default_repr = type(activation).__repr__ is object.__repr__  # which would show a memory address
        value = type_with_article(activation) if default_repr else " ".join(repr(activation).split())[:80]
        shown = getattr(activation, "__name__", value)
        raise HelmscopeError(
            f"activation is {shown}, but it must be one of {allowed} or an instance of your own subclass of Activation"
        )
