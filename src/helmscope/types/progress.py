"""Progress of long calls: they call ``progress`` with the share of the work done, from 0 to 1."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias, cast

from helmscope.types.arguments import short_repr
from helmscope.types.errors import HelmscopeError


class Progress(Protocol):
    """A callback that takes the share of the work done, from 0 to 1; any such callable will do.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> shares = []
    >>> _ = integrate(SA(beta=1.0), torch.eye(2), times=[1.0], progress=shares.append)
    >>> shares[-1]
    1.0
    """

    def __call__(self, share: float, /) -> None: ...


ProgressOption: TypeAlias = Progress | Literal[False] | None  # None: a bar where a person can see it; False: nothing


def check_progress(progress: object) -> Progress:
    """``progress``, or a function that does nothing if it is None or False; raises ``HelmscopeError`` for anything else
    that is not callable.

    >>> check_progress(None)(0.5)
    >>> check_progress("bar")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: progress is 'bar', but it must be a callable that takes the share of ...
    """
    if progress is None or progress is False:
        return lambda share: None
    if not callable(progress):
        raise HelmscopeError(
            f"progress is {short_repr(progress)}, but it must be a callable that takes the share of work done, None or "
            "False"
        )
    return cast("Progress", progress)


def sub_progress(progress: Progress, begin: float, end: float) -> Progress:
    """The callback for a part of the work: it maps shares from 0 to 1 to shares from ``begin`` to ``end`` of the whole.

    >>> sub_progress(print, 0.5, 1.0)(0.5)
    0.75
    """
    return lambda share: progress(begin + share * (end - begin))
