"""Run folders on disk: manifest, lock, netCDF results, JSON verdicts. The only package that writes files; no torch.
``hs.runs`` fills them with the results of units."""

from typing import TYPE_CHECKING

from helmscope.store.atomic import atomic_write
from helmscope.store.lock import is_locked
from helmscope.store.manifest import Manifest, hash_file
from helmscope.store.run_folder import RunFolder
from helmscope.types.lazy import listed_exports

__all__ = ["Manifest", "RunFolder", "atomic_write", "hash_file", "is_locked"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)
