"""Files of results: NAME.nc for a Dataset, NAME.bin for bytes, NAME.json for plain data.

Each contains a stamp, 64 hexadecimal digits that identify the unit and the run, and a checksum of content and stamp.
NAME.nc and NAME.bin end with both, 32 bytes each; netCDF readers ignore them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helmscope.store.atomic import explained
from helmscope.store.manifest import hash_bytes
from helmscope.store.sealed import encode_netcdf, load_netcdf, read_sealed, seal
from helmscope.store.strict_json import decode, encode, plain, record, text
from helmscope.types import HelmscopeError

SUFFIXES = (".nc", ".json", ".bin")
FOREIGN = "is the result of another unit or of another run"


def encode_result(value: Any) -> tuple[str, bytes]:
    """The suffix of the file for ``value``, and its content as bytes; equal values give equal bytes.

    >>> encode_result([4.0])
    ('.json', b'[\\n  4.0\\n]\\n')
    """
    if isinstance(value, bytes):
        return ".bin", value
    if hasattr(value, "data_vars"):
        return ".nc", bytes(encode_netcdf(value, "keep the result"))
    return ".json", encode(plain("the result", value), "the result")


def stamped(suffix: str, content: bytes, stamp: str) -> bytes:
    """The bytes of the file for suffix and content from ``encode_result``, with a stamp and a checksum.

    >>> len(stamped(".bin", b"abc", "ab" * 32))
    67
    """
    if suffix == ".json":
        data = {"result": decode(content, "the result"), "stamp": stamp}
        return encode({**data, "sha256": hash_bytes(encode(data, "the result"))}, "the result")
    return seal(content, bytes.fromhex(stamp))


def read_result(path: Path, stamp: str) -> Any:
    """Read the value of a file written with ``stamped``. Raises ``HelmscopeError`` if the file is truncated or damaged,
    or is the result of another unit or run.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "beta-1.bin")
    ...     _ = path.write_bytes(stamped(".bin", b"abc", "ab" * 32))
    ...     read_result(path, "ab" * 32), fault_of(path, "cd" * 32)
    (b'abc', 'is the result of another unit or of another run')
    """
    content, found_stamp = _read(path)
    if found_stamp != stamp:
        raise HelmscopeError(f"cannot read {path}: it {FOREIGN}")
    return load_netcdf(path) if path.suffix == ".nc" else content


def fault_of(path: Path, stamp: str) -> str:
    """Why a file is not the result of the unit with this stamp, as the predicate of a sentence; "" if it is.

    >>> fault_of(Path("none.json"), "ab" * 32)
    'is truncated, damaged or not written by helmscope'
    """
    try:
        return "" if _read(path)[1] == stamp else FOREIGN
    except HelmscopeError:
        return "is truncated, damaged or not written by helmscope"


def result_files(folder: Path, name: str) -> list[Path]:
    """The existing files that may hold the result of the unit ``name``, valid or not.

    >>> result_files(Path("no-such-folder"), "a")
    []
    """
    return [path for path in (folder / f"{name}{suffix}" for suffix in SUFFIXES) if path.is_file()]


def _read(path: Path) -> tuple[Any, str]:
    """The content of a valid file (not decoded if it is netCDF) and its stamp."""
    if path.suffix == ".json":
        return _read_json(path)
    data = read_sealed(path)
    return data[:-32] if path.suffix == ".nc" else bytes(data[:-32]), data[-32:].hex()


def _read_json(path: Path) -> tuple[Any, str]:
    with explained(f"read {path}"):
        content = path.read_bytes()
    data = record(decode(content, str(path)), {"result": plain, "stamp": text, "sha256": text}, str(path))
    checksum = data.pop("sha256")
    if hash_bytes(encode(data, str(path))) != checksum:
        raise HelmscopeError(f"cannot read {path}: its checksum does not match")
    return data["result"], data["stamp"]
