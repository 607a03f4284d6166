"""The only writer of files: run folders with a manifest, results as netCDF and verdicts as JSON. Needs no torch."""

from helmscope.store.atomic import replacing, write_bytes
from helmscope.store.manifest import Manifest, hash_bytes, hash_file
from helmscope.store.run_folder import RunFolder

__all__ = ["Manifest", "RunFolder", "hash_bytes", "hash_file", "replacing", "write_bytes"]
