"""Activations s(z) with all that the Helmholtz split of an MLP asks of them (source 000-3).

    psi(z) = int_0^z s,    Psi(z) = int_0^z psi,    psi(0) = Psi(0) = 0

The constants are part of the definition: in a gated MLP they add constant vectors to the gradient part. Every function
is elementwise and keeps the dtype; psi and Psi are computed in float64, to 1e-15 of their value at every z, small and
large. d Psi/dz is psi, d psi/dz is s and ds/dz is the slope, to the bit, under autograd and torch.func.

torch's own sigmoid, silu and gelu are not used: on a CPU their last bit depends on the element's place in the tensor.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from helmscope.fields.antiderivative import Antiderivatives, tabulate, with_derivative
from helmscope.types import HelmscopeError, known_name

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Activation(ABC):
    """A function s: R -> R, elementwise on float tensors. A subclass of yours needs ``__call__`` alone.

    Then ``slope`` comes from autograd, and ``potential`` and ``double_potential`` refuse until you override them.

    >>> class Sine(Activation):
    ...     def __call__(self, z):
    ...         return torch.sin(z)
    >>> Sine().slope(torch.zeros(2))
    tensor([1., 1.])
    """

    @abstractmethod
    def __call__(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """s(z)."""

    def potential(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """psi(z) = int_0^z s, or a ``HelmscopeError`` where the activation does not know it."""
        raise self._unknown("potential", "s")

    def double_potential(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Psi(z) = int_0^z psi, or a ``HelmscopeError`` where the activation does not know it."""
        raise self._unknown("double_potential", "its potential")

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """s'(z)."""
        pulled = torch.func.vjp(self, z)
        slope: Tensor = pulled[1](torch.ones_like(pulled[0]))[0]
        return slope

    def _unknown(self, method: str, integrand: str) -> HelmscopeError:
        return HelmscopeError(
            f"activation {type(self).__name__} has no table of its {method}: "
            f"implement {method}(z), the integral of {integrand} from 0 to z, or take an activation that has one"
        )


