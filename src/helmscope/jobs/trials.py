"""Trials: test claims by their experiments, on a simulation or on a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from helmscope.jobs import checks
from helmscope.jobs.checks import Check, boolean, list_of, optional
from helmscope.jobs.job import Job, Result, Work
from helmscope.jobs.spec import Spec
from helmscope.types import HelmscopeError, check_seed, html_table, pluralized

if TYPE_CHECKING:
    from helmscope.claims.run_trials import PlannedTrial, TrialsFailed
    from helmscope.claims.trial import Trial
    from helmscope.jobs.cost import Estimate
    from helmscope.jobs.texts import TrialSubjects
    from helmscope.runs.attempt import Engine
    from helmscope.types import Verdict


class TrialsSpec(Spec, frozen=True, kw_only=True, tag="trials"):
    """Spec for trying ``claims`` (by default all that can be tried) by their experiments.

    ``quick`` uses fewer replicates. ``claims_folder`` contains your own claims: one ID.toml per claim, and Python
    files, **which are run**. ``models`` are the models to try the claims on, one verdict each: "A", "B" or "tied",
    folders or Hub ids; by default each claim names its own. ``texts`` is a file with one text per line or a JSON list;
    ``truncate`` cuts them to the model's context. ``held_out`` uses the held-out texts of the bundled models, on which
    published verdicts are based. ``other`` is a second model, for claims that compare two.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(TrialsSpec(claims=["kuramoto"], quick=True), folder=f"{root}/run")
    >>> [verdict.ruling.value for verdict in result.verdicts]
    ['true by construction']
    """

    claims: tuple[str, ...] = ()
    quick: bool = False
    claims_folder: str | None = None
    models: tuple[str, ...] = ()
    texts: str | None = None
    other: str | None = None
    truncate: bool = False
    held_out: bool = False
    seed: int = 0

    main_fields: ClassVar[tuple[str, ...]] = ("claims", "models", "quick", "seed")
    verb: ClassVar[tuple[str, ...]] = ("claims", "test")
    checks: ClassVar[Mapping[str, Check]] = {
        "claims": lambda name, value: tuple(dict.fromkeys(list_of(checks.text)(name, value))),
        "quick": boolean,
        "claims_folder": optional(checks.path),
        "models": lambda name, value: tuple(dict.fromkeys(list_of(checks.path)(name, value))),
        "texts": optional(checks.path),
        "other": optional(checks.path),
        "truncate": boolean,
        "held_out": boolean,
        "seed": lambda _, value: check_seed(value),
    }

    def _complete(self) -> None:
        needs_model = {"texts": self.texts, "other": self.other, "truncate": self.truncate or None}
        for name, value in needs_model.items():
            if value is not None and not self.models:
                raise HelmscopeError(
                    f"{name} is set without a model: add models=['A'], on the command line --model A, where A may also "
                    "be B, tied, a folder or a Hub id"
                )

    def prepare(self) -> TrialsJob:
        """Return the job; an unusable claim, model or text raises ``HelmscopeError``. Runs the code in
        ``claims_folder``."""
        from helmscope.jobs.texts import trial_subjects

        subjects = trial_subjects(self)
        planned = plan(self, subjects)
        subjects.identify()
        return TrialsJob(**job_arguments(self, planned, subjects))

    def estimate(self) -> Estimate:
        """The time on one core, as declared by the experiments and scaled by the size of the model and its texts, and
        the memory. Runs the code in ``claims_folder`` and loads the models.
        """
        from helmscope.jobs.cost import trials_cost
        from helmscope.jobs.texts import trial_subjects

        return trials_cost(self, plan(self, trial_subjects(self)))


def job_arguments(spec: TrialsSpec, planned: list[PlannedTrial], subjects: TrialSubjects) -> dict[str, Any]:
    """The arguments of ``TrialsJob``. Its spec depends neither on the working directory nor on the order of the claims,
    so that a run can be resumed from anywhere.
    """
    from helmscope.claims.run_trials import trial_units
    from helmscope.claims.trial import sources

    folder = None if spec.claims_folder is None else str(Path(spec.claims_folder).resolve())
    claims = sorted({trial.claim for trial in planned})
    inputs = {name: digest for claim in claims for name, digest in sources(claim, folder).items()}
    models = {subject.name: subject.identity for trial in planned for subject in trial.subjects}
    models.pop("simulation", None)
    canonical = {"claims": tuple(claims), "claims_folder": folder, **subjects.absolute_paths()}
    return {
        "spec": msgspec.structs.replace(spec, **canonical),
        "units": trial_units(planned, seed=spec.seed, quick=spec.quick, claims_folder=folder),
        "inputs": inputs | models,
        "parameters": {"claims": claims, "quick": spec.quick, "from": folder, "subjects": list(models)},
        "original": spec,
        "planned": planned,
        "subjects": subjects,
    }


def code_notice(spec: TrialsSpec) -> str:
    """A notice of the user's code that a spec runs, to print before it does; "" if there is none. A folder without
    entries and unknown claims raise ``HelmscopeError`` here, before any code runs.

    >>> code_notice(TrialsSpec(claims=["rate"]))
    ''
    """
    from helmscope.claims.reading import check_claim, read_catalogue

    if spec.claims_folder is None:
        return ""
    read_catalogue(spec.claims_folder)
    for claim in spec.claims:
        check_claim(claim, spec.claims_folder)
    files = ", ".join(path.name for path in sorted(Path(spec.claims_folder).glob("*.py"))) or "no Python file"
    return f"running the code in {spec.claims_folder}: {files}"


def plan(spec: TrialsSpec, subjects: TrialSubjects) -> list[PlannedTrial]:
    """The trials of a spec: those of the claims that it names, or of all that can be tried, on its models or on those
    that each claim names. A named claim that can be tried on none of the models raises ``HelmscopeError``.
    """
    from helmscope.claims.reading import check_claim, read_catalogue
    from helmscope.claims.registry import experiments, registered
    from helmscope.claims.run_trials import plan_trials

    entries = read_catalogue(spec.claims_folder)
    for claim in spec.claims:  # before the user's code runs
        check_claim(claim, spec.claims_folder)
    known = experiments(spec.claims_folder)
    if not known:
        registered(next(iter(entries)), spec.claims_folder)  # raises: names the entry that has no experiment
    compares, named = subjects.other is not None, subjects.subjects
    possible = [
        claim
        for claim, tried in known.items()
        if not named or (tried.compares_models == compares and any(map(tried.fits, named)))
    ]
    claims = list(spec.claims) or possible
    if not claims and compares:
        raise HelmscopeError(f"other is '{spec.other}', but no claim that can be tried compares two models")
    if not claims:
        raise HelmscopeError(f"models is {list(spec.models)}, but no claim can be tried on them")
    return plan_trials(
        claims, subjects.subjects, other=subjects.other, claims_folder=spec.claims_folder, held_out=spec.held_out
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TrialsResult(Result):
    """The result of ``TrialsSpec``: ``trials`` has one trial for each claim and subject. If experiments failed, it has
    only the others, and ``failed`` is the error that names the failed ones.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(TrialsSpec(claims=["kuramoto"], quick=True), folder=f"{root}/run")
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

    @property
    def summary(self) -> str:
        """How many trials there were, with each ruling, and whether an experiment failed."""
        counts = Counter(verdict.ruling.value for verdict in self.verdicts)
        rulings = ", ".join(f"{count} {ruling}" for ruling, count in counts.most_common())
        parts = [pluralized(len(self.trials), "trial"), rulings, "" if self.failed is None else str(self.failed)]
        return "; ".join(part for part in parts if part)

    def _tables(self) -> list[str]:
        """One row for each trial."""
        rows = [(verdict.claim, verdict.subject, verdict.summary) for verdict in self.verdicts]
        return [html_table("", rows, header=("claim", "subject", "verdict"))] if rows else []


