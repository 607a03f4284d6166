"""A report: the trials of all claims on one self-contained page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from helmscope.jobs import trials
from helmscope.jobs.job import Work
from helmscope.jobs.trials import Trials, TrialsJob, TrialsResult

if TYPE_CHECKING:
    from helmscope.claims.trial import Trial

PAGE = "report.html"


class Report(Trials, frozen=True, kw_only=True, tag="report"):
    """Spec for trying claims as ``Trials`` does and writing report.html, one self-contained page about all claims of
    the catalogue. The fields are those of ``Trials``, but the models in the box are tried on the held-back texts.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(Report(claims=["kuramoto"], quick=True), folder=f"{root}/run")
    >>> result.page.name, len(result.trials)
    ('report.html', 1)
    """

    held_back: bool = True

    verb: ClassVar[tuple[str, ...]] = ("report",)

    def prepare(self) -> ReportJob:
        """Return the job. What the page needs is imported now, so that a missing package is reported at once."""
        from helmscope.jobs.texts import trial_subjects
        from helmscope.plots.style import styled

        subjects = trial_subjects(self)
        planned = trials.plan(self, subjects)
        with styled():
            render_page(self, subjects.options, [])
        subjects.identify()
        return ReportJob(**trials.job_arguments(self, planned, subjects))


def render_page(spec: Report, options: tuple[str, ...], finished: list[Trial], **details: Any) -> str:
    """The HTML page of the finished trials; ``details`` are further arguments of ``page``."""
    from helmscope.claims.reading import read_catalogue
    from helmscope.report.page import page

    entries = read_catalogue(spec.folder)
    return page(entries, finished, seed=spec.seed, quick=spec.quick, folder=spec.folder, options=options, **details)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportResult(TrialsResult):
    """The result of ``Report``: that of ``Trials``, and the path of the ``page``.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(Report(claims=["kuramoto"], quick=True), folder=f"{root}/run")
    ...     result.page.read_text().startswith("<!DOCTYPE html>")
    True
    """

    page: Path


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportJob(TrialsJob):
    """A prepared report."""

    spec: Report
    original: Report

    @property
    def files(self) -> dict[tuple[str, str], str]:
        """The file with the results of each trial, by claim and subject, relative to the page."""
        return {(planned.claim, planned.label): f"units/{planned.name}.nc" for planned in self.planned}

    def execute(self, work: Work) -> ReportResult:
        """Run the trials and write verdicts.json and report.html."""
        finished, failed = self.run_trials(work)
        details = {"date": work.manifest.created[:10], "files": self.files}
        text = render_page(self.original, self.subjects.options, finished, **details)
        work.folder.write_bytes(PAGE, text.encode())
        path = work.folder.path / PAGE
        return ReportResult(spec=self.spec, folder=work.folder, trials=finished, failed=failed, page=path)
