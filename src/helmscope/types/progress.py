"""How a long call says how far it has come: it calls ``progress`` with the share of the work done, from 0 to 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from helmscope.types.arguments import shown
from helmscope.types.errors import HelmscopeError

Progress = Callable[[float], None]


def check_progress(progress: object) -> Progress:
    """``progress``, or a function that does nothing where it is None; anything that cannot be called is refused.

    >>> check_progress(None)(0.5)
    >>> check_progress("bar")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: progress is 'bar', but it must be a callable that takes the share of work done
    """
    if progress is None:
        return lambda share: None
    if not callable(progress):
        raise HelmscopeError(
            f"progress is {shown(progress)}, but it must be a callable that takes the share of work done"
        )
    return cast("Progress", progress)


def part_of(progress: Progress, begin: float, end: float) -> Progress:
    """What a part of the work reports to: its share from 0 to 1 is the share from ``begin`` to ``end`` of the whole.

    >>> part_of(print, 0.5, 1.0)(0.5)
    0.75
    """
    return lambda share: progress(begin + share * (end - begin))
