"""What a trial says of a claim, and what that rests on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from helmscope.types.display import one_line_repr, table
from helmscope.types.interval import Interval, Region, interval_text, region_text


class Ruling(Enum):
    """What a trial can say of a claim.

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
    """A case whose answer is known: the null of a claim, or what its source prints where that is wrong.

    ``what`` says what was tried and ``expected`` how it must come out; a trial whose control comes out otherwise
    proves nothing. ``interval`` is None where there was nothing to measure.

    >>> seen, region = Interval(0.0, 0.0, 0.1, n=32), Region(text="at least .9", low=0.9)
    >>> Control("V = -I", Ruling.REFUTED, Ruling.REFUTED, seen, region).as_expected
    True
    """

    what: str
    ruling: Ruling
    expected: Ruling
    interval: Interval | None
    region: Region

    @property
    def as_expected(self) -> bool:
        """Whether the trial could tell this case from the claim."""
        return self.ruling is self.expected


@dataclass(frozen=True)
class Exhibit:
    """Something that a trial rests on, word for word, such as the checks that its subject has passed.

    >>> Exhibit("the model", "rows sum to 1").title
    'the model'
    """

    title: str
    text: str


@dataclass(frozen=True, repr=False)
class Verdict:
    """A ruling on one claim: the interval of its statistic (None where the premise cannot hold), the region frozen
    before the run, the hash of the catalogue entry, and the sentence a reader needs; then where the claim was tried
    (the coordinates), the null, what the source prints where that is wrong, further parts of the claim, and exhibits.
    ``subject`` is the name of what was put on trial and, of a model, the hash of its weights and texts.

    >>> seen, region = Interval(1.0, 0.99, 1.01, n=20), Region(text="1 within .1", low=0.9, high=1.1)
    >>> Verdict("rate", Ruling.SUPPORTED, seen, region, "c0ffee", "SA has rate 1.")
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
    def short(self) -> str:
        """The ruling with the number that it rests on.

        >>> Verdict("rate", Ruling.IMPOSSIBLE, None, Region(text="1 within .1"), "", "").short
        'premise impossible here'
        """
        seen = self.interval
        return self.ruling.value if seen is None else f"{self.ruling.value}, {interval_text(seen)}, n = {seen.n:,}"

    def __repr__(self) -> str:
        return one_line_repr(f"Verdict on {self.claim}: {self.short}{f'; {self.subject}' if self.subject else ''}")

    def _repr_html_(self) -> str:
        named = [("null", self.null), ("as printed", self.printed), *(("also", part) for part in self.also)]
        rows = [
            *([("verdict", self.sentence)] if self.sentence else []),
            *(
                []
                if self.interval is None
                else [("statistic", f"{interval_text(self.interval)}, n = {self.interval.n:,}")]
            ),
            ("region", ": ".join(filter(None, (region_text(self.region), self.region.text)))),
            *((name, _control_text(control)) for name, control in named if control is not None),
            *((name, text) for name, text in (("where", self.where), ("subject", self.subject)) if text),
            *((exhibit.title, exhibit.text) for exhibit in self.exhibits),
        ]
        return table(f"{self.claim}: {self.ruling.value}", rows)


def _control_text(control: Control) -> str:
    """What was tried, what came out, and what should have."""
    due = "as expected" if control.as_expected else f"expected: {control.expected.value}"
    return f"{control.what}: {control.ruling.value} ({due}), {interval_text(control.interval)}"
