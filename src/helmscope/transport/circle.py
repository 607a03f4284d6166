"""Optimal transport on the circle S^1 with the cost angle^p, p >= 1, in O(n log n).

Cut the circle open and repeat both clouds with period 2 pi. A plan that moves mass in order couples the quantile s of
the first cloud with the quantile s + theta of the second, and the best shift theta is optimal among all plans
(Delon, Salomon and Sobolevski 2010, doi:10.1137/090772708):

    W_p(mu, nu)^p = min over theta of C(theta) = int_0^1 |Q_mu(s) - Q_nu(s + theta)|^p ds.

C is convex and piecewise linear. Its slope costs O(n), and the search for its sign change takes a few of them, because
a search among some thousand quantiles of both clouds finds where to begin. For n = m equal weights the kinks of C are
the multiples of 1/n, and the search is one for an integer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from helmscope.geometry.harmonics import circle_angle
from helmscope.transport.bracket import Bracket
from helmscope.transport.clouds import Clouds, check_clouds
from helmscope.transport.cost import Geodesic, check_power
from helmscope.transport.line import (
    LEVEL_ROUNDING,
    SortedRows,
    Staircase,
    merge_levels,
    moved_cost,
    needs_gradient,
    path_cost,
    path_potentials,
    power_of,
    rows_of,
    staircase,
    take,
)
from helmscope.transport.plan import PlanStatus, single_problem, sparse_plan, with_gradient
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import NDArray
    from torch import Tensor

    from helmscope.transport.line import Indices, Rows
    from helmscope.transport.plan import Plan

TURN = 2 * math.pi
COARSE = 4096  # quantiles that locate the shift
LONG = 4 * COARSE  # clouds of at least this many points are first compared by their quantiles
ATOMS_PER_CHUNK = 1 << 22  # atoms whose systems are solved together
ACCURACY = 1e-12  # of W_p^p, relative
LARGEST_POWER = 175  # the search meets angles of a few turns, and 8 turns to this power still fit in float64


def circle_plan(
    x: Float[Tensor, "n 2"],
    y: Float[Tensor, "m 2"],
    x_weights: Float[Tensor, " n"] | None = None,
    y_weights: Float[Tensor, " m"] | None = None,
    *,
    p: float = 2.0,
) -> Plan:
    """The optimal plan for angle^p between weighted points of the circle, p >= 1, in O(n log n).

    It is computed in float64 on the CPU and has at most n + m entries. Its potentials are feasible, so the duality gap
    bounds its error. Raises ``HelmscopeError`` for points that are not unit vectors of R^2, batch axes and whatever
    ``check_clouds`` does not accept.

    >>> plan = circle_plan(torch.eye(2), -torch.eye(2))
    >>> plan.value.sqrt(), plan.matrix
    (tensor(1.5708), tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]]))
    """
    p = check_power(p)
    clouds = single_problem(check_clouds(x, y, x_weights, y_weights, cost=Geodesic()))
    if clouds.x.shape[-1] != 2:
        raise HelmscopeError(f"x has dimension {clouds.x.shape[-1]}, but points of the circle have dimension 2")
    problem = _problem(clouds.double(), p)
    solution = _solve(problem)
    path = problem.path(solution.best)
    (i, j), (f, g) = problem.pairs(path), _potentials(problem, solution)
    return sparse_plan(
        clouds, (i[0], j[0], path.mass[0]), (f[0], g[0]), cost=Geodesic(), p=p, status=PlanStatus.OPTIMAL
    )


def circle_cost(clouds: Clouds, p: float) -> Float[Tensor, "*batch"]:
    """W_p^p on the circle for every system of a batch, float64 and differentiable; the clouds are checked already."""
    clouds = clouds.double()
    batch, atoms = clouds.x.shape[:-2], clouds.a.shape[-1] + clouds.b.shape[-1]
    systems = Clouds(
        clouds.x.reshape(-1, *clouds.x.shape[-2:]),
        clouds.y.reshape(-1, *clouds.y.shape[-2:]),
        clouds.a.reshape(-1, clouds.a.shape[-1]),
        clouds.b.reshape(-1, clouds.b.shape[-1]),
    )
    size = max(1, ATOMS_PER_CHUNK // atoms)
    parts = [
        _rows_cost(Clouds(*(part[begin : begin + size] for part in (systems.x, systems.y, systems.a, systems.b))), p)
        for begin in range(0, len(systems.x), size)
    ]
    return torch.cat(parts).reshape(batch) if parts else clouds.x.new_zeros(batch, dtype=torch.float64)


def _rows_cost(clouds: Clouds, p: float) -> Float[Tensor, " rows"]:
    problem = _problem(clouds, p)
    solution = _solve(problem)
    value = torch.from_numpy(solution.value).to(clouds.x.device)
    if not needs_gradient(clouds):
        return value
    path = problem.path(solution.best)
    moving = circle_angle(clouds.x), circle_angle(clouds.y)
    transport = moved_cost(path.mass, problem.displacement(path), problem.pairs(path), moving, p)
    by_weights = clouds.a.requires_grad or clouds.b.requires_grad
    return with_gradient(value, transport, clouds, _potentials(problem, solution) if by_weights else None)


class _Problem(ABC):
    """Sorted angles of both clouds, and C as a function of the shift; one system per row."""

    resolution: float  # the smallest meaningful difference of two shifts
    turn: float  # the shift by a whole turn

    def __init__(self, x: SortedRows, y: SortedRows, p: float) -> None:
        self.x, self.y, self.p = x, y, p
        self.n, self.m = x.values.shape[-1], y.values.shape[-1]

    @abstractmethod
    def slope(self, shift: Rows) -> Rows:
        """The derivative of C from the right."""

    @abstractmethod
    def value(self, shift: Rows) -> Rows:
        """C."""

    @abstractmethod
    def path(self, shift: Rows) -> Staircase:
        """The coupling of a shift."""

    @abstractmethod
    def dual_paths(self, low: Rows, high: Rows) -> tuple[Staircase, Staircase]:
        """Couplings with slopes <= 0 and >= 0, between whose shifts the minimum is."""

    @abstractmethod
    def quantiles(self, count: int) -> tuple[Rows, Rows]:
        """The quantiles (k + 1/2) / count of both clouds."""

    def displacement(self, path: Staircase) -> Rows:
        """x_i - y_j at every step, lifted to the line."""
        x = np.concatenate([self.x.values, self.x.values[:, :1] + TURN], -1)
        return take(x, path.i) - take(self.y_from(path.first, self.m + 1), path.j)

    def y_from(self, first: NDArray[np.int64], count: int) -> Rows:
        """count <= m + 1 atoms of y, beginning with ``first``, lifted to the line."""
        turns = first // self.m
        lifted = _window(self._periods, count, first - self.m * turns)
        lifted += TURN * turns[:, None]
        return lifted

    @cached_property
    def _periods(self) -> Rows:
        y = self.y.values
        return np.concatenate([y, y + TURN, y[:, :1] + 2 * TURN], -1)

    def pairs(self, path: Staircase) -> tuple[Indices, Indices]:
        """The atoms that a coupling pairs, numbered as before sorting."""
        return take(self.x.order, path.i % self.n), take(self.y.order, (path.first[:, None] + path.j) % self.m)


class _AnyMasses(_Problem):
    """Any weights; the shift is theta."""

    resolution, turn = 2.0**-51, 1.0

    def slope(self, shift: Rows) -> Rows:
        """sum_j |Q(B_j - theta) - y_(j+1)|^p - |Q(B_j - theta) - y_j|^p, B_j the levels of y, Q the quantiles of x."""
        levels, first = self._shifted_levels(shift)
        quantiles = take(self.x.values, np.minimum(_ranks(levels, self.x.levels), self.n - 1))
        return _cost_change(quantiles, self.y_from(first, self.m + 1), self.p)

    def value(self, shift: Rows) -> Rows:
        """The cost of the coupling."""
        path = self.path(shift)
        return path_cost(path, self.displacement(path), self.p)

    def path(self, shift: Rows) -> Staircase:
        """Merge the levels of both clouds."""
        levels, first = self._shifted_levels(shift)
        return merge_levels(self.x.levels, levels, first)

    def _shifted_levels(self, shift: Rows) -> tuple[Rows, NDArray[np.int64]]:
        """The m levels B_j - theta in (0, 1], and the first j."""
        whole = np.floor(shift)
        part = (shift - whole)[:, None]
        first = (self.y.levels <= part).sum(-1)
        levels = _window(self._two_periods, self.m, first) - part
        return np.clip(levels, 0.0, 1.0, out=levels), first + self.m * whole.astype(np.int64)

    @cached_property
    def _two_periods(self) -> Rows:
        return np.concatenate([self.y.levels, self.y.levels + 1], -1)

    def dual_paths(self, low: Rows, high: Rows) -> tuple[Staircase, Staircase]:
        """Those at both ends of the bracket, moved apart by more than the rounding of the levels there."""
        return self.path(low - LEVEL_ROUNDING), self.path(high + LEVEL_ROUNDING)

    def quantiles(self, count: int) -> tuple[Rows, Rows]:
        """Atoms found by their levels."""
        levels = np.broadcast_to((np.arange(count) + 0.5) / count, (len(self.x.values), count))
        return take(self.x.values, _ranks(levels, self.x.levels)), take(self.y.values, _ranks(levels, self.y.levels))


class _EqualMasses(_Problem):
    """n = m equal weights; the shift k is an integer, theta = k / n."""

    resolution = 1.0

    def __init__(self, x: SortedRows, y: SortedRows, p: float) -> None:
        super().__init__(x, y, p)
        self.turn = float(self.n)

    def slope(self, shift: Rows) -> Rows:
        """S(k + 1) - S(k), where S(k) = sum_i |x_i - y_(i+k)|^p."""
        return _cost_change(self.x.values, self.y_from(shift.astype(np.int64), self.n + 1), self.p)

    def value(self, shift: Rows) -> Rows:
        """S(k) / n."""
        y = self.y_from(shift.astype(np.int64), self.n)
        with np.errstate(over="ignore"):
            return cast("Rows", power_of(np.abs(self.x.values - y), self.p).mean(-1))

    def path(self, shift: Rows) -> Staircase:
        """x_i with y_(i+k)."""
        i = np.broadcast_to(np.arange(self.n), self.x.values.shape)
        return Staircase(i, i, shift.astype(np.int64), np.full(i.shape, 1 / self.n), np.zeros(i.shape, dtype=bool))

    def dual_paths(self, low: Rows, high: Rows) -> tuple[Staircase, Staircase]:
        """Both ways from (i, i + k) to (i + 1, i + 1 + k): through (i + 1, i + k), with the slope S(k) - S(k - 1), and
        through (i, i + 1 + k), with the slope S(k + 1) - S(k).
        """
        x_first = np.broadcast_to(np.tile([False, True], self.n), (len(high), 2 * self.n))
        mass, first = np.zeros(x_first.shape), high.astype(np.int64)
        return staircase(x_first, mass, first), staircase(~x_first, mass, first)

    def quantiles(self, count: int) -> tuple[Rows, Rows]:
        """Every (n / count)-th atom."""
        index = ((np.arange(count) + 0.5) * (self.n / count)).astype(np.int64)
        return self.x.values[:, index], self.y.values[:, index]


def _problem(clouds: Clouds, p: float) -> _Problem:
    """The problem in float64 on the CPU."""
    if p > LARGEST_POWER:
        raise HelmscopeError(f"p is {p:g}, but on the circle it must be at most {LARGEST_POWER}, for powers of angles "
                             "that do not overflow float64")  # fmt: skip
    a, b = rows_of(clouds.a), rows_of(clouds.b)
    equal = a.shape == b.shape and bool((a == a[:, :1]).all() and (b == b[:, :1]).all())
    angles = [_angles(points) for points in (clouds.x, clouds.y)]
    return (_EqualMasses if equal else _AnyMasses)(SortedRows(angles[0], a), SortedRows(angles[1], b), p)


def _angles(points: Tensor) -> Rows:
    """Angles in [-pi, pi], without gradients: NumPy's arctan2 takes a tenth of the time of ``circle_angle``."""
    u, v = points.detach().cpu().reshape(-1, *points.shape[-2:]).numpy().transpose(2, 0, 1)
    return cast("Rows", np.arctan2(v, u))


