"""The manifest of a run: versions, platform, seed, inputs and parameters, enough to repeat it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import metadata
from typing import Any

from helmscope.store.atomic import explained
from helmscope.store.printable import printable
from helmscope.store.strict_json import Reader, decode, encode, plain, record, text
from helmscope.types import HelmscopeError, check_integer, type_with_article
from helmscope.types.display import ConciseRepr

# a literal, because the code also runs from a source tree, which has no package metadata to read it from
DEPENDENCIES = (
    *("h5netcdf", "h5py", "jaxtyping", "jinja2", "joblib", "matplotlib", "msgspec", "numpy", "plotly", "POT", "ray"),
    *("rich", "safetensors", "scipy", "torch", "transformers", "typer", "xarray"),
)


def hash_bytes(data: bytes) -> str:
    """SHA-256 of ``data`` in hexadecimal.

    >>> hash_bytes(b"abc")[:8]
    'ba7816bf'
    """
    return hashlib.sha256(data).hexdigest()


def hash_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes in hexadecimal, read in blocks; raises ``HelmscopeError`` if it cannot be read.

    >>> hash_file("/dev/null") == hash_bytes(b"")
    True
    """
    with explained(f"read {os.fspath(path)}"), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, kw_only=True)
class Manifest(ConciseRepr):
    """Everything that determines one run. ``collect`` fills in versions, platform and time.

    ``packages`` maps each installed direct dependency to its version, ``created`` is UTC in ISO 8601, ``command`` is
    the command line as a list of words, ``inputs`` maps each input to its SHA-256, and ``parameters`` is any JSON data
    (tuples become lists). Raises a ``HelmscopeError`` that names the field if a value has the wrong type.

    >>> run = dict(seed=0, dtype="float64", device="cpu", threads=1, command=["helmscope", "phase"])
    >>> Manifest.collect(**run, inputs={}, parameters={"times": (1, 2)}).parameters
    {'times': [1, 2]}
    """

    helmscope: str
    python: str
    packages: Mapping[str, str]
    platform: str
    created: str
    command: Sequence[str]
    seed: int
    dtype: str
    device: str
    threads: int
    inputs: Mapping[str, str]
    parameters: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, read in _READERS.items():
            object.__setattr__(self, name, read(name, getattr(self, name)))

    @classmethod
    def collect(
        cls,
        *,
        seed: int,
        dtype: str,
        device: str,
        threads: int,
        command: Sequence[str],
        inputs: Mapping[str, str],
        parameters: Mapping[str, Any],
    ) -> Manifest:
        """The manifest of a run that starts now on this machine.

        >>> run = dict(seed=0, dtype="float64", device="cpu", threads=1, command=["helmscope", "phase"])
        >>> manifest = Manifest.collect(**run, inputs={"texts": hash_bytes(b"hello")}, parameters={"beta": 4.0})
        >>> Manifest.from_json(manifest.to_json()) == manifest
        True
        """
        return cls(
            helmscope=sys.modules["helmscope"].__version__,
            python=platform.python_version(),
            packages=_installed_versions(),
            platform=platform.platform(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            seed=seed,
            dtype=dtype,
            device=device,
            threads=threads,
            inputs=inputs,
            parameters=parameters,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """All fields except time and command line: two runs with equal identities have equal results.

        >>> run = dict(seed=7, dtype="float64", device="cpu", threads=1, inputs={}, parameters={})
        >>> one, two = (Manifest.collect(**run, command=["helmscope", word]) for word in ("phase", "report"))
        >>> one.identity == two.identity, one.identity["seed"]
        (True, 7)
        """
        return {key: value for key, value in asdict(self).items() if key not in ("created", "command")}

    def to_json(self) -> bytes:
        """Encode as JSON; equal manifests give equal bytes.

        >>> run = dict(seed=0, dtype="float64", device="cpu", threads=1, command=["helmscope"])
        >>> Manifest.collect(**run, inputs={}, parameters={}).to_json()[:1]
        b'{'
        """
        return encode(asdict(self), "manifest")

    @classmethod
    def from_json(cls, data: bytes, source: str = "manifest") -> Manifest:
        """Decode the JSON of ``to_json``. Raises a ``HelmscopeError`` that names an unknown or missing key, or a value
        of the wrong type; ``source`` names the file in that error.

        >>> Manifest.from_json(b"{}", "manifest.json")
        Traceback (most recent call last):
        helmscope.types.HelmscopeError: manifest.json has no key 'helmscope', but it must have helmscope, python, ...
        """
        return cls(**record(decode(data, source), _READERS, source))


def _installed_versions() -> dict[str, str]:
    versions = {}
    for name in DEPENDENCIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _read_words(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be a list of str")
    return tuple(text(f"item {i} of {name}", word) for i, word in enumerate(value))


def _read_mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be a mapping from str")
    copy: dict[str, Any] = plain(name, value)
    return copy


def _read_strings(name: str, value: object) -> dict[str, str]:
    return {key: text(f"{printable(key)} of {name}", item) for key, item in _read_mapping(name, value).items()}


def _read_hashes(name: str, value: object) -> dict[str, str]:
    hashes = _read_strings(name, value)
    for key, item in hashes.items():
        if not re.fullmatch("[0-9a-f]{64}", item):
            raise HelmscopeError(
                f"{printable(key)} of {name} is {item[:80]!r}, but it must be a SHA-256 in 64 hexadecimal digits"
            )
    return hashes


def _read_utc_time(name: str, value: object) -> str:
    timestamp = text(name, value)
    try:
        is_utc = datetime.fromisoformat(timestamp).utcoffset() == timedelta(0)
    except ValueError:
        is_utc = False
    if not is_utc:
        raise HelmscopeError(
            f"{name} is {timestamp[:80]!r}, but it must be a time in UTC, such as 2025-01-31T12:00:00+00:00"
        )
    return timestamp


_READERS: dict[str, Reader] = {
    "helmscope": text,
    "python": text,
    "packages": _read_strings,
    "platform": text,
    "created": _read_utc_time,
    "command": _read_words,
    "seed": partial(check_integer, at_least=0),
    "dtype": text,
    "device": text,
    "threads": partial(check_integer, at_least=1),
    "inputs": _read_hashes,
    "parameters": _read_mapping,
}
