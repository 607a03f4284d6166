"""Verdicts as JSON. A statistic that is not finite is one of the strings "nan", "inf" and "-inf", since JSON has no
number for it and null would not say which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from helmscope.store.printable import printable
from helmscope.store.strict_json import Reader, decode, encode, record, text
from helmscope.types import Control, Exhibit, HelmscopeError, Ruling, Verdict, known_name, whole_number

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_verdicts(verdicts: Sequence[Verdict]) -> bytes:
    """Verdicts, in order, as JSON that ``decode_verdicts`` reads back; one of the wrong type is refused by its name.

    >>> verdict = Verdict("c1", Ruling.IMPOSSIBLE, math.nan, -math.inf, math.inf, 0, "t > 1", "ab", "No such layer.")
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


def _number(name: str, value: object) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise HelmscopeError(f"{name} is {value!r}, but it must be a finite number or one of {', '.join(_NOT_FINITE)}")
    return float(value)


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


_ESTIMATE: dict[str, Reader] = {
    "ruling": _ruling,
    **dict.fromkeys(("statistic", "low", "high", "region_low", "region_high"), _number),
    "n": partial(whole_number, at_least=0),
    "region": text,
}
_CONTROL: dict[str, Reader] = {**_ESTIMATE, "what": text, "expected": _ruling}
_READERS: dict[str, Reader] = {
    "claim": text,
    **_ESTIMATE,
    **dict.fromkeys(("entry_hash", "sentence", "where"), text),
    **dict.fromkeys(("null", "printed"), _control_or_none),
    "also": _controls,
    "exhibits": _exhibits,
}
