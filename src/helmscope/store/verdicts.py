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
    Attachment,
    Control,
    HelmscopeError,
    Interval,
    JudgedCondition,
    Judgment,
    PrintedStatement,
    Provenance,
    Region,
    Ruling,
    Verdict,
    check_integer,
    check_name,
    check_real,
    type_with_article,
)

T = TypeVar("T")
_INFINITE = {"inf": math.inf, "-inf": -math.inf}


def encode_verdicts(verdicts: Sequence[Verdict]) -> bytes:
    """Encode verdicts, in order, as JSON for ``decode_verdicts``; raises ``HelmscopeError`` if a value has the wrong
    type.

    >>> region = Region(text="t > 1", above=1.0)
    >>> wide = JudgedCondition("t", region, Interval(2.0, -math.inf, math.inf, n=2), Ruling.INCONCLUSIVE)
    >>> verdict = Verdict(claim="c1", ruling=Ruling.INCONCLUSIVE, conditions=(wide,), sentence="Two are too few.")
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
    if isinstance(value, Ruling | Judgment):
        return value.value
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _read_endpoint(name: str, value: object) -> float:
    if isinstance(value, str) and value in _INFINITE:
        return _INFINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise HelmscopeError(f"{name} is {value!r}, but it must be a finite number, 'inf' or '-inf'")
    return float(value)


def _read_bound(name: str, value: object) -> float | None:
    return None if value is None else check_real(name, value)


def _construct(kind: Callable[..., T], name: str, fields: dict[str, Any]) -> T:
    """``kind(**fields)``, where fields that are valid one by one may still contradict each other."""
    try:
        return kind(**fields)
    except HelmscopeError as error:
        raise HelmscopeError(f"{name} cannot be read: {error}") from None


def _read_optional(read: Reader) -> Reader:
    return lambda name, value: None if value is None else read(name, value)


def _read_each(read: Reader, kind: str) -> Reader:
    """Reads a list of objects."""

    def read_list(name: str, value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be a list of {kind}")
        return tuple(read(f"item {i} of {name}", item) for i, item in enumerate(value))

    return read_list


def _read_enum(kind: type[Ruling] | type[Judgment]) -> Reader:
    return lambda name, value: kind(check_name(name, printable(text(name, value)), [known.value for known in kind]))


def _read_object(kind: Callable[..., T], readers: dict[str, Reader]) -> Reader:
    return lambda name, value: _construct(kind, name, record(value, readers, name))


_INTERVAL: dict[str, Reader] = {
    "estimate": check_real,
    "low": _read_endpoint,
    "high": _read_endpoint,
    "n": partial(check_integer, at_least=1),
}
_REGION: dict[str, Reader] = {"text": text, **dict.fromkeys(("low", "high", "above", "below"), _read_bound)}
_read_interval = _read_optional(_read_object(Interval, _INTERVAL))
_read_region = _read_object(Region, _REGION)
_read_ruling = _read_enum(Ruling)
_JUDGED: dict[str, Reader] = {
    "name": text,
    "region": _read_region,
    "interval": _read_interval,
    "ruling": _read_ruling,
    "basis": text,
    "replicates_needed": _read_optional(partial(check_integer, at_least=1)),
}
_CONTROL: dict[str, Reader] = {**_JUDGED, "expected": _read_each(_read_ruling, "rulings")}
_PRINTED: dict[str, Reader] = {
    **dict.fromkeys(("text", "place", "reason"), text),
    "by_theory": _read_enum(Judgment),
    "measured": _read_optional(_read_enum(Judgment)),
    "interval": _read_interval,
    "region": _read_optional(_read_region),
}
_PROVENANCE: dict[str, Reader] = {
    "version": partial(check_integer, at_least=1),
    **dict.fromkeys(("entry", "code", "weights", "texts"), text),
}
_READERS: dict[str, Reader] = {
    "ruling": _read_ruling,
    **dict.fromkeys(("claim", "sentence", "setting", "subject"), text),
    "conditions": _read_each(_read_object(JudgedCondition, _JUDGED), "conditions"),
    "controls": _read_each(_read_object(Control, _CONTROL), "controls"),
    "described": _read_each(_read_object(JudgedCondition, _JUDGED), "quantities"),
    "printed": _read_optional(_read_object(PrintedStatement, _PRINTED)),
    "attachments": _read_each(_read_object(Attachment, {"title": text, "text": text}), "attachments"),
    "provenance": _read_object(Provenance, _PROVENANCE),
}
