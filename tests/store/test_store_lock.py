"""Only one process at a time holds the lock of a run folder, however the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, TimeoutExpired

import pytest

from helmscope.store import RunFolder, is_locked
from helmscope.store.lock import locked
from helmscope.types import HelmscopeError
from support.children import child

# increments a counter in a file without synchronization, and counts how often another process is in the same section
VISITS = """
import os, sys, time
from contextlib import nullcontext, suppress
from helmscope.store.lock import locked
folder, rounds, careful = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "locked"
overlaps = 0
for _ in range(rounds):
    with locked(folder, wait=True) if careful else nullcontext():
        try:
            os.close(os.open(folder + "/inside", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            overlaps += 1
        with open(folder + "/count") as file:
            count = int(file.read() or 0)
        time.sleep(0)  # yield to the other processes
        with open(folder + "/count", "w") as file:
            file.write(str(count + 1))
        with suppress(FileNotFoundError):
            os.unlink(folder + "/inside")
print(overlaps)
"""


def visits(folder: Path, how: str, *, processes: int, rounds: int) -> tuple[int, int]:
    """How often processes overlapped in the critical section, and the final value of their shared counter."""
    (folder / "count").write_text("0")
    command = [sys.executable, "-c", VISITS, folder, str(rounds), how]
    with ExitStack() as stack:
        running = [stack.enter_context(child(command, stdout=PIPE, text=True)) for _ in range(processes)]
        overlaps = sum(int(process.communicate(timeout=300)[0]) for process in running)
    return overlaps, int((folder / "count").read_text())


def test_eight_processes_never_overlap(tmp_path):
    assert visits(tmp_path, "locked", processes=8, rounds=500) == (0, 4000)
    assert sorted(os.listdir(tmp_path)) == ["count"]


def test_processes_overlap_without_the_lock(tmp_path):
    overlaps, count = visits(tmp_path, "free", processes=8, rounds=100)
    assert overlaps > 0
    assert count != 800  # less, or more if a number was read while it was being written


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder until its standard input closes."""
    code = """
import sys
from helmscope.store.lock import locked
with locked(sys.argv[1]):
    print(flush=True)
    sys.stdin.read()
"""
    with child([sys.executable, "-c", code, tmp_path], stdin=PIPE, stdout=PIPE) as process:
        process.stdout.read(1)
        yield process


def test_the_error_on_a_locked_folder_names_the_holder(tmp_path, holder):
    assert is_locked(tmp_path)
    with pytest.raises(HelmscopeError) as caught, RunFolder(tmp_path).lock():
        pytest.fail("two hold one lock")
    who = f"process {holder.pid} on {platform.node()}"
    assert str(caught.value) == f"{tmp_path} is in use by {who}: wait until it ends, or stop it"
    assert os.listdir(tmp_path) == [".lock"]


def test_killing_the_holder_releases_the_lock(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert os.listdir(tmp_path) == [".lock"]
    assert not is_locked(tmp_path)
    with RunFolder(tmp_path).lock():
        assert is_locked(tmp_path)
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {platform.node()}"
    assert os.listdir(tmp_path) == []


def test_waiting_acquires_the_lock_when_the_holder_ends(tmp_path, holder):
    code = "import sys\nfrom helmscope.store.lock import locked\nwith locked(sys.argv[1], wait=True):\n    print('in')"
    with child([sys.executable, "-c", code, tmp_path], stdout=PIPE, text=True) as waiting:
        with pytest.raises(TimeoutExpired):
            waiting.wait(1.0)
        holder.stdin.close()
        assert waiting.communicate(timeout=30)[0] == "in\n"
    assert os.listdir(tmp_path) == []


def test_is_locked_does_not_make_a_run_fail(tmp_path):
    """is_locked holds a shared lock for an instant."""
    descriptor = os.open(tmp_path / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    code = (
        "import sys, time\nfrom helmscope.store.lock import locked\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "with locked(sys.argv[1]):\n    print('in')"
    )
    with child([sys.executable, "-c", code, tmp_path], stdin=PIPE, stdout=PIPE, text=True) as process:
        process.stdout.readline()
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(0.05)
        os.close(descriptor)
        assert process.stdout.read() == "in\n"


def test_an_exception_releases_the_lock(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path):
        raise RuntimeError
    assert not is_locked(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["open", "ftruncate", "pwrite"])
def test_failing_system_call_is_one_sentence(tmp_path, monkeypatch, name):
    def failing(*arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, name, failing)
    with pytest.raises(HelmscopeError) as caught, locked(tmp_path):
        pytest.fail("locked")
    monkeypatch.undo()
    assert str(caught.value) == f"cannot lock {tmp_path}: Read-only file system"
    assert not is_locked(tmp_path)


def test_missing_folder_is_one_sentence(tmp_path):
    with (
        pytest.raises(HelmscopeError, match=r"cannot lock .*/none: No such file or directory$"),
        locked(tmp_path / "none"),
    ):
        pytest.fail("locked")


def test_a_folder_with_only_the_lock_of_a_killed_run_counts_as_empty(tmp_path):
    (tmp_path / ".lock").write_text("process 1 on nowhere")
    assert RunFolder.create(tmp_path) == RunFolder(tmp_path)


# A .lock that helmscope did not write ---------------------------------------------------------------------------------

WORK = "years of work"


def linked(folder: Path, thesis: Path) -> None:
    (folder / ".lock").symlink_to(thesis)


def dangling(folder: Path, thesis: Path) -> None:
    (folder / ".lock").symlink_to(folder / "new")


def second_name(folder: Path, thesis: Path) -> None:
    (folder / ".lock").hardlink_to(thesis)


def own_content(folder: Path, thesis: Path) -> None:
    (folder / ".lock").write_text(WORK)


def long_content(folder: Path, thesis: Path) -> None:
    (folder / ".lock").write_text("process 1 on " + "x" * 1000)


def pipe(folder: Path, thesis: Path) -> None:
    os.mkfifo(folder / ".lock")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (linked, "a symbolic link"),
        (dangling, "a symbolic link"),
        (second_name, "a file with a second hard link"),
        (own_content, "a file with other content"),
        (long_content, "a file with other content"),
        (pipe, "not a regular file"),
    ],
)
@pytest.mark.parametrize("wait", [False, True])
def test_a_file_that_is_not_a_lock_is_refused_and_left_unchanged(tmp_path, make, what, wait):
    thesis, folder = tmp_path / "thesis.txt", tmp_path / "run"
    thesis.write_text(WORK)
    folder.mkdir()
    make(folder, thesis)
    before = os.lstat(folder / ".lock")
    with pytest.raises(HelmscopeError) as caught, locked(folder, wait=wait):
        pytest.fail("locked")
    assert str(caught.value) == (
        f"cannot lock {folder}: {folder}/.lock is {what}, but it must be a lock file that helmscope wrote: move it away"
    )
    after = os.lstat(folder / ".lock")
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert os.listdir(folder) == [".lock"]
    assert thesis.read_text() == WORK


@pytest.mark.parametrize("make", [linked, dangling, pipe])
def test_is_locked_neither_follows_a_link_nor_blocks_on_a_pipe(tmp_path, make):
    (tmp_path / "thesis.txt").write_text(WORK)
    make(tmp_path, tmp_path / "thesis.txt")
    with pytest.raises(
        HelmscopeError, match=r"/\.lock is (a symbolic link|not a regular file), but it must be a lock file"
    ):
        is_locked(tmp_path)


def test_a_file_that_replaced_the_lock_is_not_removed(tmp_path):
    with locked(tmp_path):
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").write_text(WORK)
    assert (tmp_path / ".lock").read_text() == WORK


@pytest.mark.parametrize(
    ("content", "who"),
    [
        ("process 7 on \x1b[2Jbox\x9b", r"process 7 on \x1b[2Jbox\x9b"),
        ("pay\n7", "another process"),
        ("", "another process"),
    ],
)
def test_the_name_of_the_holder_is_escaped(tmp_path, content, who):
    (tmp_path / ".lock").write_text(content)
    with open(tmp_path / ".lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(HelmscopeError) as caught, locked(tmp_path):
            pytest.fail("locked")
    assert str(caught.value) == f"{tmp_path} is in use by {who}: wait until it ends, or stop it"
