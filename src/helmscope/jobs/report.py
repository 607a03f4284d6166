"""A report: the trials of all claims on one self-contained page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from helmscope.jobs import trials
from helmscope.jobs.job import Work
from helmscope.jobs.trials import TrialsJob, TrialsResult, TrialsSpec
from helmscope.models.bundled_models import is_bundled

if TYPE_CHECKING:
    from helmscope.claims.run_trials import PlannedTrial
    from helmscope.claims.trial import Trial
    from helmscope.jobs.texts import TrialSubjects

PAGE = "report.html"


class ReportSpec(TrialsSpec, frozen=True, kw_only=True, tag="report"):
    """Spec for trying claims as ``TrialsSpec`` does and writing report.html, one self-contained page about all claims
    of the catalogue. The fields are those of ``TrialsSpec``, but the bundled models are tried on the held-out texts.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(ReportSpec(claims=["kuramoto"], quick=True), folder=f"{root}/run")
    >>> result.page.name, len(result.trials)
    ('report.html', 1)
    """

    held_out: bool = True

    verb: ClassVar[tuple[str, ...]] = ("report",)

    def prepare(self) -> ReportJob:
        """Return the job. What the page needs is imported now, so that a missing package is reported at once."""
        from helmscope.jobs.texts import trial_subjects
        from helmscope.plots.style import styled

        subjects = trial_subjects(self)
        planned = trials.plan(self, subjects)
        with styled():
            render_page(self, subjects, [])
        subjects.identify()
        return ReportJob(**trials.job_arguments(self, planned, subjects))


def render_page(spec: ReportSpec, subjects: TrialSubjects, finished: list[Trial], **details: Any) -> str:
    """The HTML page of the finished trials; ``details`` are further arguments of ``page``."""
    from helmscope.claims.reading import read_catalogue
    from helmscope.report.page import page

    entries, options = read_catalogue(spec.claims_folder), (*subjects.options, *subjects.models)
    return page(
        entries,
        finished,
        seed=spec.seed,
        quick=spec.quick,
        claims_folder=spec.claims_folder,
        options=options,
        **details,
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ReportResult(TrialsResult):
    """The result of ``ReportSpec``: that of ``TrialsSpec``, and the path of the ``page``.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(ReportSpec(claims=["kuramoto"], quick=True), folder=f"{root}/run")
    ...     result.page.read_text().startswith("<!DOCTYPE html>")
    True
    """

    page: Path


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportJob(TrialsJob):
    """A prepared report."""

    spec: ReportSpec
    original: ReportSpec

    @property
    def files(self) -> dict[tuple[str, str], str]:
        """The file with the results of each trial, by claim and subject, relative to the page."""
        return {(planned.claim, planned.label): f"units/{planned.name}.nc" for planned in self.planned}

    def select_subject(self, planned: PlannedTrial) -> tuple[str, ...]:
        """The words with which ``helmscope claims test`` selects the subjects and texts of one trial."""
        if planned.subject.is_simulation:
            return ()
        words: tuple[str, ...] = ("--model", str(planned.subject.model))
        words += (
            () if planned.other is None or self.subjects.other is not None else ("--other", str(planned.other.model))
        )
        held_out = self.original.held_out and self.original.texts is None and is_bundled(planned.subject.model)
        return words + self.subjects.options + (("--held-out",) if held_out else ())

    def execute(self, work: Work) -> ReportResult:
        """Run the trials and write verdicts.json and report.html."""
        finished, failed = self.run_trials(work)
        selections = {(planned.claim, planned.label): self.select_subject(planned) for planned in self.planned}
        details = {"date": work.manifest.created[:10], "files": self.files, "selections": selections}
        text = render_page(self.original, self.subjects, finished, **details)
        work.folder.write_bytes(PAGE, text.encode())
        path = work.folder.path / PAGE
        return ReportResult(spec=self.spec, folder=work.folder, trials=finished, failed=failed, page=path)
