"""Intrinsic dimension of a cloud of points from the distances to their nearest neighbors: Two-NN and GRIDE.

If the density is constant over the first neighbors of a point in D dimensions, the ratio mu = r_2k / r_k of its
distances to the 2k-th and the k-th neighbor has mu^-D ~ Beta(k, k), whatever the density. So for k = 1 log mu is
exponential with rate D, and with S = sum_i log mu_i over N points

    maximum likelihood  N / S,    without its bias  (N - 1) / S,    2 D S ~ chi^2 with 2 N degrees of freedom

(Two-NN, Facco et al. 2017); a fit of -log(1 - F(mu)) = D log mu through the origin leaves out the largest ratios. For
k > 1 the maximum likelihood estimate looks at a larger scale (GRIDE, Denti et al. 2022).

The constant density fails in many dimensions, where N points have no close neighbors: estimates are then far too low
(the uniform law on a cube of dimension 20 reads 16 from 2,000 points), and grow with N. Differences at equal N mean
something, absolute dimensions above about 15 do not without their curve over N (``dimension_by_size``). Copies of a
point have distance 0 and are left out first. Intervals are as if the ratios of the points were independent, which those
of neighbors are not quite; over prompts use their replicates, and never resample points, which would make copies.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from scipy.optimize import brentq
from scipy.stats import chi2, norm

from helmscope.geometry.arithmetic import conversion_hint
from helmscope.observe.nearest import NearestNeighbors
from helmscope.observe.neighbor_entropy import distinct, equal_weights
from helmscope.observe.track import token_weights
from helmscope.runs.bar import shows_progress
from helmscope.stats.intervals import jackknife_interval
from helmscope.types import (
    HelmscopeError,
    Interval,
    check_integer,
    check_progress,
    check_real,
    check_seed,
    short_repr,
    type_with_article,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import NDArray
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

LARGEST_TRUSTED = 15.0  # dimensions above it depend on N at any N that is usual
LEVEL = 0.95
DISCARDED = 0.1
GROUPS = 32  # of ratios, of which the jackknife of the fit leaves out one at a time
MIN_POINTS = 8


@shows_progress("dimension of a cloud")
def two_nn(
    points: Float[Tensor, "n d"], weights: Float[Tensor, " n"] | None = None, *, progress: ProgressOption = None
) -> Interval:
    """Two-NN dimension of a cloud without the bias of few points, (N - 1) / sum log(r_2 / r_1), with the exact interval
    for independent ratios.

    Points of weight 0 do not count, the other weights must be equal; copies of a point count once. Warns where the
    estimate is too high for an absolute dimension. Raises HelmscopeError for fewer than 8 distinct points and for
    points that all have two equally near neighbors, such as those of a grid. ``progress`` is called with the share of
    the work done.

    >>> x = torch.rand(2000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> flat = two_nn(x @ torch.randn(3, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    >>> flat.low < 3 < flat.high, flat.n
    (True, 2000)
    """
    return _reliable(two_nn_of_ratios(neighbor_ratios(points, weights, progress=progress)))


@shows_progress("dimension of a cloud")
def two_nn_mle(
    points: Float[Tensor, "n d"], weights: Float[Tensor, " n"] | None = None, *, progress: ProgressOption = None
) -> Interval:
    """Two-NN dimension by maximum likelihood, N / sum log(r_2 / r_1): larger than ``two_nn`` by a factor N / (N - 1).
    Raises and warns as ``two_nn`` does, and reports its progress.

    >>> x = torch.rand(100, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> round(two_nn_mle(x).estimate / two_nn(x).estimate, 9) == round(100 / 99, 9)
    True
    """
    ratios = neighbor_ratios(points, weights, progress=progress)
    total = float(np.log(ratios).sum())
    return _reliable(Interval(len(ratios) / total, *_exact_ends(total, len(ratios)), n=len(ratios)))


@shows_progress("dimension of a cloud")
def two_nn_fit(
    points: Float[Tensor, "n d"],
    weights: Float[Tensor, " n"] | None = None,
    *,
    discarded: float = DISCARDED,
    progress: ProgressOption = None,
) -> Interval:
    """Two-NN dimension as the slope of -log(1 - i / N) in the i-th smallest log mu through the origin, without the
    share ``discarded`` of the largest ratios. The interval is that of a jackknife over groups of points, whose
    neighbors are not searched again.

    Raises and warns as ``two_nn`` does, reports its progress, and raises for a share outside (0, 1).

    >>> x = torch.rand(500, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> 1.6 < two_nn_fit(x).estimate < 2.4
    True
    """
    if not 0 < check_real("discarded", discarded) < 1:
        raise HelmscopeError(f"discarded is {discarded}, but it must be above 0 and below 1")
    logs = np.log(neighbor_ratios(points, weights, progress=progress))

    def slope(parts: list[NDArray[np.float64]]) -> float:
        sample = np.sort(np.concatenate(parts))
        kept = sample[: int(len(sample) * (1 - discarded))]
        shares = np.arange(1, 1 + len(kept)) / len(sample)
        return float(-(kept * np.log1p(-shares)).sum() / (kept * kept).sum())

    order = np.random.default_rng(0).permutation(len(logs))
    fit = jackknife_interval(slope, np.array_split(logs[order], min(GROUPS, len(logs))))
    return _reliable(Interval(fit.estimate, fit.low, fit.high, n=len(logs)))


@shows_progress("dimension of a cloud")
def gride(
    points: Float[Tensor, "n d"],
    weights: Float[Tensor, " n"] | None = None,
    *,
    neighbor: int = 1,
    progress: ProgressOption = None,
) -> Interval:
    """GRIDE dimension at the scale of the k-th neighbor, k = ``neighbor``: maximum likelihood for the ratios
    r_2k / r_k; for k = 1 that of Two-NN. Its interval is asymptotic, from the observed information.

    Raises and warns as ``two_nn`` does, and reports its progress; 2k neighbors need 2k + 1 points.

    >>> x = torch.rand(2000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> abs(gride(x, neighbor=4).estimate - 3) < 0.3
    True
    """
    k = check_integer("neighbor", neighbor, at_least=1)
    return _reliable(gride_of_ratios(neighbor_ratios(points, weights, neighbor=k, progress=progress), k))


@shows_progress("dimension by scale")
def dimension_by_scale(
    points: Float[Tensor, "n d"],
    weights: Float[Tensor, " n"] | None = None,
    *,
    neighbors: Sequence[int] = (1, 2, 4, 8, 16),
    progress: ProgressOption = None,
) -> xr.Dataset:
    """GRIDE dimension over scales: ``dimension`` with its ends, and the mean distance to the k-th and 2k-th neighbor,
    along ``neighbor``. Noise has many dimensions at small scales, and a manifold its own at large ones.

    Raises as ``gride`` does. ``progress`` is called with the share of the work done.

    >>> x = torch.rand(500, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> dimension_by_scale(x, neighbors=[1, 4]).dimension.dims
    ('neighbor',)
    """
    scales = [check_integer("neighbors", k, at_least=1) for k in neighbors]
    if not scales:
        raise HelmscopeError(f"neighbors is {short_repr(neighbors)}, but it must hold at least one number")
    cloud = distinct_cloud(points, weights)
    distances = NearestNeighbors.of(cloud, 2 * max(scales), progress).distances.cpu().numpy()
    found = [gride_of_ratios(distances[:, 2 * k - 1] / distances[:, k - 1], k) for k in scales]
    values = {"dimension": [each.estimate for each in found], "dimension_low": [each.low for each in found]}
    values |= {"dimension_high": [each.high for each in found]}
    values |= {"distance": [float(distances[:, [k - 1, 2 * k - 1]].mean()) for k in scales]}
    return xr.Dataset(
        {name: ("neighbor", each) for name, each in values.items()}, {"neighbor": scales}, {"n": len(cloud)}
    )


@shows_progress("dimension by size")
def dimension_by_size(
    points: Float[Tensor, "n d"],
    weights: Float[Tensor, " n"] | None = None,
    *,
    halvings: int = 4,
    estimate: Callable[[Float[Tensor, "n d"]], Interval] | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The Two-NN dimension (or another ``estimate``) of N, N/2, ..., N/2^halvings points: ``dimension``, the mean over
    disjoint random parts of the cloud, along ``points``. Where it still grows with N, the dimension is higher than any
    of these numbers.

    Raises as ``two_nn`` does, for the smallest part. ``progress`` is called with the share of the work done.

    >>> x = torch.rand(400, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> dimension_by_size(x, halvings=2).points.values.tolist()
    [100, 200, 400]
    """
    halvings, seed = check_integer("halvings", halvings, at_least=0), check_seed(seed)
    cloud = distinct_cloud(points, weights)
    order = torch.randperm(len(cloud), generator=torch.Generator().manual_seed(seed), device="cpu").to(cloud.device)
    sizes, means = [len(cloud) >> halving for halving in range(halvings, -1, -1)], list[float]()
    report, done, total = check_progress(progress), 0, sum(size * len(cloud) for size in sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HighDimensionWarning)  # the curve is what the warning asks for
        for size in sizes:
            parts = [cloud[order[start : start + size]] for start in range(0, len(cloud) - size + 1, size)]
            means.append(float(np.mean([(estimate or two_nn)(part).estimate for part in parts])))
            done += size * len(cloud)  # the time of a part grows as the square of its size
            report(done / total)
    return xr.Dataset({"dimension": ("points", means)}, {"points": sizes})


class HighDimensionWarning(UserWarning):
    """An estimated dimension is so high that it depends on the number of points; ``dimension_by_size`` shows how.

    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     _ = two_nn(torch.randn(200, 60, generator=torch.Generator().manual_seed(0)))
    >>> caught[0].category.__name__
    'HighDimensionWarning'
    """


def distinct_cloud(points: Float[Tensor, "n d"], weights: Float[Tensor, " n"] | None = None) -> Float[Tensor, "m d"]:
    """The points that count, without copies: those closer than 1e-6 of the root mean squared distance to the mean.

    Raises HelmscopeError unless points are (n, d), finite, with equal weights (or 0), and 8 or more are distinct.

    >>> distinct_cloud(torch.arange(20).reshape(20, 1) % 10).shape
    torch.Size([10, 1])
    """
    if not isinstance(points, torch.Tensor):
        of_system = ": for a system use hs.observe.token_dimension(system)" if hasattr(points, "trajectory") else ""
        hint = of_system or conversion_hint("points", points)
        raise HelmscopeError(f"points is {type_with_article(points)}, but it must be a tensor of points (n, d){hint}")
    if points.ndim != 2:
        raise HelmscopeError(f"points have shape {tuple(points.shape)}, but they must be one cloud, (n, d)")
    cloud = points[equal_weights(token_weights(points, weights))].double()
    cloud = cloud[distinct(cloud)]
    if len(cloud) < MIN_POINTS:
        raise HelmscopeError(
            f"only {len(cloud)} {'point is distinct and has' if len(cloud) == 1 else 'points are distinct and have'} "
            f"positive weight, but a dimension needs at least {MIN_POINTS}"
        )
    return cloud


def neighbor_ratios(
    points: Float[Tensor, "n d"],
    weights: Float[Tensor, " n"] | None = None,
    *,
    neighbor: int = 1,
    progress: ProgressOption = None,
) -> NDArray[np.float64]:
    """The ratios r_2k / r_k >= 1 of the distances of every distinct point to its neighbors, k = ``neighbor``.

    >>> neighbor_ratios(torch.tensor([[0.0], [1], [3], [7], [15], [31], [63], [127]]))[:3].tolist()
    [3.0, 2.0, 1.5]
    """
    distances = NearestNeighbors.of(distinct_cloud(points, weights), 2 * neighbor, progress).distances
    return np.asarray((distances[:, 2 * neighbor - 1] / distances[:, neighbor - 1]).cpu().numpy())


def two_nn_of_ratios(ratios: NDArray[np.float64]) -> Interval:
    """The dimension without bias, (N - 1) / S, from the ratios r_2 / r_1, with its exact interval.

    >>> ratios = (1 - (np.arange(1, 1001) - 0.5) / 1000) ** -0.2  # the quantiles of dimension 5
    >>> two_nn_of_ratios(ratios).estimate
    4.99673152698783...
    """
    total, n = float(np.log(ratios).sum()), len(ratios)
    if total == 0:
        raise HelmscopeError("points have two equally near neighbors each, as on a grid: they have no such dimension")
    return Interval((n - 1) / total, *_exact_ends(total, n), n=n)


def gride_of_ratios(ratios: NDArray[np.float64], neighbor: int) -> Interval:
    """The maximum likelihood estimate from the ratios r_2k / r_k: the D at which the score

        N / D + (k - 1) sum log mu / (1 - mu^-D) - (2 k - 1) sum log mu

    vanishes, which falls in D.

    >>> gride_of_ratios(np.array([2.0, 4.0]), 1).estimate  # 2 / log 8
    0.96179669392597...
    """
    logs, n, k = np.log(ratios[ratios > 1]), len(ratios), neighbor
    total = float(logs.sum())
    if total == 0:
        raise HelmscopeError("points have equally near neighbors, as on a grid: they have no such dimension")
    # ratios of 1 add 1 / D each, the limit of log mu / (1 - mu^-D)
    ties = n - len(logs)

    def score(dimension: float) -> float:
        inner = float((logs / -np.expm1(-dimension * logs)).sum()) + ties / dimension
        return n / dimension + (k - 1) * inner - (2 * k - 1) * total

    upper = n / total
    while score(upper) > 0:
        upper *= 2
    lower = upper / 2
    while score(lower) < 0:
        lower /= 2
    found = float(brentq(score, lower, upper, xtol=1e-13 * upper, rtol=1e-14))
    powers = np.exp(-found * logs)
    curvature = float((logs**2 * powers / np.expm1(-found * logs) ** 2).sum()) + ties / found**2
    information = n / found**2 + (k - 1) * curvature
    half = norm.ppf((1 + LEVEL) / 2) / math.sqrt(information) / found
    return Interval(found, found * math.exp(-half), found * math.exp(half), n=n)


def _exact_ends(total: float, n: int) -> tuple[float, float]:
    """The ends of the interval of D from 2 D S ~ chi^2 with 2 n degrees of freedom."""
    low, high = chi2.ppf([(1 - LEVEL) / 2, (1 + LEVEL) / 2], 2 * n) / (2 * total)
    return float(low), float(high)


def _reliable(interval: Interval) -> Interval:
    if interval.estimate > LARGEST_TRUSTED:
        resolved = 2 * math.log10(interval.n)
        warnings.warn(
            f"the dimension {interval.estimate:.3g} of {interval.n} points is a lower bound: they resolve about "
            f"{resolved:.2g} dimensions (2 log10 N, Eckmann and Ruelle 1992), and {interval.estimate:.0f} would need "
            f"about 1e{interval.estimate / 2:.0f} points; dimension_by_size shows how the estimate grows with N",
            HighDimensionWarning,
            stacklevel=3,
        )
    return interval
