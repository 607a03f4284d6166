"""``run_units``: run units on an engine, store their results in a run folder, and resume an interrupted run."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helmscope.runs.attempt import Engine, Failed, check_engine
from helmscope.runs.bar import progress_reporting
from helmscope.runs.plan import RESULTS, RunPlan, begin, cpu
from helmscope.runs.progress import TimeLeft, print_status, unit_progress
from helmscope.runs.results import fault_of, read_result, result_files, stamped
from helmscope.runs.serial import Serial
from helmscope.runs.unit import Unit
from helmscope.store.atomic import explained, is_temporary, make_folder, write_bytes
from helmscope.store.manifest import Manifest
from helmscope.store.run_folder import RunFolder
from helmscope.types import HelmscopeError, check_name, pluralized, type_with_article
from helmscope.types.display import ConciseRepr

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult(ConciseRepr):
    """The results of a run by unit name: ``result["mean"]`` reads the file of the unit "mean" on access.

    ``done`` maps the units with a result, in order, to the stamp that the file must have; ``failed`` maps the others to
    the reason of their failure. Access raises ``HelmscopeError`` if the name is unknown, or if the file was damaged or
    replaced.

    >>> RunResult(Path("units"), {"mean": "ab" * 32}, {})["maen"]
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: unknown unit 'maen': did you mean 'mean'? Allowed: mean
    """

    folder: Path
    done: Mapping[str, str]
    failed: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        """The Dataset, bytes or plain data that the unit returned."""
        check_name("unit", name, self.done)
        faults = {path: fault_of(path, self.done[name]) for path in result_files(self.folder, name)}
        for path, fault in faults.items():
            if not fault:
                return read_result(path, self.done[name])
        reasons = "".join(f", because {path.name} {fault}" for path, fault in faults.items())
        raise HelmscopeError(f"unit '{name}' no longer has a valid result in {self.folder}: run it again{reasons}")

    def keys(self) -> tuple[str, ...]:
        """The names of the units with a result, so that ``dict(result)`` reads them all.

        >>> RunResult(Path("units"), {}, {}).keys()
        ()
        """
        return tuple(self.done)

    def __iter__(self) -> Iterator[str]:
        return iter(self.done)

    def __len__(self) -> int:
        return len(self.done)


class UnitsFailed(HelmscopeError):
    """Raised when units failed; the message names the first. ``result`` holds the results of the others.

    >>> str(UnitsFailed(RunResult(Path("units"), {"a": "ab" * 32}, {"b": "ZeroDivisionError: division by zero"})))
    "unit 'b' failed: ZeroDivisionError: division by zero; 1 result is kept in units"
    """

    def __init__(self, result: RunResult) -> None:
        (first, reason), *others = result.failed.items()
        more = f" (and {len(others)} more)" if others else ""
        kept = f"{len(result)} result{' is' if len(result) == 1 else 's are'} kept in {result.folder}"
        super().__init__(f"unit '{first}' failed{more}: {reason}; {kept}")
        self.result = result


def run_units(
    units: Iterable[Unit],
    folder: RunFolder,
    *,
    manifest: Manifest | None = None,
    engine: Engine | None = None,
    heading: str | None = None,
    fail_fast: bool = False,
    allow_mixed: bool = False,
    costs: Mapping[str, float] | None = None,
) -> RunResult:
    """Run every unit that has no result in ``folder`` yet, and return the results of all.

    Only this process writes: each result as it completes, atomically, to FOLDER/units/NAME.nc, .json or .bin. A run
    that was killed at any moment is therefore resumed by the same call, and its files are equal byte for byte to those
    of an uninterrupted run. That requires the same units, the same manifest (except time and command line), and the
    versions, CPU and threads of the first call, which manifest.json and units.json record. Raises ``HelmscopeError``
    if units or manifest differ, if versions, CPU or threads differ (unless ``allow_mixed``), and if the files of the
    folder contradict each other. A result that is damaged, or belongs to another unit or run, is reported and computed
    again. The folder is locked during the run.

    ``manifest`` describes the run; None keeps the manifest of the folder, or writes a new one with the command line of
    this process. ``engine`` is ``Serial()`` by default, or ``Processes(workers)`` or ``Ray(workers)``; results do not
    depend on it. ``heading`` prints and labels progress on standard error; without it, a terminal or notebook shows a
    bar if the run takes more than two seconds. ``costs``, the estimated seconds of each unit by name, weights the units
    in the share done and the time left; without it they count equally. If units raise, the others still run and
    ``UnitsFailed`` is raised at the end, or immediately with ``fail_fast``; tracebacks go to the log, and the next call
    retries those units. Ctrl-C, SIGTERM and SIGHUP stop the workers and raise a KeyboardInterrupt whose note explains
    how to resume.

    >>> import statistics, tempfile
    >>> units = [Unit(f"mean-{n}", statistics.fmean, {"data": list(range(n))}) for n in (2, 4)]
    >>> with tempfile.TemporaryDirectory() as root:
    ...     dict(run_units(units, RunFolder.new(root, "means")))
    {'mean-2': 0.5, 'mean-4': 1.5}
    """
    engine = Serial() if engine is None else engine
    check_engine(engine)
    now = _manifest_of_process(engine.threads) if manifest is None else manifest
    for name, value, kind in (("folder", folder, RunFolder), ("manifest", now, Manifest)):
        if not isinstance(value, kind):
            raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be a {kind.__name__}")
    _check_options(heading, fail_fast=fail_fast, allow_mixed=allow_mixed)
    requested = _check_units(units)
    results, failed = folder.path / RESULTS, dict[str, str]()
    with _signals_interrupt(), folder.lock():
        _remove_temporaries(folder.path)
        plan = RunPlan({unit.name: unit.key for unit in requested}, now.identity, cpu(), engine.threads)
        plan = begin(folder, now, plan, allow_mixed=allow_mixed, any_manifest=manifest is None)
        if not make_folder(results):
            _remove_temporaries(results)
        stamps = {unit.name: plan.stamp(unit.name) for unit in requested}
        done = {name for name, stamp in stamps.items() if _has_result(results, name, stamp, heading)}
        pending = [unit for unit in requested if unit.name not in done]
        ahead = {unit.name: costs[unit.name] for unit in pending if unit.name in costs} if costs else None
        progress = _progress(heading, total=len(requested), done=len(done), workers=engine.workers, costs=ahead)
        with _explain_resuming(folder, heading), progress as tick, closing(engine.attempts(pending)) as outcomes:
            for outcome in outcomes:
                if isinstance(outcome, Failed):
                    log.error("unit '%s' failed: %s\n%s", outcome.name, outcome.reason, outcome.trace)
                    failed[outcome.name] = outcome.reason
                    if fail_fast:
                        break
                else:
                    data = stamped(outcome.suffix, outcome.data, stamps[outcome.name])
                    write_bytes(results / f"{outcome.name}{outcome.suffix}", data)
                    done.add(outcome.name)
                tick(outcome.name)
    result = RunResult(results, {name: stamp for name, stamp in stamps.items() if name in done}, failed)
    if failed:
        raise UnitsFailed(result)
    return result


def _check_options(heading: object, **switches: object) -> None:
    if heading is not None and not isinstance(heading, str):
        raise HelmscopeError(f"heading is {type_with_article(heading)}, but it must be a str or None")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be True or False")


def _manifest_of_process(threads: int) -> Manifest:
    """The manifest for callers that pass none; seeds and dtypes are then among the parameters of the units."""
    details: dict[str, Any] = {"seed": 0, "dtype": "float64", "device": "cpu", "inputs": {}, "parameters": {}}
    return Manifest.collect(command=sys.argv, threads=threads, **details)


def _check_units(units: Iterable[Unit]) -> Sequence[Unit]:
    if not isinstance(units, Iterable):
        raise HelmscopeError(f"units is {type_with_article(units)}, but it must be a list of Units")
    requested = list(units)
    names = set[str]()
    for i, unit in enumerate(requested):
        if not isinstance(unit, Unit):
            raise HelmscopeError(f"units[{i}] is {type_with_article(unit)}, but it must be a Unit")
        if unit.name in names:
            raise HelmscopeError(f"units[{i}] has the name '{unit.name}' of an earlier one, but names must differ")
        names.add(unit.name)
    if not requested:
        raise HelmscopeError("units is empty, but a run needs at least one unit")
    return requested


def _remove_temporaries(folder: Path) -> None:
    """Remove the temporary files of killed runs; only the holder of the lock may do so."""
    with explained(f"clean {folder}"):
        for name in filter(is_temporary, os.listdir(folder)):
            (folder / name).unlink(missing_ok=True)


def _has_result(results: Path, name: str, stamp: str, heading: str | None) -> bool:
    faults = {path: fault_of(path, stamp) for path in result_files(results, name)}
    if "" in faults.values():
        return True
    for path, fault in faults.items():
        message = f"{path} {fault}: unit '{name}' runs again"
        log.warning("%s", message)
        if heading is not None:
            print_status(f"{heading}: {message}")
    return False


@contextmanager
def _progress(
    heading: str | None, *, total: int, done: int, workers: int, costs: Mapping[str, float] | None
) -> Iterator[Callable[[str], None]]:
    """Context manager: yields a function to call with the name of each finished unit. What units call draws no bars."""
    if heading is not None:
        amounts: dict[str, Any] = {"total": total, "done": done, "workers": workers, "costs": costs}
        with progress_reporting(False), unit_progress(heading, **amounts) as tick:
            yield tick
        return
    ahead = TimeLeft(costs, count=total - done, workers=workers)
    with progress_reporting(None, f"running {pluralized(total, 'unit')}") as report:

        def advance(name: str) -> None:
            ahead.finish(name)
            if report is not None:
                report(ahead.share)

        yield advance


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Make SIGTERM, and SIGHUP from a closed terminal, stop the run as Ctrl-C does. Handlers set by the caller or by
    nohup are left alone; only the main thread may set handlers.
    """
    unhandled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        unhandled = []

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt("terminated")

    for number in unhandled:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _explain_resuming(folder: RunFolder, heading: str | None) -> Iterator[None]:
    """Add to an interrupt a note on how to resume. Ray turns SIGTERM into a SystemExit."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        note = f"finished units are kept in {folder.path}, and a run of the same units resumes there"
        error.add_note(note)
        if heading is not None:
            print_status(f"{heading}: interrupted; {note}")
        raise
