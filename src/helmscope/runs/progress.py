"""Progress on standard error: a bar on a terminal, plain lines elsewhere, and nothing where it cannot be written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from helmscope.store.printable import printable
from helmscope.types import counted


@contextmanager
def counting(what: str, *, total: int, done: int, jobs: int) -> Iterator[Callable[[], None]]:
    """Says how many units there are and how many are done, then yields a function to call after each further one: it
    moves a bar on a terminal, and elsewhere says the first estimate of the time left and a line every tenth.

    >>> from contextlib import redirect_stderr
    >>> with redirect_stderr(sys.stdout), counting("sweep", total=4, done=2, jobs=1) as tick:
    ...     tick()
    ...     tick()
    sweep: 4 units, 2 of them done before
    sweep: 3 of 4 units, about 0 s left
    sweep: 4 of 4 units, in 0 s
    """
    started, finished = time.monotonic(), done

    def note() -> str:
        seconds = time.monotonic() - started
        if finished == total:
            return f"{finished} of {counted(total, 'unit')}, in {_spoken(seconds)}"
        left = remaining(seconds, done=finished - done, left=total - finished, jobs=jobs)
        return f"{finished} of {counted(total, 'unit')}, about {_spoken(left)} left"

    say(f"{what}: {counted(total, 'unit')}, {done} of them done before")
    if _is_terminal():
        with _drawn(what, total, done) as draw:

            def move() -> None:
                nonlocal finished
                finished += 1
                draw(finished, note())

            yield move
        return

    def tell() -> None:
        nonlocal finished
        finished += 1
        if finished == done + 1 or finished * 10 // total > (finished - 1) * 10 // total:
            say(f"{what}: {note()}")

    yield tell


def remaining(seconds: float, *, done: int, left: int, jobs: int) -> float:
    """Seconds until ``left`` more units are done, when ``done`` of them took ``seconds``, ``jobs`` at a time. While
    fewer than ``jobs`` are done, the others at work are taken to be as far.

    >>> remaining(10.0, done=1, left=7, jobs=4), remaining(20.0, done=8, left=4, jobs=4)
    (17.5, 10.0)
    """
    return seconds * left / max(done, min(jobs, done + left))


def _spoken(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def say(line: str) -> None:
    """Prints a line on standard error; one that cannot be written there is dropped, because the work is worth more.
    What it quotes from files may hold characters that a terminal obeys; they are written as escapes.

    >>> from contextlib import redirect_stderr
    >>> with redirect_stderr(sys.stdout):
    ...     say("half way")
    half way
    """
    print(printable(line), file=_Forgiving(), flush=True)


class _Forgiving:
    """Standard error as it is now, without its failures: full, hung up, closed, or None where a process has none."""

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
def _drawn(what: str, total: int, done: int) -> Iterator[Callable[[float, str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    # what the work prints on standard output is a result, and stays there
    with Progress(*columns, console=Console(file=cast("IO[str]", _Forgiving())), redirect_stdout=False) as progress:
        task = progress.add_task(what, total=total, completed=done, note="")
        yield lambda value, note: progress.update(task, completed=value, note=note)
