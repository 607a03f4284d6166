"""The one way to disk: write a temporary file beside the target, sync it, rename it, sync the folder.

A reader sees the old file or the new one, never a part, also after a power cut. A process killed midway leaves a
``.NAME.XXXXXXXX.tmp`` behind, which nothing here reads.
"""

from __future__ import annotations

import os
import re
import secrets
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helmscope.types import HelmscopeError, shown


@contextmanager
def explained(action: str) -> Iterator[None]:
    """Turns an OSError into one sentence, "cannot ACTION: REASON".

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
    r"""What an error says in its first line that is not empty; where that ends in a colon, what follows too, up to 200
    characters.

    >>> one_line(ValueError("\nbad shapes:\n  (2, 3)\n  (4,)")), one_line(ValueError("bad shapes\nhelp"))
    ('bad shapes: (2, 3) (4,)', 'bad shapes')
    """
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return textwrap.shorten(" ".join([first, *others]), 200, placeholder="...") if first.endswith(":") else first


def as_path(name: str, value: str | os.PathLike[str]) -> Path:
    """``value`` as a path, or a ``HelmscopeError`` that names the argument.

    >>> as_path("root", 3)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: root is a int, but it must be a path, as a str or a Path
    """
    try:
        path = Path(value)
    except TypeError:
        raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be a path, as a str or a Path") from None
    if "\0" in str(path):
        raise HelmscopeError(f"{name} is {shown(str(path))}, but a path must not hold the character NUL")
    return path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields an empty temporary file in the folder of ``path``; when the block ends it takes the place of ``path``.

    If the block raises, or the disk is full, the temporary is removed and the old file stays. A target that is not a
    regular file (a folder, a device) is refused before anything is written. OSErrors become a ``HelmscopeError``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "note.txt")) as temporary:
    ...         _ = temporary.write_text("hello")
    ...     print(os.listdir(folder), Path(folder, "note.txt").read_text())
    ['note.txt'] hello
    """
    path = Path(path)
    with explained(f"write {path}"):
        # without this a superuser's rename would put a plain file in the place of /dev/null
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
    """Puts ``data`` in the place of ``path``, whole or not at all; fails as ``replacing`` does.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bytes(Path(folder, "a.bin"), b"abc")
    ...     Path(folder, "a.bin").read_bytes()
    b'abc'
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def make_folder(path: Path) -> bool:
    """Makes a folder and its missing parents, each synced into the one above. False where ``path`` already exists:
    of two processes that ask for one name, exactly one is told True.

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
    """Waits until the file or folder ``path`` is on disk; raises OSError.

    >>> sync(Path("."))
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_temporary(name: str) -> bool:
    """Whether a file name is that of a temporary which ``replacing`` made, and a killed process may have left.

    >>> is_temporary(".phase.nc.0a1b2c3d.tmp"), is_temporary("phase.nc")
    (True, False)
    """
    return re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", name) is not None
