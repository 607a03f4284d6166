"""Exact optimal transport, a linear program solved by POT's network simplex (Bonneel et al. 2011):

    min over pi >= 0 of sum_ij pi_ij dist(x_i, y_j)^p       where sum_j pi_ij = a_i and sum_i pi_ij = b_j
    = max over f, g of sum_i a_i f_i + sum_j b_j g_j        where f_i + g_j <= dist(x_i, y_j)^p.

Both sums are computed, and their difference, the duality gap, bounds the error.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from helmscope.runs.bar import shows_progress
from helmscope.transport.clouds import Clouds, check_clouds
from helmscope.transport.cost import GEODESIC, Cost, check_power, power
from helmscope.transport.plan import PlanStatus, single_problem, sparse_plan
from helmscope.types import HelmscopeError, MissingExtra, check_integer, check_memory, check_progress

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import NDArray
    from torch import Tensor

    from helmscope.transport.plan import Plan
    from helmscope.types.progress import ProgressOption

POT_OPTIMAL = 1  # the result code of ot.emd
PIVOTS = 10_000_000


@shows_progress("optimal transport")
def exact_plan(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    x_weights: Float[Tensor, " n"] | None = None,
    y_weights: Float[Tensor, " m"] | None = None,
    *,
    p: float = 2.0,
    cost: Cost = GEODESIC,
    max_iterations: int = PIVOTS,
    progress: ProgressOption = None,
) -> Plan:
    """The optimal plan for dist^p between two weighted clouds, p >= 1, by POT's network simplex.

    It is computed in float64 on the CPU, needs memory for n x m numbers and takes about n^3 operations at worst (2,000
    points: seconds). The potentials are made feasible, so that the duality gap bounds the error. Distances and plans
    are defined for antipodal points too; where two plans are optimal, one of them is returned.

    ``value`` is differentiable with respect to positions, the plan held fixed, and by weights, by the potentials; where
    the optimum is not unique this is one of the subgradients. Raises ``HelmscopeError`` for batch axes, p < 1 and
    whatever ``check_clouds`` does not accept, ``MissingExtra`` without POT. Stopping at ``max_iterations`` is the
    status PIVOT_LIMIT, and the plan then need not be optimal. ``progress`` is called once, at the end: the share of the
    work done is not known before.

    >>> import torch
    >>> plan = exact_plan(torch.eye(3), -torch.eye(3))
    >>> plan
    <Plan of 3 x 3 points: W_2 1.5708, optimal: an exact plan with duality gap ...>
    """
    p = check_power(p)
    limit = check_integer("max_iterations", max_iterations, at_least=1)
    clouds = single_problem(check_clouds(x, y, x_weights, y_weights, cost=cost))
    plan = solve_exactly(clouds, cost, p, limit)
    check_progress(progress)(1.0)
    return plan


def solve_exactly(clouds: Clouds, cost: Cost, p: float, limit: int = PIVOTS) -> Plan:
    """``exact_plan`` of clouds that are checked already."""
    ot = _pot()
    n, m = clouds.a.shape[-1], clouds.b.shape[-1]
    check_memory(f"x has {n} points and y {m}", 4 * n * m)
    double = clouds.double()
    x, y, a, b = (part.detach().cpu() for part in (double.x, double.y, double.a, double.b))
    costs = power(cost.matrix(x, y), p).numpy()
    _check_finite(costs, p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the result code says the same
        masses, log = ot.emd(a.numpy(), b.numpy(), costs, numItermax=limit, log=True)
    optimal = log["result_code"] == POT_OPTIMAL
    i, j = np.nonzero(masses)
    return sparse_plan(
        clouds,
        (i, j, masses[i, j]),
        _feasible(np.asarray(log["u"]), costs, (a > 0).numpy(), (b > 0).numpy()),
        cost=cost,
        p=p,
        status=PlanStatus.OPTIMAL if optimal else PlanStatus.PIVOT_LIMIT,
        iterations=0 if optimal else limit,
    )


def exact_cost(clouds: Clouds, cost: Cost, p: float) -> Float[Tensor, ""]:
    """W_p^p of one pair of clouds, float64 and differentiable; the clouds are checked already."""
    if _is_assignment(clouds):
        double = clouds.double()
        costs = power(cost.matrix(double.x.detach().cpu(), double.y.detach().cpu()), p).numpy()
        _, partner = linear_sum_assignment(_check_finite(costs, p))  # needs no POT, and is faster for small clouds
        return power(cost.distance(double.x, double.y[torch.from_numpy(partner).to(double.y.device)]), p).mean()
    plan = solve_exactly(clouds, cost, p)
    if not plan.ok:
        raise HelmscopeError(f"x has {len(clouds.x)} points and y {len(clouds.y)}, but their plan is not optimal: "
                             f"{plan.outcome} of exact_plan")  # fmt: skip
    return plan.objective


def _is_assignment(clouds: Clouds) -> bool:
    """Whether an optimal plan is a permutation: as many points on both sides, all of the same fixed weight."""
    a, b = clouds.a, clouds.b
    if a.shape != b.shape or a.requires_grad or b.requires_grad:
        return False
    return bool((a == b[0]).all() & (b == b[0]).all())


def _check_finite(costs: NDArray[np.float64], p: float) -> NDArray[np.float64]:
    if not np.isfinite(costs).all():
        raise HelmscopeError(f"p is {p:g}, but dist^p must not overflow float64: take a smaller p or scale the points")
    return costs


def _feasible(
    f: NDArray[np.float64], costs: NDArray[np.float64], x_support: NDArray[np.bool_], y_support: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The potential f and its c-transform g, with f_i + g_j <= c_ij wherever i or j has mass."""
    g = (costs[x_support] - f[x_support, None]).min(0)
    return (costs[:, y_support] - g[y_support]).min(1), g


def _pot() -> Any:
    """POT, imported only when it is needed: that takes seconds."""
    try:
        return import_module("ot")
    except ImportError:
        raise MissingExtra("POT", "ot") from None
