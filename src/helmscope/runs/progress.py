"""Progress on standard error: a bar on a terminal, plain lines elsewhere, and nothing if writing fails."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from helmscope.store.printable import printable
from helmscope.types import counted

BAR = 30  # characters


@contextmanager
def unit_progress(what: str, *, total: int, done: int, jobs: int) -> Iterator[Callable[[], None]]:
    """Context manager: print how many units there are and how many are done, and yield a function to call after each
    further unit. On a terminal it advances a bar; elsewhere it prints a line after the first unit and after each tenth
    of the total, with an estimate of the time left.

    >>> from contextlib import redirect_stderr
    >>> with redirect_stderr(sys.stdout), unit_progress("sweep", total=4, done=2, jobs=1) as tick:
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
            return f"{finished} of {counted(total, 'unit')}, in {_format_duration(seconds)}"
        left = remaining(seconds, done=finished - done, left=total - finished, jobs=jobs)
        return f"{finished} of {counted(total, 'unit')}, about {_format_duration(left)} left"

    print_status(f"{what}: {counted(total, 'unit')}, {done} already done")
    if _is_terminal():
        with _progress_bar(what, total, done) as draw:

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
            print_status(f"{what}: {note()}")

    yield advance_lines


def remaining(seconds: float, *, done: int, left: int, jobs: int) -> float:
    """Estimate the seconds until ``left`` more units are done, if ``done`` took ``seconds``, ``jobs`` at a time. While
    fewer than ``jobs`` are done, the running ones are assumed to be about to finish too.

    >>> remaining(10.0, done=1, left=7, jobs=4), remaining(20.0, done=8, left=4, jobs=4)
    (17.5, 10.0)
    """
    return seconds * left / max(done, min(jobs, done + left))


def _format_duration(seconds: float) -> str:
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
    print(printable(line), file=_SafeStderr(), flush=True)


class _SafeStderr:
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


def _is_terminal() -> bool:
    with suppress(ValueError, AttributeError):
        return sys.stderr.isatty()
    return False


@contextmanager
def _progress_bar(what: str, total: int, done: int) -> Iterator[Callable[[float, str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    # redirect_stdout=False: standard output is reserved for results
    with Progress(*columns, console=Console(file=cast("IO[str]", _SafeStderr())), redirect_stdout=False) as progress:
        task = progress.add_task(what, total=total, completed=done, note="")
        yield lambda value, note: progress.update(task, completed=value, note=note)


class ProgressBar:
    """A progress bar to pass as ``progress=`` to any long call of this library: a line on standard error with
    the share of the work done and an estimate of the time left, shown once the call has taken ``after`` seconds.

    Nothing is printed unless standard error is a terminal or belongs to a notebook. One object can be used for several
    calls in a row: when the share decreases, a new call has started.

    >>> from contextlib import redirect_stderr
    >>> bar = ProgressBar("recording")
    >>> with redirect_stderr(sys.stdout):  # no terminal here
    ...     bar(0.5)
    ...     bar(1.0)
    """

    def __init__(self, what: str = "", *, after: float = 2.0) -> None:
        self.what = printable(str(what))
        self.after = after
        self._begin()

    def _begin(self) -> None:
        self._started = time.monotonic()
        self._share, self._drawn_at, self._width = 0.0, -math.inf, 0

    def __repr__(self) -> str:
        return f"<ProgressBar {self.what!r}: {self._share:.0%}>"

    def __call__(self, share: float) -> None:
        """Update the bar with the share of the work done; it is redrawn at most ten times per second."""
        if share < self._share or self._share >= 1:
            self._begin()
        now, self._share = time.monotonic(), share
        seconds = now - self._started
        done = share >= 1
        if seconds < self.after or not (_is_terminal() or _is_notebook()) or (now - self._drawn_at < 0.1 and not done):
            return
        self._drawn_at = now
        filled = round(BAR * min(max(share, 0.0), 1.0))
        left = f"about {_format_duration(seconds * (1 - share) / share)} left" if 0 < share < 1 else ""
        note = f"in {_format_duration(seconds)}" if done else left
        line = f"{self.what} {'━' * filled}{'╌' * (BAR - filled)} {share:4.0%} {note}".strip()
        padded, self._width = line.ljust(self._width), len(line)
        print(f"\r{padded}", end="\n" if done else "", file=_SafeStderr(), flush=True)


def _is_notebook() -> bool:
    """Whether standard error belongs to a Jupyter kernel, which supports overwriting a line."""
    return type(sys.stderr).__module__.partition(".")[0] == "ipykernel"
