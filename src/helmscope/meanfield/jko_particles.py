"""Entropic steps of Jordan, Kinderlehrer and Otto on a cloud of points with weights [Peyre 2015, arXiv:1502.06216].

The points y_j are fixed and stand for the volumes q_j; a law is its weights. A step from the weights a, on the points
x_i = y_i or in a splitting step on x_i = T(y_i), minimizes

    <pi, c> + epsilon KL(pi | a q^T) + 2 tau (nu KL(b | q) + <V, b>),   pi 1 = a,  b = pi^T 1,  c_ij = dist(x_i, y_j)^2,

by scaling: pi_ij = a_i q_j e^{(f_i + g_j - c_ij) / epsilon} is adjusted in turn to the marginal a and to the best b,

    f = -epsilon log sum_j q_j e^{(g_j - c_ij) / epsilon},     s = epsilon log sum_i a_i e^{(f_i - c_ij) / epsilon},
    g = -2 tau (nu s + epsilon V) / (epsilon + 2 tau nu),      b = q e^{(s + g) / epsilon}.

The entropy of the plan blurs the result as diffusion for the time epsilon / 4 does: to first order the step is one with
nu + epsilon / (4 tau) in place of nu. (With nu = 0 and V = 0 it is exactly the kernel e^{-c / epsilon}.) So epsilon
must be small compared with 4 tau nu, and the distance sqrt(epsilon) still larger than that between neighboring points.
With ``compensate`` the step is computed with nu - epsilon / (4 tau), and what remains of the bias is of order
epsilon^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, StateSpace, as_field
from helmscope.fields.noise import IsotropicNoise
from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.free_energy import isotropic_nu
from helmscope.meanfield.jko import warn_if_counted_twice
from helmscope.runs.bar import shows_progress
from helmscope.solve.integrate import integrate
from helmscope.transport.cost import Cost, Geodesic
from helmscope.transport.streaming import PairwiseCost, log_weights
from helmscope.types import HelmscopeError, check_integer, check_progress, check_real, short_repr
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption


@dataclass(frozen=True, eq=False)
class ParticleStep(ConciseRepr):
    """The weights after a step, the mean squared distance <pi, c> that mass moved, blur included, and how the iteration
    ended; ``error`` is the last change of the weights, sum_j |b_j - previous b_j|.

    >>> points, half = torch.eye(2, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    >>> particle_jko_step(points, half, None, noise=1.0, tau=0.1, epsilon=0.1).weights
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    weights: Float[Tensor, " n"]
    squared_distance: float
    iterations: int
    error: float
    converged: bool


@shows_progress("JKO step")
@torch.no_grad()
@full_precision
def particle_jko_step(
    points: Float[Tensor, "n d"],
    weights: Float[Tensor, " n"],
    energy: Callable[[Tensor], Tensor] | None,
    *,
    noise: IsotropicNoise | float,
    tau: float,
    epsilon: float,
    volumes: Float[Tensor, " n"] | None = None,
    transported: Field | Callable[[Tensor], Tensor] | Float[Tensor, " n"] | None = None,
    compensate: bool = False,
    cost: Cost | None = None,
    tol: float = 1e-9,
    max_iterations: int = 10_000,
    progress: ProgressOption = None,
) -> ParticleStep:
    """One entropic step of size ``tau`` for F = nu Ent + int V, from ``weights`` on fixed points, in float64.

    ``energy`` is the function V of points, or None, and ``noise`` is ``IsotropicNoise(nu)`` or the number nu.
    ``volumes`` q_j are the shares of volume that the points stand for, such as the weights of a quadrature (default
    equal); ``cost`` is the distance (default ``Geodesic()``, on the sphere).

    ``transported`` makes it a splitting step, from T_# rho: a field or function, along whose flow the weighted points
    move for the time tau before the step brings their mass back to the fixed points, or the weights of T_# rho on the
    fixed points. Attention must not be in T and in ``noise`` at once, or it is counted twice; a warning says so for a
    field that attends, and cannot for weights.

    Beyond 2^22 pairs the matrix of costs is not stored. The iteration ends when the weights change by less than
    ``tol``, or after ``max_iterations`` with ``converged`` False. The entropy biases the result, by an amount of
    order epsilon, or epsilon^2 with ``compensate``; see the module. Raises ``HelmscopeError`` for weights that are
    negative or do not sum to 1, volumes that are not positive, nu < 0, tau or epsilon <= 0, and epsilon > 4 tau nu with
    ``compensate``.

    >>> from helmscope.meanfield import CircleGrid, Density
    >>> points, weights = Density.uniform(CircleGrid(degree=16)).cloud()
    >>> step = particle_jko_step(points, weights, lambda x: -x[:, 0], noise=0.5, tau=0.1, epsilon=0.02)
    >>> step.converged, bool(step.weights[0] > weights[0])  # drawn to x_0 = 1
    (True, True)
    """
    distance = Geodesic() if cost is None else cost
    if not isinstance(distance, Cost):
        raise HelmscopeError(
            f"cost is {short_repr(cost)}, but it must be Geodesic(), Chordal(), Euclidean() or another Cost"
        )
    y = distance.check(points, "points").detach().double()
    if y.ndim != 2:
        raise HelmscopeError(f"points has shape {tuple(y.shape)}, but it must be (n, d)")
    nu, tau = isotropic_nu(noise), check_real("tau", tau, above=0)
    warn_if_counted_twice(transported, nu)
    epsilon, tol = check_real("epsilon", epsilon, above=0), check_real("tol", tol, above=0)
    max_iterations = check_integer("max_iterations", max_iterations, at_least=1)
    if compensate and epsilon > 4 * tau * nu:
        raise HelmscopeError(
            f"epsilon is {epsilon:g}, but with compensate it must be at most 4 tau nu = {4 * tau * nu:g}, the "
            "diffusion that it stands for"
        )
    nu = nu - epsilon / (4 * tau) if compensate else nu
    a = _check_shares("weights", weights, len(y))
    x, a = _transport(y, a, transported, tau, distance)
    q = torch.full_like(a, 1 / len(y)) if volumes is None else _check_shares("volumes", volumes, len(y))
    if not bool((q > 0).all()):
        raise HelmscopeError(f"volumes has the value {float(q.min()):g}, but volumes must be positive")
    report = check_progress(progress)
    v = _energy_values(energy, y)
    costs = PairwiseCost.of(x, y, distance)
    log_a, log_q = log_weights(a), q.log()
    share = 2 * tau / (epsilon + 2 * tau * nu)
    f, g, b, error = torch.zeros_like(a), -share * epsilon * v, a, math.inf
    for done in range(1, max_iterations + 1):
        f = -epsilon * costs.log_sum_exp(log_q + g / epsilon, epsilon=epsilon, guess=-f / epsilon)
        s = epsilon * costs.transposed.log_sum_exp(log_a + f / epsilon, epsilon=epsilon)
        g = -share * (nu * s + epsilon * v)
        previous, b = b, torch.exp(log_q + (s + g) / epsilon)
        error = float((b - previous).abs().sum())
        report(done / max_iterations)
        if error <= tol:
            break
    mean_cost = costs.mean_cost(log_q + g / epsilon, epsilon=epsilon)[1]
    return ParticleStep(b / b.sum(), float(a @ mean_cost), done, error, error <= tol)


def _transport(
    y: Tensor, weights: Tensor, transported: object, tau: float, distance: Cost
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """The points and weights of T_# rho."""
    if transported is None:
        return y, weights
    if isinstance(transported, torch.Tensor) or (not callable(transported) and not isinstance(transported, Field)):
        return y, _check_shares("transported", transported, len(y))
    field = as_field(transported)
    if not distance.on_sphere or field.space is not StateSpace.SPHERE:
        raise HelmscopeError(
            f"transported is {field.name}, but a flow moves unit vectors only: use cost=Geodesic() and a field on the "
            "sphere, or pass the weights of T_# rho"
        )
    simulation = integrate(field, y, [tau], weights=weights if field.takes_weights else None)
    if not simulation.outcome.ok:
        raise HelmscopeError(f"transported leads to points that cannot be computed: {simulation.outcome}")
    return simulation.states[-1], weights


def _energy_values(energy: object, y: Tensor) -> Tensor:
    if energy is None:
        return torch.zeros_like(y[:, 0])
    values = energy(y) if callable(energy) else None
    if not isinstance(values, torch.Tensor) or values.shape != y[:, 0].shape or not bool(torch.isfinite(values).all()):
        raise HelmscopeError(
            f"energy gives {short_repr(values)}, but it must be a function that gives a finite number for each of "
            f"the {len(y)} points"
        )
    return values.double()


def _check_shares(name: str, values: object, size: int) -> Tensor:
    if not isinstance(values, torch.Tensor) or tuple(values.shape) != (size,) or not bool((values >= 0).all()):
        raise HelmscopeError(f"{name} is {short_repr(values)}, but it must be a tensor ({size},) of numbers >= 0")
    values = values.detach().double()
    if not abs(float(values.sum()) - 1) <= 1e-6:
        raise HelmscopeError(f"{name} sums to {float(values.sum()):.6g}, but it must sum to 1")
    return values / values.sum()
