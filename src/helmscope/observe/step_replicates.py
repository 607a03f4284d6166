"""Replicates of what a fitted step of Jordan, Kinderlehrer and Otto says, over the prompts of both halves.

A statistic theta of a step (``gaussian_step``: the share of the gap closed, the objective) depends on the prompts on
which V and nu were fitted as well as on those on which it is tested. The two-sample jackknife has an influence for each
prompt k of a half of m, computed again with the V and nu, or the laws, of the others:

    l_k = (m - 1) (theta - theta_(-k)),      replicate  theta + mean of l over the test half + c (l_k - mean of l).

The mean of the replicates is theta corrected for its bias of order 1/m in the test half. With c^2 = n (n - 1) / (m (m -
1)), n prompts in all, their variance over n is the sum of the two jackknife variances; c also holds the ratio of the
quantiles of Student's t for the smaller half and for n - 1 degrees of freedom, since one half may have all of the
variance. An interval over the test half alone, for the V and nu at hand, misses the mean over all fits in 30 % of
cases.

tau is not fitted again: the share is largest there, so that its error counts in second order only (2 % of the variance
in docs/calibration.py). That of the objectives, which it changes in first order, comes out up to 15 % too large. Where
tau is the largest that is tried, or would be above it without a prompt, it is the largest for the V of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import special

from helmscope.observe.gaussian_step import PARTS, FittedStep, largest_tau

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.meanfield.gaussian import Gaussian
    from helmscope.observe.gaussian_step import CloudPair
    from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy

AT_BOUND = 0.99  # of the largest tau: what is above counts as it


def step_replicates(
    pair: CloudPair,
    step: FittedStep,
    energy: QuadraticFreeEnergy,
    selection: Sequence[int] | np.ndarray,
    test: Sequence[int] | np.ndarray,
    *,
    parts: int = len(PARTS),
) -> Float[Tensor, "prompt parts"]:
    """The replicates of the first ``parts`` of ``PARTS`` of a step that was fitted on the prompts ``selection``, tested
    on the others, ``test``, in the order of all prompts. ``energy`` is that of the step in all directions, with the
    parts of the prompts in ``selection``, in their order; without parts it counts as given, and the replicates are
    those of the test half alone, NaN in the other.
    """

    def values(step: FittedStep, before: Gaussian, after: Gaussian, distance: float | None = None) -> list[float]:
        return step.values(before, after, distance) if parts > 1 else [step.closed(before, after)]

    tested = pair.moments(step.axes, test)
    laws, n = tested.laws(), len(selection) + len(test)
    apart = laws[1].w2(laws[0])  # the same for all energies
    whole = _table([values(step, *laws, apart)])
    tests = (len(test) - 1) * (whole - _table([values(step, *each) for each in tested.laws_without_one()]))
    center, found = whole + tests.mean(0), torch.full((n, parts), torch.nan, dtype=torch.float64, device="cpu")
    if energy.parts is None:
        found[list(test)] = center + tests - tests.mean(0)
        return found
    changed = energy.parts.changes(energy).along(step.axes).applied(step.energy)
    most, left_out = largest_tau(step.energy), []
    for one in changed:
        bound = largest_tau(one)
        tau = bound if step.tau > AT_BOUND * most else min(step.tau, bound)
        left_out.append(values(FittedStep(one, tau, step.axes), *laws, apart))
    left = _table(left_out)
    fits = (len(selection) - 1) * (whole - left)
    smaller = min(len(selection), len(test))
    degrees = special.stdtrit(smaller - 1, 0.975) / special.stdtrit(n - 1, 0.975)
    for rows, influence in ((selection, fits), (test, tests)):
        m = len(rows)
        spread = degrees * float(np.sqrt(n * (n - 1) / (m * (m - 1))))
        found[list(rows)] = center + spread * (influence - influence.mean(0))
    return found


def _table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, device="cpu")
