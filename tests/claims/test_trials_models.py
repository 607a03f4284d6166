"""The trials of tokens-cluster, attention-clusters and mlp-prevents: planted models, and the bundled models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from scipy import stats

from helmscope.claims import arm_statistics
from helmscope.claims.arm_statistics import SILENT, WHOLE, ArmStatistics, Factorial
from helmscope.claims.arm_table import arm_table
from helmscope.claims.evidence import PairedDifferences
from helmscope.claims.experiments import tokens_cluster
from helmscope.claims.prompts import choose_prompts
from helmscope.claims.reading import entry
from helmscope.claims.registry import registered_case
from helmscope.claims.trial import run_trial
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.geometry.sphere import retract
from helmscope.models.bundled_models import ablated_training_history, story_texts
from helmscope.models.load import load
from helmscope.models.subject import Subject
from helmscope.observe.pairs import cloud_statistics
from helmscope.observe.token_decoding import token_decoding_accuracy
from helmscope.types import HelmscopeError, Region, Ruling, Trajectory
from support.planted_cases import CASES as TRANSPORT_CASES
from support.planted_layer_cases import LAYER_CASES
from support.planted_models import CLAIMS, RULINGS, planted_model, planted_rows
from support.trials import interval, named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helmscope.claims.trial import Trial

S, R = Ruling.SUPPORTED, Ruling.REFUTED


def planted(kind: str, seed: int) -> Subject:
    return Subject(planted_model(kind, seed), planted_rows(seed))


@pytest.mark.parametrize("kind", RULINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_models_get_the_right_ruling(kind: str, seed: int) -> None:
    """The effect is about 0.1, twice the 0.05 that decides."""
    with planted(kind, seed) as subject:
        verdicts = [run_trial(claim, seed=seed, quick=True, subject=subject).verdict for claim in CLAIMS]
    for verdict, expected in zip(verdicts, RULINGS[kind], strict=True):
        assert verdict.ruling is expected, verdict.sentence
        assert verdict.interval is not None
        assert verdict.interval.n == 32
        assert abs(verdict.interval.estimate) < 0.13
        assert all(control.as_expected for control in verdict.controls)


def test_the_published_table_of_planted_models() -> None:
    """At least 97 % of the seeds of each kind have the right ruling, and none the opposite one."""
    published = json.loads((Path(__file__).parents[2] / "docs" / "planted.json").read_text())
    for claim in CLAIMS:
        assert published["hashes"][f"{claim}, entry"] == entry(claim).hash
    for kind, expected in RULINGS.items():
        for claim, ruling in zip(CLAIMS, expected, strict=True):
            rulings = published["rulings"][kind][claim]
            assert len(rulings) == 100
            assert rulings.count(ruling.value) >= 0.97 * len(rulings)
            assert set(rulings) <= {ruling.value, Ruling.INCONCLUSIVE.value}


def test_the_published_rulings_of_planted_cases() -> None:
    """Every claim with planted cases has one of either kind; no seed of a published row has the opposite ruling."""
    published = json.loads((Path(__file__).parents[2] / "docs" / "planted.json").read_text()).get("cases", {})
    cases = (*TRANSPORT_CASES, *LAYER_CASES)
    for claim in {case.claim for case in cases}:
        assert {S, R} <= {case.right for case in cases if case.claim == claim}
    for case in cases:
        rulings = published.get(case.name, {"rulings": []})["rulings"]
        assert set(rulings) <= {case.right.value, Ruling.INCONCLUSIVE.value}, case.name


def test_arms_are_recorded_once_for_all_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    original = Factorial._measure
    monkeypatch.setattr(
        Factorial,
        "_measure",
        lambda self, arm, **options: measured.append((arm, *options.values())) or original(self, arm, **options),
    )
    with planted("gather", 2) as subject:
        for claim in CLAIMS:
            run_trial(claim, quick=True, subject=subject)
        assert len(measured) == len(set(measured)) >= 6
        subject.close()
        run_trial("mlp-prevents", quick=True, subject=subject)
        assert len(measured) > len(set(measured))  # they are dropped with the subject


def test_too_few_prompts_decide_nothing() -> None:
    rows = planted_rows(0)
    with Subject(planted_model("gather", 0), rows[:31]) as few, Subject(few.model, [row[:17] for row in rows]) as short:
        for subject, numbers in ((few, "31 among its 31 texts"), (short, "0 among its 32 texts")):
            for claim in CLAIMS:
                verdict = run_trial(claim, quick=True, subject=subject).verdict
                assert verdict.ruling is Ruling.INCONCLUSIVE
                assert verdict.sentence.startswith("The claim needs 32 different texts, each with two different tokens")
                assert numbers in verdict.sentence


@pytest.mark.parametrize("claim", [*CLAIMS, "residual-flow"])
def test_copies_of_a_text_are_not_replicates(claim: str) -> None:
    """Sixteen texts twice are sixteen prompts."""
    if claim == "residual-flow":
        subject = Subject("A", story_texts()[:16] * 2)
    else:
        subject = Subject(planted_model("gather", 0), planted_rows(0)[:16] * 2)
    with subject:
        verdict = run_trial(claim, quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert "has 16 among its 32 texts" in verdict.sentence


def test_prompts_that_begin_alike_decide_nothing() -> None:
    """What was measured is shown, and no condition is decided."""
    rows = [[1 + 3 * (k % 5), *row[1:]] for k, row in enumerate(planted_rows(0))]
    with Subject(planted_model("gather by attention only", 0), rows) as subject:
        verdicts = [run_trial(claim, quick=True, subject=subject).verdict for claim in CLAIMS]
    for verdict in verdicts:
        assert verdict.sentence.startswith("Nothing is decided: the 32 prompts have only 5 distinct first tokens, and")
        assert {verdict.ruling, *(condition.ruling for condition in verdict.conditions)} == {Ruling.INCONCLUSIVE}
        assert verdict.interval is not None
        assert "would decide it" not in verdict.sentence


def test_mlp_prevents_needs_attention_that_gathers() -> None:
    """MLPs that scatter tokens which begin close together lower the share, but there is nothing that they prevent."""
    with planted("scatter", 0) as subject:
        verdict = run_trial("mlp-prevents", quick=True, subject=subject).verdict
    difference, growth = verdict.conditions
    assert (difference.ruling, growth.ruling) == (S, Ruling.IMPOSSIBLE)
    assert verdict.ruling is Ruling.IMPOSSIBLE
    assert verdict.interval == growth.interval
    assert "the claim presupposes: With attention alone the share grows by at least 0.05" in verdict.sentence


def test_the_control_of_mlp_prevents_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """If silent blocks were measured to gather tokens, the trial would prove nothing."""
    original = Factorial._measure

    def measure(self: Factorial, arm: object, *, only_described: bool) -> ArmStatistics:
        gathering = arm_statistics.ATTENTION if arm == SILENT else arm
        return original(self, gathering, only_described=only_described)

    monkeypatch.setattr(Factorial, "_measure", measure)
    with planted("gather by attention only", 0) as subject:
        verdict = run_trial("mlp-prevents", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert verdict.sentence.startswith("A control failed")


def test_an_arm_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without P = I the control is impossible; without silent halves so is the claim."""
    original = Factorial._measure

    def refuse(*refused: object) -> None:
        def measure(self: Factorial, arm: object, *, only_described: bool) -> ArmStatistics:
            if arm in refused:
                raise HelmscopeError("its attention is not in the registry")
            return original(self, arm, only_described=only_described)

        monkeypatch.setattr(Factorial, "_measure", measure)

    changed = (
        arm_statistics.NO_MIXING,
        arm_statistics.NEGATED,
        arm_statistics.AT_WHOLE_RADIUS,
        arm_statistics.NEGATED_WITH_MLP,
    )
    refuse(*changed, arm_statistics.MLP)
    with planted("gather by attention only", 0) as subject:
        verdicts = [run_trial(claim, quick=True, subject=subject).verdict for claim in CLAIMS]
        assert [verdict.ruling for verdict in verdicts] == [R, S, S]
        assert verdicts[1].controls[1].ruling is Ruling.IMPOSSIBLE
        assert named(verdicts[0], "growth, values negated, MLPs on").ruling is Ruling.IMPOSSIBLE
        assert "not tried" in arm_table(verdicts)
        assert "-V could not be tried: its attention is not in the registry." in verdicts[1].sentence
        subject.close()
        refuse(SILENT)
        assert {run_trial(claim, quick=True, subject=subject).verdict.ruling for claim in CLAIMS} == {Ruling.IMPOSSIBLE}


