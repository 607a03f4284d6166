"""The trials of sharp-unstable and mlp-projects on planted models: attention that writes the difference of neighbors or
their average, and MLPs that move tokens to a subspace or away from it (``support.planted_updates``).
"""

from __future__ import annotations

import pytest

from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Judgment, Ruling
from support.planted_cases import case
from support.planted_updates import TOKENS, rows_of, silent_model
from support.trials import failures, interval, named, rulings, set_constants

S, R = Ruling.SUPPORTED, Ruling.REFUTED
ROWS = rows_of(40, TOKENS, 0)


@pytest.mark.parametrize(("kind", "ruling"), [("difference", S), ("average", R)])
def test_planted_attention_is_unstable_at_the_frequencies_that_it_keeps(kind, ruling):
    verdict = case("sharp-unstable", kind).verdict(0)
    assert verdict.ruling is ruling, verdict.sentence
    assert failures(verdict) <= {"damage ratio"}  # all controls hold
    assert rulings(verdict)["temperature"] is Ruling.DESCRIBED
    ratio = interval(verdict, "damage ratio")
    # the difference of neighbors has the squared gain 4 sin^2(pi f / 2), 10 times as large in the high band
    assert ratio.low > 4 if kind == "difference" else ratio.high < 0.6
    low = interval(verdict, "blocks that write nothing")
    assert low.low < 1 < low.high


@pytest.mark.parametrize(
    ("kind", "share", "ruling", "printed"),
    [("projection", 0.95, S, Judgment.TRUE), ("expansion", -0.5, R, Judgment.FALSE)],
)
def test_a_planted_projection_is_found_and_an_expansion_is_not(kind, share, ruling, printed):
    verdict = case("mlp-projects", kind).verdict(0)
    assert verdict.ruling is ruling, verdict.sentence
    assert failures(verdict) <= {"growth ratio"}
    assert verdict.printed.measured is printed
    assert interval(verdict, "growth ratio").estimate == pytest.approx(1 - share, abs=0.1)
    assert interval(verdict, "idempotence defect").estimate == pytest.approx(abs(1 - share), abs=0.1)
    assert interval(verdict, "planted projection").estimate == pytest.approx(0.5, abs=0.02)
    assert named(verdict, "random directions").ruling is Ruling.INCONCLUSIVE


def test_models_without_the_premise_are_not_decided():
    with Subject(silent_model(16, heads=1), ROWS) as subject:
        verdict = run_trial("mlp-projects", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE  # texts of 12 tokens
    assert "The claim needs 32 different texts of at least 64 tokens" in verdict.sentence


def test_mlps_that_write_nothing_have_no_premise(monkeypatch):
    set_constants(monkeypatch, "mlp-projects", tokens=TOKENS, twins=2)
    with Subject(silent_model(32, heads=1), ROWS) as subject:
        verdict = run_trial("mlp-projects", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.IMPOSSIBLE


def test_a_narrow_model_has_no_cloud_of_that_size(monkeypatch):
    set_constants(monkeypatch, "mlp-projects", tokens=TOKENS)
    with Subject(silent_model(12, heads=1), ROWS) as subject:
        verdict = run_trial("mlp-projects", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.IMPOSSIBLE
    assert "at most half of the dimension of the directions, 10" in verdict.sentence
