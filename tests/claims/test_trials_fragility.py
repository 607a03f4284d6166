"""The trials of early-fragile and heads-compete on planted models: layers that amplify or damp what comes before them,
and heads that write together or alone (``support.planted_updates``).
"""

from __future__ import annotations

import numpy as np
import pytest

from helmscope.claims.experiments.early_fragile import _change_point
from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Region, Ruling
from support.planted_cases import case
from support.planted_updates import SCALED_TOKENS as TOKENS
from support.planted_updates import heads_that_write, layers_that_scale
from support.trials import failures, interval, named, set_constants

S, R = Ruling.SUPPORTED, Ruling.REFUTED


@pytest.mark.parametrize(("kind", "ruling"), [("amplifying", S), ("damping", R)])
def test_early_and_late_fragile_layers_get_the_right_rulings(kind, ruling):
    verdict = case("early-fragile", kind).verdict(0)
    assert verdict.ruling is ruling
    assert failures(verdict) <= {"matched correlation"}  # all controls hold
    assert named(verdict, "blocks that write nothing").ruling is Ruling.IMPOSSIBLE
    repaired = interval(verdict, "share of the change that later layers repair, noise")
    assert repaired.high < -1 if kind == "amplifying" else repaired.low > 0.1


def test_few_layers_have_no_correlation(monkeypatch):
    set_constants(monkeypatch, "early-fragile", tokens=TOKENS, least_layers=8)
    with Subject(*layers_that_scale(0.4)) as subject:
        verdict = run_trial("early-fragile", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.IMPOSSIBLE
    assert "the replicates are layers, of which it needs 8, and has 7" in verdict.sentence.lower()


def test_a_change_in_one_step_is_told_from_a_trend():
    depth = np.arange(1.0, 12.0)
    noise = np.random.default_rng(0).normal(size=11)
    step = np.where(depth < 5, 2.0, 0.5) * np.exp(0.05 * noise)
    trend = np.exp(-depth / 3 + 0.05 * noise)
    described = Region(text="Described only.")
    assert _change_point(step, depth).weigh(described).interval.estimate < 1
    assert _change_point(trend, depth).weigh(described).interval.low > 10
    assert "fits the damage without error" in _change_point(0 * depth + 1, depth).reason


@pytest.mark.parametrize(("kind", "ruling"), [("together", S), ("alone", R)])
def test_heads_that_interact_in_their_layer_and_heads_that_do_not_get_the_right_rulings(kind, ruling):
    verdict = case("heads-compete", kind).verdict(0)
    assert verdict.ruling is ruling
    assert failures(verdict) <= {"interaction"}  # all controls hold
    ratio = interval(verdict, "joint over summed damage, one layer")
    assert ratio.high < 0.6 if kind == "together" else ratio.low > 0.9


def test_where_too_few_heads_match_nothing_is_decided(monkeypatch):
    set_constants(monkeypatch, "heads-compete", tokens=TOKENS, least_pairs=30)
    with Subject(*heads_that_write("alone")) as subject:
        verdict = run_trial("heads-compete", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert "needs 30 matched pairs" in named(verdict, "interaction").basis
