"""W2 between Gaussian laws in closed form (Dowson and Landau 1982).

W2(N(m, A), N(n, B))^2 = |m - n|^2 + tr A + tr B - 2 tr (A^{1/2} B A^{1/2})^{1/2}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import every, full_precision
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@full_precision
def gaussian_w2(
    mean_x: Float[Tensor, "*batch d"],
    covariance_x: Float[Tensor, "*batch d d"],
    mean_y: Float[Tensor, "*batch d"],
    covariance_y: Float[Tensor, "*batch d d"],
) -> Float[Tensor, "*batch"]:
    """W2 between two Gaussian laws on R^d, the distance and not its square; batch axes broadcast.

    It is differentiable where the laws differ and the covariances are positive definite. Raises ``HelmscopeError`` for
    covariances that are not symmetric or have a negative eigenvalue.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> gaussian_w2(torch.zeros(1), one, torch.zeros(1), 4 * one)
    tensor(1., dtype=torch.float64)
    """
    for name, matrix in (("covariance_x", covariance_x), ("covariance_y", covariance_y)):
        _check_covariance(name, matrix)
    root = _square_root(covariance_x)
    cross = _square_root(root @ covariance_y @ root)
    traces = (covariance_x + covariance_y - 2 * cross).diagonal(dim1=-2, dim2=-1).sum(-1)
    squared = (mean_x - mean_y).square().sum(-1) + traces
    return squared.clamp(min=0).sqrt()


def _square_root(matrix: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    root: Tensor = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
    return root


def _check_covariance(name: str, matrix: object) -> None:
    if not isinstance(matrix, torch.Tensor) or matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        shape = tuple(matrix.shape) if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        raise HelmscopeError(f"{name} is {shape}, but it must be a tensor of square matrices (..., d, d)")
    fixed = matrix.detach()
    scale = float(fixed.abs().max()) if fixed.numel() else 0.0
    tol = 1e3 * torch.finfo(fixed.dtype).eps * scale
    if not every((fixed - fixed.mT).abs() <= tol):
        raise HelmscopeError(f"{name} is not symmetric, but a covariance must be")
    if not every(torch.linalg.eigvalsh(fixed) >= -tol):
        raise HelmscopeError(f"{name} has a negative eigenvalue, but a covariance must have none")
