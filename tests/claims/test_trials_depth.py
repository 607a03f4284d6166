"""The trials of small-steps and transport-map on planted models: small, large and no steps, translated and swapped
tokens.
"""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.claims.experiments import transport_map
from helmscope.claims.registry import TrialCase
from helmscope.claims.small_steps import small_steps_premise
from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Ruling
from support.trials import failures, interval, rulings, set_constants

TOKENS, PAIRS = 20, 16  # 32 tokens in the vocabulary, one for the beginning of each prompt
DIM = 2 * (TOKENS + PAIRS)
POSITION = 0.3  # length of the position part of an embedding; that of the token is 1


def pattern(k: int) -> torch.Tensor:
    """The unit vector k of an orthonormal set whose entries sum to 0, as a LayerNorm keeps it."""
    vector = torch.zeros(DIM)
    vector[2 * k], vector[2 * k + 1] = math.sqrt(0.5), -math.sqrt(0.5)
    return vector


def model_of(kind: str, size: float = 0.0) -> GPT2LMHeadModel:
    """Tokens e + p, with e or -e in the vocabulary and p the position. ``translate``: attention adds a vector of this
    length to every token. ``swap``: every token attends to itself and becomes -e + p, where another token was.
    """
    config = GPT2Config(
        vocab_size=2 * PAIRS, n_positions=TOKENS, n_embd=DIM, n_head=1, n_layer=1, n_inner=4,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    positions = torch.stack([pattern(k) for k in range(TOKENS)])
    words = torch.stack([pattern(TOKENS + k) for k in range(PAIRS)])
    scale = math.sqrt((1 + POSITION**2) / DIM)  # of the LayerNorm, the same for all tokens
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight.copy_(torch.cat([words, -words]))
        model.transformer.wpe.weight.copy_(POSITION * positions)
        model.transformer.ln_f.weight.fill_(1)
        (block,) = model.transformer.h
        block.ln_1.weight.fill_(1)
        block.ln_2.weight.fill_(1)
        if kind == "translate":
            block.attn.c_proj.bias.copy_(size * words.sum(0) / math.sqrt(PAIRS))
        if kind == "swap":
            onto_positions, onto_words = positions.T @ positions, words.T @ words
            block.attn.c_attn.weight[:, :DIM] = 10 * onto_positions
            block.attn.c_attn.weight[:, DIM : 2 * DIM] = 10 * onto_positions
            block.attn.c_attn.weight[:, 2 * DIM :] = onto_words
            block.attn.c_proj.weight.copy_(-2 * scale * torch.eye(DIM))
    return model


def subject_of(kind: str, size: float = 0.0) -> Subject:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2 * PAIRS, (32, TOKENS), generator=generator)
    rows[:, 0] = torch.arange(2 * PAIRS)
    return Subject(model_of(kind, size), rows.tolist())


@pytest.fixture(autouse=True)
def _few_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    for claim in ("small-steps", "transport-map"):
        set_constants(monkeypatch, claim, twins=2)


@pytest.mark.parametrize(
    ("size", "ruling"), [(0.06, Ruling.SUPPORTED), (0.5, Ruling.REFUTED), (0.0, Ruling.IMPOSSIBLE)]
)
def test_planted_steps_are_found(size: float, ruling: Ruling) -> None:
    with subject_of("translate", size) as subject:
        verdict = run_trial("small-steps", quick=True, subject=subject).verdict
        premise = small_steps_premise(TrialCase(quick=True, subject=subject))
    assert verdict.ruling is ruling, verdict.sentence
    assert not failures(verdict) - {"median angle"}
    if ruling is Ruling.IMPOSSIBLE:
        assert premise == (
            "Premise: small-steps has no ruling here, since no token moves, and an angle of 0 is not evidence of small "
            "steps."
        )
        return
    # a token that is not one of the vector's moves by atan(size / |e + p|) in one half-step, a bit less or more
    measured = interval(verdict, "median angle")
    assert measured.estimate == pytest.approx(math.atan(size / math.sqrt(1 + POSITION**2)), rel=0.15)
    assert premise.startswith(f"Premise: small-steps is {ruling.value} here (")
    assert "half-step 1 (attention)" in premise


def test_a_simulation_has_no_such_premise() -> None:
    assert small_steps_premise(TrialCase()) == ""


def test_a_translation_is_an_optimal_map_and_a_swap_is_not() -> None:
    with subject_of("translate", 0.5) as translated, subject_of("swap") as swapped:
        optimal, exchanged = (
            run_trial("transport-map", quick=True, subject=each).verdict for each in (translated, swapped)
        )
    assert optimal.ruling is Ruling.SUPPORTED, optimal.sentence
    assert "Premise: small-steps is refuted here" in optimal.sentence
    assert exchanged.ruling is Ruling.REFUTED, exchanged.sentence
    assert interval(exchanged, "cost ratio").high < 0.6
    for verdict in (optimal, exchanged):
        assert not failures(verdict) - {"cost ratio"}
        assert rulings(verdict)["blocks that write nothing"] is Ruling.IMPOSSIBLE


def test_a_control_that_permutes_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_map.torch, "randperm", lambda n, generator=None: torch.arange(n))
    with subject_of("translate", 0.5) as subject:
        verdict = run_trial("transport-map", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert failures(verdict) == {"outputs assigned at random"}


def test_too_few_prompts() -> None:
    with subject_of("translate", 0.5) as whole, Subject(whole.model, whole.texts[:9]) as few:
        for claim in ("small-steps", "transport-map"):
            assert run_trial(claim, quick=True, subject=few).verdict.ruling is Ruling.INCONCLUSIVE
