"""After kills, full disks and read-only folders, the files on disk are complete and the run can be resumed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import sys
from itertools import count
from pathlib import Path

import pytest

from helmscope.runs import run_units
from helmscope.store import RunFolder, is_locked
from helmscope.store.atomic import is_temporary
from helmscope.types import HelmscopeError
from support.children import run_child, run_python, with_tests_on_path
from support.toy_units import manifest, mixture, results

MANIFEST = manifest()


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run")


def test_every_file_is_written_synced_renamed_and_its_folder_synced(folder, monkeypatch):
    calls = []

    def recording(owner, name, describe):
        original = getattr(owner, name)

        def call(*arguments):
            calls.append((name, *describe(*arguments)))
            return original(*arguments)

        monkeypatch.setattr(owner, name, call)

    def synced(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return path, None if path.is_dir() else path.read_bytes()

    recording(Path, "write_bytes", lambda path, data: (path, bytes(data)))
    recording(os, "fsync", synced)
    recording(os, "replace", lambda source, target: (source, target))
    recording(os, "mkdir", lambda path, mode: (Path(path),))
    run_units(mixture(6), folder, manifest=MANIFEST)
    monkeypatch.undo()

    files = ["manifest.json", "units.json", *(f"units/{unit}" for unit in results(folder.path))]
    assert len(files) == 8
    expected = []
    for target in [call[2] for call in calls if call[0] == "replace"]:
        data = target.read_bytes()
        temporary = next(source for name, source, *rest in calls if name == "replace" and rest == [target])
        assert is_temporary(temporary.name)
        expected += [("write_bytes", temporary, data), ("fsync", temporary, data), ("replace", temporary, target)]
        expected.append(("fsync", target.parent, None))
        files.remove(str(target.relative_to(folder.path)))
        if target.name == "units.json":
            expected += [("mkdir", folder.path / "units"), ("fsync", folder.path, None)]
    assert files == []
    assert calls == expected


# A disk that fails ----------------------------------------------------------------------------------------------------


class Failing:
    """Makes the ``last`` system call that changes files fail; a failing write leaves half of its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, last: int) -> None:
        self.number, self.last, self.calls = number, last, 0
        for name in ("open", "fsync", "replace", "mkdir", "unlink", "ftruncate", "pwrite", "listdir"):
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))
        monkeypatch.setattr(fcntl, "flock", self.wrap(fcntl.flock))
        write = Path.write_bytes
        half = lambda path, data: write(path, bytes(data)[: len(data) // 2])  # noqa: E731
        monkeypatch.setattr(Path, "write_bytes", self.wrap(write, half))

    def wrap(self, function, before=lambda *arguments: None):
        def call(*arguments, **options):
            self.calls += 1
            if self.calls == self.last:
                before(*arguments)
                raise OSError(self.number, os.strerror(self.number))
            return function(*arguments, **options)

        return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_a_disk_failure_at_any_call_is_one_sentence_and_leaves_no_partial_file(tmp_path, number):
    calm = RunFolder.create(tmp_path / "calm")
    run_units(mixture(3), calm, manifest=MANIFEST)
    expected = results(calm.path)
    refused = 0
    for last in count(1):
        folder = RunFolder.create(tmp_path / f"run-{last}")
        with pytest.MonkeyPatch.context() as monkeypatch:
            failing = Failing(monkeypatch, number, last)
            try:
                run_units(mixture(3), folder, manifest=MANIFEST)
                sentence = None
            except HelmscopeError as error:
                sentence = str(error)
        if sentence is not None:
            refused += 1
            assert re.fullmatch(rf"cannot [^\n]+: {os.strerror(number)}", sentence)
        assert not is_locked(folder.path)
        for name, data in results(folder.path).items():
            assert is_temporary(name) or data == expected[name]
        run_units(mixture(3), folder, manifest=MANIFEST)
        assert results(folder.path) == expected
        assert sorted(os.listdir(folder.path)) == ["manifest.json", "units", "units.json"]
        if failing.calls < last:
            break
    # all but one: if only removing the lock file fails, the run is already complete
    assert (refused, last - 1) == (43, 44)


def test_a_file_that_outgrows_the_disk_keeps_the_others(folder):
    """The operating system refuses the large file while it is written."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from helmscope.runs import run_units\n"
        "from helmscope.store import RunFolder\n"
        "from support.toy_units import manifest, mixture\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    run_units(mixture(6, size=200_000), RunFolder(Path(sys.argv[1])), manifest=manifest())\n"
        "except ValueError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = run_python(code, folder.path, check=True, env=with_tests_on_path())
    assert done.stdout == f"HelmscopeError cannot write {folder.path}/units/noise-1.bin: File too large\n"
    assert done.stderr == ""
    assert os.listdir(folder.path / "units") == ["numbers-0.json"]
    assert len(run_units(mixture(6, size=200_000), folder, manifest=MANIFEST)) == 6


# Kills ----------------------------------------------------------------------------------------------------------------


def kills(folder: Path, number: int, seed: int) -> dict[str, dict[str, int]]:
    program = Path(__file__).parents[1] / "support" / "killing.py"
    command = [sys.executable, "-W", "error", program, folder, str(number), str(seed)]
    environment = {**with_tests_on_path(), "OMP_NUM_THREADS": "1"}
    done = run_child(command, timeout=1200, env=environment)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_kills_at_any_moment_leave_no_partial_file_and_resuming_gives_the_same_bytes(tmp_path, number):
    counts = kills(tmp_path, number, seed=number)
    for counted in counts.values():
        assert (counted["torn"], counted["foreign"], counted["unequal"]) == (0, 0, 0)
    # one kill at each call that changes files: half of them leave a temporary file, empty, half written or complete
    assert (counts["calls"]["kills"], counts["calls"]["completed"], counts["calls"]["temporaries"]) == (40, 40, 20)
    assert (counts["calls"]["stages"], counts["calls"]["states"]) == (4, 14)
    # the random kills are spread over the whole run
    assert counts["random"]["kills"] == number
    assert counts["random"]["completed"] >= number / 50
    assert counts["random"]["stages"] >= 8
    assert counts["random"]["states"] >= 16
    assert counts["random"]["temporaries"] >= number / 10
