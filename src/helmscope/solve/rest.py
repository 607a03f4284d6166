"""When has a state stopped moving? An explicit stepper cannot say: near an equilibrium that attracts it keeps to steps
as long as the fastest rate allows, and the state at the tolerance, for as many steps as the last time is far.

The flow near a state x with velocity f and derivative J is y' = f + J (y - x). Over a time s it moves the state by

    d(s) = D(s) f,   D(s) = int_0^s e^{rJ} dr,        and a disturbance u to P(s) u,   P(s) = e^{sJ}.

The state is at rest where d stays within the tolerance for all the time that remains and no disturbance grows, and
where f and J are known well enough to say so: the rounding of f, taken through D, must stay within the tolerance too.
So a state that is merely slow is not at rest. Metastable clusters have a direction in which D grows like s, and f s
passes the tolerance long before they meet; near a saddle P grows.
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

MOST_COORDINATES = 512  # n (d - 1) of a system whose derivative is formed: its squares take some seconds on one core
MOST_ENTRIES = 2**20  # of the pairs of tokens that are looked at in one go
GROWTH = 3.0  # of a disturbance, in the root mean square over all directions


def resting_state(
    flow: Flow, x: Float[Tensor, "1 n d"], h: float, *, duration: float, tol: float
) -> Float[Tensor, "1 n d"] | None:
    """Where the one system at hand is after ``duration``, if no token moves by more than ``tol`` until then; else None.

    ``h`` is a step that the stepper takes: it makes displacements of ordinary size where velocities are not. The
    derivative decides, as above, where there is one and it has at most 512 rows. Where the flow is free in some
    direction, as a cluster is to turn, rounding lets it decide for 10^6 steps or so. Beyond, tokens that only attract
    each other (V = c I with c > 0) never leave the hull of where they are: within ``tol`` of each other they are at
    rest for ever, and x is given back as it is.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.flow import Flow
    >>> antipodes = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    >>> resting_state(Flow(SA(beta=1.0)), antipodes, 1.0, duration=1e6, tol=1e-6)  # a saddle
    >>> resting_state(Flow(SA(beta=1.0, value=-torch.eye(2))), antipodes, 1.0, duration=1e6, tol=1e-6)
    tensor([[[ 1.,  0.],
             [-1.,  0.]]])
    """
    if not flow.field.autonomous:  # what is at rest now may be moved later
        return None
    state = _by_derivative(flow, x, h, duration, tol)
    if state is None and (getattr(flow.field, "value_scale", None) or 0.0) > 0 and _spread(x) <= tol:
        return x
    return state


def _by_derivative(flow: Flow, x: Tensor, h: float, duration: float, tol: float) -> Float[Tensor, "1 n d"] | None:
    n, d = x.shape[-2:]
    if not flow.field.continuous or n * (d - 1) > MOST_COORDINATES:
        return None
    # float32 would measure a derivative to three digits; a callable may know its own dtype alone
    exact = flow.land(x.to(torch.float64) if flow.field.takes_weights else x)
    basis = tangent_basis(exact[0])
    doublings = max(0, math.ceil(math.log2(duration / h)))
    jacobian, velocity, error = _linearized(flow, exact, basis, duration / 2**doublings)
    moved = _remaining_way(jacobian, velocity.reshape(n, -1), doublings=doublings, tol=tol, error=error)
    return None if moved is None else flow.land(exact + _ambient(basis, moved)).to(x.dtype)


def _spread(x: Float[Tensor, "1 n d"]) -> float:
    """At least the greatest distance between two tokens, and at most twice that."""
    return 2 * float(torch.linalg.vector_norm(x - x[:, :1], dim=-1).max())


@full_precision
def _remaining_way(
    jacobian: Float[Tensor, "m m"], velocity: Float[Tensor, "n k"], *, doublings: int, tol: float, error: float
) -> Float[Tensor, " m"] | None:
    """d(s) at s = 2^doublings, for J and f in units of one step. None where it ever exceeds ``tol``, where a
    disturbance grows, and where the rounding of f or the relative ``error`` of J could change the answer.
    """
    size, f = velocity.numel(), velocity.flatten()
    both = torch.zeros(2 * size, 2 * size, dtype=f.dtype, device=f.device)
    both[:size, :size] = jacobian
    both[:size, size:] = torch.eye(size, dtype=f.dtype, device=f.device)
    both = torch.linalg.matrix_exp(both)  # [[P, D], [0, I]] over one step
    p, d = both[:size, :size], both[:size, size:]
    for k in range(doublings + 1):
        p, d = (p @ p, d + p @ d) if k else (p, d)
        grown = torch.linalg.matrix_norm(p) / math.sqrt(size)
        moved: Tensor = d @ f
        farthest = torch.linalg.vector_norm(moved.reshape_as(velocity), dim=-1).max()
        if not bool((grown <= GROWTH) & (farthest <= tol)):  # nor where they are NaN
            return None
    strength = torch.linalg.matrix_norm(d, ord=2) * torch.linalg.matrix_norm(jacobian, ord=2)
    return moved if bool(strength * max(error, torch.finfo(f.dtype).eps / tol) <= 1) else None


def _linearized(
    flow: Flow, x: Float[Tensor, "1 n d"], basis: Float[Tensor, "n d k"], h: float
) -> tuple[Float[Tensor, "m m"], Float[Tensor, " m"], float]:
    """h J and h f in tangent coordinates at x, by central differences, which need nothing of a field but its values;
    and the relative error of J, from rounding and from how much the velocity bends within their step.
    """
    n, d = x.shape[-2:]
    size, epsilon = n * (d - 1), torch.finfo(x.dtype).eps ** (1 / 3)
    now = _moves(flow, x, basis, h)[0]
    slopes, bends = [], []
    directions = torch.eye(size, dtype=x.dtype, device=x.device)
    for part in torch.split(directions, max(1, MOST_ENTRIES // (n * max(n, d)))):
        aside = epsilon * _ambient(basis, part)
        ahead, behind = (_moves(flow, flow.land(x + sign * aside), basis, h) for sign in (1, -1))
        slopes.append((ahead - behind) / (2 * epsilon))
        bends.append((ahead + behind - 2 * now) / epsilon)
    slope = torch.cat(slopes)
    bend = float(torch.cat(bends).abs().max() / slope.abs().max())
    return slope.mT, now, 10 * epsilon**2 + bend**2


@full_precision
def _moves(flow: Flow, x: Float[Tensor, "batch n d"], basis: Float[Tensor, "n d k"], h: float) -> Tensor:
    """h f(x) of several states of the system at hand, in tangent coordinates (batch, m)."""
    weights, leader = (None if part is None else part.expand(len(x), -1) for part in (flow.weights, flow.leader))
    many = replace(flow, weights=None if weights is None else weights.to(x.dtype), leader=leader)
    steps = torch.full((len(x), 1, 1), h, dtype=torch.float64, device=x.device)
    return (basis.mT @ many.move(x, steps, torch.zeros_like(steps)).unsqueeze(-1)).squeeze(-1).flatten(-2)


@full_precision
def _ambient(basis: Float[Tensor, "n d k"], v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch n d"]:
    """Tangent coordinates as vectors."""
    return (basis @ v.reshape(*v.shape[:-1], len(basis), -1, 1)).squeeze(-1)
