"""Trials: run the experiment of a claim and judge its finding, one claim at a time or many in a run folder."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.claims.judge import judge
from helmscope.claims.reading import read_catalogue
from helmscope.claims.registry import Case, Experiment, Registered, code_file, experiments
from helmscope.models.subject import Subject
from helmscope.runs.attempt import described
from helmscope.runs.bar import reporting
from helmscope.runs.run import RunResult, UnitsFailed, run
from helmscope.runs.serial import Serial
from helmscope.runs.unit import Unit
from helmscope.stats.summary import summary
from helmscope.store.manifest import hash_file
from helmscope.store.verdicts import decode_verdicts, encode_verdicts
from helmscope.types import (
    HelmscopeError,
    Plottable,
    Verdict,
    check_progress,
    counted,
    html_stack,
    known_name,
    one_line_repr,
)
from helmscope.types.measurement import COMPANIONS

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.plots.figure import Figure
    from helmscope.runs.attempt import Engine, Outcomes
    from helmscope.store.manifest import Manifest
    from helmscope.store.run_folder import RunFolder
    from helmscope.types.progress import ProgressOption


@dataclass(frozen=True, eq=False, repr=False)
class Trial(Plottable):
    """The verdict on a claim, with the Measurement of its experiment and all replicates.

    ``plot()`` shows both; the values that it plots are ``hs.reduce_replicates(trial.data)``.

    >>> import xarray as xr
    >>> from helmscope.types import Region, Ruling
    >>> data = xr.Dataset({"slope": 1.0, "slope_stderr": 0.1}, attrs={"n": 20})
    >>> Trial(Verdict("rate", Ruling.IMPOSSIBLE, None, Region(text="1"), "", ""), data)
    <Trial of rate: premise impossible here; 1 variable measured>
    """

    verdict: Verdict
    data: xr.Dataset

    @property
    def _variables(self) -> list[str]:
        return [str(name) for name in self.data.data_vars if not str(name).endswith(COMPANIONS)]

    def __repr__(self) -> str:
        measured = counted(len(self._variables), "variable")
        return one_line_repr(f"Trial of {self.verdict.claim}: {self.verdict.summary}; {measured} measured")

    def _repr_html_(self) -> str:
        parts = [self.verdict._repr_html_()]
        parts += [summary(self.data)._repr_html_()] if self._variables else []
        return html_stack(*parts)

    def plot(self, **options: Any) -> Figure:
        """Plot the statistic with its region, and the measured data: ``trial_figure``, which takes no options."""
        from helmscope.plots.trial import trial_figure  # deferred, since listing claims needs no plotting

        return trial_figure(self.verdict, self.data, **options)


def try_claim(
    claim: str,
    *,
    seed: int = 0,
    quick: bool = False,
    folder: str | Path | None = None,
    subject: Subject | None = None,
    other: Subject | None = None,
    progress: ProgressOption = None,
) -> Trial:
    """Run the experiment of one claim and judge its finding by the region fixed in the catalogue.

    ``subject`` is the model to try it on, ``other`` a second one for claims that take two; the default is chosen by the
    experiment, and is the simulation for most. ``quick`` uses fewer replicates. With ``folder`` the claim is one of a
    user's catalogue, and the Python files there are run. Equal seeds give equal verdicts. Raises HelmscopeError for an
    unknown claim, for one without an experiment, for a subject that it cannot be tried on, and if the experiment fails.
    ``progress`` is called with 1 at the end.

    >>> try_claim("kuramoto", quick=True).verdict.ruling.value
    'true by construction'
    """
    Case(seed, quick)
    check_progress(progress)
    chosen = registered(claim, folder)
    case = chosen.case(seed, quick=quick, subject=subject, other=other)
    entry = read_catalogue(folder)[claim]  # read before the experiment, which cannot change what it is judged by
    label = " and ".join(subject.label for subject in case.subjects)
    try:
        with reporting(progress, f"trying '{claim}'") as report:
            finding = chosen.function(case)
    except Exception as error:
        reason = str(error) if isinstance(error, HelmscopeError) else described(error)
        line = _failing_line(error, chosen.function)
        raise HelmscopeError(f"experiment of '{claim}' failed{line}: {reason}") from error
    check_progress(report)(1.0)
    return Trial(judge(entry, finding, subject=label), finding.data)


class TrialsFailed(UnitsFailed):
    """Raised when some experiments failed; ``trials`` holds the others, whose verdicts are stored.

    >>> from pathlib import Path
    >>> from helmscope.runs.run import RunResult
    >>> TrialsFailed(RunResult(Path("units"), {}, {"my-claim": "ZeroDivisionError"}), []).trials
    []
    """

    def __init__(self, result: RunResult, trials: list[Trial]) -> None:
        super().__init__(result)
        self.trials = trials


def run_trials(
    claims: Sequence[str],
    to: RunFolder,
    *,
    seed: int = 0,
    quick: bool = False,
    folder: str | Path | None = None,
    subject: Subject | None = None,
    other: Subject | None = None,
    manifest: Manifest | None = None,
    engine: Engine | None = None,
    heading: str | None = None,
    allow_mixed: bool = False,
) -> list[Trial]:
    """Run ``try_claim`` for several claims, as units of work in the run folder ``to``, and write verdicts.json there.

    Runs are resumed, interrupted and distributed over processes as in ``runs.run``. If experiments fail, the others
    still run and their verdicts are stored, and ``TrialsFailed`` is raised at the end. Several claims on one model run
    one after another in this process, after the engine's units, so that the model is recorded only once; so do all
    claims on a model in memory. Raises HelmscopeError before any work for a claim or subject that cannot be tried.

    >>> import tempfile
    >>> from helmscope.store.run_folder import RunFolder
    >>> with tempfile.TemporaryDirectory() as root:
    ...     run_trials(["kuramoto"], RunFolder.new(root, "claims"), quick=True)[0].verdict.claim
    'kuramoto'
    """
    if isinstance(claims, str) or not isinstance(claims, Sequence):
        raise HelmscopeError(f"claims is a {type(claims).__name__}, but it must be a list of ids, such as ['rate']")
    path = None if folder is None else str(Path(folder).resolve())
    cases = {claim: registered(claim, path).case(seed, quick=quick, subject=subject, other=other) for claim in claims}
    failed = None
    with _subject_parameters(subject=subject, other=other) as subjects:
        units = _units(claims, path, seed=seed, quick=quick, subjects=subjects)
        local = _local_claims(cases)
        mixed = engine if engine is None or not local else _MixedEngine(engine, local)
        try:
            result = run(units, to, manifest=manifest, engine=mixed, heading=heading, allow_mixed=allow_mixed)
        except UnitsFailed as error:
            failed, result = error, error.result
    trials = [_decode_trial(result[name]) for name in result]
    to.write_verdicts([trial.verdict for trial in trials])
    if failed is not None:
        raise TrialsFailed(result, trials) from failed
    return trials


def trial_units(
    claims: Sequence[str],
    *,
    seed: int = 0,
    quick: bool = False,
    folder: str | Path | None = None,
    subject: Subject | None = None,
    other: Subject | None = None,
) -> list[Unit]:
    """The units of work that ``run_trials`` runs, one per claim.

    >>> [unit.name for unit in trial_units(["kuramoto", "radial"])]
    ['kuramoto', 'radial']
    """
    path = None if folder is None else str(Path(folder).resolve())
    with _subject_parameters(subject=subject, other=other) as subjects:
        return _units(claims, path, seed=seed, quick=quick, subjects=subjects)


def _units(
    claims: Sequence[str], folder: str | None, *, seed: int, quick: bool, subjects: dict[str, dict[str, Any]]
) -> list[Unit]:
    shared = {"seed": Case(seed, quick).seed, "quick": quick, "folder": folder, **subjects}
    return [Unit(claim, trial_unit, {"claim": claim, "sources": sources(claim, folder), **shared}) for claim in claims]


def sources(claim: str, folder: str | None) -> dict[str, str]:
    """The hashes of a claim's entry and code: the file of its experiment, or all Python files of a user's folder.

    A run can only be resumed with the same hashes.

    >>> list(sources("rate", None))
    ['rate.toml', 'rate.py']
    """
    entry = read_catalogue(folder)[claim]
    code = [code_file(experiments()[claim].function)] if folder is None else sorted(Path(folder).glob("*.py"))
    return {f"{claim}.toml": entry.hash, **{path.name: hash_file(path) for path in code}}


def trial_unit(
    claim: str,
    sources: dict[str, str],
    seed: int,
    quick: bool,
    folder: str | None,
    subject: dict[str, Any] | None = None,
    other: dict[str, Any] | None = None,
) -> xr.Dataset:
    """One unit of work: the Measurement of a trial, with the verdict as JSON in its attributes.

    ``sources`` and the subjects are part of the unit's identity, so that a changed entry, code or model is noticed.
    Whatever the experiment prints goes to standard error.
    """
    parameters = {"subject": subject, "other": other}
    subjects: dict[str, Any] = {name: _decode_subject(data) for name, data in parameters.items() if data is not None}
    with redirect_stdout(sys.stderr):
        trial = try_claim(claim, seed=seed, quick=quick, folder=folder, **subjects)
    return trial.data.assign_attrs(verdict=encode_verdicts([trial.verdict]).decode())


@dataclass(frozen=True)
class _MixedEngine:
    """Runs units with ``engine``, and then those named in ``local`` one after another in this process."""

    engine: Engine
    local: frozenset[str]

    @property
    def jobs(self) -> int:
        return self.engine.jobs

    @property
    def threads(self) -> int:
        return self.engine.threads

    def attempts(self, units: Sequence[Unit]) -> Outcomes:
        """The outcomes of the engine's units, then those of the local ones."""
        yield from self.engine.attempts([unit for unit in units if unit.name not in self.local])
        serial = Serial(max_memory=getattr(self.engine, "max_memory", None), threads=self.threads)
        yield from serial.attempts([unit for unit in units if unit.name in self.local])


