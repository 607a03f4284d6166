"""Verdicts: the outcome of the trial of a claim, with its evidence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from helmscope.types.display import ConciseRepr, html_listing, html_stack, html_table, one_line_repr
from helmscope.types.interval import Interval, Region, interval_text, region_text


class Ruling(Enum):
    """The possible outcomes of a trial.

    >>> Ruling("refuted").name
    'REFUTED'
    """

    SUPPORTED = "supported"
    REFUTED = "refuted"
    INCONCLUSIVE = "inconclusive"
    BY_CONSTRUCTION = "true by construction"
    IMPOSSIBLE = "premise impossible here"
    DESCRIBED = "described"


class Judgment(Enum):
    """What can be said about a sentence or formula of a source, as printed. A bound that holds and is not attained is
    true, not sharp.

    >>> Judgment("true, not sharp").name
    'NOT_SHARP'
    """

    TRUE = "true"
    NOT_SHARP = "true, not sharp"
    FALSE = "false"
    NOT_TESTABLE = "not testable"
    UNDECIDED = "not decided"


@dataclass(frozen=True)
class JudgedCondition(ConciseRepr):
    """One quantity compared with its region: a condition of a claim, or a quantity that is only described.

    ``basis`` says in words what the interval is based on; ``interval`` is None if there was nothing to measure, and
    ``replicates_needed`` is about how many replicates would decide, None where that is not known.

    >>> region, interval = Region(text="above 0", above=0.0), Interval(0.5, 0.4, 0.7, n=32)
    >>> JudgedCondition("growth", region, interval, Ruling.SUPPORTED).summary
    'supported, 0.5 [0.4, 0.7], n = 32'
    """

    name: str
    region: Region
    interval: Interval | None
    ruling: Ruling
    basis: str = ""
    replicates_needed: int | None = None

    @property
    def summary(self) -> str:
        """The ruling with the interval that it is based on, as text."""
        if self.interval is None:
            return self.ruling.value
        return f"{self.ruling.value}, {interval_text(self.interval)}, n = {self.interval.n:,}"


@dataclass(frozen=True)
class Control(JudgedCondition):
    """A case with a known answer, judged alongside the claim: if its ruling is not one of ``expected``, the trial
    proves nothing.

    >>> interval, region = Interval(0.0, 0.0, 0.1, n=32), Region(text="at least .9", low=0.9)
    >>> Control("V = -I", region, interval, Ruling.REFUTED, expected=(Ruling.REFUTED,)).as_expected
    True
    """

    expected: tuple[Ruling, ...] = (Ruling.REFUTED,)

    @property
    def as_expected(self) -> bool:
        """Whether the ruling is an expected one, so that the trial can distinguish this case from the claim."""
        return self.ruling in self.expected

    @property
    def expectation(self) -> str:
        """The expected rulings as text."""
        return " or ".join(ruling.value for ruling in self.expected)


@dataclass(frozen=True)
class PrintedStatement(ConciseRepr):
    """What a source prints, where it was judged separately from the claim: its place, the judgment by theory
    (``by_theory``) with the reason, and the one ``measured`` in the trial, None if the trial does not compute it.

    >>> PrintedStatement("the rate is O(e^-beta)", "slide 9", Judgment.NOT_SHARP, "the rate is 1").measured is None
    True
    """

    text: str
    place: str
    by_theory: Judgment
    reason: str
    measured: Judgment | None = None
    interval: Interval | None = None
    region: Region | None = None

    @property
    def judgment(self) -> Judgment:
        """The judgment to show: false if it was measured to be false or is false on paper, else the one on paper; as
        measured where theory has none.

        >>> PrintedStatement("", "", Judgment.UNDECIDED, "", measured=Judgment.TRUE).judgment.value
        'true'
        """
        if self.measured is Judgment.FALSE:
            return self.measured
        undecided = self.by_theory in (Judgment.UNDECIDED, Judgment.NOT_TESTABLE)
        return self.measured if undecided and self.measured is not None else self.by_theory


@dataclass(frozen=True)
class Attachment(ConciseRepr):
    """A piece of evidence quoted verbatim in a verdict, such as the checks that its subject passed.

    >>> Attachment("the model", "rows sum to 1").title
    'the model'
    """

    title: str
    text: str


@dataclass(frozen=True)
class Provenance(ConciseRepr):
    """The SHA-256 hashes that a verdict depends on: catalogue entry and its version, code of the experiment, weights of
    the subject, and texts; empty where there is none.

    >>> Provenance(entry="c0ffee", version=2).texts
    ''
    """

    entry: str = ""
    version: int = 1
    code: str = ""
    weights: str = ""
    texts: str = ""


@dataclass(frozen=True, repr=False, kw_only=True)
class Verdict:
    """The ruling on one claim for one subject, with its evidence.

    ``conditions`` were fixed before the run and all must hold; ``controls`` are cases with a known answer,
    ``described`` quantities that no region judges, ``printed`` what the source prints. ``sentence`` states the result
    for a reader, ``setting`` what was simulated or recorded, ``subject`` the name of what was put on trial.

    >>> region = Region(text="1 within .1", low=0.9, high=1.1)
    >>> rate = JudgedCondition("rate", region, Interval(1.0, 0.99, 1.01, n=20), Ruling.SUPPORTED)
    >>> Verdict(claim="rate", ruling=Ruling.SUPPORTED, conditions=(rate,), subject="simulation")
    <Verdict on rate: supported, 1 [0.99, 1.01], n = 20; simulation>
    """

    claim: str
    ruling: Ruling
    conditions: tuple[JudgedCondition, ...] = ()
    controls: tuple[Control, ...] = ()
    described: tuple[JudgedCondition, ...] = ()
    printed: PrintedStatement | None = None
    sentence: str = ""
    setting: str = ""
    attachments: tuple[Attachment, ...] = ()
    subject: str = ""
    provenance: Provenance = Provenance()

    @property
    def deciding(self) -> JudgedCondition | None:
        """The condition that decides: the first one with the ruling of the verdict, else the first one; None if nothing
        was measured.

        >>> Verdict(claim="rate", ruling=Ruling.IMPOSSIBLE).deciding is None
        True
        """
        agreeing = [condition for condition in self.conditions if condition.ruling is self.ruling]
        return next(iter(agreeing or self.conditions), None)

    @property
    def interval(self) -> Interval | None:
        """The interval of the deciding condition."""
        return None if self.deciding is None else self.deciding.interval

    @property
    def region(self) -> Region | None:
        """The region of the deciding condition."""
        return None if self.deciding is None else self.deciding.region

    @property
    def summary(self) -> str:
        """The ruling with the interval that it is based on, as text.

        >>> Verdict(claim="rate", ruling=Ruling.IMPOSSIBLE).summary
        'premise impossible here'
        """
        if self.interval is None:
            return self.ruling.value
        return f"{self.ruling.value}, {interval_text(self.interval)}, n = {self.interval.n:,}"

    def __repr__(self) -> str:
        return one_line_repr(f"Verdict on {self.claim}: {self.summary}{f'; {self.subject}' if self.subject else ''}")

    def _repr_html_(self) -> str:
        rows = [
            *([("verdict", self.sentence)] if self.sentence else []),
            *((condition.name, _condition_text(condition)) for condition in self.conditions),
            *((f"control: {control.name}", _control_text(control)) for control in self.controls),
            *((quantity.name, interval_text(quantity.interval)) for quantity in self.described),
            *([("as printed", _printed_text(self.printed))] if self.printed is not None else []),
            *((name, text) for name, text in (("setting", self.setting), ("subject", self.subject)) if text),
        ]
        listings = (html_listing(attachment.title, attachment.text) for attachment in self.attachments)
        return html_stack(html_table(f"{self.claim}: {self.ruling.value}", rows), *listings)


def _condition_text(condition: JudgedCondition) -> str:
    return f"{condition.summary}; region: {region_text(condition.region)}. {condition.region.comment}".rstrip()


def _control_text(control: Control) -> str:
    """The ruling and the expected one, with the interval."""
    expectation = "as expected" if control.as_expected else f"expected: {control.expectation}"
    return f"{control.ruling.value} ({expectation}), {interval_text(control.interval)}"


def _printed_text(printed: PrintedStatement) -> str:
    measured = "" if printed.interval is None else f", {interval_text(printed.interval)}"
    return f"{printed.judgment.value}{measured}: {printed.text} ({printed.place})"
