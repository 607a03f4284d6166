"""Several processes of one machine, by joblib."""

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

DIED = "its process died, also when it ran alone: the system was out of memory or a library crashed, so make it smaller"
PATIENCE_S = 1_000_000  # of a worker without work


@dataclass(frozen=True)
class Processes:
    """Runs ``jobs`` units at a time, each in a process of its own with ``threads`` threads. ``max_memory`` bytes are
    for all of them together; a unit that wants more than its share fails with a sentence that says so.

    When a process is killed, the units it may have been at are tried again one by one, so that the one at fault is
    named and the others are done.

    >>> Processes(2, max_memory=4 * 10**9).jobs
    2
    """

    jobs: int
    max_memory: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        _ = self._limits

    @property
    def _limits(self) -> Limits:
        return Limits(threads=self.threads, max_memory=self.max_memory, jobs=self.jobs)

    def attempts(self, units: Sequence[Unit]) -> Outcomes:
        """The outcomes, in the order in which they come."""
        left = {unit.name: unit for unit in units}
        while left:
            begun: list[str] = []
            try:
                with _closing(self._parallel(list(left.values()), self.jobs, begun)) as outcomes:
                    for outcome in outcomes:
                        del left[outcome.name]
                        yield outcome
            except BrokenProcessPool:
                for name in [name for name in begun if name in left]:
                    yield self._alone(left.pop(name))

    def _alone(self, unit: Unit) -> Done | Failed:
        try:
            with _closing(self._parallel([unit], 1, [])) as outcomes:
                return next(outcomes)
        except BrokenProcessPool as error:
            return Failed(unit.name, DIED if self.max_memory is None else f"{DIED} or raise max_memory", str(error))

    def _parallel(self, units: Sequence[Unit], jobs: int, begun: list[str]) -> Outcomes:
        import joblib

        def tasks() -> Iterator[object]:
            for unit in units:
                begun.append(unit.name)
                yield joblib.delayed(attempt)(unit, self._limits)

        _start_tracker()
        # a worker that leaves for idleness just as the next run begins would leave that run waiting for ever
        options = {"idle_worker_timeout": PATIENCE_S, "initializer": _end_with, "initargs": (os.getpid(),)}
        with joblib.parallel_config(backend="loky", inner_max_num_threads=self.threads, **options):
            # joblib would run a single job in this process, which a fault would then end: 2 processes, 1 of them idle;
            # max_nbytes: large arrays reach the unit as they are, not as read-only files
            parallel = joblib.Parallel(
                max(2, jobs), return_as="generator_unordered", pre_dispatch=jobs, batch_size=1, max_nbytes=None
            )
        yield from parallel(tasks())


def _start_tracker() -> None:
    """Starts loky's tracker of shared resources deaf to a hang-up, as it is to Ctrl-C: where it died with the terminal,
    the end of a run would be buried under its complaints. Only the main thread may change what a signal does.
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
    """Stops the workers at the end, without joblib's warning of results that were not used."""
    try:
        yield outcomes
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes.close()


def _end_with(parent: int) -> None:
    """Lets a worker end when its parent was killed, busy or idle: nobody waits for its unit, which the next call may
    already run a second time.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
