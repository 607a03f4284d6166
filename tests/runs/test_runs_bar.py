"""The bar of long calls: who sees one, what it shows, and that there is one for nested calls."""

from __future__ import annotations

import errno
import fcntl
import io
import math
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from helmscope.runs import Processes, ProgressBar, Unit, bar, progress_reporting, run_units
from helmscope.runs.bar import is_watched, name_phase, shows_progress
from helmscope.store import RunFolder
from helmscope.types import HelmscopeError
from support.children import child
from support.toy_units import manifest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Kernel(io.StringIO):
    """Standard error of a notebook, which is not a terminal."""


Kernel.__module__ = "ipykernel.iostream"


class Full(io.StringIO):
    """Standard error on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Gone(Terminal, Full):
    """A terminal that hung up."""


class Broken(Terminal):
    """A replacement for standard error whose methods fail in unusual ways."""

    def write(self, text: str) -> int:
        raise RuntimeError("no writing")

    def fileno(self) -> int:
        raise RuntimeError("no number")


class Unsure(io.StringIO):
    def isatty(self) -> bool:
        raise RuntimeError("no idea")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(bar.time, "monotonic", lambda: now[0])
    return now


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal; not in a fixture, since pytest replaces standard error after the setup."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def frames(written: str) -> list[str]:
    """What was drawn over time, without trailing spaces."""
    return [line.rstrip() for line in written.split("\r")[1:]]


def work(clock: list[float], progress=None, *, seconds: float = 4.0, steps: int = 4, label: str = "working") -> None:
    """A call that reports a share after each step."""
    with progress_reporting(progress, label) as report:
        for step in range(steps):
            clock[0] += seconds / steps
            if report is not None:
                report((step + 1) / steps)


# A bar by itself ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [Terminal, Kernel])
def test_a_progress_bar_appears_after_two_seconds(clock, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    recording = ProgressBar("recording")
    for second, share in enumerate((0.1, 0.2, 0.4, 0.5, 1.0), start=1):
        clock[0] = second - 0.5
        recording(share)
    written = sys.stderr.getvalue()
    assert frames(written) == [
        f"recording {'━' * 12}{'╌' * 18}  40% 2 s, about 4 s left",
        f"recording {'━' * 15}{'╌' * 15}  50% 4 s, about 4 s left",
        f"recording {'━' * 30} 100% in 4 s",
    ]
    assert written.endswith("\n")


def test_it_is_drawn_ten_times_per_second_and_restarts(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    counting = ProgressBar(delay=0.0)
    for call in range(2):
        for step in range(1, 101):
            clock[0] += 0.01
            counting(step / 100)
        assert screen.getvalue().count("\r") in range(11 + 11 * call, 13 + 12 * call)
    assert frames(screen.getvalue())[-1].endswith("100% in 1 s")
    assert repr(counting) == "<ProgressBar '': 100%>"


def test_100_percent_is_written_once(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    counting = ProgressBar(delay=0.0)
    for share in (0.5, 0.996, 0.9999, 1.0, 1.0, 1.0):
        clock[0] += 1.0
        counting(share)
    assert screen.getvalue().count("100%") == 1
    assert screen.getvalue().count("\n") == 1


@pytest.mark.parametrize("stream", [io.StringIO, Full, Gone, Broken, Unsure, closed, lambda: None])
def test_what_cannot_be_drawn_is_dropped(clock, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    counting = ProgressBar("recording", delay=0.0)
    for share in (0.0, math.nan, 0.5, 7.0):
        clock[0] += 1.0
        counting(share)
    work(clock)
    assert not isinstance(sys.stderr, io.StringIO) or sys.stderr.closed or sys.stderr.getvalue() == ""


def test_the_line_fits_a_narrow_terminal(clock, monkeypatch):
    for columns in (10, 24, 40):
        screen = on_terminal(monkeypatch)
        monkeypatch.setattr(bar.os, "get_terminal_size", lambda *_, columns=columns: os.terminal_size((columns, 24)))
        monkeypatch.setattr(screen, "fileno", lambda: 2)
        work(clock, label="recording")
        assert frames(screen.getvalue())
        assert all(len(frame.rstrip("\n")) < columns for frame in screen.getvalue().split("\r"))


def test_a_terminal_without_unicode_gets_plain_characters(clock, monkeypatch):
    class Ascii(Terminal):
        encoding = "ascii"

    monkeypatch.setattr(sys, "stderr", Ascii())
    work(clock)
    assert sys.stderr.getvalue().isascii()
    assert "working ######" in sys.stderr.getvalue()


# The bar of a call ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [Terminal, Kernel])
def test_a_long_call_draws_by_default(clock, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    work(clock)
    assert frames(sys.stderr.getvalue()) == [
        f"working {'━' * 15}{'╌' * 15}  50% 2 s, about 2 s left",
        f"working {'━' * 22}{'╌' * 8}  75% 3 s, about 1 s left",
        f"working {'━' * 30}  99% 4 s",
        f"working {'━' * 30} 100% in 4 s",
    ]
    assert sys.stderr.getvalue().endswith("\n")


def test_a_short_call_draws_nothing(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    work(clock, seconds=1.9)
    assert screen.getvalue() == ""


def test_nothing_is_drawn_unless_a_person_is_watching(clock, capsys):
    work(clock)
    assert capsys.readouterr() == ("", "")


def test_false_silences_a_call_and_all_within(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    work(clock, progress=False)
    with progress_reporting(False):
        work(clock)
    assert screen.getvalue() == ""


def test_a_callable_receives_the_shares_and_nothing_is_drawn(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    shares = []
    with progress_reporting(shares.append, "outer") as report:
        work(clock)
        report(1.0)
    assert shares == [1.0]
    assert screen.getvalue() == ""


def test_anything_else_is_refused():
    for wrong in ("bar", True, 3):
        with pytest.raises(HelmscopeError, match=r"progress is .*, but it must be a callable .*, None or False"):
            work([0.0], progress=wrong)


def test_nested_calls_draw_one_bar(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    with progress_reporting(None, "outer") as report:
        for part in range(3):
            work(clock, label="inner")
            report((part + 1) / 3)
    assert all(frame.startswith("outer") for frame in frames(screen.getvalue()))
    assert screen.getvalue().count("\n") == 1
    assert frames(screen.getvalue())[-1] == f"outer {'━' * 30} 100% in 12 s"
    work(clock, label="next")
    assert frames(screen.getvalue())[-1] == f"next {'━' * 30} 100% in 4 s"


def test_calls_in_several_threads_draw_one_bar(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    with progress_reporting(None, "outer"):
        thread = threading.Thread(target=work, args=(clock,))
        thread.start()
        thread.join()
    assert all(frame.startswith("outer") for frame in frames(screen.getvalue()))
    assert screen.getvalue().count("\n") == 1


def test_a_call_without_shares_names_the_step_it_is_at(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    with progress_reporting(None, "trying 'rate'") as report:
        work(clock, label="recording")
        with (
            progress_reporting(None, "measuring"),
            progress_reporting(None, "replaying") as third,
        ):  # only the step itself is named
            assert third is None
        with progress_reporting(False):
            work(clock, label="silent")
        clock[0] += 1.0
        report(0.5)
        work(clock, label="measuring")  # the share of the whole is known now
    outer = f"trying 'rate' {'╌' * 30}"
    assert frames(screen.getvalue())[:3] == [
        f"{outer} {s} s (recording {share}%)" for s, share in ((2, 50), (3, 75), (4, 99))
    ]
    assert not any("silent" in frame or "(measuring" in frame for frame in frames(screen.getvalue()))
    assert " 50% 9 s, about 9 s left" in screen.getvalue()


def test_the_label_names_the_phase_of_the_outermost_call(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    with progress_reporting(None, "recording") as report:
        clock[0] += 3.0
        name_phase("loading A")
        report(0.1)
        with progress_reporting(None, "inner"):
            name_phase("checking")  # of a call within: the label remains
        clock[0] += 3.0
        report(0.2)
        name_phase("recording")
    assert [frame.split(" ━")[0] for frame in frames(screen.getvalue())] == ["loading A", "loading A", "recording"]
    screen = on_terminal(monkeypatch)
    with progress_reporting(ProgressBar("mine", delay=0.0), "recording"):
        name_phase("loading A")  # the caller has chosen a label
    assert "loading" not in screen.getvalue()


def test_a_notebook_keeps_few_lines_of_a_long_call(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Kernel())
    work(clock, seconds=600.0, steps=6000)
    assert 5 < len(frames(sys.stderr.getvalue())) < 40


def interrupted(clock: list[float], progress=None) -> None:
    with progress_reporting(progress, "working") as report:
        clock[0] += 3.0
        report(0.5)
        raise KeyboardInterrupt


def test_an_interrupted_call_leaves_a_clean_line(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        interrupted(clock)
    assert frames(screen.getvalue())[-1] == f"working {'━' * 15}{'╌' * 15}  50% stopped after 3 s"
    assert screen.getvalue().endswith("\n")
    screen = on_terminal(monkeypatch)
    work(clock, seconds=1.0)  # the next call is the outermost one again
    assert screen.getvalue() == ""
    work(clock, label="next")
    assert "next" in screen.getvalue()


def test_a_bar_of_the_caller_is_used_and_ended(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    own = ProgressBar("mine")
    for _ in range(2):
        clock[0] += 100.0  # between the calls
        with pytest.raises(KeyboardInterrupt):
            interrupted(clock, own)
    assert [frame for frame in frames(screen.getvalue()) if "stopped" in frame] == [
        f"mine {'━' * 15}{'╌' * 15}  50% stopped after 3 s"
    ] * 2
    work(clock, progress=own)
    assert frames(screen.getvalue())[-1] == f"mine {'━' * 30} 100% in 4 s"


def test_a_call_that_reports_nothing_shows_the_time(monkeypatch):
    screen = on_terminal(monkeypatch)
    monkeypatch.setattr(bar, "TICK_S", 0.01)
    monkeypatch.setattr(bar, "PATIENCE_S", 0.02)
    with progress_reporting(None, "waiting"):
        deadline = time.monotonic() + 10.0
        while not screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    first, *_, last = frames(screen.getvalue())
    assert re.fullmatch(r"waiting ╌{30} 0 s", first)
    assert last == f"waiting {'━' * 30} 100% in 0 s"


def test_the_thread_that_redraws_ends_after_the_last_call(monkeypatch):
    on_terminal(monkeypatch)
    monkeypatch.setattr(bar, "TICK_S", 0.01)
    for _ in range(100):
        with progress_reporting(None, "short"):
            pass
    deadline = time.monotonic() + 10.0
    while bar._SCREEN._ticks and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not bar._SCREEN._ticks


def test_reporting_costs_microseconds(monkeypatch):
    on_terminal(monkeypatch)

    def calls(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            with progress_reporting(None, "short") as report:
                report(1.0)
        return (time.perf_counter() - begin) / count

    assert min(calls(200) for _ in range(5)) < 500e-6


@shows_progress("counting")
def count_with(clock, *, progress=None):
    """Count."""
    clock[0] += 3.0
    return progress


def test_the_decorator_passes_the_callback(clock, monkeypatch):
    screen = on_terminal(monkeypatch)
    assert count_with(clock, progress=False) is None
    assert count_with(clock, progress=print) is print
    assert screen.getvalue() == ""
    assert callable(count_with(clock))
    assert frames(screen.getvalue()) == [f"counting {'━' * 30} 100% in 3 s"]
    assert count_with.__doc__ == "Count."


# Workers -------------------------------------------------------------------------------------------------------------


def watched_on_a_terminal(parent: int = 0) -> bool:
    sys.stderr = Terminal()
    return is_watched()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_multiprocessing_draw_nothing(method, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert is_watched()
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        assert pool.submit(watched_on_a_terminal).result() is False


def draw(seconds: float) -> dict[str, str]:
    sys.stderr, now = Terminal(), [0.0]
    bar.time.monotonic, original = lambda: now[0], bar.time.monotonic
    try:
        work(now, seconds=seconds)
    finally:
        bar.time.monotonic = original
    return {"drawn": sys.stderr.getvalue()}


def test_units_in_other_processes_draw_nothing(tmp_path):
    units = [Unit(f"draw-{i}", draw, {"seconds": 4.0 + i}) for i in range(2)]
    result = run_units(units, RunFolder.create(tmp_path / "run"), manifest=manifest(), engine=Processes(2))
    assert [result[name] for name in result] == [{"drawn": ""}] * 2


def advance_clock(seconds: float) -> float:
    CLOCK[0] += seconds
    work(CLOCK, label="inner")
    return seconds


CLOCK = [0.0]


@pytest.mark.parametrize("heading", [None, "toys"])
def test_a_run_in_this_process_draws_one_bar_for_all_units(tmp_path, monkeypatch, heading):
    screen = on_terminal(monkeypatch)
    monkeypatch.setattr(bar.time, "monotonic", lambda: CLOCK[0])
    units = [Unit(f"step-{i}", advance_clock, {"seconds": 3.0 + i}) for i in range(2)]
    run_units(units, RunFolder.create(tmp_path / "run"), manifest=manifest(), heading=heading)
    assert "inner" not in screen.getvalue()
    if heading is None:
        assert frames(screen.getvalue())[-1] == f"running 2 units {'━' * 30} 100% in 15 s"


# A real terminal ------------------------------------------------------------------------------------------------------

SLOW = """
import time
from helmscope.runs import bar, progress_reporting
bar.PATIENCE_S = 0.1
with progress_reporting(None, "outer") as report:
    for step in range(4):
        with progress_reporting(None, "inner"):
            time.sleep(0.1)
        report((step + 1) / 4)
print("done")
"""


def test_a_real_terminal():
    """Standard error is a pseudo-terminal of 60 columns."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with child([sys.executable, "-c", SLOW], stdout=-1, stderr=terminal) as process:
        os.close(terminal)
        written = b""
        while True:
            try:
                part = os.read(reader, 4096)
            except OSError:  # Linux reports the end of a terminal as an error
                break
            if not part:
                break
            written += part
        assert process.stdout.read() == b"done\n"
    os.close(reader)
    text = written.decode()
    assert "inner" not in text
    assert text.count("100%") == text.count("\n") == 1
    assert re.fullmatch(r"outer ━+ 100% in \d s", frames(text.rstrip())[-1])
    assert len(frames(text)) > 2
    assert max(map(len, frames(text))) < 60
