"""The potential Phi of attention: its drift on a density is grad_S Phi[rho], and under noise nu I its stationary
densities are the fixed points rho ~ e^{Phi[rho] / nu}.

With logits beta <x, y>, V = c I and Z = int e^{beta <x, y>} rho(dy),

    SA    Phi = (c / beta) log Z,   so that stationary densities satisfy rho ~ Z^{c / (nu beta)},
    USA   Phi = (c / beta) Z = d(c E_beta) / d rho, with the interaction energy E_beta,

up to a constant; for beta = 0 both are c <x, mean>. SA's Phi is not the derivative of an energy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.meanfield.drift import AttentionDrift

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.attention import SA, USA
    from helmscope.meanfield.grid import Grid


def attention_potential(
    field: SA | USA, grid: Grid, modes: Float[Tensor, " modes"], values: Float[Tensor, " m"] | None = None
) -> Float[Tensor, " m"]:
    """Phi at the points of the grid, up to a constant, for attention whose matrices are multiples of I.

    Where log Z has lost its digits in the series it is summed over the points, with the ``values`` of the density, by
    default those of its series.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.meanfield import CircleGrid, Density
    >>> grid = CircleGrid(degree=16)
    >>> phi = attention_potential(SA(beta=0.0), grid, Density.von_mises_fisher(grid, kappa=2.0).modes)
    >>> phi[0]  # <x, mean> at the center, I_1(2) / I_0(2)
    tensor(0.6978, dtype=torch.float64)
    """
    drift = AttentionDrift.of(field, grid)
    if drift.constant is None or drift.beta == 0:
        return drift.scale * grid.synthesize(drift.potential * modes)
    return drift.scale / drift.beta * drift.log_partition_function(modes, values)
