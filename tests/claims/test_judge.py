"""The judge: the regions of the entry decide unless a control fails, and the sentence reports why."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from helmscope.claims.entry import SubjectKind, parse_entry
from helmscope.claims.evidence import (
    Count,
    Evidence,
    IdentityErrors,
    PairedDifferences,
    PremiseImpossible,
    Replicates,
    ReplicatesInEveryCase,
)
from helmscope.claims.finding import Finding
from helmscope.claims.judge import judge
from helmscope.types import HelmscopeError, Judgment, Region, Ruling

HEAD = """
id = "my-claim"
version = 3
statement = "s"
source = "mine"
decided = ["simulation"]
experiment = "e"
null = "n"
"""
SHARE = """
[[conditions]]
name = "share"
statistic = "x"
text = "At least 0.9."
low = 0.9
"""
ERROR = """
[[conditions]]
name = "error"
statistic = "y"
text = "Exact."
high = 1e-12
"""
NULL = """
[[controls]]
name = "V = -I"
text = "It must fail."
"""
PRINTED = """
[printed]
text = "The share is at most 0.95"
place = "equation 3"
judgment = "true, not sharp"
reason = "It is smaller."
high = 0.95
"""
ENTRY = parse_entry(HEAD + SHARE + NULL, "my-claim.toml")
BOTH = parse_entry(HEAD + SHARE + ERROR, "my-claim.toml")
DATA = xr.Dataset({"share": 1.0, "share_stderr": 0.0}, attrs={"n": 64})
FAILS, HOLDS = {"V = -I": Count(0, 64)}, Count(64, 64, of="starts")
SMALL, LARGE = IdentityErrors(np.zeros(1_000)), IdentityErrors(np.ones(1_000))


def test_the_verdict_holds_the_entry_the_region_and_the_interval() -> None:
    verdict = judge(ENTRY, Finding(evidence=HOLDS, controls=FAILS, data=DATA, remark="All 64 met.", setting="here"))
    assert (verdict.claim, verdict.ruling, verdict.interval.n) == ("my-claim", Ruling.SUPPORTED, 64)
    assert (verdict.interval.estimate, verdict.interval.high) == (1.0, 1.0)
    assert verdict.interval.low == pytest.approx(0.025 ** (1 / 64), abs=1e-12)
    assert verdict.region == ENTRY.conditions[0].region == Region(text="At least 0.9.", low=0.9)
    assert (verdict.provenance.entry, verdict.provenance.version) == (ENTRY.hash, 3)
    assert (verdict.setting, verdict.printed, verdict.described) == ("here", None, ())
    (null,) = verdict.controls
    assert (null.ruling, null.interval.estimate, null.as_expected) == (Ruling.REFUTED, 0.0, True)
    assert null.region == Region(text="It must fail.", low=0.9)
    assert verdict.sentence == "Supported (share): 1 [0.944, 1], from 64 of 64 starts. All 64 met."


@pytest.mark.parametrize("evidence", [HOLDS, Count(0, 64)])
def test_a_failed_control_rules_out_any_ruling(evidence: Count) -> None:
    verdict = judge(ENTRY, Finding(evidence=evidence, data=DATA, controls={"V = -I": Count(64, 64)}))
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert verdict.sentence.startswith(
        "A control failed, so there is no ruling: V = -I: supported, expected refuted. Inconclusive (share): "
    )


@pytest.mark.parametrize(
    ("share", "error", "ruling"),
    [
        (HOLDS, SMALL, Ruling.SUPPORTED),
        (HOLDS, LARGE, Ruling.REFUTED),
        (Count(0, 64), SMALL, Ruling.REFUTED),
        (Count(60, 64), SMALL, Ruling.INCONCLUSIVE),
        (Count(60, 64), LARGE, Ruling.REFUTED),
    ],
)
def test_both_conditions_are_judged(share: Count, error: IdentityErrors, ruling: Ruling) -> None:
    verdict = judge(BOTH, Finding(evidence={"share": share, "error": error}, data=DATA))
    assert verdict.ruling is ruling
    assert [condition.name for condition in verdict.conditions] == ["share", "error"]
    assert "(share): " in verdict.sentence
    assert "(error): " in verdict.sentence


def test_identities_alone_are_true_by_construction() -> None:
    entry = parse_entry(HEAD + ERROR, "my-claim.toml")
    assert judge(entry, Finding(evidence=SMALL, data=DATA)).ruling is Ruling.BY_CONSTRUCTION


@pytest.mark.parametrize(
    ("finding", "sentence"),
    [
        ({"evidence": HOLDS}, "returned no controls, but my-claim.toml names 'V = -I'"),
        (
            {"evidence": HOLDS, "controls": {"V = I": HOLDS}},
            "returned the controls 'V = I', but my-claim.toml names",
        ),
        (
            {"evidence": {"shar": HOLDS}, "controls": FAILS},
            "returned the conditions 'shar', but my-claim.toml names 'share'",
        ),
        ({"evidence": HOLDS, "controls": FAILS, "printed": HOLDS}, "tests what is printed, but the entry gives it no"),
    ],
)
def test_conditions_and_controls_are_those_of_the_entry(finding: dict[str, object], sentence: str) -> None:
    with pytest.raises(HelmscopeError, match=sentence):
        judge(ENTRY, Finding(data=DATA, **finding))


def test_an_error_names_the_file_of_the_experiment() -> None:
    for finding, sentence in (
        ({"share": 1.0}, "experiment of 'my-claim' in mine.py returned a dict, but it must return a Finding"),
        (Finding(evidence=HOLDS), "experiment of 'my-claim' in mine.py returned no controls, but my-claim.toml"),
    ):
        with pytest.raises(HelmscopeError, match=sentence):
            judge(ENTRY, finding, file="mine.py")
    modeled = parse_entry('statement = "s"\nconditions = [{ low = 0.9, on = "model" }]', "my-claim.toml")
    with pytest.raises(HelmscopeError, match=r"ran on a simulation, but my-claim.toml has no condition on one"):
        judge(modeled, Finding(evidence=HOLDS))


def test_words_that_an_entry_leaves_out_are_not_shown_twice() -> None:
    entry = parse_entry('statement = "s"\nconditions = [{ low = 0.9 }]\ncontrols = [{ name = "V = -I" }]', "mine.toml")
    verdict = judge(entry, Finding(evidence=HOLDS, controls=FAILS))
    assert [case.region.text for case in (*verdict.conditions, *verdict.controls)] == ["At least 0.9."] * 2
    assert "region: at least 0.9.<" in verdict._repr_html_()
    assert "None" not in verdict._repr_html_()


def test_a_control_may_have_its_own_region_and_expectation() -> None:
    own = 'low = 0.5\nexpected = ["supported", "inconclusive"]\n'
    entry = parse_entry(HEAD + SHARE + NULL + own, "my-claim.toml")
    verdict = judge(entry, Finding(evidence=HOLDS, controls={"V = -I": Count(40, 64)}, data=DATA))
    assert verdict.ruling is Ruling.SUPPORTED
    assert verdict.controls[0].region == Region(text="It must fail.", low=0.5)
    assert judge(entry, Finding(evidence=HOLDS, controls=FAILS, data=DATA)).ruling is Ruling.INCONCLUSIVE


def test_simulation_and_model_have_their_own_conditions() -> None:
    text = HEAD.replace('["simulation"]', '["simulation", "model"]')
    text += SHARE + 'on = "simulation"\n' + ERROR + 'on = "model"\n' + NULL + 'on = "simulation"\n'
    entry = parse_entry(text, "my-claim.toml")
    assert judge(entry, Finding(evidence=HOLDS, controls=FAILS, data=DATA)).ruling is Ruling.SUPPORTED
    on_model = judge(entry, Finding(evidence=SMALL, data=DATA), subject_kind=SubjectKind.MODEL)
    assert (on_model.ruling, on_model.conditions[0].name) == (Ruling.BY_CONSTRUCTION, "error")


@pytest.mark.parametrize(
    ("evidence", "measured", "shown"),
    [
        (Count(10, 64), Judgment.TRUE, "true, not sharp"),
        (Count(64, 64), Judgment.UNDECIDED, "true, not sharp"),
        (Replicates([1.2, 1.21, 1.22]), Judgment.FALSE, "false"),
    ],
)
def test_what_is_printed_is_judged_apart(evidence: Count, measured: Judgment, shown: str) -> None:
    entry = parse_entry(HEAD + PRINTED + SHARE, "my-claim.toml")
    verdict = judge(entry, Finding(evidence=HOLDS, data=DATA, printed=evidence))
    assert verdict.ruling is Ruling.SUPPORTED  # whatever is printed
    assert verdict.printed.measured is measured
    assert verdict.printed.judgment.value == shown
    assert f"As printed (The share is at most 0.95): {shown}, " in verdict.sentence
    unmeasured = judge(entry, Finding(evidence=HOLDS, data=DATA)).printed
    assert (unmeasured.measured, unmeasured.judgment) == (None, Judgment.NOT_SHARP)


def test_an_inconclusive_verdict_names_the_sample_size_that_would_decide() -> None:
    verdict = judge(ENTRY, Finding(evidence=Replicates([0.0, 1.0, 2.0, 3.0]), controls=FAILS, data=DATA))
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert "About 47 replicates would decide it." in verdict.sentence  # 4 (3.1824 x 1.29099 / 2 / .6)^2 = 46.9
    verdict = judge(ENTRY, Finding(evidence=Count(0, 64, refutes=False), controls=FAILS, data=DATA))
    assert "No number of replicates is known that would decide it." in verdict.sentence


@pytest.mark.parametrize(
    ("evidence", "warned"),
    [
        (Count(16, 16), False),  # Clopper and Pearson's interval holds for any n
        (Count(31, 31), False),
        (Replicates([1.0] * 31), True),
        (Replicates([1.0, 1.1] * 15, skewed=True), True),
        (Replicates([1.0, 1.1] * 16), False),
        (PairedDifferences([1.0, 1.1] * 8), True),
        (ReplicatesInEveryCase([[1.0, 1.1] * 8]), True),
    ],
)
def test_only_intervals_that_assume_normality_warn_of_few_replicates(evidence: Evidence, warned: bool) -> None:
    verdict = judge(ENTRY, Finding(evidence=evidence, controls=FAILS, data=DATA))
    assert ("Fewer than 32 replicates" in verdict.sentence) is warned
    both = parse_entry(HEAD + SHARE + ERROR + NULL, "my-claim.toml")
    verdict = judge(both, Finding(evidence={"share": evidence, "error": SMALL}, controls=FAILS, data=DATA))
    assert ("Fewer than 32 replicates" in verdict.sentence) is warned


def test_descriptions_and_impossible_premises_name_no_sample_size() -> None:
    entry = parse_entry((HEAD + SHARE).replace("low = 0.9", ""), "my-claim.toml")
    verdict = judge(entry, Finding(evidence=Replicates([3.0, 4.0, 5.0]), data=DATA))
    assert verdict.ruling is Ruling.DESCRIBED
    assert verdict.sentence == (
        "Described (share): 4 [1.52, 6.48], from 3 seeds. "
        "Fewer than 32 replicates: the interval assumes that they are normally distributed."
    )
    verdict = judge(ENTRY, Finding.impossible("only I is causal and bistochastic"))
    assert (verdict.ruling, verdict.interval) == (Ruling.IMPOSSIBLE, None)
    assert verdict.sentence == "Only I is causal and bistochastic."


def test_an_impossible_premise_keeps_what_is_described() -> None:
    described = {"column sums": Replicates([3.0, 4.0, 5.0])}
    verdict = judge(ENTRY, Finding.impossible("only I is causal and bistochastic", described=described))
    assert verdict.ruling is Ruling.IMPOSSIBLE
    assert [(each.name, each.interval.estimate) for each in verdict.described] == [("column sums", 4.0)]


def test_one_impossible_condition_makes_the_claim_impossible() -> None:
    """A condition that is only described beside it keeps its value."""
    entry = parse_entry(HEAD + SHARE + ERROR.replace("high = 1e-12", ""), "my-claim.toml")
    evidence = {"share": PremiseImpossible("there is no share"), "error": Replicates([3.0, 4.0, 5.0])}
    verdict = judge(entry, Finding(evidence=evidence, data=DATA))
    assert verdict.ruling is Ruling.IMPOSSIBLE
    assert verdict.conditions[1].interval.estimate == 4.0
    assert "Premise impossible here (share): there is no share." in verdict.sentence


def test_described_quantities_are_reported_and_never_ruled_on() -> None:
    described = {"mean": Replicates([3.0, 4.0, 5.0])}
    verdict = judge(ENTRY, Finding(evidence=HOLDS, controls=FAILS, data=DATA, described=described))
    assert verdict.ruling is Ruling.SUPPORTED
    assert [(quantity.name, quantity.ruling) for quantity in verdict.described] == [("mean", Ruling.DESCRIBED)]


def test_narrow_intervals_are_printed_with_enough_digits() -> None:
    values = 1 + 1e-8 * np.array([1.0, 2.0, 3.0])
    sentence = judge(ENTRY, Finding(evidence=Replicates(values), controls=FAILS, data=DATA)).sentence
    assert "1.00000002 [0.9999999952, 1.000000045]" in sentence


def test_anything_but_a_finding_with_a_measurement_raises() -> None:
    with pytest.raises(HelmscopeError, match="experiment of 'my-claim' returned a float, but it must return a Finding"):
        judge(ENTRY, 0.5)  # type: ignore[arg-type]
    with pytest.raises(HelmscopeError, match="'share' has neither 'share_stderr'"):
        judge(ENTRY, Finding(evidence=HOLDS, controls=FAILS, data=xr.Dataset({"share": 1.0}, attrs={"n": 2})))
