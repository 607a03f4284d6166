"""Free energy of densities and its rate of change, in one sign convention [Helmholtz Transformer, no. 4].

A force is +grad U + R and the noise is nu I. With Ent = int rho log rho = -H,

    F[rho] = nu Ent - int U rho
    dF/dt = -int |grad(nu log rho - U)|^2 rho - int rho <R, grad U> - nu int rho div R.

Without the swirl R the equation is the gradient flow of F, which therefore decreases to its minimum at rho ~ e^{U/nu};
with R it may increase. USA with V = c I drifts along +grad d(c E)/d rho, with the interaction energy
E[rho] = (1/(2 beta)) int int e^{beta <x, y>} rho rho, and is the gradient flow of F = nu Ent - c E. SA is no gradient
flow in this metric: its kernel e^{beta <x, y>} / Z(x) is not symmetric.

The source prints F = nu Ent + int U for the same force, which increases (``free_energy_as_printed``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import USA, Softmax
from helmscope.fields.field import as_field
from helmscope.fields.noise import IsotropicNoise, Noise
from helmscope.geometry.potential import Potential, as_potential
from helmscope.meanfield.density import Density
from helmscope.meanfield.drift import AttentionDrift, check_zonal_vectors, drift_of
from helmscope.meanfield.entropy_rate import check_density, check_log_density, mean_square
from helmscope.meanfield.growth import check_isotropic_attention
from helmscope.meanfield.zonal_grid import ZonalGrid
from helmscope.types import HelmscopeError, check_real, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True)
class FreeEnergyRate:
    """The rate of the free energy of a density, dF/dt, term by term.

    >>> FreeEnergyRate(relaxation=-0.5, swirl_work=0.25, swirl_expansion=0.125).total
    -0.125
    """

    relaxation: float  # -int |grad(nu log rho - U)|^2 rho <= 0
    swirl_work: float  # int rho <R, grad V> = -int rho <R, grad U>
    swirl_expansion: float  # -nu int rho div R

    @property
    def total(self) -> float:
        """dF/dt."""
        return self.relaxation + self.swirl_work + self.swirl_expansion


def free_energy(
    density: Density,
    *,
    noise: IsotropicNoise | float,
    potential: Potential | Callable[[Tensor], Tensor] | None = None,
    field: USA | None = None,
) -> float:
    """Free energy of a density: F = nu Ent - int U rho for a force grad U + R with the ``potential`` U, or F = nu Ent -
    c E for ``field``, USA with V = c I. Ent = int rho log rho with respect to surface area, and E = (1/(2 beta)) int
    int e^{beta <x, y>} rho rho.

    ``potential`` is a ``Potential`` such as ``helmholtz(mlp)``, or a function (m, d) -> (m,) of unit vectors, and
    ``noise`` is ``IsotropicNoise(nu)`` or the number nu. Raises ``HelmscopeError`` unless exactly one of potential and
    field is given and the noise is isotropic, and for SA, which has no free energy.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=16)
    >>> density = Density.from_function(grid, lambda x: (1 + 0.5 * x[..., 1]) / (2 * math.pi))
    >>> free_energy(density, noise=IsotropicNoise(0.5), potential=lambda x: x[..., 0])
    -0.886619...
    """
    density, nu = check_log_density(density), isotropic_nu(noise)
    if _is_linear(field, potential):
        return -nu * density.entropy - _mean_potential(density, potential)
    beta, value, _ = check_isotropic_attention(field, density.grid.dim)
    if beta == 0:  # E is infinite, but its part that depends on rho is |mean|^2 / 2
        return -nu * density.entropy - value * float(density.mean.norm()) ** 2 / 2
    return -nu * density.entropy - value * density_interaction_energy(density, beta=beta)


def free_energy_as_printed(
    density: Density, *, noise: IsotropicNoise | float, potential: Potential | Callable[[Tensor], Tensor]
) -> float:
    """Free energy as printed: nu Ent + int U rho, which the source prints for the force +grad U. It increases along
    that flow.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=16)
    >>> density = Density.von_mises_fisher(grid, kappa=2.0)  # stationary for U = x_1 and nu = 0.5
    >>> free_energy_as_printed(density, noise=IsotropicNoise(0.5), potential=lambda x: x[..., 0])
    0.064614...
    """
    density, nu = check_log_density(density), isotropic_nu(noise)
    return -nu * density.entropy + _mean_potential(density, potential)


def free_energy_rate(
    density: Density,
    *,
    noise: IsotropicNoise | float,
    potential: Potential | Callable[[Tensor], Tensor] | None = None,
    field: object = None,
    t: float = 0.0,
) -> FreeEnergyRate:
    """Rate dF/dt of ``free_energy`` under ``field`` and ``noise``, term by term:

        dF/dt = -int |grad(nu log rho - U)|^2 rho - int rho <R, grad U> - nu int rho div R,

    where for USA U is c int e^{beta <x, y>} rho(dy) / beta, and R = 0. Without a swirl it is negative,
    minus the dissipation.

    With a ``potential`` U the field is a force, an MLP or a function of points, and R = P f - grad_S U; without a field
    the force is grad U itself. Without a potential the field must be USA. Points where the density is below 1e-13 of
    its maximum are left out. Raises ``HelmscopeError`` as ``free_energy`` does, and for fields that are not forces.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=16)
    >>> density = Density.from_function(grid, lambda x: (1 + 0.5 * x[..., 1]) / (2 * math.pi))
    >>> free_energy_rate(density, noise=IsotropicNoise(0.5), potential=lambda x: x[..., 0]).total
    -0.533493...
    """
    density, nu, t = check_log_density(density), isotropic_nu(noise), check_real("t", t)
    grid, values = density.grid, density.values[:, None]
    change = grid.gradient(density.modes)
    if potential is None:
        _is_linear(field, potential)
        check_isotropic_attention(field, grid.dim)
        ascent = drift_of(as_field(field), grid).components(density.modes, t, density.values)
        return FreeEnergyRate(-mean_square(density, nu * change - values * ascent), 0.0, 0.0)
    ascent = _gradient(density, potential)
    relaxation = -mean_square(density, nu * change - values * ascent)
    if field is None:
        return FreeEnergyRate(relaxation, 0.0, 0.0)
    drift = drift_of(as_field(field), grid)
    if isinstance(drift, AttentionDrift) or as_field(field).attends:
        raise HelmscopeError(
            f"field is {short_repr(field)}, but with a potential it must be a force, such as an MLP or a function"
        )
    swirl = drift.components(density.modes, t, density.values) - ascent
    work = -float(grid.mean_of((values * swirl * ascent).sum(-1)))
    expansion = nu * float(grid.mean_of((swirl * change).sum(-1)))  # -int rho div R = int <R, grad rho>
    return FreeEnergyRate(relaxation, work, expansion)


def density_interaction_energy(density: Density, *, beta: float) -> float:
    """Interaction energy of a density, E = (1/(2 beta)) int int e^{beta <x, y>} rho(x) rho(y), from the series: (1/(2
    beta)) sum_i mu_i modes_i^2, with the multipliers mu of the kernel.

    Exact for a truncated density also on a ``ZonalGrid``, where that of its ``cloud`` is not. Raises ``HelmscopeError``
    for beta = 0, if the degree of the grid is too small for beta, and where e^beta overflows.

    >>> from helmscope.meanfield import SphereGrid
    >>> density_interaction_energy(Density.uniform(SphereGrid(degree=16)), beta=1.0)  # sinh(1) / 2
    0.587600596...
    """
    density, beta = check_density(density), check_real("beta", beta)
    if beta == 0:
        raise HelmscopeError("beta is 0, but the interaction energy has the factor 1 / (2 beta)")
    scaled = float((density.grid.exponential_multipliers(beta) * density.modes**2).sum())
    try:
        return math.exp(abs(beta)) * scaled / (2 * beta)
    except OverflowError:
        raise HelmscopeError(f"beta is {beta:g}, but e^beta must not overflow: use beta below 700") from None


def _is_linear(field: object, potential: object) -> bool:
    """Whether a potential defines F, not a field; ``HelmscopeError`` unless one of them does."""
    if (field is None) == (potential is None):
        both = "both are given" if field is not None else "neither is given"
        raise HelmscopeError(f"a free energy is defined by potential= or by field=USA(...), but {both}")
    if potential is not None:
        return True
    if isinstance(field, Softmax):
        raise HelmscopeError(
            f"field is {short_repr(field)}, but SA with noise has no free energy in the flat metric, because its "
            "kernel e^(beta <x, y>) / Z(x) is not symmetric: use USA, or a potential"
        )
    if not isinstance(field, USA):
        raise HelmscopeError(f"field is {short_repr(field)}, but it must be USA: a force needs its potential=")
    return False


def isotropic_nu(noise: object) -> float:
    """nu of ``IsotropicNoise(nu)``, or of the number nu >= 0; raises ``HelmscopeError`` for anything else.

    >>> isotropic_nu(IsotropicNoise(0.5)), isotropic_nu(0.5)
    (0.5, 0.5)
    """
    if isinstance(noise, IsotropicNoise):
        return noise.nu
    if isinstance(noise, Noise):
        raise HelmscopeError(
            f"noise is {short_repr(noise)}, but a free energy needs the same noise everywhere, IsotropicNoise(nu)"
        )
    return check_real("noise", noise, at_least=0)


def _mean_potential(density: Density, potential: object) -> float:
    values = as_potential(potential).potential(density.grid.points)
    if not isinstance(values, torch.Tensor) or values.shape != density.grid.weights.shape:
        raise HelmscopeError(
            f"potential returns {short_repr(values)}, but it must return one number for each of the "
            f"{len(density.grid.points)} points"
        )
    _gradient(density, potential)  # on a ZonalGrid, raises unless U is zonal
    return float(density.grid.mean_of(density.values * values.detach().double()))


def _gradient(density: Density, potential: object) -> Float[Tensor, "m c"]:
    """The components of grad_S U."""
    landscape, grid = as_potential(potential), density.grid
    if isinstance(grid, ZonalGrid):
        check_zonal_vectors(grid, lambda x: landscape.gradient(x).detach(), "the gradient of potential")
    return grid.components(landscape.gradient(grid.points).detach())
