"""Rank correlation of two quantities over layers or heads, with a jackknife interval."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats

from helmscope.claims.evidence import PremiseImpossible, Replicates
from helmscope.stats.replicates import pseudo_values
from helmscope.stats.scales import FisherZScale

LARGEST, LARGEST_Z = 1 - 1e-9, 15.0  # of correlations and pseudo-values, so that those of perfect order are finite


def rank_correlation(first: np.ndarray, second: np.ndarray, of: str = "layers") -> Replicates | PremiseImpossible:
    """Spearman's correlation over the rows of two tables (row, column), the mean over columns, as jackknife
    pseudo-values on Fisher's scale, one per row; ``of`` says what the rows are.

    >>> table = np.array([[1.0], [2.0], [3.0], [4.0]])
    >>> rank_correlation(table, 0 * table).reason
    'one of the two does not vary, so that there is no rank correlation'
    """
    z = jackknife_values(
        lambda rows: float(np.arctanh(np.clip(mean_spearman(first[rows], second[rows]), -LARGEST, LARGEST))), len(first)
    )
    if not np.isfinite(z).all():
        return PremiseImpossible("one of the two does not vary, so that there is no rank correlation")
    return Replicates(np.tanh(z.clip(-LARGEST_Z, LARGEST_Z)), of, FisherZScale())


def jackknife_values(statistic: Callable[[np.ndarray], float], n: int) -> np.ndarray:
    """The jackknife pseudo-values of a statistic of n replicates, which takes the indices of the replicates that are
    kept.

    >>> values = np.array([1.0, 2.0, 6.0])
    >>> jackknife_values(lambda kept: float(values[kept].mean()), 3).round(12).tolist()
    [1.0, 2.0, 6.0]
    """
    every = np.arange(n)
    without = np.array([statistic(np.delete(every, k)) for k in range(n)])
    return pseudo_values(statistic(every), without, n)


def mean_spearman(first: np.ndarray, second: np.ndarray) -> float:
    """The mean over columns of the correlation over rows; columns in which one does not vary are left out.

    >>> mean_spearman(np.array([[1.0, 5.0], [2.0, 5.0]]), np.array([[4.0, 1.0], [9.0, 2.0]]))
    1.0
    """
    found = [spearman(a, b) for a, b in zip(first.T, second.T, strict=True)]
    return float(np.nanmean(found)) if np.isfinite(found).any() else float("nan")


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation of two vectors; NaN if one of them does not vary.

    >>> round(spearman(np.array([1.0, 2.0, 3.0]), np.array([9.0, 4.0, 1.0])), 12)
    -1.0
    """
    ranks = [stats.rankdata(each) for each in (first, second)]
    centered = [each - each.mean() for each in ranks]
    size = np.sqrt((centered[0] ** 2).sum() * (centered[1] ** 2).sum())
    return float((centered[0] * centered[1]).sum() / size) if size > 0 else float("nan")
