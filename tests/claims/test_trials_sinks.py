"""The trial of sinks-are-anchors on planted models: a sink with a constant value, one whose value is that of its token,
and no sink (``support.planted_attention.first_token_sink``).
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from helmscope.claims.experiments.sinks_are_anchors import Sinks
from helmscope.claims.rank_correlation import jackknife_values
from helmscope.claims.registry import registered_case
from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.observe.sinks import TokenValues
from helmscope.stats.replicates import random_halves
from helmscope.types import Ruling
from support.model_families import inputs_of, tiny_model
from support.planted_attention import SINK_TOKENS as TOKENS
from support.planted_attention import first_token_sink
from support.planted_cases import case
from support.trials import failures, interval, set_constants

S, R, IMPOSSIBLE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.IMPOSSIBLE
MODEL, ROWS = first_token_sink("its token")


@pytest.mark.parametrize(("kind", "ruling"), [("constant", S), ("its token", R), ("none", IMPOSSIBLE)])
def test_planted_sinks_get_the_right_rulings(kind, ruling):
    verdict = case("sinks-are-anchors", kind).verdict(0)
    assert verdict.ruling is ruling
    assert failures(verdict) <= {"cosine", "centered R^2"}  # all controls hold
    if kind == "constant":  # all that is retrieved from the sink is its mean
        by_mean, by_zero = (
            interval(verdict, f"damage, KL divergence of the next-token distribution, sinks {edit}")
            for edit in ("mean", "zero")
        )
        assert by_mean.high < 0.05 * by_zero.low
    if kind == "none":
        assert "the largest mean weight of a head on the first token is 0.1" in verdict.sentence


def test_cosine_and_share_are_those_of_loops(monkeypatch):
    set_constants(monkeypatch, "sinks-are-anchors", tokens=TOKENS, other_position=6, first_position=2)
    with Subject(MODEL, ROWS[:9]) as subject:
        tried = registered_case("sinks-are-anchors", subject=subject)
        recording = subject.recording
        sinks = Sinks.of(tried, recording)
        values = recording.replay(TokenValues(range(TOKENS)))["token_values"].value.sel(layer=1, head=0).values
    assert sinks.heads == [(1, 0)]
    values = values.astype(float)  # (prompt, token, component)
    about = values[:, 0] - values.mean((0, 1))
    unit = [each / np.sqrt((each**2).sum()) for each in about]
    cosines = [float(a @ b) for i, a in enumerate(unit) for j, b in enumerate(unit) if i != j]
    expected = jackknife_values(lambda kept: math.atanh(mean_over_pairs(unit, kept)), 9)
    assert mean_over_pairs(unit, range(9)) == pytest.approx(np.mean(cosines), rel=1e-12)
    assert np.arctanh(sinks.cosine().values) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    left, total = np.zeros(9), np.zeros(9)
    first, second = random_halves(9, seed=3)
    for k in range(9):
        fit = second if k in first else first
        left[k] = ((values[k, 0] - values[fit, 0].mean(0)) ** 2).sum()
        total[k] = ((values[k, 0] - values[fit].mean((0, 1))) ** 2).sum()
    expected = jackknife_values(lambda kept: math.log(total[kept].sum() / left[kept].sum()), 9)
    assert -np.log(1 - np.asarray(sinks.explained_share(3).values)) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def mean_over_pairs(units, kept):
    pairs = [(i, j) for i in kept for j in kept if i < j]
    return float(np.mean([units[i] @ units[j] for i, j in pairs]))


def test_tokens_with_which_all_texts_begin_are_removed_and_their_value_is_constant_by_construction(monkeypatch):
    set_constants(monkeypatch, "sinks-are-anchors", tokens=TOKENS, other_position=6, first_position=2, twins=2)
    with Subject(MODEL, [[7, *row[:-1]] for row in ROWS]) as subject:
        verdict = run_trial("sinks-are-anchors", quick=True, subject=subject).verdict
    assert verdict.ruling is R
    assert "without the first token, which all share" in verdict.setting
    assert interval(verdict, "cosine, with the first tokens that all prompts share: 1 by construction").low > 1 - 1e-6


def test_a_learned_sink_is_missing_mass():
    rows = inputs_of("gpt_oss", batch=40, n=64).tolist()
    with Subject(tiny_model("gpt_oss"), rows) as subject:
        verdict = run_trial("sinks-are-anchors", quick=True, subject=subject).verdict
    assert verdict.ruling is IMPOSSIBLE
    assert "of the mass to a learned sink outside the tokens, which has no value" in verdict.sentence


def test_an_encoder_has_no_such_sink():
    with Subject(tiny_model("bert"), inputs_of("bert", batch=4).tolist()) as subject:
        verdict = run_trial("sinks-are-anchors", quick=True, subject=subject).verdict
    assert verdict.ruling is IMPOSSIBLE
    assert "needs attention that is causal" in verdict.sentence
