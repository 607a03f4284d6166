"""Verdicts as JSON. An interval is an object, or null where nothing was measured; an infinite end of it is the string
"inf" or "-inf", since JSON has no number for it. A bound that a region does not have is null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from helmscope.store.printable import printable
from helmscope.store.strict_json import Reader, decode, encode, record, text
from helmscope.types import (
    Control,
    Exhibit,
    HelmscopeError,
    Interval,
    Region,
    Ruling,
    Verdict,
    known_name,
    real_number,
    whole_number,
)

T = TypeVar("T")
_INFINITE = {"inf": math.inf, "-inf": -math.inf}


def encode_verdicts(verdicts: Sequence[Verdict]) -> bytes:
    """Verdicts, in order, as JSON that ``decode_verdicts`` reads back; one of the wrong type is refused by its name.

    >>> wide = Interval(2.0, -math.inf, math.inf, n=2)
    >>> verdict = Verdict("c1", Ruling.INCONCLUSIVE, wide, Region(text="t > 1", low=1.0), "ab", "Two are too few.")
    >>> b'"low": "-inf"' in encode_verdicts([verdict])
    True
    """
    data = encode([_raw(asdict(verdict)) for verdict in verdicts], "verdicts")
    decode_verdicts(data)
    return data


def decode_verdicts(data: bytes, what: str = "verdicts") -> tuple[Verdict, ...]:
    """The verdicts that ``encode_verdicts`` wrote. An unknown or missing key, an unknown ruling or a wrong type is
    refused by its name; ``what`` says in that sentence where it stood.

    >>> decode_verdicts(b"[]")
    ()
    """
    raw = decode(data, what)
    if not isinstance(raw, list):
        raise HelmscopeError(f"{what} is a {type(raw).__name__}, but it must be a list of verdicts")
    return tuple(Verdict(**record(item, _READERS, f"{what}[{i}]")) for i, item in enumerate(raw))


def _raw(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_raw(item) for item in value]
    if isinstance(value, dict):
        return {key: _raw(item) for key, item in value.items()}
    if isinstance(value, Ruling):
        return value.value
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _ruling(name: str, value: object) -> Ruling:
    return Ruling(known_name(name, printable(text(name, value)), [ruling.value for ruling in Ruling]))


def _end(name: str, value: object) -> float:
    if isinstance(value, str) and value in _INFINITE:
        return _INFINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise HelmscopeError(f"{name} is {value!r}, but it must be a finite number, 'inf' or '-inf'")
    return float(value)


def _bound(name: str, value: object) -> float | None:
    return None if value is None else real_number(name, value)


def _interval(name: str, value: object) -> Interval | None:
    return None if value is None else _made(Interval, name, record(value, _INTERVAL, name))


def _region(name: str, value: object) -> Region:
    return _made(Region, name, record(value, _REGION, name))


def _made(kind: Callable[..., T], name: str, parts: dict[str, Any]) -> T:
    """What is made of parts that are right one by one; together they may still contradict each other."""
    try:
        return kind(**parts)
    except HelmscopeError as error:
        raise HelmscopeError(f"{name} cannot be read: {error}") from None


def _control(name: str, value: object) -> Control:
    return Control(**record(value, _CONTROL, name))


def _control_or_none(name: str, value: object) -> Control | None:
    return None if value is None else _control(name, value)


def _exhibits(name: str, value: object) -> tuple[Exhibit, ...]:
    if not isinstance(value, list):
        raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be a list of exhibits")
    readers: dict[str, Reader] = {"title": text, "text": text}
    return tuple(Exhibit(**record(item, readers, f"item {i} of {name}")) for i, item in enumerate(value))


def _controls(name: str, value: object) -> tuple[Control, ...]:
    if not isinstance(value, list):
        raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be a list of controls")
    return tuple(_control(f"item {i} of {name}", item) for i, item in enumerate(value))


_INTERVAL: dict[str, Reader] = {
    "estimate": real_number,
    "low": _end,
    "high": _end,
    "n": partial(whole_number, at_least=1),
}
_REGION: dict[str, Reader] = {"text": text, "low": _bound, "high": _bound}
_JUDGED: dict[str, Reader] = {"ruling": _ruling, "interval": _interval, "region": _region}
_CONTROL: dict[str, Reader] = {"what": text, **_JUDGED, "expected": _ruling}
_READERS: dict[str, Reader] = {
    "claim": text,
    **_JUDGED,
    **dict.fromkeys(("entry_hash", "sentence", "where", "subject"), text),
    **dict.fromkeys(("null", "printed"), _control_or_none),
    "also": _controls,
    "exhibits": _exhibits,
}
