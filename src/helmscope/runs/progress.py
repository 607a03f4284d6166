"""Progress on standard error: a bar on a terminal, plain lines elsewhere, and nothing if writing fails."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from helmscope.store.printable import printable
from helmscope.types import pluralized

PRIOR = 0.5  # share of the cost ahead for which the estimate counts as if it had been measured


class TimeLeft:
    """The time left in a run. Units count by their estimated seconds in ``costs`` (all units still to be done), or
    equally if an estimate is missing or not positive.

    With C the cost finished, A the cost ahead and ``workers`` units at a time,

        time left  =  A (elapsed time + A / (2 workers)) / (C + A / 2),

    so that the estimate decides at first and the measured speed at last; without estimates A (elapsed time) / C. While
    fewer than ``workers`` units are done, the running ones are assumed to be about to finish too.

    >>> left = TimeLeft({"slow": 90.0, "fast": 10.0})
    >>> left.finish("fast")
    >>> left.share, round(left.seconds(20.0))
    (0.1, 106)
    """

    def __init__(self, costs: Mapping[str, float] | None = None, *, count: int | None = None, workers: int = 1) -> None:
        self.costs = dict(costs or {})
        if (count is not None and len(self.costs) != count) or not all(cost > 0 for cost in self.costs.values()):
            self.costs = {}
        self.workers, self.count = workers, len(self.costs) if count is None else count
        self.total = sum(self.costs.values()) if self.costs else float(self.count)
        self.finished, self.units = 0.0, 0

    def finish(self, name: str = "") -> None:
        """Count a unit as done."""
        self.finished += self.costs.get(name, 0.0) if self.costs else 1.0
        self.units += 1

    @property
    def share(self) -> float:
        """The share of the cost that is done; 1 once every unit is."""
        return 1.0 if self.units >= self.count else self.finished / self.total

    def seconds(self, elapsed: float) -> float:
        """The estimated time left, ``elapsed`` seconds after the start."""
        if self.units >= self.count:
            return 0.0
        ahead = max(0.0, self.total - self.finished)
        at_once = max(1, min(self.workers, self.count))
        known = self.finished * max(1.0, at_once / max(self.units, 1))
        prior = PRIOR * ahead if self.costs else 0.0
        return ahead * (elapsed + prior / at_once) / (known + prior) if known + prior > 0 else 0.0


@contextmanager
def unit_progress(
    heading: str, *, total: int, done: int, workers: int, costs: Mapping[str, float] | None = None
) -> Iterator[Callable[..., None]]:
    """Context manager: print how many units there are and how many are done, and yield a function to call after each
    further unit, with its name if ``costs`` has estimated seconds of the units still to be done. On a terminal it
    advances a bar by their share of the cost; elsewhere it prints a line after the first unit and after each tenth of
    the total, with an estimate of the time left.

    >>> from contextlib import redirect_stderr
    >>> with redirect_stderr(sys.stdout), unit_progress("sweep", total=4, done=2, workers=1) as tick:
    ...     tick()
    ...     tick()
    sweep: 4 units, 2 already done
    sweep: 3 of 4 units, about 0 s left
    sweep: 4 of 4 units, in 0 s
    """
    started, finished = time.monotonic(), done
    ahead = TimeLeft(costs, count=total - done, workers=workers)

    def note() -> str:
        seconds = time.monotonic() - started
        if finished == total:
            return f"{finished} of {pluralized(total, 'unit')}, in {format_duration(seconds)}"
        left = format_duration(ahead.seconds(seconds))
        return f"{finished} of {pluralized(total, 'unit')}, about {left} left"

    print_status(f"{heading}: {pluralized(total, 'unit')}, {done} already done")
    if is_terminal():
        with _progress_bar(heading, total, done) as draw:

            def advance_bar(name: str = "") -> None:
                nonlocal finished
                finished += 1
                ahead.finish(name)
                draw(done + (total - done) * ahead.share, note())

            yield advance_bar
        return

    def advance_lines(name: str = "") -> None:
        nonlocal finished
        finished += 1
        ahead.finish(name)
        if finished == done + 1 or finished * 10 // total > (finished - 1) * 10 // total:
            print_status(f"{heading}: {note()}")

    yield advance_lines


def format_duration(seconds: float) -> str:
    """A duration in the largest suitable unit, as text."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def print_status(line: str) -> None:
    """Print a line on standard error, with non-printable characters escaped. A line that cannot be written is dropped,
    so that the work continues.

    >>> from contextlib import redirect_stderr
    >>> with redirect_stderr(sys.stdout):
    ...     print_status("50 % done")
    50 % done
    """
    print(printable(line), file=SafeStderr(), flush=True)


def import_announced(name: str) -> None:
    """Import a module, which may take seconds; meanwhile a terminal shows a line, which is erased afterwards.

    >>> import_announced("colorsys")
    """
    line = f"importing {name} ..."
    shown = name not in sys.modules and is_terminal()
    if shown:
        print(line, end="", file=SafeStderr(), flush=True)
    try:
        importlib.import_module(name)
    finally:
        if shown:
            print(f"\r{' ' * len(line)}\r", end="", file=SafeStderr(), flush=True)


class SafeStderr:
    """The current standard error with write errors suppressed: disk full, terminal closed, stream closed, or None."""

    def __init__(self) -> None:
        self.stream = sys.stderr

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def is_terminal() -> bool:
    """Whether standard error is a terminal."""
    with suppress(Exception):
        return bool(sys.stderr.isatty())
    return False


@contextmanager
def _progress_bar(heading: str, total: int, done: int) -> Iterator[Callable[[float, str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    # redirect_stdout=False: standard output is reserved for results
    with Progress(*columns, console=Console(file=cast("IO[str]", SafeStderr())), redirect_stdout=False) as progress:
        task = progress.add_task(heading, total=total, completed=done, note="")
        yield lambda value, note: progress.update(task, completed=value, note=note)
