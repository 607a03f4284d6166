"""The folder of one run: manifest.json, verdicts.json, one NAME.nc per result, and figures; if the run consists of
units, also units.json and units/, and for a job its spec.toml.
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
from helmscope.types import HelmscopeError, Verdict, check_measurement, check_name

if TYPE_CHECKING:
    import xarray as xr

MANIFEST = "manifest.json"
VERDICTS = "verdicts.json"
UNITS = "units.json"
SPEC = "spec.toml"


@dataclass(frozen=True, init=False)
class RunFolder:
    """The folder that one run writes to. ``new`` and ``create`` make one, ``open`` opens that of an earlier run;
    ``RunFolder(path)`` by itself does not access the disk.

    Every write is atomic (``atomic_write``), and a second write under the same name replaces the first. Names consist
    of letters, digits, ".", "_" and "-", so that no name points outside the folder.

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
    def new(cls, root: str | os.PathLike[str], name: str) -> RunFolder:
        """Make a new folder ROOT/NAME-YYYYmmdd-HHMMSS (UTC), with the suffix -2, -3, ... if that name is taken. Two
        processes never get the same folder.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder.new(root, "phase").path.name[:6]
        'phase-'
        """
        stem = f"{file_name(name)}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        parent = as_path("root", root)
        stems = (stem if i == 1 else f"{stem}-{i}" for i in count(1))
        return cls(next(path for path in (parent / stem for stem in stems) if make_folder(path)))

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Make the folder ``path`` unless it exists. Raises ``HelmscopeError`` if it already contains files, other than
        temporary files and the lock of a killed process.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder.create(Path(root, "first")).path.is_dir()
        True
        """
        path = as_path("path", path)
        if not make_folder(path):
            with explained(f"use {path} as a run folder"):
                files = sorted(name for name in os.listdir(path) if not is_temporary(name) and name != LOCK)
            if files:
                raise HelmscopeError(f"{path} already holds '{files[0]}', but a new run needs an empty or a new folder")
        return cls(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Open the folder of an earlier run; raises ``HelmscopeError`` if it has no manifest.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder.open(root)
        Traceback (most recent call last):
        helmscope.types.HelmscopeError: ... is not a run folder: there is no manifest.json in it
        """
        path = as_path("path", path)
        if not (path / MANIFEST).is_file():
            raise HelmscopeError(f"{path} is not a run folder: there is no {MANIFEST} in it")
        return cls(path)

    def lock(self, *, wait: bool = False) -> AbstractContextManager[None]:
        """Context manager: lock the folder against other processes (see ``locked``).

        >>> import tempfile
        >>> from helmscope.store.lock import is_locked
        >>> with tempfile.TemporaryDirectory() as root, RunFolder(root).lock():
        ...     is_locked(root)
        True
        """
        return locked(self.path, wait=wait)

    def write_manifest(self, manifest: Manifest) -> None:
        """Write manifest.json.

        >>> import tempfile
        >>> run = dict(seed=0, dtype="float64", device="cpu", threads=1, command=["helmscope"])
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder(root).write_manifest(Manifest.collect(**run, inputs={}, parameters={}))
        ...     RunFolder(root).read_manifest().dtype
        'float64'
        """
        write_bytes(self.path / MANIFEST, manifest.to_json())

    def read_manifest(self) -> Manifest:
        """Read manifest.json; raises ``HelmscopeError`` if it is missing or invalid.

        >>> import tempfile
        >>> run = dict(seed=0, dtype="float64", device="cpu", threads=1, command=["helmscope"])
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder(root).write_manifest(Manifest.collect(**run, inputs={}, parameters={}))
        ...     RunFolder(root).read_manifest().seed
        0
        """
        return Manifest.from_json(self._read(MANIFEST), str(self.path / MANIFEST))

    def write_spec(self, text: str) -> None:
        """Write spec.toml, the spec of the job that the run executes.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder(root).write_spec("job = 'simulate'")
        ...     RunFolder(root).has_spec()
        True
        """
        write_bytes(self.path / SPEC, text.encode())

    def has_spec(self) -> bool:
        """Whether there is a spec.toml.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder(root).has_spec()
        False
        """
        return (self.path / SPEC).is_file()

    def read_spec(self) -> str:
        """The text of spec.toml, which is for ``helmscope.jobs`` to decode.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     folder = RunFolder.create(root)
        ...     folder.write_spec("n = 8")
        ...     folder.read_spec()
        'n = 8'
        """
        try:
            return self._read(SPEC).decode()
        except UnicodeDecodeError:
            raise HelmscopeError(f"cannot read {self.path / SPEC}: it is not UTF-8 text") from None

    def write_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Write verdicts.json, in the order given.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder(root).write_verdicts([])
        ...     RunFolder(root).read_verdicts()
        ()
        """
        write_bytes(self.path / VERDICTS, encode_verdicts(verdicts))

    def read_verdicts(self) -> tuple[Verdict, ...]:
        """Read verdicts.json; raises ``HelmscopeError`` if it is missing or invalid.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     folder = RunFolder.create(root)
        ...     folder.write_verdicts([])
        ...     folder.read_verdicts()
        ()
        """
        return decode_verdicts(self._read(VERDICTS), str(self.path / VERDICTS))

    def write_results(self, name: str, measurement: xr.Dataset) -> None:
        """Write a Measurement, with its replicates or reduced, to NAME.nc. Equal Datasets give equal bytes.

        >>> import tempfile
        >>> import xarray as xr
        >>> measured = xr.Dataset({"rate": 1.0, "rate_stderr": 0.1}, attrs={"n": 20})
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder(root).write_results("rate", measured)
        ...     RunFolder(root).results()
        ('rate',)
        """
        self.write_data(name, check_measurement(as_dataset(measurement)))

    def write_data(self, name: str, dataset: xr.Dataset) -> None:
        """Write any Dataset that netCDF can represent, such as a trajectory, to NAME.nc. Its SHA-256, 32 bytes, is
        appended to the netCDF data; netCDF readers ignore it.

        >>> import tempfile
        >>> import xarray as xr
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder(root).write_data("states", xr.Dataset({"x": ("time", [0.0, 1.0])}))
        ...     RunFolder(root).results()
        ('states',)
        """
        path = self.path / f"{file_name(name)}.nc"
        write_bytes(path, seal(encode_netcdf(dataset, f"write {path}")))

    def read_results(self, name: str) -> xr.Dataset:
        """Load the Dataset of NAME.nc into memory and close the file. Raises ``HelmscopeError`` if the name is unknown
        or the checksum is wrong; the latter is checked first, because HDF5 may hang on a damaged file.

        >>> import tempfile
        >>> import xarray as xr
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder(root).write_data("states", xr.Dataset({"x": ("time", [0.0, 1.0])}))
        ...     RunFolder(root).read_results("states").x.values.tolist()
        [0.0, 1.0]
        """
        check_name(f"result in {self.path}", file_name(name), self.results())
        path = self.path / f"{name}.nc"
        read_sealed(path)
        return load_netcdf(path)

    def results(self) -> tuple[str, ...]:
        """The names that ``read_results`` accepts, sorted.

        >>> import tempfile
        >>> import xarray as xr
        >>> with tempfile.TemporaryDirectory() as root:
        ...     folder = RunFolder.create(root)
        ...     folder.write_data("states", xr.Dataset({"x": ("time", [0.0])}))
        ...     folder.results()
        ('states',)
        """
        with explained(f"read {self.path}"):
            names = [name.removesuffix(".nc") for name in os.listdir(self.path) if name.endswith(".nc")]
        return tuple(sorted(name for name in names if _NAME.fullmatch(name)))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file of any other kind, such as a figure, under its full name.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     RunFolder.create(root).write_bytes("spec.toml", b"")
        Traceback (most recent call last):
        helmscope.types.HelmscopeError: name is 'spec.toml', but manifest.json, verdicts.json, ...
        """
        reserved = (MANIFEST, VERDICTS, UNITS, SPEC)
        if file_name(name) in reserved or name.endswith(".nc"):
            raise HelmscopeError(f"name is '{name}', but {', '.join(reserved)} and *.nc are reserved")
        write_bytes(self.path / name, data)

    def _read(self, name: str) -> bytes:
        with explained(f"read {self.path / name}"):
            return (self.path / name).read_bytes()


# 200 characters leave room for the suffix and for the name of the temporary file within the 255 bytes of a file name
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def file_name(name: str) -> str:
    """``name`` if it is valid as part of a file name; raises ``HelmscopeError`` otherwise.

    >>> file_name("beta-4.0")
    'beta-4.0'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise HelmscopeError(
            f"name is {str(name)[:80]!r}, but it must be 1 to 200 letters, digits, '.', '_' or '-', "
            "and begin with a letter, a digit or '_'"
        )
    return name
