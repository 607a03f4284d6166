"""Trials: claims put to the test by their experiments, on a simulation or on a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from helmscope.jobs import checks
from helmscope.jobs.checks import Check, each, optional, switch
from helmscope.jobs.job import Job, Result, Work
from helmscope.jobs.spec import Spec
from helmscope.types import HelmscopeError, known_name, seed_number

if TYPE_CHECKING:
    from helmscope.claims.registry import Registered
    from helmscope.claims.trial import Trial, TrialsFailed
    from helmscope.jobs.cost import Estimate
    from helmscope.jobs.texts import OnTrial
    from helmscope.types import Verdict


class Trials(Spec, frozen=True, kw_only=True, tag="trials"):
    """Try ``claims``, all that can be tried where none is named, by their experiments; ``quick`` takes fewer
    replicates. ``folder`` holds claims of your own: ID.toml each, and Python files, **which are run**.

    ``model`` is what they are tried on, as each claim says where None: "A", "B" or "tied", a folder or a Hub id; with
    ``texts``, a file with one on each line or a JSON list, which are cut to the model's context where ``truncate``;
    ``other`` is a second model for claims that take two.

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
        "claims": lambda name, value: tuple(dict.fromkeys(each(checks.text)(name, value))),
        "quick": switch,
        "folder": optional(checks.path),
        "model": optional(checks.path),
        "texts": optional(checks.path),
        "other": optional(checks.path),
        "truncate": switch,
        "seed": lambda _, value: seed_number(value),
    }

    def _complete(self) -> None:
        given = {"texts": self.texts, "other": self.other, "truncate": self.truncate or None}
        for name, value in given.items():
            if value is not None and self.model is None:
                raise HelmscopeError(f"{name} is given, but no model: name it too, as A, a folder or a Hub id")

    def prepare(self) -> TrialsJob:
        """The trials; a claim, a model or texts that cannot be used are refused. Runs the code in ``folder``."""
        from helmscope.jobs.texts import on_trial

        on = on_trial(self)
        claims = asked_claims(self, on)
        on.identify()
        return TrialsJob(**prepared(self, claims, on))

    def estimate(self) -> Estimate:
        """Time on one core, as the experiments declare it. Runs the code in ``folder``."""
        from helmscope.jobs.cost import trials_cost
        from helmscope.jobs.texts import on_trial

        return trials_cost(self, asked_claims(self, on_trial(self)))


def prepared(spec: Trials, claims: list[str], on: OnTrial) -> dict[str, Any]:
    """What a job of trials is made of. Its spec depends neither on the working directory nor on the order in which
    claims are named, so that a run goes on wherever it is asked for.
    """
    from helmscope.claims.trial import sources, trial_units

    subjects = {name: each for name, each in (("subject", on.subject), ("other", on.other)) if each is not None}
    place = None if spec.folder is None else str(Path(spec.folder).resolve())
    inputs = {name: digest for claim in claims for name, digest in sources(claim, place).items()}
    settled = {"claims": tuple(sorted(claims)), "folder": place, **on.places()}
    return {
        "spec": msgspec.structs.replace(spec, **settled),
        "units": trial_units(claims, seed=spec.seed, quick=spec.quick, folder=place, **subjects),
        "inputs": inputs | {name: each.identity for name, each in subjects.items()},
        "parameters": {"claims": sorted(claims), "quick": spec.quick, "from": place}
        | {name: each.name for name, each in subjects.items()},
        "asked": spec,
        "claims": claims,
        "on": on,
    }


def code_that_runs(spec: Trials) -> str:
    """Whose code a spec runs, in one sentence to be said beforehand; "" where it runs none of a user's. Unknown claims
    are refused here, before it runs.

    >>> code_that_runs(Trials(claims=["rate"]))
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


def asked_claims(spec: Trials, on: OnTrial) -> list[str]:
    """The claims to try, each once: those named, or all that can be tried on what is on trial. A claim that is named
    and cannot be tried on it is refused.
    """
    from helmscope.claims.reading import read_catalogue
    from helmscope.claims.registry import experiments
    from helmscope.claims.trial import registered

    entries = read_catalogue(spec.folder)
    for claim in spec.claims:  # before anybody's code runs
        known_name("claim", claim, entries)
    named = [registered(claim, spec.folder).claim for claim in spec.claims]
    known = experiments(spec.folder)
    if not known:
        raise HelmscopeError(f"folder is '{spec.folder}', but no function in it is decorated with experiment(ID)")
    asked = named or [claim for claim, tried in known.items() if _fits(tried, on)]
    if not asked:
        raise HelmscopeError(f"model is '{spec.model}', but no claim here can be tried with {' '.join(on.words)}")
    for claim in asked:
        known[claim].case(spec.seed, subject=on.subject, other=on.other)
    return asked


def _fits(tried: Registered, on: OnTrial) -> bool:
    """Whether an experiment can be run on what is on trial."""
    from helmscope.claims.registry import ground_of

    subjects = [each for each in (on.subject, on.other) if each is not None]
    return len(subjects) <= len(tried.usual) and all(ground_of(each) in tried.subjects for each in subjects)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrialsResult(Result):
    """The trials in the order in which they were asked for; where experiments failed, those of the others, and in
    ``failed`` the error that names them.
    """

    trials: list[Trial]
    failed: TrialsFailed | None = None

    @property
    def ok(self) -> bool:
        """Whether every experiment came to its end, whatever it found."""
        return self.failed is None

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts."""
        return [trial.verdict for trial in self.trials]


@dataclass(frozen=True, eq=False, kw_only=True)
class TrialsJob(Job):
    """Trials that wait to be run. ``asked`` is the spec as it was given, ``claims`` what it asks for."""

    spec: Trials
    asked: Trials
    claims: list[str]
    on: OnTrial

    says_cost: ClassVar[bool] = True

    def cost(self) -> Estimate:
        """Without a second look at what can be tried."""
        from helmscope.jobs.cost import trials_cost

        return trials_cost(self.asked, self.claims)

    def carry_out(self, work: Work) -> TrialsResult:
        """Runs the trials and writes verdicts.json."""
        trials, failed = self.tried(work)
        return TrialsResult(spec=self.spec, folder=work.folder, trials=trials, failed=failed)

    def tried(self, work: Work) -> tuple[list[Trial], TrialsFailed | None]:
        """The trials; where experiments failed, the others and the error that says so."""
        from helmscope.claims.trial import TrialsFailed, run_trials

        try:
            trials = run_trials(
                self.claims,
                work.folder,
                seed=self.spec.seed,
                quick=self.spec.quick,
                folder=self.spec.folder,
                subject=self.on.subject,
                other=self.on.other,
                manifest=work.manifest,
                engine=work.engine,
                heading="trying claims" if work.show_progress else None,
                allow_mixed=work.allow_mixed,
            )
        except TrialsFailed as error:
            return error.trials, error
        return trials, None
