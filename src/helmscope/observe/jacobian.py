"""The Jacobian of a flow of tokens, and its spectrum.

For the velocity v of the whole cloud, a tangent field on the product of n spheres, the derivative that stays tangent is
the covariant one, and in an orthonormal basis Q of the tangent spaces it is the N x N matrix

    J = Q^T (D v) Q,    N = n (d - 1).

It does not depend on how v is extended off the sphere. At an equilibrium its eigenvalues are the rates at which
perturbations grow (Re > 0) or decay; elsewhere they say how neighbouring clouds part at this instant, and are not
Lyapunov exponents. The singular values bound that growth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh

from helmscope.fields.field import Field
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import check_tokens, tangent_basis
from helmscope.observe.generator import Velocity, tangent_velocity
from helmscope.types import HelmscopeError, whole_number

if TYPE_CHECKING:
    from jaxtyping import Complex, Float
    from torch import Tensor

Product = Callable[[np.ndarray], np.ndarray]

# the greatest Jacobian of one system that is stored as a matrix: N = 2896 in float64
DENSE_BYTES = 2**26
# entries of n x n (or n x d) arrays that one pass of several directions may fill
CHUNK_ENTRIES = 2**22


@dataclass(frozen=True, eq=False)
class JacobianSpectrum:
    """Eigenvalues by falling real part (of a pair, the one above the real axis first) and singular values by falling
    size, k of each for every system.

    >>> JacobianSpectrum(torch.zeros(1, dtype=torch.complex64), torch.zeros(1)).singular_values
    tensor([0.])
    """

    eigenvalues: Complex[Tensor, "*batch k"]
    singular_values: Float[Tensor, "*batch k"]


@full_precision
def jacobian_spectrum(
    field: Field | Callable[..., Tensor],
    x: Float[Tensor, "*batch n d"],
    *,
    count: int | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
) -> JacobianSpectrum:
    """Spectrum of J = Q^T (D v) Q at each cloud: all N = n (d - 1) values, or the first ``count`` of them.

    Where J would take more than 64 MiB (N > 2896 in float64) it is never stored: ``count`` must be given, and the
    values come from products J w and J^T w by ARPACK, to rounding; where that does not converge it is refused. A pair
    of complex values may be cut by ``count``. ``field`` must be differentiable by ``torch.func``, forward and backward;
    tokens of weight 0 count too, as tracers that see the others.

    >>> from helmscope.fields.attention import SA
    >>> cluster = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    >>> jacobian_spectrum(SA(beta=4.0), cluster).eigenvalues.real.round(decimals=4) + 0.0  # one drifts, two contract
    tensor([ 0., -1., -1.])
    """
    n, d = check_tokens(x).shape[-2:]
    if not x.numel():
        raise HelmscopeError(f"x has shape {tuple(x.shape)}, but there must be at least one system")
    size = n * (d - 1)
    k = size if count is None else whole_number("count", count, at_least=1)
    dense = size * size * x.element_size() <= DENSE_BYTES
    if k > (size if dense else size - 2):
        needed = f"at most {size}" if dense else f"given and at most {size - 2}: the whole matrix would not fit"
        raise HelmscopeError(f"count is {count}, but for {size} tangent variables it must be {needed}")
    tangent_velocity(field, x, weights)  # refuses the whole input before the first system is computed
    clouds = x.detach().reshape(-1, n, d)
    masses = None if weights is None else weights.expand(x.shape[:-1]).reshape(-1, n)
    found = []
    for i, cloud in enumerate(clouds):
        jacobian = _Jacobian(tangent_velocity(field, cloud, None if masses is None else masses[i]), cloud)
        found.append(_dense_spectrum(jacobian, k) if dense else _krylov_spectrum(jacobian, k))
    lead = x.shape[:-2]
    eigenvalues = torch.stack([values for values, _ in found]).reshape(*lead, k)
    return JacobianSpectrum(eigenvalues, torch.stack([values for _, values in found]).reshape(*lead, k))


class _Jacobian:
    """J of one cloud, as products and as a matrix, in coordinates (N,) of the tangent basis."""

    def __init__(self, velocity: Velocity, x: Float[Tensor, "n d"]) -> None:
        self.velocity, self.x = velocity, x
        self.basis = tangent_basis(x)
        self.size = x.shape[0] * (x.shape[1] - 1)

    def apply(self, w: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch N"]:
        """J w."""
        at = self.x.expand(*w.shape[:-1], *self.x.shape).contiguous()  # forward mode writes to it
        change = torch.func.jvp(self.velocity, (at,), (self._ambient(w),))[1]
        return self._coordinates(change)

    def apply_transposed(self, w: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """J^T w."""
        (change,) = self._pull(self._ambient(w))
        return self._coordinates(change)

    @cached_property
    def _pull(self) -> Callable[[Tensor], tuple[Tensor]]:
        pull: Callable[[Tensor], tuple[Tensor]] = torch.func.vjp(self.velocity, self.x)[1]
        return pull

    def matrix(self) -> Float[Tensor, "N N"]:
        """J, some columns at a time."""
        n, d = self.x.shape
        directions = torch.eye(self.size, dtype=self.x.dtype, device=self.x.device)
        columns = [self.apply(part) for part in torch.split(directions, max(1, CHUNK_ENTRIES // (n * max(n, d))))]
        return torch.cat(columns).mT

    @full_precision
    def _ambient(self, w: Tensor) -> Tensor:
        coordinates = w.reshape(*w.shape[:-1], len(self.x), -1, 1)
        return (self.basis @ coordinates).squeeze(-1)

    @full_precision
    def _coordinates(self, v: Tensor) -> Tensor:
        return (self.basis.mT @ v.unsqueeze(-1)).squeeze(-1).flatten(-2)


def _dense_spectrum(jacobian: _Jacobian, count: int) -> tuple[Tensor, Tensor]:
    matrix = _finite(jacobian.matrix())
    values = torch.linalg.eigvals(matrix)
    return torch.from_numpy(_falling(values.cpu().numpy())[:count]).to(values), torch.linalg.svdvals(matrix)[:count]


def _krylov_spectrum(jacobian: _Jacobian, count: int) -> tuple[Tensor, Tensor]:
    """The same from products alone. Singular values are the eigenvalues s >= 0 of [[0, J], [J^T, 0]]: those of J^T J
    would lose half of the digits.
    """
    x, size = jacobian.x, jacobian.size
    kind = torch.empty(0, dtype=x.dtype, device="cpu").numpy().dtype
    _finite(jacobian.apply(torch.ones(size, dtype=x.dtype, device=x.device)))

    def product(w: np.ndarray) -> np.ndarray:
        return jacobian.apply(torch.from_numpy(w).to(x)).cpu().numpy()

    def doubled(w: np.ndarray) -> np.ndarray:
        left, right = torch.split(torch.from_numpy(w).to(x), size)
        return torch.cat([jacobian.apply(right), jacobian.apply_transposed(left)]).cpu().numpy()

    try:
        values = _leading(product, size, kind, count, symmetric=False)
        singular = _leading(doubled, 2 * size, kind, count, symmetric=True)
    except ArpackNoConvergence:
        raise HelmscopeError(
            f"count is {count}, and so many values of {size} did not converge: ask for fewer or more of them"
        ) from None
    eigenvalues = torch.from_numpy(values).to(x.device, x.dtype.to_complex())
    return eigenvalues, torch.from_numpy(singular.real.copy()).to(x)


def _leading(product: Product, size: int, kind: np.dtype, count: int, *, symmetric: bool) -> np.ndarray:
    """The ``count`` eigenvalues of greatest real part.

    A Krylov space holds one vector of each eigenspace, so copies of a multiple eigenvalue can be missing. Hence what
    was found is moved below the rest, and the rest is searched again until nothing greater is in it.
    """
    solve, which = (eigsh, "LA") if symmetric else (eigs, "LR")
    draw = np.random.default_rng(0)  # equal runs, equal values
    values, basis, floor = np.zeros(0, complex), np.zeros((size, 0), kind), 0.0
    wanted = count
    while basis.shape[1] + wanted <= size - 2:
        lowered = LinearOperator((size, size), partial(_lowered, product, basis, floor), dtype=kind)
        found, vectors = solve(lowered, wanted, which=which, v0=draw.standard_normal(size).astype(kind), rng=draw)
        scale = np.abs(values).max(initial=0.0)
        if len(values) and found.real.max() <= values[:count].real.min() + np.finfo(kind).eps ** (2 / 3) * scale:
            break
        # of a pair one serves: the real and the imaginary part of its vector span the plane of both
        alone = np.array([value.imag >= 0 or value.conj() not in found for value in found])
        turning = alone & (found.imag != 0)
        values = _falling(np.concatenate([values, found[alone], found[turning].conj()]))
        basis = np.linalg.qr(np.hstack([basis, vectors[:, alone].real, vectors[:, turning].imag]))[0]
        floor, wanted = values.real.min() - np.abs(values).max(), 1
    return values[:count]


def _lowered(product: Product, basis: np.ndarray, floor: float, w: np.ndarray) -> np.ndarray:
    """The operator with the invariant space of ``basis`` moved to the eigenvalue ``floor``."""
    inside = basis.T @ w.ravel()
    image = product(w.ravel() - basis @ inside)
    moved: np.ndarray = image + basis @ (floor * inside - basis.T @ image)
    return moved


def _finite(derivative: Tensor) -> Tensor:
    if not bool(torch.isfinite(derivative).all()):
        raise HelmscopeError("field has a derivative that is not finite at x, but a spectrum needs a finite Jacobian")
    return derivative


def _falling(values: np.ndarray) -> np.ndarray:
    return values[np.lexsort((-values.imag, -values.real))].copy()
