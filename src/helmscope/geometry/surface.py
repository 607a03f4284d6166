"""Calculus on the sphere by autograd: surface gradient, divergence, Hessian and Laplacian of a function.

The function takes points (*batch, d) and treats each independently. It must extend smoothly off the sphere, but the
results do not depend on the extension: the correction terms below remove that dependence. The result requires a
gradient if x does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import project
from helmscope.types import HelmscopeError, type_with_article
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = ["ambient_gradient", "derivative", "divergence", "gradient", "hessian", "laplacian"]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)


Function = Callable[["Tensor"], "Tensor"]


def _differentiable(operator: Callable[[Function, Tensor], Tensor]) -> Callable[[Function, Tensor], Tensor]:
    """Decorator: run ``operator`` with gradients enabled, and keep its graph only if x requires a gradient."""

    @full_precision  # the derivatives of f multiply matrices where f does
    @functools.wraps(operator)
    def run(f: Function, x: Tensor) -> Tensor:
        with torch.enable_grad():
            result = operator(f, x if x.requires_grad else x.detach().requires_grad_(True))
        return result if x.requires_grad else result.detach()

    return run


@_differentiable
def ambient_gradient(f: Function, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Gradient of a scalar function in R^d, without projection.

    >>> ambient_gradient(lambda x: x[..., 1] ** 2, torch.tensor([0.6, 0.8]))
    tensor([0.0000, 1.6000])
    """
    value = f(x)
    if not isinstance(value, torch.Tensor) or value.shape != x.shape[:-1]:
        what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type_with_article(value)
        raise HelmscopeError(
            f"f returns {what} for points of shape {tuple(x.shape)}, "
            "but a scalar function must return one number per point"
        )
    return derivative(value, x)


@_differentiable
def gradient(f: Function, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Surface gradient grad_S f = P_x grad f of a scalar function, (*batch, d) -> (*batch).

    >>> gradient(lambda x: x[..., 1] ** 2, torch.tensor([0.6, 0.8]))
    tensor([-0.7680,  0.5760])
    """
    return project(x, ambient_gradient(f, x))


@_differentiable
def divergence(f: Function, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Surface divergence of the tangential part of a vector field f, (*batch, d) -> (*batch, d):

        div_S(P f) = div f - x^T Df x - (d - 1) <x, f>     [Helmholtz Transformer, no. 3].

    >>> divergence(lambda x: x, torch.tensor([0.0, 1.0])).item()  # x has no tangential part
    0.0
    """
    value = f(x)
    if value.shape != x.shape:
        raise HelmscopeError(
            f"f returns shape {tuple(value.shape)} for points of shape {tuple(x.shape)}, "
            "but a vector field must return one vector per point"
        )
    total = -(x.shape[-1] - 1) * (x * value).sum(-1)
    for k in range(x.shape[-1]):
        row = derivative(value[..., k], x)
        total = total + row[..., k] - x[..., k] * (row * x).sum(-1)
    return total


@_differentiable
def hessian(f: Function, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
    """Surface Hessian Hess_S f = P (D^2 f) P - <x, grad f> P of a scalar function [Helmholtz Transformer, no. 9], as an
    ambient matrix.

    The normal x is always an eigenvector with eigenvalue 0, whatever f is: restrict to ``tangent_basis(x)`` to obtain
    the d - 1 eigenvalues that depend on f.

    >>> hessian(lambda x: x[..., 1] ** 2, torch.tensor([1.0, 0.0]))
    tensor([[0., 0.],
            [0., 2.]])
    """
    ambient = ambient_gradient(f, x)
    second = torch.stack([derivative(ambient[..., k], x) for k in range(x.shape[-1])], dim=-2)
    p = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) - x.unsqueeze(-1) * x.unsqueeze(-2)
    return p @ second @ p - (x * ambient).sum(-1)[..., None, None] * p


@_differentiable
def laplacian(f: Function, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Laplace-Beltrami operator Lap_S f = tr Hess_S f of a scalar function.

    >>> laplacian(lambda x: x[..., 0], torch.tensor([0.6, 0.8, 0.0])).item()  # degree 1: -(d-1) x_1
    -1.2000000476837158
    """
    return hessian(f, x).diagonal(dim1=-2, dim2=-1).sum(-1)


def derivative(value: Tensor, x: Tensor) -> Tensor:
    """d(value)/dx, one gradient per point: points are independent, so one backward pass of the sum gives all.

    >>> x = torch.tensor([3.0], requires_grad=True)
    >>> derivative(x**2, x).detach()
    tensor([6.])
    """
    if not value.requires_grad:
        return torch.zeros_like(x)
    (derivative,) = torch.autograd.grad(value.sum(), x, create_graph=True, allow_unused=True)
    return torch.zeros_like(x) if derivative is None else derivative
