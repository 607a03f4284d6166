"""Gaussian laws on R^d and their entropy and free energy under linear drifts, in closed form.

Under dX = A X dt + sqrt(2 M) dW a Gaussian N(m, C) stays Gaussian (``gaussian_flow``), with

    dH/dt = tr A + tr(M C^{-1})                                    H = (1/2) log det(2 pi e C)
    dF/dt = -E|(S - nu C^{-1})(X - m) + S m|^2 + E<R X, S X>       F = -nu H + E[X^T S X] / 2

for M = nu I, where A = -S + R, S symmetric and R antisymmetric: the force is grad U + R x with U = -x^T S x / 2
[Helmholtz Transformer, no. 4; no. 6].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.geometry import lu
from helmscope.geometry.arithmetic import check_dense_values, every, full_precision
from helmscope.meanfield.entropy_rate import EntropyRate
from helmscope.meanfield.free_energy import FreeEnergyRate
from helmscope.types import HelmscopeError, check_real, short_repr
from helmscope.types.display import one_line_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian:
    """The law N(mean, covariance) on R^d, in float64. Raises ``HelmscopeError`` unless the covariance is symmetric and
    positive definite.

    >>> Gaussian(torch.zeros(2), torch.eye(2)).entropy  # log(2 pi e)
    2.8378...
    """

    mean: Float[Tensor, " d"]
    covariance: Float[Tensor, "d d"]

    def __post_init__(self) -> None:
        mean = check_vector("mean", self.mean, None)
        covariance = check_symmetric("covariance", self.covariance, len(mean))
        if int(torch.linalg.cholesky_ex(covariance).info):  # a tenth of the time of the eigenvalues
            least = float(torch.linalg.eigvalsh(covariance)[0])
            raise HelmscopeError(f"covariance has the eigenvalue {least:.6g}, but it must be positive definite")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "covariance", covariance)

    @property
    def dim(self) -> int:
        """d."""
        return len(self.mean)

    @property
    def entropy(self) -> float:
        """H = (1/2) log det(2 pi e C)."""
        return self.dim * (1 + math.log(2 * math.pi)) / 2 + float(self._factor.diagonal().log().sum())

    @cached_property
    @full_precision
    def _factor(self) -> Float[Tensor, "d d"]:
        """The triangular F with F F^T = C, kept since distances to many laws need it."""
        factor: Tensor = torch.linalg.cholesky(self.covariance)
        return factor

    def w2(self, other: Gaussian) -> float:
        """The Wasserstein distance to another Gaussian.

        >>> Gaussian(torch.zeros(1), torch.eye(1)).w2(Gaussian(torch.zeros(1), 4 * torch.eye(1)))
        1.0
        """
        if not isinstance(other, Gaussian) or other.dim != self.dim:
            raise HelmscopeError(f"other is {short_repr(other)}, but it must be a Gaussian of dimension {self.dim}")
        return self.w2_to(other.mean, other.covariance)

    @full_precision
    def w2_to(self, mean: Float[Tensor, " d"], covariance: Float[Tensor, "d d"]) -> float:
        """The Wasserstein distance to the law of a mean and a covariance that are known to be valid: ``gaussian_w2``,
        with the eigenvalues of F^T B F for those of A^{1/2} B A^{1/2}, where F F^T = A.

        >>> Gaussian(torch.zeros(1), torch.eye(1)).w2_to(torch.zeros(1).double(), 4 * torch.eye(1).double())
        1.0
        """
        cross = self._factor.mT @ covariance @ self._factor
        roots = torch.linalg.eigvalsh((cross + cross.mT) / 2).clamp(min=0).sqrt()
        traces = self.covariance.trace() + covariance.trace() - 2 * roots.sum()
        return float((traces + (self.mean - mean).square().sum()).clamp(min=0).sqrt())

    def __repr__(self) -> str:
        return one_line_repr(
            f"Gaussian on R^{self.dim}: |mean| {float(self.mean.norm()):.4g}, entropy {self.entropy:.4g}"
        )


@full_precision
def gaussian_entropy_rate(
    gaussian: Gaussian, *, drift: Float[Tensor, "d d"], diffusion: float | Float[Tensor, "d d"] = 0.0
) -> EntropyRate:
    """Rate of a Gaussian's entropy: dH/dt = tr A + tr(M C^{-1}) under dX = A X dt + sqrt(2 M) dW. M is constant, so the
    process makes no difference.

    ``diffusion`` is M, or nu for nu I. Raises ``HelmscopeError`` for matrices of other shapes and if M is not symmetric
    and positive semi-definite.

    >>> gaussian_entropy_rate(Gaussian(torch.zeros(1), 2 * torch.eye(1)), drift=-torch.eye(1), diffusion=1.0).total
    -0.5
    """
    gaussian = check_gaussian("gaussian", gaussian)
    matrix = check_square("drift", drift, gaussian.dim)
    spread = lu.solve(gaussian.covariance, check_diffusion(diffusion, gaussian.dim))
    return EntropyRate(float(matrix.trace()), 0.0, float(spread.trace()))


@full_precision
def gaussian_free_energy(gaussian: Gaussian, *, stiffness: Float[Tensor, "d d"], nu: float) -> float:
    """Free energy of a Gaussian: F = -nu H + E[X^T S X] / 2 in the energy V = x^T S x / 2 with the symmetric
    ``stiffness`` S, and noise nu I.

    >>> gaussian_free_energy(Gaussian(torch.zeros(1), torch.eye(1)), stiffness=torch.eye(1), nu=0.0)
    0.5
    """
    gaussian, nu = check_gaussian("gaussian", gaussian), check_real("nu", nu, at_least=0)
    matrix = check_symmetric("stiffness", stiffness, gaussian.dim)
    second = gaussian.covariance + torch.outer(gaussian.mean, gaussian.mean)
    return -nu * gaussian.entropy + float((matrix * second).sum()) / 2


@full_precision
def gaussian_free_energy_rate(gaussian: Gaussian, *, drift: Float[Tensor, "d d"], nu: float) -> FreeEnergyRate:
    """Rate dF/dt of a Gaussian's free energy under dX = A X dt + sqrt(2 nu) dW, with F for the stiffness S = -(A + A^T)
    / 2; the antisymmetric rest of A is the swirl, which is free of divergence.

    >>> stiff, swirl = torch.tensor([[2.0, 0.3], [0.3, 1.0]]), torch.tensor([[0.0, 1.5], [-1.5, 0.0]])
    >>> gaussian = Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.2], [0.2, 0.5]]))
    >>> gaussian_free_energy_rate(gaussian, drift=swirl - stiff, nu=0.4).total
    -3.04173...
    """
    gaussian, nu = check_gaussian("gaussian", gaussian), check_real("nu", nu, at_least=0)
    matrix = check_square("drift", drift, gaussian.dim)
    stiffness, swirl = -(matrix + matrix.mT) / 2, (matrix - matrix.mT) / 2
    pull = stiffness - nu * lu.inv(gaussian.covariance)
    relaxation = -float((pull @ gaussian.covariance @ pull.mT).trace()) - float((stiffness @ gaussian.mean).norm()) ** 2
    second = gaussian.covariance + torch.outer(gaussian.mean, gaussian.mean)
    return FreeEnergyRate(relaxation, float((swirl.mT @ stiffness @ second).trace()), 0.0)


def check_gaussian(name: str, value: object) -> Gaussian:
    """The argument if it is a ``Gaussian``; raises ``HelmscopeError`` otherwise."""
    if not isinstance(value, Gaussian):
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be a Gaussian(mean, covariance)")
    return value


def check_vector(name: str, value: object, dim: int | None) -> Float[Tensor, " d"]:
    """A finite vector in float64; raises ``HelmscopeError`` otherwise."""
    length = "" if dim is None else f" of length {dim}"
    if not isinstance(value, torch.Tensor) or value.ndim != 1 or not len(value) or (dim or len(value)) != len(value):
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be a vector{length}")
    return _finite(name, value)


def check_square(name: str, value: object, dim: int) -> Float[Tensor, "d d"]:
    """A finite matrix (dim, dim) in float64; raises ``HelmscopeError`` otherwise."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != (dim, dim):
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be a matrix ({dim}, {dim})")
    return _finite(name, value)


