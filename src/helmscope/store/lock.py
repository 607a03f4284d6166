"""A lock on a folder, for one writer at a time; the kernel releases it however its holder ends."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from helmscope.store.atomic import explained
from helmscope.store.printable import printable
from helmscope.types import HelmscopeError

LOCK = ".lock"
PATIENCE = 0.2  # seconds; is_locked holds a shared lock for an instant, which must not make a run fail
_HOLDER = re.compile(rb"process [0-9]{1,20} on [^\r\n]{0,255}")


@contextmanager
def locked(folder: str | os.PathLike[str], *, wait: bool = False) -> Iterator[None]:
    """Context manager: hold an exclusive lock on ``folder``, by flock(2) on FOLDER/.lock, against other processes of
    this machine.

    If another process holds it, ``wait=True`` waits; otherwise a ``HelmscopeError`` names the holder's process id and
    machine. The kernel releases the lock of a killed process; the file may then remain, and has no effect. If ``.lock``
    was not written by this package (a symbolic link, a file with other content), ``HelmscopeError`` is raised and the
    file is left unchanged.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with locked(folder):
    ...         print(os.listdir(folder))
    ...     os.listdir(folder)
    ['.lock']
    []
    """
    path = Path(folder, LOCK)
    with explained(f"lock {folder}"):
        descriptor = _acquire(path, wait)
    try:
        with explained(f"lock {folder}"):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        yield
    finally:
        # remove the file while still holding it; a process that waits on the removed file notices and opens the next
        with suppress(OSError):
            if _is_open_at(descriptor, path):
                path.unlink()
        os.close(descriptor)


def is_locked(folder: str | os.PathLike[str]) -> bool:
    """Whether a process currently holds the lock of ``folder``. Raises ``HelmscopeError`` if ``.lock`` is not a regular
    file.

    >>> is_locked(".")
    False
    """
    try:
        descriptor = _open(Path(folder, LOCK), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _try_flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _acquire(path: Path, wait: bool) -> int:
    deadline = time.monotonic() + PATIENCE
    while True:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            if _try_flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB):
                if _is_open_at(descriptor, path):
                    _check_lock_file(descriptor, path)
                    return descriptor
            elif time.monotonic() > deadline:
                holder = _holder(descriptor) or "another process"
                raise HelmscopeError(f"{path.parent} is in use by {holder}: wait until it ends, or stop it")
            else:
                time.sleep(PATIENCE / 20)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    """Open the regular file ``path`` without following a symbolic link or blocking on a pipe."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_a_lock(path, "a symbolic link") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_lock(path, "not a regular file")
    return descriptor


def _check_lock_file(descriptor: int, path: Path) -> None:
    """The file will be overwritten and removed, so it must be a lock: new, or left by a process that was killed."""
    status = os.fstat(descriptor)
    if status.st_nlink > 1:
        raise _not_a_lock(path, "a file with a second hard link")
    if status.st_size > 0 and not _holder(descriptor):
        raise _not_a_lock(path, "a file with other content")


def _not_a_lock(path: Path, what: str) -> HelmscopeError:
    return HelmscopeError(
        f"cannot lock {path.parent}: {path} is {what}, but it must be a lock file that helmscope wrote: move it away"
    )


def _holder(descriptor: int) -> str:
    """The holder that the lock file names; "" if it names none."""
    content = os.pread(descriptor, 400, 0)  # longer than any lock file
    return printable(content.decode(errors="replace")) if _HOLDER.fullmatch(content) else ""


def _try_flock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    return True


def _is_open_at(descriptor: int, path: Path) -> bool:
    """Whether ``path`` still is the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
