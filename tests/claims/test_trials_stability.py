"""The trial of stability; a bound that is too small is seen."""

from __future__ import annotations

import pytest

from helmscope.claims.experiments import stability
from helmscope.claims.trial import try_claim
from helmscope.types import Ruling


def test_flows_stay_within_the_bound() -> None:
    verdict = try_claim("stability", quick=True).verdict
    assert verdict.ruling is Ruling.BY_CONSTRUCTION
    assert all(control.as_expected for control in verdict.controls)
    sharpness = verdict.conditions[1].interval
    assert sharpness is not None
    assert 0 < sharpness.estimate < 1


def test_a_bound_that_is_too_small_is_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability, "w2_growth_bound", lambda *, beta: 0.05)
    verdict = try_claim("stability", quick=True).verdict
    assert verdict.conditions[0].ruling is Ruling.REFUTED
