"""Trials: test claims by their experiments, on a simulation or on a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from helmscope.jobs import checks
from helmscope.jobs.checks import Check, boolean, list_of, optional
from helmscope.jobs.job import Job, Result, Work
from helmscope.jobs.spec import Spec
from helmscope.types import HelmscopeError, known_name, seed_number

if TYPE_CHECKING:
    from helmscope.claims.registry import Registered
    from helmscope.claims.trial import Trial, TrialsFailed
    from helmscope.jobs.cost import Estimate
    from helmscope.jobs.texts import TrialSubjects
    from helmscope.types import Verdict


class Trials(Spec, frozen=True, kw_only=True, tag="trials"):
    """Spec for trying ``claims`` (by default all that can be tried) by their experiments.

    ``quick`` uses fewer replicates. ``folder`` contains your own claims: one ID.toml per claim, and Python files,
    **which are run**. ``model`` is the model to try the claims on: "A", "B" or "tied", a folder or a Hub id; by default
    each claim determines its own. ``texts`` is a file with one text per line or a JSON list; ``truncate`` cuts them to
    the model's context. ``other`` is a second model, for claims that compare two.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(Trials(claims=["kuramoto"], quick=True), folder=f"{root}/run")
    >>> [verdict.ruling.value for verdict in result.verdicts]
    ['true by construction']
    """

    claims: tuple[str, ...] = ()
    quick: bool = False
    folder: str | None = None
    model: str | None = None
    texts: str | None = None
    other: str | None = None
    truncate: bool = False
    seed: int = 0

    verb: ClassVar[tuple[str, ...]] = ("claims", "test")
    checks: ClassVar[Mapping[str, Check]] = {
        "claims": lambda name, value: tuple(dict.fromkeys(list_of(checks.text)(name, value))),
        "quick": boolean,
        "folder": optional(checks.path),
        "model": optional(checks.path),
        "texts": optional(checks.path),
        "other": optional(checks.path),
        "truncate": boolean,
        "seed": lambda _, value: seed_number(value),
    }

    def _complete(self) -> None:
        needs_model = {"texts": self.texts, "other": self.other, "truncate": self.truncate or None}
        for name, value in needs_model.items():
            if value is not None and self.model is None:
                raise HelmscopeError(f"{name} is set, but model is not: set it to A, B, tied, a folder or a Hub id")

    def prepare(self) -> TrialsJob:
        """Return the job; an unusable claim, model or text raises ``HelmscopeError``. Runs the code in ``folder``."""
        from helmscope.jobs.texts import trial_subjects

        subjects = trial_subjects(self)
        claims = claims_to_try(self, subjects)
        subjects.identify()
        return TrialsJob(**job_arguments(self, claims, subjects))

    def estimate(self) -> Estimate:
        """The time on one core, as declared by the experiments. Runs the code in ``folder``."""
        from helmscope.jobs.cost import trials_cost
        from helmscope.jobs.texts import trial_subjects

        return trials_cost(self, claims_to_try(self, trial_subjects(self)))


def job_arguments(spec: Trials, claims: list[str], subjects: TrialSubjects) -> dict[str, Any]:
    """The arguments of ``TrialsJob``. Its spec depends neither on the working directory nor on the order of the claims,
    so that a run can be resumed from anywhere.
    """
    from helmscope.claims.trial import sources, trial_units

    named = {
        name: each for name, each in (("subject", subjects.subject), ("other", subjects.other)) if each is not None
    }
    folder = None if spec.folder is None else str(Path(spec.folder).resolve())
    inputs = {name: digest for claim in claims for name, digest in sources(claim, folder).items()}
    canonical = {"claims": tuple(sorted(claims)), "folder": folder, **subjects.absolute_paths()}
    return {
        "spec": msgspec.structs.replace(spec, **canonical),
        "units": trial_units(claims, seed=spec.seed, quick=spec.quick, folder=folder, **named),
        "inputs": inputs | {name: each.identity for name, each in named.items()},
        "parameters": {"claims": sorted(claims), "quick": spec.quick, "from": folder}
        | {name: each.name for name, each in named.items()},
        "original": spec,
        "claims": claims,
        "subjects": subjects,
    }


def code_notice(spec: Trials) -> str:
    """A notice of the user's code that a spec runs, to print before it does; "" if there is none. Unknown claims raise
    ``HelmscopeError`` here, before any code runs.

    >>> code_notice(Trials(claims=["rate"]))
    ''
    """
    from helmscope.claims.reading import read_catalogue

    if spec.folder is None:
        return ""
    entries = read_catalogue(spec.folder)
    for claim in spec.claims:
        known_name("claim", claim, entries)
    files = ", ".join(path.name for path in sorted(Path(spec.folder).glob("*.py"))) or "no Python file"
    return f"running the code in {spec.folder}: {files}"


def claims_to_try(spec: Trials, subjects: TrialSubjects) -> list[str]:
    """The claims to try, each once: those named, or all that can be tried on the subjects. A named claim that cannot be
    tried on them raises ``HelmscopeError``.
    """
    from helmscope.claims.reading import read_catalogue
    from helmscope.claims.registry import experiments
    from helmscope.claims.trial import registered

    entries = read_catalogue(spec.folder)
    for claim in spec.claims:  # before the user's code runs
        known_name("claim", claim, entries)
    requested = [registered(claim, spec.folder).claim for claim in spec.claims]
    known = experiments(spec.folder)
    if not known:
        raise HelmscopeError(f"folder is '{spec.folder}', but no function in it is decorated with experiment(ID)")
    chosen = requested or [claim for claim, tried in known.items() if _fits(tried, subjects)]
    if not chosen:
        raise HelmscopeError(f"model is '{spec.model}', but no claim can be tried with {' '.join(subjects.options)}")
    for claim in chosen:
        known[claim].case(spec.seed, subject=subjects.subject, other=subjects.other)
    return chosen


def _fits(tried: Registered, subjects: TrialSubjects) -> bool:
    """Whether an experiment can be run on the subjects."""
    from helmscope.claims.registry import ground_of

    named = [each for each in (subjects.subject, subjects.other) if each is not None]
    return len(named) <= len(tried.usual) and all(ground_of(each) in tried.subjects for each in named)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrialsResult(Result):
    """The result of ``Trials``: ``trials`` in the order of the claims. If experiments failed, ``trials`` has only the
    others, and ``failed`` is the error that names the failed ones.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(Trials(claims=["kuramoto"], quick=True), folder=f"{root}/run")
    >>> result.ok, [trial.verdict.claim for trial in result.trials]
    (True, ['kuramoto'])
    """

    trials: list[Trial]
    failed: TrialsFailed | None = None

    @property
    def ok(self) -> bool:
        """Whether every experiment ran to completion, whatever its verdict."""
        return self.failed is None

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts of the trials."""
        return [trial.verdict for trial in self.trials]


