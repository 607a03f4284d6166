"""A trial: one claim, its experiment and a seed give a verdict and the numbers to draw."""

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
from helmscope.runs.run import RunResult, UnitsFailed, run
from helmscope.runs.serial import Serial
from helmscope.runs.unit import Unit
from helmscope.stats.summary import summary
from helmscope.store.manifest import hash_file
from helmscope.store.verdicts import decode_verdicts, encode_verdicts
from helmscope.types import HelmscopeError, Plottable, Verdict, counted, joined, known_name, one_line_repr
from helmscope.types.measurement import COMPANIONS

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.plots.figure import Figure
    from helmscope.runs.attempt import Engine, Outcomes
    from helmscope.store.manifest import Manifest
    from helmscope.store.run_folder import RunFolder


@dataclass(frozen=True, eq=False, repr=False)
class Trial(Plottable):
    """A verdict, and the Measurement of its experiment, with its replicates: ``hs.reduce_replicates(trial.data)`` is
    what a picture shows of it. ``plot()`` is that picture.

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
        return one_line_repr(f"Trial of {self.verdict.claim}: {self.verdict.short}; {measured} measured")

    def _repr_html_(self) -> str:
        parts = [self.verdict._repr_html_()]
        parts += [summary(self.data)._repr_html_()] if self._variables else []
        return joined(*parts)

    def plot(self, **options: Any) -> Figure:
        """The statistic on its region, and what was measured: ``trial_figure``, which takes no options."""
        from helmscope.plots.trial import trial_figure  # here, since listing claims needs no pictures

        return trial_figure(self.verdict, self.data, **options)


def try_claim(
    claim: str,
    *,
    seed: int = 0,
    quick: bool = False,
    folder: str | Path | None = None,
    subject: Subject | None = None,
    other: Subject | None = None,
) -> Trial:
    """Runs the experiment of one claim and judges what it found, by the entry's frozen region.

    ``subject`` is the model to try it on, ``other`` a second one for claims that take two; where None, what the
    experiment names itself, which is the simulation for most. ``quick`` takes fewer replicates. With ``folder`` the
    claim is one of a user's catalogue, and the Python files there are run. Equal seeds give equal verdicts. An unknown
    claim is refused with the nearest one, and so are one without an experiment and a subject it cannot be tried on.

    >>> try_claim("kuramoto", quick=True).verdict.ruling.value
    'true by construction'
    """
    Case(seed, quick)
    tried = registered(claim, folder)
    case = tried.case(seed, quick=quick, subject=subject, other=other)
    entry = read_catalogue(folder)[claim]  # before the experiment: what it is judged by was fixed when it began
    on = " and ".join(each.label for each in case.subjects)
    try:
        finding = tried.function(case)
    except Exception as error:
        said = str(error) if isinstance(error, HelmscopeError) else described(error)
        raise HelmscopeError(f"experiment of '{claim}' failed{_line(error, tried.function)}: {said}") from error
    return Trial(judge(entry, finding, subject=on), finding.data)


class TrialsFailed(UnitsFailed):
    """Some experiments failed; ``trials`` holds the others, whose verdicts are kept.

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
    """``try_claim`` for several claims, as units of work in a run folder, which also gets verdicts.json; resumed,
    interrupted and spread over processes as ``runs.run`` says. Where experiments fail, the others are tried and their
    verdicts kept, and ``TrialsFailed`` is raised at the end.

    Several claims on one model are tried one after another in this process, after those that the engine runs, so that
    the model is recorded once; and so are all claims on a model in memory.

    >>> import tempfile
    >>> from helmscope.store.run_folder import RunFolder
    >>> with tempfile.TemporaryDirectory() as root:
    ...     run_trials(["kuramoto"], RunFolder.new(root, "claims"), quick=True)[0].verdict.claim
    'kuramoto'
    """
    if isinstance(claims, str) or not isinstance(claims, Sequence):
        raise HelmscopeError(f"claims is a {type(claims).__name__}, but it must be a list of ids, such as ['rate']")
    place = None if folder is None else str(Path(folder).resolve())
    cases = {claim: registered(claim, place).case(seed, quick=quick, subject=subject, other=other) for claim in claims}
    failed = None
    with _sent(subject=subject, other=other) as given:
        units = _units(claims, place, seed=seed, quick=quick, given=given)
        here = _tried_here(cases)
        used = engine if engine is None or not here else _OneProcess(engine, here)
        try:
            result = run(units, to, manifest=manifest, engine=used, heading=heading, allow_mixed=allow_mixed)
        except UnitsFailed as error:
            failed, result = error, error.result
    trials = [_read(result[name]) for name in result]
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
    """The units of work of ``run_trials``.

    >>> [unit.name for unit in trial_units(["kuramoto", "radial"])]
    ['kuramoto', 'radial']
    """
    place = None if folder is None else str(Path(folder).resolve())
    with _sent(subject=subject, other=other) as given:
        return _units(claims, place, seed=seed, quick=quick, given=given)