@dataclass(frozen=True)
class _Solution:
    """The best shift with its value, and the ends of the bracket that holds the minimum."""

    best: Rows
    value: Rows
    low: Rows
    high: Rows


def _solve(problem: _Problem) -> _Solution:
    """Search for the shift at which the slope of C changes its sign."""
    rows = len(problem.x.values)
    if min(problem.n, problem.m) >= LONG:
        x, y = (SortedRows(values, np.full(values.shape, 1 / COARSE)) for values in problem.quantiles(COARSE))
        coarse = _EqualMasses(x, y, problem.p)
        guess = _solve(coarse)
        unit = problem.turn / COARSE
        bracket = Bracket(problem.slope, _sign_change(coarse, guess.best) * unit, 0.1 * unit, step=problem.resolution)
        bracket.shrink(0.1 * ACCURACY * guess.value)
    else:
        bracket = Bracket(problem.slope, np.zeros(rows), problem.turn, step=problem.resolution)
        bracket.shrink(np.full(rows, 1e-13))
    value = problem.value(bracket.best)
    while ((bracket.error > ACCURACY * value) & (bracket.width > problem.resolution)).any():
        bracket.shrink(0.1 * ACCURACY * value)
        value = problem.value(bracket.best)
    return _Solution(bracket.best, value, bracket.low, bracket.high)


