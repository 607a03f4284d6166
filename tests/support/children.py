"""The only way for tests to start processes: with default signal handlers, and killed at the end of their block.

Each child leads a new session, and its whole process group, workers included, is killed however the block ends: by a
failed assertion, a timeout, Ctrl-C, or because the test process itself was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Command = Sequence[str | Path]

# A shell that outlives the test process: it reads the process group, and kills it unless a second line arrives.
GUARD = 'read -r group && { read -r _ || kill -s KILL -- "-$group"; }'


@contextmanager
def child(command: Command, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Context manager: start a process, and kill its whole group at the end of the block. Takes ``Popen``'s options."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "bufsize": 0}
    with subprocess.Popen(["sh", "-c", GUARD], start_new_session=True, **pipes) as guard:
        with _default_signals():
            process = subprocess.Popen(command, start_new_session=True, **options)
        with process:
            try:
                guard.stdin.write(b"%d\n" % process.pid)
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                guard.stdin.write(b"\n")
                guard.wait()


def run_child(
    command: Command, *, check: bool = False, timeout: float = 120.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run`` with captured text output, but no process survives a timeout."""
    with child(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options) as process:
        out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0 or not check, err
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_python(code: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """``run_child`` for Python code in a string."""
    return run_child([sys.executable, "-c", code, *arguments], **options)


def with_tests_on_path() -> dict[str, str]:
    """The environment for a child that imports helpers from tests/."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def wait_for(
    condition: Callable[[], object], process: subprocess.Popen[Any] | None = None, seconds: float = 60.0
) -> None:
    """Wait until the condition holds; fails if the process ends first or the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        running = process is None or process.poll() is None
        if condition():
            return
        assert running, f"the process exited with {process.returncode} too early"
        assert time.monotonic() < deadline, f"still waiting after {seconds} s"
        time.sleep(0.005)


def is_alive(process: int) -> bool:
    """Whether a process is running. A killed one may remain a zombie until its new parent reaps it."""
    return _state(process)[0] not in "ZX"


def alive_in_session(leader: int) -> list[int]:
    """The running processes in the session of a child, including the child."""
    processes = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [process for process in processes if _state(process)[3] == str(leader) and is_alive(process)]


def end_workers() -> None:
    """Shut down the workers that joblib keeps for the next call in this process."""
    loky = sys.modules.get("joblib.externals.loky.reusable_executor")
    if loky is not None and loky._executor is not None:  # its public function would start a pool if there is none
        loky._executor.shutdown(wait=True, kill_workers=True)


@contextmanager
def _default_signals() -> Iterator[None]:
    """Let a child start with default signal handlers even if this process ignores some, as under ``nohup`` or in the
    background of a script. A child inherits ignored signals but not handlers, so this sets a handler that does nothing.
    ``Popen`` restores SIGPIPE by itself.
    """
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)
    ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def _state(process: int) -> list[str]:
    """State, parent, group and session of a process, from /proc."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:4]
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "", "", ""]