def test_prompts_have_as_many_first_tokens_as_they_can() -> None:
    tokenizer = load("A").tokenizer
    texts, firsts = choose_prompts(64, Subject("A"), gap=16)
    assert len(set(texts)) == 64
    every = {ids[0] for ids in tokenizer(story_texts())["input_ids"]}
    assert firsts == len({tokenizer(text)["input_ids"][0] for text in texts}) == min(64, len(every)) >= 32


def test_a_token_that_begins_all_texts_is_not_their_first() -> None:
    rows = planted_rows(0)
    with Subject(planted_model("gather", 0), [[95, *row[:-1]] for row in rows]) as subject:
        texts, firsts = choose_prompts(32, subject, gap=16)
    assert (len(texts), firsts) == (32, 32)


def test_centered_states_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    states = retract(torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64))
    centered = tokens_cluster._centered(Trajectory(torch.arange(2.0), states)).states
    for depth in range(2):
        for prompt in range(3):
            x = states[depth, prompt].numpy()
            y = x - x[1:].mean(0)
            np.testing.assert_allclose(
                centered[depth, prompt].numpy(), y / np.linalg.norm(y, axis=1, keepdims=True), atol=1e-14
            )


def test_clustering_without_ranks_is_the_same_otherwise() -> None:
    path = Trajectory(torch.zeros(1), retract(torch.randn(1, 2, 5, 3, generator=torch.Generator().manual_seed(0))))
    plain, full = (cloud_statistics(path, gap=1, ranks=ranks) for ranks in (False, True))
    assert set(plain.data_vars) == {"aligned_pair_share", "mean_inner_product"}
    assert plain.identical(full[["aligned_pair_share", "mean_inner_product"]])