def check_symmetric(name: str, value: object, dim: int) -> Float[Tensor, "d d"]:
    """A symmetric matrix; raises ``HelmscopeError`` if it is not symmetric up to rounding."""
    matrix = check_square(name, value, dim)
    if not every((matrix - matrix.mT).abs() <= 1e-6 * matrix.abs().amax()):
        raise HelmscopeError(f"{name} differs from its transpose, but it must be symmetric")
    return (matrix + matrix.mT) / 2


def check_semidefinite(name: str, value: object, dim: int) -> Float[Tensor, "d d"]:
    """A symmetric positive semi-definite matrix; raises ``HelmscopeError`` otherwise."""
    return _with_least(name, value, dim)[0]


def check_diffusion(value: object, dim: int) -> Float[Tensor, "d d"]:
    """M as a matrix, from a matrix or from nu >= 0 for nu I."""
    if isinstance(value, torch.Tensor) and value.ndim:
        return check_semidefinite("diffusion", value, dim)
    nu = check_real("diffusion", value, at_least=0)
    return nu * torch.eye(dim, dtype=torch.float64, device="cpu")


def _with_least(name: str, value: object, dim: int) -> tuple[Tensor, float]:
    """A symmetric positive semi-definite matrix and its least eigenvalue, which rounding may put below 0."""
    matrix = check_symmetric(name, value, dim)
    values = torch.linalg.eigvalsh(matrix)
    least = float(values[0])
    if not least >= -1e-12 * float(values.abs().amax()):
        raise HelmscopeError(f"{name} has the eigenvalue {least:.6g}, but it must have none below 0")
    return matrix, least


def _finite(name: str, value: Tensor) -> Tensor:
    check_dense_values(name, value)
    if not value.is_floating_point() or not every(torch.isfinite(value)):
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must hold finite floating-point numbers")
    return value.detach().to("cpu", torch.float64)
