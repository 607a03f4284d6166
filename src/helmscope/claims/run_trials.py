"""Many trials in a run folder: one unit of work, and one verdict, for each claim and subject."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.claims.registry import TrialCase, registered
from helmscope.claims.trial import Trial, run_trial, sources
from helmscope.models.subject import Subject
from helmscope.runs.run_units import RunResult, UnitsFailed, run_units
from helmscope.runs.serial import Serial
from helmscope.runs.unit import Unit
from helmscope.store.verdicts import decode_verdicts, encode_verdicts
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.runs.attempt import Engine, Outcomes
    from helmscope.store.manifest import Manifest
    from helmscope.store.run_folder import RunFolder


class TrialsFailed(UnitsFailed):
    """Raised when some experiments failed; ``trials`` holds the others, whose verdicts are stored.

    >>> from pathlib import Path
    >>> from helmscope.runs.run_units import RunResult
    >>> TrialsFailed(RunResult(Path("units"), {}, {"my-claim": "ZeroDivisionError"}), []).trials
    []
    """

    def __init__(self, result: RunResult, trials: list[Trial]) -> None:
        super().__init__(result)
        self.trials = trials


@dataclass(frozen=True)
class PlannedTrial:
    """A claim and the subject (or two) that it is to be tried on; ``name`` is that of its unit of work.

    >>> [planned.name for planned in plan_trials(["rate"])]
    ['rate']
    """

    claim: str
    subject: Subject
    other: Subject | None
    name: str

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """The subject and, if there is one, the other subject."""
        return TrialCase(subject=self.subject, other=self.other).subjects

    @property
    def label(self) -> str:
        """The subjects as the verdict names them."""
        return " and ".join(TrialCase(subject=self.subject, other=self.other).names)


def plan_trials(
    claims: Sequence[str],
    subjects: Sequence[Subject] = (),
    *,
    other: Subject | None = None,
    claims_folder: str | Path | None = None,
    held_out: bool = False,
) -> list[PlannedTrial]:
    """The trials of some claims on some subjects, by default on those that each experiment names: subject by subject,
    so that each model is recorded once.

    With ``held_out``, default subjects that are bundled models are tried on the held-out texts. Raises
    HelmscopeError for an unknown claim, and for a claim that can be tried on none of the subjects; a subject that only
    some of the claims can be tried on is left out for the others.

    >>> [(trial.claim, trial.subject.name) for trial in plan_trials(["rate", "tokens-cluster"])]
    [('rate', 'simulation'), ('tokens-cluster', 'A'), ('tokens-cluster', 'B'), ('tokens-cluster', 'tied')]
    """
    if isinstance(claims, str) or not isinstance(claims, Sequence):
        raise HelmscopeError(f"claims is {type_with_article(claims)}, but it must be a list of ids, such as ['rate']")
    pairs: list[tuple[str, Subject, Subject | None]] = []
    for claim in claims:
        chosen = registered(claim, claims_folder)
        if chosen.compares_models:
            case = chosen.case(subject=subjects[0] if subjects else None, other=other)  # a comparison has one pair
            pairs.append((claim, case.subject, case.other))
            continue
        defaults = (
            tuple(subject.held_out() for subject in chosen.default_subjects) if held_out else chosen.default_subjects
        )
        fitting = [subject for subject in subjects or defaults if chosen.fits(subject)]
        if not fitting:
            chosen.case(subject=subjects[0])  # raises: says what the claim can be tried on
        pairs += [(claim, subject, None) for subject in fitting]
    order = {subject: k for k, subject in enumerate(dict.fromkeys(subject for _, subject, _ in pairs))}
    pairs.sort(key=lambda pair: (not pair[1].is_simulation, order[pair[1]]))
    labels = _short_labels([subject for _, subject, _ in pairs])
    return [PlannedTrial(claim, subject, second, claim + labels[subject]) for claim, subject, second in pairs]


def _short_labels(subjects: Sequence[Subject]) -> dict[Subject, str]:
    """What is added to the name of a claim to name its unit: nothing for the simulation, else the subject's name, with
    digits of its hash if two subjects have the same name.
    """
    distinct = list(dict.fromkeys(subjects))
    names = {subject: re.sub(r"[^A-Za-z0-9._-]+", "-", subject.name) for subject in distinct}
    count = Counter(names.values())
    return {
        subject: "" if subject.is_simulation else f"--{name}" + (f"-{subject.identity[:8]}" if count[name] > 1 else "")
        for subject, name in names.items()
    }


def run_trials(
    claims: Sequence[str],
    folder: RunFolder,
    *,
    seed: int = 0,
    quick: bool = False,
    claims_folder: str | Path | None = None,
    subjects: Sequence[Subject] = (),
    engine: Engine | None = None,
) -> list[Trial]:
    """Run ``run_trial`` for several claims and subjects, as units of work in the run folder ``folder``, and write
    verdicts.json there: one verdict for each claim and subject.

    ``subjects`` are by default those that each experiment names. If experiments fail, the others still run and their
    verdicts are stored, and ``TrialsFailed`` is raised at the end. Raises HelmscopeError before any work for a claim or
    subject that cannot be tried.

    >>> import tempfile
    >>> from helmscope.store.run_folder import RunFolder
    >>> with tempfile.TemporaryDirectory() as root:
    ...     run_trials(["kuramoto"], RunFolder.new(root, "claims"), quick=True)[0].verdict.claim
    'kuramoto'
    """
    planned = plan_trials(claims, subjects, claims_folder=claims_folder)
    return run_planned(planned, folder, seed=seed, quick=quick, claims_folder=claims_folder, engine=engine)


def run_planned(
    planned: Sequence[PlannedTrial],
    folder: RunFolder,
    *,
    seed: int = 0,
    quick: bool = False,
    claims_folder: str | Path | None = None,
    manifest: Manifest | None = None,
    engine: Engine | None = None,
    heading: str | None = None,
    allow_mixed: bool = False,
    costs: Mapping[str, float] | None = None,
) -> list[Trial]:
    """Run planned trials in a run folder, as ``run_trials`` does. ``costs``, the estimated seconds of each trial by its
    name, weights the trials in the progress.

    Runs are resumed, interrupted and distributed over processes as in ``runs.run_units``. Claims that share a model run
    one after another in this process, after the engine's units, so that the model is recorded only once; so do all
    claims on a model in memory.
    """
    path = None if claims_folder is None else str(Path(claims_folder).resolve())
    failed = None
    with _in_memory(planned):
        units = _units(planned, path, seed=seed, quick=quick)
        local = _local_units(planned)
        mixed = engine if engine is None or not local else _MixedEngine(engine, local)
        try:
            shown: dict[str, Any] = {"heading": heading, "costs": costs}
            result = run_units(units, folder, manifest=manifest, engine=mixed, allow_mixed=allow_mixed, **shown)
        except UnitsFailed as error:
            failed, result = error, error.result
    trials = [_decode_trial(result[name]) for name in result]
    folder.write_verdicts([trial.verdict for trial in trials])
    if failed is not None:
        raise TrialsFailed(result, trials) from failed
    return trials


def trial_units(
    plan: Sequence[PlannedTrial], *, seed: int = 0, quick: bool = False, claims_folder: str | Path | None = None
) -> list[Unit]:
    """The units of work that ``run_trials`` runs, one for each planned trial.

    >>> [unit.name for unit in trial_units(plan_trials(["kuramoto", "radial"]))]
    ['kuramoto', 'radial']
    """
    path = None if claims_folder is None else str(Path(claims_folder).resolve())
    with _in_memory(plan):
        return _units(plan, path, seed=seed, quick=quick)


def _units(plan: Sequence[PlannedTrial], claims_folder: str | None, *, seed: int, quick: bool) -> list[Unit]:
    shared = {"seed": TrialCase(seed, quick).seed, "quick": quick, "claims_folder": claims_folder}
    units = []
    for planned in plan:
        described = {"subject": _encode_subject(planned.subject)}
        described |= {} if planned.other is None else {"other": _encode_subject(planned.other)}
        own = {"claim": planned.claim, "sources": sources(planned.claim, claims_folder)}
        units.append(Unit(planned.name, trial_unit, own | shared | described))
    return units


def trial_unit(
    claim: str,
    sources: dict[str, str],
    seed: int,
    quick: bool,
    claims_folder: str | None,
    subject: dict[str, Any],
    other: dict[str, Any] | None = None,
) -> xr.Dataset:
    """One unit of work: the Measurement of a trial, with the verdict as JSON in its attributes.

    ``sources`` and the subjects are part of the unit's identity, so that a changed entry, code or model is noticed.
    Whatever the experiment prints goes to standard error.
    """
    second = None if other is None else _decode_subject(other)
    with redirect_stdout(sys.stderr):
        trial = run_trial(
            claim, seed=seed, quick=quick, claims_folder=claims_folder, subject=_decode_subject(subject), other=second
        )
    return trial.data.assign_attrs(verdict=encode_verdicts([trial.verdict]).decode())


@dataclass(frozen=True)
class _MixedEngine:
    """Runs units with ``engine``, and then those named in ``local`` one after another in this process."""

    engine: Engine
    local: frozenset[str]

    @property
    def workers(self) -> int:
        return self.engine.workers

    @property
    def threads(self) -> int:
        return self.engine.threads

    def attempts(self, units: Sequence[Unit]) -> Outcomes:
        """The outcomes of the engine's units, then those of the local ones."""
        yield from self.engine.attempts([unit for unit in units if unit.name not in self.local])
        serial = Serial(max_memory=getattr(self.engine, "max_memory", None), threads=self.threads)
        yield from serial.attempts([unit for unit in units if unit.name in self.local])


