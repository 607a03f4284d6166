"""``Processes``: the engine that runs units in several processes of this machine, with joblib."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass

from helmscope.runs.attempt import Done, Failed, Outcomes, attempt
from helmscope.runs.limits import Limits
from helmscope.runs.unit import Unit

DIED = "its process died, also when run alone: the system was out of memory or a library crashed, so make it smaller"
IDLE_TIMEOUT_S = 1_000_000


@dataclass(frozen=True)
class Processes:
    """Engine that runs ``workers`` units at a time, each in a separate process with ``threads`` threads. ``max_memory``
    bytes are divided equally among them; a unit that needs more than its share fails with a message that says so.

    If a process is killed, the units that may have been running in it are retried one by one, so that the culprit is
    named and the others complete.

    >>> Processes(2, max_memory=4 * 10**9).workers
    2
    """

    workers: int
    max_memory: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        _ = self._limits

    @property
    def _limits(self) -> Limits:
        return Limits(threads=self.threads, max_memory=self.max_memory, workers=self.workers)

    def attempts(self, units: Sequence[Unit]) -> Outcomes:
        """Run the units and yield their outcomes as they complete.

        >>> list(Processes(2).attempts([]))
        []
        """
        pending = {unit.name: unit for unit in units}
        while pending:
            started: list[str] = []
            try:
                with _closing(self._parallel(list(pending.values()), self.workers, started)) as outcomes:
                    for outcome in outcomes:
                        del pending[outcome.name]
                        yield outcome
            except BrokenProcessPool:
                for name in [name for name in started if name in pending]:
                    yield self._retry_alone(pending.pop(name))

    def _retry_alone(self, unit: Unit) -> Done | Failed:
        try:
            with _closing(self._parallel([unit], 1, [])) as outcomes:
                return next(outcomes)
        except BrokenProcessPool as error:
            return Failed(unit.name, DIED if self.max_memory is None else f"{DIED} or raise max_memory", str(error))

    def _parallel(self, units: Sequence[Unit], workers: int, started: list[str]) -> Outcomes:
        import joblib

        def tasks() -> Iterator[object]:
            for unit in units:
                started.append(unit.name)
                yield joblib.delayed(attempt)(unit, self._limits)

        _start_resource_tracker()
        # if a worker exited after idling just as the next run starts, that run would wait forever
        options = {"idle_worker_timeout": IDLE_TIMEOUT_S, "initializer": _exit_with_parent, "initargs": (os.getpid(),)}
        with joblib.parallel_config(backend="loky", inner_max_num_threads=self.threads, **options):
            # at least 2 processes, one of them idle: joblib would run a single job in this process, which would then
            # die with it; max_nbytes=None passes large arrays as they are, not as read-only memory maps
            parallel = joblib.Parallel(
                max(2, workers), return_as="generator_unordered", pre_dispatch=workers, batch_size=1, max_nbytes=None
            )
        yield from parallel(tasks())


def _start_resource_tracker() -> None:
    """Start loky's resource tracker with SIGHUP ignored, as it already ignores Ctrl-C: if it died with the terminal,
    its warnings would bury the last messages of a run. Only the main thread may change signal handlers.
    """
    from joblib.externals.loky.backend.resource_tracker import ensure_running

    if threading.current_thread() is not threading.main_thread():
        return
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGHUP, earlier)


@contextmanager
def _closing(outcomes: Outcomes) -> Iterator[Outcomes]:
    """Stop the workers at the end of the block, without joblib's warning about unused results."""
    try:
        yield outcomes
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes.close()


def _exit_with_parent(parent: int) -> None:
    """Make a worker exit, busy or idle, when its parent was killed: nothing waits for its unit, which a later call may
    already be running again.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
