"""Base classes of activations: ``Activation``, and ``DerivativeChain`` for those that define Psi, psi, s and the slope,
each the exact derivative of the one before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from helmscope.fields.antiderivative import with_derivative
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Activation(ABC):
    """Base class of activations s: R -> R, applied elementwise to float tensors. A subclass must define ``__call__``.

    ``slope`` then defaults to autograd, and ``potential`` and ``double_potential`` raise ``HelmscopeError`` unless they
    are overridden.

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
        """psi(z) = int_0^z s. Raises ``HelmscopeError`` if the activation does not define it.

        >>> from helmscope.fields.activations import Tanh
        >>> Tanh().potential(torch.tensor([0.0, 1.0]))
        tensor([0.0000, 0.4338])
        """
        raise self._unknown("potential", "s")

    def double_potential(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Psi(z) = int_0^z psi. Raises ``HelmscopeError`` if the activation does not define it.

        >>> from helmscope.fields.activations import ReLU
        >>> ReLU().double_potential(torch.tensor([-1.0, 3.0]))
        tensor([0.0000, 4.5000])
        """
        raise self._unknown("double_potential", "its potential")

    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """s'(z).

        >>> from helmscope.fields.activations import ReLU
        >>> ReLU().slope(torch.tensor([-1.0, 2.0]))
        tensor([0., 1.])
        """
        value, pull_back = torch.func.vjp(self, z)[:2]
        slope: Tensor = pull_back(torch.ones_like(value))[0]
        return slope

    def chain(self, z: Float[Tensor, "*shape"], *, double: bool = False) -> tuple[Float[Tensor, "*shape"], ...]:
        """s'(z), s(z), psi(z) and, if ``double``, Psi(z), without derivatives. Those of this module compute them in
        float32 if z is float32: psi and Psi then have a relative error of 1e-6 (psi of GELU: 3e-7 psi + 6e-8 |z|).

        >>> from helmscope.fields.activations import GELU
        >>> GELU().chain(torch.zeros(1))
        (tensor([0.5000]), tensor([0.]), tensor([0.]))
        """
        z = z.detach()
        found = self.slope(z), self(z), self.potential(z)
        return (*found, self.double_potential(z)) if double else found

    def _unknown(self, method: str, integrand: str) -> HelmscopeError:
        return HelmscopeError(
            f"activation {type(self).__name__} has no table of its {method}: "
            f"implement {method}(z), the integral of {integrand} from 0 to z, or use an activation that has one"
        )


class DerivativeChain(Activation):
    """Base class of activations that define Psi, psi, s and the slope, each the exact derivative of the one before.

    ``_psi`` and ``_double_psi`` compute in the dtype of their tensors, float64 or float32.
    """

    def __call__(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return with_derivative(z, self._value, self.slope)

    def potential(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return with_derivative(z, lambda u: self._psi(u.double()).to(u.dtype), self)

    def double_potential(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return with_derivative(z, lambda u: self._double_psi(u.double()).to(u.dtype), self.potential)

    def chain(self, z: Float[Tensor, "*shape"], *, double: bool = False) -> tuple[Float[Tensor, "*shape"], ...]:
        z = z.detach()
        slope, value = self._slope_and_value(z)
        found = slope, value, self._psi(z)
        return (*found, self._double_psi(z)) if double else found

    def _slope_and_value(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.slope(z), self._value(z)

    @abstractmethod
    def slope(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]: ...

    @abstractmethod
    def _value(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _psi(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _double_psi(self, z: Tensor) -> Tensor: ...
