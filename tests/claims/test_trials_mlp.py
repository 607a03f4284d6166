"""The trials of mlp-conservative and low-coherence: planted models, and small numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.claims.rank_correlation import rank_correlation
from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Region, Ruling

S, R = Ruling.SUPPORTED, Ruling.REFUTED
D, LAYERS = 16, 4
ANGLES = {"barely turned": 0.1, "turned": 0.5, "rotated": math.pi / 2}
ROWS = [[(7 * k + 3 * i * (k + 1)) % 60 for i in range(12)] for k in range(40)]


def model(kind: str) -> GPT2LMHeadModel:
    """A GPT-2 whose MLPs are gradients (W_out = W_in^T), the same turned by an angle, silent, or as initialized; the
    norms before the MLPs have no gain, so that folding them changes no angle."""
    sizes = {"vocab_size": 64, "n_embd": D, "n_layer": LAYERS, "n_head": 2, "n_positions": 32}
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.2)).eval()
    quarter = torch.block_diag(*[torch.tensor([[0.0, -1.0], [1.0, 0.0]])] * (D // 2))
    with torch.no_grad():
        for layer, block in enumerate(net.transformer.h):
            written = block.mlp.c_fc.weight.T.clone()  # (hidden, d): what each neuron reads
            if kind == "gradient":
                block.mlp.c_proj.weight.copy_(written)
            elif kind in ANGLES:
                turn = math.cos(ANGLES[kind]) * torch.eye(D) + math.sin(ANGLES[kind]) * quarter
                block.mlp.c_proj.weight.copy_(written @ turn)
            elif kind == "silent":
                block.mlp.c_proj.weight.zero_()
                block.mlp.c_proj.bias.zero_()
            elif kind == "partly aligned":
                share = (layer + 1) / LAYERS
                block.mlp.c_proj.weight.mul_(1 - share).add_(share * written)
    return net


@pytest.fixture(params=["gradient", *ANGLES, "initialized", "silent"])
def planted(request: pytest.FixtureRequest) -> Iterator[tuple[str, Subject]]:
    with Subject(model(request.param), ROWS) as subject:
        yield request.param, subject


def test_planted_mlps_get_the_right_ruling(planted: tuple[str, Subject]) -> None:
    kind, subject = planted
    verdict = run_trial("mlp-conservative", quick=True, subject=subject).verdict
    expected = {
        "gradient": S,
        "barely turned": S,
        "turned": R,
        "rotated": R,
        "initialized": R,
        "silent": Ruling.IMPOSSIBLE,
    }[kind]
    assert verdict.ruling is expected, verdict.sentence
    if kind == "silent":
        assert "write nothing" in verdict.sentence
        return
    assert verdict.interval is not None
    assert verdict.interval.n == 32
    assert all(control.as_expected for control in verdict.controls)
    # T = cos I + sin K of S = W^T diag(slopes) W has A = sin (K S + S K) / 2; GELU's slopes are not all positive, but
    # nearly: tr K S K S is below 0, |K S + S K|^2 / 4 between |S|^2 / 2 and |S|^2, and J has the norm of S
    square = math.sin(ANGLES.get(kind, 0.0)) ** 2
    bound = (0.4, 0.6) if kind == "initialized" else (square / 2, square + 1e-6)
    assert bound[0] <= verdict.interval.estimate <= bound[1]


def test_too_few_texts() -> None:
    with Subject(model("gradient"), ROWS[:31]) as subject:
        verdict = run_trial("mlp-conservative", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert "needs 32 different texts" in verdict.sentence


def test_planted_alignment_is_found_and_its_absence_is_not() -> None:
    rulings = {}
    for kind in ("partly aligned", "initialized", "silent"):
        with Subject(model(kind), ROWS) as subject:
            rulings[kind] = run_trial("low-coherence", quick=True, subject=subject).verdict
    assert rulings["partly aligned"].conditions[0].ruling is S
    assert rulings["partly aligned"].conditions[1].interval.estimate == pytest.approx(1)
    assert rulings["initialized"].conditions[0].ruling is not S
    assert rulings["silent"].ruling is Ruling.IMPOSSIBLE
    for kind in ("partly aligned", "initialized"):
        assert all(control.as_expected for control in rulings[kind].controls), rulings[kind].sentence


def test_one_block_for_all_layers_has_no_replicates() -> None:
    with Subject("tied", ["Once upon a time there was a cat.", "One day, Tom saw a dog."], loops=3) as subject:
        verdict = run_trial("low-coherence", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.IMPOSSIBLE
    assert "share the weights of one block" in verdict.sentence


def test_the_rank_correlation_is_that_of_scipy_with_its_jackknife() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.normal(size=(5, 3)), draw.normal(size=(5, 3))

    def z(kept: list[int]) -> float:
        return math.atanh(np.mean([stats.spearmanr(first[kept, k], second[kept, k]).statistic for k in range(3)]))

    expected = [5 * z(list(range(5))) - 4 * z([m for m in range(5) if m != k]) for k in range(5)]
    evidence = rank_correlation(first, second)
    assert np.arctanh(evidence.values) == pytest.approx(expected, rel=1e-9)
    interval = evidence.weigh(Region(text="above 0", above=0.0)).interval
    half = stats.t.ppf(0.975, 4) * np.std(expected, ddof=1) / math.sqrt(5)
    ends = [math.tanh(np.mean(expected) + sign * half) for sign in (-1, 0, 1)]
    assert [interval.low, interval.estimate, interval.high] == pytest.approx(ends, rel=1e-9)


def test_a_common_trend_over_training_is_not_a_correlation_of_layers() -> None:
    """Both grow with training, and layers are unrelated: only pooled ranks are correlated."""
    draw = np.random.default_rng(1)
    trend = np.linspace(0, 10, 16)
    first, second = (trend + draw.normal(size=(12, 16)) for _ in range(2))
    assert stats.spearmanr(first.ravel(), second.ravel()).statistic > 0.85
    assessment = rank_correlation(first, second).weigh(Region(text="above 0", above=0.0))
    assert assessment.ruling is Ruling.INCONCLUSIVE
    assert abs(assessment.interval.estimate) < 0.2


def test_the_premise_is_printed_and_two_layers_are_too_few_replicates() -> None:
    with Subject(model("gradient"), ROWS) as subject:
        assert "Premise: small-steps is" in run_trial("mlp-conservative", quick=True, subject=subject).verdict.sentence
    sizes = {"vocab_size": 64, "n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": 32}
    two = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    with Subject(two, ROWS) as subject:
        verdict = run_trial("low-coherence", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.IMPOSSIBLE
    assert "of which it needs 3, and has 2" in verdict.sentence
