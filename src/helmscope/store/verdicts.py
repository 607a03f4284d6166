"""Verdicts as JSON. An interval is an object, or null if nothing was measured; an infinite endpoint is the string "inf"
or "-inf", because JSON has no such number. A missing bound of a region is null.
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
    type_with_article,
    whole_number,
)

T = TypeVar("T")
_INFINITE = {"inf": math.inf, "-inf": -math.inf}


def encode_verdicts(verdicts: Sequence[Verdict]) -> bytes:
    """Encode verdicts, in order, as JSON for ``decode_verdicts``; raises ``HelmscopeError`` if a value has the wrong
    type.

    >>> wide = Interval(2.0, -math.inf, math.inf, n=2)
    >>> verdict = Verdict("c1", Ruling.INCONCLUSIVE, wide, Region(text="t > 1", low=1.0), "ab", "Two are too few.")
    >>> b'"low": "-inf"' in encode_verdicts([verdict])
    True
    """
    data = encode([_to_json_data(asdict(verdict)) for verdict in verdicts], "verdicts")
    decode_verdicts(data)
    return data


def decode_verdicts(data: bytes, what: str = "verdicts") -> tuple[Verdict, ...]:
    """Decode the JSON of ``encode_verdicts``. Raises a ``HelmscopeError`` that names an unknown or missing key, an
    unknown ruling or a value of the wrong type; ``what`` is the name of the source in that error.

    >>> decode_verdicts(b"[]")
    ()
    """
    raw = decode(data, what)
    if not isinstance(raw, list):
        raise HelmscopeError(f"{what} is {type_with_article(raw)}, but it must be a list of verdicts")
    return tuple(Verdict(**record(item, _READERS, f"{what}[{i}]")) for i, item in enumerate(raw))


def _to_json_data(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_to_json_data(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_json_data(item) for key, item in value.items()}
    if isinstance(value, Ruling):
        return value.value
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _read_ruling(name: str, value: object) -> Ruling:
    return Ruling(known_name(name, printable(text(name, value)), [ruling.value for ruling in Ruling]))


def _read_endpoint(name: str, value: object) -> float:
    if isinstance(value, str) and value in _INFINITE:
        return _INFINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise HelmscopeError(f"{name} is {value!r}, but it must be a finite number, 'inf' or '-inf'")
    return float(value)


def _read_bound(name: str, value: object) -> float | None:
    return None if value is None else real_number(name, value)


def _read_interval(name: str, value: object) -> Interval | None:
    return None if value is None else _construct(Interval, name, record(value, _INTERVAL, name))


def _read_region(name: str, value: object) -> Region:
    return _construct(Region, name, record(value, _REGION, name))


def _construct(kind: Callable[..., T], name: str, fields: dict[str, Any]) -> T:
    """``kind(**fields)``, where fields that are valid one by one may still contradict each other."""
    try:
        return kind(**fields)
    except HelmscopeError as error:
        raise HelmscopeError(f"{name} cannot be read: {error}") from None


def _read_control(name: str, value: object) -> Control:
    return Control(**record(value, _CONTROL, name))


def _read_optional_control(name: str, value: object) -> Control | None:
    return None if value is None else _read_control(name, value)


def _read_exhibits(name: str, value: object) -> tuple[Exhibit, ...]:
    if not isinstance(value, list):
        raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be a list of exhibits")
    readers: dict[str, Reader] = {"title": text, "text": text}
    return tuple(Exhibit(**record(item, readers, f"item {i} of {name}")) for i, item in enumerate(value))


def _read_controls(name: str, value: object) -> tuple[Control, ...]:
    if not isinstance(value, list):
        raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be a list of controls")
    return tuple(_read_control(f"item {i} of {name}", item) for i, item in enumerate(value))


_INTERVAL: dict[str, Reader] = {
    "estimate": real_number,
    "low": _read_endpoint,
    "high": _read_endpoint,
    "n": partial(whole_number, at_least=1),
}
_REGION: dict[str, Reader] = {"text": text, "low": _read_bound, "high": _read_bound}
_JUDGED: dict[str, Reader] = {"ruling": _read_ruling, "interval": _read_interval, "region": _read_region}
_CONTROL: dict[str, Reader] = {"what": text, **_JUDGED, "expected": _read_ruling}
_READERS: dict[str, Reader] = {
    "claim": text,
    **_JUDGED,
    **dict.fromkeys(("entry_hash", "sentence", "where", "subject"), text),
    **dict.fromkeys(("null", "printed"), _read_optional_control),
    "also": _read_controls,
    "exhibits": _read_exhibits,
}
