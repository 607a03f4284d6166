"""Barycenters of clouds: the cloud with the least weighted sum of squared distances to given clouds.

    min over nu of  sum_l lambda_l W_2(nu, mu_l)^2          [Agueh & Carlier 2011].

``free_support_barycenter`` moves the points of nu at given weights; ``fixed_support_barycenter`` of ``barycenter_grid``
finds the weights of given points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.geometry import sphere
from helmscope.geometry.arithmetic import full_precision
from helmscope.runs.bar import shows_progress
from helmscope.transport.clouds import Clouds, check_clouds
from helmscope.transport.cost import GEODESIC, Cost, Geodesic, check_cost, power
from helmscope.transport.exact import solve_exactly
from helmscope.transport.sinkhorn_levels import TRIAL_SAMPLE, search_epsilon
from helmscope.transport.sinkhorn_plan import Rules, entropic_plan
from helmscope.transport.streaming import MAX_COORDINATES
from helmscope.types import HelmscopeError, Plottable, check_integer, check_real, pluralized, type_with_article

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.transport.plan import Plan
    from helmscope.types import Progress
    from helmscope.types.progress import ProgressOption

KARCHER_STEPS = 50
MAX_EXACT_PAIRS = 2**24  # pairs of points for which an exact plan is computed
PLAN_ERROR = "marginal error of a plan"


@dataclass(frozen=True, eq=False)
class Barycenter(Plottable):
    """A barycenter: points with weights, the weighted sum of transport costs, and how the solver ended.

    ``error`` is what was left when the solver stopped, and ``what`` names it: the movement of the points in the last
    iteration, or an error of the marginals. ``outcome`` says both in a sentence. If an entropic solver did not
    converge, ``remedy_epsilon`` is an epsilon that does, found by trying; 0 for clouds of more than 512 points.
    ``antipodal`` is the largest number, in any iteration, of pairs of points that exchange mass and are antipodal, for
    which the geodesic, and with it the barycenter, is not unique. ``clouds`` are the points of the given clouds.

    >>> from helmscope.transport.cost import Euclidean
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> free_support_barycenter(x, [x, x + 2], cost=Euclidean())
    <Barycenter of 2 points: value 1, converged in 2 iterations: movement 0>
    """

    points: Float[Tensor, "k d"]
    weights: Float[Tensor, " k"]
    value: Float[Tensor, ""]
    ok: bool
    iterations: int
    error: float
    what: str = "movement"
    antipodal: int = 0
    clouds: tuple[Float[Tensor, "n d"], ...] = ()
    remedy_epsilon: float = 0.0

    @property
    def outcome(self) -> str:
        """How the solver ended, in words, with a remedy."""
        ending = "converged in" if self.ok else "iteration limit reached after"
        text = f"{ending} {pluralized(self.iterations, 'iteration')}: {self.what} {self.error:.2g}"
        if not self.ok:
            remedies = [] if self.what == PLAN_ERROR else ["raise max_iterations or tol"]
            if self.remedy_epsilon:
                remedies.append(f"take epsilon >= {self.remedy_epsilon:.2g}")
            elif self.what == PLAN_ERROR:
                remedies.append("raise epsilon")
            text += ": " + ", or ".join(remedies)
        if self.antipodal:
            text += f"; {pluralized(self.antipodal, 'antipodal pair')}: not unique, one direction was chosen"
        return text

    def __repr__(self) -> str:
        return f"<Barycenter of {len(self.points)} points: value {float(self.value):.6g}, {self.outcome}>"


def check_members(
    points: object,
    clouds: object,
    cloud_weights: object,
    barycentric_weights: object,
    cost: Cost,
    point_weights: object = None,
) -> tuple[list[Clouds], list[float]]:
    """The pairs (points, cloud), checked, and the coefficients lambda_l, which are scaled to the sum 1.

    >>> from helmscope.transport.cost import Euclidean
    >>> pairs, barycentric_weights = check_members(torch.zeros(1, 1), [torch.ones(2, 1)] * 2, None, [1, 3], Euclidean())
    >>> pairs[0].b, barycentric_weights
    (tensor([0.5000, 0.5000]), [0.25, 0.75])
    """
    if not isinstance(clouds, Sequence) or not clouds:
        found = "empty" if isinstance(clouds, Sequence) else type_with_article(clouds)
        raise HelmscopeError(f"clouds is {found}, but it must be a list of at least one cloud")
    each_weights = [None] * len(clouds) if cloud_weights is None else cloud_weights
    shares = [1.0] * len(clouds) if barycentric_weights is None else barycentric_weights
    for name, given in (("cloud_weights", each_weights), ("barycentric_weights", shares)):
        if not isinstance(given, Sequence) or len(given) != len(clouds):
            found = f"has length {len(given)}" if isinstance(given, Sequence) else f"is {type_with_article(given)}"
            raise HelmscopeError(
                f"{name} {found}, but it must be a list with one entry for each of the {len(clouds)} clouds"
            )
    numbers = [check_real(f"barycentric_weights[{k}]", share, at_least=0) for k, share in enumerate(list(shares))]  # type: ignore[call-overload]
    if sum(numbers) <= 0:
        raise HelmscopeError(f"barycentric_weights is {numbers}, but its sum must be > 0")
    pairs = [
        # totals may differ, because each cloud is a probability measure
        _normalized(
            check_clouds(
                points,
                cloud,
                point_weights,
                masses,
                cost=cost,
                balanced=False,
                names=("points", f"clouds[{k}]", "point_weights", f"cloud_weights[{k}]"),
            )
        )
        for k, (cloud, masses) in enumerate(zip(clouds, each_weights, strict=True))  # type: ignore[call-overload]
    ]
    if pairs[0].x.ndim != 2:
        raise HelmscopeError(f"points has shape {tuple(pairs[0].x.shape)}, but it must be one cloud (k, d)")
    return pairs, [number / sum(numbers) for number in numbers]


def _normalized(pair: Clouds) -> Clouds:
    return Clouds(pair.x, pair.y, pair.a / pair.a.sum(-1, keepdim=True), pair.b / pair.b.sum(-1, keepdim=True))


@shows_progress("barycenter")
@torch.no_grad()
def free_support_barycenter(
    points: Float[Tensor, "k d"],
    clouds: Sequence[Float[Tensor, "n d"]],
    cloud_weights: Sequence[Float[Tensor, " n"] | None] | None = None,
    *,
    barycentric_weights: Sequence[float] | None = None,
    point_weights: Float[Tensor, " k"] | None = None,
    epsilon: float | None = None,
    cost: Cost = GEODESIC,
    tol: float = 1e-6,
    max_iterations: int = 100,
    progress: ProgressOption = None,
) -> Barycenter:
    """Barycenter with k moving points of fixed ``point_weights``, started from ``points`` [Cuturi & Doucet 2014,
    arXiv:1310.4375]. ``cloud_weights`` are those of the clouds, one entry per cloud, None for equal ones.

    Each iteration computes a plan from the points to every cloud, and moves each point to the mean of its targets, for
    which the sum of costs is least at these plans: the value never increases with exact plans. It ends at a fixed
    point, which need not be the global minimum: start from several ``points``, such as a sample of one cloud. For
    ``Geodesic()``, the default, the mean is the Karcher mean; for ``Chordal()`` it is normalized, and points of R^d
    need ``Euclidean()``. ``barycentric_weights`` are the lambda_l,
    default equal. Plans are exact (through POT) or, with ``epsilon``, entropic, which pulls the points together.
    Iterations stop when no point moves by more than ``tol``.

    Where a point and its target are antipodal the direction is that of ``geometry.sphere.log``, and ``antipodal``
    counts them. A chordal mean 0 leaves its point where it is.

    >>> from helmscope.transport.cost import Euclidean
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> free_support_barycenter(x, [x, x + 2], cost=Euclidean()).points
    tensor([[1.],
            [2.]])
    """
    distance = check_cost(cost)
    rules = Rules.checked(1.0 if epsilon is None else epsilon, distance, 2, None, None, 1000)
    check_real("tol", tol, above=0)
    check_integer("max_iterations", max_iterations, at_least=1)
    pairs, shares = check_members(points, clouds, cloud_weights, barycentric_weights, distance, point_weights)
    solver = _Solver(rules, exact=epsilon is None)
    found = _move(pairs, shares, solver, tol, max_iterations, progress)  # type: ignore[arg-type]
    if found.ok or epsilon is None:
        return found

    def converges(value: float) -> bool:
        larger = _Solver(replace(rules, epsilon=value), exact=False)
        return _move(pairs, shares, larger, tol, max_iterations).ok

    return replace(found, remedy_epsilon=remedy_epsilon(pairs, rules, converges))


def remedy_epsilon(pairs: list[Clouds], rules: Rules, converges: Callable[[float], bool]) -> float:
    """An epsilon for which a barycenter converges, found by trying; 0 for more than 512 points."""
    if max(len(points) for pair in pairs for points in (pair.x, pair.y)) > TRIAL_SAMPLE:
        return 0.0
    largest = max(float(power(rules.cost.matrix(pair.x, pair.y), rules.p).amax()) for pair in pairs)
    return search_epsilon(converges, start=largest, above=rules.epsilon)


def _move(
    pairs: list[Clouds],
    shares: list[float],
    solver: _Solver,
    tol: float,
    max_iterations: int,
    progress: Progress | None = None,
) -> Barycenter:
    """Move the points, those of the first pair, until none moves by more than the tolerance."""
    distance = solver.rules.cost
    x, movement, antipodal = pairs[0].x, float("inf"), 0
    for done in range(1, max_iterations + 1):
        pairs = [Clouds(x, pair.y, pair.a, pair.b) for pair in pairs]
        plans = solver.plans(pairs)
        antipodal = max(antipodal, _count_antipodal(pairs, plans)) if distance.on_sphere else 0
        moved = _means(x, pairs, plans, shares, distance)
        movement = float(distance.distance(x, moved).amax())
        x = moved
        if progress:
            progress(done / max_iterations)
        if movement <= tol:
            break
    pairs = [Clouds(x, pair.y, pair.a, pair.b) for pair in pairs]
    solver.plans(pairs)
    value = (x.new_tensor(shares) * torch.stack(solver.costs)).sum()
    still = movement <= tol
    what, error = (PLAN_ERROR, solver.error) if still and not solver.ok else ("movement", movement)
    clouds = tuple(pair.y for pair in pairs)
    return Barycenter(x, pairs[0].a, value, still and solver.ok, done, error, what, antipodal, clouds)


class _Solver:
    """Plans from the points to every cloud; entropic ones start from the potentials of the previous iteration."""

    def __init__(self, rules: Rules, *, exact: bool) -> None:
        self.rules, self.exact, self.ok, self.error = rules, exact, True, 0.0
        self.costs: list[Tensor] = []
        self.potentials: list[Tensor | None] = []

    def plans(self, pairs: list[Clouds]) -> list[Tensor]:
        """The plans as matrices; ``costs`` are their transport costs, ``ok`` is whether all of them converged, and
        ``error`` the largest error of their marginals.
        """
        if self.exact:
            solutions = [_exact_plan(pair, self.rules.cost) for pair in pairs]
        else:
            starts = self.potentials or [None] * len(pairs)
            solutions = [
                entropic_plan(pair, self.rules, start=start, search_remedy=False)
                for pair, start in zip(pairs, starts, strict=True)
            ]
            self.potentials = [solution.potentials[1] for solution in solutions]
        self.ok = all(solution.ok for solution in solutions)
        self.error = max(error for solution in solutions for error in solution.marginal_errors)
        self.costs = [solution.value for solution in solutions]
        return [solution.matrix for solution in solutions]


def _exact_plan(pair: Clouds, cost: Cost) -> Plan:
    """An optimal plan for the squared distance."""
    n, m = len(pair.x), len(pair.y)
    if n * m > MAX_EXACT_PAIRS:
        raise HelmscopeError(
            f"points and a cloud have {n} x {m} pairs, but exact plans are for at most 2^24: set epsilon"
        )
    return solve_exactly(pair, cost, 2.0)


@full_precision
def _means(x: Tensor, pairs: list[Clouds], plans: list[Tensor], shares: list[float], cost: Cost) -> Tensor:
    """Where each point has the least cost to its targets; points of weight 0 stay."""
    if isinstance(cost, Geodesic):
        return _karcher_means(x, pairs, plans, shares)
    total, mass = torch.zeros_like(x), torch.zeros_like(x[:, :1])
    for pair, plan, share in zip(pairs, plans, shares, strict=True):
        total += share * (plan @ pair.y)
        mass += share * plan.sum(-1, keepdim=True)
    means = total / torch.where(mass > 0, mass, 1.0)
    if not cost.on_sphere:
        return torch.where(mass > 0, means, x)
    length = torch.linalg.vector_norm(means, dim=-1, keepdim=True)
    defined = length > 8 * torch.finfo(x.dtype).eps
    return torch.where(defined, means / torch.where(defined, length, 1.0), x)


def _karcher_means(x: Tensor, pairs: list[Clouds], plans: list[Tensor], shares: list[float]) -> Tensor:
    """The point with the least weighted sum of squared angles to its targets, by x <- exp_x(mean of log_x y)."""
    start = x
    for _ in range(KARCHER_STEPS):
        total, mass = torch.zeros_like(x), torch.zeros_like(x[:, :1])
        for pair, plan, share in zip(pairs, plans, shares, strict=True):
            rows = max(1, MAX_COORDINATES // (len(pair.y) * x.shape[-1]))
            for first in range(0, len(x), rows):
                part = slice(first, first + rows)
                tangents = sphere.log(x[part, None], pair.y)
                total[part] += share * (plan[part, :, None] * tangents).sum(1)
            mass += share * plan.sum(-1, keepdim=True)
        step = total / torch.where(mass > 0, mass, 1.0)
        x = sphere.retract(sphere.exp(x, step))
        if float(step.abs().amax()) <= 8 * torch.finfo(x.dtype).eps:
            break
    return torch.where(mass > 0, x, start)


def _count_antipodal(pairs: list[Clouds], plans: list[Tensor]) -> int:
    """The pairs that exchange mass and whose angle is pi up to rounding."""
    count = 0
    for pair, plan in zip(pairs, plans, strict=True):
        rows, columns = (plan > 1e-12).nonzero(as_tuple=True)
        gap = torch.linalg.vector_norm(pair.x[rows] + pair.y[columns], dim=-1)
        count += int((gap <= 16 * torch.finfo(gap.dtype).eps).sum())
    return count
