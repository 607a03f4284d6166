"""The trials of probe-metric, key-norm and qk-metric on planted models of one layer and one head
(``support.planted_attention``).
"""

from __future__ import annotations

import pytest

from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Ruling
from support.planted_attention import pairs
from support.planted_cases import case
from support.trials import failures, interval, named, rulings, set_constants

S, R, N, P = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE, Ruling.IMPOSSIBLE
TOKENS = 24


@pytest.mark.parametrize(("kind", "expected"), [("values cancel", S), ("values are keys", R)])
def test_probe_metric_on_planted_models(kind, expected):
    verdict = case("probe-metric", kind).verdict(0)
    assert verdict.ruling is expected, verdict.sentence
    assert failures(verdict) <= {"matched ratio"}
    ratio = interval(verdict, "matched ratio")
    assert ratio.low > 3 if expected is S else ratio.high < 0.5


@pytest.mark.parametrize(("kind", "expected"), [("values of the shape", S), ("values are keys", R)])
def test_key_norm_on_planted_models(kind, expected):
    verdict = case("key-norm", kind).verdict(0)
    assert verdict.ruling is expected, verdict.sentence
    assert failures(verdict) <= {"normalized", "blurred"}
    assert rulings(verdict)["normalized"] is expected
    assert rulings(verdict)["blurred"] is expected


def test_key_norm_where_all_queries_are_equal_has_no_ratio(monkeypatch):
    set_constants(monkeypatch, "key-norm", tokens=TOKENS)
    model, texts = pairs("values cancel")
    with Subject(model, texts) as subject:
        verdict = run_trial("key-norm", quick=True, subject=subject).verdict
    assert verdict.ruling is P
    assert "does no damage, so that there is no ratio" in verdict.sentence


@pytest.mark.parametrize(("kind", "allowed"), [("equal", {S}), ("turned", {R}), ("independent", {R, N})])
def test_qk_metric_on_planted_models(kind, allowed):
    verdict = case("qk-metric", kind).verdict(0)
    assert verdict.ruling in allowed, verdict.sentence
    assert failures(verdict) <= {"symmetric share", "above the twins"}
    share = interval(verdict, "symmetric share").estimate
    exact = {"equal": 1.0, "turned": 0.0}
    assert share == pytest.approx(exact[kind], abs=1e-6) if kind in exact else 0.4 < share < 0.65
    negative = named(verdict, "share of negative eigenvalues in |S|^2").interval
    assert kind != "equal" or negative.high < 1e-9


@pytest.mark.parametrize("claim", ["probe-metric", "key-norm"])
def test_a_bidirectional_model_has_no_next_token(claim):
    with Subject("tied", [[1, 2, 3, 4]] * 2) as subject:
        verdict = run_trial(claim, quick=True, subject=subject).verdict
    assert verdict.ruling is P
    assert "causal" in verdict.sentence