def test_a_paired_difference_has_its_sign_flips() -> None:
    at_most = Region(text="at most -.05", high=-0.05)
    differences = -0.1 + 0.01 * np.arange(32) / 32
    assessed = PairedDifferences(differences, "prompts").weigh(at_most)
    assert assessed.ruling is S
    assert assessed.basis == "from 32 prompts, paired, sign flips p = 4.7e-10"
    assert PairedDifferences(np.zeros(8), "prompts").weigh(at_most).ruling is R


@pytest.mark.parametrize(("twin", "effect"), [(0.0, "raises"), (0.3, "lowers")])
def test_untrained_twins_are_a_contrast_and_decide_nothing(
    monkeypatch: pytest.MonkeyPatch, twin: float, effect: str
) -> None:
    """Attention gathers for random weights too: the ruling is the same whether twins gather less or more."""
    growth = twin + 0.01 * np.arange(20).reshape(5, 4) / 20
    shares = np.stack([np.zeros_like(growth), growth], 1)
    monkeypatch.setattr(Factorial, "twin_shares", lambda self, arm: shares * (arm is not WHOLE))
    with planted("gather by attention only", 0) as subject:
        alone, difference = (run_trial(claim, quick=True, subject=subject).verdict for claim in CLAIMS[1:])
    assert (alone.ruling, difference.ruling) == (S, S)
    assert "untrained twins" not in [control.name for control in alone.controls]
    assert f"training {effect} it" in alone.sentence
    over_prompts, over_twins = (
        interval(alone, f"growth minus that of untrained twins, over {replicates}")
        for replicates in ("prompts", "twins")
    )
    assert (over_prompts.n, over_twins.n) == (4, 5)
    assert over_prompts.estimate == pytest.approx(over_twins.estimate, abs=1e-12)
    assert interval(difference, "difference, untrained twins").estimate == pytest.approx(-growth.mean())


