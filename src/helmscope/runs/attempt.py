"""One try at one unit: what a worker does, in whichever process, and what it hands back."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from helmscope.runs.limits import Limits
from helmscope.runs.results import encode_result
from helmscope.runs.unit import Unit
from helmscope.store.atomic import one_line
from helmscope.types import HelmscopeError, MissingExtra


@dataclass(frozen=True)
class Done:
    """The result of the unit ``name``: the ending of its file, and the bytes of its content.

    >>> Done("mean", ".json", b"{}").ending
    '.json'
    """

    name: str
    ending: str
    data: bytes


@dataclass(frozen=True)
class Failed:
    """Why the unit ``name`` has no result, in one sentence, and where it went wrong.

    >>> Failed("mean", "ZeroDivisionError: division by zero").trace
    ''
    """

    name: str
    reason: str
    trace: str = ""


Outcomes = Generator[Done | Failed, None, None]


class Engine(Protocol):
    """Where units run. ``jobs`` is how many at a time, ``threads`` what each may use."""

    @property
    def jobs(self) -> int:
        """Units at a time."""

    @property
    def threads(self) -> int:
        """Threads of one unit."""

    def attempts(self, units: Sequence[Unit]) -> Outcomes:
        """One outcome for every unit, as they come. Closing the iterator stops the workers."""


def attempt(unit: Unit, limits: Limits) -> Done | Failed:
    """Runs a unit under its limits. Whatever the unit raises becomes its outcome, but for an interrupt, which goes on.

    >>> import statistics
    >>> attempt(Unit("mean", statistics.fmean, {"data": []}), Limits()).reason
    'StatisticsError: fmean requires at least one data point'
    """
    try:
        with limits.applied():
            return Done(unit.name, *encode_result(unit.function(**unit.parameters)))
    except (Exception, SystemExit) as error:
        return Failed(unit.name, _reason(error, limits), traceback.format_exc())


def check_engine(engine: object) -> None:
    """Refuses what cannot run units.

    >>> check_engine("processes")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: engine is 'processes', but it must be Serial(), Processes(jobs) or Ray(jobs)
    """
    if isinstance(engine, type) or not hasattr(engine, "attempts"):
        raise HelmscopeError(f"engine is {engine!r}, but it must be Serial(), Processes(jobs) or Ray(jobs)")


def require(package: str) -> None:
    """Refuses an engine whose package is not installed, before any work.

    >>> require("json")
    """
    if find_spec(package) is None:
        raise MissingExtra(package, "cluster")


def described(error: BaseException) -> str:
    """The type of an error and what it says, in one line.

    >>> described(KeyError("a"))
    "KeyError: 'a'"
    """
    said = one_line(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _reason(error: BaseException, limits: Limits) -> str:
    if _is_of_memory(error, near=limits.are_near()):
        return limits.exceeded()
    return str(error) if isinstance(error, HelmscopeError) else described(error)


def _is_of_memory(error: BaseException | None, *, near: bool) -> bool:
    """torch, the loader of libraries and HDF5 each have their own words for a MemoryError; and ``near`` the limit,
    packages that load only in part are said to be missing or to lack a name, or nothing is said.
    """
    words = (
        "can't allocate memory",
        "cannot allocate memory",
        "out of memory",
        "failed to map segment",
        "allocation failed",
    )
    return error is not None and (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (near and isinstance(error, ImportError | SystemError))
        or any(word in str(error).lower() for word in words)
        or _is_of_memory(error.__cause__, near=near)
    )
