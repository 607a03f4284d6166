"""The Jacobian of a flow of tokens, and its spectrum.

For the velocity v of the whole cloud, a tangent field on the product of n spheres, the derivative that stays tangent is
the covariant derivative. In an orthonormal basis Q of the tangent spaces it is the N x N matrix

    J = Q^T (D v) Q,    N = n (d - 1).

It does not depend on how v is extended off the sphere. At an equilibrium its eigenvalues are the rates at which
perturbations grow (Re > 0) or decay; elsewhere they describe how neighboring clouds separate at this instant, and are
not Lyapunov exponents. The singular values bound that growth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence

from helmscope.fields.field import Field
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.krylov import leading_eigenvalues, sorted_descending
from helmscope.geometry.sphere import check_tokens, tangent_basis
from helmscope.observe.generator import Velocity, tangent_velocity
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_integer, check_progress
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Complex, Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

DENSE_BYTES = 2**26  # largest Jacobian of one system that is stored as a matrix: N = 2896 in float64
CHUNK_ENTRIES = 2**22  # entries of the n x n (or n x d) arrays of all directions that are differentiated at once


@dataclass(frozen=True, eq=False)
class JacobianSpectrum(ConciseRepr):
    """The k leading eigenvalues and singular values of the Jacobian of each system.

    Eigenvalues are sorted by decreasing real part (in a complex pair the one with positive imaginary part first),
    singular values by decreasing size.

    >>> JacobianSpectrum(torch.zeros(1, dtype=torch.complex64), torch.zeros(1)).singular_values
    tensor([0.])
    """

    eigenvalues: Complex[Tensor, "*batch k"]
    singular_values: Float[Tensor, "*batch k"]


@shows_progress("spectra of Jacobians")
@full_precision
def jacobian_spectrum(
    field: Field | Callable[..., Tensor],
    x: Float[Tensor, "*batch n d"],
    *,
    count: int | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
    progress: ProgressOption = None,
) -> JacobianSpectrum:
    """Spectrum of the Jacobian J = Q^T (D v) Q at each cloud: all N = n (d - 1) values, or the ``count`` leading ones.

    Where J would take more than 64 MiB (N > 2896 in float64) it is never stored: ``count`` is then required, and ARPACK
    computes the values from products J w and J^T w, up to rounding. Raises HelmscopeError where it does not converge.
    ``count`` may split a complex pair. ``field`` must be differentiable by ``torch.func``, forward and backward. Tokens
    of weight 0 are included, as passive tracers that attend to the others. ``progress`` is called with the share of
    the systems done.

    >>> from helmscope.fields.attention import SA
    >>> cluster = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    >>> jacobian_spectrum(SA(beta=4.0), cluster).eigenvalues.real.round(decimals=4) + 0.0  # one drifts, two contract
    tensor([ 0., -1., -1.])
    """
    n, d = check_tokens(x).shape[-2:]
    if not x.numel():
        raise HelmscopeError(f"x has shape {tuple(x.shape)}, but there must be at least one system")
    size = n * (d - 1)
    k = size if count is None else check_integer("count", count, at_least=1)
    dense = size * size * x.element_size() <= DENSE_BYTES
    if k > (size if dense else size - 2):
        needed = f"at most {size}" if dense else f"given and at most {size - 2}: the whole matrix would not fit"
        raise HelmscopeError(f"count is {count}, but for {size} tangent variables it must be {needed}")
    tangent_velocity(field, x, weights)  # checks the whole input before the first system is computed
    clouds = x.detach().reshape(-1, n, d)
    masses = None if weights is None else weights.expand(x.shape[:-1]).reshape(-1, n)
    spectra, report = [], check_progress(progress)
    for i, cloud in enumerate(clouds):
        jacobian = _Jacobian(tangent_velocity(field, cloud, None if masses is None else masses[i]), cloud)
        spectra.append(_dense_spectrum(jacobian, k) if dense else _krylov_spectrum(jacobian, k))
        report(len(spectra) / len(clouds))
    batch = x.shape[:-2]
    eigenvalues, singular_values = (torch.stack(values).reshape(*batch, k) for values in zip(*spectra, strict=True))
    return JacobianSpectrum(eigenvalues, singular_values)


class _Jacobian:
    """J of one cloud, as an operator and as a matrix, in coordinates (N,) of the tangent basis."""

    def __init__(self, velocity: Velocity, x: Float[Tensor, "n d"]) -> None:
        self.velocity, self.x = velocity, x
        self.basis = tangent_basis(x)
        self.size = x.shape[0] * (x.shape[1] - 1)

    def apply(self, w: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch N"]:
        """J w."""
        x = self.x.expand(*w.shape[:-1], *self.x.shape).contiguous()  # forward mode writes to it
        product = torch.func.jvp(self.velocity, (x,), (self._to_ambient(w),))[1]
        return self._to_coordinates(product)

    def apply_transposed(self, w: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """J^T w."""
        (product,) = self._vector_jacobian_product(self._to_ambient(w))
        return self._to_coordinates(product)

    @cached_property
    def _vector_jacobian_product(self) -> Callable[[Tensor], tuple[Tensor]]:
        vjp: Callable[[Tensor], tuple[Tensor]] = torch.func.vjp(self.velocity, self.x)[1]
        return vjp

    def matrix(self) -> Float[Tensor, "N N"]:
        """J, computed a few columns at a time."""
        n, d = self.x.shape
        directions = torch.eye(self.size, dtype=self.x.dtype, device=self.x.device)
        columns = [self.apply(part) for part in torch.split(directions, max(1, CHUNK_ENTRIES // (n * max(n, d))))]
        return torch.cat(columns).mT

    @full_precision
    def _to_ambient(self, w: Tensor) -> Tensor:
        coordinates = w.reshape(*w.shape[:-1], len(self.x), -1, 1)
        return (self.basis @ coordinates).squeeze(-1)

    @full_precision
    def _to_coordinates(self, v: Tensor) -> Tensor:
        return (self.basis.mT @ v.unsqueeze(-1)).squeeze(-1).flatten(-2)


def _dense_spectrum(jacobian: _Jacobian, count: int) -> tuple[Tensor, Tensor]:
    matrix = _check_finite(jacobian.matrix())
    values = torch.linalg.eigvals(matrix)
    eigenvalues = torch.from_numpy(sorted_descending(values.cpu().numpy())[:count]).to(values)
    return eigenvalues, torch.linalg.svdvals(matrix)[:count]


def _krylov_spectrum(jacobian: _Jacobian, count: int) -> tuple[Tensor, Tensor]:
    """The spectrum from products alone. Singular values are the eigenvalues s >= 0 of [[0, J], [J^T, 0]], since the
    eigenvalues of J^T J would lose half of the digits.
    """
    x, size = jacobian.x, jacobian.size
    kind = torch.empty(0, dtype=x.dtype, device="cpu").numpy().dtype
    _check_finite(jacobian.apply(torch.ones(size, dtype=x.dtype, device=x.device)))

    def product(w: np.ndarray) -> np.ndarray:
        return jacobian.apply(torch.from_numpy(w).to(x)).cpu().numpy()

    def doubled(w: np.ndarray) -> np.ndarray:
        left, right = torch.split(torch.from_numpy(w).to(x), size)
        return torch.cat([jacobian.apply(right), jacobian.apply_transposed(left)]).cpu().numpy()

    try:
        values = leading_eigenvalues(product, size, kind, count, symmetric=False)
        singular = leading_eigenvalues(doubled, 2 * size, kind, count, symmetric=True)
    except ArpackNoConvergence:
        raise HelmscopeError(
            f"count is {count}, but ARPACK did not converge for so many of {size} values: try fewer or more of them"
        ) from None
    eigenvalues = torch.from_numpy(values).to(x.device, x.dtype.to_complex())
    return eigenvalues, torch.from_numpy(singular.real.copy()).to(x)


def _check_finite(derivative: Tensor) -> Tensor:
    if not bool(torch.isfinite(derivative).all()):
        raise HelmscopeError("field has a derivative that is not finite at x, but a spectrum needs a finite Jacobian")
    return derivative