def _local_units(plan: Sequence[PlannedTrial]) -> frozenset[str]:
    """The units that must run in this process: they share a model, or their model exists only in memory."""
    models = [planned for planned in plan if not planned.subject.is_simulation]
    count = Counter(planned.subject for planned in models)
    return frozenset(
        planned.name
        for planned in models
        if count[planned.subject] > 1 or not all(subject.picklable for subject in planned.subjects)
    )


_IN_MEMORY: dict[str, Subject] = {}  # by identity, for the duration of a run


@contextmanager
def _in_memory(plan: Sequence[PlannedTrial]) -> Iterator[None]:
    """Context manager: within it, ``_decode_subject`` finds the subjects that exist only in this process."""
    subjects = {subject for planned in plan for subject in planned.subjects if not subject.picklable}
    found = {subject.identity: subject for subject in subjects}
    _IN_MEMORY.update(found)
    try:
        yield
    finally:
        for identity in found:
            _IN_MEMORY.pop(identity, None)


def _encode_subject(subject: Subject) -> dict[str, Any]:
    """A subject as parameters of a unit: its identity and plain data; only its identity if it is in memory."""
    return {"identity": subject.identity, **(subject.as_data() if subject.picklable else {})}


def _decode_subject(data: dict[str, Any]) -> Subject:
    """The subject of a unit's parameters; raises HelmscopeError if it has changed since the run began."""
    identity = data["identity"]
    description = {name: value for name, value in data.items() if name != "identity"}
    if not description:
        if identity not in _IN_MEMORY:
            raise HelmscopeError("subject is a model in memory, but it can only be tried in the process that holds it")
        return _IN_MEMORY[identity]
    subject = Subject.from_data(description)
    if subject.identity != identity:
        raise HelmscopeError(f"subject is {subject.label}, but when the run began it had the hash {identity}")
    return subject


def _decode_trial(dataset: xr.Dataset) -> Trial:
    (verdict,) = decode_verdicts(str(dataset.attrs["verdict"]).encode(), "verdict of a trial")
    attributes = {name: value for name, value in dataset.attrs.items() if name != "verdict"}
    return Trial(verdict, dataset.drop_attrs(deep=False).assign_attrs(attributes))