@dataclass(frozen=True, eq=False, kw_only=True)
class TrialsJob(Job):
    """A prepared job of trials. ``original`` is the spec as the user wrote it, ``claims`` the claims to try."""

    spec: Trials
    original: Trials
    claims: list[str]
    subjects: TrialSubjects

    prints_cost: ClassVar[bool] = True

    def cost(self) -> Estimate:
        """The estimated time, without selecting the claims a second time."""
        from helmscope.jobs.cost import trials_cost

        return trials_cost(self.original, self.claims)

    def execute(self, work: Work) -> TrialsResult:
        """Run the trials and write verdicts.json."""
        trials, failed = self.run_trials(work)
        return TrialsResult(spec=self.spec, folder=work.folder, trials=trials, failed=failed)

    def run_trials(self, work: Work) -> tuple[list[Trial], TrialsFailed | None]:
        """Run the trials. If experiments failed, return the other trials and the error that names the failed ones."""
        from helmscope.claims.trial import TrialsFailed, run_trials

        try:
            trials = run_trials(
                self.claims,
                work.folder,
                seed=self.spec.seed,
                quick=self.spec.quick,
                folder=self.spec.folder,
                subject=self.subjects.subject,
                other=self.subjects.other,
                manifest=work.manifest,
                engine=work.engine,
                heading="trying claims" if work.show_progress else None,
                allow_mixed=work.allow_mixed,
            )
        except TrialsFailed as error:
            return error.trials, error
        return trials, None
