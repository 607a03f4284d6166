"""One step of Jordan, Kinderlehrer and Otto between the Gaussian laws of two clouds, with a fitted tau."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.gaussian import Gaussian
from helmscope.observe.pooled import CloudMoments, PooledMoments
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy

SMALLEST, LARGEST, COARSE, FINE = 1e-3, 1e2, 9, 8  # of tau: a grid in its logarithm, and golden sections of its best
STABLE = 0.9  # of the largest tau for which the step has a minimum
NOTHING = 1e-9  # of the size of a cloud: a smaller gap is rounding
ROUNDING = 1e-12  # of the squared length of the mean: a smaller variance is 0
VARIES = 1e-10  # of the largest variance: smaller ones are 0
PARTS = ("gap_closed_share", "objective_input", "objective_output", "objective_minimizer")


class _Minimum(NamedTuple):
    """The law after a step, and its distance from the law before."""

    mean: Tensor
    covariance: Tensor
    gap: float


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
        law = self._minimum(before)
        return Gaussian(law.mean, law.covariance)

    @full_precision
    def _minimum(self, before: Gaussian) -> _Minimum:
        energy = self.energy
        covariance, squared = energy.steps.covariance(before.covariance, self.tau)
        shift = energy.steps.solved(-self.tau * energy.slope_at(before.mean), self.tau)
        gap = float(squared + shift.square().sum()) ** 0.5
        return _Minimum(before.mean + shift, covariance, gap)

    @full_precision
    def objective(self, law: Gaussian, before: Gaussian, distance: float | None = None) -> float:
        """nu Ent + int V + W2^2(law, before) / (2 tau), with V = 0 at the mean of ``before``; ``distance`` is that W2,
        if it is known.

        >>> from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy
        >>> eye = torch.eye(1).double()
        >>> step = FittedStep(QuadraticFreeEnergy(eye, 0 * eye[0], 0 * eye[0], 0.0), 1.0, eye)
        >>> step.objective(Gaussian(eye[0], eye), Gaussian(0 * eye[0], eye))  # (1 + 1) / 2 and a distance of 1
        1.5
        """
        energy, moved = self.energy, law.mean - before.mean
        second = law.covariance + torch.outer(moved, moved)
        distance = law.w2(before) if distance is None else distance
        potential = float(energy.slope_at(before.mean) @ moved) + float((energy.stiffness * second).sum()) / 2
        return -energy.nu * law.entropy + potential + distance**2 / (2 * self.tau)

    def closed(self, before: Gaussian, after: Gaussian) -> float:
        """1 - W2(after, minimizer) / W2(before, minimizer); NaN where the step moves nothing.

        >>> from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy
        >>> eye = torch.eye(1).double()
        >>> step = FittedStep(QuadraticFreeEnergy(eye, 0 * eye[0], 0 * eye[0], 0.0), 1.0, eye)
        >>> before = Gaussian(eye[0], eye)
        >>> round(step.closed(before, step.minimizer(before)), 6), abs(step.closed(before, before)) < 1e-15
        (1.0, True)
        """
        return _closed(before, after, self._minimum(before))

    def values(self, before: Gaussian, after: Gaussian) -> list[float]:
        """The share, and the objective at the input, the output and the minimizer.

        >>> from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy
        >>> eye = torch.eye(1).double()
        >>> step = FittedStep(QuadraticFreeEnergy(eye, 0 * eye[0], 0 * eye[0], 0.0), 1.0, eye)
        >>> abs(step.values(Gaussian(eye[0], eye), Gaussian(eye[0], eye))[0]) < 1e-15
        True
        """
        minimum = self._minimum(before)
        known = ((before, 0.0), (after, None), (Gaussian(minimum.mean, minimum.covariance), minimum.gap))
        return [_closed(before, after, minimum), *(self.objective(law, before, gap) for law, gap in known)]


def _closed(before: Gaussian, after: Gaussian, law: _Minimum) -> float:
    if not law.gap > NOTHING * float(before.covariance.trace()) ** 0.5:
        return float("nan")
    return 1 - after.w2_to(law.mean, law.covariance) / law.gap


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
            spanned = min(min(_ranks(self.moments(axes, rows).whole)) for rows in (prompts, others))
            if spanned == count:
                return axes
            count = spanned
        raise HelmscopeError("all tokens of the cloud are the same, but a JKO step needs tokens that differ")

    @full_precision
    def moments(self, axes: Float[Tensor, "d k"], prompts: list[int] | np.ndarray) -> PooledMoments:
        """The joint moments of both clouds in the coordinates of axes, from which laws of both follow."""
        both = torch.cat([self.before[prompts] @ axes, self.after[prompts] @ axes], -1)
        return PooledMoments.of(both, self.weights[prompts])

    def fit(
        self, energy: QuadraticFreeEnergy, axes: Float[Tensor, "d k"], prompts: list[int] | np.ndarray
    ) -> FittedStep:
        """The step whose tau has the largest share of the gap closed in some prompts."""
        before, after = laws(self.moments(axes, prompts).whole)
        inner = energy.along(axes)
        softest = float(torch.linalg.eigvalsh(inner.stiffness)[0])
        most = LARGEST if softest >= 0 else min(LARGEST, -STABLE / softest)
        low, high = np.log(min(SMALLEST, most / 2)), np.log(most)

        def share(log_tau: float) -> float:
            found = FittedStep(inner, float(np.exp(log_tau)), axes).closed(before, after)
            return found if np.isfinite(found) else -np.inf

        return FittedStep(inner, float(np.exp(_largest(share, low, high))), axes)

    def pseudo_values(
        self, step: FittedStep, prompts: list[int] | np.ndarray, *, parts: int = len(PARTS)
    ) -> Float[Tensor, "prompt parts"]:
        """The jackknife pseudo-values of a step over some prompts: of all ``PARTS``, or of the share (``parts=1``)."""

        def values(moments: CloudMoments) -> Tensor:
            if moments.mean.ndim == 1:
                before, after = laws(moments)
                found = step.values(before, after) if parts > 1 else [step.closed(before, after)]
                return torch.tensor(found, dtype=torch.float64, device="cpu")
            each = [CloudMoments(*one) for one in zip(moments.mean, moments.covariance, moments.mass, strict=True)]
            return torch.stack([values(one) for one in each])

        return self.moments(step.axes, prompts).pseudo_values(values)


def laws(joint: CloudMoments) -> tuple[Gaussian, Gaussian]:
    """The Gaussian laws of two clouds from their joint moments; raises HelmscopeError where one has no full rank.

    >>> before, after = laws(CloudMoments(torch.zeros(2), torch.diag(torch.tensor([1.0, 4.0])), torch.tensor(9.0)))
    >>> after.covariance
    tensor([[4.]], dtype=torch.float64)
    """
    k = joint.mean.shape[-1] // 2
    found = []
    for part, rank in zip((slice(0, k), slice(k, None)), _ranks(joint), strict=True):
        covariance = joint.covariance[part, part]
        if rank < k:
            raise HelmscopeError(
                f"the cloud of {int(joint.mass)} tokens spans {rank} of {k} directions, but a JKO step between "
                "Gaussian laws needs all of them: give more prompts, or fewer components"
            )
        found.append(Gaussian(joint.mean[part].cpu(), (covariance + covariance.mT).cpu() / 2))
    return found[0], found[1]


def _ranks(joint: CloudMoments) -> tuple[int, int]:
    """The ranks of the covariances of two clouds."""
    k = joint.mean.shape[-1] // 2
    values = [torch.linalg.eigvalsh(joint.covariance[part, part]) for part in (slice(0, k), slice(k, None))]
    first, second = (int((each > 1e-2 * VARIES * each[-1]).sum()) for each in values)
    return first, second


def _largest(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function is largest between two numbers: the best point of a grid, refined by golden sections."""
    grid = np.linspace(low, high, COARSE)
    values = [function(point) for point in grid]
    best = int(np.argmax(values))
    a, b = grid[max(best - 1, 0)], grid[min(best + 1, COARSE - 1)]
    ratio = (5**0.5 - 1) / 2
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = function(c), function(d)
    for _ in range(FINE - 2):
        if at_c > at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = function(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = function(d)
    point, value = (c, at_c) if at_c > at_d else (d, at_d)
    return float(point if value > values[best] else grid[best])
