"""Holm's adjusted p-values against the step-down loop."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helmscope.stats.holm import holm
from helmscope.types import HelmscopeError


def test_holm_is_the_step_down_loop():
    p = np.random.default_rng(0).uniform(0, 0.2, 9)
    for alpha in (0.01, 0.05, 0.2, 0.5):
        rejected: set[int] = set()
        for i, at in enumerate(np.argsort(p)):
            if p[at] > alpha / (9 - i):
                break
            rejected.add(int(at))
        assert set(np.flatnonzero(holm(p) <= alpha).tolist()) == rejected


@pytest.mark.parametrize("p_values", [[0.1, 1.1], [math.nan], [], [[0.1]]])
def test_invalid_p_values_raise(p_values):
    with pytest.raises(HelmscopeError, match=r"but it must hold at least one number, each in \[0, 1\]"):
        holm(p_values)
