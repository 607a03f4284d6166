"""Files with a checksum at their end, so that one which is torn or damaged is never taken for a result."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from helmscope.store.atomic import explained, one_line
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    import xarray as xr


def seal(*parts: bytes | memoryview) -> bytes:
    """The parts one after the other, with their SHA-256, 32 bytes, behind them.

    >>> len(seal(b"abc")), seal(b"a", b"bc") == seal(b"abc")
    (35, True)
    """
    checksum = hashlib.sha256()
    for part in parts:
        checksum.update(part)
    return b"".join((*parts, checksum.digest()))


def read_sealed(path: Path) -> memoryview:
    """The data of a file that ``seal`` closed; a file that is torn, damaged or not of this kind is refused.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.bin").write_bytes(seal(b"abc"))
    ...     bytes(read_sealed(Path(folder, "a.bin")))
    b'abc'
    """
    with explained(f"read {path}"):
        data = memoryview(path.read_bytes())
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise HelmscopeError(f"cannot read {path}: it is truncated or damaged, or something else wrote it")
    return data[:-32]


def encode_netcdf(dataset: xr.Dataset, action: str) -> bytes | memoryview:
    """A netCDF file in memory; equal Datasets give equal bytes. What netCDF cannot hold is refused with
    "cannot ACTION: REASON".

    >>> import xarray as xr
    >>> bytes(encode_netcdf(xr.Dataset({"energy": 0.5}), "keep the energy")[1:4])
    b'HDF'
    """
    checked = as_dataset(dataset)
    # in memory, because HDF5 that writes to a full disk ends the process with a segmentation fault; without the
    # encoding of the file a Dataset came from, which would round its values or change the bytes
    try:
        return checked.drop_encoding().to_netcdf(engine="h5netcdf")
    except Exception as error:
        raise HelmscopeError(f"cannot {action}: {one_line(error) or type(error).__name__}") from error


def load_netcdf(path: Path) -> xr.Dataset:
    """The Dataset of a netCDF file whose seal was checked, in memory, with the file closed. HDF5 ignores what stands
    behind the end of its data.

    >>> load_netcdf(Path("none.nc"))
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: cannot read none.nc: ...
    """
    import xarray as xr

    try:
        return xr.load_dataset(path, engine="h5netcdf")
    except Exception as error:
        raise HelmscopeError(f"cannot read {path}: {one_line(error) or type(error).__name__}") from error


def as_dataset(value: xr.Dataset) -> xr.Dataset:
    """``value`` if it is a Dataset.

    >>> as_dataset({"energy": 0.5})
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: dataset is a dict, but it must be an xarray Dataset
    """
    import xarray as xr

    if not isinstance(value, xr.Dataset):
        raise HelmscopeError(f"dataset is a {type(value).__name__}, but it must be an xarray Dataset")
    return value