class _Chain(Activation):
    """Psi, psi, s and the slope, each the derivative of the one before. Inputs of ``_psi``, ``_double`` are float64."""

    def __call__(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return with_derivative(z, self._value, self.slope)

    def potential(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return with_derivative(z, lambda u: self._psi(u.double()).to(u.dtype), self)

    def double_potential(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return with_derivative(z, lambda u: self._double(u.double()).to(u.dtype), self.potential)

    @abstractmethod
    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]: ...

    @abstractmethod
    def _value(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _psi(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _double(self, z: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Identity(_Chain):
    """s = z, psi = z^2/2, Psi = z^3/6.

    >>> Identity().double_potential(torch.tensor([6.0]))
    tensor([36.])
    """

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """1."""
        return with_derivative(z, torch.ones_like, torch.zeros_like)

    def _value(self, z: Tensor) -> Tensor:
        return z.clone()

    def _psi(self, z: Tensor) -> Tensor:
        return _monomial(z, 2)

    def _double(self, z: Tensor) -> Tensor:
        return _monomial(z, 3)


@dataclass(frozen=True)
class ReLU(_Chain):
    """s = z_+, psi = z_+^2/2, Psi = z_+^3/6.

    >>> ReLU().potential(torch.tensor([-2.0, 2.0]))
    tensor([0., 2.])
    """

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """1 for z > 0, else 0; at the corner z = 0 the subgradient 0, as torch has it."""
        return with_derivative(z, lambda u: (u > 0).to(u.dtype), torch.zeros_like)

    def _value(self, z: Tensor) -> Tensor:
        return torch.relu(z)

    def _psi(self, z: Tensor) -> Tensor:
        return _monomial(torch.relu(z), 2)

    def _double(self, z: Tensor) -> Tensor:
        return _monomial(torch.relu(z), 3)


@dataclass(frozen=True)
class SquaredReLU(_Chain):
    """s = z_+^2, psi = z_+^3/3, Psi = z_+^4/12 (So et al. 2021, arXiv:2109.08668).

    >>> SquaredReLU().potential(torch.tensor([-3.0, 3.0]))
    tensor([0., 9.])
    """

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """2 z_+."""
        return 2 * torch.relu(z)

    def _value(self, z: Tensor) -> Tensor:
        return 2 * _monomial(torch.relu(z), 2)

    def _psi(self, z: Tensor) -> Tensor:
        return 2 * _monomial(torch.relu(z), 3)

    def _double(self, z: Tensor) -> Tensor:
        return 2 * _monomial(torch.relu(z), 4)


@dataclass(frozen=True)
class Tanh(_Chain):
    """s = tanh z, psi = log cosh z, Psi = z^2/2 - z log 2 + Li2(-e^(-2z))/2 + pi^2/24 for z >= 0, and odd.

    >>> Tanh().potential(torch.tensor([-1.0, 1.0], dtype=torch.float64))
    tensor([0.4338, 0.4338], dtype=torch.float64)
    """

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """1 / cosh^2 z, not as 1 - tanh^2, which loses its digits at large z."""
        return 4 * sigmoid(2 * z) * sigmoid(-2 * z)

    def _value(self, z: Tensor) -> Tensor:
        return torch.tanh(z)

    def _psi(self, z: Tensor) -> Tensor:
        return _log_cosh(z.device).once(z.abs())

    def _double(self, z: Tensor) -> Tensor:
        return torch.copysign(_log_cosh(z.device).twice(z.abs()), z)


class _Gate(_Chain):
    """s(z) = z^p c(z) with a gate c that rises from 0 to 1 and c(z) + c(-z) = 1.

    With m(a) = a^p c(-a), which decays, s(-a) = (-1)^p m(a) and s(a) = a^p - m(a) for a >= 0. So the antiderivatives
    P and Q of m give psi and Psi on both sides, and nothing cancels: they are at most half of those of a^p.
    """

    power: ClassVar[int] = 1
    cut: ClassVar[float]  # a whole number by which m has decayed below rounding

    def _value(self, z: Tensor) -> Tensor:
        return math.prod([z] * self.power, start=self._gate(z))

    def _psi(self, z: Tensor) -> Tensor:
        left = _decay(self, z.device).once(z.abs())
        return torch.where(z < 0, left if self.power else -left, _monomial(z, self.power + 1) - left)

    def _double(self, z: Tensor) -> Tensor:
        # z = inf would be inf - inf; 1e150 is past all that matters beside the monomial
        left = _decay(self, z.device).twice(torch.maximum(-z, z.clamp(max=1e150)))
        return torch.where(z < 0, -left if self.power else left, _monomial(z, self.power + 2) - left)

    @abstractmethod
    def _gate(self, z: Tensor) -> Tensor:
        """c(z)."""


@dataclass(frozen=True)
class Sigmoid(_Gate):
    """s = 1 / (1 + e^(-z)), psi = log(1 + e^z) - log 2, Psi = -Li2(-e^z) - pi^2/12 - z log 2.

    >>> Sigmoid().potential(torch.tensor([-torch.inf, 0.0, 1.0]))
    tensor([-0.6931,  0.0000,  0.6201])
    """

    power: ClassVar[int] = 0
    cut: ClassVar[float] = 40.0

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """s(z) s(-z)."""
        return sigmoid(z) * sigmoid(-z)

    def _gate(self, z: Tensor) -> Tensor:
        return sigmoid(z)


@dataclass(frozen=True)
class SiLU(_Gate):
    """s = z sigma(z), sigma the sigmoid; psi = z log(1 + e^z) + Li2(-e^z) + pi^2/12, which tends to pi^2/12 at -inf;
    Psi = -z Li2(-e^z) + 2 Li3(-e^z) + pi^2 z/12 + (3/2) zeta(3).

    >>> SiLU().potential(torch.tensor([-torch.inf, -1.0, 0.0, 1.0]))
    tensor([0.8225, 0.1706, 0.0000, 0.3294])
    """

    cut: ClassVar[float] = 40.0

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """sigma(z) (1 + z sigma(-z))."""
        return sigmoid(z) * (1 + z * sigmoid(-z))

    def _gate(self, z: Tensor) -> Tensor:
        return sigmoid(z)


@dataclass(frozen=True)
class GELU(_Gate):
    """s = z Phi(z), Phi the normal distribution function and phi its density; psi = [(z^2 - 1) Phi + z phi]/2 + 1/4,
    which tends to 1/4 at -inf; Psi = [(z^3 - 3z) Phi + (z^2 - 4) phi]/6 + z/4 + (2/3)/sqrt(2 pi).

    >>> GELU().potential(torch.tensor([-torch.inf, -1.0, 0.0, 1.0]))
    tensor([0.2500, 0.1290, 0.0000, 0.3710])
    """

    cut: ClassVar[float] = 9.0

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Phi(z) + z phi(z)."""
        return self._gate(z) + z * (torch.exp(-z * z / 2) / math.sqrt(2 * math.pi))

    def _gate(self, z: Tensor) -> Tensor:
        return torch.erfc(z * -math.sqrt(0.5)) / 2


@dataclass(frozen=True)
class GELUTanh(_Gate):
    """s = (z/2) (1 + tanh y) = z sigma(2y) with y = sqrt(2/pi) (z + 0.044715 z^3) (Hendrycks & Gimpel 2016,
    arXiv:1606.08415). psi and Psi are not elementary; psi is within 4.1424e-4 of that of GELU.

    >>> GELUTanh().potential(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([0.1291, 0.0000, 0.3709])
    """

    cut: ClassVar[float] = 9.0

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """sigma(2y) (1 + 2 z y' sigma(-2y))."""
        z = z.clamp(-30, 30)  # the slope is 0 or 1 from there, and z^3 may be infinite
        rate = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)
        return self._gate(z) * (1 + z * rate * self._gate(-z))

    def _gate(self, z: Tensor) -> Tensor:
        return sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z))


@dataclass(frozen=True)
class QuickGELU(_Chain):
    """s = z sigma(q z) with q = 1.702, which is SiLU(q z)/q; so psi = psi_SiLU(q z)/q^2 and Psi = Psi_SiLU(q z)/q^3.

    >>> QuickGELU().potential(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([0.1252, 0.0000, 0.3748])
    """

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The slope of SiLU at q z."""
        return SiLU().slope(_QUICK * z)

    def _value(self, z: Tensor) -> Tensor:
        return z * sigmoid(_QUICK * z)

    def _psi(self, z: Tensor) -> Tensor:
        return SiLU()._psi(_QUICK * z) / _QUICK**2

    def _double(self, z: Tensor) -> Tensor:
        return SiLU()._double(_QUICK * z) / _QUICK**3


_QUICK = 1.702

_NAMES: dict[str, type[Activation]] = {
    "relu": ReLU,
    "relu2": SquaredReLU,
    "tanh": Tanh,
    "sigmoid": Sigmoid,
    "silu": SiLU,
    "swish": SiLU,
    "gelu": GELU,
    "gelu_new": GELUTanh,
    "gelu_pytorch_tanh": GELUTanh,
    "gelu_fast": GELUTanh,  # its sqrt(2/pi) is cut after ten digits
    "quick_gelu": QuickGELU,
    "linear": Identity,
}


def named(name: str) -> Activation:
    """The activation that Hugging Face configurations call ``name`` in ``hidden_act``; an unknown name is a
    ``HelmscopeError`` that offers the nearest.

    >>> named("gelu_new")
    GELUTanh()
    """
    return _NAMES[known_name("activation", str(name), _NAMES)]()


def sigmoid(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1 / (1 + e^(-z)), to rounding relative to its value on both sides, and infinitely differentiable.

    >>> sigmoid(torch.tensor([-100.0, 0.0]))
    tensor([3.7835e-44, 5.0000e-01])
    """
    return with_derivative(z, _sigmoid, lambda u: sigmoid(u) * sigmoid(-u))


def _sigmoid(z: Tensor) -> Tensor:
    small = torch.exp(-z.abs())
    return torch.where(z < 0, small, 1.0) / (1 + small)


def _monomial(z: Tensor, n: int) -> Tensor:
    """z^n / n!, the n-fold antiderivative of 1, by multiplication: torch.pow depends on the place in the tensor."""
    return math.prod([z] * (n - 1), start=z) / math.factorial(n)


@functools.cache
def _decay(activation: _Gate, device: torch.device) -> Antiderivatives:
    """The table of m(a) = a^p c(-a)."""
    return tabulate(
        lambda a: activation._gate(-a), power=activation.power, cut=activation.cut, limit=0.0, device=device
    )


@functools.cache
def _log_cosh(device: torch.device) -> Antiderivatives:
    """The table of m(a) = tanh a."""
    return tabulate(lambda a: torch.tanh(a) / a, power=1, cut=20.0, limit=1.0, device=device)
