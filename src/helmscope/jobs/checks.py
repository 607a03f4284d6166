"""Checks for the fields of a spec: each returns the value in its canonical form or raises a ``HelmscopeError``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from helmscope.types import HelmscopeError, check_integer, check_real, check_times, short_repr

Check = Callable[[str, object], Any]
MAX_TIMES = 1_000_000
MAX_BETAS = 100_000


def number(*, at_least: float = -math.inf, above: float = -math.inf) -> Check:
    """Return a check for finite numbers within the bounds.

    >>> number(at_least=0)("beta", 4)
    4.0
    """
    return lambda name, value: check_real(name, value, at_least=at_least, above=above)


def integer(at_least: int) -> Check:
    """Return a check for integers of at least ``at_least``.

    >>> integer(1)("n", 32)
    32
    """
    return lambda name, value: check_integer(name, value, at_least=at_least)


def optional(check: Check) -> Check:
    """Return a check that accepts None and whatever ``check`` accepts.

    >>> optional(integer(1))("chunk", None) is None
    True
    """
    return lambda name, value: None if value is None else check(name, value)


def boolean(name: str, value: object) -> bool:
    """Check for True or False.

    >>> boolean("causal", True)
    True
    """
    if not isinstance(value, bool):
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be true or false")
    return value


def text(name: str, value: object) -> str:
    """Check for a string that is not blank.

    >>> text("device", "cpu")
    'cpu'
    """
    if not isinstance(value, str) or not value.strip():
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be a nonempty string")
    return value


def path(name: str, value: object) -> str:
    """Check for a name or a path.

    >>> from pathlib import Path
    >>> path("folder", Path("mine"))
    'mine'
    """
    if not isinstance(value, str | Path) or not str(value).strip():
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be a nonempty name or path")
    return str(value)


def items(name: str, value: object, check: Check | None = None) -> Sequence[object]:
    """Check for a list, tuple or array. A single value that passes the ``check`` for its items is shown in a list.

    >>> items("dims", [3, 9])
    [3, 9]
    """
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple):
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be a list{_list_of_one(value, check)}")
    return values


def _list_of_one(value: object, check: Check | None) -> str:
    """An example of a list for the end of a message, if ``value`` may be in one."""
    with suppress(HelmscopeError):
        return "" if check is None else f", such as {short_repr([check('item', value)])}"
    return ""


def list_of(check: Check, *, min_length: int = 0) -> Check:
    """Return a check for lists of at least ``min_length`` values that all pass ``check``.

    >>> list_of(integer(2))("dims", [3, 9])
    (3, 9)
    """

    def checked(name: str, value: object) -> tuple[Any, ...]:
        values = tuple(check(f"{name}[{i}]", item) for i, item in enumerate(items(name, value, check)))
        if len(values) < min_length:
            raise HelmscopeError(f"{name} is {short_repr(value)}, but it must have a length of at least {min_length}")
        return values

    return checked


def times(name: str, value: object) -> str | tuple[float, ...]:
    """Check for increasing times: a list, or a range "FROM:TO:COUNT", which is returned unchanged.

    >>> times("times", [0, 1]), times("times", "0:10:101")
    ((0.0, 1.0), '0:10:101')
    """
    values = check_times(expand_range(name, value, max_count=MAX_TIMES))
    return value if isinstance(value, str) else tuple(values)


def betas(name: str, value: object) -> str | tuple[float, ...]:
    """Check for increasing inverse temperatures: a list, or a range "FROM:TO:COUNT", which is returned unchanged.

    >>> betas("betas", "0.1:9:90")
    '0.1:9:90'
    """
    values = list_of(number(at_least=0), min_length=1)(name, expand_range(name, value, max_count=MAX_BETAS))
    for i in range(1, len(values)):
        if values[i] <= values[i - 1]:
            raise HelmscopeError(f"{name}[{i}] is {values[i]:g} after {values[i - 1]:g}, but {name} must increase")
    return value if isinstance(value, str) else values


def expand_range(name: str, value: object, *, max_count: int = MAX_TIMES) -> list[Any]:
    """The values of a list, or the COUNT evenly spaced values of a range "FROM:TO:COUNT", both ends included.

    >>> expand_range("times", "0:1:3"), expand_range("times", (0.0, 5.0))
    ([0.0, 0.5, 1.0], [0.0, 5.0])
    """
    if not isinstance(value, str):
        return list(items(name, value))
    parts = value.split(":")
    if len(parts) != 3 or not _is_count(parts[2]) or not 2 <= int(parts[2]) <= max_count:
        raise HelmscopeError(
            f"{name} is {short_repr(value)}, but it must be numbers such as 0,1,5 or a range FROM:TO:COUNT such as "
            f"0:9:91, with COUNT from 2 to {max_count}"
        )
    first, last = (check_real(name, parse_number(part)) for part in parts[:2])
    steps = int(parts[2]) - 1
    return [first + (last - first) * k / steps for k in range(steps + 1)]


def parse_number(word: str) -> int | float | str:
    """Parse a number; a word that is not a number is returned unchanged, for a later check to reject by name.

    >>> parse_number("3"), parse_number("0.5"), parse_number("x")
    (3, 0.5, 'x')
    """
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _is_count(word: str) -> bool:
    """Whether a word is an integer short enough to parse: Python is slow on thousands of digits."""
    return word.isascii() and word.isdigit() and len(word) < 20
