"""One writer at a time: a lock that the kernel lets go of when its holder ends, in whatever way."""

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
PATIENCE = 0.2  # seconds; is_locked holds the lock of others for an instant, which must not refuse a run
_HOLDER = re.compile(rb"process [0-9]{1,20} on [^\r\n]{0,255}")


@contextmanager
def locked(folder: str | os.PathLike[str], *, wait: bool = False) -> Iterator[None]:
    """Holds ``folder`` for this process by flock(2) on FOLDER/.lock; of all processes on the machine one at a time.

    While another holds it, ``wait=True`` waits, else it is refused with the holder's process number and machine. The
    kernel frees the lock of a killed process; the file, which may then stay, means nothing by itself. A ``.lock`` that
    no process of ours made, such as a link or a file with other content, is refused and stays as it is.

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
        # removed while still held; whoever waits on the removed file sees that and opens the next one
        with suppress(OSError):
            if _is_file_of(descriptor, path):
                path.unlink()
        os.close(descriptor)


def is_locked(folder: str | os.PathLike[str]) -> bool:
    """Whether some process holds ``folder`` now. A ``.lock`` that is not a regular file is refused.

    >>> is_locked(".")
    False
    """
    try:
        descriptor = _open(Path(folder, LOCK), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _obtained(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _acquire(path: Path, wait: bool) -> int:
    deadline = time.monotonic() + PATIENCE
    while True:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            if _obtained(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB):
                if _is_file_of(descriptor, path):
                    _check_ours(descriptor, path)
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


def _open(path: Path, how: int) -> int:
    """Opens the regular file ``path``; a link is not followed, and a pipe does not block."""
    try:
        descriptor = os.open(path, how | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_ours(path, "a symbolic link") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_ours(path, "not a regular file")
    return descriptor


def _check_ours(descriptor: int, path: Path) -> None:
    """What is about to be overwritten and removed must be a lock: new, or left by a process that was killed."""
    found = os.fstat(descriptor)
    if found.st_nlink > 1:
        raise _not_ours(path, "a file that has another name too")
    if found.st_size > 0 and not _holder(descriptor):
        raise _not_ours(path, "a file with other content than a lock has")


def _not_ours(path: Path, what: str) -> HelmscopeError:
    return HelmscopeError(f"cannot lock {path.parent}: {path} is {what}, but a lock is a file of its own: move it away")


def _holder(descriptor: int) -> str:
    """Who wrote the lock; "" where it does not say."""
    said = os.pread(descriptor, 400, 0)  # more than a lock ever holds
    return printable(said.decode(errors="replace")) if _HOLDER.fullmatch(said) else ""


def _obtained(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    return True


def _is_file_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