def _units(
    claims: Sequence[str], folder: str | None, *, seed: int, quick: bool, given: dict[str, dict[str, Any]]
) -> list[Unit]:
    asked = {"seed": Case(seed, quick).seed, "quick": quick, "folder": folder, **given}
    return [Unit(claim, trial_unit, {"claim": claim, "sources": sources(claim, folder), **asked}) for claim in claims]


def sources(claim: str, folder: str | None) -> dict[str, str]:
    """The hash of an entry and those of its code: the file of the experiment, or of a user's folder all Python files.
    A run goes on only with the same.

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
    """One unit of work: the Measurement of a trial, with the verdict as JSON among its attributes. ``sources`` makes
    the unit another one where an entry or its code has changed, and so do subjects. What an experiment prints goes to
    standard error.
    """
    on = {name: _received(data) for name, data in (("subject", subject), ("other", other)) if data is not None}
    with redirect_stdout(sys.stderr):
        trial = try_claim(claim, seed=seed, quick=quick, folder=folder, **on)
    return trial.data.assign_attrs(verdict=encode_verdicts([trial.verdict]).decode())


@dataclass(frozen=True)
class _OneProcess:
    """An engine, but for the units named in ``here``: they run in this process, after the others."""

    engine: Engine
    here: frozenset[str]

    @property
    def jobs(self) -> int:
        return self.engine.jobs

    @property
    def threads(self) -> int:
        return self.engine.threads

    def attempts(self, units: Sequence[Unit]) -> Outcomes:
        """Those of the engine, then those in this process."""
        yield from self.engine.attempts([unit for unit in units if unit.name not in self.here])
        serial = Serial(max_memory=getattr(self.engine, "max_memory", None), threads=self.threads)
        yield from serial.attempts([unit for unit in units if unit.name in self.here])


def _tried_here(cases: Mapping[str, Case]) -> frozenset[str]:
    """The claims that share a model with another one, or whose model other processes cannot reach."""
    models = {claim: case.subject for claim, case in cases.items() if not case.subject.is_simulation}
    count = Counter(models.values())
    alone = {claim for claim in models if not all(each.travels for each in cases[claim].subjects)}
    return frozenset(alone | {claim for claim, model in models.items() if count[model] > 1})


_IN_MEMORY: dict[str, Subject] = {}  # by identity, while a run tries them


@contextmanager
def _sent(**subjects: Subject | None) -> Iterator[dict[str, dict[str, Any]]]:
    """Subjects as parameters of units: plain data and the identity that it must lead to, or the identity alone of what
    only this process can reach.
    """
    models = {name: each for name, each in subjects.items() if each is not None}
    held = {each.identity: each for each in models.values() if not each.travels}
    _IN_MEMORY.update(held)
    try:
        yield {
            name: {"identity": each.identity, **(each.as_data() if each.travels else {})}
            for name, each in models.items()
        }
    finally:
        for identity in held:
            _IN_MEMORY.pop(identity, None)


def _received(data: dict[str, Any]) -> Subject:
    """The subject behind a unit's parameters; one that is no longer what it was is refused."""
    identity = data["identity"]
    plain = {name: value for name, value in data.items() if name != "identity"}
    if not plain:
        if identity not in _IN_MEMORY:
            raise HelmscopeError("subject is a model in memory, but it can be tried in the process that holds it only")
        return _IN_MEMORY[identity]
    subject = Subject.from_data(plain)
    if subject.identity != identity:
        raise HelmscopeError(f"subject is {subject.label}, but when the run began it had the hash {identity}")
    return subject


def _read(dataset: xr.Dataset) -> Trial:
    (verdict,) = decode_verdicts(str(dataset.attrs["verdict"]).encode(), "verdict of a trial")
    attributes = {name: value for name, value in dataset.attrs.items() if name != "verdict"}
    return Trial(verdict, dataset.drop_attrs(deep=False).assign_attrs(attributes))


def registered(claim: str, folder: str | Path | None) -> Registered:
    """The experiment of a claim; an unknown claim is refused with the nearest one, and so is one without experiment.

    >>> registered("rate", None).claim
    'rate'
    """
    if not isinstance(claim, str):
        raise HelmscopeError(f"claim is a {type(claim).__name__}, but it must be an id, such as 'rate'")
    known_name("claim", claim, read_catalogue(folder))
    found = experiments(folder).get(claim)
    if found is None:
        raise HelmscopeError(f"claim '{claim}' is not yet tried: it has no experiment")
    return found


def _line(error: Exception, function: Experiment) -> str:
    """Where in the experiment's own file it happened."""
    file = code_file(function)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return f" in {file.name}, line {lines[-1]}" if lines else ""
