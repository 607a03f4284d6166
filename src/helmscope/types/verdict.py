"""Verdicts: the outcome of the trial of a claim, with its evidence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from helmscope.types.display import html_table, one_line_repr
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


@dataclass(frozen=True)
class Control:
    """A case with a known answer, judged beside the claim: its null, or an error of the source, as printed.

    ``what`` describes the case and ``expected`` is the ruling that it must get; if ``ruling`` differs, the trial proves
    nothing. ``interval`` is None if there was nothing to measure.

    >>> interval, region = Interval(0.0, 0.0, 0.1, n=32), Region(text="at least .9", low=0.9)
    >>> Control("V = -I", Ruling.REFUTED, Ruling.REFUTED, interval, region).as_expected
    True
    """

    what: str
    ruling: Ruling
    expected: Ruling
    interval: Interval | None
    region: Region

    @property
    def as_expected(self) -> bool:
        """Whether the ruling is the expected one, so that the trial can distinguish this case from the claim.

        >>> region = Region(text="at least 1", low=1.0)
        >>> Control("no attention", Ruling.SUPPORTED, Ruling.REFUTED, None, region).as_expected
        False
        """
        return self.ruling is self.expected


@dataclass(frozen=True)
class Exhibit:
    """A piece of evidence quoted verbatim in a verdict, such as the checks that its subject passed.

    >>> Exhibit("the model", "rows sum to 1").title
    'the model'
    """

    title: str
    text: str


@dataclass(frozen=True, repr=False)
class Verdict:
    """The ruling on one claim, with its evidence.

    ``interval`` is that of the claim's statistic (None if the premise cannot hold), ``region`` was fixed before the
    run, ``entry_hash`` is the hash of the catalogue entry, and ``sentence`` states the result for a reader. ``where``
    holds the coordinates of the statistic, ``null`` the null, ``printed`` an erroneous statement of the source as
    printed, ``also`` further parts of the claim. ``subject`` is the name of what was put on trial and, for a model, the
    hash of its weights and texts.

    >>> interval, region = Interval(1.0, 0.99, 1.01, n=20), Region(text="1 within .1", low=0.9, high=1.1)
    >>> Verdict("rate", Ruling.SUPPORTED, interval, region, "c0ffee", "SA has rate 1.")
    <Verdict on rate: supported, 1 [0.99, 1.01], n = 20>
    """

    claim: str
    ruling: Ruling
    interval: Interval | None
    region: Region
    entry_hash: str
    sentence: str
    where: str = ""
    null: Control | None = None
    printed: Control | None = None
    also: tuple[Control, ...] = ()
    exhibits: tuple[Exhibit, ...] = ()
    subject: str = ""

    @property
    def summary(self) -> str:
        """The ruling with the interval that it is based on, as text.

        >>> Verdict("rate", Ruling.IMPOSSIBLE, None, Region(text="1 within .1"), "", "").summary
        'premise impossible here'
        """
        if self.interval is None:
            return self.ruling.value
        return f"{self.ruling.value}, {interval_text(self.interval)}, n = {self.interval.n:,}"

    def __repr__(self) -> str:
        return one_line_repr(f"Verdict on {self.claim}: {self.summary}{f'; {self.subject}' if self.subject else ''}")

    def _repr_html_(self) -> str:
        controls = [("null", self.null), ("as printed", self.printed), *(("also", part) for part in self.also)]
        rows = [
            *([("verdict", self.sentence)] if self.sentence else []),
            *(
                []
                if self.interval is None
                else [("statistic", f"{interval_text(self.interval)}, n = {self.interval.n:,}")]
            ),
            ("region", ": ".join(filter(None, (region_text(self.region), self.region.text)))),
            *((name, _control_text(control)) for name, control in controls if control is not None),
            *((name, text) for name, text in (("where", self.where), ("subject", self.subject)) if text),
            *((exhibit.title, exhibit.text) for exhibit in self.exhibits),
        ]
        return html_table(f"{self.claim}: {self.ruling.value}", rows)


def _control_text(control: Control) -> str:
    """The case, its ruling and the expected ruling."""
    expectation = "as expected" if control.as_expected else f"expected: {control.expected.value}"
    return f"{control.what}: {control.ruling.value} ({expectation}), {interval_text(control.interval)}"
