"""The threads and the memory that one unit may use, whichever process it runs in."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from helmscope.types import HelmscopeError, whole_number

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
FLOOR = 64 * 10**6  # bytes; an interpreter with NumPy holds 48 MB, and one with less cannot even say what it lacks
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(name: str, size: str) -> int:
    """Bytes of a size such as 500MB, 4GB or 2GiB; a number alone is bytes. Anything else is refused under ``name``.

    >>> parse_size("max_memory", "4GB"), parse_size("max_memory", "1.5 GiB")
    (4000000000, 1610612736)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", size.strip(), re.IGNORECASE)
    number = int(float(match[1]) * SIZES[(match[2] or "").lower()]) if match else 0
    if number < 1:
        raise HelmscopeError(f"{name} is '{size[:80]}', but it must be a size such as 500MB, 4GB or 2GiB")
    return number


@dataclass(frozen=True)
class Limits:
    """``threads`` for each unit, and ``max_memory`` bytes (None: no limit) shared equally by ``jobs`` units at a time;
    a share below 64 MB is refused.

    The number of threads is fixed because it changes the last bits of matrix products.

    >>> Limits(threads=1, max_memory=4 * 10**9, jobs=2).share
    2000000000
    """

    threads: int = 1
    max_memory: int | None = None
    jobs: int = 1

    def __post_init__(self) -> None:
        for name in ("threads", "jobs"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), at_least=1))
        if self.max_memory is not None:
            object.__setattr__(self, "max_memory", whole_number("max_memory", self.max_memory, at_least=1))
        if self.share is not None and self.share < FLOOR:
            remedy = "lower jobs or raise max_memory" if self.jobs > 1 else "raise max_memory"
            raise HelmscopeError(
                f"max_memory is {self.max_memory} bytes and jobs is {self.jobs}, but each job needs at least "
                f"{FLOOR // 10**6} MB, what Python with NumPy takes: {remedy}"
            )

    @property
    def share(self) -> int | None:
        """Bytes for one unit, together with the interpreter and the libraries of its process."""
        return None if self.max_memory is None else self.max_memory // self.jobs

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Holds this process to the limits while the block runs; more memory is then a MemoryError. A library that the
        block is the first to import keeps its number of threads.
        """
        with _environment(str(self.threads)), _pools(self.threads), _memory(self.share):
            yield

    def are_near(self) -> bool:
        """Whether this process now holds more than half of its share.

        >>> Limits().are_near(), Limits(max_memory=10**15).are_near()
        (False, False)
        """
        return self.share is not None and _in_use() > self.share / 2

    def exceeded(self) -> str:
        """What to say of a unit that wanted more memory.

        >>> Limits(max_memory=4 * 10**9, jobs=2).exceeded()
        'it needs more memory than its 2000 MB, which is max_memory over 2 jobs: lower jobs or raise max_memory'
        """
        if self.share is None:
            return "memory ran out: lower jobs or make the unit smaller"
        split = f", which is max_memory over {self.jobs} jobs: lower jobs or" if self.jobs > 1 else ", max_memory:"
        return f"it needs more memory than its {self.share / 1e6:.0f} MB{split} raise max_memory"


@contextmanager
def _environment(threads: str) -> Iterator[None]:
    """For libraries that are not loaded yet."""
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
def _pools(threads: int) -> Iterator[None]:
    """For libraries that are loaded, and no longer read the environment."""
    pools = [(put, get()) for get, put in _thread_pools()]
    for put, _ in pools:
        put(threads)
    try:
        yield
    finally:
        for put, before in pools:
            put(before)


def _thread_pools() -> Iterator[tuple[Callable[[], int], Callable[[int], None]]]:
    """How to ask torch and every OpenBLAS in this process for its number of threads, and how to set it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        yield torch.get_num_threads, torch.set_num_threads
    with open("/proc/self/maps") as maps:
        loaded = set(re.findall(r"/.*/[^/\n]*openblas[^/\n]*\.so[^/ \n]*$", maps.read(), re.MULTILINE))
    for library in map(ctypes.CDLL, sorted(loaded)):
        # as it calls itself, and as the wheels of NumPy and SciPy rename it
        for name in ("openblas_{}_num_threads", "scipy_openblas_{}_num_threads", "scipy_openblas_{}_num_threads64_"):
            if hasattr(library, name.format("set")):
                yield getattr(library, name.format("get")), getattr(library, name.format("set"))


def _in_use() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


@contextmanager
def _memory(share: int | None) -> Iterator[None]:
    if share is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (share if hard == resource.RLIM_INFINITY else min(share, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
