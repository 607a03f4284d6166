"""Scaling of a positive kernel to given marginals, the static half of every Schroedinger bridge (Sinkhorn 1964):

    pi_ij = e^{f_i + k_ij + g_j},   sum_j pi_ij = a_i,   sum_i pi_ij = b_j,

where k is the logarithm of the kernel. The rows and the columns are scaled alternately. The scalings are products
u_i e^{f_i} and v_j e^{g_j}: most steps multiply by the matrix e^{f + k + g} (Schmitzer 2019), and where u or v leaves
the range of floating-point numbers, a step with log-sum-exp absorbs them into f and g.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import Progress

_LARGEST_LOG = 30.0  # of a multiplier that is not yet absorbed


@dataclass(frozen=True, eq=False)
class Scaling:
    """The potentials f and g, the number of iterations, and the sum over i of |sum_j pi_ij - a_i|."""

    f: Float[Tensor, " n"]
    g: Float[Tensor, " m"]
    iterations: int
    error: float
    converged: bool


@full_precision
def scale_to_marginals(
    log_kernel: Float[Tensor, "n m"],
    a: Float[Tensor, " n"],
    b: Float[Tensor, " m"],
    *,
    tol: float,
    max_iterations: int,
    progress: Progress | None = None,
) -> Scaling:
    """Scale a kernel to the positive marginals a and b; unchecked, for float64 tensors.

    It ends when the marginal error is at most ``tol``, or after ``max_iterations``; the marginal b then holds up
    to rounding. ``log_kernel`` may be -inf where the kernel is 0, but not along a whole row or column.

    >>> kernel = torch.tensor([[0.0, -1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> half = torch.full((2,), 0.5, dtype=torch.float64)
    >>> result = scale_to_marginals(kernel, half, half, tol=1e-12, max_iterations=100)
    >>> torch.exp(result.f[:, None] + kernel + result.g).sum(1)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    log_a, log_b = torch.log(a), torch.log(b)
    g = torch.zeros_like(b)
    f, g = _log_step(log_kernel, log_a, log_b, g)
    matrix = torch.exp(f[:, None] + log_kernel + g)
    u, v = torch.ones_like(a), torch.ones_like(b)
    first_error, error, iterations = 0.0, math.inf, 0
    while iterations < max_iterations:
        iterations += 1
        rows = matrix @ v
        error = float((u * rows - a).abs().sum())
        if error <= tol:
            return Scaling(f + torch.log(u), g + torch.log(v), iterations, error, converged=True)
        new_u = a / rows
        new_v = b / (new_u @ matrix)
        if _is_moderate(new_u) and _is_moderate(new_v):
            u, v = new_u, new_v
        else:
            f, g = _log_step(log_kernel, log_a, log_b, g + torch.log(v))
            matrix = torch.exp(f[:, None] + log_kernel + g)
            u, v = torch.ones_like(a), torch.ones_like(b)
        first_error = first_error or error
        if progress is not None:
            progress(_share_done(first_error, error, tol))
    return Scaling(f + torch.log(u), g + torch.log(v), iterations, error, converged=False)


def _log_step(log_kernel: Tensor, log_a: Tensor, log_b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One alternation by log-sum-exp: new f, then new g."""
    f = log_a - torch.logsumexp(log_kernel + g, 1)
    return f, log_b - torch.logsumexp(log_kernel + f[:, None], 0)


def _is_moderate(multiplier: Tensor) -> bool:
    """Whether all logarithms are small enough to be kept outside f and g; False for NaN."""
    return bool((torch.log(multiplier).abs() <= _LARGEST_LOG).all())


def _share_done(first: float, now: float, tol: float) -> float:
    """The progress towards the tolerance, if the error decreases geometrically."""
    if not first > now > tol:
        return 0.0
    return math.log(first / now) / math.log(first / tol)
