from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from helmscope.store import atomic, atomic_write
from helmscope.store.atomic import is_temporary, make_folder, one_line, write_bytes
from helmscope.types import HelmscopeError
from support.children import run_python


@pytest.fixture
def calls(monkeypatch):
    """The fsync and rename calls in order, with the content of the temporary file at the time of its fsync."""
    made = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        made.append(("fsync", path, None if path.is_dir() else path.read_bytes()))
        fsync(descriptor)

    def recording_replace(source, target):
        made.append(("replace", Path(source), Path(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    return made


def failing(number):
    def call(*arguments):
        raise OSError(number, os.strerror(number))

    return call


def test_write_then_sync_then_rename_then_sync_of_the_folder(tmp_path, calls):
    target = tmp_path / "a.json"
    write_bytes(target, b"new")
    temporary = calls[0][1]
    assert calls == [("fsync", temporary, b"new"), ("replace", temporary, target), ("fsync", tmp_path, None)]
    assert temporary.parent == tmp_path
    assert is_temporary(temporary.name)
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_parents_of_new_folders_are_synced(tmp_path, calls):
    assert make_folder(tmp_path / "a" / "b")
    assert calls == [("fsync", tmp_path, None), ("fsync", tmp_path / "a", None)]


def test_file_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [RuntimeError("midway"), KeyboardInterrupt()])
def test_exception_inside_the_block_keeps_the_old_file(tmp_path, error):
    target = tmp_path / "a"
    target.write_bytes(b"old")
    with pytest.raises(type(error)), atomic_write(target) as temporary:  # noqa: PT012
        temporary.write_bytes(b"half")
        raise error
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("name", "number", "reason"),
    [
        ("replace", errno.EROFS, "Read-only file system"),
        ("fsync", errno.EIO, "Input/output error"),
        ("open", errno.EACCES, "Permission denied"),
    ],
)
def test_failing_call_is_one_sentence_and_leaves_no_temporary(tmp_path, monkeypatch, name, number, reason):
    target = tmp_path / "a"
    target.write_bytes(b"old")
    monkeypatch.setattr(os, name, failing(number))
    with pytest.raises(HelmscopeError) as caught:
        write_bytes(target, b"new")
    monkeypatch.undo()
    assert str(caught.value) == f"cannot write {target}: {reason}"
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_full_disk_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.Path, "write_bytes", failing(errno.ENOSPC))
    with pytest.raises(HelmscopeError, match=r"cannot write .*/a: No space left on device$"):
        write_bytes(tmp_path / "a", b"new")
    assert os.listdir(tmp_path) == []


def test_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(HelmscopeError, match=r"cannot write .*/file/a: Not a directory$"):
        write_bytes(tmp_path / "file" / "a", b"")
    with pytest.raises(HelmscopeError, match=r"cannot write .*/none/a: No such file or directory$"):
        write_bytes(tmp_path / "none" / "a", b"")
    with pytest.raises(HelmscopeError, match=r"cannot make the folder .*/file/a/b: Not a directory$"):
        make_folder(tmp_path / "file" / "a" / "b")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", [os.mkdir, os.mkfifo])
def test_target_that_is_not_a_regular_file_is_refused_and_kept(tmp_path, kind):
    target = tmp_path / "a"
    kind(target)
    with pytest.raises(HelmscopeError, match=r"cannot write .*/a: it is not a regular file$"):
        write_bytes(target, b"")
    assert not target.is_file()
    assert os.listdir(tmp_path) == ["a"]


def test_empty_path_is_refused():
    with pytest.raises(HelmscopeError, match="not a regular file"):
        write_bytes("", b"")


def test_killed_process_leaves_the_old_file_and_a_recognizable_temporary(tmp_path):
    target = tmp_path / "a.nc"
    target.write_bytes(b"old")
    code = (
        "import os, sys\n"
        "from helmscope.store import atomic_write\n"
        "with atomic_write(sys.argv[1]) as temporary:\n"
        "    temporary.write_bytes(b'half')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert run_python(code, target).returncode == -9
    assert target.read_bytes() == b"old"
    assert [is_temporary(name) for name in sorted(os.listdir(tmp_path))] == [True, False]


@pytest.mark.parametrize(
    "name", ["a.nc", ".a.nc", "a.0a1b2c3d.tmp", ".0a1b2c3d.tmp", ".a.0a1b.tmp", ".a.0a1b2c3d.tmp.nc"]
)
def test_other_names_are_not_temporaries(name):
    assert not is_temporary(name)


def test_one_line_is_the_first_line_and_the_rest_if_it_ends_in_a_colon():
    assert one_line(ValueError("first\nsecond:\nthird")) == "first"
    assert one_line(ValueError("\n \nfirst:\n\n  second\nthird")) == "first: second third"
    assert one_line(ValueError()) == ""
    long = one_line(ValueError("first:\n" + "word " * 100))
    assert len(long) <= 200
    assert long.endswith("word...")


def test_store_imports_neither_torch_nor_xarray():
    code = "import sys, helmscope.store; print(sorted({'torch', 'xarray', 'numpy', 'pickle'} & set(sys.modules)))"
    done = run_python(code, check=True)
    assert done.stdout == "[]\n"
