"""Zeros of tangent vector fields on a product of n spheres, from many starts, by the Levenberg-Marquardt method.

With the value f of the field and its covariant derivative J in an orthonormal tangent basis, a step solves

    min_p |f + J p|^2 + m |p|^2,    m = damping * |f|,

and moves along the geodesic with tangent p. It always decreases |f| for a large enough damping, and becomes Newton's
step near a zero where J is regular. Where J is singular (a symmetry of the field, a degenerate zero) it stays defined.
A start may end where J^T f = 0 but f != 0, which is not a zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import every, full_precision
from helmscope.geometry.sphere import exp, retract, tangent_basis
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.types import Progress

# Values (m, N) and derivatives (m, N, N) of a field at states (m, n, d), in the coordinates of ``tangent_basis``.
Linearization = Callable[["Tensor"], tuple["Tensor", "Tensor"]]

LONGEST_STEP = 0.5  # radians, of the token that moves most: beyond this the linearization says little
LARGEST_DAMPING = 1e12
MIN_PROGRESS = 1e-6  # a smaller relative decrease of |f| in a step is the approach to a minimum that is not 0
POLISHING_STEPS = 2


@dataclass(frozen=True, eq=False)
class Zeros:
    """Where each start has ended, |f| there, and whether that is within the tolerance.

    ``scale`` is the size of the field, to which the tolerance is relative.
    """

    states: Float[Tensor, "m n d"]
    residual: Float[Tensor, " m"]
    converged: Bool[Tensor, " m"]
    scale: float


@full_precision
def find_zeros(
    linearize: Linearization,
    starts: Float[Tensor, "m n d"],
    *,
    tol: float,
    max_iterations: int,
    progress: Progress,
    scale: float | None = None,
) -> Zeros:
    """Search for a zero from each start.

    A start has converged if |f| <= tolerance * scale, where ``scale`` defaults to the largest |f| or |J| (spectral
    norm) at the starts. ``progress`` is called with the share of the iterations. Raises ``HelmscopeError`` where a
    derivative is not finite at a start.

    >>> def linearize(x):  # grad_S of U = x_1 on the circle
    ...     basis = tangent_basis(x).squeeze(-3)
    ...     return basis[:, 0], -x[:, 0, :1, None]
    >>> zeros = find_zeros(linearize, torch.tensor([[[0.8, 0.6]]], dtype=torch.float64), tol=1e-12,
    ...     max_iterations=50, progress=lambda share: None)
    >>> zeros.states.round(decimals=6) + 0.0, zeros.converged.tolist()
    (tensor([[[1., 0.]]], dtype=torch.float64), [True])
    """
    states = starts.detach().clone()
    value, jacobian = linearize(states)
    if not every(torch.isfinite(value)) or not every(torch.isfinite(jacobian)):
        raise HelmscopeError("starts holds a state where a derivative is not finite, but all must be finite there")
    residual = torch.linalg.vector_norm(value, dim=-1)
    if scale is None:
        scale = float(torch.maximum(residual.max(), torch.linalg.matrix_norm(jacobian, ord=2).max()))
    goal = tol * scale
    damping = torch.full_like(residual, 1e-2)
    polished = torch.zeros_like(residual, dtype=torch.int64)
    for iteration in range(max_iterations):
        rows = ((polished < POLISHING_STEPS) & (damping < LARGEST_DAMPING)).nonzero()[:, 0]
        if not len(rows):
            break
        polished[rows] += residual[rows] <= goal
        trial = _move(states[rows], _step(value[rows], jacobian[rows], damping[rows]))
        trial_value, trial_jacobian = linearize(trial)
        trial_residual = torch.linalg.vector_norm(trial_value, dim=-1)
        better = (trial_residual < residual[rows]) & torch.isfinite(trial_jacobian).all(-1).all(-1)
        stalled = better & (trial_residual > (1 - MIN_PROGRESS) * residual[rows])
        damping[rows] *= torch.where(better, 0.2, 5.0)
        damping[rows[stalled]] = LARGEST_DAMPING
        kept = rows[better]
        states[kept], residual[kept] = trial[better], trial_residual[better]
        value[kept], jacobian[kept] = trial_value[better], trial_jacobian[better]
        progress((iteration + 1) / (max_iterations + 1))
    progress(1.0)
    return Zeros(states, residual, residual <= goal, scale)


@full_precision
def _step(
    value: Float[Tensor, "m N"], jacobian: Float[Tensor, "m N N"], damping: Float[Tensor, " m"]
) -> Float[Tensor, "m N"]:
    """-(J^T J + m I)^-1 J^T f, by the singular values: J^T J would lose half of the digits."""
    left, singular, right = torch.linalg.svd(jacobian)
    size = torch.linalg.vector_norm(value, dim=-1)
    shift = (damping * size).clamp(min=torch.finfo(value.dtype).tiny)[:, None]
    along = (left.mT @ value[..., None])[..., 0]
    factor = singular / (singular * singular + shift)
    step: Tensor = -(right.mT @ (factor * along)[..., None])[..., 0]
    return step


@full_precision
def _move(states: Float[Tensor, "m n d"], step: Float[Tensor, "m N"]) -> Float[Tensor, "m n d"]:
    """Along geodesics, by at most ``LONGEST_STEP`` for any token."""
    m, n, _ = states.shape
    tangent = (tangent_basis(states) @ step.reshape(m, n, -1, 1))[..., 0]
    longest = torch.linalg.vector_norm(tangent, dim=-1).amax(-1)[:, None, None]
    shrink = torch.where(longest > LONGEST_STEP, LONGEST_STEP / longest, 1.0)
    return retract(exp(states, shrink * tangent))
