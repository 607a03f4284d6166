"""The trial of stability; a bound that is too small is seen."""

from __future__ import annotations

import pytest

from helmscope.claims.experiments import stability
from helmscope.claims.trial import run_trial
from helmscope.types import Ruling


def test_flows_stay_within_the_bound() -> None:
    verdict = run_trial("stability", quick=True).verdict
    assert verdict.ruling is Ruling.BY_CONSTRUCTION
    assert all(control.as_expected for control in verdict.controls)
    sharpness = verdict.conditions[1].interval
    assert sharpness is not None
    assert 0 < sharpness.estimate < 1


def test_a_start_near_the_worst_case_attains_the_bound_and_exceeds_half_of_it() -> None:
    verdict = run_trial("stability", quick=True).verdict
    controls = {control.name: control for control in verdict.controls}
    assert controls["attention near the worst case"].ruling is Ruling.BY_CONSTRUCTION
    assert controls["attention near the worst case, L halved"].ruling is Ruling.REFUTED
    assert "near the worst case at beta = 0 it was 0.99" in verdict.sentence or "it was 1." in verdict.sentence
    assert verdict.sentence.count("at beta = 4") == 2  # L and the largest sharpness


def test_half_of_the_rate_at_beta_0_changes_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random starts alone would not show it."""
    right = stability.w2_growth_bound
    monkeypatch.setattr(stability, "w2_growth_bound", lambda *, beta: right(beta=beta) * (0.55 if beta == 0 else 1))
    verdict = run_trial("stability", quick=True).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert verdict.conditions[0].ruling is Ruling.BY_CONSTRUCTION


def test_a_bound_that_is_too_small_is_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability, "w2_growth_bound", lambda *, beta: 0.05)
    verdict = run_trial("stability", quick=True).verdict
    assert verdict.conditions[0].ruling is Ruling.REFUTED
