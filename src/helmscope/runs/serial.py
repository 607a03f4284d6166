"""``Serial``: the engine that runs units in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helmscope.runs.attempt import Outcomes, attempt
from helmscope.runs.limits import Limits
from helmscope.runs.unit import Unit


@dataclass(frozen=True)
class Serial:
    """Engine that runs units one after another in this process, with ``threads`` threads and at most ``max_memory``
    bytes.

    >>> Serial().workers, Serial(max_memory=10**9).max_memory
    (1, 1000000000)
    """

    max_memory: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        _ = self._limits

    @property
    def workers(self) -> int:
        """Always 1.

        >>> Serial().workers
        1
        """
        return 1

    @property
    def _limits(self) -> Limits:
        return Limits(threads=self.threads, max_memory=self.max_memory)

    def attempts(self, units: Sequence[Unit]) -> Outcomes:
        """Run the units and yield their outcomes in order.

        >>> list(Serial().attempts([]))
        []
        """
        return (attempt(unit, self._limits) for unit in units)
