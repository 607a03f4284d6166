"""Diffusion without drift, as the random half of a reference process: its transition density p_s, sums of gradients of
that density over weighted points, and samples.

    in R^d        dX = sqrt(2 Sigma) dW                    p_s(z, w) = N(w; z, 2 s Sigma)
    on S^(d-1)    generator nu Lap                         p_s = the heat kernel
    on S^(d-1)    generator tr(P M P Hess), M a matrix     p_s = the law of exp_z(v), v ~ N(0, 2 s P M P)

The first two are exact for every s. The third, the step of a geodesic random walk, is exact to first order in s only,
because P M P depends on the point.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import StateSpace
from helmscope.fields.noise import IsotropicNoise, MatrixNoise
from helmscope.geometry import lu
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.heat_kernel import heat_kernel_table
from helmscope.geometry.sphere import exp, log, project, retract
from helmscope.transport.brownian import FlatBrownian
from helmscope.types import ConciseRepr, HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Diffusion(ConciseRepr, ABC):
    """Base class of diffusions with the generator Sigma:Hess. Everything is unchecked and in float64."""

    @property
    @abstractmethod
    def space(self) -> StateSpace:
        """The sphere, or R^d."""

    @abstractmethod
    def pairs(
        self, z: Float[Tensor, "n d"], w: Float[Tensor, "m d"], s: float
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"] | None]:
        """log p_s(z_i, w_j), and the factors that ``gradient`` needs; None if they are 1."""

    @abstractmethod
    def gradient(
        self, z: Float[Tensor, "n d"], w: Float[Tensor, "m d"], shares: Float[Tensor, "n m"], s: float
    ) -> Float[Tensor, "n d"]:
        """sum_j c_ij grad_z log p_s(z_i, w_j), where ``shares`` are c_ij times the factors of ``pairs``."""

    @property
    def is_semigroup(self) -> bool:
        """Whether the densities are exact for every s, so that p_s and p_r combine to p_(s+r)."""
        return True

    def coordinates(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Coordinates in which the noise is about the same in all directions."""
        return x

    @abstractmethod
    def times_sigma(self, x: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Sigma v at x."""

    @abstractmethod
    def energy(self, x: Float[Tensor, "n d"], u: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """u . Sigma^-1 u / 4 at x, for tangents u."""

    @abstractmethod
    def step(
        self, x: Float[Tensor, "n d"], v: Float[Tensor, "n d"], s: float, generator: torch.Generator
    ) -> Float[Tensor, "n d"]:
        """The points moved by v, and from there by noise over the time s; approximately, since samples only cover."""

    def between(self, x: Float[Tensor, "n d"], y: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The vectors that move x_i to y_i."""
        return y - x if self.space is StateSpace.FLAT else log(x, y)


@dataclass(frozen=True, eq=False)
class FlatDiffusion(Diffusion):
    """dX = sqrt(2 Sigma) dW in R^d, by Brownian motion in the coordinates Sigma^(-1/2) x.

    >>> diffusion = FlatDiffusion(torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64)))
    >>> x = torch.zeros(1, 2, dtype=torch.float64)
    >>> diffusion.pairs(x, x, 1.0)[0]  # -log 4 pi - log 2
    tensor([[-3.2242]], dtype=torch.float64)
    """

    sigma: Float[Tensor, "d d"]
    root: Float[Tensor, "d d"] = field(init=False, repr=False)
    inverse_root: Float[Tensor, "d d"] = field(init=False, repr=False)

    @full_precision
    def __post_init__(self) -> None:
        values, vectors = torch.linalg.eigh(self.sigma)
        for name, power in (("root", 0.5), ("inverse_root", -0.5)):
            object.__setattr__(self, name, vectors * values**power @ vectors.mT)

    @property
    def space(self) -> StateSpace:
        """R^d."""
        return StateSpace.FLAT

    @full_precision
    def pairs(
        self, z: Float[Tensor, "n d"], w: Float[Tensor, "m d"], s: float
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"] | None]:
        """log N(w_j; z_i, 2 s Sigma)."""
        log_p = FlatBrownian(1.0).log_density(z @ self.inverse_root, w @ self.inverse_root, s)
        return log_p - lu.slogdet(self.root).logabsdet, None

    @full_precision
    def gradient(
        self, z: Float[Tensor, "n d"], w: Float[Tensor, "m d"], shares: Float[Tensor, "n m"], s: float
    ) -> Float[Tensor, "n d"]:
        """sum_j c_ij Sigma^-1 (w_j - z_i) / (2 s)."""
        center = w.mean(0)
        displacement = shares @ (w - center) - shares.sum(1, keepdim=True) * (z - center)
        return displacement @ self.inverse_root @ self.inverse_root / (2 * s)

    @full_precision
    def coordinates(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Sigma^(-1/2) x."""
        return x @ self.inverse_root

    @full_precision
    def times_sigma(self, x: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Sigma v."""
        return v @ self.sigma

    @full_precision
    def energy(self, x: Float[Tensor, "n d"], u: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """u . Sigma^-1 u / 4."""
        return ((u @ self.inverse_root) ** 2).sum(-1) / 4

    @full_precision
    def step(
        self, x: Float[Tensor, "n d"], v: Float[Tensor, "n d"], s: float, generator: torch.Generator
    ) -> Float[Tensor, "n d"]:
        """x + v + sqrt(2 s Sigma) xi."""
        xi = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
        return x + v + math.sqrt(2 * s) * xi @ self.root


@dataclass(frozen=True)
class SphereDiffusion(Diffusion):
    """Brownian motion with the generator nu Lap on S^(d-1), by its heat kernel.

    >>> x = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    >>> SphereDiffusion(1.0).pairs(x, x, 100.0)[0]  # -log 4 pi
    tensor([[-2.5310]], dtype=torch.float64)
    """

    nu: float

    @property
    def space(self) -> StateSpace:
        """The sphere."""
        return StateSpace.SPHERE

    @full_precision
    def pairs(
        self, z: Float[Tensor, "n d"], w: Float[Tensor, "m d"], s: float
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"] | None]:
        """The logarithm of the heat kernel and its derivative with respect to <z, w>."""
        return heat_kernel_table(z.shape[-1], self.nu * s)(z @ w.mT)

    @full_precision
    def gradient(
        self, z: Float[Tensor, "n d"], w: Float[Tensor, "m d"], shares: Float[Tensor, "n m"], s: float
    ) -> Float[Tensor, "n d"]:
        """P_z sum_j shares_ij w_j."""
        return project(z, shares @ w)

    def times_sigma(self, x: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """nu v."""
        return self.nu * v

    def energy(self, x: Float[Tensor, "n d"], u: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """|u|^2 / (4 nu)."""
        return (u * u).sum(-1) / (4 * self.nu)

    def step(
        self, x: Float[Tensor, "n d"], v: Float[Tensor, "n d"], s: float, generator: torch.Generator
    ) -> Float[Tensor, "n d"]:
        """exp_z(P xi), z = exp_x(v), xi ~ N(0, 2 s nu)."""
        return _geodesic_step(
            x, v, s, math.sqrt(self.nu) * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device), generator
        )


@dataclass(frozen=True, eq=False)
class SphereMatrixDiffusion(Diffusion):
    """The diffusion on S^(d-1) with the generator tr(P M P Hess), M positive definite: geodesic random walk.

    With theta the angle between z and w, the tangent v = log_z w = (theta / sin theta) P_z w and A = (P M P)^+ =
    M^-1 - M^-1 z z^T M^-1 / (z^T M^-1 z), the density is N(v; 0, 2 s P M P) (theta / sin theta)^(d-2). The gradient is
    that of the exponent with A held fixed, A v / (2 s).

    >>> x = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    >>> log_p = SphereMatrixDiffusion(torch.eye(3, dtype=torch.float64)).pairs(x, x, 0.01)[0]
    >>> bool((log_p - SphereDiffusion(1.0).pairs(x, x, 0.01)[0]).abs() < 0.01)
    True
    """

    matrix: Float[Tensor, "d d"]

    @property
    def space(self) -> StateSpace:
        """The sphere."""
        return StateSpace.SPHERE

    @property
    def is_semigroup(self) -> bool:
        """False: the density is that of a single step."""
        return False

    @full_precision
    def pairs(
        self, z: Float[Tensor, "n d"], w: Float[Tensor, "m d"], s: float
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"] | None]:
        """The logarithm of the density, and theta / sin theta."""
        dim = z.shape[-1]
        inverse = lu.inv(self.matrix)
        z_image = z @ inverse
        along = (z * z_image).sum(-1, keepdim=True)  # z^T M^-1 z
        theta = torch.acos((z @ w.mT).clamp(-1, 1))
        factor = 1 / torch.sinc(theta / math.pi).clamp(min=1e-9)
        square = ((w @ inverse) * w).sum(-1) - (z_image @ w.mT) ** 2 / along
        log_volume = lu.slogdet(self.matrix).logabsdet + torch.log(along)
        log_p = -(factor**2) * square.clamp(min=0) / (4 * s) - log_volume / 2
        return log_p - (dim - 1) / 2 * math.log(4 * math.pi * s) + (dim - 2) * torch.log(factor), factor

    @full_precision
    def gradient(
        self, z: Float[Tensor, "n d"], w: Float[Tensor, "m d"], shares: Float[Tensor, "n m"], s: float
    ) -> Float[Tensor, "n d"]:
        """A sum_j shares_ij w_j / (2 s)."""
        return self._inverse(z, shares @ w) / (2 * s)

    @full_precision
    def _inverse(self, z: Tensor, v: Tensor) -> Tensor:
        """(P M P)^+ v at z."""
        inverse = lu.inv(self.matrix)
        z_image, v_image = z @ inverse, v @ inverse
        along: Tensor = (z_image * v).sum(-1, keepdim=True) / (z * z_image).sum(-1, keepdim=True)
        tangent: Tensor = v_image - z_image * along
        return tangent

    @full_precision
    def times_sigma(self, x: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """P M P v."""
        return project(x, project(x, v) @ self.matrix)

    def energy(self, x: Float[Tensor, "n d"], u: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """u . (P M P)^+ u / 4."""
        return (u * self._inverse(x, u)).sum(-1) / 4

    @full_precision
    def step(
        self, x: Float[Tensor, "n d"], v: Float[Tensor, "n d"], s: float, generator: torch.Generator
    ) -> Float[Tensor, "n d"]:
        """exp_z(P xi), z = exp_x(v), xi ~ N(0, 2 s M)."""
        values, vectors = torch.linalg.eigh(self.matrix)
        return _geodesic_step(x, v, s, vectors * values.sqrt() @ vectors.mT, generator)


@full_precision
def _geodesic_step(x: Tensor, v: Tensor, s: float, root: Tensor, generator: torch.Generator) -> Tensor:
    z = retract(exp(x, project(x, v)))
    xi = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return retract(exp(z, project(z, math.sqrt(2 * s) * xi @ root)))


def diffusion_of(noise: object, dim: int, space: StateSpace, device: torch.device) -> Diffusion:
    """The diffusion that ``noise`` drives; raises ``HelmscopeError`` unless it is nonsingular, constant and independent
    between points.

    >>> diffusion_of(IsotropicNoise(0.3), 3, StateSpace.SPHERE, torch.device("cpu"))
    SphereDiffusion(nu=0.3)
    """
    if not isinstance(noise, IsotropicNoise | MatrixNoise) or noise.common:
        raise HelmscopeError(
            f"noise is {noise!r}, but it must be an IsotropicNoise or a MatrixNoise that points do not share"
        )
    if isinstance(noise, IsotropicNoise):
        matrix = noise.nu * torch.eye(dim, dtype=torch.float64, device=device)
    else:
        noise.check_size(torch.zeros(1, dim))
        matrix = noise.diffusion.to(device)
    values = torch.linalg.eigvalsh(matrix)
    if not float(values[0]) > 1e-12 * float(values[-1]):
        raise HelmscopeError(
            f"noise has the diffusion matrix with the eigenvalue {float(values[0]):.3g}, but a bridge needs noise in "
            "every direction, with a positive definite matrix"
        )
    if space is StateSpace.FLAT:
        return FlatDiffusion(matrix)
    return SphereDiffusion(noise.nu) if isinstance(noise, IsotropicNoise) else SphereMatrixDiffusion(matrix)
