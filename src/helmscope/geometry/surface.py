"""Calculus on the sphere for callables of one point, by autograd: surface gradient, divergence, Hessian, Laplacian.

A callable takes points (*batch, d) and treats each on its own. It needs a smooth extension off the sphere, but the
results do not depend on which: that is what the correction terms below are for. Where x requires a gradient, so does
the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import project
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


Function = Callable[["Tensor"], "Tensor"]


def _differentiable(operator: Callable[[Function, Tensor], Tensor]) -> Callable[[Function, Tensor], Tensor]:
    """Run an operator with gradients on, and keep its graph only where the caller's x asks for one."""

    @full_precision  # the derivatives of f multiply matrices where f does
    @functools.wraps(operator)
    def run(f: Function, x: Tensor) -> Tensor:
        with torch.enable_grad():
            result = operator(f, x if x.requires_grad else x.detach().requires_grad_(True))
        return result if x.requires_grad else result.detach()

    return run


@_differentiable
def gradient(f: Function, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Surface gradient grad_S f = P_x grad f of a scalar function, (*batch, d) -> (*batch).

    >>> gradient(lambda x: x[..., 1] ** 2, torch.tensor([0.6, 0.8]))
    tensor([-0.7680,  0.5760])
    """
    return project(x, _ambient_gradient(f, x))


@_differentiable
def divergence(f: Function, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Surface divergence of the tangential part of a field, (*batch, d) -> (*batch, d):

        div_S(P f) = div f - x^T Df x - (d - 1) <x, f>     (source 000-3 (e)).

    >>> divergence(lambda x: x, torch.tensor([0.0, 1.0])).item()  # x has no tangential part
    0.0
    """
    value = f(x)
    if value.shape != x.shape:
        raise HelmscopeError(
            f"f gives shape {tuple(value.shape)} at points of shape {tuple(x.shape)}, "
            "but a field gives a vector at each point"
        )
    total = -(x.shape[-1] - 1) * (x * value).sum(-1)
    for k in range(x.shape[-1]):
        row = _derivative(value[..., k], x)
        total = total + row[..., k] - x[..., k] * (row * x).sum(-1)
    return total


@_differentiable
def hessian(f: Function, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
    """Surface Hessian Hess_S f = P (D^2 f) P - <x, grad f> P of a scalar function (source 000-9), as an ambient matrix.

    The normal direction x is an eigenvector of eigenvalue 0 that is not the function's: restrict to
    ``tangent_basis(x)`` for the d - 1 eigenvalues that are.

    >>> hessian(lambda x: x[..., 1] ** 2, torch.tensor([1.0, 0.0]))
    tensor([[0., 0.],
            [0., 2.]])
    """
    slope = _ambient_gradient(f, x)
    second = torch.stack([_derivative(slope[..., k], x) for k in range(x.shape[-1])], dim=-2)
    p = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) - x.unsqueeze(-1) * x.unsqueeze(-2)
    return p @ second @ p - (x * slope).sum(-1)[..., None, None] * p


@_differentiable
def laplacian(f: Function, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Laplace-Beltrami operator Lap_S f = tr Hess_S f.

    >>> laplacian(lambda x: x[..., 0], torch.tensor([0.6, 0.8, 0.0])).item()  # degree 1: -(d-1) x_1
    -1.2000000476837158
    """
    return hessian(f, x).diagonal(dim1=-2, dim2=-1).sum(-1)


def _ambient_gradient(f: Function, x: Tensor) -> Tensor:
    value = f(x)
    if value.shape != x.shape[:-1]:
        raise HelmscopeError(
            f"f gives shape {tuple(value.shape)} at points of shape {tuple(x.shape)}, "
            "but a function gives one number at each point"
        )
    return _derivative(value, x)


def _derivative(value: Tensor, x: Tensor) -> Tensor:
    """d(value)/dx, one gradient a point: points do not see each other, so the sum separates."""
    if not value.requires_grad:
        return torch.zeros_like(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True, allow_unused=True)
    return torch.zeros_like(x) if slope is None else slope
