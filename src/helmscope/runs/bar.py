"""The bar that long calls draw on standard error if a person can see it: ``ProgressBar``, and ``progress_reporting``,
through which every call of the library obtains the callback for its progress.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

from helmscope.runs.progress import SafeStderr, format_duration, is_terminal
from helmscope.store.printable import printable
from helmscope.types import Progress, check_progress
from helmscope.types.progress import ProgressOption

Params = ParamSpec("Params")
Result = TypeVar("Result")

WIDTH = 30  # characters
PATIENCE_S = 2.0  # a call that is shorter draws nothing
REDRAW_S = 0.1  # the shortest time between two drawings
TICK_S = 0.25  # how often the bar of a call that reports nothing is redrawn
_PID = os.getpid()


class ProgressBar:
    """A progress bar with a label of your choice, to pass as ``progress=`` to any long call of this library.

    It is a line on standard error with the share of the work done, the time elapsed and an estimate of the time left,
    and appears once the call has taken ``delay`` seconds. Nothing is printed unless standard error is a terminal or
    belongs to a notebook. One object can be used for several calls in a row.

    >>> from contextlib import redirect_stderr
    >>> bar = ProgressBar("recording")
    >>> with redirect_stderr(sys.stdout):  # not a terminal
    ...     bar(0.5)
    ...     bar(1.0)
    """

    def __init__(self, label: str = "", *, delay: float = PATIENCE_S) -> None:
        self.label = printable(str(label))
        self.delay = delay
        self._lock = threading.RLock()  # the call and the ticker draw
        self.start()

    def start(self) -> None:
        """Begin to measure the time of a new call.

        >>> bar = ProgressBar("recording")
        >>> bar.start()
        >>> bar
        <ProgressBar 'recording': 0%>
        """
        with self._lock:
            self._started = time.monotonic()
            self._share: float | None = None
            self._step = ""
            self._drawn_at, self._drawn_width, self._open = -math.inf, 0, True

    def __repr__(self) -> str:
        return f"<ProgressBar {self.label!r}: {self._share or 0:.0%}>"

    def __call__(self, share: float) -> None:
        """Update the bar with the share of the work done. The share 1 ends the line, and a new call has begun when the
        share decreases.
        """
        with self._lock:
            if not self._open and share >= 1:
                return
            if not self._open or share < (self._share or 0.0):
                self.start()
            if share >= 1:
                self.close()
            else:
                self.update(share)

    def update(self, share: float) -> None:
        """Set the share of the work done; the line is redrawn at most ten times per second, and is not ended.

        >>> bar = ProgressBar("recording")
        >>> bar.update(0.5)
        >>> bar
        <ProgressBar 'recording': 50%>
        """
        with self._lock:
            self._share = share
            self.redraw()

    def name_step(self, what: str, share: float) -> None:
        """Name the step that the call is at, with the share of that step done; "" for none. The line shows it as long
        as the share of the whole work is unknown.

        >>> ProgressBar("trying 'rate'").name_step("recording", 0.4)
        """
        with self._lock:
            self._step = what and f"{what} {_percentage(share, complete=False)}%"
            self.redraw()

    def redraw(self) -> None:
        """Draw the line with the present time, if the call has taken long enough.

        >>> ProgressBar("recording").redraw()
        """
        now = time.monotonic()
        # a saved notebook keeps every line: the longer the call, the rarer they are
        pause = max(REDRAW_S, (now - self._started) / 4) if _is_notebook() else REDRAW_S
        if now - self._started < self.delay or now - self._drawn_at < pause:
            return
        with self._lock:
            if not self._open or not is_watched():
                return
            seconds, share, note = now - self._started, self._share, ""
            if share is not None and 0 < share < 1:
                note = f", about {format_duration(seconds * (1 - share) / share)} left"
            elif share is None and self._step:
                note = f" ({self._step})"
            self._draw(f"{format_duration(seconds)}{note}", now)

    def close(self, *, finished: bool = True) -> None:
        """End the line: at 100 %, or where it is if the call did not finish. Does nothing if it was ended before.

        >>> bar = ProgressBar("recording")
        >>> bar.close()
        >>> bar
        <ProgressBar 'recording': 100%>
        """
        now = time.monotonic()
        with self._lock:
            was_open, self._open = self._open, False
            self._share = 1.0 if finished else self._share
            seconds, drawn = now - self._started, self._drawn_width > 0
            if not was_open or not is_watched() or not (drawn or (finished and seconds >= self.delay)):
                return
            self._draw(f"{'in' if finished else 'stopped after'} {format_duration(seconds)}", now, end="\n")

    def _draw(self, note: str, now: float, end: str = "") -> None:
        self._drawn_at = now
        with suppress(Exception):  # a call never fails because of its bar
            line = _format_line(self.label, self._share, note, complete=end == "\n", columns=_columns())
            padded, self._drawn_width = line.ljust(self._drawn_width), len(line)
            print(f"\r{padded}", end=end, file=SafeStderr(), flush=True)


class _DefaultBar(ProgressBar):
    """The bar of a call to which none was passed: its label may change."""


def _format_line(label: str, share: float | None, note: str, *, complete: bool, columns: float) -> str:
    """One line of at most ``columns`` characters. 100 % is written at the end only, not where 99.6 % are done."""
    percent = "" if share is None else f"{_percentage(share, complete=complete):3d}%"
    text = " ".join(part for part in (label, percent, note) if part)
    width = min(WIDTH, max(0, columns - len(text) - 1))
    filled = round(width * min(max(share or 0.0, 0.0), 1.0))
    done, open_ = ("━", "╌") if _can_encode("━╌") else ("#", "-")
    bar = done * filled + open_ * (int(width) - filled)
    line = " ".join(part for part in (label, bar, percent, note) if part)
    return line if len(line) <= columns else line[: int(columns)]


def _percentage(share: float, *, complete: bool) -> int:
    whole = math.floor(100 * min(max(share, 0.0), 1.0) + 1e-9)
    return whole if complete else min(whole, 99)


def _columns() -> float:
    """The width of the terminal less one, so that the cursor stays in the line; infinite if it is unknown."""
    columns = 0
    with suppress(Exception):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    return columns - 1 if columns > 1 else math.inf


def _can_encode(text: str) -> bool:
    try:
        text.encode(getattr(sys.stderr, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def is_watched() -> bool:
    """Whether a person can see what this process draws: standard error is a terminal or belongs to a notebook, and the
    process is not a worker, which inherits the terminal of its parent.

    >>> from contextlib import redirect_stderr
    >>> with redirect_stderr(sys.stdout):
    ...     is_watched()
    False
    """
    return (is_terminal() or _is_notebook()) and not _is_worker()


def _is_notebook() -> bool:
    """Whether standard error belongs to a Jupyter kernel, which supports overwriting a line."""
    return type(sys.stderr).__module__.partition(".")[0] == "ipykernel"


def _is_worker() -> bool:
    """Whether this process was forked, or started by multiprocessing or joblib."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")  # always imported in a worker
    return os.getpid() != _PID or (multiprocessing is not None and multiprocessing.parent_process() is not None)


