"""``run``: execute a spec in a run folder, which also contains the spec."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from helmscope.jobs.job import Job, Result, Work
from helmscope.jobs.spec import Spec, check_spec, spec_from_toml, spec_to_toml
from helmscope.runs.attempt import check_engine
from helmscope.runs.bar import PATIENCE_S, is_watched, progress_reporting
from helmscope.runs.plan import read_parts
from helmscope.runs.progress import print_status
from helmscope.runs.serial import Serial
from helmscope.store.run_folder import MANIFEST, SPEC, RunFolder
from helmscope.types import HelmscopeError, short_repr

if TYPE_CHECKING:
    from helmscope.jobs.cost import Estimate
    from helmscope.runs.attempt import Engine
    from helmscope.store.manifest import Manifest

ROOT = "runs"


class FolderInUse(HelmscopeError):
    """The folder of a new run contains an earlier run.

    >>> str(FolderInUse("runs/a"))
    'runs/a contains an earlier run: set resume=True to continue it, or choose a new folder'
    """

    def __init__(self, folder: object, remedy: str = "set resume=True") -> None:
        super().__init__(f"{folder} contains an earlier run: {remedy} to continue it, or choose a new folder")
        self.folder = folder


class Interrupted(KeyboardInterrupt):
    """A job was interrupted; ``folder`` has its spec and the finished units.

    >>> str(Interrupted(RunFolder("runs/a")))
    "finished units are kept in runs/a: run(read_spec('runs/a'), folder='runs/a', resume=True) continues the run"
    """

    def __init__(self, folder: RunFolder) -> None:
        place = str(folder.path)
        super().__init__(
            f"finished units are kept in {place}: run(read_spec({place!r}), folder={place!r}, resume=True) continues "
            "the run"
        )
        self.folder = folder


def run(
    spec: Spec,
    *,
    folder: str | os.PathLike[str] | None = None,
    engine: Engine | None = None,
    show_progress: bool | None = None,
    resume: bool = False,
    allow_mixed: bool = False,
    command: Sequence[str] | None = None,
) -> Result:
    """Run a spec and return its result: a ``SimulationResult``, ``DensityResult``, ``PhaseResult``,
    ``MeasurementResult``, ``TrialsResult`` or ``ReportResult``. The command line writes the same bytes.

    ``folder`` is a new or empty folder, by default runs/JOB-DATE-TIME; spec.toml is written there with the results.
    With ``resume`` it is the folder of an interrupted run, which is continued; if that run was started with another
    spec, or with other versions, another CPU or number of threads (unless ``allow_mixed``), a ``HelmscopeError`` says
    so. ``engine`` is ``Serial()`` (the default), ``Processes(workers)`` or ``Ray(workers)``; results do not depend on
    it. ``show_progress`` prints progress on standard error; by default a long run shows a bar on a terminal or in a
    notebook, and with False it shows nothing. ``command`` is the command line stored in the manifest, by default that
    of this process. Arguments are checked before a folder is created.

    >>> import tempfile
    >>> from helmscope.jobs import PhaseSpec
    >>> spec = PhaseSpec(n=4, dims=[8], betas=[1], times=[0, 9], samples=4)
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
        if not isinstance(value, bool) and (name, value) != ("show_progress", None):
            raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be True or False")
    with progress_reporting(False):  # a check may compute a small example
        job = spec.prepare()
    job.check_limits(engine)
    manifest = job.manifest(engine, sys.argv if command is None else command)
    place = _open_folder(job, manifest, folder, resume=resume, allow_mixed=allow_mixed)
    prints = bool(show_progress)
    work = Work(folder=place, manifest=manifest, engine=engine, show_progress=prints, allow_mixed=allow_mixed)
    silence = progress_reporting(False) if show_progress is False else nullcontext()
    try:
        with silence:
            if show_progress or (show_progress is None and job.weights_units and is_watched()):
                work = replace(work, costs=_announced_cost(job, prints=prints).unit_seconds)
            for notice in job.notices if show_progress else ():
                print_status(notice)
            return job.execute(work)
    except KeyboardInterrupt as error:
        raise Interrupted(place) from error


def _announced_cost(job: Job, *, prints: bool) -> Estimate:
    """The estimated cost of a job; with ``prints`` it is printed before some kinds of job always, and before the others
    if it is more than two seconds. A job whose sample fails has no estimate: its units say why.
    """
    from helmscope.jobs.cost import Estimate

    if prints and job.prints_cost and job.spec.samples_cost:
        print_status("estimating ...")
    try:
        with progress_reporting(None, "estimating"):
            cost = job.cost()
    except (HelmscopeError, MemoryError, RuntimeError):
        if prints and job.prints_cost:
            raise
        return Estimate("")
    if prints and (job.prints_cost or (cost.seconds or 0.0) > PATIENCE_S):
        print_status(str(cost))
    return cost


def estimate(spec: Spec) -> Estimate:
    """Estimate the cost of a spec: seconds on one core and bytes of one process, from a short sample of the same work
    where possible. Writes nothing.

    >>> from helmscope.jobs import TrialsSpec
    >>> str(estimate(TrialsSpec(claims=["kuramoto"])))
    '1 trial: roughly 1 s on one core, 450 MB'
    """
    check_spec(spec)
    with progress_reporting(None, "estimating"):
        return spec.estimate()


def _open_folder(
    job: Job, manifest: Manifest, folder: str | os.PathLike[str] | None, *, resume: bool, allow_mixed: bool
) -> RunFolder:
    """Create a folder with manifest and spec or, with ``resume``, open that of an earlier run."""
    if allow_mixed and not resume:
        raise HelmscopeError("allow_mixed is set, but it applies only to a resumed run: set resume=True or omit it")
    if resume:
        if folder is None:
            raise HelmscopeError("resume is set, but the folder of the run is not: set folder, such as folder='runs/a'")
        place = RunFolder.open(folder)
        _check_same(job.spec, place)
        return place
    if folder is not None and os.path.isfile(os.path.join(folder, MANIFEST)):
        raise FolderInUse(folder)
    place = RunFolder.new(ROOT, job.spec.verb[0]) if folder is None else RunFolder.create(folder)
    with place.lock():
        if (place.path / MANIFEST).is_file():  # another process was faster
            raise FolderInUse(place.path)
        place.write_manifest(manifest)
        place.write_spec(spec_to_toml(job.spec))
    return place


def _check_same(spec: Spec, folder: RunFolder) -> None:
    """Raise ``HelmscopeError`` if the run was started with another spec. The check of units.json would also fail, but
    could not name the field.
    """
    _, plan = read_parts(folder)
    if not folder.has_spec():
        if plan is None:  # killed right after writing its manifest
            with folder.lock():
                folder.write_spec(spec_to_toml(spec))
        return
    original = spec_from_toml(folder.read_spec(), str(folder.path / SPEC))
    changes = changed_fields(original, spec)
    if changes:
        raise HelmscopeError(
            f"{folder.path} was started with {' and '.join(changes)}: use the original values or choose a new folder"
        )


def changed_fields(original: Spec, current: Spec) -> list[str]:
    """The fields in which two specs differ, each as "NAME OLD (now NEW)".

    >>> from helmscope.jobs import SimulationSpec
    >>> changed_fields(SimulationSpec(beta=1), SimulationSpec(beta=4, seed=7))
    ['beta 1.0 (now 4.0)', 'seed 0 (now 7)']
    """
    if original.job != current.job:
        return [f"job {original.job} (now {current.job})"]
    old, new = original.fields, current.fields
    return [f"{name} {short_repr(old[name])} (now {short_repr(new[name])})" for name in old if old[name] != new[name]]