def _sign_change(coarse: _EqualMasses, shift: Rows) -> Rows:
    """Where the slope of C, whose steps are those between whole shifts, would be 0 if it were linear between them."""
    before, after = coarse.slope(shift - 1), coarse.slope(shift)
    change = after - before
    return shift + 0.5 - np.clip(after / np.where(change > 0, change, 1.0), 0.0, 1.0)


def _potentials(problem: _Problem, solution: _Solution) -> tuple[Rows, Rows]:
    """Dual potentials of both clouds, in the order of their atoms.

    The potentials of a shift are feasible for the clouds repeated along the line, but change by the slope with each
    turn; the mixture of those at two shifts whose slopes cancel is periodic.
    """
    parts = []
    for path in problem.dual_paths(solution.low, solution.high):
        displacement = problem.displacement(path)
        f, g, slope = path_potentials(path, np.concatenate([displacement, displacement[:, :1]], -1), problem.p)
        index = path.first[:, None] + np.arange(problem.m)
        turns = index // problem.m
        base = np.empty_like(g)
        np.put_along_axis(base, index - problem.m * turns, g - turns * slope[:, None], -1)
        parts.append((f, base, slope))
    (f_low, g_low, low), (f_high, g_high, high) = parts
    change = high - low
    share = np.where(change > 0, high / np.where(change > 0, change, 1.0), 0.0)[:, None]
    f, g = share * f_low + (1 - share) * f_high, share * g_low + (1 - share) * g_high
    return problem.x.unsort(f), problem.y.unsort(g)