def test_a_contrast_needs_both_intervals_on_one_side() -> None:
    """With twins that differ by more than the effect, prompts alone would say that training matters."""
    trained, scattered = np.array([0.50, 0.51, 0.52, 0.53]), np.array([0.0, 0.2, 0.4, 0.6, 0.8])[:, None] + np.zeros(4)
    assert TwinContrast(trained, scattered).sign == 0
    over_prompts, over_twins = (TwinContrast(trained, scattered).differences.mean(axis) for axis in (0, 1))
    assert stats.ttest_1samp(over_prompts, 0).pvalue < 0.05 < stats.ttest_1samp(over_twins, 0).pvalue
    assert TwinContrast(trained, scattered / 100).sign == 1
    assert TwinContrast(-trained, scattered / 100).sign == -1


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    """Model A on the first words of the bundled texts."""
    with Subject("A", [" ".join(text.split()[:22]) for text in story_texts()]) as subject:
        yield subject


@pytest.fixture(scope="module")
def short(subject: Subject) -> tuple[Trial, ...]:
    return tuple(run_trial(claim, quick=True, subject=subject) for claim in CLAIMS)


def test_model_a_on_a_few_words(short: tuple[Trial, ...]) -> None:
    whole, alone, difference = short
    assert whole.verdict.ruling is R
    assert [attachment.title for attachment in whole.verdict.attachments] == ["Certificate of A"]
    assert whole.verdict.setting.startswith("model A, 32 prompts with 32 distinct first tokens;")
    paired = difference.data.share
    assert paired.dims == ("prompt", "depth", "arm")
    arms = ["whole model", "attention alone", "MLP alone", "attention alone, untrained", "no mixing (P = I)"]
    assert list(paired.arm.values) == [*arms, "at the whole model's radius"]
    last = paired.isel(depth=-1)
    gap = float((last.sel(arm="whole model") - last.sel(arm="attention alone")).mean())
    assert difference.verdict.interval is not None
    assert difference.verdict.interval.estimate == pytest.approx(gap, abs=1e-12)
    assert "arXiv:2103.03404" in alone.verdict.sentence
    assert "theory's flow" in whole.verdict.sentence
    labels = [case.name for case in whole.verdict.described]
    assert "growth, raw states, i != j" in labels
    assert "growth of the share, all pairs i != j" in labels
    for arm in ("no mixing (P = I)", "values negated"):
        assert interval(whole.verdict, f"growth, {arm}, MLPs on").n == 8


def test_figure_1_as_printed_against_plain_counts(short: tuple[Trial, ...], subject: Subject) -> None:
    """One prompt of 256 tokens; raw states: the mean over coordinates is not removed, and the first token counts."""
    shown = short[0].data.figure_1
    assert shown.dims == ("prompt", "inner_product_of_raw_states", "at_depth", "pairs")
    assert int(shown.notnull().all(["inner_product_of_raw_states", "at_depth", "pairs"]).sum()) == 1
    loaded = load("A", attention="eager")
    ids = loaded.tokenizer(" ".join(subject.texts))["input_ids"][:256]
    with torch.no_grad():
        out = loaded.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    last = subject.record([ids]).residual_stream(depth=24)[0].double()
    shares = {}
    for depth, states in ((12, out.hidden_states[6][0].double()), (24, last)):
        unit = states / torch.tensor([[math.sqrt(sum(float(c) ** 2 for c in token))] for token in states])
        cosines = (unit @ unit.mT).numpy()
        every = np.ones_like(cosines, bool)
        for pairs, chosen in (("i != j", ~np.eye(256, dtype=bool)), ("with the diagonal", every)):
            counts = np.histogram(cosines[chosen].clip(-1, 1), bins=np.linspace(-1, 1, 41))[0]
            found = shown.sel(prompt=0, at_depth=depth, pairs=pairs).values
            np.testing.assert_allclose(found, counts / counts.sum(), atol=3e-4)  # a few pairs on the edge of a bin
            shares[pairs] = found[-2:].sum()
    assert "one prompt of 256 tokens, raw states: the share above 0.9 goes from" in short[0].verdict.sentence
    assert f"to {shares['i != j']:.4f} for i != j" in short[0].verdict.sentence
    assert shares["with the diagonal"] == pytest.approx(shares["i != j"] + (1 - shares["i != j"]) / 256)


