"""The judge: the region of the entry decides unless a control fails, and the sentence reports why."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from helmscope.claims.entry import parse_entry
from helmscope.claims.finding import Check, Count, Described, Finding, Identity, Impossible, Replicates
from helmscope.claims.judge import judge
from helmscope.types import HelmscopeError, Region, Ruling

TOML = """
id = "my-claim"
statement = "s"
source = "mine"
printed = ""
corrected = ""
decided = ["simulation"]
experiment = "e"
statistic = "x"
null = "n"
version = 1
region = { text = "At least 0.9.", low = 0.9 }
"""
ENTRY = parse_entry(TOML, "my-claim.toml")
DATA = xr.Dataset({"share": 1.0, "share_stderr": 0.0}, attrs={"n": 64})
FAILS, HOLDS = Check("V = -I", Count(0, 64)), Count(64, 64, of="starts")


def test_the_verdict_holds_the_entry_the_region_and_the_interval() -> None:
    verdict = judge(ENTRY, Finding(evidence=HOLDS, null=FAILS, data=DATA, remark="All 64 met.", where="here"))
    assert (verdict.claim, verdict.ruling, verdict.interval.n) == ("my-claim", Ruling.SUPPORTED, 64)
    assert (verdict.interval.estimate, verdict.interval.high) == (1.0, 1.0)
    assert verdict.interval.low == pytest.approx(0.025 ** (1 / 64), abs=1e-12)
    assert verdict.region == ENTRY.region == Region(text="At least 0.9.", low=0.9)
    assert (verdict.entry_hash, verdict.where, verdict.printed, verdict.also) == (ENTRY.hash, "here", None, ())
    assert verdict.null is not None
    assert (verdict.null.ruling, verdict.null.interval.estimate) == (Ruling.REFUTED, 0.0)
    assert verdict.null.region == ENTRY.region
    assert verdict.sentence == "Supported: 1 [0.944, 1], from 64 of 64 starts. All 64 met."


@pytest.mark.parametrize("place", ["null", "printed"])
def test_a_failed_control_rules_out_refutation(place: str) -> None:
    parts = {"null": FAILS, "printed": FAILS} | {place: Check("V = -I", Count(64, 64))}
    assert judge(ENTRY, Finding(evidence=Count(0, 64), data=DATA, **parts)).ruling is Ruling.INCONCLUSIVE


def test_a_refuted_claim_stays_refuted_when_a_further_part_fails() -> None:
    part = Check("the same at beta = 9", Count(0, 64), Ruling.SUPPORTED)
    assert judge(ENTRY, Finding(evidence=Count(0, 64), null=FAILS, data=DATA, also=(part,))).ruling is Ruling.REFUTED
    assert judge(ENTRY, Finding(evidence=HOLDS, null=FAILS, data=DATA, also=(part,))).ruling is Ruling.INCONCLUSIVE


def test_a_claim_about_models_tried_in_simulation_says_so() -> None:
    entry = parse_entry(TOML.replace('["simulation"]', '["simulation", "model"]'), "my-claim.toml")
    finding = Finding(evidence=HOLDS, null=FAILS, data=DATA, where="simulation on the unit sphere")
    assert judge(entry, finding).sentence.endswith("Tried in simulation only, not yet on a model.")
    assert "on a model" not in judge(ENTRY, finding).sentence


@pytest.mark.parametrize("place", ["null", "printed", "also"])
def test_a_failed_control_rules_out_support(place: str) -> None:
    bad = Check("V = -I", Count(64, 64))
    parts = {"null": FAILS, "printed": FAILS, "also": (FAILS,)} | {place: (bad,) if place == "also" else bad}
    verdict = judge(ENTRY, Finding(evidence=HOLDS, data=DATA, **parts))
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert verdict.sentence.startswith(
        "A control failed, so there is no ruling: V = -I: supported, expected refuted. Inconclusive: 1 [0.944, 1]"
    )


def test_a_control_may_have_its_own_region() -> None:
    small = Check("error", Identity(np.zeros(1_000)), Ruling.BY_CONSTRUCTION, Region(text="exact", high=1e-12))
    verdict = judge(ENTRY, Finding(evidence=HOLDS, null=FAILS, data=DATA, also=(small,)))
    assert verdict.ruling is Ruling.SUPPORTED
    assert verdict.also[0].region == Region(text="exact", high=1e-12)


def test_the_sentence_reports_the_printed_form() -> None:
    printed = Check("rate e^-beta", Replicates([0.1, 0.2, 0.3]))
    sentence = judge(ENTRY, Finding(evidence=HOLDS, null=FAILS, data=DATA, printed=printed)).sentence
    assert sentence.endswith("As printed (rate e^-beta): refuted, 0.2 [-0.0484, 0.448].")


def test_an_inconclusive_verdict_names_the_sample_size_that_would_decide() -> None:
    verdict = judge(ENTRY, Finding(evidence=Replicates([0.0, 1.0, 2.0, 3.0]), null=FAILS, data=DATA))
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert "About 47 replicates would decide it." in verdict.sentence  # 4 (3.1824 x 1.29099 / 2 / .6)^2 = 46.9
    verdict = judge(ENTRY, Finding(evidence=Count(0, 64, refutes=False), null=FAILS, data=DATA))
    assert "No number of replicates is known that would decide it." in verdict.sentence


def test_descriptions_and_impossible_premises_name_no_sample_size() -> None:
    entry = parse_entry(TOML.replace(", low = 0.9", ""), "my-claim.toml")
    null = Check("V = -I", Count(0, 64), region=Region(text="at least .9", low=0.9))
    verdict = judge(entry, Finding(evidence=Described([3.0, 4.0, 5.0]), null=null, data=DATA))
    assert verdict.sentence == (
        "Inconclusive: 4 [1.52, 6.48], from 3 seeds, described and not ruled on. "
        "Fewer than 32 replicates: the interval assumes that they are normally distributed."
    )
    verdict = judge(entry, Finding(evidence=Impossible("only I is causal and bistochastic"), null=null, data=DATA))
    assert (verdict.ruling, verdict.interval) == (Ruling.IMPOSSIBLE, None)
    assert verdict.sentence == "Only I is causal and bistochastic."


def test_narrow_intervals_are_printed_with_enough_digits() -> None:
    values = 1 + 1e-8 * np.array([1.0, 2.0, 3.0])
    sentence = judge(ENTRY, Finding(evidence=Replicates(values), null=FAILS, data=DATA)).sentence
    assert "1.00000002 [0.9999999952, 1.000000045]" in sentence


def test_anything_but_a_finding_with_a_measurement_raises() -> None:
    with pytest.raises(HelmscopeError, match="experiment of 'my-claim' returned a float, but it must return a Finding"):
        judge(ENTRY, 0.5)  # type: ignore[arg-type]
    with pytest.raises(HelmscopeError, match="'share' has neither 'share_stderr'"):
        judge(ENTRY, Finding(evidence=HOLDS, null=FAILS, data=xr.Dataset({"share": 1.0}, attrs={"n": 2})))
