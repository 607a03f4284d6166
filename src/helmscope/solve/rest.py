"""Test whether a state is at rest. An explicit stepper cannot detect this: near a stable equilibrium its step size
stays limited by the fastest rate, and its error at the tolerance, up to the last time.

The flow near a state x with velocity f and derivative J is y' = f + J (y - x). Over a time s it moves the state by

    d(s) = D(s) f,   D(s) = int_0^s e^{rJ} dr,        and a perturbation u to P(s) u,   P(s) = e^{sJ}.

The state is at rest if d stays within the tolerance for the remaining time, no perturbation grows, and f and J are
accurate enough for this conclusion: the rounding error of f, multiplied by D, must stay within the tolerance too. So a
state that is merely slow is not at rest. For metastable clusters D grows like s in some direction, and f s exceeds the
tolerance long before they merge; near a saddle P grows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import tangent_basis

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.solve.flow import Flow

MAX_COORDINATES = 512  # largest n (d - 1) for which J is formed; squaring it takes seconds on one core
MAX_ENTRIES = 2**20  # pairs of tokens evaluated at a time
GROWTH = 3.0  # allowed growth of a perturbation, as the root mean square over all directions


def resting_state(
    flow: Flow, x: Float[Tensor, "1 n d"], h: float, *, duration: float, tol: float
) -> Float[Tensor, "1 n d"] | None:
    """The state of one system after ``duration``, if it is at rest: no token moves by more than ``tol`` until then.
    Otherwise None.

    ``h`` is a typical step size of the stepper, for which displacements neither overflow nor underflow. The derivative
    decides, as above, if the field has one and it has at most 512 rows. If the flow is neutral in some direction, as
    for the rotation of a cluster, rounding limits this test to about 10^6 steps. Beyond that, tokens that only attract
    each other (V = c I with c > 0) never leave their convex hull: if they are within ``tol`` of each other they are at
    rest forever, and x is returned unchanged.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.flow import Flow
    >>> antipodes = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    >>> resting_state(Flow(SA(beta=1.0)), antipodes, 1.0, duration=1e6, tol=1e-6)  # a saddle
    >>> resting_state(Flow(SA(beta=1.0, value=-torch.eye(2))), antipodes, 1.0, duration=1e6, tol=1e-6)
    tensor([[[ 1.,  0.],
             [-1.,  0.]]])
    """
    if not flow.field.autonomous:  # a state at rest now may move later
        return None
    state = _by_derivative(flow, x, h, duration, tol)
    if state is None and (getattr(flow.field, "value_scale", None) or 0.0) > 0 and _spread(x) <= tol:
        return x
    return state


def _by_derivative(flow: Flow, x: Tensor, h: float, duration: float, tol: float) -> Float[Tensor, "1 n d"] | None:
    n, d = x.shape[-2:]
    if not flow.field.continuous or n * (d - 1) > MAX_COORDINATES:
        return None
    # float32 differences have three correct digits; a plain callable may support its own dtype only
    exact = flow.retract(x.to(torch.float64) if flow.field.takes_weights else x)
    basis = tangent_basis(exact[0])
    doublings = max(0, math.ceil(math.log2(duration / h)))
    jacobian, velocity, error = _linearize(flow, exact, basis, duration / 2**doublings)
    moved = _remaining_displacement(jacobian, velocity.reshape(n, -1), doublings=doublings, tol=tol, error=error)
    return None if moved is None else flow.retract(exact + _ambient(basis, moved)).to(x.dtype)


def _spread(x: Float[Tensor, "1 n d"]) -> float:
    """An upper bound for the largest distance between two tokens, at most twice as large."""
    return 2 * float(torch.linalg.vector_norm(x - x[:, :1], dim=-1).max())


@full_precision
def _remaining_displacement(
    jacobian: Float[Tensor, "m m"], velocity: Float[Tensor, "n k"], *, doublings: int, tol: float, error: float
) -> Float[Tensor, " m"] | None:
    """d(s) at s = 2^doublings, for J and f in units of one step. None if it ever exceeds ``tol``, if a perturbation
    grows, or if the rounding of f or the relative ``error`` of J could change the conclusion.
    """
    size, f = velocity.numel(), velocity.flatten()
    block = torch.zeros(2 * size, 2 * size, dtype=f.dtype, device=f.device)
    block[:size, :size] = jacobian
    block[:size, size:] = torch.eye(size, dtype=f.dtype, device=f.device)
    block = torch.linalg.matrix_exp(block)  # [[P, D], [0, I]] over one step
    p, d = block[:size, :size], block[:size, size:]
    for k in range(doublings + 1):
        p, d = (p @ p, d + p @ d) if k else (p, d)
        growth = torch.linalg.matrix_norm(p) / math.sqrt(size)
        moved: Tensor = d @ f
        farthest = torch.linalg.vector_norm(moved.reshape_as(velocity), dim=-1).max()
        if not bool((growth <= GROWTH) & (farthest <= tol)):  # also if they are NaN
            return None
    amplification = torch.linalg.matrix_norm(d, ord=2) * torch.linalg.matrix_norm(jacobian, ord=2)
    return moved if bool(amplification * max(error, torch.finfo(f.dtype).eps / tol) <= 1) else None


def _linearize(
    flow: Flow, x: Float[Tensor, "1 n d"], basis: Float[Tensor, "n d k"], h: float
) -> tuple[Float[Tensor, "m m"], Float[Tensor, " m"], float]:
    """h J and h f in tangent coordinates at x, by central differences, which need only values of the field; and the
    relative error of J, from rounding and from the curvature of the velocity within the difference step.
    """
    n, d = x.shape[-2:]
    size, epsilon = n * (d - 1), torch.finfo(x.dtype).eps ** (1 / 3)
    now = _displacements(flow, x, basis, h)[0]
    slopes, curvatures = [], []
    directions = torch.eye(size, dtype=x.dtype, device=x.device)
    for part in torch.split(directions, max(1, MAX_ENTRIES // (n * max(n, d)))):
        offsets = epsilon * _ambient(basis, part)
        ahead, behind = (_displacements(flow, flow.retract(x + sign * offsets), basis, h) for sign in (1, -1))
        slopes.append((ahead - behind) / (2 * epsilon))
        curvatures.append((ahead + behind - 2 * now) / epsilon)
    slope = torch.cat(slopes)
    curvature = float(torch.cat(curvatures).abs().max() / slope.abs().max())
    return slope.mT, now, 10 * epsilon**2 + curvature**2


@full_precision
def _displacements(flow: Flow, x: Float[Tensor, "batch n d"], basis: Float[Tensor, "n d k"], h: float) -> Tensor:
    """h f(x) for several states of one system, in tangent coordinates (batch, m)."""
    weights, leader = (None if part is None else part.expand(len(x), -1) for part in (flow.weights, flow.leader))
    many = replace(flow, weights=None if weights is None else weights.to(x.dtype), leader=leader)
    steps = torch.full((len(x), 1, 1), h, dtype=torch.float64, device=x.device)
    return (basis.mT @ many.displacement(x, steps, torch.zeros_like(steps)).unsqueeze(-1)).squeeze(-1).flatten(-2)


@full_precision
def _ambient(basis: Float[Tensor, "n d k"], v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch n d"]:
    """Convert tangent coordinates to vectors of R^d."""
    return (basis @ v.reshape(*v.shape[:-1], len(basis), -1, 1)).squeeze(-1)
