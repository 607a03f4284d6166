"""Zonal functions on S^(d-1), those of s = <x, e> alone, for any dimension: Gegenbauer series."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.harmonics import gegenbauer, harmonic_dimension, zonal_quadrature
from helmscope.meanfield.grid import Grid
from helmscope.types import HelmscopeError, check_integer, check_memory

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class ZonalGrid(Grid):
    """Functions of s = <x, e> on S^(dim-1), e the first axis, in the basis sqrt(N(d, k)) P_k(s), k = 0..``degree``, and
    their values at Gauss nodes of the distribution of s.

    The points are on one meridian, s e + sqrt(1 - s^2) u with u the second axis, and the frame is its direction toward
    e, so the component of the gradient of g(s) is sqrt(1 - s^2) g'(s). In high dimension the uniform distribution
    concentrates at |s| of order 1 / sqrt d. Raises ``HelmscopeError`` unless dim >= 2 and degree >= 1, or if there are
    more than 1e300 harmonics of this degree.

    >>> grid = ZonalGrid(dim=8, degree=16)
    >>> round(grid.mean_of(grid.cosines**2).item(), 12)  # E s^2 = 1 / d
    0.125
    """

    dim: int
    degree: int = 64
    points: Float[Tensor, "m d"] = field(init=False)
    weights: Float[Tensor, " m"] = field(init=False)
    frame: Float[Tensor, "m 1 d"] = field(init=False)
    degrees: Int[Tensor, " modes"] = field(init=False)
    basis: Float[Tensor, "m modes"] = field(init=False)
    slopes: Float[Tensor, "m modes"] = field(init=False)  # sqrt(1 - s^2) d/ds of the basis
    _scale: Float[Tensor, " modes"] = field(init=False)  # sqrt(N(d, k))

    def __post_init__(self) -> None:
        dim, degree = check_integer("dim", self.dim, at_least=2), check_integer("degree", self.degree, at_least=1)
        if harmonic_dimension(degree, dim=dim) > 10**300:
            raise HelmscopeError(
                f"degree is {degree}, but in dim={dim} there must be at most 1e300 harmonics of this degree: lower "
                "degree"
            )
        m = 2 * (degree + 1)
        check_memory(f"degree is {degree} and dim is {dim}", m * (2 * degree + dim))
        s, weights = zonal_quadrature(m, dim=dim)
        points, frame = s.new_zeros(m, dim), s.new_zeros(m, 1, dim)
        sine = ((1 - s) * (1 + s)).sqrt()
        points[:, 0], points[:, 1], frame[:, 0, 0], frame[:, 0, 1] = s, sine, sine, -s
        polynomials = gegenbauer(s, degree, dim=dim)
        k = torch.arange(degree + 1, dtype=torch.float64, device="cpu")
        previous = torch.nn.functional.pad(polynomials[:, :-1], (1, 0))
        slopes = k * (previous - s[:, None] * polynomials) / sine[:, None]
        scale = s.new_tensor([math.sqrt(harmonic_dimension(j, dim=dim)) for j in range(degree + 1)])
        values: dict[str, object] = {"dim": dim, "degree": degree, "points": points, "weights": weights, "frame": frame}
        values |= {"degrees": k.long(), "basis": scale * polynomials, "slopes": scale * slopes, "_scale": scale}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"ZonalGrid(dim={self.dim}, degree={self.degree})"

    @property
    def cosines(self) -> Float[Tensor, " m"]:
        """s = <x, e> at the points."""
        return self.points[:, 0]

    @full_precision
    def synthesize(self, modes: Float[Tensor, "*batch modes"]) -> Float[Tensor, "*batch m"]:
        """The values at the points."""
        return modes @ self.basis.mT

    @full_precision
    def gradient(self, modes: Float[Tensor, "*batch modes"]) -> Float[Tensor, "*batch m 1"]:
        """sqrt(1 - s^2) d/ds at the points."""
        return (modes @ self.slopes.mT)[..., None]

    @full_precision
    def analyze(self, values: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch modes"]:
        """The coefficients of a function."""
        return (values * self.weights) @ self.basis

    @full_precision
    def divergence(self, components: Float[Tensor, "*batch m 1"]) -> Float[Tensor, "*batch modes"]:
        """The coefficients of the divergence of a field along the meridians."""
        return -(components[..., 0] * self.weights) @ self.slopes

    @full_precision
    def evaluate(self, modes: Float[Tensor, "*batch modes"], x: Float[Tensor, "n d"]) -> Float[Tensor, "*batch n"]:
        """The values at unit vectors x."""
        polynomials = gegenbauer(x[:, 0].to(modes).clamp(-1, 1), self.degree, dim=self.dim)
        return modes @ (self._scale * polynomials).mT
