"""Progress on standard error: a bar on a terminal, plain lines elsewhere, and nothing if writing fails."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from helmscope.store.printable import printable
from helmscope.types import pluralized


@contextmanager
def unit_progress(heading: str, *, total: int, done: int, workers: int) -> Iterator[Callable[[], None]]:
    """Context manager: print how many units there are and how many are done, and yield a function to call after each
    further unit. On a terminal it advances a bar; elsewhere it prints a line after the first unit and after each tenth
    of the total, with an estimate of the time left.

    >>> from contextlib import redirect_stderr
    >>> with redirect_stderr(sys.stdout), unit_progress("sweep", total=4, done=2, workers=1) as tick:
    ...     tick()
    ...     tick()
    sweep: 4 units, 2 already done
    sweep: 3 of 4 units, about 0 s left
    sweep: 4 of 4 units, in 0 s
    """
    started, finished = time.monotonic(), done

    def note() -> str:
        seconds = time.monotonic() - started
        if finished == total:
            return f"{finished} of {pluralized(total, 'unit')}, in {format_duration(seconds)}"
        left = remaining(seconds, done=finished - done, left=total - finished, workers=workers)
        return f"{finished} of {pluralized(total, 'unit')}, about {format_duration(left)} left"

    print_status(f"{heading}: {pluralized(total, 'unit')}, {done} already done")
    if is_terminal():
        with _progress_bar(heading, total, done) as draw:

            def advance_bar() -> None:
                nonlocal finished
                finished += 1
                draw(finished, note())

            yield advance_bar
        return

    def advance_lines() -> None:
        nonlocal finished
        finished += 1
        if finished == done + 1 or finished * 10 // total > (finished - 1) * 10 // total:
            print_status(f"{heading}: {note()}")

    yield advance_lines


def remaining(seconds: float, *, done: int, left: int, workers: int) -> float:
    """Estimate the seconds until ``left`` more units are done, if ``done`` took ``seconds``, ``workers`` at a time.
    While fewer than ``workers`` are done, the running ones are assumed to be about to finish too.

    >>> remaining(10.0, done=1, left=7, workers=4), remaining(20.0, done=8, left=4, workers=4)
    (17.5, 10.0)
    """
    return seconds * left / max(done, min(workers, done + left))


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
