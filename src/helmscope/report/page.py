"""The HTML report: every claim, how it was tried, and its verdict."""

from __future__ import annotations

import base64
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from helmscope.plots.measured import axis_name, variables
from helmscope.plots.style import svg
from helmscope.plots.trial import MOST_PANELS, trial_figure
from helmscope.stats.reduce import reduced
from helmscope.types import (
    Control,
    HelmscopeError,
    MissingExtra,
    Ruling,
    Verdict,
    interval_text,
    known_name,
    region_text,
    whole_number,
)

if TYPE_CHECKING:
    import jinja2
    import xarray as xr

    from helmscope.claims.entry import Entry
    from helmscope.claims.trial import Trial

SOURCES = {
    "000": "The Helmholtz Transformer",
    "001": "A mathematical perspective on Transformers",
    "002": "Mean-field notes",
    "003": "Gradient-shaped additive transport",
}


@dataclass(frozen=True)
class _Badge:
    """The label of a ruling: text and symbol, so that it does not rely on color alone."""

    key: str
    text: str
    sign: str


BADGES = {
    Ruling.SUPPORTED: _Badge("supported", Ruling.SUPPORTED.value, "\u2713"),
    Ruling.REFUTED: _Badge("refuted", Ruling.REFUTED.value, "\u2717"),
    Ruling.INCONCLUSIVE: _Badge("inconclusive", Ruling.INCONCLUSIVE.value, "?"),
    Ruling.BY_CONSTRUCTION: _Badge("construction", Ruling.BY_CONSTRUCTION.value, "\u2261"),
    Ruling.IMPOSSIBLE: _Badge("impossible", Ruling.IMPOSSIBLE.value, "\u2205"),
}
UNTRIED = _Badge("untried", "not yet tried", "\u2013")


@dataclass(frozen=True)
class _Line:
    """One row of a claim's table: the statistic itself, or a control."""

    role: str
    what: str
    value: str
    interval: str
    n: str
    region: str
    words: str
    badge: _Badge
    expected: str


@dataclass(frozen=True)
class _Card:
    """One claim, as the template shows it."""

    entry: Entry
    source: str
    badge: _Badge
    region: str
    command: str
    verdict: Verdict | None = None
    lines: tuple[_Line, ...] = ()
    picture: str = ""
    alt: str = ""


def page(
    entries: Mapping[str, Entry],
    trials: Sequence[Trial],
    *,
    seed: int = 0,
    quick: bool = False,
    folder: str | Path | None = None,
    options: Sequence[str] = (),
    title: str = "Claims on trial",
) -> str:
    """Render one HTML document with every claim of a catalogue, tried or not; equal input gives equal text.

    The document is self-contained: figures are embedded, there are no scripts, and its content security policy forbids
    loading anything. ``seed``, ``quick``, ``folder`` (a user's catalogue) and ``options`` (further command-line words,
    such as --model A) appear in the commands that reproduce the trials. Raises ``HelmscopeError`` for a trial of an
    unknown claim and for a second trial of the same claim.

    >>> from helmscope.claims.reading import read_catalogue
    >>> text = page(read_catalogue(), [])
    >>> text.count("data-claim="), "https:" in text
    (56, False)
    """
    whole_number("seed", seed, at_least=0)
    arguments = f" --seed {seed}{' --quick' if quick else ''}"
    arguments += "" if folder is None else f" --from {shlex.quote(str(folder))}"
    arguments += f" {shlex.join(options)}" if options else ""
    tried: dict[str, Trial] = {}
    for trial in trials:
        claim = known_name("claim of a trial", trial.verdict.claim, entries)
        if claim in tried:
            raise HelmscopeError(f"trials holds claim '{claim}' twice, but a page shows one trial of a claim")
        tried[claim] = trial
    ordered = sorted(entries.values(), key=lambda entry: (entry.source, entry.id))
    cards = [_card(entry, tried.get(entry.id), arguments) for entry in ordered]
    badges = [*BADGES.values(), UNTRIED]
    return _template().render(
        title=title,
        tried=[card for card in cards if card.verdict is not None],
        untried=[card for card in cards if card.verdict is None],
        counts=[(badge, sum(card.badge is badge for card in cards)) for badge in badges],
        seed=seed,
        quick=quick,
        version=sys.modules["helmscope"].__version__,
        command=f"helmscope report{arguments}",
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


def _card(entry: Entry, trial: Trial | None, arguments: str) -> _Card:
    name = SOURCES.get(entry.source)
    source = entry.source if name is None else f"{entry.source} {name}"
    command = f"helmscope claims test {shlex.quote(entry.id)}{arguments}"
    if trial is None:
        return _Card(entry, source, UNTRIED, entry.region.text, command)
    verdict, data = trial.verdict, reduced(trial.data)
    picture = base64.b64encode(svg(trial_figure(verdict, data))).decode()
    return _Card(
        entry,
        source,
        BADGES[verdict.ruling],
        f"{verdict.region.text} ({region_text(verdict.region)})",
        command,
        verdict=verdict,
        lines=tuple(_line(role, judged, verdict) for role, judged in _roles(verdict)),
        picture=f"data:image/svg+xml;base64,{picture}",
        alt=_alt_text(verdict, data),
    )


def _roles(verdict: Verdict) -> list[tuple[str, Verdict | Control]]:
    """The verdict and its controls, each with its label."""
    labeled: list[tuple[str, Verdict | Control | None]] = [
        ("the claim", verdict),
        ("null", verdict.null),
        ("as printed", verdict.printed),
        *(("also", control) for control in verdict.also),
    ]
    return [(role, judged) for role, judged in labeled if judged is not None]


def _line(role: str, judged: Verdict | Control, verdict: Verdict) -> _Line:
    """One row of the table; a region is described in words only if it is not that of the claim."""
    value, _, ends = interval_text(judged.interval).partition(" [")
    what, expected = "its statistic", ""
    if isinstance(judged, Control):
        what, expected = judged.what, "yes" if judged.as_expected else f"no: {judged.expected.value} was expected"
    words = judged.region.text if judged.region.text != verdict.region.text else ""
    bracket = f"[{ends}" if ends else ""
    n = "" if judged.interval is None else f"{judged.interval.n:,}"
    return _Line(role, what, value, bracket, n, region_text(judged.region), words, BADGES[judged.ruling], expected)


def _alt_text(verdict: Verdict, data: xr.Dataset) -> str:
    """The figure in words, for screen readers."""
    intervals = [
        f"{role}{f' ({judged.what})' if isinstance(judged, Control) else ''} {interval_text(judged.interval)}"
        for role, judged in _roles(verdict)
        if judged.region.ends == verdict.region.ends
    ]
    panels = []
    for name in variables(data)[:MOST_PANELS]:
        value = data[name]
        over = " over " + " and ".join(axis_name(value, dim) for dim in value.dims) if value.ndim else ""
        panels.append(f"{value.attrs.get('long_name', name)}{over}")
    below = f" Below: {'; '.join(panels)}." if panels else ""
    return f"Intervals on the region, {region_text(verdict.region)}: {'; '.join(intervals)}.{below}"
