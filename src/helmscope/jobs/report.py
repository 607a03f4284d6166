"""A report: every claim on trial, on one page that needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from helmscope.jobs import trials
from helmscope.jobs.job import Work
from helmscope.jobs.trials import Trials, TrialsJob, TrialsResult

if TYPE_CHECKING:
    from helmscope.claims.trial import Trial

PAGE = "report.html"


class Report(Trials, frozen=True, kw_only=True, tag="report"):
    """Try claims as ``Trials`` does and write report.html, one file on all claims of the catalogue.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(Report(claims=["kuramoto"], quick=True), folder=f"{root}/run")
    >>> result.page.name, len(result.trials)
    ('report.html', 1)
    """

    verb: ClassVar[tuple[str, ...]] = ("report",)

    def prepare(self) -> ReportJob:
        """The trials; what drawing and writing need is missed now, not after the work."""
        from helmscope.jobs.texts import on_trial
        from helmscope.plots.style import styled

        on = on_trial(self)
        claims = trials.asked_claims(self, on)
        with styled():
            page_of(self, on.words, [])
        on.identify()
        return ReportJob(**trials.prepared(self, claims, on))


def page_of(spec: Report, words: tuple[str, ...], tried: list[Trial]) -> str:
    """The page of these trials."""
    from helmscope.claims.reading import read_catalogue
    from helmscope.report.page import page

    entries = read_catalogue(spec.folder)
    return page(entries, tried, seed=spec.seed, quick=spec.quick, folder=spec.folder, options=words)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportResult(TrialsResult):
    """The trials, and the page that shows them."""

    page: Path


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportJob(TrialsJob):
    """A report that waits to be made."""

    spec: Report
    asked: Report

    def carry_out(self, work: Work) -> ReportResult:
        """Runs the trials, and writes verdicts.json and report.html."""
        tried, failed = self.tried(work)
        work.folder.write_bytes(PAGE, page_of(self.asked, self.on.words, tried).encode())
        path = work.folder.path / PAGE
        return ReportResult(spec=self.spec, folder=work.folder, trials=tried, failed=failed, page=path)
