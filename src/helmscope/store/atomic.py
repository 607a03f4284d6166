"""Atomic writes: write a temporary file next to the target, sync it, rename it, sync the folder.

A reader sees either the old file or the new one, never a partial file, even after a power failure. A process killed
midway leaves a file ``.NAME.XXXXXXXX.tmp``, which nothing reads.
"""

from __future__ import annotations

import os
import re
import secrets
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helmscope.types import HelmscopeError, short_repr, type_with_article


@contextmanager
def explained(action: str) -> Iterator[None]:
    """Context manager that turns an OSError into a ``HelmscopeError`` "cannot ACTION: REASON".

    >>> with explained("read x.json"):
    ...     open("/no/such/folder/x.json")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: cannot read x.json: No such file or directory
    """
    try:
        yield
    except OSError as error:
        raise HelmscopeError(f"cannot {action}: {error.strerror or error}") from error


def one_line(error: BaseException) -> str:
    r"""The first non-empty line of an error's message; if it ends in a colon, also the lines after it, shortened to 200
    characters.

    >>> one_line(ValueError("\nbad shapes:\n  (2, 3)\n  (4,)")), one_line(ValueError("bad shapes\nhelp"))
    ('bad shapes: (2, 3) (4,)', 'bad shapes')
    """
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return textwrap.shorten(" ".join([first, *others]), 200, placeholder="...") if first.endswith(":") else first


def as_path(name: str, value: str | os.PathLike[str]) -> Path:
    """Convert ``value`` to a Path; raises a ``HelmscopeError`` that names the argument if that is impossible.

    >>> as_path("root", 3)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: root is an int, but it must be a path, as a str or a Path
    """
    try:
        path = Path(value)
    except TypeError:
        raise HelmscopeError(
            f"{name} is {type_with_article(value)}, but it must be a path, as a str or a Path"
        ) from None
    if "\0" in str(path):
        raise HelmscopeError(f"{name} is {short_repr(str(path))}, but a path must not hold the character NUL")
    return path


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager: yields an empty temporary file, which replaces ``path`` atomically when the block ends.

    If the block raises, or the disk is full, the temporary file is removed and the old file stays. Raises
    ``HelmscopeError`` if ``path`` exists and is not a regular file, before anything is written, and for any OSError.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "note.txt")) as temporary:
    ...         _ = temporary.write_text("hello")
    ...     print(os.listdir(folder), Path(folder, "note.txt").read_text())
    ['note.txt'] hello
    """
    path = Path(path)
    with explained(f"write {path}"):
        # otherwise a rename by the superuser would replace /dev/null with a regular file
        if path.exists() and not path.is_file():
            raise HelmscopeError(f"cannot write {path}: it is not a regular file")
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_bytes(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write ``data`` to ``path`` atomically; raises what ``atomic_write`` raises.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bytes(Path(folder, "a.bin"), b"abc")
    ...     Path(folder, "a.bin").read_bytes()
    b'abc'
    """
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)


def make_folder(path: Path) -> bool:
    """Create a folder and its missing parents, syncing each to disk. Returns False if ``path`` already exists: of
    several processes that create the same folder, exactly one gets True.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     make_folder(Path(folder, "a", "b")), make_folder(Path(folder, "a", "b"))
    (True, False)
    """
    with explained(f"make the folder {path}"):
        for parent in reversed(path.parents):
            if not parent.exists():
                parent.mkdir(exist_ok=True)
                sync(parent.parent)
        try:
            path.mkdir()
        except FileExistsError:
            return False
        sync(path.parent)
        return True


def sync(path: Path) -> None:
    """Flush the file or folder ``path`` to disk (fsync); raises OSError.

    >>> sync(Path("."))
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_temporary(name: str) -> bool:
    """Whether a file name is that of a temporary file of ``atomic_write``, such as a killed process leaves.

    >>> is_temporary(".phase.nc.0a1b2c3d.tmp"), is_temporary("phase.nc")
    (True, False)
    """
    return re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", name) is not None
