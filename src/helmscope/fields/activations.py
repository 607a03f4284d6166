"""Activations s(z) with the derivative and the two antiderivatives that the Helmholtz split needs [Helmholtz
Transformer, no. 3].

    psi(z) = int_0^z s,    Psi(z) = int_0^z psi,    psi(0) = Psi(0) = 0

The constants of integration matter: in a gated MLP they add constant vectors to the gradient part. Every function is
elementwise and keeps the dtype; psi and Psi are computed in float64 to a relative accuracy of 1e-15 at every z. Under
autograd and torch.func d Psi/dz is exactly psi, d psi/dz is exactly s and ds/dz is exactly the slope. ``chain`` returns
all of them at once, in the arithmetic of z: in float32 about ten times faster, to single precision.

torch.sigmoid, silu and gelu are not used: on a CPU their last bit depends on the position of the element in the tensor.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from helmscope.fields.activation import Activation, DerivativeChain
from helmscope.fields.antiderivative import Antiderivatives, tabulate, with_derivative
from helmscope.fields.elementary import monomial, sigmoid
from helmscope.types import check_name
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = [
    "GELU",
    "Activation",
    "GELUTanh",
    "Identity",
    "QuickGELU",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "SquaredReLU",
    "Tanh",
    "from_name",
]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__, "GELU")


@dataclass(frozen=True)
class Identity(DerivativeChain):
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
        return monomial(z, 2)

    def _double_psi(self, z: Tensor) -> Tensor:
        return monomial(z, 3)


@dataclass(frozen=True)
class ReLU(DerivativeChain):
    """s = z_+, psi = z_+^2/2, Psi = z_+^3/6.

    >>> ReLU().potential(torch.tensor([-2.0, 2.0]))
    tensor([0., 2.])
    """

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """1 for z > 0, else 0; at the corner z = 0 the subgradient 0, as in torch."""
        return with_derivative(z, lambda u: (u > 0).to(u.dtype), torch.zeros_like)

    def _value(self, z: Tensor) -> Tensor:
        return torch.relu(z)

    def _psi(self, z: Tensor) -> Tensor:
        return monomial(torch.relu(z), 2)

    def _double_psi(self, z: Tensor) -> Tensor:
        return monomial(torch.relu(z), 3)


@dataclass(frozen=True)
class SquaredReLU(DerivativeChain):
    """s = z_+^2, psi = z_+^3/3, Psi = z_+^4/12 (So et al. 2021, arXiv:2109.08668).

    >>> SquaredReLU().potential(torch.tensor([-3.0, 3.0]))
    tensor([0., 9.])
    """

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """2 z_+."""
        return 2 * torch.relu(z)

    def _value(self, z: Tensor) -> Tensor:
        return 2 * monomial(torch.relu(z), 2)

    def _psi(self, z: Tensor) -> Tensor:
        return 2 * monomial(torch.relu(z), 3)

    def _double_psi(self, z: Tensor) -> Tensor:
        return 2 * monomial(torch.relu(z), 4)


@dataclass(frozen=True)
class Tanh(DerivativeChain):
    """s = tanh z, psi = log cosh z, Psi = z^2/2 - z log 2 + Li2(-e^(-2z))/2 + pi^2/24 for z >= 0, and odd.

    >>> Tanh().potential(torch.tensor([-1.0, 1.0], dtype=torch.float64))
    tensor([0.4338, 0.4338], dtype=torch.float64)
    """

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """1 / cosh^2 z, not computed as 1 - tanh^2, which cancels at large z."""
        return 4 * sigmoid(2 * z) * sigmoid(-2 * z)

    def _value(self, z: Tensor) -> Tensor:
        return torch.tanh(z)

    def _psi(self, z: Tensor) -> Tensor:
        return _tanh_integrals(z.device).once(z.abs())

    def _double_psi(self, z: Tensor) -> Tensor:
        return torch.copysign(_tanh_integrals(z.device).twice(z.abs()), z)


class _GatedPower(DerivativeChain):
    """s(z) = z^p c(z) with a gate c that rises from 0 to 1 and c(z) + c(-z) = 1.

    With m(a) = a^p c(-a), which decays, s(-a) = (-1)^p m(a) and s(a) = a^p - m(a) for a >= 0. So psi and Psi follow on
    both sides from the antiderivatives P and Q of m, without cancellation: P and Q are at most half of those of a^p.
    """

    power: ClassVar[int] = 1
    cut: ClassVar[float]  # an integer beyond which m is below rounding error

    def _value(self, z: Tensor) -> Tensor:
        return math.prod([z] * self.power, start=self._gate(z))

    def _psi(self, z: Tensor) -> Tensor:
        tail = _tail_integrals(self, z.device).once(z.abs())
        # not torch.where, which is ten times slower where signs alternate at random
        return monomial(torch.relu(z), self.power + 1) - (torch.copysign(tail, z) if self.power else tail)

    def _double_psi(self, z: Tensor) -> Tensor:
        # clamped, because z = inf would give inf - inf; beyond that the tail is negligible next to the monomial
        largest = 1e150 if z.dtype == torch.float64 else 1e18
        tail = _tail_integrals(self, z.device).twice(torch.maximum(-z, z.clamp(max=largest)))
        return monomial(torch.relu(z), self.power + 2) - (tail if self.power else torch.copysign(tail, z))

    @abstractmethod
    def _gate(self, z: Tensor) -> Tensor:
        """c(z)."""


@dataclass(frozen=True)
class Sigmoid(_GatedPower):
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
class SiLU(_GatedPower):
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
class GELU(_GatedPower):
    """s = z Phi(z), Phi the normal distribution function and phi its density; psi = [(z^2 - 1) Phi + z phi]/2 + 1/4,
    which tends to 1/4 at -inf; Psi = [(z^3 - 3z) Phi + (z^2 - 4) phi]/6 + z/4 + (2/3)/sqrt(2 pi).

    >>> GELU().potential(torch.tensor([-torch.inf, -1.0, 0.0, 1.0]))
    tensor([0.2500, 0.1290, 0.0000, 0.3710])
    """

    cut: ClassVar[float] = 9.0

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Phi(z) + z phi(z)."""
        return self._gate(z) + z * (torch.exp(-z * z / 2) / math.sqrt(2 * math.pi))

    def chain(self, z: Float[Tensor, "*shape"], *, double: bool = False) -> tuple[Float[Tensor, "*shape"], ...]:
        """By one error function and one exponential, in float32: psi = [z (s + phi) - (Phi - 1/2)] / 2."""
        if double or z.dtype != torch.float32:
            return super().chain(z, double=double)
        z, scale = z.detach(), 1 / math.sqrt(2 * math.pi)
        half = (z * math.sqrt(0.5)).erf_().mul_(0.5)  # Phi - 1/2
        density = (z * z).mul_(-0.5).exp_()  # phi over the scale
        gate = half + 0.5
        value = z * gate
        psi = torch.add(value, density, alpha=scale).mul_(z).sub_(half).mul_(0.5)
        return gate.addcmul_(z, density, value=scale), value, psi

    def _gate(self, z: Tensor) -> Tensor:
        return torch.erfc(z * -math.sqrt(0.5)) / 2


