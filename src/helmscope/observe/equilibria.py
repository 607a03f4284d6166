"""Equilibria of a flow of tokens, and whether they are stable.

At an equilibrium v = 0 of the whole cloud the eigenvalues of the Jacobian (``observe.jacobian``) are the rates at which
perturbations grow. SA and USA with V = B = I ascend the interaction energy [Geshkovski et al. 2023]. Rotations of the
cloud have rate 0 there, and consensus, all tokens equal, has no positive rate. Every other equilibrium has one: for
d >= 3 at every beta >= 0, and on the circle for beta <= 1 (Criscitiello et al., arXiv:2405.18273); no exception was
found at larger beta. So almost no start ends there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, as_field
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import check_tokens, tangent_basis
from helmscope.geometry.zeros import find_zeros
from helmscope.observe.generator import Velocity, tangent_velocity
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_integer, check_progress, one_line_repr, pluralized

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the speed, relative to the size of the Jacobian
NEUTRAL = {torch.float64: 1e-9, torch.float32: 1e-4}  # a rate below this share of the Jacobian's size counts as 0
CONSENSUS = {torch.float64: 1e-5, torch.float32: 1e-2}  # the largest distance between tokens that have met


@dataclass(frozen=True, eq=False, repr=False)
class Equilibria:
    """Equilibria found from ``starts`` starts; equal ones, up to rotation and order, are not removed.

    ``speeds`` are |v| of the whole cloud; ``growth_rates`` the largest real part of an eigenvalue of the Jacobian.

    >>> from helmscope.fields.attention import SA
    >>> antipodes = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]], dtype=torch.float64)
    >>> find_equilibria(SA(beta=0.0), antipodes)
    <Equilibria: 1 of 1 start: 0 at consensus, 1 unstable>
    """

    states: Float[Tensor, "k n d"]
    speeds: Float[Tensor, " k"]
    growth_rates: Float[Tensor, " k"]
    starts: int
    scale: float

    @property
    def consensus(self) -> Bool[Tensor, " k"]:
        """Whether all tokens are equal."""
        gap: Tensor = torch.linalg.vector_norm(self.states - self.states[:, :1], dim=-1)
        return gap.amax(-1) <= CONSENSUS[self.states.dtype]

    @property
    def unstable(self) -> Bool[Tensor, " k"]:
        """Whether some perturbation grows. Rotations of the cloud are neutral and do not count."""
        return self.growth_rates > NEUTRAL[self.states.dtype] * self.scale

    def __repr__(self) -> str:
        return one_line_repr(
            f"Equilibria: {len(self.states)} of {pluralized(self.starts, 'start')}: {int(self.consensus.sum())} at "
            f"consensus, {int(self.unstable.sum())} unstable"
        )


@full_precision
@shows_progress("searching equilibria")
def find_equilibria(
    field: Field | Callable[..., Tensor],
    starts: Float[Tensor, "m n d"],
    *,
    max_iterations: int = 200,
    progress: ProgressOption = None,
) -> Equilibria:
    """Equilibria v = 0 near many starting clouds, stable or not, with their growth rates.

    The Levenberg-Marquardt method minimizes the speed of the whole cloud; a start whose speed does not fall to 1e-12
    (1e-5 in float32) of the size of the Jacobian is left out. Each iteration takes the Jacobian of every cloud, with
    n (d - 1) rows. Raises ``HelmscopeError`` unless starts are unit vectors (m, n, d) and the field is an autonomous
    one on the sphere.

    >>> from helmscope.fields.attention import SA
    >>> polygon = torch.tensor([[[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]]], dtype=torch.float64)
    >>> found = find_equilibria(SA(beta=0.0), polygon)
    >>> found.growth_rates.round(decimals=6), found.unstable.tolist()
    (tensor([0.5000], dtype=torch.float64), [True])
    """
    check_tokens(starts, name="starts")
    if starts.ndim != 3 or not len(starts):
        raise HelmscopeError(f"starts has shape {tuple(starts.shape)}, but it must be (m, n, d) with m >= 1 clouds")
    if not as_field(field).autonomous:
        raise HelmscopeError(f"field is {as_field(field).name}, which depends on time, but equilibria need one that "
                             "does not")  # fmt: skip
    velocity = tangent_velocity(field, starts[0])
    zeros = find_zeros(
        lambda x: _linearize(velocity, x),
        starts,
        tol=TOLERANCE[starts.dtype],
        max_iterations=check_integer("max_iterations", max_iterations, at_least=1),
        progress=check_progress(progress),
    )
    states = zeros.states[zeros.converged]
    rates = states.new_zeros(0)
    if len(states):
        rates = torch.linalg.eigvals(_linearize(velocity, states)[1]).real.amax(-1)
    return Equilibria(states, zeros.residual[zeros.converged], rates, len(starts), zeros.scale)


@full_precision
def _linearize(velocity: Velocity, x: Float[Tensor, "m n d"]) -> tuple[Float[Tensor, "m N"], Float[Tensor, "m N N"]]:
    """v and J = Q^T (D v) Q of every cloud, in tangent coordinates."""
    m, n, d = x.shape
    basis, size = tangent_basis(x), n * (d - 1)
    coordinates = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, 1, n, d - 1, 1)
    directions = (basis @ coordinates).squeeze(-1)  # (size, m, n, d)
    columns = torch.func.jvp(velocity, (x.expand_as(directions).contiguous(),), (directions,))[1]
    jacobian = (basis.mT @ columns.unsqueeze(-1)).reshape(size, m, size)
    value = (basis.mT @ velocity(x).unsqueeze(-1)).reshape(m, size)
    return value.detach(), jacobian.permute(1, 2, 0).detach()
