"""The Hessian of a potential on the sphere, restricted to the tangent space [Helmholtz Transformer, no. 9].

    Hess_S U = P (Hess U) P - <x, grad U> P,    P = I - x x^T.

As a d x d matrix it has the normal x as an eigenvector with eigenvalue 0, which is not an eigenvalue of the surface;
here it is the (d - 1) x (d - 1) matrix Q^T (Hess U) Q - <x, grad U> I in the basis Q = ``tangent_basis(x)``.

The force is +grad U and the energy V = -U. A point where the smallest eigenvalue of Hess_S V (minus the largest of
Hess_S U) is near 0 or negative is where neighboring points diverge, and a decision is made; in a basin all are
positive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.krylov import leading_eigenvalues
from helmscope.geometry.potential import Potential, as_potential
from helmscope.geometry.sphere import check_tokens, project, retract, tangent_basis
from helmscope.types import HelmscopeError, check_integer
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = ["energy_curvatures", "hessian_eigenvalues", "hessian_product", "tangent_hessian"]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)

DENSE_SIZE = 64  # up to this many tangent directions the matrix is faster than products


@full_precision
def tangent_hessian(
    potential: Potential | Callable[[Tensor], Tensor], x: Float[Tensor, "*batch d"]
) -> Float[Tensor, "*batch d_minus_1 d_minus_1"]:
    """Hess_S U at unit vectors x, as a symmetric matrix in the basis ``tangent_basis(x)``.

    ``potential`` is a function (*batch, d) -> (*batch), differentiated by autograd, or a ``Potential`` such as
    ``helmholtz(mlp)``, whose closed form is used. Raises ``HelmscopeError`` unless every x has norm 1.

    >>> quadratic = lambda x: (x.square() * torch.tensor([1.0, 2.0, 4.0])).sum(-1) / 2
    >>> tangent_hessian(quadratic, torch.tensor([1.0, 0.0, 0.0]))
    tensor([[1., 0.],
            [0., 3.]])
    """
    u = as_potential(potential)
    _check_unit(x)
    basis = tangent_basis(x)
    inner = basis.mT @ u.hessian(x) @ basis
    slope = (x * u.gradient(x)).sum(-1)[..., None, None]
    matrix = inner - slope * torch.eye(x.shape[-1] - 1, dtype=x.dtype, device=x.device)
    return (matrix + matrix.mT) / 2


def hessian_product(
    potential: Potential | Callable[[Tensor], Tensor], x: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]
) -> Float[Tensor, "*batch d"]:
    """Hess_S U v = P (Hess U) v - <x, grad U> v for a tangent vector v at x, without any matrix; unchecked.

    >>> quadratic = lambda x: (x.square() * torch.tensor([1.0, 2.0, 4.0])).sum(-1) / 2
    >>> hessian_product(quadratic, torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 1.0]))
    tensor([0., 1., 3.])
    """
    u = as_potential(potential)
    return project(x, u.hessian_product(x, v)) - (x * u.gradient(x)).sum(-1, keepdim=True) * v


def hessian_eigenvalues(
    potential: Potential | Callable[[Tensor], Tensor], x: Float[Tensor, "*batch d"], *, count: int | None = None
) -> Float[Tensor, "*batch k"]:
    """Eigenvalues of Hess_S U in the tangent space, ascending: all d - 1, or the ``count`` smallest.

    With ``count``, and more than 64 tangent directions, no d x d matrix is stored: Lanczos' method uses products with
    the Hessian only. Raises ``HelmscopeError`` unless 1 <= count <= d - 1, or where the method does not converge.

    >>> quadratic = lambda x: (x.square() * torch.tensor([1.0, 2.0, 4.0])).sum(-1) / 2
    >>> hessian_eigenvalues(quadratic, torch.eye(3)).round()
    tensor([[ 1.,  3.],
            [-1.,  2.],
            [-3., -2.]])
    """
    return _smallest_eigenvalues(as_potential(potential), x, count, sign=1.0)


def energy_curvatures(
    potential: Potential | Callable[[Tensor], Tensor], x: Float[Tensor, "*batch d"], *, count: int | None = None
) -> Float[Tensor, "*batch k"]:
    """Eigenvalues of Hess_S V of the energy V = -U, ascending: all d - 1, or the ``count`` smallest.

    The first is the decision detector: minus the largest eigenvalue of Hess_S U. Arguments and errors are those of
    ``hessian_eigenvalues``.

    >>> quadratic = lambda x: (x.square() * torch.tensor([1.0, 2.0, 4.0])).sum(-1) / 2
    >>> energy_curvatures(quadratic, torch.eye(3), count=1)[:, 0].round()  # e_3 is a basin, the others are left
    tensor([-3., -2.,  2.])
    """
    return _smallest_eigenvalues(as_potential(potential), x, count, sign=-1.0)


def _smallest_eigenvalues(u: Potential, x: Tensor, count: int | None, *, sign: float) -> Tensor:
    """The smallest eigenvalues of ``sign`` times Hess_S U."""
    _check_unit(x)
    size = x.shape[-1] - 1
    if count is not None and check_integer("count", count, at_least=1) > size:
        raise HelmscopeError(f"count is {count}, but the tangent space has only {size} directions")
    if count is None or size <= DENSE_SIZE or count > size // 4:
        values: Tensor = torch.linalg.eigvalsh(sign * tangent_hessian(u, x))
        return values[..., : count or size]
    points = x.detach().reshape(-1, x.shape[-1])
    spectra = [_by_lanczos(u, point, count, sign) for point in points]
    return torch.stack(spectra).reshape(*x.shape[:-1], count)


def _by_lanczos(u: Potential, x: Float[Tensor, " d"], count: int, sign: float) -> Float[Tensor, " count"]:
    """The ``count`` smallest eigenvalues of one point: minus the largest of the negated Hessian.

    The operator is shifted by its size, because ARPACK rejects the operator 0.
    """
    kind = torch.empty(0, dtype=x.dtype, device="cpu").numpy().dtype
    slope = (x * u.gradient(x)).sum()

    def product(w: np.ndarray) -> np.ndarray:
        v = _lift(x, torch.from_numpy(w).to(x))
        return (-sign * _lower(x, u.hessian_product(x, v) - slope * v)).cpu().numpy()

    probe = product(np.full(len(x) - 1, 1 / np.sqrt(len(x) - 1), kind))
    if not np.isfinite(probe).all():
        raise HelmscopeError("potential has a Hessian that is not finite at x, but its eigenvalues need a finite one")
    shift = float(np.linalg.norm(probe)) or 1.0
    try:
        values = leading_eigenvalues(lambda w: product(w) + shift * w, len(x) - 1, kind, count, symmetric=True)
    except ArpackNoConvergence:
        raise HelmscopeError(
            f"count is {count}, but ARPACK did not converge for so many of {len(x) - 1} eigenvalues: try fewer"
        ) from None
    return torch.from_numpy(shift - values.real).to(x)


def _reflector(x: Tensor) -> Tensor:
    """u of the Householder reflection I - 2 u u^T of ``tangent_basis``."""
    first = torch.zeros_like(x)
    first[0] = -1.0 if float(x[0]) < 0 else 1.0
    return retract(x + first)


def _lift(x: Float[Tensor, " d"], w: Float[Tensor, " d_minus_1"]) -> Float[Tensor, " d"]:
    """Q w in O(d)."""
    u, v = _reflector(x), torch.cat([torch.zeros_like(w[:1]), w])
    return v - 2 * (u * v).sum() * u


def _lower(x: Float[Tensor, " d"], v: Float[Tensor, " d"]) -> Float[Tensor, " d_minus_1"]:
    """Q^T v in O(d)."""
    u = _reflector(x)
    return (v - 2 * (u * v).sum() * u)[1:]


def _check_unit(x: object) -> None:
    """Raise ``HelmscopeError`` unless x holds points of the sphere, (*batch, d)."""
    check_tokens(x[None] if isinstance(x, torch.Tensor) and x.ndim == 1 else x)
