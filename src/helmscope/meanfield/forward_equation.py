"""The forward equation of tokens under a field with noise: the continuity, Fokker-Planck or McKean-Vlasov equation.

The generator L phi = <b, grad phi> + tr(Sigma Hess_S phi), with Sigma = P M P and b the velocity of the field plus the
drift of the noise's process, has the forward equation

    d_t rho = -div_S(rho b) + div_S div_S(Sigma rho) = -div_S(rho (b - div_S Sigma)) + div_S(Sigma grad_S rho),

and div_S Sigma is the drift of the process ``DivergenceForm`` [Helmholtz Transformer, no. 5]. For M = nu I the last
term is nu Lap_S rho. Without noise it is the continuity equation.

With u = log rho the same equation is

    d_t u = -<b', grad u> - div_S b' + div_S(Sigma grad u) + <grad u, Sigma grad u>,    b' = b - div_S Sigma,

which keeps the density positive; its mass is kept by the solution but not by its truncation, and is restored after
every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, as_field
from helmscope.fields.noise import DivergenceForm, IsotropicNoise, Noise
from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.drift import Drift, check_zonal_vectors, drift_of, instead_of_zonal
from helmscope.meanfield.grid import Grid
from helmscope.meanfield.zonal_grid import ZonalGrid
from helmscope.types import HelmscopeError, short_repr
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ForwardEquation(ConciseRepr):
    """The forward equation of a density: d_t rho = -div_S(rho b') + div_S(Sigma grad_S rho), with Sigma = nu I +
    ``excess``, on a grid.

    ``nu`` is the isotropic part of the diffusion, which is diagonal in the harmonics: for anisotropic noise the middle
    between the smallest and the largest eigenvalue of Sigma. ``excess``, the rest of it, and ``correction``, the drift
    of the process minus div_S Sigma, are None for isotropic noise.

    >>> from helmscope.meanfield import CircleGrid
    >>> ForwardEquation.of(None, CircleGrid(degree=8), IsotropicNoise(0.5)).nu  # the heat equation
    0.5
    """

    grid: Grid
    drift: Drift
    nu: float
    correction: Float[Tensor, "m c"] | None
    excess: Float[Tensor, "m c c"] | None

    @classmethod
    @full_precision
    def of(cls, field: object, grid: Grid, noise: Noise | None = None) -> ForwardEquation:
        """The equation for a field, or a function of points, with noise; ``HelmscopeError`` if it has none.

        >>> from helmscope.fields.attention import SA
        >>> from helmscope.meanfield import CircleGrid
        >>> ForwardEquation.of(SA(beta=1.0), CircleGrid(degree=16), IsotropicNoise(0.1)).nu
        0.1
        """
        drift = drift_of(_as_field(field), grid)
        if noise is None:
            return cls(grid, drift, 0.0, None, None)
        if not isinstance(noise, Noise):
            raise HelmscopeError(f"noise is {short_repr(noise)}, but it must be a noise such as IsotropicNoise(0.1)")
        if noise.common:
            raise HelmscopeError(
                "noise is common to all tokens, but then their law is random and has no forward equation: use "
                "independent noise"
            )
        if isinstance(noise, IsotropicNoise):
            return cls(grid, drift, noise.nu, None, None)
        points = grid.points[:, None]
        noise.check_size(points)
        sigma = torch.einsum("mcd,mde,mke->mck", grid.frame, noise.diffusion_matrix(points)[:, 0], grid.frame)
        smallest, largest = torch.linalg.eigvalsh(sigma).aminmax()
        nu = float(smallest + largest) / 2  # then |excess| <= nu everywhere, and explicit steps with it are stable
        correction = grid.components(_correction(noise, grid.points))
        if isinstance(grid, ZonalGrid):
            check_zonal_noise(grid, noise)
        return cls(
            grid, drift, nu, correction, sigma - nu * torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device)
        )

    @property
    def decay(self) -> Float[Tensor, " modes"]:
        """nu k (k + d - 2), the rates at which the isotropic part damps the harmonics.

        >>> from helmscope.meanfield import CircleGrid
        >>> ForwardEquation.of(None, CircleGrid(degree=2), IsotropicNoise(0.5)).decay
        tensor([0.0000, 0.5000, 0.5000, 2.0000, 2.0000], dtype=torch.float64)
        """
        return self.nu * self.grid.eigenvalues

    def velocity(
        self, modes: Float[Tensor, " modes"], t: float, values: Float[Tensor, " m"] | None = None
    ) -> Float[Tensor, "m c"]:
        """b', the components of the velocity of the divergence form; ``values`` as for ``Drift.components``.

        >>> from helmscope.meanfield import CircleGrid, Density
        >>> equation = ForwardEquation.of(lambda x: x.flip(-1), CircleGrid(degree=2))  # (x_2, x_1)
        >>> equation.velocity(Density.uniform(equation.grid).modes, 0.0)[0]  # cos 2t at t = 0
        tensor([1.], dtype=torch.float64)
        """
        components = self.drift.components(modes, t, values)
        return components if self.correction is None else components + self.correction

    @full_precision
    def rate(self, modes: Float[Tensor, " modes"], t: float) -> Float[Tensor, " modes"]:
        """d_t rho without the isotropic diffusion, as coefficients.

        >>> from helmscope.meanfield import CircleGrid, Density
        >>> equation = ForwardEquation.of(lambda x: x.flip(-1), CircleGrid(degree=2))
        >>> equation.rate(Density.uniform(equation.grid).modes, 0.0)[4]  # 2 sin 2t, in the basis sqrt 2 sin 2t
        tensor(1.4142, dtype=torch.float64)
        """
        if self.excess is None:
            return -self.grid.divergence(self.grid.synthesize(modes)[..., None] * self.velocity(modes, t))
        values, gradient = self.grid.value_and_gradient(modes)
        return -self.grid.divergence(values[..., None] * self.velocity(modes, t) - self._excess_times(gradient))

    @full_precision
    def log_rate(self, log_modes: Float[Tensor, " modes"], t: float) -> Float[Tensor, " modes"]:
        """d_t log rho without the isotropic part of div(Sigma grad u), as coefficients.

        >>> from helmscope.meanfield import CircleGrid
        >>> equation = ForwardEquation.of(lambda x: x.flip(-1), CircleGrid(degree=2))
        >>> equation.log_rate(torch.zeros(5, dtype=torch.float64), 0.0)[4]  # of the uniform density: that of rho
        tensor(1.4142, dtype=torch.float64)
        """
        log_values, gradient = self.grid.value_and_gradient(log_modes)
        values = log_values.exp()
        flux = -self.velocity(self.grid.analyze(values), t, values)
        if self.excess is not None:
            flux = flux + self._excess_times(gradient)
        pointwise = (gradient * (self.nu * gradient + flux)).sum(-1)
        return self.grid.analyze_with_divergence(pointwise, flux)

    def _excess_times(self, gradient: Float[Tensor, "*batch m c"]) -> Float[Tensor, "*batch m c"]:
        """The excess applied to a gradient, component by component: sums over an axis of length 2 are slow."""
        assert self.excess is not None
        parts = gradient.unbind(-1)
        rows = [
            reduce(torch.add, (each * part for each, part in zip(row, parts, strict=True))) for row in self._excess_rows
        ]
        return torch.stack(rows, -2).movedim(-2, -1)

    @cached_property
    def _excess_rows(self) -> list[tuple[Float[Tensor, " m"], ...]]:
        assert self.excess is not None
        return [row.contiguous().unbind(0) for row in self.excess.permute(1, 2, 0)]


def density_modes(grid: Grid, log_modes: Float[Tensor, " modes"]) -> Float[Tensor, " modes"]:
    """The coefficients of e^u."""
    return grid.analyze(grid.synthesize(log_modes).exp())


def _as_field(field: object) -> Field:
    return as_field((lambda x: torch.zeros_like(x)) if field is None else field)


def _correction(noise: Noise, points: Tensor) -> Tensor:
    x = points[:, None]
    return (noise.process.drift(noise, x) - DivergenceForm().drift(noise, x))[:, 0]


def check_zonal_noise(grid: ZonalGrid, noise: Noise) -> None:
    """Raise ``HelmscopeError`` unless the noise has M = a I + b e e^T, or another form that keeps densities zonal."""

    @full_precision
    def diffusion_toward(x: Tensor) -> Tensor:
        toward = torch.eye(grid.dim, dtype=x.dtype, device=x.device)[0] - x[:, :1] * x
        return (noise.diffusion_matrix(x[:, None])[:, 0] @ toward[..., None])[..., 0]

    try:
        check_zonal_vectors(grid, lambda x: _correction(noise, x), "the drift of the noise")
        check_zonal_vectors(grid, diffusion_toward, "the diffusion of the noise")
    except HelmscopeError:
        raise HelmscopeError(
            f"noise is {short_repr(noise)}, but on a ZonalGrid its matrix must be M = a I + b e e^T with the first "
            f"axis e, or densities do not stay zonal: {instead_of_zonal(grid)}"
        ) from None
