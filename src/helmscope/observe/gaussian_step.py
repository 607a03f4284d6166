"""One step of Jordan, Kinderlehrer and Otto between the Gaussian laws of two clouds, with a fitted tau."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from scipy import optimize

from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.gaussian import Gaussian
from helmscope.observe.pooled import CloudMoments, PooledMoments
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.meanfield.jko_gaussian import CovarianceStep
    from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy

SMALLEST, LARGEST, COARSE = 1e-3, 1e2, 9  # of tau: a grid in its logarithm
FINE, FEW = 1e-3, 14  # tolerance in log tau, and the most evaluations of its search
STABLE = 0.9  # of the largest tau for which the step has a minimum
NOTHING = 1e-9  # of the size of a cloud: a smaller gap is rounding
ROUNDING = 1e-12  # of the squared length of the mean: a smaller variance is 0
VARIES = 1e-10  # of the largest variance: smaller ones are 0
SPANNED = 1e-2 * VARIES  # of the largest variance of a cloud: a direction with less is not spanned
PARTS = ("gap_closed_share", "objective_input", "objective_output", "objective_minimizer")


class Minimum(NamedTuple):
    """The law after a step, N(``mean``, C') with C' in ``step``, and its distance ``gap`` from the law before."""

    mean: Float[Tensor, " d"]
    step: CovarianceStep
    gap: float

    @property
    def entropy(self) -> float:
        """(1/2) log det(2 pi e C')."""
        return (len(self.mean) * (1 + float(np.log(2 * np.pi))) + self.step.log_det) / 2


@dataclass(frozen=True, eq=False)
class FittedStep:
    """A step of size ``tau`` for an energy, in coordinates along ``axes``.

    >>> from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy
    >>> eye = torch.eye(1).double()
    >>> step = FittedStep(QuadraticFreeEnergy(1.5 * eye, 0 * eye[0], 0 * eye[0], 0.4), 0.1, eye)
    >>> law = step.minimizer(Gaussian(2 * eye[0], 1.69 * eye))
    >>> law.mean.item(), law.covariance.sqrt().item()
    (1.7391304347826..., 1.1604092159529...)
    """

    energy: QuadraticFreeEnergy
    tau: float
    axes: Float[Tensor, "d k"]

    def minimizer(self, before: Gaussian) -> Gaussian:
        """The law after a step from ``before``: the covariance by ``QuadraticSteps``, and the mean m' with
        (1 + tau K)(m' - m) = -tau grad V(m).
        """
        law = self.minimum(before)
        return Gaussian(law.mean, law.step.covariance)

    @full_precision
    def minimum(self, before: Gaussian) -> Minimum:
        """The law after a step from ``before``, with what its derivatives need.

        >>> from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy
        >>> eye = torch.eye(1).double()
        >>> still = FittedStep(QuadraticFreeEnergy(0 * eye, 0 * eye[0], 0 * eye[0], 0.0), 1.0, eye)
        >>> still.minimum(Gaussian(eye[0], eye)).gap
        0.0
        """
        energy = self.energy
        step = energy.steps.step(before.covariance, self.tau)
        shift = energy.steps.solved(-self.tau * energy.slope_at(before.mean), self.tau)
        gap = float(step.squared_distance + shift.square().sum()) ** 0.5
        return Minimum(before.mean + shift, step, gap)

    @full_precision
    def objective(self, law: Gaussian, before: Gaussian) -> float:
        """nu Ent + int V + W2^2(law, before) / (2 tau), with V = 0 at the mean of ``before``.

        >>> from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy
        >>> eye = torch.eye(1).double()
        >>> step = FittedStep(QuadraticFreeEnergy(eye, 0 * eye[0], 0 * eye[0], 0.0), 1.0, eye)
        >>> step.objective(Gaussian(eye[0], eye), Gaussian(0 * eye[0], eye))  # (1 + 1) / 2 and a distance of 1
        1.5
        """
        return self._objective(law.mean, law.covariance, law.entropy, law.w2(before), before)

    @full_precision
    def _objective(self, mean: Tensor, covariance: Tensor, entropy: float, distance: float, before: Gaussian) -> float:
        energy, moved = self.energy, mean - before.mean
        second = covariance + torch.outer(moved, moved)
        potential = float(energy.slope_at(before.mean) @ moved) + float((energy.stiffness * second).sum()) / 2
        return -energy.nu * entropy + potential + distance**2 / (2 * self.tau)

    def closed(self, before: Gaussian, after: Gaussian) -> float:
        """1 - W2(after, minimizer) / W2(before, minimizer); NaN where the step moves nothing.

        >>> from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy
        >>> eye = torch.eye(1).double()
        >>> step = FittedStep(QuadraticFreeEnergy(eye, 0 * eye[0], 0 * eye[0], 0.0), 1.0, eye)
        >>> before = Gaussian(eye[0], eye)
        >>> round(step.closed(before, step.minimizer(before)), 6), abs(step.closed(before, before)) < 1e-15
        (1.0, True)
        """
        return _closed(before, after, self.minimum(before))

    @full_precision
    def values(self, before: Gaussian, after: Gaussian, distance: float | None = None) -> list[float]:
        """The share, and the objective at the input, the output and the minimizer; ``distance`` is W2 between both
        laws, if it is known.

        >>> from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy
        >>> eye = torch.eye(1).double()
        >>> step = FittedStep(QuadraticFreeEnergy(eye, 0 * eye[0], 0 * eye[0], 0.0), 1.0, eye)
        >>> abs(step.values(Gaussian(eye[0], eye), Gaussian(eye[0], eye))[0]) < 1e-15
        True
        """
        least, distance = self.minimum(before), after.w2(before) if distance is None else distance
        return [
            _closed(before, after, least),
            self._objective(before.mean, before.covariance, before.entropy, 0.0, before),
            self._objective(after.mean, after.covariance, after.entropy, distance, before),
            self._objective(least.mean, least.step.covariance, least.entropy, least.gap, before),
        ]


def _closed(before: Gaussian, after: Gaussian, law: Minimum) -> float:
    if not law.gap > NOTHING * float(before.covariance.trace()) ** 0.5:
        return float("nan")
    return 1 - after.w2_to(law.mean, law.step.covariance) / law.gap


@dataclass(frozen=True, eq=False)
class PairMoments:
    """The moments of the tokens of some prompts before and after a step, from which Gaussian laws of both follow.

    >>> x = torch.tensor([[[1.0], [-1.0]], [[2.0], [-2.0]]]).double()
    >>> PairMoments(PooledMoments.of(x), PooledMoments.of(2 * x)).laws()[1].covariance
    tensor([[10.]], dtype=torch.float64)
    """

    before: PooledMoments
    after: PooledMoments

    def laws(self) -> tuple[Gaussian, Gaussian]:
        """The laws of all tokens; raises HelmscopeError where a covariance has no full rank.

        >>> x = torch.zeros(2, 3, 1).double()
        >>> PairMoments(PooledMoments.of(x), PooledMoments.of(x)).laws()
        Traceback (most recent call last):
        helmscope.types.HelmscopeError: the cloud of 6 tokens spans 0 of 1 directions, but a JKO step between ...
        """
        return _law(self.before.whole), _law(self.after.whole)

    def laws_without_one(self) -> Iterator[tuple[Gaussian, Gaussian]]:
        """The laws without each prompt in turn, as ``laws``.

        >>> x = torch.tensor([[[1.0], [-1.0]], [[2.0], [-2.0]]]).double()
        >>> [before.covariance.item() for before, _ in PairMoments(*[PooledMoments.of(x)] * 2).laws_without_one()]
        [4.0, 1.0]
        """
        for before, after in zip(_separate(self.before.without_one), _separate(self.after.without_one), strict=True):
            yield _law(before), _law(after)

    def ranks(self) -> tuple[int, int]:
        """The ranks of the covariances of all tokens.

        >>> x = torch.tensor([[[1.0], [-1.0]], [[2.0], [-2.0]]]).double()
        >>> PairMoments(PooledMoments.of(x), PooledMoments.of(0 * x)).ranks()
        (1, 0)
        """
        return _rank(self.before.whole.covariance), _rank(self.after.whole.covariance)


@dataclass(frozen=True, eq=False)
class CloudPair:
    """The tokens of some prompts before and after a step, (prompt, n, d) each, with their weights (prompt, n).

    >>> x = torch.randn(4, 8, 2, generator=torch.Generator().manual_seed(0)).double()
    >>> CloudPair(x, 2 * x, torch.ones(4, 8)).axes(9, [0, 1], [2, 3]).shape
    torch.Size([2, 2])
    """

    before: Float[Tensor, "prompt n d"]
    after: Float[Tensor, "prompt n d"]
    weights: Float[Tensor, "prompt n"]

    @full_precision
    def axes(self, most: int, prompts: list[int] | np.ndarray, others: list[int] | np.ndarray) -> Float[Tensor, "d k"]:
        """The leading principal axes of the tokens before the step in some prompts, at most ``most`` of them, and no
        more than half as many as there are tokens in these or in the ``others`` without one prompt: such that both
        clouds of both sets of prompts span them. Raises HelmscopeError where all tokens are the same.
        """
        moments = PooledMoments.of(self.before[prompts], self.weights[prompts]).whole
        values, vectors = torch.linalg.eigh(moments.covariance)
        tokens = [(self.weights[rows] > 0).sum(-1) for rows in (prompts, others)]
        fewest = min(int(count.sum() - count.max()) for count in tokens)
        count = min(most, int((values > VARIES * values[-1]).sum()), max(1, fewest // 2))
        while count and float(values[-1]) > ROUNDING * float(moments.mean.square().sum()):
            axes: Tensor = vectors.flip(-1)[:, :count]
            spanned = min(min(self.moments(axes, rows).ranks()) for rows in (prompts, others))
            if spanned == count:
                return axes
            count = spanned
        raise HelmscopeError("all tokens of the cloud are the same, but a JKO step needs tokens that differ")

    @full_precision
    def moments(self, axes: Float[Tensor, "d k"], prompts: Sequence[int] | np.ndarray) -> PairMoments:
        """The moments of both clouds in the coordinates of axes."""
        clouds = (
            PooledMoments.of(each[list(prompts)] @ axes, self.weights[list(prompts)])
            for each in (self.before, self.after)
        )
        return PairMoments(*clouds)

    def fit(
        self, energy: QuadraticFreeEnergy, axes: Float[Tensor, "d k"], prompts: list[int] | np.ndarray
    ) -> FittedStep:
        """The step whose tau has the largest share of the gap closed in some prompts."""
        before, after = self.moments(axes, prompts).laws()
        inner = energy.along(axes)
        most = largest_tau(inner)
        low, high = float(np.log(min(SMALLEST, most / 2))), float(np.log(most))

        def share(log_tau: float) -> float:
            found = FittedStep(inner, float(np.exp(log_tau)), axes).closed(before, after)
            return found if np.isfinite(found) else -np.inf

        return FittedStep(inner, float(np.exp(_largest(share, low, high))), axes)


def largest_tau(energy: QuadraticFreeEnergy) -> float:
    """The largest tau that is tried for an energy: 0.9 of that below which the step has a minimum, and at most 100.

    >>> from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy
    >>> eye = torch.eye(1).double()
    >>> [largest_tau(QuadraticFreeEnergy(k * eye, 0 * eye[0], 0 * eye[0], 0.0)) for k in (1, -9)]
    [100.0, 0.1]
    """
    softest = float(energy.steps.values[0])
    return LARGEST if softest >= 0 else min(LARGEST, -STABLE / softest)


def _separate(moments: CloudMoments) -> Iterator[CloudMoments]:
    for one in zip(moments.mean, moments.covariance, moments.mass, strict=True):
        yield CloudMoments(*one)


def _law(moments: CloudMoments) -> Gaussian:
    """The Gaussian law of a cloud; raises HelmscopeError where its covariance has no full rank."""
    covariance = moments.covariance.cpu()
    covariance = (covariance + covariance.mT) / 2
    k = len(covariance)
    largest = covariance.abs().sum(-1).amax()  # at least the largest eigenvalue
    eye = torch.eye(k, dtype=covariance.dtype, device="cpu")
    # a tenth of the time of the eigenvalues, which are needed only if it fails
    if int(torch.linalg.cholesky_ex(covariance - SPANNED * largest * eye).info) and _rank(covariance) < k:
        raise HelmscopeError(
            f"the cloud of {int(moments.mass)} tokens spans {_rank(covariance)} of {k} directions, but a JKO step "
            "between Gaussian laws needs all of them: give more prompts, or fewer principal axes"
        )
    return Gaussian(moments.mean.cpu(), covariance)


def _rank(covariance: Tensor) -> int:
    values = torch.linalg.eigvalsh(covariance)
    return int((values > SPANNED * values[-1]).sum())


def _largest(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function is largest between two numbers: the best point of a grid, refined between its neighbors by
    parabolas and golden sections (Brent's method).
    """
    grid = np.linspace(low, high, COARSE)
    values = [function(point) for point in grid]
    best = int(np.argmax(values))
    ends = grid[max(best - 1, 0)], grid[min(best + 1, COARSE - 1)]
    found = optimize.minimize_scalar(
        lambda point: -function(point), bounds=ends, method="bounded", options={"xatol": FINE, "maxiter": FEW}
    )
    return float(found.x if -found.fun > values[best] else grid[best])
