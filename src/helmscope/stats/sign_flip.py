"""The sign-flip test for paired differences."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from helmscope.stats.replicates import replicate_vector
from helmscope.stats.scales import PLAIN
from helmscope.types import check_integer

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Numbers = NDArray[np.float64]

EXACT_FLIPS = 40  # differences; two halves of 2^20 sums each take less than a second
RANDOM_FLIPS = 9_999


@dataclass(frozen=True)
class SignFlip:
    """p-values of a sign-flip test against a center different from, above and below 0; ``exact`` if all 2^n sign
    patterns were counted.

    >>> SignFlip(0.25, 0.125, 1.0, exact=True).greater
    0.125
    """

    two_sided: float
    greater: float
    less: float
    exact: bool


def sign_flip(differences: ArrayLike, *, seed: int = 0) -> SignFlip:
    """The sign-flip test of the null hypothesis that each difference is symmetric about 0: the share of all 2^n sign
    patterns e for which sum e_i d_i is at least (``greater``), at most (``less``) or as far from 0 as (``two_sided``)
    the observed sum.

    Exact up to n = 40: the sums of two halves are sorted and matched (Horowitz and Sahni 1974). For larger n, 9,999
    random patterns and p = (1 + hits) / (1 + patterns) (Phipson and Smyth 2010). Sums equal up to rounding are ties and
    count as hits. No p-value is below 2^-n, so five differences are never significant at 5 % two-sided. Raises
    ``HelmscopeError`` for NaN and n < 2.

    >>> sign_flip([1.0, 2.0, 3.0])
    SignFlip(two_sided=0.25, greater=0.125, less=1.0, exact=True)
    """
    d = replicate_vector("differences", differences, PLAIN)
    d = d / (np.abs(d).max() or 1.0)
    observed, slack = float(d.sum()), 1e-12 * float(np.abs(d).sum())
    if d.size <= EXACT_FLIPS:
        first, second = _sums(d[: d.size // 2]), np.sort(_sums(d[d.size // 2 :]))
        # the distribution of the sums is symmetric, so P(S <= s) = P(S >= -s)
        misses = [int(np.searchsorted(second, total - slack - first).sum()) for total in (observed, -observed)]
        greater, less = (1.0 - miss / 2**d.size for miss in misses)
        return SignFlip(min(1.0, 2.0 * min(greater, less)), greater, less, exact=True)
    rng = np.random.default_rng(check_integer("seed", seed, at_least=0))
    sums = np.array([rng.choice((-1.0, 1.0), d.size) @ d for _ in range(RANDOM_FLIPS)])
    hits = (np.abs(sums) >= abs(observed) - slack, sums >= observed - slack, sums <= observed + slack)
    two_sided, greater, less = ((1 + int(hit.sum())) / (1 + RANDOM_FLIPS) for hit in hits)
    return SignFlip(two_sided, greater, less, exact=False)


def _sums(d: Numbers) -> Numbers:
    """All 2^n sums of +-d_i."""
    return functools.reduce(lambda sums, term: np.concatenate([sums + term, sums - term]), d, np.zeros(1))
