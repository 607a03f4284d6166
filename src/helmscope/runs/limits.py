"""Limits on the threads and the memory of a unit, in whichever process it runs."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from helmscope.types import HelmscopeError, check_integer

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
FLOOR = 64 * 10**6  # bytes; Python with NumPy uses 48 MB, and with less it cannot even report that memory ran out
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(name: str, size: str) -> int:
    """Parse a size such as 500MB, 4GB or 2GiB into bytes; a plain number is bytes. Raises a ``HelmscopeError`` that
    names the argument ``name`` otherwise.

    >>> parse_size("max_memory", "4GB"), parse_size("max_memory", "1.5 GiB")
    (4000000000, 1610612736)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", size.strip(), re.IGNORECASE)
    count = int(float(match[1]) * SIZES[(match[2] or "").lower()]) if match else 0
    if count < 1:
        raise HelmscopeError(f"{name} is '{size[:80]}', but it must be a size such as 500MB, 4GB or 2GiB")
    return count


@dataclass(frozen=True)
class Limits:
    """``threads`` per unit, and ``max_memory`` bytes (None: no limit) divided equally among the ``workers`` units that
    run at a time. Raises ``HelmscopeError`` if that leaves less than 64 MB per unit.

    The number of threads is fixed because it changes the last bits of matrix products.

    >>> Limits(threads=1, max_memory=4 * 10**9, workers=2).share
    2000000000
    """

    threads: int = 1
    max_memory: int | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        for name in ("threads", "workers"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), at_least=1))
        if self.max_memory is not None:
            object.__setattr__(self, "max_memory", check_integer("max_memory", self.max_memory, at_least=1))
        if self.share is not None and self.share < FLOOR:
            remedy = "lower workers or raise max_memory" if self.workers > 1 else "raise max_memory"
            raise HelmscopeError(
                f"max_memory is {self.max_memory} bytes and workers is {self.workers}, but each worker needs at least "
                f"{FLOOR // 10**6} MB for Python and NumPy alone: {remedy}"
            )

    @property
    def share(self) -> int | None:
        """Bytes that one unit may use, including the interpreter and the libraries of its process."""
        return None if self.max_memory is None else self.max_memory // self.workers

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager: enforce the limits on this process; allocating more memory raises MemoryError. A library
        that is first imported in the block keeps this number of threads afterwards.
        """
        with _thread_variables(str(self.threads)), _thread_pools(self.threads), _memory_limit(self.share):
            yield

    def nearly_reached(self) -> bool:
        """Whether this process uses more than half of its share.

        >>> Limits().nearly_reached(), Limits(max_memory=10**15).nearly_reached()
        (False, False)
        """
        return self.share is not None and _bytes_in_use() > self.share / 2

    def exceeded_message(self) -> str:
        """The reason for the failure of a unit that needed more memory.

        >>> Limits(max_memory=4 * 10**9, workers=2).exceeded_message()
        'it needs more memory than its 2000 MB, which is max_memory over 2 workers: lower workers or raise max_memory'
        """
        if self.share is None:
            return "memory ran out: lower workers or make the unit smaller"
        split = (
            f", which is max_memory over {self.workers} workers: lower workers or"
            if self.workers > 1
            else ", max_memory:"
        )
        return f"it needs more memory than its {self.share / 1e6:.0f} MB{split} raise max_memory"


@contextmanager
def _thread_variables(threads: str) -> Iterator[None]:
    """Set the environment variables that libraries read when they are loaded."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, threads))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _thread_pools(threads: int) -> Iterator[None]:
    """Resize the thread pools of libraries that are already loaded and no longer read the environment."""
    pools = [(set_threads, get_threads()) for get_threads, set_threads in _thread_controls()]
    for set_threads, _ in pools:
        set_threads(threads)
    try:
        yield
    finally:
        for set_threads, before in pools:
            set_threads(before)


def _thread_controls() -> Iterator[tuple[Callable[[], int], Callable[[int], None]]]:
    """Getter and setter of the number of threads, for torch and for every OpenBLAS loaded in this process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        yield torch.get_num_threads, torch.set_num_threads
    with open("/proc/self/maps") as maps:  # thousands of lines once torch is loaded, and this runs for every unit
        lines = [line for line in maps if "openblas" in line]
    found = [re.search(r"/.*/[^/]*openblas[^/]*\.so[^/ ]*$", line.rstrip("\n")) for line in lines]
    for library in map(ctypes.CDLL, sorted({match[0] for match in found if match})):
        # OpenBLAS's own name, and those in the wheels of NumPy and SciPy
        for name in ("openblas_{}_num_threads", "scipy_openblas_{}_num_threads", "scipy_openblas_{}_num_threads64_"):
            if hasattr(library, name.format("set")):
                yield getattr(library, name.format("get")), getattr(library, name.format("set"))


def _bytes_in_use() -> int:
    """The memory of this process that RLIMIT_DATA counts."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


@contextmanager
def _memory_limit(share: int | None) -> Iterator[None]:
    if share is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (share if hard == resource.RLIM_INFINITY else min(share, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
