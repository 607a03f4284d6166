"""Planted claims, whose truth is known, tried end to end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from helmscope.claims.judge import judge
from helmscope.claims.reading import read_catalogue
from helmscope.claims.registry import TrialCase, experiments
from helmscope.stats.power import detection_power
from helmscope.types import Ruling

PLANTED = Path(__file__).parent / "planted"


@pytest.mark.parametrize(
    ("claim", "right", "wrong"),
    [("planted-true", Ruling.SUPPORTED, Ruling.REFUTED), ("planted-false", Ruling.REFUTED, Ruling.SUPPORTED)],
)
def test_planted_claims_get_the_right_verdict_with_the_stated_power(claim: str, right: Ruling, wrong: Ruling) -> None:
    """The truth is .6 standard deviations from the bound: 32 replicates decide with power .908, 128 always."""
    entry, trial = read_catalogue(PLANTED)[claim], experiments(PLANTED)[claim].function
    rulings = [judge(entry, trial(TrialCase(seed, quick=True))).ruling for seed in range(400)]
    stated = detection_power(0.6, 32)
    assert abs(rulings.count(right) / 400 - stated) < 4 * math.sqrt(stated * (1 - stated) / 400)
    assert rulings.count(wrong) == 0
    assert {judge(entry, trial(TrialCase(seed))).ruling for seed in range(40)} == {right}