def _cost_change(x: Rows, y: Rows, p: float) -> Rows:
    """sum_j |x_j - y_(j+1)|^p - |x_j - y_j|^p, where y ends a turn after its beginning."""
    if p == 2:  # the squares of y telescope
        first, gap = y[:, 0], y[:, 1:] - y[:, :-1]
        return cast("Rows", 2 * TURN * first + TURN**2 - 2 * np.einsum("rj,rj->r", gap, x))
    return cast("Rows", (power_of(np.abs(x - y[:, 1:]), p) - power_of(np.abs(x - y[:, :-1]), p)).sum(-1))


def _ranks(queries: Rows, levels: Rows) -> Indices:
    """How many levels are below each query; both are sorted, and merging them is faster than a binary search."""
    order = np.argsort(np.concatenate([queries, levels], -1), axis=-1, kind="stable")
    (rows, length), count = order.shape, queries.shape[-1]
    positions = np.flatnonzero(order < count).reshape(rows, count)
    return cast("Indices", positions - length * np.arange(rows)[:, None] - np.arange(count))


def _window(rows: Rows, count: int, first: Indices) -> Rows:
    """rows[r, first[r] : first[r] + count]."""
    windows = np.lib.stride_tricks.sliding_window_view(rows, count, axis=-1)
    return windows[np.arange(len(rows)), first]
