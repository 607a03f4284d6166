"""One attempt at one unit: what a worker does, in any process, and the outcome it returns."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from helmscope.runs.bar import progress_reporting
from helmscope.runs.limits import Limits
from helmscope.runs.results import encode_result
from helmscope.runs.unit import Unit
from helmscope.store.atomic import one_line
from helmscope.types import HelmscopeError, MissingExtra


@dataclass(frozen=True)
class Done:
    """The result of the unit ``name``: the suffix of its file, and the content as bytes.

    >>> Done("mean", ".json", b"{}").suffix
    '.json'
    """

    name: str
    suffix: str
    data: bytes


@dataclass(frozen=True)
class Failed:
    """The failure of the unit ``name``: the reason in one sentence, and the traceback.

    >>> Failed("mean", "ZeroDivisionError: division by zero").trace
    ''
    """

    name: str
    reason: str
    trace: str = ""


Outcomes = Generator[Done | Failed, None, None]


class Engine(Protocol):
    """What runs units: ``Serial``, ``Processes`` or ``Ray``."""

    @property
    def workers(self) -> int:
        """The number of units that run at a time."""

    @property
    def threads(self) -> int:
        """The number of threads of each unit."""

    def attempts(self, units: Sequence[Unit]) -> Outcomes:
        """Run the units and yield one outcome for each as it completes. Closing the generator stops the workers."""


def attempt(unit: Unit, limits: Limits) -> Done | Failed:
    """Run a unit within its limits. An exception of the unit becomes its outcome, except KeyboardInterrupt, which
    propagates.

    >>> import statistics
    >>> attempt(Unit("mean", statistics.fmean, {"data": []}), Limits()).reason
    'StatisticsError: fmean requires at least one data point'
    """
    try:
        with limits.applied(), progress_reporting(False):  # a worker draws no bars, even if it shares a terminal
            return Done(unit.name, *encode_result(unit.function(**unit.parameters)))
    except (Exception, SystemExit) as error:
        return Failed(unit.name, _reason(error, limits), traceback.format_exc())


def check_engine(engine: object) -> None:
    """Refuses what cannot run units.

    >>> check_engine("processes")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: engine is 'processes', but it must be Serial(), Processes(workers) or Ray(workers)
    """
    if isinstance(engine, type) or not hasattr(engine, "attempts"):
        raise HelmscopeError(f"engine is {engine!r}, but it must be Serial(), Processes(workers) or Ray(workers)")


def require(package: str) -> None:
    """Raise ``MissingExtra`` if a package that an engine needs is not installed.

    >>> require("json")
    """
    if find_spec(package) is None:
        raise MissingExtra(package, "cluster")


def described(error: BaseException) -> str:
    """The type and message of an error, in one line.

    >>> described(KeyError("a"))
    "KeyError: 'a'"
    """
    message = one_line(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _reason(error: BaseException, limits: Limits) -> str:
    if _is_memory_error(error, near_limit=limits.nearly_reached()):
        return limits.exceeded_message()
    return str(error) if isinstance(error, HelmscopeError) else described(error)


def _is_memory_error(error: BaseException | None, *, near_limit: bool) -> bool:
    """Whether an error means that memory ran out. torch, the dynamic linker and HDF5 each phrase it differently; near
    the limit, packages that load only partly raise an ImportError or a SystemError without mentioning memory.
    """
    phrases = (
        "can't allocate memory",
        "cannot allocate memory",
        "out of memory",
        "failed to map segment",
        "allocation failed",
    )
    return error is not None and (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (near_limit and isinstance(error, ImportError | SystemError))
        or any(phrase in str(error).lower() for phrase in phrases)
        or _is_memory_error(error.__cause__, near_limit=near_limit)
    )
