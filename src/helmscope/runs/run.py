"""``run``: units of work -> engine -> run folder, and on from where an earlier call was stopped."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helmscope.runs.attempt import Engine, Failed, check_engine
from helmscope.runs.plan import RESULTS, Plan, begin, cpu
from helmscope.runs.progress import counting, say
from helmscope.runs.results import fault_of, read_result, result_files, stamped
from helmscope.runs.serial import Serial
from helmscope.runs.unit import Unit
from helmscope.store.atomic import explained, is_temporary, make_folder, write_bytes
from helmscope.store.manifest import Manifest
from helmscope.store.run_folder import RunFolder
from helmscope.types import HelmscopeError, known_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """The results of a run by the names of their units: ``result["mean"]`` reads that file when it is asked for.

    ``done`` are the names with a result, in the order of the units, each with the stamp that its file must bear;
    ``failed`` says of others why they have none. A file that was damaged or exchanged since is refused, and an unknown
    name offers the nearest.

    >>> RunResult(Path("units"), {"mean": "ab" * 32}, {})["maen"]
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: unknown unit 'maen': did you mean 'mean'? Allowed: mean
    """

    folder: Path
    done: Mapping[str, str]
    failed: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        """The Dataset, bytes or plain data that the unit gave."""
        known_name("unit", name, self.done)
        faults = {path: fault_of(path, self.done[name]) for path in result_files(self.folder, name)}
        for path, fault in faults.items():
            if not fault:
                return read_result(path, self.done[name])
        why = "".join(f", because {path.name} {fault}" for path, fault in faults.items())
        raise HelmscopeError(f"unit '{name}' no longer has a whole result in {self.folder}: run it again{why}")

    def keys(self) -> tuple[str, ...]:
        """The names with a result, so that ``dict(result)`` reads them all."""
        return tuple(self.done)

    def __iter__(self) -> Iterator[str]:
        return iter(self.done)

    def __len__(self) -> int:
        return len(self.done)


class UnitsFailed(HelmscopeError):
    """Some units raised; one sentence names the first. ``result`` holds the others.

    >>> str(UnitsFailed(RunResult(Path("units"), {"a": "ab" * 32}, {"b": "ZeroDivisionError: division by zero"})))
    "unit 'b' failed: ZeroDivisionError: division by zero; 1 result is kept in units"
    """

    def __init__(self, result: RunResult) -> None:
        (first, reason), *others = result.failed.items()
        more = f" (and {len(others)} more)" if others else ""
        kept = f"{len(result)} result{' is' if len(result) == 1 else 's are'} kept in {result.folder}"
        super().__init__(f"unit '{first}' failed{more}: {reason}; {kept}")
        self.result = result


def run(
    units: Iterable[Unit],
    folder: RunFolder,
    *,
    manifest: Manifest | None = None,
    engine: Engine | None = None,
    progress: str | None = None,
    fail_fast: bool = False,
    allow_mixed: bool = False,
) -> RunResult:
    """Runs every unit that has no result in ``folder`` yet, and gives the results of all.

    This process alone writes, each result as it comes, whole or not at all, to FOLDER/units/NAME.nc, .json or .bin; so
    a run that was killed at any moment goes on with the same call, to files equal byte by byte to those of a run that
    nobody disturbed. That needs the same units and the same manifest (but for time and command line), and the versions,
    CPU and threads that manifest.json and units.json recorded at the first call; other units and another manifest are
    refused, and other circumstances unless ``allow_mixed``. So is a folder whose files contradict each other. A result
    that is damaged, or is that of another unit or run, is named and computed again. The folder is locked meanwhile.

    ``manifest`` says what the run is; where None, the manifest in the folder stands, and a new one holds the command
    line of this process. ``engine`` is ``Serial()`` where None, or ``Processes(jobs)`` or ``Ray(jobs)``; results do not
    depend on it. ``progress`` is the heading under which it is shown on standard error. Where units raise, the others
    go on and ``UnitsFailed`` is raised at the end, or at once with ``fail_fast``; tracebacks go to the log, and the
    next call tries those units again. Ctrl-C, SIGTERM and SIGHUP stop the workers and end in a KeyboardInterrupt that
    says how to go on.

    >>> import statistics, tempfile
    >>> units = [Unit(f"mean-{n}", statistics.fmean, {"data": list(range(n))}) for n in (2, 4)]
    >>> with tempfile.TemporaryDirectory() as root:
    ...     dict(run(units, RunFolder.new(root, "means")))
    {'mean-2': 0.5, 'mean-4': 1.5}
    """
    engine = Serial() if engine is None else engine
    check_engine(engine)
    now = _manifest_of_process(engine.threads) if manifest is None else manifest
    for name, value, kind in (("folder", folder, RunFolder), ("manifest", now, Manifest)):
        if not isinstance(value, kind):
            raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be a {kind.__name__}")
    _check_options(progress, fail_fast=fail_fast, allow_mixed=allow_mixed)
    asked = _checked(units)
    results, failed = folder.path / RESULTS, dict[str, str]()
    with _terminable(), folder.lock():
        _clean(folder.path)
        plan = Plan({unit.name: unit.key for unit in asked}, now.identity, cpu(), engine.threads)
        plan = begin(folder, now, plan, allow_mixed=allow_mixed, any_manifest=manifest is None)
        if not make_folder(results):
            _clean(results)
        stamps = {unit.name: plan.stamp(unit.name) for unit in asked}
        done = {name for name, stamp in stamps.items() if _has_result(results, name, stamp, progress)}
        left = [unit for unit in asked if unit.name not in done]
        shown = _shown(progress, total=len(asked), done=len(done), jobs=engine.jobs)
        with _resumable(folder, progress), shown as tick, closing(engine.attempts(left)) as outcomes:
            for outcome in outcomes:
                if isinstance(outcome, Failed):
                    log.error("unit '%s' failed: %s\n%s", outcome.name, outcome.reason, outcome.trace)
                    failed[outcome.name] = outcome.reason
                    if fail_fast:
                        break
                else:
                    data = stamped(outcome.ending, outcome.data, stamps[outcome.name])
                    write_bytes(results / f"{outcome.name}{outcome.ending}", data)
                    done.add(outcome.name)
                tick()
    result = RunResult(results, {name: stamp for name, stamp in stamps.items() if name in done}, failed)
    if failed:
        raise UnitsFailed(result)
    return result


def _check_options(progress: object, **switches: object) -> None:
    if progress is not None and not isinstance(progress, str):
        raise HelmscopeError(f"progress is a {type(progress).__name__}, but it must be a str, the heading, or None")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be True or False")


def _manifest_of_process(threads: int) -> Manifest:
    """For callers who keep no manifest; seeds and dtypes are then among the parameters of the units."""
    details: dict[str, Any] = {"seed": 0, "dtype": "float64", "device": "cpu", "inputs": {}, "parameters": {}}
    return Manifest.collect(command=sys.argv, threads=threads, **details)


def _checked(units: Iterable[Unit]) -> Sequence[Unit]:
    if not isinstance(units, Iterable):
        raise HelmscopeError(f"units is a {type(units).__name__}, but it must be a list of Units")
    asked = list(units)
    names = set[str]()
    for i, unit in enumerate(asked):
        if not isinstance(unit, Unit):
            raise HelmscopeError(f"units[{i}] is a {type(unit).__name__}, but it must be a Unit")
        if unit.name in names:
            raise HelmscopeError(f"units[{i}] has the name '{unit.name}' of an earlier one, but names must differ")
        names.add(unit.name)
    if not asked:
        raise HelmscopeError("units is empty, but a run needs at least one unit")
    return asked


def _clean(folder: Path) -> None:
    """Removes what killed runs left behind; only who holds the lock may."""
    with explained(f"clean {folder}"):
        for name in filter(is_temporary, os.listdir(folder)):
            (folder / name).unlink(missing_ok=True)


def _has_result(results: Path, name: str, stamp: str, progress: str | None) -> bool:
    faults = {path: fault_of(path, stamp) for path in result_files(results, name)}
    if "" in faults.values():
        return True
    for path, fault in faults.items():
        sentence = f"{path} {fault}: unit '{name}' runs again"
        log.warning("%s", sentence)
        if progress is not None:
            say(f"{progress}: {sentence}")
    return False


def _shown(progress: str | None, **counts: int) -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(lambda: None) if progress is None else counting(progress, **counts)


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM, and SIGHUP of a terminal that goes away, stop the run as Ctrl-C does. A handler of the caller's
    stays, and so does nohup's; only the main thread may set one.
    """
    free = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        free = []

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt("terminated")

    for number in free:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in free:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _resumable(folder: RunFolder, progress: str | None) -> Iterator[None]:
    """Tells who interrupts the run how to go on. Ray makes a SystemExit of SIGTERM."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        note = f"finished units are kept in {folder.path}, where a run of the same units goes on"
        error.add_note(note)
        if progress is not None:
            say(f"{progress}: interrupted; {note}")
        raise
