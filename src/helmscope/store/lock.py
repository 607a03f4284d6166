"""One writer at a time: a lock that the kernel lets go of when its holder ends, in whatever way."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from helmscope.store.atomic import explained
from helmscope.types import HelmscopeError

LOCK = ".lock"
PATIENCE = 0.2  # seconds; is_locked holds the lock of others for an instant, which must not refuse a run


@contextmanager
def locked(folder: str | os.PathLike[str], *, wait: bool = False) -> Iterator[None]:
    """Holds ``folder`` for this process by flock(2) on FOLDER/.lock; of all processes on the machine one at a time.

    While another holds it, ``wait=True`` waits, else it is refused with the holder's process number and machine. The
    kernel frees the lock of a killed process; the file, which may then stay, means nothing by itself.

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
            path.unlink()
        os.close(descriptor)


def is_locked(folder: str | os.PathLike[str]) -> bool:
    """Whether some process holds ``folder`` now.

    >>> is_locked(".")
    False
    """
    try:
        descriptor = os.open(Path(folder, LOCK), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _obtained(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _acquire(path: Path, wait: bool) -> int:
    deadline = time.monotonic() + PATIENCE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if _obtained(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB):
                if _is_file_of(descriptor, path):
                    return descriptor
            elif time.monotonic() > deadline:
                holder = os.pread(descriptor, 400, 0).decode(errors="replace") or "another process"
                raise HelmscopeError(f"{path.parent} is in use by {holder}: wait until it ends, or stop it")
            else:
                time.sleep(PATIENCE / 20)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _obtained(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    return True


def _is_file_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
