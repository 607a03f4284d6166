"""The linearization of the forward equation around a density: how small perturbations of it evolve.

For d_t rho = N(rho) - D rho, where D = nu k (k + d - 2) in the harmonics, a perturbation evolves as
d_t h = N'(rho) h - D h. With b the velocity of the divergence form and Sigma = nu I + excess,

    N'(rho) h = -div_S(h b + rho b'[h]) + div_S(excess grad h),

where b'[h] is 0 for a force, (c grad G[h] - b_attention Z[h]) / Z for SA and c grad G[h] for USA; for other fields it
is computed by central differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.drift import AttentionDrift, ForceDrift
from helmscope.meanfield.forward_equation import ForwardEquation

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

DIFFERENCE = 1e-5  # step of central differences, relative to |rho|: errors of the order of its square
ROUNDING = 1e-12  # of the largest value of rho, below which those of its series have few digits
BLOCK = 2**22  # numbers in the values of perturbations computed at once


@dataclass(frozen=True, eq=False)
class Linearization:
    """The linear operator h -> N'(rho) h - D h on coefficients, at the density with the coefficients ``modes``, whose
    ``values`` at the points may be given where they are known to more digits than ``modes`` give.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.fields.noise import IsotropicNoise
    >>> from helmscope.meanfield import CircleGrid, Density
    >>> grid = CircleGrid(degree=16)
    >>> equation = ForwardEquation.of(SA(beta=4.0), grid, IsotropicNoise(0.1))
    >>> matrix = Linearization(equation, Density.uniform(grid).modes).matrix
    >>> matrix[1, 1]  # the growth rate of degree 1, I_1(4) / (4 I_0(4)) - 0.1
    tensor(0.1159, dtype=torch.float64)
    """

    equation: ForwardEquation
    modes: Float[Tensor, " modes"]
    values: Float[Tensor, " m"] | None = None

    def apply(self, h: Float[Tensor, "*batch modes"]) -> Float[Tensor, "*batch modes"]:
        """N'(rho) h - D h."""
        return self.rate(h) - self.equation.decay * h

    def rate(self, h: Float[Tensor, "*batch modes"]) -> Float[Tensor, "*batch modes"]:
        """N'(rho) h."""
        drift = self.equation.drift
        if not isinstance(drift, AttentionDrift | ForceDrift):
            return self._difference(h)
        grid, excess = self.equation.grid, self.equation.excess
        flux = grid.synthesize(h)[..., None] * self._velocity
        if isinstance(drift, AttentionDrift):
            flux = flux + self._attending[:, None] * self._velocity_change(drift, h)
        if excess is not None:
            flux = flux - (excess * grid.gradient(h)[..., None, :]).sum(-1)
        return -grid.divergence(flux)

    @cached_property
    def matrix(self) -> Float[Tensor, "modes modes"]:
        """The operator as a matrix; row 0 is 0, since mass is kept."""
        count = len(self.modes)
        eye = torch.eye(count, dtype=torch.float64, device=self.modes.device)
        rows = max(1, BLOCK // len(self.equation.grid.points))
        return torch.cat([self.apply(block) for block in torch.split(eye, rows)]).mT

    @cached_property
    def _values(self) -> Float[Tensor, " m"]:
        return self.equation.grid.synthesize(self.modes) if self.values is None else self.values

    @cached_property
    def _attending(self) -> Float[Tensor, " m"]:
        """The values of rho that multiply b'[h]: 0 where they are rounding errors, which Z does not outweigh."""
        noise = 0.0 if self.values is not None else ROUNDING * float(self._values.max())
        return torch.where(self._values > noise, self._values, 0.0)

    @cached_property
    def _velocity(self) -> Float[Tensor, "m c"]:
        return self.equation.velocity(self.modes, 0.0, self._values)

    def _velocity_change(self, drift: AttentionDrift, h: Tensor) -> Float[Tensor, "*batch m c"]:
        change = drift.scale * self.equation.grid.gradient(drift.potential * h)
        if drift.constant is None:
            return change
        own = drift.components(self.modes, 0.0, self._values)
        z = drift.log_partition_function(self.modes, self._values).exp()
        return (change - own * drift.partition_function(h)[..., None]) / z[:, None]

    @full_precision
    def _difference(self, h: Tensor) -> Tensor:
        """Central differences, one perturbation at a time."""
        flat = h.reshape(-1, h.shape[-1])
        rows = []
        for direction in flat:
            size = float(direction.norm())
            step = DIFFERENCE * float(self.modes.norm()) / size if size > 0 else 1.0
            forward, backward = (self.equation.rate(self.modes + sign * step * direction, 0.0) for sign in (1, -1))
            rows.append((forward - backward) / (2 * step))
        return torch.stack(rows).reshape(h.shape)
