"""The trial of sinks-are-anchors on planted models: a sink with a constant value, one whose value is that of its token,
and no sink.

The first position is marked by its position embedding. The MLP of the first layer turns the mark into a large component
along u, and the second layer attends to it. Values there read u, or everything but u.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.support.model_families import inputs_of, tiny_model
from tests.support.trials import failures, interval, set_constants
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.claims.experiments.sinks_are_anchors import Sinks
from helmscope.claims.rank_correlation import jackknife_values
from helmscope.claims.registry import registered_case
from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.observe.sinks import TokenValues
from helmscope.stats.replicates import random_halves
from helmscope.types import Ruling

S, R, IMPOSSIBLE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.IMPOSSIBLE
COUNT, DIM, TOKENS = 48, 32, 14
ROWS = [[(first + i * (1 + first % 5)) % COUNT for i in range(TOKENS)] for first in range(40)]
MARK, LARGE = 8.0, 30.0


def planted(kind: str) -> GPT2LMHeadModel:
    """Two layers of one head, of which the first writes the sink's state and the second attends to it."""
    sizes = {"vocab_size": COUNT, "n_embd": DIM, "n_layer": 2, "n_head": 1, "n_positions": TOKENS, "n_inner": 4}
    torch.manual_seed(0)
    options = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **options)).eval()
    raw = torch.randn(DIM, DIM - 1)
    basis = torch.linalg.qr(raw - raw.mean(0)).Q.T  # orthonormal, of mean 0, as a LayerNorm keeps them
    mark, u, rest = basis[0], basis[1], basis[2:]
    first, second = model.transformer.h
    key, value = slice(DIM, 2 * DIM), slice(2 * DIM, 3 * DIM)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.randn(COUNT, DIM - 3) @ rest)
        model.transformer.wpe.weight.zero_()
        model.transformer.wpe.weight[0] = MARK * mark
        for parameter in (*first.mlp.parameters(), *second.mlp.parameters()):
            parameter.zero_()
        first.attn.c_proj.weight.mul_(1e-2)
        first.mlp.c_fc.weight[:, 0] = 10 * mark
        first.mlp.c_fc.bias[0] = -20.0
        first.mlp.c_proj.weight[0] = LARGE * u / 20 if kind != "none" else 0 * u
        second.attn.c_attn.bias[:DIM] = 8.0 * basis[2]
        second.attn.c_attn.weight[:, key] = torch.outer(u, basis[2])
        if kind == "its token":
            # the norm divides by the length of the sink's state; other tokens are longer by that factor
            second.attn.c_attn.weight[:, value] = rest.T @ rest
        second.attn.c_proj.weight.normal_(std=0.3)
        model.lm_head.weight.normal_(std=0.3)
    return model


@pytest.mark.parametrize(("kind", "ruling"), [("constant", S), ("its token", R), ("none", IMPOSSIBLE)])
def test_planted_sinks_get_the_right_rulings(monkeypatch, kind, ruling):
    set_constants(monkeypatch, "sinks-are-anchors", tokens=TOKENS, other_position=6, first_query=2, twins=2)
    with Subject(planted(kind), ROWS) as subject:
        verdict = run_trial("sinks-are-anchors", quick=True, subject=subject).verdict
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
    set_constants(monkeypatch, "sinks-are-anchors", tokens=TOKENS, other_position=6, first_query=2)
    with Subject(planted("its token"), ROWS[:9]) as subject:
        case = registered_case("sinks-are-anchors", subject=subject)
        recording = subject.recording
        sinks = Sinks.of(case, recording)
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
    set_constants(monkeypatch, "sinks-are-anchors", tokens=TOKENS, other_position=6, first_query=2, twins=2)
    with Subject(planted("its token"), [[7, *row[:-1]] for row in ROWS]) as subject:
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
