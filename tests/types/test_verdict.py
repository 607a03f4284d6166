"""Intervals, regions and verdicts: what they hold, how they read, and that they do not change."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

import helmscope as hs
from helmscope.types import interval_text, region_text
from support.refusal import refused

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hs.Interval(1.0, 2.0, 3.0, 4), "the interval is [2.0, 3.0], but it must contain the estimate 1.0"),
        (lambda: hs.Interval(1.0, NAN, 3.0, 4), "must contain the estimate 1.0"),
        (lambda: hs.Interval(NAN, 0.0, 3.0, 4), "estimate is nan, but it must be a finite number"),
        (lambda: hs.Interval(INF, 0.0, INF, 4), "estimate is inf, but it must be a finite number"),
        (lambda: hs.Interval(1.0, None, 3.0, 4), "the interval is [None, 3.0]"),
        (lambda: hs.Interval(1.0, 0.0, 3.0, 0), "n is 0, but it must be a whole number >= 1"),
        (
            lambda: hs.types.Region(text="x", low=2.0, high=1.0),
            "region is 2 to 1, but its bounds must be finite and in order",
        ),
        (
            lambda: hs.types.Region(text="x", low="a"),
            "low of region 'x' is 'a', but it must be a finite number",
        ),
        (lambda: hs.types.Region(text="x", high=INF), "high of region 'x' is inf, but it must be a finite number"),
        (lambda: hs.types.Region(text="x", above=1.0, high=1.0), "but its bounds must be finite and in order"),
        (lambda: hs.types.Region(text="x", low=1.0, above=1.0), "but it must have at most one of the two"),
    ],
)
def test_what_is_no_interval_or_no_region_is_refused(make, words):
    refused(make, words)


def test_an_interval_takes_numbers_of_numpy_and_infinite_ends():
    assert hs.Interval(1, -INF, np.float32(2.0), np.int64(3)).low == -INF


def test_the_ends_of_a_region():
    assert hs.types.Region(text="", low=0.9, high=1.1).ends == (0.9, 1.1)
    assert hs.types.Region(text="", high=1e-12).ends == (-INF, 1e-12)
    assert hs.types.Region(text="").ends == (-INF, INF)
    assert [hs.types.Region(text="", **bound).bounded for bound in ({}, {"low": 0.0}, {"high": 0.0})] == [
        False,
        True,
        True,
    ]


def test_intervals_and_regions_in_figures():
    assert interval_text(hs.Interval(1.00000012, 1.0000001, 1.00000014, 32)) == "1.00000012 [1.0000001, 1.00000014]"
    assert interval_text(hs.Interval(0.5, -INF, INF, 2)) == "0.5 [-inf, inf]"
    assert interval_text(hs.Interval(0.0, -1e308, 1e308, 2)) == "0 [-1e+308, 1e+308]"
    assert interval_text(hs.Interval(3.3e-16, 0.0, 3.3e-16, 1_000)) == "3.3e-16 [0, 3.3e-16]"
    assert interval_text(None) == "no interval"
    assert region_text(hs.types.Region(text="described")) == "no bounds"
    assert region_text(hs.types.Region(text="", low=0.999999, high=1.000001)) == "0.999999 to 1.000001"


def test_exclusive_bounds_in_words():
    assert region_text(hs.types.Region(text="", above=0.0)) == "above 0"
    assert region_text(hs.types.Region(text="", below=0.5)) == "below 0.5"
    assert region_text(hs.types.Region(text="", above=0.0, high=1.0)) == "above 0 and at most 1"


def test_a_verdict_holds_what_a_reader_needs_and_does_not_change():
    interval, region = hs.Interval(0.1, 0.05, 0.3, 12), hs.types.Region(text="slope > 0", above=0.0)
    slope = hs.types.JudgedCondition("slope", region, interval, hs.types.Ruling.SUPPORTED)
    fit = hs.types.JudgedCondition("fit", region, interval, hs.types.Ruling.REFUTED)
    verdict = hs.Verdict(claim="c1", ruling=hs.types.Ruling.REFUTED, conditions=(slope, fit))
    assert (verdict.interval.estimate, verdict.region.above, verdict.deciding) == (0.1, 0.0, fit)
    assert verdict == hs.Verdict(**{item.name: getattr(verdict, item.name) for item in fields(verdict)})
    with pytest.raises(FrozenInstanceError):
        verdict.ruling = hs.types.Ruling.REFUTED
    assert [ruling.value for ruling in hs.types.Ruling] == [
        *("supported", "refuted", "inconclusive", "true by construction", "premise impossible here", "described"),
    ]


@pytest.mark.parametrize(
    ("by_theory", "measured", "shown"),
    [
        ("true, not sharp", None, "true, not sharp"),
        ("true, not sharp", "true", "true, not sharp"),
        ("true", "false", "false"),
        ("false", "not decided", "false"),
        ("not decided", "true", "true"),
        ("not testable", None, "not testable"),
    ],
)
def test_the_judgment_of_what_is_printed(by_theory, measured, shown):
    judgment = hs.types.Judgment
    printed = hs.types.PrintedStatement("", "", judgment(by_theory), "", measured and judgment(measured))
    assert printed.judgment.value == shown
