"""The trials of spectral, low-pass, mlp-reconditions, operator-class and value-roles: on planted models, on tiny ones,
and with faults in what they measure with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.claims.experiments import low_pass, mlp_reconditions, operator_class, spectral, value_roles
from helmscope.claims.experiments.low_pass import moving_average
from helmscope.claims.experiments.mlp_reconditions import average_earlier, whiten_by_half
from helmscope.claims.experiments.value_roles import PAIRS, Roles
from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Ruling
from support.model_families import tiny_model
from support.planted_cases import case
from support.trials import failures, interval, named, rulings, set_constants

S, R, DESCRIBED = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.DESCRIBED
TOKENS = 24
SMALL = {
    "spectral": {"tokens": TOKENS, "twins": 2, "gradient_prompts_quick": 4},
    "low-pass": {"tokens": TOKENS, "twins": 2},
    "mlp-reconditions": {"tokens": TOKENS, "twins": 2},
    "operator-class": {"tokens": TOKENS, "twins": 2, "twin_prompts_quick": 8},
    "value-roles": {"tokens": TOKENS, "twins": 2},
}


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": TOKENS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).double().eval()
    ids = torch.randint(1, 60, (40, TOKENS), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 1 + torch.arange(40)
    with Subject(model, ids) as made:
        yield made


def tried(claim: str, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Any:
    set_constants(monkeypatch, claim, **SMALL[claim])
    return run_trial(claim, quick=True, subject=subject).verdict


@pytest.mark.parametrize(
    ("claim", "kind", "ruling"),
    [
        ("low-pass", "average", S),
        ("low-pass", "difference", R),
        ("mlp-reconditions", "expansion", S),
        ("mlp-reconditions", "projection", R),
        ("operator-class", "transport", S),
        ("operator-class", "mixing", R),
        ("operator-class", "retrieval", R),
    ],
)
def test_planted_models_get_the_right_verdict(claim: str, kind: str, ruling: Ruling) -> None:
    verdict = case(claim, kind).verdict(0)
    assert verdict.ruling is ruling, verdict.sentence
    conditions = {each.name for each in verdict.conditions}
    assert failures(verdict) <= conditions  # all controls hold
    if claim == "operator-class":
        clear = {"transport": (1, 1), "mixing": (0, 1), "retrieval": (1, 0)}[kind]
        shares = [interval(verdict, f"transport above {other}").estimate for other in ("mixing", "retrieval")]
        assert shares == list(clear)
        assert interval(verdict, f"R^2 of {kind}, mean over heads").estimate == pytest.approx(1, abs=0.02)


def test_the_constructions_of_table_2_land_on_their_closed_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "spectral", sizes=[64, 256])
    verdict = run_trial("spectral", quick=True, subject=Subject.simulation()).verdict
    assert verdict.ruling is S, verdict.sentence
    found = rulings(verdict)
    assert found.pop("closed forms") is Ruling.BY_CONSTRUCTION
    assert found == {
        "mixing": S,
        "rank of retrieval": S,
        "rho of retrieval": S,
        "diag(1.5, 0.5)": R,
        "averaging taken for transport": R,
    }
    assert interval(verdict, "diag(1.5, 0.5)").low == pytest.approx(2 / 3, abs=1e-12)


@pytest.mark.parametrize("fault", ["the largest singular value alone", "the condition of another k"])
def test_a_fault_in_the_spectrum_refutes_the_closed_forms(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = spectral.operator_spectrum

    def wrong(operator: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
        found = right(operator, **options)
        if fault == "the largest singular value alone":
            return found | {
                "nuclear_retention": torch.linalg.matrix_norm(operator, 2)
                .unsqueeze(-1)
                .expand_as(found["nuclear_retention"])
                / operator.shape[-1]
            }
        return found | {"inverse_condition_number": found["inverse_condition_number"].roll(1, -1)}

    set_constants(monkeypatch, "spectral", sizes=[16, 64], retrieval_seeds_quick=16, largest_identity=64)
    monkeypatch.setattr(spectral, "operator_spectrum", wrong)
    verdict = run_trial("spectral", quick=True, subject=Subject.simulation()).verdict
    assert rulings(verdict)["closed forms"] is R


def test_a_tiny_model_is_described_by_its_kernels(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = tried("spectral", subject, monkeypatch)
    assert verdict.ruling is DESCRIBED
    assert not failures(verdict)
    silent = interval(verdict, "blocks that write nothing")
    assert (silent.low, silent.high) == (1.0, 1.0)
    # random kernels average over the tokens so far: their rows are those of a triangular matrix
    average = np.tril(np.ones((TOKENS, TOKENS))) / np.arange(1, TOKENS + 1)[:, None]
    s = np.linalg.svd(average, compute_uv=False)
    assert interval(verdict, "attention of a model").estimate == pytest.approx(s.sum() / TOKENS, rel=0.02)
    assert interval(verdict, "log kappa of kernel, quantile 0.5 over heads").estimate == pytest.approx(
        np.log(s[0] / s[-1]), rel=0.05
    )
    names = {each.name for each in verdict.described}
    both = "no residual connections, norms at fixed scales"
    assert f"growth of the log gradient norm per block toward the input, {both}" in names
    assert "stable rank of W_Q over that of a normal matrix" in names
    assert interval(verdict, "stable rank of W_in over that of a normal matrix").estimate == pytest.approx(1, abs=0.2)


def test_an_encoder_has_kernels_and_no_gradient_of_a_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(3, 90, (34, TOKENS), generator=torch.Generator().manual_seed(2))
    ids[:, 0] = 3 + torch.arange(34)
    with Subject(tiny_model("bert"), ids) as encoder:
        verdict = tried("spectral", encoder, monkeypatch)
        assert not failures(verdict)
        assert not [each for each in verdict.described if "gradient" in each.name]
        roles = tried("value-roles", encoder, monkeypatch)
        assert roles.ruling is Ruling.IMPOSSIBLE
        for claim in ("low-pass", "mlp-reconditions", "operator-class"):
            verdict = tried(claim, encoder, monkeypatch)
            assert verdict.ruling in (S, R, Ruling.INCONCLUSIVE), claim
            assert failures(verdict) <= {each.name for each in verdict.conditions}, claim


@pytest.mark.parametrize("claim", ["low-pass", "mlp-reconditions", "operator-class"])
def test_a_tiny_model_is_tried_with_all_controls(claim: str, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = tried(claim, subject, monkeypatch)
    assert failures(verdict) <= {each.name for each in verdict.conditions}
    assert named(verdict, "blocks that write nothing").ruling is Ruling.IMPOSSIBLE
    assert verdict.ruling in (S, R, Ruling.INCONCLUSIVE)
    assert any("untrained twins" in each.name for each in verdict.described)


def test_a_fault_in_the_frequencies_fails_the_controls(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """With low frequencies taken for high ones an average is taken for a difference."""
    right = low_pass.fourier_spectrum

    def turned(*args: Any, **options: Any) -> Any:
        found = right(*args, **options)
        return found.assign(high_frequency_share=1 - found.high_frequency_share)

    monkeypatch.setattr(low_pass, "fourier_spectrum", turned)
    verdict = tried("low-pass", subject, monkeypatch)
    assert rulings(verdict)["white noise averaged"] is R
    assert rulings(verdict)["white noise differenced"] is S
    assert verdict.ruling is Ruling.INCONCLUSIVE


def test_a_fault_in_the_rank_fails_the_controls(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mlp_reconditions.cloud_spectrum

    def inverse(*args: Any, **options: Any) -> Any:
        found = right(*args, **options)
        return found.assign(effective_rank=1 / found.effective_rank)

    monkeypatch.setattr(mlp_reconditions, "cloud_spectrum", inverse)
    verdict = tried("mlp-reconditions", subject, monkeypatch)
    assert {"planted whitening", "planted averaging"} <= failures(verdict)
    assert verdict.ruling is Ruling.INCONCLUSIVE


def test_the_deciding_cloud_alone_gives_the_same_changes(subject: Subject) -> None:
    recording = subject.recording
    alone = mlp_reconditions._rank_changes(recording)
    among = mlp_reconditions._changes(mlp_reconditions.cloud_spectrum(recording, progress=False), "effective_rank")
    np.testing.assert_allclose(alone.mlp, among.mlp, rtol=0, atol=1e-12)
    np.testing.assert_allclose(alone.attention, among.attention, rtol=0, atol=1e-12)


def test_models_of_writes_taken_for_each_other_fail_the_controls(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = operator_class.head_write_r_squared
    monkeypatch.setattr(
        operator_class, "head_write_r_squared", lambda *args, **options: right(*args, **options).flip(-1)
    )
    verdict = tried("operator-class", subject, monkeypatch)
    assert {"planted mixing", "planted transport"} <= failures(verdict)
    assert verdict.ruling is Ruling.INCONCLUSIVE


def test_the_roles_of_values_are_described(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = tried("value-roles", subject, monkeypatch)
    assert verdict.ruling is DESCRIBED
    assert not failures(verdict)
    assert interval(verdict, "blocks that write nothing").high == 0.0


def test_the_correlations_of_roles_against_scipy() -> None:
    rng = np.random.default_rng(0)
    roles = Roles(rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 3, 5)))
    roles.relevance[:, -1] = np.nan  # the last layer has no later one
    found = roles.correlations()
    for number, (a, b) in enumerate(PAIRS):
        layers = range(2) if 1 in (a, b) else range(3)
        for prompt in range(2):
            each = [stats.spearmanr(roles[a][prompt, k], roles[b][prompt, k]).statistic for k in layers]
            assert found[number, prompt] == pytest.approx(np.mean(each), rel=1e-12)
    many = Roles(*rng.normal(size=(3, 400, 3, 5)))
    tied = Roles(many.assembly, many.assembly, many.assembly)
    assert tied.correlations() == pytest.approx(np.ones((3, 400)))
    assert abs(tied.correlations(np.random.default_rng(1)).mean(1)).max() < 0.05
    assert value_roles.ROLES == ("assembly", "relevance", "transport")


def test_what_is_planted_does_what_it_says() -> None:
    x = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    s, t = (torch.linalg.svdvals(each) for each in (x, whiten_by_half(x)))
    np.testing.assert_allclose(t, s.sqrt(), rtol=1e-12)
    averaged, moved = moving_average(x, 4), average_earlier(x, 0.5)
    for i in range(9):
        np.testing.assert_allclose(averaged[i], x[max(0, i - 3) : i + 1].mean(0), atol=1e-14)
        expected = x[i] if i == 0 else (x[i] + x[:i].mean(0)) / 2
        np.testing.assert_allclose(moved[i], expected, atol=1e-14)
