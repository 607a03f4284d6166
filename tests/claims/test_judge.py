"""The judge: the entry's region decides, controls may forbid, and the sentence says what happened."""

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


def test_the_verdict_carries_entry_region_and_numbers() -> None:
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
def test_a_control_that_fails_forbids_a_refutation_too(place: str) -> None:
    parts = {"null": FAILS, "printed": FAILS} | {place: Check("V = -I", Count(64, 64))}
    assert judge(ENTRY, Finding(evidence=Count(0, 64), data=DATA, **parts)).ruling is Ruling.INCONCLUSIVE


def test_a_part_that_fails_does_not_save_a_refuted_claim() -> None:
    part = Check("the same at beta = 9", Count(0, 64), Ruling.SUPPORTED)
    assert judge(ENTRY, Finding(evidence=Count(0, 64), null=FAILS, data=DATA, also=(part,))).ruling is Ruling.REFUTED
    assert judge(ENTRY, Finding(evidence=HOLDS, null=FAILS, data=DATA, also=(part,))).ruling is Ruling.INCONCLUSIVE


def test_a_claim_on_models_says_what_was_not_tried() -> None:
    entry = parse_entry(TOML.replace('["simulation"]', '["simulation", "model"]'), "my-claim.toml")
    finding = Finding(evidence=HOLDS, null=FAILS, data=DATA, where="simulation on the unit sphere")
    assert judge(entry, finding).sentence.endswith("This is the simulation; on a model the claim is not yet tried.")
    assert "on a model" not in judge(ENTRY, finding).sentence


@pytest.mark.parametrize("place", ["null", "printed", "also"])
def test_a_control_that_fails_forbids_support(place: str) -> None:
    bad = Check("V = -I", Count(64, 64))
    parts = {"null": FAILS, "printed": FAILS, "also": (FAILS,)} | {place: (bad,) if place == "also" else bad}
    verdict = judge(ENTRY, Finding(evidence=HOLDS, data=DATA, **parts))
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert verdict.sentence.startswith(
        "A control failed, so nothing is ruled: V = -I: supported where refuted was due. Inconclusive: 1 [0.944, 1]"
    )


def test_controls_have_regions_of_their_own_where_given() -> None:
    small = Check("error", Identity(np.zeros(1_000)), Ruling.BY_CONSTRUCTION, Region(text="exact", high=1e-12))
    verdict = judge(ENTRY, Finding(evidence=HOLDS, null=FAILS, data=DATA, also=(small,)))
    assert verdict.ruling is Ruling.SUPPORTED
    assert verdict.also[0].region == Region(text="exact", high=1e-12)


def test_what_the_source_prints_is_told() -> None:
    printed = Check("rate e^-beta", Replicates([0.1, 0.2, 0.3]))
    sentence = judge(ENTRY, Finding(evidence=HOLDS, null=FAILS, data=DATA, printed=printed)).sentence
    assert sentence.endswith("As printed (rate e^-beta): refuted, 0.2 [-0.0484, 0.448].")


def test_an_inconclusive_verdict_names_the_sample_size_that_would_decide() -> None:
    verdict = judge(ENTRY, Finding(evidence=Replicates([0.0, 1.0, 2.0, 3.0]), null=FAILS, data=DATA))
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert "About 47 replicates would decide it." in verdict.sentence  # 4 (3.1824 x 1.29099 / 2 / .6)^2 = 46.9
    verdict = judge(ENTRY, Finding(evidence=Count(0, 64, refutes=False), null=FAILS, data=DATA))
    assert "No number of replicates is known to decide it." in verdict.sentence


def test_descriptions_and_impossible_premises_name_no_sample_size() -> None:
    entry = parse_entry(TOML.replace(", low = 0.9", ""), "my-claim.toml")
    null = Check("V = -I", Count(0, 64), region=Region(text="at least .9", low=0.9))
    verdict = judge(entry, Finding(evidence=Described([3.0, 4.0, 5.0]), null=null, data=DATA))
    assert verdict.sentence == (
        "Inconclusive: 4 [1.52, 6.48], from 3 seeds, described and not ruled on. "
        "Fewer than 32 replicates: the interval rests on their law being normal."
    )
    verdict = judge(entry, Finding(evidence=Impossible("only I is causal and bistochastic"), null=null, data=DATA))
    assert (verdict.ruling, verdict.interval) == (Ruling.IMPOSSIBLE, None)
    assert verdict.sentence == "Only I is causal and bistochastic."


def test_digits_tell_the_ends_of_a_narrow_interval_apart() -> None:
    values = 1 + 1e-8 * np.array([1.0, 2.0, 3.0])
    sentence = judge(ENTRY, Finding(evidence=Replicates(values), null=FAILS, data=DATA)).sentence
    assert "1.00000002 [0.9999999952, 1.000000045]" in sentence


def test_what_is_no_finding_or_no_measurement_is_refused() -> None:
    with pytest.raises(HelmscopeError, match="experiment of 'my-claim' gave a float, but it must give a Finding"):
        judge(ENTRY, 0.5)  # type: ignore[arg-type]
    with pytest.raises(HelmscopeError, match="'share' has neither 'share_stderr'"):
        judge(ENTRY, Finding(evidence=HOLDS, null=FAILS, data=xr.Dataset({"share": 1.0}, attrs={"n": 2})))
