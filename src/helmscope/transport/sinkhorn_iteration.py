"""The Sinkhorn iteration in the log domain: how the potentials of an entropic problem are computed.

    f_i = -epsilon log sum_j b_j e^{(g_j - c_ij) / epsilon},        g_j likewise from f,

times rho / (rho + epsilon) if marginals are relaxed. Half an iteration updates one of them and shows the marginal error
of the potentials before it: the marginal of their plan is a_i e^{(f_i - f_i^new) / epsilon}.

Where the error falls slowly, updates are over-relaxed, f <- f + omega (f^new - f). With the rate lambda of the plain
iteration, omega = 2 / (1 + sqrt(1 - lambda)) has the rate omega - 1 [Thibault, Chizat, Dossal & Papadakis 2021,
arXiv:1711.01851; Lehmann, von Renesse, Sambale & Uschmajew 2022, arXiv:2012.12562].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.transport.streaming import log_weights
from helmscope.transport.unbalanced import best_translation, damping, relaxed_marginal

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.transport.streaming import PairwiseCost
    from helmscope.types import Progress

PLAIN_WINDOW = 5  # iterations from which a rate is estimated
SLOW_RATE = 0.5  # above it, over-relaxation is worthwhile
MAX_RATE = 0.9999
MAX_RELAXED_ERROR = 0.1  # the rate of over-relaxation is a local property; far from the optimum it may diverge
MAX_GROWTH = 10.0  # of the error, above which over-relaxation is abandoned for a while


@dataclass(frozen=True, eq=False)
class Entropic:
    """An entropic problem: costs, masses a and b, and the strength rho of the marginals, infinite if they are exact.

    ``symmetric`` says that both clouds are the same, so that f = g.
    """

    costs: PairwiseCost
    a: Float[Tensor, " n"]
    b: Float[Tensor, " m"]
    rho: float = math.inf
    symmetric: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of points."""
        return len(self.a), len(self.b)

    @property
    def transposed(self) -> Entropic:
        """The problem with the clouds exchanged."""
        return replace(self, costs=self.costs.transposed, a=self.b, b=self.a)

    def softmin(self, g: Float[Tensor, " m"], epsilon: float, guess: Tensor | None) -> Float[Tensor, " n"]:
        """-epsilon log sum_j b_j e^{(g_j - c_ij) / epsilon}, from the present f as a guess."""
        start = None if guess is None else -guess / (epsilon * damping(self.rho, epsilon))
        return -epsilon * self.costs.log_sum_exp(log_weights(self.b) + g / epsilon, epsilon=epsilon, guess=start)

    def error(self, f: Float[Tensor, " n"], softmin: Float[Tensor, " n"], epsilon: float) -> float:
        """The marginal error sum_i a_i |e^{(f_i - softmin_i) / epsilon} - e^{-f_i / rho}| / sum_i a_i."""
        gap = torch.exp((f - softmin) / epsilon) - relaxed_marginal(f, self.rho)
        return float((self.a * gap.abs()).sum() / self.a.sum())


@dataclass(frozen=True, eq=False)
class Potentials:
    """Potentials f and g, the marginal error before the last update, and how the iteration ended."""

    f: Float[Tensor, " n"]
    g: Float[Tensor, " m"]
    error: float
    iterations: int
    converged: bool

    @property
    def finite(self) -> bool:
        """Whether all potentials are finite."""
        return bool(torch.isfinite(self.f).all() & torch.isfinite(self.g).all())


class Relaxation:
    """The factor omega of the updates, adapted to the rate at which errors decrease.

    Over-relaxed iterations are interrupted by plain ones, because only these have an exact marginal, and because slow
    modes, which over-relaxation damps, contribute little to the error of plain iterations but much to that of others.
    """

    def __init__(self, tol: float) -> None:
        self.omega = 1.0  # of the next iteration
        self.relaxed = 1.0  # of the iterations between plain ones
        self.cap = _best_omega(MAX_RATE)
        self.tol = tol
        self.errors: list[float] = []  # of plain iterations
        self.wait = 0  # iterations until the next plain one

    def update(self, error: float) -> None:
        """Adapt omega to the error of one more iteration."""
        if self.omega != 1:
            self.wait -= 1
            if self.wait <= 0 or error <= 2 * self.tol:  # the error of a plain iteration is about half
                self.omega = 1.0
            return
        self.errors.append(error)
        if self.relaxed == 1:
            close = len(self.errors) > PLAIN_WINDOW and error <= MAX_RELAXED_ERROR
            if close and (rate := _ratio(error, self.errors[-1 - PLAIN_WINDOW]) ** (1 / PLAIN_WINDOW)) > SLOW_RATE:
                self._relax(_best_omega(rate), error)
        elif error > MAX_GROWTH * self.errors[0]:
            self.cap = (1 + self.relaxed) / 2
            self.relaxed, self.errors = 1.0, []
        else:
            rate = _ratio(error, self.errors[-2]) ** (1 / (1 + _interval(self.relaxed)))
            # if omega is below its best value, the observed rate determines that of the plain iteration
            plain = (rate + self.relaxed - 1) ** 2 / (rate * self.relaxed**2) if rate > self.relaxed - 1 else 0.0
            self._relax(max(self.relaxed, _best_omega(plain) if plain < 1 else 1.0), error)

    def _relax(self, omega: float, error: float) -> None:
        self.omega = self.relaxed = min(omega, self.cap)
        self.errors, self.wait = [error], _interval(self.omega)


