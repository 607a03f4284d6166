"""Probability densities on the sphere, as sums of harmonics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.harmonics import exponential_degree, gegenbauer
from helmscope.geometry.sphere import retract
from helmscope.meanfield.grid import Grid
from helmscope.meanfield.zonal_grid import ZonalGrid
from helmscope.types import HelmscopeError, check_real, short_repr
from helmscope.types.display import Plottable, one_line_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

MASS_TOLERANCE = 1e-6  # of a start that must integrate to 1
RESOLUTION = 1e-6  # largest misfit of a start, relative to its largest value
NEGATIVE_MASS = 1e-4  # more of it is no truncation error, and the density has no logarithm


@dataclass(frozen=True, eq=False, repr=False)
class Density(Plottable):
    """A probability density rho on S^(d-1): rho / uniform = sum_i modes_i Y_i on a grid, with modes_0 = 1.

    ``density(x)`` is the density with respect to surface area, and ``density.values`` are the values relative to the
    uniform density at the points of the grid. A truncated series may be slightly negative; ``minimum`` and
    ``negative_mass`` report it, and what needs log rho raises ``HelmscopeError`` where the latter exceeds 1e-4, as it
    may for ``modes`` of your own. A density with ``log_modes``, the coefficients of log(rho / uniform), is positive:
    its values are exponentials, and ``modes`` are their coefficients. Raises ``HelmscopeError`` if modes has another
    shape than the grid needs, or if the total mass is not 1.

    >>> from helmscope.meanfield import CircleGrid
    >>> density = Density.from_function(CircleGrid(degree=8), lambda x: (1 + 0.5 * x[..., 1]) / (2 * math.pi))
    >>> density.mean.round(decimals=12) + 0.0
    tensor([0.0000, 0.2500], dtype=torch.float64)
    """

    grid: Grid
    modes: Float[Tensor, " modes"]
    log_modes: Float[Tensor, " modes"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.grid, Grid):
            raise HelmscopeError(
                f"grid is {short_repr(self.grid)}, but it must be a grid such as CircleGrid(degree=64)"
            )
        shape = (len(self.grid.degrees),)
        if not isinstance(self.modes, torch.Tensor) or tuple(self.modes.shape) != shape:
            raise HelmscopeError(f"modes is {short_repr(self.modes)}, but {self.grid} needs a tensor of shape {shape}")
        object.__setattr__(self, "modes", self.modes.detach().to("cpu", torch.float64))
        if not bool(torch.isfinite(self.modes).all()):
            raise HelmscopeError("modes holds NaN or infinite entries, but every coefficient must be finite")
        if not abs(float(self.modes[0]) - 1) <= MASS_TOLERANCE:
            raise HelmscopeError(f"modes has the total mass {float(self.modes[0]):.6g}, but a density has mass 1")

    @classmethod
    def uniform(cls, grid: Grid) -> Density:
        """The uniform density.

        >>> from helmscope.meanfield import CircleGrid
        >>> Density.uniform(CircleGrid(degree=8)).entropy  # log 2 pi
        1.8378...
        """
        return cls(grid, (grid.degrees == 0).double())

    @classmethod
    def from_function(cls, grid: Grid, function: Callable[[Tensor], Tensor], *, normalize: bool = False) -> Density:
        """The density rho(x) with respect to surface area, given as a function (m, d) -> (m,) of unit vectors; on a
        ``ZonalGrid`` it must depend on the first coordinate only.

        Raises ``HelmscopeError`` if rho is negative or not finite somewhere, if it does not integrate to 1 and
        ``normalize`` is False, or if the degree of the grid is too small to represent it.

        >>> from helmscope.meanfield import SphereGrid
        >>> density = Density.from_function(SphereGrid(degree=8), lambda x: 1 + x[..., 2] ** 2, normalize=True)
        >>> round(density(torch.tensor([[0.0, 0.0, 1.0]])).item() * 4 * math.pi, 12)  # 2 / (1 + 1/3)
        1.5
        """
        values = function(grid.points)
        if not isinstance(values, torch.Tensor) or values.shape != grid.weights.shape:
            raise HelmscopeError(
                f"function returns {short_repr(values)}, but it must return one number for each of the "
                f"{len(grid.points)} points"
            )
        if isinstance(grid, ZonalGrid):
            _check_zonal(grid, function, values)
        values = values.detach().double()
        lowest = float(values.min())
        if not bool(torch.isfinite(values).all()) or lowest < 0:
            raise HelmscopeError(f"function has the value {lowest:.6g}, but a density must be finite and at least 0")
        mass = float(grid.mean_of(values))
        total = mass * math.exp(grid.log_area)
        if mass == 0 or (not normalize and abs(total - 1) > MASS_TOLERANCE):
            raise HelmscopeError(
                f"function integrates to {total:.6g}, but a density must integrate to 1 over the sphere: pass "
                "normalize=True to divide by it"
            )
        return cls._resolved(grid, values / mass)

    @classmethod
    @full_precision
    def von_mises_fisher(cls, grid: Grid, *, kappa: float, center: Float[Tensor, " d"] | None = None) -> Density:
        """The density ~ e^{kappa <x, center>}, kappa >= 0, by default around the first axis. On a ``ZonalGrid`` the
        center must be the first axis. Raises ``HelmscopeError`` if the degree of the grid is too small for kappa, and
        names one that would do.

        >>> from helmscope.meanfield import SphereGrid
        >>> Density.von_mises_fisher(SphereGrid(degree=16), kappa=2.0).entropy
        2.0516...
        """
        kappa = check_real("kappa", kappa, at_least=0)
        axis = torch.eye(grid.dim, dtype=torch.float64, device="cpu")[0]
        if center is not None:
            if not isinstance(center, torch.Tensor) or tuple(center.shape) != (grid.dim,) or not bool(center.any()):
                raise HelmscopeError(f"center is {short_repr(center)}, but it must be a nonzero vector ({grid.dim},)")
            given = retract(center.detach().to("cpu", torch.float64))
            if isinstance(grid, ZonalGrid) and not torch.equal(given, axis):
                raise HelmscopeError(f"center is {short_repr(center)}, but on a ZonalGrid it must be the first axis")
            axis = given
        needed = exponential_degree(kappa, dim=grid.dim, tol=RESOLUTION)
        if needed > grid.degree:
            raise HelmscopeError(
                f"degree is {grid.degree}, but a density with kappa={kappa:g} needs a grid with degree={needed} or more"
            )
        exponent = kappa * (grid.points @ axis - 1)
        exponent = exponent - grid.mean_of(exponent.exp()).log()
        return replace(cls._resolved(grid, exponent.exp()), log_modes=grid.analyze(exponent))

    @classmethod
    def _resolved(cls, grid: Grid, values: Tensor) -> Density:
        """The density with these relative values; ``HelmscopeError`` if its series does not reproduce them."""
        modes = grid.analyze(values)
        misfit = float((grid.synthesize(modes) - values).abs().max() / values.max())
        if not misfit <= RESOLUTION:
            raise HelmscopeError(
                f"degree is {grid.degree}, but then the series of this density is off by {misfit:.2g} of its largest "
                "value: raise degree, or take a smoother density"
            )
        return cls(grid, modes / modes[0])

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """The density at unit vectors x, with respect to surface area."""
        if self.log_modes is not None:
            return (self.grid.evaluate(self.log_modes, x) - self.grid.log_area).exp()
        return self.grid.evaluate(self.modes, x) * math.exp(-self.grid.log_area)

    @property
    def values(self) -> Float[Tensor, " m"]:
        """The values relative to the uniform density at the points of the grid."""
        return (
            self.grid.synthesize(self.modes) if self.log_modes is None else self.grid.synthesize(self.log_modes).exp()
        )

    @property
    def minimum(self) -> float:
        """The smallest relative value at the points of the grid."""
        return float(self.values.min())

    @property
    def negative_mass(self) -> float:
        """The mass of the negative part, which ``cloud`` clips."""
        return float(self.grid.mean_of((-self.values).clamp(min=0)))

    @property
    def mean(self) -> Float[Tensor, " d"]:
        """E x, from the values at the points."""
        weighted = (self.grid.weights * self.values)[:, None] * self.grid.points
        mean = weighted.sum(0)
        if isinstance(self.grid, ZonalGrid):  # the other coordinates average to 0 over the rotations about the axis
            mean[1:] = 0
        return mean

    @property
    def entropy(self) -> float:
        """H = -int rho log rho, with respect to surface area; points where rho <= 0 are left out. Raises
        ``HelmscopeError`` if the negative mass is more than 1e-4, the largest truncation error.
        """
        check_nonnegative("the density", self)
        values = self.values.clamp(min=0)
        return self.grid.log_area - float(self.grid.mean_of(torch.special.xlogy(values, values)))

    def aligned_pair_share(self, level: float) -> float:
        """P(<x, y> > level) for independent x, y from this density, from the series: sum_k (a_k / N_k) |modes_k|^2
        with the coefficients a_k of the indicator function.

        >>> from helmscope.meanfield import CircleGrid
        >>> round(Density.uniform(CircleGrid(degree=8)).aligned_pair_share(0.5), 12)  # 60 of 180 degrees
        0.333333333333
        """
        level = check_real("level", level)
        if not -1 <= level <= 1:
            raise HelmscopeError(f"level is {level:g}, but it must be in [-1, 1]")
        shares = _cap_multipliers(level, self.grid.degree, self.grid.dim)
        return float((shares[self.grid.degrees] * self.modes**2).sum())

    def cloud(self) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
        """The density as a weighted cloud: quadrature points, and weights >= 0 that sum to 1, so that observables
        f(x, weights=...) run on it. Negative values are clipped; see ``negative_mass``.

        On a ``ZonalGrid`` each point of the meridian is replaced by the 2 (d - 1) points where the axes orthogonal to e
        meet its parallel: exact for polynomials of degree up to 3 in these coordinates, such as the mean and the
        covariance, but not for e^{beta <x, y>}, for which ``density_interaction_energy`` uses the series.

        >>> from helmscope.meanfield import CircleGrid
        >>> points, weights = Density.uniform(CircleGrid(degree=8)).cloud()
        >>> points.shape, round(weights.sum().item(), 12)
        (torch.Size([36, 2]), 1.0)
        """
        weights = self.grid.weights * self.values.clamp(min=0)
        weights = weights / weights.sum()
        if not isinstance(self.grid, ZonalGrid):
            return self.grid.points, weights
        copies = 2 * (self.grid.dim - 1)
        return zonal_cloud_points(self.grid), weights.repeat_interleave(copies) / copies

    def __repr__(self) -> str:
        words = [f"|mean| {float(self.mean.norm()):.4g}"]
        if self.negative_mass <= NEGATIVE_MASS:
            words.append(f"entropy {self.entropy:.4g}")
        if self.negative_mass > 1e-12:
            words.append(f"negative mass {self.negative_mass:.1g}")
        return one_line_repr(f"Density on S^{self.grid.dim - 1}, degree {self.grid.degree}: {', '.join(words)}")


def check_nonnegative(name: str, density: Density) -> None:
    """Raise ``HelmscopeError`` if a density is negative by more than truncation errors, so that it has no logarithm.

    >>> from helmscope.meanfield import CircleGrid
    >>> check_nonnegative("start", Density.uniform(CircleGrid(degree=8)))
    """
    negative = density.negative_mass
    if not negative <= NEGATIVE_MASS:
        raise HelmscopeError(
            f"{name} has the negative mass {negative:.3g}, but a density must be at least 0: at most {NEGATIVE_MASS:g} "
            "counts as truncation error"
        )


def zonal_cloud_points(grid: ZonalGrid) -> Float[Tensor, "n d"]:
    """The points of a zonal cloud: s e + sqrt(1 - s^2) u for the nodes s and u = +-axes orthogonal to e.

    >>> zonal_cloud_points(ZonalGrid(dim=3, degree=1)).shape
    torch.Size([16, 3])
    """
    axes = torch.eye(grid.dim, dtype=torch.float64, device="cpu")
    directions = torch.cat([axes[1:], -axes[1:]])
    s, sine = grid.cosines[:, None, None], grid.points[:, 1][:, None, None]
    return (s * axes[0] + sine * directions).flatten(0, 1)


def _check_zonal(grid: ZonalGrid, function: Callable[[Tensor], Tensor], values: Tensor) -> None:
    """Raise ``HelmscopeError`` if the function changes under rotations about the axis."""
    if grid.dim == 2:
        turned = grid.points * grid.points.new_tensor([1.0, -1.0])
    else:
        generator = torch.Generator("cpu").manual_seed(0)
        u = torch.randn(grid.dim - 1, generator=generator, dtype=torch.float64, device="cpu")
        turned = torch.cat([grid.points[:, :1], grid.points[:, 1:2] * u / u.norm()], -1)
    difference = float((function(turned) - values).abs().max())
    if difference > 1e-9 * float(values.abs().max()):
        raise HelmscopeError(
            f"function changes by {difference:.2g} under a rotation about the first axis, but on a ZonalGrid it must "
            "depend on the first coordinate only"
        )


@full_precision
def _cap_multipliers(cosine: float, degree: int, dim: int) -> Tensor:
    """P_k averaged over the cap {s > cosine}, times its share of the sphere: by Gauss quadrature in the angle."""
    nodes, weights = np.polynomial.legendre.leggauss(degree + dim // 2 + 64)
    totals = []
    for upper in (math.acos(cosine), math.pi):
        theta = torch.from_numpy((nodes + 1) * upper / 2)
        density = torch.from_numpy(weights * upper / 2) * torch.sin(theta) ** (dim - 2)
        totals.append(density @ gegenbauer(theta.cos(), degree, dim=dim))
    return totals[0] / totals[1][0]
