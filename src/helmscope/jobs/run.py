"""``run``: a spec -> units of work -> one result, in a run folder that holds the spec it came from."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from helmscope.jobs.job import Job, Result, Work
from helmscope.jobs.spec import Spec, check_spec, from_toml, to_toml
from helmscope.runs.attempt import check_engine
from helmscope.runs.plan import read_parts
from helmscope.runs.progress import print_status
from helmscope.runs.serial import Serial
from helmscope.store.run_folder import MANIFEST, SPEC, RunFolder
from helmscope.types import HelmscopeError, shown

if TYPE_CHECKING:
    from helmscope.jobs.cost import Estimate
    from helmscope.runs.attempt import Engine
    from helmscope.store.manifest import Manifest

ROOT = "runs"


class Interrupted(KeyboardInterrupt):
    """A job was stopped; ``folder`` holds the units that were done, and its spec.

    >>> str(Interrupted(RunFolder("runs/a")))
    "what was done is kept in runs/a: run(read('runs/a'), folder='runs/a', resume=True) goes on with it"
    """

    def __init__(self, folder: RunFolder) -> None:
        place = str(folder.path)
        super().__init__(
            f"what was done is kept in {place}: run(read({place!r}), folder={place!r}, resume=True) goes on with it"
        )
        self.folder = folder


def run(
    spec: Spec,
    *,
    folder: str | os.PathLike[str] | None = None,
    engine: Engine | None = None,
    show_progress: bool = False,
    resume: bool = False,
    allow_mixed: bool = False,
    command: Sequence[str] | None = None,
) -> Result:
    """Carries out a spec and gives its result: a ``SimulationResult``, ``PhaseResult``, ``TrialsResult`` or
    ``ReportResult``. The command line does the same, to the same bytes.

    ``folder`` is a new or an empty one, by default runs/JOB-DATE-TIME; it gets spec.toml beside the results. With
    ``resume`` it is that of an earlier run, which goes on from where it was stopped; a run that was begun with another
    spec is refused, and so are other versions, CPUs and threads unless ``allow_mixed``. ``engine`` is ``Serial()``
    where None, or ``Processes(jobs)`` or ``Ray(jobs)``; results do not depend on it. ``show_progress`` prints
    progress on standard error. ``command`` is the command line that the manifest holds, that of this process where
    None. What can be refused is refused before a folder is made.

    >>> import tempfile
    >>> from helmscope.jobs import Phase
    >>> spec = Phase(n=4, dims=[8], betas=[1], times=[0, 9], samples=4)
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(spec, folder=f"{root}/run")
    ...     again = run(spec, folder=f"{root}/run", resume=True)
    >>> again.diagram.identical(result.diagram)
    True
    """
    check_spec(spec)
    engine = Serial() if engine is None else engine
    check_engine(engine)
    for name, value in (("show_progress", show_progress), ("resume", resume), ("allow_mixed", allow_mixed)):
        if not isinstance(value, bool):
            raise HelmscopeError(f"{name} is {shown(value)}, but it must be True or False")
    job = spec.prepare()
    manifest = job.manifest(engine, sys.argv if command is None else command)
    place = _opened(job, manifest, folder, resume=resume, allow_mixed=allow_mixed)
    work = Work(folder=place, manifest=manifest, engine=engine, show_progress=show_progress, allow_mixed=allow_mixed)
    if show_progress and job.says_cost:
        print_status(str(job.cost()))
    try:
        return job.carry_out(work)
    except KeyboardInterrupt as error:
        raise Interrupted(place) from error


def estimate(spec: Spec) -> Estimate:
    """What a spec would cost: seconds on one core and bytes of one process, measured by a short sample of the same work
    where that is possible. Nothing is written.

    >>> from helmscope.jobs import Trials
    >>> str(estimate(Trials(claims=["kuramoto"])))
    '1 trial: roughly 1 s on one core'
    """
    check_spec(spec)
    return spec.estimate()


def _opened(
    job: Job, manifest: Manifest, folder: str | os.PathLike[str] | None, *, resume: bool, allow_mixed: bool
) -> RunFolder:
    """A new folder with manifest and spec, or with ``resume`` that of an earlier run."""
    if allow_mixed and not resume:
        raise HelmscopeError("allow_mixed is given, but it is for a run that is resumed: add --resume, or leave it out")
    if resume:
        if folder is None:
            raise HelmscopeError(
                "resume is given, but not which run: add --out FOLDER, in Python folder= (helmscope runs lists them)"
            )
        place = RunFolder.open(folder)
        _check_same(job.spec, place)
        return place
    if folder is not None and os.path.isfile(os.path.join(folder, MANIFEST)):
        raise _taken(folder)
    place = RunFolder.new(ROOT, job.spec.verb[0]) if folder is None else RunFolder.create(folder)
    with place.lock():
        if (place.path / MANIFEST).is_file():  # of a process that was quicker
            raise _taken(place.path)
        place.write_manifest(manifest)
        place.write_spec(to_toml(job.spec))
    return place


def _taken(folder: object) -> HelmscopeError:
    return HelmscopeError(f"{folder} holds an earlier run: add --resume to go on with it, or name a new folder")


def _check_same(spec: Spec, folder: RunFolder) -> None:
    """Refuses to go on with a run that was begun with another spec. Its units.json says so too, but not which field."""
    _, plan = read_parts(folder)
    if not folder.has_spec():
        if plan is None:  # killed when it had written its manifest
            with folder.lock():
                folder.write_spec(to_toml(spec))
        return
    begun = from_toml(folder.read_spec(), str(folder.path / SPEC))
    changes = differences(begun, spec)
    if changes:
        raise HelmscopeError(
            f"{folder.path} was begun with {' and '.join(changes)}: repeat what it was begun with, or take a new folder"
        )


def differences(begun: Spec, now: Spec) -> list[str]:
    """What two specs do not have in common, field by field: NAME OLD (now NEW).

    >>> from helmscope.jobs import Simulate
    >>> differences(Simulate(beta=1), Simulate(beta=4, seed=7))
    ['beta 1.0 (now 4.0)', 'seed 0 (now 7)']
    """
    if begun.job != now.job:
        return [f"job {begun.job} (now {now.job})"]
    old, new = begun.fields, now.fields
    return [f"{name} {shown(old[name])} (now {shown(new[name])})" for name in old if old[name] != new[name]]
