"""``Ray``: the engine that runs units on a Ray cluster, or on this machine through Ray."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from helmscope.runs.attempt import Failed, Outcomes, attempt, described, require
from helmscope.runs.limits import Limits
from helmscope.runs.unit import Unit
from helmscope.types import HelmscopeError


@dataclass(frozen=True)
class Ray:
    """Engine that runs ``workers`` units at a time, each with ``threads`` threads, on the Ray cluster at ``address``;
    if that is None, on a local one that exists for the duration of the run. If this process is already connected to
    Ray, that connection is used and left open.

    The workers need the same version of this package, and bitwise equal results need equal CPUs. Memory is not limited
    here but by Ray. Needs ray, from the extra ``cluster``.

    >>> Ray(0)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: workers is 0, but it must be a whole number >= 1
    """

    workers: int
    address: str | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        _ = Limits(threads=self.threads, workers=self.workers)
        if self.address is not None and not isinstance(self.address, str):
            raise HelmscopeError(
                f"address is {self.address!r}, but it must be a str such as 'ray://head:10001' or None"
            )
        require("ray")

    def attempts(self, units: Sequence[Unit]) -> Outcomes:
        """Run the units and yield their outcomes as they complete.

        >>> list(Ray(2).attempts([]))  # doctest: +SKIP
        []
        """
        import ray

        started = not ray.is_initialized()
        if started:
            self._connect()
        try:
            yield from self._outcomes(units)
        finally:
            if started:
                ray.shutdown()

    def _connect(self) -> None:
        import ray

        if self.address is not None:
            _check_reachable(self.address)
            ray.init(self.address)
            return
        # so that the workers can import what this process can
        paths = os.pathsep.join(path or os.curdir for path in sys.path)
        ray.init(
            "local",
            num_cpus=self.workers * self.threads,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
        )

    def _outcomes(self, units: Sequence[Unit]) -> Outcomes:
        import ray

        remote = ray.remote(num_cpus=self.threads)(attempt)
        waiting, running = iter(units), dict[Any, str]()
        try:
            while True:
                for unit in islice(waiting, self.workers - len(running)):
                    running[remote.remote(unit, Limits(threads=self.threads))] = unit.name
                if not running:
                    return
                (ready, *_), _ = ray.wait(list(running))
                name = running.pop(ready)
                try:
                    yield ray.get(ready)
                except ray.exceptions.RayError as error:
                    yield Failed(name, f"Ray lost it: {_reason(error)}", str(error))
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


def _check_reachable(address: str) -> None:
    """Fail early: Ray itself would try for minutes."""
    match = re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+)\]?:([0-9]+)", address)
    try:
        if match:
            socket.create_connection((match[1], int(match[2])), timeout=10).close()
        elif address != "auto":
            raise OSError("no such address")
    except (OSError, OverflowError) as error:
        raise HelmscopeError(
            f"address is '{address}', but no Ray cluster answers there: it must be HOST:PORT, ray://HOST:PORT or auto"
        ) from error


def _reason(error: Exception) -> str:
    """The reason for a failure; that of a task that could not start is in the last line of the error."""
    import ray

    return str(error).splitlines()[-1] if isinstance(error, ray.exceptions.RayTaskError) else described(error)