def _local_claims(cases: Mapping[str, Case]) -> frozenset[str]:
    """The claims that must run in this process: they share a model, or their model exists only in memory."""
    models = {claim: case.subject for claim, case in cases.items() if not case.subject.is_simulation}
    count = Counter(models.values())
    in_memory = {claim for claim in models if not all(subject.sendable for subject in cases[claim].subjects)}
    return frozenset(in_memory | {claim for claim, model in models.items() if count[model] > 1})


_IN_MEMORY: dict[str, Subject] = {}  # by identity, for the duration of a run


@contextmanager
def _subject_parameters(**subjects: Subject | None) -> Iterator[dict[str, dict[str, Any]]]:
    """Context manager: yields the subjects as parameters of units, each as its identity and plain data; a model that
    exists only in this process has only its identity, by which ``_decode_subject`` finds it within the context.
    """
    passed = {name: subject for name, subject in subjects.items() if subject is not None}
    in_memory = {subject.identity: subject for subject in passed.values() if not subject.sendable}
    _IN_MEMORY.update(in_memory)
    try:
        yield {
            name: {"identity": subject.identity, **(subject.as_data() if subject.sendable else {})}
            for name, subject in passed.items()
        }
    finally:
        for identity in in_memory:
            _IN_MEMORY.pop(identity, None)


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


def registered(claim: str, folder: str | Path | None) -> Registered:
    """The registered experiment of a claim; raises HelmscopeError if the claim is unknown or has none.

    >>> registered("rate", None).claim
    'rate'
    """
    if not isinstance(claim, str):
        raise HelmscopeError(f"claim is a {type(claim).__name__}, but it must be an id, such as 'rate'")
    known_name("claim", claim, read_catalogue(folder))
    experiment = experiments(folder).get(claim)
    if experiment is None:
        raise HelmscopeError(f"claim '{claim}' is not yet tried: it has no experiment")
    return experiment


def _failing_line(error: Exception, function: Experiment) -> str:
    """The line of the experiment's own file at which an error was raised, as text."""
    file = code_file(function)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return f" in {file.name}, line {lines[-1]}" if lines else ""
