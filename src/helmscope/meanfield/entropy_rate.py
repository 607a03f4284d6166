"""The entropy identity: how fast the entropy of a density changes, term by term [Helmholtz Transformer, no. 6].

H = -int rho log rho. The forward equation d_t rho = -div_S(rho (P f + a)) + div_S(Sigma grad_S rho), where a is the
drift of the noise's process minus div_S Sigma, gives

    dH/dt = E[div_S(P f)] + E[div_S a] + E[<grad log rho, Sigma grad log rho>].

The second term depends on the process: it is 0 in the divergence form, for which alone the source's identity holds,
-E[div_S div_S Sigma] for Ito and for L = b . grad + Sigma : Hess in general, and half of that for Stratonovich noise
with a scalar sigma(x). Means of divergences are computed in weak form, E[div_S v] = -int <v, grad_S rho> dm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.density import Density, check_nonnegative
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.types import HelmscopeError, check_real, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.noise import Noise

FLOOR = 1e-13  # of the largest value: where a density is smaller, its series is rounding error, and is left out


@dataclass(frozen=True)
class EntropyRate:
    """The rate of the entropy of a density, dH/dt, term by term.

    >>> EntropyRate(drift=-0.25, process=0.0, diffusion=0.05).total
    -0.2
    """

    drift: float  # E[div f]: what the flow expands or compresses
    process: float  # E[div a]: what the drift of the noise's process does, beyond the divergence form
    diffusion: float  # E[<grad log rho, Sigma grad log rho>] >= 0: what the noise spreads

    @property
    def total(self) -> float:
        """dH/dt."""
        return self.drift + self.process + self.diffusion


def entropy_rate(density: Density, field: object = None, noise: Noise | None = None, *, t: float = 0.0) -> EntropyRate:
    """Rate dH/dt of the entropy of a density under ``field`` and ``noise``, as ``evolve`` takes them, term by term:

        dH/dt = E[div_S(P f)] + E[div_S a] + E[<grad log rho, Sigma grad log rho>],

    where a is the drift of the noise's process minus div_S Sigma, 0 in the divergence form.

    Points where the density is below 1e-13 of its maximum, as a truncated series may be, are left out of the last term.
    Raises ``HelmscopeError`` for bad input.

    >>> from helmscope.fields.noise import IsotropicNoise
    >>> from helmscope.meanfield import SphereGrid
    >>> density = Density.von_mises_fisher(SphereGrid(degree=24), kappa=2.0)
    >>> entropy_rate(density, noise=IsotropicNoise(0.5)).total  # nu (d - 1) kappa A_d(kappa)
    1.074629...
    """
    density, t = check_log_density(density), check_real("t", t)
    equation, gradient = ForwardEquation.of(field, density.grid, noise), density.grid.gradient(density.modes)
    drift = -_mean_product(density, equation.drift.components(density.modes, t, density.values), gradient)
    process = 0.0 if equation.correction is None else -_mean_product(density, equation.correction, gradient)
    return EntropyRate(drift, process, _fisher(density, equation))


def fisher_information(density: Density, noise: Noise | None = None) -> float:
    """Fisher information of location, E[<grad log rho, Sigma grad log rho>], with Sigma = I without a noise.

    For a von Mises-Fisher density it is (d - 1) kappa A_d(kappa), A_d = I_{d/2} / I_{d/2-1}. Points where the density
    is below 1e-13 of its maximum are left out. Raises ``HelmscopeError`` for bad input.

    >>> from helmscope.meanfield import SphereGrid
    >>> fisher_information(Density.von_mises_fisher(SphereGrid(degree=24), kappa=2.0))
    2.14925...
    """
    density = check_log_density(density)
    if noise is None:
        return mean_square(density, density.grid.gradient(density.modes))
    return _fisher(density, ForwardEquation.of(None, density.grid, noise))


def mean_square(density: Density, flux: Float[Tensor, "m c"]) -> float:
    """E|v|^2 = int |rho v|^2 / rho dm of a velocity v, from the flux rho v at the points of the grid; points where rho
    is below 1e-13 of its maximum are left out.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=8)
    >>> mean_square(Density.uniform(grid), torch.ones(len(grid.points), 1, dtype=torch.float64))
    1.0
    """
    return _mean_form(density, flux, flux)


def check_density(density: object) -> Density:
    """The argument if it is a ``Density``; raises ``HelmscopeError`` otherwise.

    >>> from helmscope.meanfield import CircleGrid
    >>> check_density(Density.uniform(CircleGrid(degree=8))).minimum
    1.0
    """
    if not isinstance(density, Density):
        raise HelmscopeError(
            f"density is {short_repr(density)}, but it must be a Density such as Density.uniform(grid)"
        )
    return density


def check_log_density(density: object) -> Density:
    """``check_density`` where log rho is needed; raises ``HelmscopeError`` also if it is negative by more than
    truncation errors.

    >>> from helmscope.meanfield import CircleGrid
    >>> check_log_density(Density.uniform(CircleGrid(degree=8))).minimum
    1.0
    """
    checked = check_density(density)
    check_nonnegative("density", checked)
    return checked


@full_precision
def _fisher(density: Density, equation: ForwardEquation) -> float:
    gradient = density.grid.gradient(density.modes)
    spread = equation.nu * gradient
    if equation.excess is not None:
        spread = spread + torch.einsum("mck,mk->mc", equation.excess, gradient)
    return _mean_form(density, gradient, spread)


def _mean_form(density: Density, first: Tensor, second: Tensor) -> float:
    """int <first, second> / rho dm."""
    values = density.values
    kept = values > FLOOR * values.max()
    ratio = (first * second).sum(-1) / values.where(kept, torch.ones_like(values))
    return float(density.grid.mean_of(ratio * kept))


def _mean_product(density: Density, first: Tensor, second: Tensor) -> float:
    """int <first, second> dm."""
    return float(density.grid.mean_of((first * second).sum(-1)))