@dataclass(frozen=True, eq=False, kw_only=True)
class TrialsJob(Job):
    """A prepared job of trials. ``original`` is the spec as the user wrote it, ``planned`` holds its trials."""

    spec: TrialsSpec
    original: TrialsSpec
    planned: list[PlannedTrial]
    subjects: TrialSubjects

    prints_cost: ClassVar[bool] = True
    weights_units: ClassVar[bool] = True

    @property
    def notices(self) -> tuple[str, ...]:
        """What the subjects do not allow to decide, and which of the user's claims are left out for want of an
        experiment.
        """
        from helmscope.claims.reading import read_catalogue
        from helmscope.claims.registry import experiments

        folder = self.original.claims_folder
        if folder is None or self.original.claims:
            return self.subjects.notices
        missing = [claim for claim in read_catalogue(folder) if claim not in experiments(folder)]
        return (*self.subjects.notices, *(f"{claim}.toml has no experiment and is not tried" for claim in missing))

    def cost(self) -> Estimate:
        """The estimated time and memory, without selecting the claims a second time."""
        from helmscope.jobs.cost import trials_cost

        return trials_cost(self.original, self.planned)

    def check_limits(self, engine: Engine) -> None:
        """Raise ``HelmscopeError`` if the estimated memory is more than the engine allows."""
        limit, needed = getattr(engine, "max_memory", None), self.cost().bytes or 0
        if limit is not None and needed > limit:
            on_models = any(not subject.is_simulation for planned in self.planned for subject in planned.subjects)
            remedy = ", or pass fewer or shorter texts" if on_models else ""
            raise HelmscopeError(
                f"max_memory is {limit / 1e6:,.0f} MB, but the trials need about {needed / 1e6:,.0f} MB: raise "
                f"it{remedy}"
            )

    def execute(self, work: Work) -> TrialsResult:
        """Run the trials and write verdicts.json."""
        trials, failed = self.run_trials(work)
        return TrialsResult(spec=self.spec, folder=work.folder, trials=trials, failed=failed)

    def run_trials(self, work: Work) -> tuple[list[Trial], TrialsFailed | None]:
        """Run the trials. If experiments failed, return the other trials and the error that names the failed ones."""
        from helmscope.claims.run_trials import TrialsFailed, run_planned

        try:
            trials = run_planned(
                self.planned,
                work.folder,
                seed=self.spec.seed,
                quick=self.spec.quick,
                claims_folder=self.spec.claims_folder,
                manifest=work.manifest,
                engine=work.engine,
                heading="trying claims" if work.show_progress else None,
                allow_mixed=work.allow_mixed,
                costs=work.costs,
            )
        except TrialsFailed as error:
            return error.trials, error
        return trials, None