def test_the_difference_from_twins_is_that_of_the_table(short: tuple[Trial, ...]) -> None:
    """The trained value beside that of the twins is from their prompts, so that the two differ by the difference."""
    for trial, name in ((short[0], "growth"), (short[1], "growth"), (short[2], "difference")):
        trained, twins, difference = (
            interval(trial.verdict, f"{name}{what}")
            for what in (
                ", trained, on the prompts of the twins",
                ", untrained twins",
                " minus that of untrained twins, over prompts",
            )
        )
        assert trained.n == difference.n == 4
        assert trained.estimate - twins.estimate == pytest.approx(difference.estimate, abs=1e-12)


def test_the_table_of_arms_has_a_row_for_each_subject(short: tuple[Trial, ...]) -> None:
    heading, row = arm_table(trial.verdict for trial in short).splitlines()
    assert heading.split("  ")[0] == "subject"
    verdict = short[2].verdict
    shares = [interval(verdict, f"share at the last depth, {arm}") for arm in ("whole model", "attention alone")]
    assert [share.n for share in shares] == [32, 32]
    assert row.startswith("A ")
    assert f"{shares[1].estimate:.3f} [{shares[1].low:.3f}, {shares[1].high:.3f}]" in row
    assert row.count("[") == 5
    untrained = interval(verdict, "share at the last depth, attention alone, untrained")
    assert untrained.n == 5
    assert row.endswith(f"{untrained.estimate:.3f} [{max(0, untrained.low):.3f}, {untrained.high:.3f}]")
    assert shares[0].estimate - shares[1].estimate == pytest.approx(verdict.interval.estimate, abs=1e-12)
    assert arm_table([short[0].verdict]) == ""


def test_the_sibling_is_shown_over_training(short: tuple[Trial, ...]) -> None:
    shown = short[2].data.over_training.sel(trained_arm="attention alone")
    stored = ablated_training_history().aligned_pair_share.sel(arm="attention alone", level=0.9).isel(depth=-1)
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


def test_tokens_are_decoded_by_layer_in_each_arm(short: tuple[Trial, ...], subject: Subject) -> None:
    """Against the instrument at single depths, on the two halves of the recorded prompts."""
    decoded = short[2].data.tokens_decoded
    assert decoded.dims == ("prompt", "after_layer", "decoded_in")
    assert list(decoded.decoded_in.values) == ["whole model", "attention alone", "MLP alone"]
    arms = Factorial.of(registered_case("mlp-prevents", quick=True, subject=subject))
    recording = arms.recording()
    ids, path = recording.batch.inputs["input_ids"], recording.on_sphere
    for layer in (0, 5, 12):
        halves = [Trajectory(path.times[:1], path.states[2 * layer, k::2][None], path.weights[:, k::2]) for k in (0, 1)]
        alone = token_decoding_accuracy(*halves, reference_ids=ids[::2], test_ids=ids[1::2]).accuracy.values[0]
        np.testing.assert_allclose(decoded.sel(after_layer=layer, decoded_in="whole model").values[:16], alone)
    assert named(short[2].verdict, "tokens decoded at the last depth, whole model").interval is not None


def test_a_full_run_has_untrained_twins_in_every_arm() -> None:
    """Without attention, and without mixing, twins of random weights gather nothing."""
    with Subject(planted_model("gather by attention only", 3), planted_rows(3, 64)) as subject:
        verdict = run_trial("tokens-cluster", subject=subject).verdict
    labels = ("MLP alone", "no mixing (P = I), MLP off", "values negated, MLP off")
    labels += ("no mixing (P = I), MLPs on", "values negated, MLPs on")
    for label in labels:
        growth = interval(verdict, f"growth, {label}, untrained")
        assert growth.n == 5
        assert abs(growth.estimate) < 0.05


def test_which_mlps_matter() -> None:
    """In a full run each MLP is left in alone, and left out alone: either one leaves a single step of attention."""
    with Subject(planted_model("gather by attention only", 3), planted_rows(3, 64)) as subject:
        trial = run_trial("mlp-prevents", subject=subject)
    assert trial.verdict.ruling is S
    assert trial.data.by_layer.dims == ("prompt", "layer", "layer_is")
    means = trial.data.by_layer.mean("prompt").sel(layer_is="the MLP left out").values
    assert means.max() > 0.05
    assert "With a single MLP off, it is largest" in trial.verdict.sentence
