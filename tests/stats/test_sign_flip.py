"""Sign flips against enumeration and the sign test."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from helmscope.stats.sign_flip import sign_flip
from helmscope.types import HelmscopeError

N = 32


@pytest.mark.parametrize("n", [2, 3, 6, 11])
@pytest.mark.parametrize("ties", [False, True])
def test_sign_flips_are_the_enumeration(n, ties):
    rng = np.random.default_rng(n)
    d = rng.integers(-2, 4, n) * 0.1 if ties else rng.normal(0.5, 1, n)
    sums = [round(float(np.dot(e, d)), 9) for e in itertools.product((1, -1), repeat=n)]
    seen = sums[0]
    ours = sign_flip(d)
    assert ours.exact
    assert ours.greater == sum(s >= seen for s in sums) / 2**n
    assert ours.less == sum(s <= seen for s in sums) / 2**n
    assert ours.two_sided == sum(abs(s) >= abs(seen) for s in sums) / 2**n


def test_sign_flips_stay_exact_at_32_and_turn_random_beyond_40():
    assert sign_flip(np.ones(N)).greater == 2.0**-32
    ones = np.where(np.arange(N) < 22, 1.0, -1.0)  # of equal size: the sign test
    assert sign_flip(ones).two_sided == pytest.approx(stats.binomtest(22, N).pvalue, rel=1e-12)
    d = np.where(np.arange(60) < 36, 1.0, -1.0)
    ours, exact = sign_flip(d, seed=4), stats.binomtest(36, 60).pvalue
    assert not ours.exact
    # four standard errors of 9,999 patterns
    assert ours.two_sided == pytest.approx(exact, abs=4 * math.sqrt(exact / 9_999))
    assert ours == sign_flip(d, seed=4) != sign_flip(d, seed=5)
    assert sign_flip(np.ones(60)).two_sided == 1e-4
    assert sign_flip(np.zeros(5)).two_sided == 1
    assert sign_flip(np.full(3, 1e308)).greater == 1 / 8


def test_a_difference_that_is_nan_is_refused():
    with pytest.raises(HelmscopeError, match=r"differences\[1\] is nan"):
        sign_flip([1.0, math.nan])
