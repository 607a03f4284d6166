"""The HTML report: every claim, how it was tried, and its verdict on each subject."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from helmscope.claims.sources import citation, short_citation, sources
from helmscope.plots.trial import MAX_PANELS, NARROW, WIDTH, trial_figure
from helmscope.plots.variable_panel import axis_name, variables
from helmscope.plots.web import web_svg
from helmscope.report.board import BADGES, UNTRIED, Badge, Row, board, expected_false, subjects_of
from helmscope.runs.bar import shows_progress
from helmscope.stats.reduce import reduced
from helmscope.types import (
    Control,
    Interval,
    JudgedCondition,
    MissingExtra,
    PrintedStatement,
    Verdict,
    check_integer,
    check_progress,
    interval_text,
    region_text,
)

if TYPE_CHECKING:
    import jinja2
    import xarray as xr

    from helmscope.claims.entry import Entry
    from helmscope.claims.trial import Trial
    from helmscope.types.progress import ProgressOption

UNQUOTED = "<>/:=',;()!*+{}"  # characters of an SVG that a data address in double quotes may contain as they are


@dataclass(frozen=True)
class _Line:
    """One row of the table of a trial: a condition, a control or a described quantity."""

    role: str
    name: str
    value: str
    interval: str
    n: str
    region: str
    text: str
    badge: Badge
    expected: str = ""


@dataclass(frozen=True)
class _Case:
    """One trial of a claim, on one subject."""

    subject: str
    badge: Badge
    verdict: Verdict
    lines: tuple[_Line, ...]
    picture: str
    narrow_picture: str
    alt: str
    command: str
    file: str

    statistic: str = ""

    @property
    def deciding(self) -> tuple[str, str, str]:
        """The name of the quantity on which the verdict rests, its value and its interval, as text."""
        quantity = self.verdict.deciding
        if quantity is None or quantity.interval is None:
            return ("", "", "")
        return (quantity.name, *_value_and_ends(quantity.interval))


@dataclass(frozen=True)
class _Card:
    """One claim, as the template shows it."""

    entry: Entry
    source: str
    citation: str
    link: str
    sentence: str = ""
    cases: tuple[_Case, ...] = ()
    printed: PrintedStatement | None = None

    @property
    def badges(self) -> list[Badge]:
        """The distinct rulings of its trials, by which the page filters."""
        return list(dict.fromkeys(case.badge for case in self.cases)) or [UNTRIED]

    @property
    def search(self) -> str:
        """The words by which the search finds it: id, statement, source, subjects, rulings and the printed form."""
        subjects, rulings = (case.subject for case in self.cases), (badge.text for badge in self.badges)
        printed = [] if self.printed is None else [f"printed {self.printed.judgment.value}"]
        return " ".join([self.entry.id, self.entry.statement, self.source, *subjects, *rulings, *printed])


@shows_progress("drawing the report")
def page(
    entries: Mapping[str, Entry],
    trials: Sequence[Trial],
    *,
    seed: int = 0,
    quick: bool = False,
    claims_folder: str | Path | None = None,
    options: Sequence[str] = (),
    title: str = "Claims on trial",
    date: str = "",
    files: Mapping[tuple[str, str], str] | None = None,
    selections: Mapping[tuple[str, str], Sequence[str]] | None = None,
    progress: ProgressOption = None,
) -> str:
    """Render one HTML document with every claim of a catalogue, tried or not; equal input gives equal text.

    The document is self-contained: figures are embedded, its only script filters the claims, and its content security
    policy forbids loading anything. ``seed``, ``quick`` and ``claims_folder`` (a user's catalogue) appear in the
    commands that reproduce the page and its trials, with ``options``, further words of the command ``helmscope
    report``. By claim and subject, ``selections`` has the words with which ``helmscope claims test`` selects the
    subject (by default --model and its name) and ``files`` the path of the result file, relative to the page. ``date``
    is shown as given. Raises ``HelmscopeError`` for a trial of an unknown claim and for a second trial of the same
    claim on the same subject. ``progress`` is called with the share of the tried claims done.

    >>> from helmscope.claims.reading import read_catalogue
    >>> text = page(read_catalogue(), [])
    >>> text.count("data-claim=") == len(read_catalogue())
    True
    """
    check_integer("seed", seed, at_least=0)
    arguments = f" --seed {seed}{' --quick' if quick else ''}"
    arguments += "" if claims_folder is None else f" --from {shlex.quote(str(claims_folder))}"
    rows = board(entries, trials)
    commands, tried, report = _Commands(arguments, files or {}, selections or {}), [], check_progress(progress)
    for row in rows:
        tried.append(_card(row.entry, row, commands))
        report(len(tried) / len(rows))
    done = {row.entry.id for row in rows}
    untried = [_card(entry) for entry in sorted(entries.values(), key=lambda each: (each.source, each.id))]
    badges = [*BADGES.values(), UNTRIED]
    verdicts = [trial.verdict for trial in trials]
    script = (resources.files("helmscope.report") / "templates" / "filter.js").read_text(encoding="utf-8")
    return _template().render(
        title=title,
        tried=tried,
        untried=[card for card in untried if card.entry.id not in done],
        subjects=subjects_of(rows),
        counts=[(badge, sum(BADGES[verdict.ruling] is badge for verdict in verdicts)) for badge in badges[:-1]],
        badges=badges,
        expected_false=expected_false(verdicts),
        seed=seed,
        quick=quick,
        date=date,
        version=sys.modules["helmscope"].__version__,
        command=f"helmscope report{arguments}{_words(options)}",
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _template() -> jinja2.Template:
    try:
        import jinja2
    except ImportError:
        raise MissingExtra("jinja2", "report") from None
    loader = jinja2.PackageLoader("helmscope.report")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html")


@dataclass(frozen=True)
class _Commands:
    """How trials are reproduced: the words common to all, and files and words by claim and subject."""

    common: str
    files: Mapping[tuple[str, str], str]
    selections: Mapping[tuple[str, str], Sequence[str]]

    def command(self, claim: str, subject: str) -> str:
        default = () if subject == "simulation" else ("--model", subject)
        words = self.selections.get((claim, subject), default)
        return f"helmscope claims test {shlex.quote(claim)}{self.common}{_words(words)}"


def _words(words: Sequence[str]) -> str:
    return f" {shlex.join(words)}" if words else ""


def _card(entry: Entry, row: Row | None = None, commands: _Commands | None = None) -> _Card:
    source = sources().get(entry.source)
    named = short_citation(entry.source), citation(entry.source), "" if source is None else source.link
    if row is None or commands is None:
        return _Card(entry, *named)
    cases = tuple(_case(entry, subject, trial, commands) for subject, trial in row.trials.items())
    printed = next((case.verdict.printed for case in cases if case.verdict.printed is not None), None)
    return _Card(entry, *named, sentence=row.sentence, cases=cases, printed=printed)


def _case(entry: Entry, subject: str, trial: Trial, commands: _Commands) -> _Case:
    verdict, data = trial.verdict, reduced(trial.data)
    wide, narrow = (_data_uri(web_svg(trial_figure(verdict, data, width=width))) for width in (WIDTH, NARROW))
    return _Case(
        subject,
        BADGES[verdict.ruling],
        verdict,
        lines=tuple(_lines(verdict)),
        picture=wide,
        narrow_picture=narrow,
        alt=_alt_text(verdict, data),
        command=commands.command(entry.id, subject),
        file=commands.files.get((entry.id, subject), ""),
        statistic=_statistic(entry, verdict),
    )


def _statistic(entry: Entry, verdict: Verdict) -> str:
    """What the quantity is on which a verdict rests, in the words of the entry; "" if it has none."""
    deciding = verdict.deciding
    found = [case.statistic for case in entry.conditions if deciding is not None and case.name == deciding.name]
    return found[0] if found else ""


def _data_uri(picture: bytes) -> str:
    """An SVG as an address, a quarter shorter than in base64. It has no quotation mark, ampersand or space, so that
    the template can write it unescaped into the attributes src and srcset.
    """
    single = re.sub(rb"<[^>]*>", lambda tag: re.sub(rb"=\"([^\"']*)\"", rb"='\1'", tag[0]), picture)
    return f"data:image/svg+xml,{urllib.parse.quote(single, safe=UNQUOTED)}"


def _lines(verdict: Verdict) -> list[_Line]:
    """The rows of a trial's table."""
    lines = [_line("condition", condition) for condition in verdict.conditions]
    lines += [_line("control", control) for control in verdict.controls]
    lines += [_line("described", quantity) for quantity in verdict.described]
    return lines


def _line(role: str, judged: JudgedCondition) -> _Line:
    value, ends = _value_and_ends(judged.interval)
    expected = ""
    if isinstance(judged, Control):
        expected = "yes" if judged.as_expected else f"no: {judged.expectation} was expected"
    n = "" if judged.interval is None else f"{judged.interval.n:,}"
    bounds, text = (region_text(judged.region), judged.region.comment) if judged.region.bounded else ("", "")
    return _Line(role, judged.name, value, ends, n, bounds, text, BADGES[judged.ruling], expected)


def _value_and_ends(interval: Interval | None) -> tuple[str, str]:
    """The estimate and the interval in brackets, so that a line can break between them only."""
    value, bracket, ends = interval_text(interval).partition("[")
    return value.strip(), bracket + ends


def _alt_text(verdict: Verdict, data: xr.Dataset) -> str:
    """The figure in words, for screen readers."""
    ends = None if verdict.region is None else verdict.region.ends
    judged: list[JudgedCondition] = [*verdict.conditions, *verdict.controls]
    intervals = [f"{case.name} {interval_text(case.interval)}" for case in judged if case.region.ends == ends]
    panels = []
    for name in variables(data)[:MAX_PANELS]:
        value = data[name]
        over = " over " + " and ".join(axis_name(value, dim) for dim in value.dims) if value.ndim else ""
        panels.append(f"{value.attrs.get('long_name', name)}{over}")
    below = f" Below: {'; '.join(panels)}." if panels else ""
    if verdict.region is None:
        return f"Nothing was measured.{below}"
    return f"Intervals on the region, {region_text(verdict.region)}: {'; '.join(intervals)}.{below}"