class _Screen:
    """Standard error, on which there is one bar at a time, that of the outermost call. A thread redraws it while the
    call reports nothing; it ends soon after the last call, and is not started again for each of many short ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: ProgressBar | None = None
        self._depth, self._calls, self._ticks = 0, 0, False

    def enter(self, bar: ProgressBar | None) -> ProgressBar | None:
        """Count a call as begun; returns its bar if it is the outermost, and None if nothing is to be drawn for it."""
        with self._lock:
            self._depth += 1
            self._calls += 1
            if self._depth > 1 or bar is None:
                return None
            self._bar = bar
            if not self._ticks:
                self._ticks = True
                threading.Thread(target=self._tick, name="helmscope-progress", daemon=True).start()
            return bar

    def relabel(self, label: str) -> None:
        """Change the label of the bar, if the present call is the outermost."""
        with self._lock:
            if self._depth == 1 and isinstance(self._bar, _DefaultBar):
                self._bar.label = printable(label)

    def step(self, what: str) -> Progress | None:
        """The callback for a call within the outermost one, which is a step of its work; None if no bar shows it."""
        with self._lock:
            bar = self._bar if self._depth == 2 and what else None
        return None if bar is None else functools.partial(bar.name_step, what)

    def leave(self) -> None:
        """Count a call as ended."""
        with self._lock:
            self._depth -= 1
            bar, ended_step = self._bar, self._depth == 1
            if self._depth == 0:
                self._bar = None
        if bar is not None and ended_step:
            bar.name_step("", 0.0)

    def _tick(self) -> None:
        calls = -1
        while True:
            time.sleep(TICK_S)
            with self._lock:
                bar = self._bar
                if bar is None and calls == self._calls:
                    self._ticks = False
                    return
                calls = self._calls
            if bar is not None:
                bar.redraw()


_SCREEN = _Screen()


@contextmanager
def progress_reporting(progress: ProgressOption, label: str = "") -> Iterator[Progress | None]:
    """Context manager around the work of a call with the argument ``progress``: yields the callback to report shares
    to, or None if nobody needs them.

    None draws a bar labelled ``label`` if the call takes more than two seconds and a person can see it; within another
    call that draws a bar, that bar names this one as a step of its work. False draws nothing, neither for this call nor
    for those within it; a callable receives the shares. Raises ``HelmscopeError`` for anything else.

    >>> with progress_reporting(print, "counting") as report:
    ...     report(1.0)
    1.0
    >>> with progress_reporting(False) as report:  # also silences all calls within
    ...     print(report)
    None
    """
    callback = None if progress is None or progress is False else check_progress(progress)
    if not is_watched():
        yield callback
        return
    own = progress if isinstance(progress, ProgressBar) else None
    if progress is None:
        own = _DefaultBar(label, delay=PATIENCE_S)
    bar, finished = _SCREEN.enter(own), False
    try:
        if bar is not None:
            bar.start()
        if bar is not None:
            callback = bar.update
        elif progress is None:
            callback = _SCREEN.step(printable(label))
        yield callback
        finished = True
    finally:
        _SCREEN.leave()
        if bar is not None:
            bar.close(finished=finished)


def name_phase(label: str) -> None:
    """Label the bar of the present call with the phase of its work, such as "loading A"; does nothing within another
    call, whose label remains.

    >>> with progress_reporting(None, "recording"):
    ...     name_phase("loading A")
    """
    _SCREEN.relabel(label)


def shows_progress(label: str) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Decorator for a function with the keyword argument ``progress``: it runs within ``progress_reporting``, and
    receives the callback, or None, in place of the argument.

    >>> @shows_progress("counting")
    ... def count(*, progress=None):
    ...     return progress
    >>> count(progress=print), count(progress=False)
    (<built-in function print>, None)
    """

    def decorate(function: Callable[Params, Result]) -> Callable[Params, Result]:
        @functools.wraps(function)
        def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            progress: Any = kwargs.get("progress")
            with progress_reporting(progress, label) as callback:
                kwargs["progress"] = callback
                return function(*args, **kwargs)

        return call

    return decorate
