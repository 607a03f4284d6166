"""Probabilities of random starts against exact fractions, quadrature and counting."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from scipy.optimize import linprog

from helmscope.theory.probability import initial_close_pair_probability, wendel_probability
from helmscope.types import HelmscopeError


@pytest.mark.parametrize(
    ("dim", "expected"), [(2, 1.4901161193847656e-8), (8, 0.0016634464263916016), (16, 0.5), (32, 1)]
)
def test_wendel_table(dim, expected):
    assert wendel_probability(n=32, dim=dim) == pytest.approx(expected, rel=2e-15)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 64, 500, 2000])
def test_wendel_is_the_binomial_sum(n):
    for dim in (2, 3, 9, 63, 64, 65, 499, 500, 1000):
        exact = Fraction(sum(math.comb(n - 1, k) for k in range(dim)), 2 ** (n - 1))
        probability = wendel_probability(n=n, dim=dim)
        assert probability == pytest.approx(float(exact), rel=2e-13, abs=0)
        assert probability == 1 or n > dim


@pytest.mark.parametrize(("n", "dim"), [(5, 2), (6, 3), (6, 4)])
def test_wendel_counts_sign_patterns(n, dim):
    """The distribution is symmetric under x_i -> -x_i, so P is the fraction of the 2^n sign patterns of any points in
    general position that lie in a half-space: <v, s_i x_i> >= 1 for some v.
    """
    x = np.random.default_rng(0).normal(size=(n, dim))
    count = 0
    for signs in itertools.product((-1, 1), repeat=n):
        flipped = np.array(signs)[:, None] * x
        count += linprog(np.zeros(dim), A_ub=-flipped, b_ub=-np.ones(n), bounds=(None, None)).status == 0
    assert wendel_probability(n=n, dim=dim) == pytest.approx(count / 2**n, rel=1e-15)


def test_clustering_table():
    assert initial_close_pair_probability(dim=2, delta=1e-3) == pytest.approx(0.014236437406239559, rel=1e-15)


@pytest.mark.parametrize("delta", [0.0, 1e-300, 1e-12, 1e-3, 0.3, 1 - 1e-9, 1.0, 1 + 1e-9, 1.7, 2.0])
def test_clustering_on_the_circle_and_on_the_2_sphere(delta):
    circle = mp.acos(1 - mp.mpf(delta)) / mp.pi if delta > 1e-9 else mp.sqrt(2 * mp.mpf(delta)) / mp.pi
    assert initial_close_pair_probability(dim=2, delta=delta) == pytest.approx(float(circle), rel=1e-12, abs=0)
    assert initial_close_pair_probability(dim=3, delta=delta) == pytest.approx(delta / 2, rel=1e-15, abs=0)


@pytest.mark.parametrize("dim", [4, 8, 33, 512])
@pytest.mark.parametrize("delta", [1e-4, 1e-3, 0.1, 0.5, 0.9, 0.98, 1.0, 1.2])
def test_clustering_is_the_area_of_a_cap(dim, delta):
    with mp.workdps(30):
        edge, power = mp.mpf(delta), mp.mpf(dim - 3) / 2
        rim = edge * (2 - edge)
        # e is the height above the rim, where the area concentrates at large d; relative to its value at the rim the
        # integrand is of order 1
        heights = [0, *(edge / 2**k for k in range(13, -1, -1))]
        area = mp.quad(lambda e: ((edge - e) * (2 - edge + e) / rim) ** power, heights)
        cap = area * rim**power / mp.beta(power + 1, mp.mpf(1) / 2)
    assert initial_close_pair_probability(dim=dim, delta=delta) == pytest.approx(float(cap), rel=5e-14, abs=0)


def test_clustering_agrees_with_random_pairs():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 100_000, 5))
    cosine = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    p = initial_close_pair_probability(dim=5, delta=0.4)
    assert abs((cosine >= 0.6).mean() - p) < 4 * math.sqrt(p * (1 - p) / 100_000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wendel_probability(n=0, dim=3), "n is 0"),
        (lambda: wendel_probability(n=3, dim=1), "dim is 1"),
        (lambda: initial_close_pair_probability(dim=1, delta=0.1), "dim is 1"),
        (lambda: initial_close_pair_probability(dim=3, delta=-0.1), "delta is -0.1"),
        (lambda: initial_close_pair_probability(dim=3, delta=2.1), "delta is 2.1"),
    ],
)
def test_bad_input_raises_one_sentence(call, message):
    with pytest.raises(HelmscopeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
