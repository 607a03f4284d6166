"""Results as files: NAME.nc for a Dataset, NAME.bin for bytes, NAME.json for plain data.

Each holds a stamp, 64 hexadecimal digits that say which unit of which run it is the result of, and a checksum over
content and stamp. Behind the content of NAME.nc and NAME.bin stand 32 bytes of each; readers of netCDF ignore them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helmscope.store.atomic import explained
from helmscope.store.manifest import hash_bytes
from helmscope.store.sealed import encode_netcdf, load_netcdf, read_sealed, seal
from helmscope.store.strict_json import decode, encode, plain, record, text
from helmscope.types import HelmscopeError

ENDINGS = (".nc", ".json", ".bin")
FOREIGN = "is the result of another unit or of another run"


def encode_result(value: Any) -> tuple[str, bytes]:
    """The ending of the file that holds ``value``, and the bytes of its content; equal values give equal bytes.

    >>> encode_result([4.0])
    ('.json', b'[\\n  4.0\\n]\\n')
    """
    if isinstance(value, bytes):
        return ".bin", value
    if hasattr(value, "data_vars"):
        return ".nc", bytes(encode_netcdf(value, "keep the result"))
    return ".json", encode(plain("the result", value), "the result")


def stamped(ending: str, content: bytes, stamp: str) -> bytes:
    """The bytes of the file for what ``encode_result`` gave, as the result of the unit with this stamp.

    >>> len(stamped(".bin", b"abc", "ab" * 32))
    67
    """
    if ending == ".json":
        kept = {"result": decode(content, "the result"), "stamp": stamp}
        return encode({**kept, "sha256": hash_bytes(encode(kept, "the result"))}, "the result")
    return seal(content, bytes.fromhex(stamp))


def read_result(path: Path, stamp: str) -> Any:
    """The value of a file of ``stamped``. One that is torn or damaged, or that is the result of another unit or of
    another run, is a ``HelmscopeError``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "beta-1.bin")
    ...     _ = path.write_bytes(stamped(".bin", b"abc", "ab" * 32))
    ...     read_result(path, "ab" * 32), fault_of(path, "cd" * 32)
    (b'abc', 'is the result of another unit or of another run')
    """
    content, found = _read(path)
    if found != stamp:
        raise HelmscopeError(f"cannot read {path}: it {FOREIGN}")
    return load_netcdf(path) if path.suffix == ".nc" else content


def fault_of(path: Path, stamp: str) -> str:
    """Why a file is not the result of the unit with this stamp, as the end of a sentence; "" where it is.

    >>> fault_of(Path("none.json"), "ab" * 32)
    'is truncated, damaged or not written by helmscope'
    """
    try:
        return "" if _read(path)[1] == stamp else FOREIGN
    except HelmscopeError:
        return "is truncated, damaged or not written by helmscope"


def result_files(folder: Path, name: str) -> list[Path]:
    """The files that may hold the result of the unit ``name``, whole or not.

    >>> result_files(Path("no-such-folder"), "a")
    []
    """
    return [path for path in (folder / f"{name}{ending}" for ending in ENDINGS) if path.is_file()]


def _read(path: Path) -> tuple[Any, str]:
    """The content of a whole file, that of netCDF not decoded, and the stamp."""
    if path.suffix == ".json":
        return _read_json(path)
    data = read_sealed(path)
    return data[:-32] if path.suffix == ".nc" else bytes(data[:-32]), data[-32:].hex()


def _read_json(path: Path) -> tuple[Any, str]:
    with explained(f"read {path}"):
        data = path.read_bytes()
    kept = record(decode(data, str(path)), {"result": plain, "stamp": text, "sha256": text}, str(path))
    checksum = kept.pop("sha256")
    if hash_bytes(encode(kept, str(path))) != checksum:
        raise HelmscopeError(f"cannot read {path}: its checksum does not fit")
    return kept["result"], kept["stamp"]
