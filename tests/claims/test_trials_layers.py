"""The trials of whitening, mobility and jko-step on models: planted layers get the right ruling."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Ruling
from support.planted_cases import other_constants
from support.planted_layer_cases import layer_case
from support.planted_layers import steps
from support.trials import interval, named, rulings, set_constants

S, R, INCONCLUSIVE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
VOCABULARY, TOKENS = 64, 32


def rows_of(count: int = 32) -> list[tuple[int, ...]]:
    ids = torch.randint(2, VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = torch.arange(count) % (VOCABULARY - 2) + 2  # different first tokens
    return [tuple(row) for row in ids.tolist()]


def random_model() -> GPT2LMHeadModel:
    """Two small layers with random weights."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=8, n_head=1, n_layer=2, n_inner=8,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("kind", "expected"), [("carried", S), ("gradient", R)])
def test_whitening_helps_exactly_the_drift_that_carries_the_mobility(kind: str, expected: Ruling) -> None:
    verdict = layer_case("whitening", kind).verdict(0)
    assert verdict.ruling is expected, verdict.sentence
    assert all(control.as_expected for control in verdict.controls), rulings(verdict)
    assert "Premise: small-steps" in verdict.sentence
    if kind == "gradient":
        assert interval(verdict, "share before, mean over layers").high < 1e-6


@pytest.mark.parametrize(("kind", "expected"), [("carried", S), ("gradient", R)])
def test_a_drift_that_carries_sigma_has_its_mobility(kind: str, expected: Ruling) -> None:
    """Of b = Sigma grad V only the antisymmetric part of Sigma^-1 b is left that a varying Sigma makes."""
    verdict = layer_case("mobility", kind).verdict(0)
    assert verdict.ruling is expected, verdict.sentence
    assert all(control.as_expected for control in verdict.controls), rulings(verdict)
    assert "Premise: small-steps" in verdict.sentence
    assert "writes divided by its length" in verdict.setting


@pytest.mark.parametrize(("kind", "expected"), [("diffusion, exact step", S), ("gathered by noise", R), ("turned", R)])
def test_diffusion_and_an_exact_step_close_the_gap_and_others_do_not(kind: str, expected: Ruling) -> None:
    """The first layer of the first model spreads its tokens as diffusion does, the second is an exact step."""
    with Subject(*layer_case("jko-step", kind).build(seed=0)) as subject:
        trial = run_trial("jko-step", quick=True, subject=subject)
    verdict = trial.verdict
    assert verdict.ruling is expected, verdict.sentence
    assert all(control.as_expected for control in verdict.controls), rulings(verdict)
    assert "Premise: small-steps" in verdict.sentence
    shares = trial.data.share.mean("prompt").values
    if expected is S:
        assert shares[0] > 0.98
        assert shares[1] > 0.85
    else:
        assert shares[0] > 0.98  # the exact step comes first there
        assert shares[1] < 0


def test_diffusion_alone_closes_the_gap() -> None:
    """Where no MLP writes anything, there is no gap of an MLP half-step to describe."""
    with Subject(*steps("spreads")) as subject, other_constants("jko-step", {"twins": 2}):
        verdict = run_trial("jko-step", quick=True, subject=subject).verdict
    assert named(verdict, "share of the gap closed").ruling is S, verdict.sentence
    assert interval(verdict, "share of the gap closed").low > 0.9
    described = [each.name for each in verdict.described]
    assert "share of the gap closed in leading principal axes, least over layers" in described
    assert not [name for name in described if "MLP half-step" in name]


def test_random_weights_have_no_mobility(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "mobility", twins=2)
    with Subject(random_model(), rows_of()) as subject:
        verdict = run_trial("mobility", quick=True, subject=subject).verdict
    assert verdict.ruling is R, verdict.sentence
    assert all(control.as_expected for control in verdict.controls), rulings(verdict)
    assert 0.35 < interval(verdict, "random field").estimate < 0.5  # (k - 1) / (2 k) for k = 6 directions


def without_writes(*parts: str, layer: int | None = None) -> GPT2LMHeadModel:
    """The random model without the writes of some parts, in one layer or in all."""
    model = random_model()
    with torch.no_grad():
        for number, block in enumerate(model.transformer.h):
            for part in parts if layer in (None, number) else ():
                getattr(block, part).c_proj.weight.zero_()
                getattr(block, part).c_proj.bias.zero_()
    return model


@pytest.mark.parametrize(
    ("claim", "parts", "said"),
    [
        ("whitening", ["attn"], "No layer has both a Sigma and an MLP that writes"),
        ("whitening", ["mlp"], "No layer has both a Sigma and an MLP that writes"),
        ("mobility", ["attn"], "Sigma is 0 at every token"),
        ("jko-step", ["attn", "mlp"], "No layer has a minimizer other than its input"),
    ],
)
def test_where_no_layer_writes_there_is_no_premise(claim: str, parts: list[str], said: str) -> None:
    with Subject(without_writes(*parts), rows_of()) as subject:
        verdict = run_trial(claim, quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.IMPOSSIBLE
    assert verdict.sentence.startswith(said)


@pytest.mark.parametrize("claim", ["whitening", "mobility", "jko-step"])
def test_a_layer_that_writes_nothing_is_left_out(claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if claim != "whitening":
        set_constants(monkeypatch, claim, twins=2)
    with Subject(without_writes("attn", "mlp", layer=1), rows_of()) as subject:
        verdict = run_trial(claim, quick=True, subject=subject).verdict
    assert verdict.interval.n == 32
    assert "nan" not in verdict.sentence


@pytest.mark.parametrize("claim", ["whitening", "mobility", "jko-step"])
def test_too_few_texts(claim: str) -> None:
    with Subject(random_model(), rows_of(8)) as subject:
        verdict = run_trial(claim, quick=True, subject=subject).verdict
    assert verdict.ruling is INCONCLUSIVE
    assert "needs 32 different texts" in verdict.sentence
