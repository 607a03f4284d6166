"""The trial of gradient-shaped on planted models: writes that go down the loss, up it, or the same way for all
(``support.planted_updates.writes_of``).
"""

from __future__ import annotations

import pytest

from helmscope.types import Ruling
from support.planted_cases import case
from support.trials import failures, interval, named

S, R, N = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
CONDITIONS = ("cosine", "above permuted writes", "above the twins")


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [("down", [{S}, {S}, {S}]), ("up", [{R}, {R}, {R}]), ("the same everywhere", [{R, N, S}, {R, N}, {R, N, S}])],
)
def test_planted_writes_get_the_right_rulings(kind, allowed):
    verdict = case("gradient-shaped", kind).verdict(0)
    found = [named(verdict, name) for name in CONDITIONS]
    assert all(each.ruling in those for each, those in zip(found, allowed, strict=True)), found
    assert failures(verdict) <= set(CONDITIONS)  # all controls hold
    if kind == "down":  # the gradient is W^T (e_next - p), of which W^T e_next is the largest part
        assert interval(verdict, "cosine").low > 0.45
    if kind == "the same everywhere":
        assert verdict.ruling is not S