def _ratio(error: float, earlier: float) -> float:
    return error / earlier if earlier > 0 else 0.0


def _interval(omega: float) -> int:
    """The number of over-relaxed iterations in a row: as many as reduce the error by a factor of about e."""
    return max(PLAIN_WINDOW, round(1 / (2 - omega)))


def _best_omega(rate: float) -> float:
    return 2 / (1 + math.sqrt(1 - min(rate, MAX_RATE)))


@torch.no_grad()
def iterate(
    problem: Entropic,
    g: Float[Tensor, " m"],
    *,
    epsilon: float,
    tol: float,
    max_iterations: int,
    f: Float[Tensor, " n"] | None = None,
    progress: Progress | None = None,
) -> Potentials:
    """Iterate from g, and from f if it is known, until the marginal error is at most ``tol``.

    >>> from helmscope.transport.cost import Euclidean
    >>> from helmscope.transport.streaming import PairwiseCost
    >>> x, half = torch.tensor([[0.0], [1.0]]), torch.full((2,), 0.5)
    >>> problem = Entropic(PairwiseCost.of(x, x, Euclidean()), half, half)
    >>> iterate(problem, torch.zeros(2), epsilon=1.0, tol=1e-4, max_iterations=9).converged
    True
    """
    if problem.symmetric:
        return _iterate_symmetric(problem, g, epsilon, tol, max_iterations)
    factor, relaxation, other = damping(problem.rho, epsilon), Relaxation(tol), problem.transposed
    error, first = math.inf, None
    for done in range(1, max_iterations + 1):
        if done == max_iterations:
            relaxation.omega = 1.0  # so that the last update makes one marginal exact
        softmin = problem.softmin(g, epsilon, f)
        row_error = 0.0 if f is None or relaxation.omega == 1 else problem.error(f, softmin, epsilon)
        f = factor * softmin if f is None else f + relaxation.omega * (factor * softmin - f)
        softmin = other.softmin(f, epsilon, g)
        error = max(row_error, other.error(g, softmin, epsilon))
        converged = error <= tol and relaxation.omega == 1
        g = g + relaxation.omega * (factor * softmin - g)
        if not math.isinf(problem.rho):
            shift = best_translation(f, g, problem.a, problem.b, problem.rho)
            f, g = f + shift, g - shift
        if converged or not math.isfinite(error):
            return Potentials(f, g, error, done, converged)
        relaxation.update(error)
        first = error if first is None else first
        if progress is not None:
            progress(max(done / max_iterations, _share(first, error, tol)))
    assert f is not None
    return Potentials(f, g, error, max_iterations, converged=False)


def _share(first: float, error: float, tol: float) -> float:
    """The share of the orders of magnitude of the error that are done."""
    if not 0 < error < first or first <= tol:
        return 0.0
    return min(math.log(first / error) / math.log(first / tol), 1.0)


def _iterate_symmetric(problem: Entropic, f: Tensor, epsilon: float, tol: float, max_iterations: int) -> Potentials:
    """f <- (f + softmin(f)) / 2: averaging removes the oscillation of the plain update, which is slow [Feydy et al.
    2019, arXiv:1810.08278].
    """
    factor, error = damping(problem.rho, epsilon), math.inf
    for done in range(1, max_iterations + 1):
        softmin = problem.softmin(f, epsilon, f)
        error = problem.error(f, softmin, epsilon)
        if error <= tol or not math.isfinite(error):
            return Potentials(f, f, error, done, error <= tol)
        f = (f + factor * softmin) / 2
    return Potentials(f, f, error, max_iterations, converged=False)
