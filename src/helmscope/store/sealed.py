"""Files with a trailing checksum, so that a truncated or damaged file is never mistaken for a result."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from helmscope.store.atomic import explained, one_line
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    import xarray as xr


def seal(*parts: bytes | memoryview) -> bytes:
    """Concatenate the parts and append their SHA-256 (32 bytes).

    >>> len(seal(b"abc")), seal(b"a", b"bc") == seal(b"abc")
    (35, True)
    """
    checksum = hashlib.sha256()
    for part in parts:
        checksum.update(part)
    return b"".join((*parts, checksum.digest()))


def read_sealed(path: Path) -> memoryview:
    """Read a file written with ``seal`` and return its data; raises ``HelmscopeError`` if the checksum is wrong.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.bin").write_bytes(seal(b"abc"))
    ...     bytes(read_sealed(Path(folder, "a.bin")))
    b'abc'
    """
    with explained(f"read {path}"):
        data = memoryview(path.read_bytes())
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise HelmscopeError(f"cannot read {path}: it is truncated, damaged or not written by helmscope")
    return data[:-32]


def encode_netcdf(dataset: xr.Dataset, action: str) -> bytes | memoryview:
    """Encode a Dataset as a netCDF file in memory; equal Datasets give equal bytes. Raises ``HelmscopeError``
    "cannot ACTION: REASON" if netCDF cannot represent it.

    >>> import xarray as xr
    >>> bytes(encode_netcdf(xr.Dataset({"energy": 0.5}), "keep the energy")[1:4])
    b'HDF'
    """
    checked = as_dataset(dataset)
    # in memory, because HDF5 crashes the process with a segmentation fault when it writes to a full disk; without the
    # encoding of the file that the Dataset was read from, which would round its values or change the bytes
    try:
        return checked.drop_encoding().to_netcdf(engine="h5netcdf")
    except Exception as error:
        raise HelmscopeError(f"cannot {action}: {one_line(error) or type(error).__name__}") from error


def load_netcdf(path: Path) -> xr.Dataset:
    """Load a netCDF file, whose checksum was already verified, into memory and close it. HDF5 ignores the bytes after
    the end of its data.

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
    """``value`` if it is an xarray Dataset; raises ``HelmscopeError`` otherwise.

    >>> as_dataset({"energy": 0.5})
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: dataset is a dict, but it must be an xarray Dataset
    """
    import xarray as xr

    if not isinstance(value, xr.Dataset):
        raise HelmscopeError(f"dataset is {type_with_article(value)}, but it must be an xarray Dataset")
    return value
