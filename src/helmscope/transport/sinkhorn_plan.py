"""Entropic optimal transport between two clouds of weighted points [Cuturi 2013, arXiv:1306.0895].

    min over pi of  <pi, c> + epsilon KL(pi | a b^T),     pi 1 = a,  pi^T 1 = b,     c_ij = dist(x_i, y_j)^p,

with the solution pi_ij = a_i b_j e^{(f_i + g_j - c_ij) / epsilon}, computed in the log domain for any epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from helmscope.runs.bar import shows_progress
from helmscope.transport.clouds import Clouds, check_clouds
from helmscope.transport.cost import GEODESIC, Cost, check_cost
from helmscope.transport.plan import Plan, PlanStatus
from helmscope.transport.sinkhorn_iteration import Entropic, Potentials
from helmscope.transport.sinkhorn_levels import converging_epsilon, solve
from helmscope.transport.streaming import PairwiseCost, log_weights
from helmscope.transport.unbalanced import conjugate, damping, relative_entropy, relaxed_marginal
from helmscope.types import HelmscopeError, check_integer, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import Progress
    from helmscope.types.progress import ProgressOption

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
MIN_TOLERANCE = 64  # units of rounding


@shows_progress("Sinkhorn")
def sinkhorn(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    x_weights: Float[Tensor, " n"] | None = None,
    y_weights: Float[Tensor, " m"] | None = None,
    *,
    epsilon: float,
    cost: Cost = GEODESIC,
    p: float = 2.0,
    reach: float | None = None,
    tol: float | None = None,
    max_iterations: int = 1000,
    progress: ProgressOption = None,
) -> Plan:
    """Entropic transport plan between two clouds: min <pi, c> + epsilon KL(pi | a b^T), c = dist^p, ``cost`` the
    distance.

    As for ``w2``, the cost defaults to ``Geodesic()``, the angle between unit vectors; points of R^d need
    ``Euclidean()``. Memory is O(n + m): beyond 2^22 pairs neither c nor pi is stored, and ``Plan.apply`` computes pi
    block by block as well. For |x - y|^2, that is for ``Euclidean()``, or ``Chordal()`` on the sphere, an iteration
    costs two passes of attention without values; other costs, ``Geodesic()`` among them, take several times longer.
    Large problems start from the potentials of random samples.

    The iteration stops when the marginal error sum_j |sum_i pi_ij - b_j| is at most ``tol`` (default 1e-6, in
    float32 1e-4), or after ``max_iterations``. In the latter case ``status`` is ITERATION_LIMIT, and
    ``remedy_epsilon`` is an epsilon that converges: found by trying, for clouds of more than 512 points on samples.
    ``value`` is <pi, c>; ``objective`` includes the entropy, and ``dual`` is the value of the dual problem. The gap
    between them is <pi 1 - a, f> + <pi^T 1 - b, g>: 0 at the optimum, of either sign before, because pi then violates
    its marginals.

    ``reach`` relaxes the marginals: deviations cost rho KL(pi 1 | a) + rho KL(pi^T 1 | b), rho = reach^p, so that mass
    moves about as far as ``reach`` at most, and the masses of x and y may differ. The marginal errors are then the
    distances to the optimal marginals a e^{-f/rho} and b e^{-g/rho}, relative to the mass.

    ``objective`` and ``dual`` are differentiable with respect to points and weights, once, by the envelope theorem: the
    derivatives are those at the optimum, exact up to the marginal error. ``value``, ``potentials`` and ``couple`` are
    constants.

    Raises ``HelmscopeError`` for invalid clouds or masses, points that do not fit the cost, epsilon <= 0, p < 1,
    reach <= 0, or a tolerance below rounding.

    >>> from helmscope.transport.cost import Euclidean
    >>> x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [2.0]])
    >>> plan = sinkhorn(x, y, epsilon=0.5, cost=Euclidean())
    >>> plan.status.name, plan.matrix.round(decimals=3)
    ('CONVERGED', tensor([[0.4910, 0.0090],
            [0.0090, 0.4910]]))
    """
    rules = Rules.checked(epsilon, cost, p, reach, tol, max_iterations)
    clouds = check_clouds(x, y, x_weights, y_weights, cost=rules.cost, balanced=reach is None)
    return entropic_plan(clouds, rules, progress=progress)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Rules:
    """The checked arguments of an entropic problem; ``rho`` is infinite if marginals are exact."""

    epsilon: float
    cost: Cost
    p: float
    rho: float
    tol: float | None
    max_iterations: int

    @classmethod
    def checked(
        cls, epsilon: object, cost: object, p: object, reach: object, tol: object, max_iterations: object
    ) -> Rules:
        """The arguments, or ``HelmscopeError``.

        >>> Rules.checked(1, GEODESIC, 2, None, None, 10).rho
        inf
        """
        power = check_real("p", p, at_least=1)
        return cls(
            check_real("epsilon", epsilon, above=0),
            check_cost(cost),
            power,
            math.inf if reach is None else check_real("reach", reach, above=0) ** power,
            None if tol is None else check_real("tol", tol, above=0),
            check_integer("max_iterations", max_iterations, at_least=1),
        )

    def tolerance_for(self, dtype: torch.dtype) -> float:
        """The tolerance, or its default for this dtype; raises ``HelmscopeError`` if it is below rounding."""
        if self.tol is None:
            return TOLERANCE[dtype]
        least = MIN_TOLERANCE * torch.finfo(dtype).eps
        if self.tol < least:
            raise HelmscopeError(f"tol is {self.tol:g}, but for {dtype} it must be at least {least:.2g}")
        return self.tol


def entropic_plan(
    clouds: Clouds,
    rules: Rules,
    *,
    symmetric: bool = False,
    start: Tensor | None = None,
    search_remedy: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """The plan of checked clouds; ``symmetric`` says that both are the same, ``start`` is a starting value of g."""
    if clouds.x.ndim != 2:
        raise HelmscopeError(f"x has shape {tuple(clouds.x.shape)}, but it must be one cloud (n, d)")
    epsilon = rules.epsilon
    costs = PairwiseCost.of(clouds.x, clouds.y, rules.cost, rules.p)
    problem = Entropic(costs, clouds.a.detach(), clouds.b.detach(), rules.rho, symmetric)
    limits: Any = {"tol": rules.tolerance_for(clouds.x.dtype), "max_iterations": rules.max_iterations}
    potentials = solve(problem, epsilon=epsilon, start=start, progress=progress, **limits)
    status, remedy = PlanStatus.CONVERGED, 0.0
    if not potentials.converged:
        status = PlanStatus.ITERATION_LIMIT if potentials.finite else PlanStatus.NOT_FINITE
        remedy = converging_epsilon(problem, epsilon=epsilon, **limits) if search_remedy else 0.0
    evaluation = Evaluation.of(problem, potentials, epsilon)
    coupling = _Coupling(problem, potentials, epsilon)
    correction = _first_order_terms(clouds, problem, coupling, evaluation)
    return Plan(
        clouds=clouds,
        cost=rules.cost,
        p=rules.p,
        epsilon=epsilon,
        value=evaluation.value,
        objective=evaluation.objective + correction,
        dual=evaluation.dual + correction,
        potentials=(potentials.f, potentials.g),
        marginal_errors=evaluation.errors,
        status=status,
        iterations=potentials.iterations,
        apply=coupling,
        remedy_epsilon=remedy,
    )


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The value, objective and dual of potentials, the marginal errors, and the marginals divided by a and b."""

    value: Float[Tensor, ""]
    objective: Float[Tensor, ""]
    dual: Float[Tensor, ""]
    errors: tuple[float, float]
    row_ratio: Float[Tensor, " n"]
    column_ratio: Float[Tensor, " m"]

    @classmethod
    @torch.no_grad()
    def of(cls, problem: Entropic, potentials: Potentials, epsilon: float) -> Evaluation:
        """Two passes over all pairs; sums over points are in float64."""
        f, g, rho = potentials.f, potentials.g, problem.rho
        guess = -f / (epsilon * damping(rho, epsilon))
        logits = log_weights(problem.b) + g / epsilon
        log_sums, mean_costs = problem.costs.mean_cost(logits, epsilon=epsilon, guess=guess)
        row_ratio = torch.exp(f / epsilon + log_sums)
        column_ratio = torch.exp((g - problem.transposed.softmin(f, epsilon, g)) / epsilon)
        a, b, f64, g64 = (part.double() for part in (problem.a, problem.b, f, g))
        r, s = a * row_ratio, b * column_ratio
        value = (r * mean_costs).sum()
        excess = epsilon * (r.sum() - a.sum() * b.sum())
        objective = (r * f64).sum() + (s * g64).sum() - excess
        if not math.isinf(rho):
            objective = objective + rho * (relative_entropy(r, a) + relative_entropy(s, b))
        dual = (a * conjugate(f64, rho)).sum() + (b * conjugate(g64, rho)).sum() - excess
        errors = tuple(
            float((w * (ratio - relaxed_marginal(potential, rho)).abs()).sum() / w.sum())
            for w, ratio, potential in ((a, row_ratio, f64), (b, column_ratio, g64))
        )
        value, objective, dual = (number.to(f) for number in (value, objective, dual))
        return cls(value, objective, dual, (errors[0], errors[1]), row_ratio, column_ratio)


