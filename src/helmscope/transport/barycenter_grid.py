"""Barycenters on a fixed support: the weights w of given points x_i with the least cost to given clouds.

    min over w, pi_l of  sum_l lambda_l [<pi_l, c_l> + epsilon sum_ij pi_lij log(pi_lij / b_lj)],
    pi_l 1 = w,  pi_l^T 1 = b_l.

For epsilon = 0 it is a linear program. For epsilon > 0 the plans are scaled in turn to the marginals b_l and to their
geometric mean [Benamou, Carlier, Cuturi, Nenna & Peyre 2015, arXiv:1412.5154]:

    g_l = -epsilon log sum_i e^{(f_l - c_l) / epsilon},   s_l = log sum_j b_lj e^{(g_l - c_l) / epsilon},
    log w = sum_l lambda_l s_l,   f_l = epsilon (log w - s_l).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.runs.bar import shows_progress
from helmscope.transport.barycenter import Barycenter, check_members, remedy_epsilon
from helmscope.transport.cost import GEODESIC, Cost, check_cost
from helmscope.transport.sinkhorn_plan import Rules
from helmscope.transport.streaming import PairwiseCost, log_weights
from helmscope.types import HelmscopeError, check_real

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.transport.clouds import Clouds
    from helmscope.types import Progress
    from helmscope.types.progress import ProgressOption

MAX_VARIABLES = 2**19  # of the linear program


@shows_progress("barycenter")
@torch.no_grad()
def fixed_support_barycenter(
    points: Float[Tensor, "k d"],
    clouds: Sequence[Float[Tensor, "n d"]],
    cloud_weights: Sequence[Float[Tensor, " n"] | None] | None = None,
    *,
    barycentric_weights: Sequence[float] | None = None,
    epsilon: float | None = None,
    cost: Cost = GEODESIC,
    p: float = 2.0,
    tol: float = 1e-6,
    max_iterations: int = 1000,
    progress: ProgressOption = None,
) -> Barycenter:
    """Barycenter on the given ``points``, whose weights are computed, for the cost dist^p. ``cloud_weights`` are those
    of the clouds, one entry per cloud, None for equal ones. As everywhere the cost defaults to ``Geodesic()``; points
    of R^d need ``Euclidean()``.

    Without ``epsilon`` the weights are exact, by a linear program (HiGHS) for at most 2^19 pairs of points. With
    ``epsilon`` they minimize the cost with entropy (see the module), which blurs them; memory is then O(k + n). It
    stops when the marginals of the plans differ by at most ``tol`` (sum of absolute values, mean over clouds).
    ``barycentric_weights`` are the coefficients lambda_l of the clouds, default equal. ``value`` is sum_l lambda_l
    <pi_l, c_l>.

    >>> from helmscope.transport.cost import Euclidean
    >>> grid = torch.arange(5.0)[:, None]
    >>> fixed_support_barycenter(grid, [grid[:1], grid[4:]], cost=Euclidean()).weights
    tensor([0., 0., 1., 0., 0.])
    """
    distance = check_cost(cost)
    rules = Rules.checked(1.0 if epsilon is None else epsilon, distance, p, None, tol, max_iterations)
    pairs, shares = check_members(points, clouds, cloud_weights, barycentric_weights, distance)
    check_real("tol", tol, above=0)
    if epsilon is None:
        return _linear_program(pairs, shares, rules)
    found = _project(pairs, shares, rules, tol, progress)  # type: ignore[arg-type]
    if found.ok:
        return found
    remedy = remedy_epsilon(pairs, rules, lambda value: _project(pairs, shares, replace(rules, epsilon=value), tol).ok)
    return replace(found, remedy_epsilon=remedy)


def _project(
    pairs: list[Clouds], shares: list[float], rules: Rules, tol: float, progress: Progress | None = None
) -> Barycenter:
    """Scale the plans in turn to the marginals b_l and to their geometric mean."""
    epsilon = rules.epsilon
    costs = [PairwiseCost.of(pair.x, pair.y, rules.cost, rules.p) for pair in pairs]
    log_b = [log_weights(pair.b) for pair in pairs]
    f = [torch.zeros_like(pair.a) for pair in pairs]
    error = math.inf
    for done in range(1, rules.max_iterations + 1):
        g = [
            -epsilon * c.transposed.log_sum_exp(f_l / epsilon, epsilon=epsilon) for c, f_l in zip(costs, f, strict=True)
        ]
        sums = [
            c.log_sum_exp(log_b_l + g_l / epsilon, epsilon=epsilon)
            for c, log_b_l, g_l in zip(costs, log_b, g, strict=True)
        ]
        log_w = sum((share * s for share, s in zip(shares, sums, strict=True)), torch.zeros_like(sums[0]))
        weights = torch.softmax(log_w, -1)  # of sum 1 also before convergence
        gaps = [(torch.exp(f_l / epsilon + s) - weights).abs().sum() for f_l, s in zip(f, sums, strict=True)]
        error = float(sum(share * float(gap) for share, gap in zip(shares, gaps, strict=True)))
        if error <= tol or not math.isfinite(error):
            break
        f = [epsilon * (log_w - s) for s in sums]
        if progress:
            progress(done / rules.max_iterations)
    value = weights.new_zeros(())
    for c, log_b_l, f_l, g_l, share in zip(costs, log_b, f, g, shares, strict=True):
        log_sums, means = c.mean_cost(log_b_l + g_l / epsilon, epsilon=epsilon)
        value = value + share * (torch.exp(f_l / epsilon + log_sums) * means).sum()
    clouds = tuple(pair.y for pair in pairs)
    return Barycenter(pairs[0].x, weights, value, error <= tol, done, error, "marginal error", clouds=clouds)


def _linear_program(pairs: list[Clouds], shares: list[float], rules: Rules) -> Barycenter:
    """The exact weights: variables are the plans, row by row, and then w."""
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, hstack, kron, vstack

    k, sizes = len(pairs[0].x), [len(pair.y) for pair in pairs]
    if k * sum(sizes) > MAX_VARIABLES:
        raise HelmscopeError(
            f"points and clouds have {k} x {sum(sizes)} pairs, but the linear program is for at most 2^19: set epsilon"
        )
    objective, rows, targets = [], [], []
    for index, (pair, share) in enumerate(zip(pairs, shares, strict=True)):
        matrix = PairwiseCost.of(pair.x, pair.y, rules.cost, rules.p, stored=True).stored
        assert matrix is not None
        objective.append(share * matrix.double().cpu().numpy().ravel())
        m = sizes[index]
        before, after = k * sum(sizes[:index]), k * sum(sizes[index + 1 :])
        row_sums, column_sums = kron(eye_array(k), np.ones((1, m))), kron(np.ones((1, k)), eye_array(m))
        for block, of_w in ((row_sums, -eye_array(k)), (column_sums, np.zeros((m, k)))):
            size = block.shape[0]
            rows.append(hstack([_zeros(size, before), block, _zeros(size, after), of_w], format="csr"))
        masses = pair.b.double().cpu().numpy()
        targets += [np.zeros(k), masses / masses.sum()]
    objective.append(np.zeros(k))
    solution = linprog(
        np.concatenate(objective), A_eq=vstack(rows), b_eq=np.concatenate(targets), bounds=(0, None), method="highs"
    )
    if solution.status != 0:
        raise HelmscopeError(f"points and clouds define a linear program that HiGHS did not solve: {solution.message}")
    weights = torch.as_tensor(np.clip(solution.x[-k:], 0, None) + 0.0, device=pairs[0].a.device).to(pairs[0].a)
    residual = float(np.abs(solution.con).max())
    value = weights.new_tensor(solution.fun)
    clouds = tuple(pair.y for pair in pairs)
    return Barycenter(
        pairs[0].x, weights, value, True, int(solution.nit), residual, "constraint violation", clouds=clouds
    )


def _zeros(rows: int, columns: int) -> object:
    from scipy.sparse import coo_array

    return coo_array((rows, columns))
