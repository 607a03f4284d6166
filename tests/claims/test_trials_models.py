"""The trials of tokens-cluster, attention-clusters and mlp-prevents: planted models, and the models in the box."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from helmscope.claims import factorial
from helmscope.claims.evidence import Paired
from helmscope.claims.experiments import tokens_cluster
from helmscope.claims.factorial import SILENT, WHOLE, ArmStatistics, Factorial, choose_prompts
from helmscope.claims.registry import registered_case
from helmscope.claims.trial import try_claim
from helmscope.geometry.sphere import retract
from helmscope.models.boxed import box_texts, sibling_history
from helmscope.models.load import load
from helmscope.models.subject import Subject
from helmscope.observe.pairs import clustering
from helmscope.types import HelmscopeError, Region, Ruling, Trajectory
from support.planted_models import planted_model, planted_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helmscope.claims.trial import Trial

CLAIMS = ("tokens-cluster", "attention-clusters", "mlp-prevents")
S, R = Ruling.SUPPORTED, Ruling.REFUTED
# what scatters gathered tokens also makes the whole model less gathered than attention alone
TABLE = {
    "never move": (R, R, R),
    "gather": (S, S, R),
    "scatter": (R, R, S),
    "gather by attention only": (R, S, S),
}


def planted(kind: str, seed: int) -> Subject:
    return Subject(planted_model(kind, seed), planted_rows(seed))


@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_models_get_the_right_ruling(kind: str, seed: int) -> None:
    """The effect is about 0.1, twice the 0.05 that decides."""
    with planted(kind, seed) as subject:
        verdicts = [try_claim(claim, seed=seed, quick=True, subject=subject).verdict for claim in CLAIMS]
    for verdict, expected in zip(verdicts, TABLE[kind], strict=True):
        assert verdict.ruling is expected, verdict.sentence
        assert verdict.interval is not None
        assert verdict.interval.n == 32
        assert abs(verdict.interval.estimate) < 0.13
        assert all(control.as_expected for control in verdict.controls)


def test_arms_are_recorded_once_for_all_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    original = Factorial._measure
    monkeypatch.setattr(
        Factorial,
        "_measure",
        lambda self, arm, **few: measured.append((arm, *few.values())) or original(self, arm, **few),
    )
    with planted("gather", 2) as subject:
        for claim in CLAIMS:
            try_claim(claim, quick=True, subject=subject)
        assert len(measured) == len(set(measured)) >= 6
        subject.close()
        try_claim("mlp-prevents", quick=True, subject=subject)
        assert len(measured) > len(set(measured))  # they are dropped with the subject


def test_what_cannot_be_decided() -> None:
    rows = planted_rows(0)
    with Subject(planted_model("gather", 0), rows[:31]) as few, Subject(few.model, [row[:17] for row in rows]) as short:
        for subject, number in ((few, "31 of 31"), (short, "0 of 32")):
            for claim in CLAIMS:
                verdict = try_claim(claim, quick=True, subject=subject).verdict
                assert verdict.ruling is Ruling.IMPOSSIBLE
                assert f"{number} texts" in verdict.sentence
                assert "at least 16 positions apart" in verdict.sentence


def test_few_first_tokens_are_mentioned() -> None:
    rows = [[1 + 3 * (k % 5), *row[1:]] for k, row in enumerate(planted_rows(0))]
    with Subject(planted_model("gather", 0), rows) as subject:
        verdict = try_claim("mlp-prevents", quick=True, subject=subject).verdict
    assert "only 5 distinct first tokens" in verdict.sentence


def test_an_arm_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without P = I the control is impossible; without silent halves so is the claim."""
    original = Factorial._measure

    def refuse(*refused: object) -> None:
        def measure(self: Factorial, arm: object, *, few: bool) -> ArmStatistics:
            if arm in refused:
                raise HelmscopeError("its attention is not in the registry")
            return original(self, arm, few=few)

        monkeypatch.setattr(Factorial, "_measure", measure)

    refuse(factorial.NO_MIXING, factorial.NEGATED, factorial.AT_WHOLE_RADIUS, factorial.MLP)
    with planted("gather by attention only", 0) as subject:
        verdicts = [try_claim(claim, quick=True, subject=subject).verdict for claim in CLAIMS]
        assert [verdict.ruling for verdict in verdicts] == [R, S, S]
        assert verdicts[1].controls[1].ruling is Ruling.IMPOSSIBLE
        assert "-V could not be tried: its attention is not in the registry." in verdicts[1].sentence
        subject.close()
        refuse(SILENT)
        assert {try_claim(claim, quick=True, subject=subject).verdict.ruling for claim in CLAIMS} == {Ruling.IMPOSSIBLE}


def test_prompts_have_as_many_first_tokens_as_they_can() -> None:
    tokenizer = load("A").tokenizer
    texts, firsts = choose_prompts(64, Subject("A"), 16)
    assert len(set(texts)) == 64
    every = {ids[0] for ids in tokenizer(box_texts())["input_ids"]}
    assert firsts == len({tokenizer(text)["input_ids"][0] for text in texts}) == min(64, len(every)) >= 32


