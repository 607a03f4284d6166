"""Read the verdict of a trial by the names of its entry, and run a trial with other constants or a planted fault."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from helmscope.claims import reading
from helmscope.types import Control, Interval, JudgedCondition, Ruling, Verdict


def named(verdict: Verdict, name: str) -> JudgedCondition | Control:
    """The condition, control or described quantity of that name."""
    (judged,) = [each for each in (*verdict.conditions, *verdict.controls, *verdict.described) if each.name == name]
    return judged


def interval(verdict: Verdict, name: str) -> Interval:
    """The interval of the condition, control or described quantity of that name."""
    measured = named(verdict, name).interval
    assert measured is not None
    return measured


def rulings(verdict: Verdict) -> dict[str, Ruling]:
    """The rulings of all conditions and controls, by name."""
    return {each.name: each.ruling for each in (*verdict.conditions, *verdict.controls)}


def failures(verdict: Verdict) -> set[str]:
    """The names of the refuted conditions and of the controls that did not come out as expected."""
    refuted = {condition.name for condition in verdict.conditions if condition.ruling is Ruling.REFUTED}
    return refuted | {control.name for control in verdict.controls if not control.as_expected}


def set_constants(monkeypatch: pytest.MonkeyPatch, claim: str, **constants: Any) -> None:
    """Replace constants of a packaged entry, for experiments that read them by ``case.constant``."""
    entry = reading.entry(claim)
    assert constants.keys() <= entry.constants.keys()
    changed = msgspec.structs.replace(entry, constants=entry.constants | constants)
    monkeypatch.setitem(reading._packaged_entries(), claim, changed)
