"""Potentials U on R^d: the interface of a landscape.

The force is +grad U and the energy is V = -U, so basins are maxima of U.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.surface import ambient_gradient, derivative
from helmscope.types import HelmscopeError, short_repr
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = ["FunctionPotential", "Potential", "as_potential"]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)


class Potential(ABC):
    """Base class of potentials. A subclass defines ``potential``; derivatives then come from autograd, unless it
    overrides them with closed forms, as ``helmholtz(mlp)`` does.

    Each method takes points (*batch, d) and treats them independently.

    >>> class Height(Potential):
    ...     def potential(self, x):
    ...         return x[..., 0]
    >>> Height().gradient(torch.tensor([0.0, 1.0]))
    tensor([1., 0.])
    """

    @abstractmethod
    def potential(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """U(x).

        >>> FunctionPotential(lambda x: x[..., 0]).potential(torch.tensor([[0.6, 0.8], [1.0, 0.0]]))
        tensor([0.6000, 1.0000])
        """

    def gradient(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """grad U(x) in R^d, without projection.

        >>> FunctionPotential(lambda x: x[..., 0] ** 2).gradient(torch.tensor([0.5, 1.0]))
        tensor([1., 0.])
        """
        return ambient_gradient(self.potential, x)

    def hessian_product(self, x: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """(Hess U)(x) v in R^d, without the matrix.

        >>> x, v = torch.tensor([0.5, 1.0]), torch.tensor([3.0, 1.0])
        >>> FunctionPotential(lambda x: x[..., 0] ** 2).hessian_product(x, v)
        tensor([6., 0.])
        """
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_(True)
            product = derivative((ambient_gradient(self.potential, point) * v).sum(-1), point)
        return product if x.requires_grad else product.detach()

    def hessian(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """(Hess U)(x) in R^d, one column after another.

        >>> FunctionPotential(lambda x: x[..., 0] * x[..., 1]).hessian(torch.tensor([0.5, 1.0]))
        tensor([[0., 1.],
                [1., 0.]])
        """
        directions = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        return torch.stack([self.hessian_product(x, v.expand_as(x)) for v in directions], dim=-1)


@dataclass(frozen=True)
class FunctionPotential(Potential):
    """A plain function (*batch, d) -> (*batch), differentiated by autograd.

    >>> FunctionPotential(lambda x: x[..., 0] ** 2).hessian(torch.tensor([0.0, 1.0]))
    tensor([[2., 0.],
            [0., 0.]])
    """

    function: Callable[[Tensor], Tensor]

    def potential(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """The value of the function."""
        return self.function(x)


def as_potential(potential: object) -> Potential:
    """Convert the argument to a potential: a ``Potential`` is returned unchanged, and so is the owner of a bound
    ``potential`` method; a plain function is wrapped. Raises ``HelmscopeError`` for anything else.

    >>> type(as_potential(lambda x: x[..., 0])).__name__
    'FunctionPotential'
    """
    owner = getattr(potential, "__self__", None)
    if isinstance(owner, Potential) and potential == owner.potential:
        return owner
    if isinstance(potential, Potential):
        return potential
    if isinstance(potential, type) or not callable(potential):
        raise HelmscopeError(
            f"potential is {short_repr(potential)}, but it must be a Potential such as helmholtz(mlp), or a function "
            "that returns one number per point"
        )
    return FunctionPotential(potential)