def test_a_token_that_begins_all_texts_is_not_their_first() -> None:
    rows = planted_rows(0)
    with Subject(planted_model("gather", 0), [[95, *row[:-1]] for row in rows]) as subject:
        texts, firsts = choose_prompts(32, subject, 16)
    assert (len(texts), firsts) == (32, 32)


def test_centred_states_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    states = retract(torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64))
    centred = tokens_cluster._centred(Trajectory(torch.arange(2.0), states)).states
    for depth in range(2):
        for prompt in range(3):
            x = states[depth, prompt].numpy()
            y = x - x[1:].mean(0)
            np.testing.assert_allclose(
                centred[depth, prompt].numpy(), y / np.linalg.norm(y, axis=1, keepdims=True), atol=1e-14
            )


def test_clustering_without_ranks_is_the_same_otherwise() -> None:
    path = Trajectory(torch.zeros(1), retract(torch.randn(1, 2, 5, 3, generator=torch.Generator().manual_seed(0))))
    plain, full = (clustering(path, gap=1, ranks=ranks) for ranks in (False, True))
    assert set(plain.data_vars) == {"share", "inner_product"}
    assert plain.identical(full[["share", "inner_product"]])


def test_a_paired_difference_has_its_sign_flips() -> None:
    at_most = Region(text="at most -.05", high=-0.05)
    differences = -0.1 + 0.01 * np.arange(32) / 32
    assessed = Paired(differences, "prompts").weigh(at_most)
    assert assessed.ruling is S
    assert assessed.basis == "from 32 prompts, paired, sign flips p = 4.7e-10"
    assert Paired(np.zeros(8), "prompts").weigh(at_most).ruling is R


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    """Model A on the first words of the texts in the box."""
    with Subject("A", [" ".join(text.split()[:22]) for text in box_texts()]) as subject:
        yield subject


@pytest.fixture(scope="module")
def short(subject: Subject) -> tuple[Trial, ...]:
    return tuple(try_claim(claim, quick=True, subject=subject) for claim in CLAIMS)


def test_model_a_on_a_few_words(short: tuple[Trial, ...]) -> None:
    whole, alone, difference = short
    assert whole.verdict.ruling is R
    assert [exhibit.title for exhibit in whole.verdict.exhibits] == ["Certificate of A"]
    assert whole.verdict.where.startswith("model A, 32 texts with 32 distinct first tokens;")
    paired = difference.data.share
    assert paired.dims == ("prompt", "depth", "arm")
    assert list(paired.arm.values) == ["whole model", "attention alone", "MLP alone", "attention alone, untrained"]
    last = paired.isel(depth=-1)
    gap = float((last.sel(arm="whole model") - last.sel(arm="attention alone")).mean())
    assert difference.verdict.interval is not None
    assert difference.verdict.interval.estimate == pytest.approx(gap, abs=1e-12)
    assert "arXiv:2103.03404" in alone.verdict.sentence
    assert "theory's flow" in whole.verdict.sentence
    labels = [case.name for case in whole.verdict.described]
    assert "growth, figure 1 as printed, i != j" in labels
    assert "growth of the share, all pairs i != j" in labels


def test_the_sibling_is_shown_over_training(short: tuple[Trial, ...]) -> None:
    shown = short[2].data.over_training.sel(trained_arm="attention alone")
    stored = sibling_history().share.sel(arm="attention alone", level=0.9).isel(depth=-1)
    np.testing.assert_allclose(shown.mean("prompt"), stored.sel(step=shown.step).mean("prompt"), atol=1e-6)
    assert "In a sibling of A" in short[2].verdict.sentence


def test_the_share_of_a_against_its_own_hidden_states(subject: Subject) -> None:
    arms = Factorial.of(registered_case("tokens-cluster", quick=True, subject=subject))
    found = arms.arm(WHOLE)
    loaded = load("A", attention="eager")
    for prompt in (0, 7):
        ids = loaded.tokenizer(arms.prompts[prompt])["input_ids"]
        with torch.no_grad():
            out = loaded.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        state = out.hidden_states[6][0].double()
        x = retract(state - state.mean(-1, keepdim=True))
        inner = [float(x[i] @ x[j]) for i in range(1, len(ids)) for j in range(i + 16, len(ids)) if ids[i] != ids[j]]
        assert found.mean[12, prompt] == pytest.approx(np.mean(inner), abs=1e-5)
        assert found.share[12, prompt] == pytest.approx(np.mean([each > 0.9 for each in inner]))


def test_which_mlps_matter() -> None:
    """In a full run each MLP is left in alone, and left out alone: either one leaves a single step of attention."""
    with Subject(planted_model("gather by attention only", 3), planted_rows(3, 64)) as subject:
        trial = try_claim("mlp-prevents", subject=subject)
    assert trial.verdict.ruling is S
    assert trial.data.by_layer.dims == ("prompt", "layer", "layer_is")
    means = trial.data.by_layer.mean("prompt").sel(layer_is="the MLP left out").values
    assert means.max() > 0.05
    assert "With a single MLP off, it is largest" in trial.verdict.sentence
