"""Starting values for the Sinkhorn iteration, and the epsilon that would have converged.

A large problem is first solved between random samples of its clouds, and these between smaller samples, down to sizes
at which the matrix of costs is stored. The potentials of a sample extend to all points by one half-step,
g(y) = -epsilon log sum_i a_i e^{(f_i - c(x_i, y)) / epsilon}. The smallest problem is solved for decreasing epsilon.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from helmscope.transport.sinkhorn_iteration import Entropic, Potentials, iterate
from helmscope.transport.streaming import MAX_STORED, PairwiseCost
from helmscope.transport.unbalanced import damping

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from helmscope.types import Progress

COARSENING = 8  # factor between the sizes of consecutive samples
SAMPLE = 2_048  # points of the smallest sample
SAMPLE_TOLERANCE = 1e-3  # samples differ from their clouds by more than this
ANNEALING = 4.0  # factor between consecutive values of epsilon
ANNEALING_ITERATIONS, ANNEALING_TOLERANCE = 10, 0.05
TRIAL_SAMPLE = 512  # points with which values of epsilon are tried
TRIAL_MARGIN = 2.0  # for the difference between such a sample and its cloud


@torch.no_grad()
def solve(
    problem: Entropic,
    *,
    epsilon: float,
    tol: float,
    max_iterations: int,
    start: Tensor | None = None,
    progress: Progress | None = None,
) -> Potentials:
    """The potentials of a problem, from a starting value of g, or from a solution between samples of the clouds if it
    is large.
    """
    n, m = problem.size
    if start is not None:
        pass
    elif n * m <= MAX_STORED:
        start = _annealed(problem, epsilon)
    else:
        start = _from_sample(problem, epsilon, tol, max_iterations)
    return iterate(problem, start, epsilon=epsilon, tol=tol, max_iterations=max_iterations, progress=progress)


def _from_sample(problem: Entropic, epsilon: float, tol: float, max_iterations: int) -> Tensor:
    """A starting value of g for a large problem, from the solution between samples of its clouds."""
    n, m = problem.size
    smaller = sample(problem, *(min(k, max(SAMPLE, k // COARSENING)) for k in (n, m)))
    tol = max(tol, SAMPLE_TOLERANCE)
    coarse = solve(smaller, epsilon=epsilon, tol=tol, max_iterations=max_iterations)
    return _extended(problem, smaller, coarse.f, epsilon)


def sample(problem: Entropic, n: int, m: int) -> Entropic:
    """The problem between samples of n and m points, sampled by mass with a fixed seed, with equal masses."""
    rows, columns = _sample_by_mass(problem.a, n, 0), _sample_by_mass(problem.b, m, 0 if problem.symmetric else 1)
    a, b = (
        (masses if len(masses) == k else (masses.sum() / k).expand(k)) for masses, k in ((problem.a, n), (problem.b, m))
    )
    return replace(problem, costs=problem.costs.subset(rows, columns), a=a, b=b)


def _sample_by_mass(masses: Tensor, k: int, seed: int) -> Tensor:
    """k indices, one from each of k intervals of equal mass; all indices if there are k."""
    if k >= len(masses):
        return torch.arange(len(masses), device=masses.device)
    generator = torch.Generator("cpu").manual_seed(seed)
    uniform = torch.rand(k, generator=generator, dtype=torch.float64, device="cpu").to(masses.device)
    below = masses.double().cumsum(-1)
    levels = (torch.arange(k, device=masses.device) + uniform) / k * below[-1]
    return torch.searchsorted(below, levels, right=True).clamp(max=len(masses) - 1)


def _extended(problem: Entropic, smaller: Entropic, f: Tensor, epsilon: float) -> Tensor:
    """The potential g on all points, from the f of a sample."""
    costs = PairwiseCost.of(problem.costs.y, smaller.costs.x, problem.costs.cost, problem.costs.p)
    extension = Entropic(costs, problem.b, smaller.a, problem.rho)
    return damping(problem.rho, epsilon) * extension.softmin(f, epsilon, None)


def _annealed(problem: Entropic, epsilon: float) -> Tensor:
    """A starting value of g for a small problem, from a few iterations for each of some larger values of epsilon."""
    g, f = torch.zeros_like(problem.b), None
    larger = epsilon * ANNEALING ** math.floor(math.log(max(_largest_cost(problem) / epsilon, 1.0), ANNEALING))
    while larger > 1.5 * epsilon:
        rough = iterate(problem, g, f=f, epsilon=larger, tol=ANNEALING_TOLERANCE, max_iterations=ANNEALING_ITERATIONS)
        f, g = rough.f, rough.g
        larger /= ANNEALING
    return g


def _largest_cost(problem: Entropic) -> float:
    stored = problem.costs.stored
    assert stored is not None
    return float(stored.amax())


@torch.no_grad()
def converging_epsilon(problem: Entropic, *, epsilon: float, tol: float, max_iterations: int) -> float:
    """An epsilon, above the given one, for which ``solve`` converges: found by trying, from large to small.

    Problems of more than ``TRIAL_SAMPLE`` points are tried on samples, and the result is doubled.
    """
    exact = max(problem.size) <= TRIAL_SAMPLE
    small = problem if exact else sample(problem, *(min(k, TRIAL_SAMPLE) for k in problem.size))

    def converges(value: float) -> bool:
        return solve(small, epsilon=value, tol=tol, max_iterations=max_iterations).converged

    best = search_epsilon(converges, start=_largest_cost(small), above=epsilon)
    return best if exact else _rounded_up(TRIAL_MARGIN * best)


def search_epsilon(converges: Callable[[float], bool], *, start: float, above: float) -> float:
    """An epsilon larger than ``above`` that converges, by powers of 2 from about ``start``, rounded to two digits.

    >>> search_epsilon(lambda epsilon: epsilon > 0.3, start=1.0, above=0.01)
    0.5
    """
    best = _rounded_up(max(start, above))
    for _ in range(40):  # even max_iterations = 1 suffices for some epsilon
        if converges(best):
            break
        best = _rounded_up(2 * best)
    while (lower := _rounded_up(best / 2)) > above and lower < best and converges(lower):
        best = lower
    return best


def _rounded_up(value: float) -> float:
    """The value rounded up to two digits, as it is printed."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.2g}")
