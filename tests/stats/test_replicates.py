"""Replicates: bad input, moments with values missing, and halves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helmscope.stats.replicates import first_value, moments, numbers, random_halves
from helmscope.stats.scales import FisherZScale, LinearScale, LogScale, RemainderScale
from helmscope.types import HelmscopeError

NAN = math.nan


@pytest.mark.parametrize("scale", [LinearScale(), LogScale(), FisherZScale(), RemainderScale()])
def test_moments_over_the_first_axis_are_those_of_each_column_without_its_nan(scale):
    x = np.random.default_rng(4).uniform(0.1, 0.9, (9, 5))
    x[2, 0] = x[0, 1] = x[3, 1] = NAN
    x[1:, 2], x[:, 3], x[:, 4] = NAN, NAN, 0.3
    mean, error = moments(x, scale)
    for k in range(3):
        y = scale.forward(x[~np.isnan(x[:, k]), k])
        assert mean[k] == pytest.approx(np.mean(y), rel=1e-14)
        if y.size > 1:
            assert error[k] == pytest.approx(np.std(y, ddof=1) / math.sqrt(y.size), rel=1e-13)
    assert np.isnan(mean).tolist() == [False, False, False, True, False]
    assert np.isnan(error).tolist() == [False, False, True, True, False]
    assert error[4] == 0  # equal numbers, whose differences no rounding may lift from 0
    assert np.array_equal(first_value(x), [x[0, 0], x[1, 1], x[0, 2], NAN, 0.3], equal_nan=True)


def test_numbers_come_from_python_numpy_and_torch():
    for values in ([1, 2], np.array([1, 2], dtype=np.uint8), torch.tensor([1.0, 2.0], requires_grad=True)):
        assert numbers("values", values).tolist() == [1.0, 2.0]
        assert numbers("values", values).dtype == np.float64
    for values in ("ab", [True, False], [1j], [None], [[1.0], [1.0, 2.0]]):
        with pytest.raises(HelmscopeError, match=r"values is an? .*, but it must hold real numbers only"):
            numbers("values", values)


@pytest.mark.parametrize("scale", [LinearScale(), LogScale(), FisherZScale(), RemainderScale()])
def test_a_scale_goes_back_the_way_it_came_and_knows_its_slope(scale):
    x, h = np.array([0.1, 0.5, 0.9]), 1e-6
    y = scale.forward(x)
    assert [scale.inverse(each) for each in y] == pytest.approx(x.tolist(), rel=1e-15)
    slope = [(scale.inverse(each + h) - scale.inverse(each - h)) / (2 * h) for each in y]
    assert slope == pytest.approx(scale.slope(x).tolist(), rel=1e-9)
    assert scale.inverse_array(y) == pytest.approx(x, rel=1e-15)


@pytest.mark.parametrize("n", [4, 5, 33])
def test_halves_are_disjoint_random_and_whole(n):
    first, second = random_halves(n, seed=1)
    assert sorted([*first, *second]) == list(range(n))
    assert (len(first), len(second)) == (n // 2, n - n // 2)
    often = sum(0 in random_halves(n, seed=seed)[0] for seed in range(400))
    assert abs(often - 400 * (n // 2) / n) < 4 * math.sqrt(100)


def test_halves_of_three_are_refused():
    with pytest.raises(HelmscopeError, match="n is 3"):
        random_halves(3)