@dataclass(frozen=True, eq=False)
class _Coupling:
    """sum_j pi_ij values_j for pi_ij = a_i b_j e^{(f_i + g_j - c_ij) / epsilon}, without forming pi."""

    problem: Entropic
    potentials: Potentials
    epsilon: float

    @property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """The logarithms of the factors of pi_ij that depend on j, and on i."""
        f, g = self.potentials.f, self.potentials.g
        return log_weights(self.problem.b) + g / self.epsilon, log_weights(self.problem.a) + f / self.epsilon

    @torch.no_grad()
    def __call__(self, values: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        return self.problem.costs.couple(*self._factors, values, epsilon=self.epsilon)

    @torch.no_grad()
    def gradients(self, *, x: bool, y: bool) -> tuple[Tensor | None, Tensor | None]:
        """The derivatives of <pi, c> by x and by y with pi held constant."""
        of_j, of_i = self._factors
        costs = self.problem.costs
        return (
            costs.gradient(of_j, of_i, epsilon=self.epsilon) if x else None,
            costs.transposed.gradient(of_i, of_j, epsilon=self.epsilon) if y else None,
        )


def _first_order_terms(clouds: Clouds, problem: Entropic, coupling: _Coupling, evaluation: Evaluation) -> Tensor:
    """A tensor of value 0 whose derivatives are those of the dual by points and masses at fixed potentials, which are
    those of the optimum by the envelope theorem.
    """
    f, g, epsilon = coupling.potentials.f, coupling.potentials.g, coupling.epsilon
    total = f.new_zeros(())
    if not torch.is_grad_enabled():
        return total
    gradients = coupling.gradients(x=clouds.x.requires_grad, y=clouds.y.requires_grad)
    slopes = (
        conjugate(potential, problem.rho) - epsilon * (ratio - other.sum())
        for potential, ratio, other in ((f, evaluation.row_ratio, problem.b), (g, evaluation.column_ratio, problem.a))
    )
    for inputs, slope in zip((clouds.x, clouds.y, clouds.a, clouds.b), (*gradients, *slopes), strict=True):
        if inputs.requires_grad and slope is not None:
            total = total + (slope * (inputs - inputs.detach())).sum()
    return total
