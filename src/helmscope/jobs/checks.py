"""Checks of the fields of a spec: each gives a field's value in its one plain form, or refuses it by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from helmscope.types import HelmscopeError, increasing_times, real_number, shown, whole_number

Check = Callable[[str, object], Any]
MOST_TIMES = 1_000_000
MOST_BETAS = 100_000


def number(*, at_least: float = -math.inf, above: float = -math.inf) -> Check:
    """A finite number within its bound.

    >>> number(at_least=0)("beta", 4)
    4.0
    """
    return lambda name, value: real_number(name, value, at_least=at_least, above=above)


def whole(at_least: int) -> Check:
    """A whole number of at least so much.

    >>> whole(1)("n", 32)
    32
    """
    return lambda name, value: whole_number(name, value, at_least=at_least)


def optional(check: Check) -> Check:
    """None, or what ``check`` allows.

    >>> optional(whole(1))("chunk", None) is None
    True
    """
    return lambda name, value: None if value is None else check(name, value)


def switch(name: str, value: object) -> bool:
    """True or False.

    >>> switch("causal", True)
    True
    """
    if not isinstance(value, bool):
        raise HelmscopeError(f"{name} is {shown(value)}, but it must be true or false")
    return value


def text(name: str, value: object) -> str:
    """A string that says something.

    >>> text("device", "cpu")
    'cpu'
    """
    if not isinstance(value, str) or not value.strip():
        raise HelmscopeError(f"{name} is {shown(value)}, but it must be a text that is not empty")
    return value


def path(name: str, value: object) -> str:
    """A name or a path.

    >>> from pathlib import Path
    >>> path("folder", Path("mine"))
    'mine'
    """
    if not isinstance(value, str | Path) or not str(value).strip():
        raise HelmscopeError(f"{name} is {shown(value)}, but it must be a name or a path that is not empty")
    return str(value)


def items(name: str, value: object) -> Sequence[object]:
    """A list or tuple.

    >>> items("dims", [3, 9])
    [3, 9]
    """
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple):
        raise HelmscopeError(f"{name} is {shown(value)}, but it must be a list")
    return values


def each(check: Check, *, least: int = 0) -> Check:
    """A list of at least so many values, every one of which passes ``check``.

    >>> each(whole(2))("dims", [3, 9])
    (3, 9)
    """

    def checked(name: str, value: object) -> tuple[Any, ...]:
        found = tuple(check(f"{name}[{i}]", item) for i, item in enumerate(items(name, value)))
        if len(found) < least:
            raise HelmscopeError(f"{name} is {shown(value)}, but it must hold at least {least} of them")
        return found

    return checked


def times(name: str, value: object) -> str | tuple[float, ...]:
    """Increasing times: a list, or a range "FROM:TO:COUNT", which stays as it is written.

    >>> times("times", [0, 1]), times("times", "0:10:101")
    ((0.0, 1.0), '0:10:101')
    """
    found = increasing_times(spread(name, value, most=MOST_TIMES))
    return value if isinstance(value, str) else tuple(found)


def betas(name: str, value: object) -> str | tuple[float, ...]:
    """Increasing inverse temperatures, in the same two forms.

    >>> betas("betas", "0.1:9:90")
    '0.1:9:90'
    """
    found = each(number(at_least=0), least=1)(name, spread(name, value, most=MOST_BETAS))
    for i in range(1, len(found)):
        if found[i] <= found[i - 1]:
            raise HelmscopeError(f"{name}[{i}] is {found[i]:g} after {found[i - 1]:g}, but {name} must increase")
    return value if isinstance(value, str) else found


def spread(name: str, value: object, *, most: int = MOST_TIMES) -> list[Any]:
    """The values of a list, or of a range "FROM:TO:COUNT" with COUNT values, both ends included.

    >>> spread("times", "0:1:3"), spread("times", (0.0, 5.0))
    ([0.0, 0.5, 1.0], [0.0, 5.0])
    """
    if not isinstance(value, str):
        return list(items(name, value))
    parts = value.split(":")
    if len(parts) != 3 or not _is_count(parts[2]) or not 2 <= int(parts[2]) <= most:
        raise HelmscopeError(
            f"{name} is {shown(value)}, but it must be numbers such as 0,1,5 or a range FROM:TO:COUNT such as 0:9:91, "
            f"with COUNT from 2 to {most}"
        )
    first, last = (real_number(name, as_number(part)) for part in parts[:2])
    steps = int(parts[2]) - 1
    return [first + (last - first) * k / steps for k in range(steps + 1)]


def as_number(word: str) -> int | float | str:
    """The number that a word is, or the word itself, for whoever refuses it by name.

    >>> as_number("3"), as_number("0.5"), as_number("x")
    (3, 0.5, 'x')
    """
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _is_count(word: str) -> bool:
    """Whether a word is a number that Python reads in an instant, as it does not of thousands of digits."""
    return word.isascii() and word.isdigit() and len(word) < 20