@dataclass(frozen=True)
class GELUTanh(_GatedPower):
    """s = (z/2) (1 + tanh y) = z sigma(2y) with y = sqrt(2/pi) (z + 0.044715 z^3) (Hendrycks & Gimpel 2016,
    arXiv:1606.08415). psi and Psi are not elementary; psi differs from that of GELU by at most 4.1424e-4.

    >>> GELUTanh().potential(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([0.1291, 0.0000, 0.3709])
    """

    cut: ClassVar[float] = 9.0

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """sigma(2y) (1 + 2 z y' sigma(-2y))."""
        z = z.clamp(-30, 30)  # beyond which the slope is 0 or 1 and z^3 may overflow
        rate = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)
        return self._gate(z) * (1 + z * rate * self._gate(-z))

    def _gate(self, z: Tensor) -> Tensor:
        return sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z))


@dataclass(frozen=True)
class QuickGELU(DerivativeChain):
    """s = z sigma(q z) with q = 1.702, which is SiLU(q z)/q; so psi = psi_SiLU(q z)/q^2 and Psi = Psi_SiLU(q z)/q^3.

    >>> QuickGELU().potential(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([0.1252, 0.0000, 0.3748])
    """

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The slope of SiLU at q z."""
        return SiLU().slope(_QUICK_SLOPE * z)

    def _value(self, z: Tensor) -> Tensor:
        return z * sigmoid(_QUICK_SLOPE * z)

    def _psi(self, z: Tensor) -> Tensor:
        return SiLU()._psi(_QUICK_SLOPE * z) / _QUICK_SLOPE**2

    def _double_psi(self, z: Tensor) -> Tensor:
        return SiLU()._double_psi(_QUICK_SLOPE * z) / _QUICK_SLOPE**3


_QUICK_SLOPE = 1.702

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
    "gelu_fast": GELUTanh,  # which truncates sqrt(2/pi) to ten digits
    "quick_gelu": QuickGELU,
    "linear": Identity,
}


def from_name(name: str) -> Activation:
    """The activation with this name in Hugging Face configurations (``hidden_act``).

    Raises ``HelmscopeError`` for an unknown name and suggests the closest one.

    >>> from_name("gelu_new")
    GELUTanh()
    """
    return _NAMES[check_name("activation", str(name), _NAMES)]()


@functools.cache
def _tail_integrals(activation: _GatedPower, device: torch.device) -> Antiderivatives:
    """The table of antiderivatives of m(a) = a^p c(-a)."""
    return tabulate(
        lambda a: activation._gate(-a), power=activation.power, cut=activation.cut, limit=0.0, device=device
    )


@functools.cache
def _tanh_integrals(device: torch.device) -> Antiderivatives:
    """The table of antiderivatives of m(a) = tanh a."""
    return tabulate(lambda a: torch.tanh(a) / a, power=1, cut=20.0, limit=1.0, device=device)
