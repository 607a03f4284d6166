"""Processes that tests start: signals reach them, and nothing outlives its block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from helmscope.runs import Processes, Unit, run_units
from helmscope.store import RunFolder
from support.children import alive_in_session, child, end_workers, is_alive, run_child, wait_for, with_tests_on_path
from support.toy_units import manifest

FAMILY = ["sh", "-c", "sleep 600 & sleep 600 & wait"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGTERM", "SIGQUIT", "SIGPIPE"])
def test_signals_that_are_ignored_here_reach_a_child(on_signal, name):
    """As under ``nohup`` or in the background of a script."""
    number = signal.Signals[name]
    on_signal(number, signal.SIG_IGN)
    with child(["sleep", "600"]) as process:
        process.send_signal(number)
        assert process.wait(10) == -number
    assert signal.getsignal(number) == signal.SIG_IGN


@pytest.mark.parametrize("error", [AssertionError, KeyboardInterrupt])
def test_a_child_does_not_outlive_a_test_that_fails(error):
    started = []

    def failing() -> None:
        with child(FAMILY) as process:
            started.append(process)
            wait_for(lambda: len(alive_in_session(process.pid)) == 3, process)
            raise error

    with pytest.raises(error):
        failing()
    (process,) = started
    assert process.returncode == -signal.SIGKILL
    wait_for(lambda: not alive_in_session(process.pid), seconds=10)


def test_a_child_that_takes_too_long_is_gone(tmp_path):
    """So is what it started, which holds its standard output open."""
    code = f"echo $$ > {tmp_path}/leader; sleep 600 & sleep 600"
    with pytest.raises(subprocess.TimeoutExpired):
        run_child(["sh", "-c", code], timeout=0.5)
    leader = int((tmp_path / "leader").read_text())
    wait_for(lambda: not alive_in_session(leader), seconds=10)


def test_children_end_with_a_test_process_that_is_killed():
    code = (
        "import os, signal\n"
        "from support.children import alive_in_session, child, wait_for\n"
        f"with child({FAMILY}) as process:\n"
        "    wait_for(lambda: len(alive_in_session(process.pid)) == 3, process)\n"
        "    print(process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = run_child([sys.executable, "-c", code], env=with_tests_on_path())
    assert killed.returncode == -signal.SIGKILL
    wait_for(lambda: not alive_in_session(int(killed.stdout)), seconds=10)


def test_workers_of_this_process_are_ended_and_the_next_run_gets_new_ones(tmp_path):
    def worker(name: str) -> int:
        folder = RunFolder.create(tmp_path / name)
        return run_units([Unit("worker", os.getpid)], folder, manifest=manifest(), engine=Processes(1))["worker"]

    first = worker("first")
    assert is_alive(first)
    end_workers()
    assert not is_alive(first)
    assert is_alive(worker("second"))
