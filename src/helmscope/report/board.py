"""The board of a report: what was found for each claim and subject, the most informative findings first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helmscope.types import HelmscopeError, Ruling, Verdict, check_name, interval_text

if TYPE_CHECKING:
    from helmscope.claims.entry import Entry
    from helmscope.claims.trial import Trial

FALSE_VERDICT_RATE = 0.05  # of an interval verdict whose truth is exactly on its threshold


@dataclass(frozen=True)
class Badge:
    """The label of a ruling: text and symbol, so that it does not rely on color alone."""

    key: str
    text: str
    sign: str
    meaning: str


BADGES = {
    Ruling.SUPPORTED: Badge(
        "supported",
        Ruling.SUPPORTED.value,
        "\u2713",
        "The whole 95 % interval of every condition is inside its region.",
    ),
    Ruling.REFUTED: Badge(
        "refuted", Ruling.REFUTED.value, "\u2717", "The whole 95 % interval of some condition is outside its region."
    ),
    Ruling.INCONCLUSIVE: Badge(
        "inconclusive",
        Ruling.INCONCLUSIVE.value,
        "?",
        "Neither; or a control did not come out as expected, or there were too few different prompts: such a trial "
        "proves nothing.",
    ),
    Ruling.DESCRIBED: Badge(
        "described", Ruling.DESCRIBED.value, "\u2022", "A quantity that is measured and that no region judges."
    ),
    Ruling.IMPOSSIBLE: Badge(
        "impossible",
        Ruling.IMPOSSIBLE.value,
        "\u2205",
        "What the claim presupposes cannot hold for this subject; the sentence says why.",
    ),
    Ruling.BY_CONSTRUCTION: Badge(
        "construction",
        Ruling.BY_CONSTRUCTION.value,
        "\u2261",
        "An identity: no error above the bound at 1,000 or more random inputs; a single larger one refutes it. The "
        "numbers in brackets are then the smallest and the largest error, not a confidence interval.",
    ),
}
UNTRIED = Badge("untried", "not yet tried", "\u2013", "The claim has an entry, but was not tried here.")
NEWS = (
    Ruling.REFUTED,
    Ruling.SUPPORTED,
    Ruling.INCONCLUSIVE,
    Ruling.DESCRIBED,
    Ruling.IMPOSSIBLE,
    Ruling.BY_CONSTRUCTION,
)


@dataclass(frozen=True)
class Row:
    """One claim of the board: its trials by subject, and one sentence with the finding."""

    entry: Entry
    trials: Mapping[str, Trial]

    @property
    def news(self) -> tuple[int, str]:
        """The sorting key: models before simulations, decided before undecided, identities last."""
        rank = min(NEWS.index(trial.verdict.ruling) for trial in self.trials.values())
        on_models = any(subject != "simulation" for subject in self.trials)
        last = rank == NEWS.index(Ruling.BY_CONSTRUCTION)
        return (2 if last else 0 if on_models else 1) * len(NEWS) + rank, self.entry.id

    @property
    def sentence(self) -> str:
        """The finding in one sentence: the ruling for each subject with its number, and what that number is.

        Subjects with the same ruling on the same quantity are listed together.
        """
        groups: dict[tuple[Ruling, str], list[str]] = {}
        for subject, trial in self.trials.items():
            verdict = trial.verdict
            number = "" if verdict.interval is None else f" {interval_text(verdict.interval)}"
            name = "" if verdict.interval is None or verdict.deciding is None else f" ({verdict.deciding.name})"
            groups.setdefault((verdict.ruling, name), []).append(f"{subject}{number}")
        parts = [f"{ruling.value} on {', '.join(found)}{name}" for (ruling, name), found in groups.items()]
        return f"{'; '.join(parts)}."


def board(entries: Mapping[str, Entry], trials: Sequence[Trial]) -> list[Row]:
    """The claims that were tried, the most informative first. Raises ``HelmscopeError`` for a trial of an unknown
    claim, and for a second trial of a claim on the same subject.

    >>> from helmscope.claims.reading import read_catalogue
    >>> board(read_catalogue(), [])
    []
    """
    by_claim: dict[str, dict[str, Trial]] = {}
    for trial in trials:
        claim = check_name("claim of a trial", trial.verdict.claim, entries)
        subject = trial.verdict.subject or "simulation"
        if subject in by_claim.setdefault(claim, {}):
            raise HelmscopeError(
                f"trials holds claim '{claim}' on {subject} twice, but a page shows one trial of a claim and subject"
            )
        by_claim[claim][subject] = trial
    return sorted((Row(entries[claim], found) for claim, found in by_claim.items()), key=lambda row: row.news)


def subjects_of(rows: Sequence[Row]) -> list[str]:
    """The columns of the board: the simulation first, then the models in the order in which they were tried."""
    subjects = list(dict.fromkeys(subject for row in rows for subject in row.trials))
    return sorted(subjects, key=lambda subject: subject != "simulation")


def expected_false(verdicts: Sequence[Verdict]) -> str:
    """How many false verdicts to expect, as a sentence.

    >>> expected_false([Verdict(claim="rate", ruling=Ruling.SUPPORTED)])
    '1 verdict rests on a 95 % interval: if every truth were exactly on its threshold, about 0.1 of ... false.'
    """
    count = sum(verdict.ruling in (Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE) for verdict in verdicts)
    rests = "verdict rests" if count == 1 else "verdicts rest"
    return (
        f"{count} {rests} on a 95 % interval: if every truth were exactly on its threshold, about "
        f"{FALSE_VERDICT_RATE * count:.1f} of them would be false."
    )
