"""The folder of one run: manifest.json, verdicts.json, NAME.nc for each result, and pictures; with units of work also
units.json and units/, and of a job its spec.toml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from helmscope.store.atomic import as_path, explained, is_temporary, make_folder, write_bytes
from helmscope.store.lock import LOCK, locked
from helmscope.store.manifest import Manifest
from helmscope.store.sealed import as_dataset, encode_netcdf, load_netcdf, read_sealed, seal
from helmscope.store.verdicts import decode_verdicts, encode_verdicts
from helmscope.types import HelmscopeError, Verdict, check_measurement, known_name

if TYPE_CHECKING:
    import xarray as xr

MANIFEST = "manifest.json"
VERDICTS = "verdicts.json"
UNITS = "units.json"
SPEC = "spec.toml"


@dataclass(frozen=True, init=False)
class RunFolder:
    """A folder that one run writes into and everybody reads. Made by ``new`` or ``create``, found again by ``open``;
    ``RunFolder(path)`` alone looks at nothing.

    Every write is atomic (``replacing``) and may be repeated; a later one of the same name takes the place of the
    earlier. Names hold letters, digits, ".", "_" and "-", so that no name leads out of the folder.

    >>> import tempfile
    >>> import xarray as xr
    >>> energy = xr.Dataset({"energy": ("time", [0.5, 0.7]), "energy_stderr": ("time", [0.1, 0.1])}, attrs={"n": 16})
    >>> with tempfile.TemporaryDirectory() as root:
    ...     run = RunFolder.new(root, "energy")
    ...     run.write_results("energy", energy)
    ...     run.read_results("energy").identical(energy)
    True
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", as_path("path", path))

    @classmethod
    def new(cls, root: str | os.PathLike[str], what: str) -> RunFolder:
        """A new folder ROOT/WHAT-YYYYmmdd-HHMMSS (UTC), with -2, -3, ... behind it where that name is taken. Two
        processes never get the same one.
        """
        stem = f"{file_name(what)}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        above = as_path("root", root)
        names = (stem if i == 1 else f"{stem}-{i}" for i in count(1))
        return cls(next(path for path in (above / name for name in names) if make_folder(path)))

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder ``path``, made if it is not there. One that already holds files is refused: they are the
        user's. Temporaries and the lock of a killed process do not count.
        """
        path = as_path("path", path)
        if not make_folder(path):
            with explained(f"use {path} as a run folder"):
                held = sorted(name for name in os.listdir(path) if not is_temporary(name) and name != LOCK)
            if held:
                raise HelmscopeError(f"{path} already holds '{held[0]}', but a new run needs an empty or a new folder")
        return cls(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of an earlier run, known by its manifest."""
        path = as_path("path", path)
        if not (path / MANIFEST).is_file():
            raise HelmscopeError(f"{path} is not a run folder: there is no {MANIFEST} in it")
        return cls(path)

    def lock(self, *, wait: bool = False) -> AbstractContextManager[None]:
        """Keeps other processes out while the block runs; ``locked`` says how."""
        return locked(self.path, wait=wait)

    def write_manifest(self, manifest: Manifest) -> None:
        """Writes manifest.json."""
        write_bytes(self.path / MANIFEST, manifest.to_json())

    def read_manifest(self) -> Manifest:
        """The manifest, decoded strictly."""
        return Manifest.from_json(self._read(MANIFEST), str(self.path / MANIFEST))

    def write_spec(self, text: str) -> None:
        """Writes spec.toml, what the run was asked for."""
        write_bytes(self.path / SPEC, text.encode())

    def has_spec(self) -> bool:
        """Whether there is a spec.toml."""
        return (self.path / SPEC).is_file()

    def read_spec(self) -> str:
        """The text of spec.toml, which is for ``helmscope.jobs`` to decode."""
        try:
            return self._read(SPEC).decode()
        except UnicodeDecodeError:
            raise HelmscopeError(f"cannot read {self.path / SPEC}: it is not UTF-8 text") from None

    def write_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Writes verdicts.json, in the order given."""
        write_bytes(self.path / VERDICTS, encode_verdicts(verdicts))

    def read_verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts, decoded strictly."""
        return decode_verdicts(self._read(VERDICTS), str(self.path / VERDICTS))

    def write_results(self, name: str, measurement: xr.Dataset) -> None:
        """Writes NAME.nc, a Dataset that keeps the Measurement rule. Equal Datasets give equal bytes."""
        self.write_data(name, check_measurement(as_dataset(measurement)))

    def write_data(self, name: str, dataset: xr.Dataset) -> None:
        """Writes NAME.nc, any Dataset that netCDF can hold, such as a trajectory: the netCDF file, which every reader
        of netCDF opens, and behind its end 32 bytes that such a reader ignores, the SHA-256 of all before.
        """
        path = self.path / f"{file_name(name)}.nc"
        write_bytes(path, seal(encode_netcdf(dataset, f"write {path}")))

    def read_results(self, name: str) -> xr.Dataset:
        """The Dataset of NAME.nc, in memory, with the file closed. An unknown name offers the nearest; a file whose
        checksum does not fit is refused before HDF5 sees it, which may never return from a damaged file.
        """
        known_name(f"result in {self.path}", file_name(name), self.results())
        path = self.path / f"{name}.nc"
        read_sealed(path)
        return load_netcdf(path)

    def results(self) -> tuple[str, ...]:
        """The names that ``read_results`` knows, sorted."""
        with explained(f"read {self.path}"):
            found = [name.removesuffix(".nc") for name in os.listdir(self.path) if name.endswith(".nc")]
        return tuple(sorted(name for name in found if _NAME.fullmatch(name)))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Writes a file of any other kind, such as a picture, under its full name."""
        kept = (MANIFEST, VERDICTS, UNITS, SPEC)
        if file_name(name) in kept or name.endswith(".nc"):
            raise HelmscopeError(f"name is '{name}', but the run folder keeps {', '.join(kept)} and *.nc to itself")
        write_bytes(self.path / name, data)

    def _read(self, name: str) -> bytes:
        with explained(f"read {self.path / name}"):
            return (self.path / name).read_bytes()


# 200 characters leave room for the ending and for the temporary's name within the 255 bytes of a file name
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def file_name(name: str) -> str:
    """``name`` if it may stand in a file's name and leads nowhere else.

    >>> file_name("beta-4.0")
    'beta-4.0'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise HelmscopeError(
            f"name is {str(name)[:80]!r}, but it must be 1 to 200 letters, digits, '.', '_' or '-', "
            "and begin with a letter, a digit or '_'"
        )
    return name
