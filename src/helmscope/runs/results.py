"""Results as files, each with a checksum: NAME.nc for a Dataset, NAME.bin for bytes, NAME.json for plain data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from helmscope.store.atomic import explained
from helmscope.store.manifest import hash_bytes
from helmscope.store.run_folder import encode_dataset, read_dataset, read_sealed, seal
from helmscope.store.strict_json import decode, encode, plain, record, text
from helmscope.types import HelmscopeError


def encode_result(value: Any) -> tuple[str, bytes]:
    """The ending and the bytes of the file that holds ``value``; equal values give equal bytes.

    >>> ending, data = encode_result({"beta": 4.0})
    >>> ending, data.splitlines()[1:4]
    ('.json', [b'  "result": {', b'    "beta": 4.0', b'  },'])
    """
    if isinstance(value, bytes):
        return ".bin", seal(value)
    if hasattr(value, "data_vars"):
        return ".nc", encode_dataset(value, "keep the result")
    result = plain("the result", value)
    return ".json", encode({"result": result, "sha256": hash_bytes(encode(result, "the result"))}, "the result")


def read_result(path: Path) -> Any:
    """The value of a file of ``encode_result``. One that is torn, damaged or of other origin is a ``HelmscopeError``.

    >>> read_result(Path("none.json"))
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: cannot read none.json: No such file or directory
    """
    return _READERS[path.suffix](path)


def is_whole(path: Path) -> bool:
    """Whether a file is there, and is what ``encode_result`` made.

    >>> is_whole(Path("none.json"))
    False
    """
    check = _read_json if path.suffix == ".json" else read_sealed
    try:
        check(path)
    except HelmscopeError:
        return False
    return True


def result_files(folder: Path, name: str) -> list[Path]:
    """The files that may hold the result of the unit ``name``, whole or not.

    >>> result_files(Path("no-such-folder"), "a")
    []
    """
    return [path for path in (folder / f"{name}{ending}" for ending in _READERS) if path.is_file()]


def _read_json(path: Path) -> Any:
    with explained(f"read {path}"):
        data = path.read_bytes()
    kept = record(decode(data, str(path)), {"result": plain, "sha256": text}, str(path))
    if hash_bytes(encode(kept["result"], str(path))) != kept["sha256"]:
        raise HelmscopeError(f"cannot read {path}: its checksum does not fit")
    return kept["result"]


_READERS: dict[str, Callable[[Path], Any]] = {
    ".nc": read_dataset,
    ".json": _read_json,
    ".bin": lambda path: bytes(read_sealed(path)),
}
