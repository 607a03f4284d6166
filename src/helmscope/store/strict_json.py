"""Canonical JSON encoding and strict decoding."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from helmscope.store.printable import printable
from helmscope.types import HelmscopeError, check_name, type_with_article

Reader = Callable[[str, object], Any]


def encode(value: object, what: str) -> bytes:
    """Encode ``value`` as UTF-8 JSON: sorted keys, indent 2, a newline at the end; equal values give equal bytes.

    Raises a ``HelmscopeError`` that names ``what`` for NaN, infinity and types that JSON does not have. A file name
    that is not UTF-8 reaches Python as lone surrogates; they are written as \\\\udcXX escapes and decoded unchanged.

    >>> encode({"b": 1, "a": "é"}, "numbers").decode()
    '{\\n  "a": "é",\\n  "b": 1\\n}\\n'
    """
    try:
        text = json.dumps(value, sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise HelmscopeError(f"{what} cannot be written as JSON: {error}") from error
    return f"{text}\n".encode("utf-8", "backslashreplace")


def decode(data: bytes, what: str) -> object:
    """Decode UTF-8 JSON. Raises a ``HelmscopeError`` that names ``what`` for invalid JSON, repeated keys and NaN.

    >>> decode(b'{"a": 1, "a": 2}', "manifest.json")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: manifest.json is not valid JSON: the key 'a' appears twice
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise HelmscopeError(f"{what} is not valid JSON: {error}") from error


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    decoded: dict[str, object] = {}
    for key, value in pairs:
        if key in decoded:
            raise ValueError(f"the key {key!r} appears twice")
        decoded[key] = value
    return decoded


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def record(raw: object, readers: Mapping[str, Reader], what: str) -> dict[str, Any]:
    """The values of a JSON object, each converted by its reader; the keys must be exactly those of ``readers``.

    >>> record({"nmae": "a"}, {"name": text}, "x.json")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: unknown key of x.json 'nmae': did you mean 'name'? Allowed: name
    """
    if not isinstance(raw, dict):
        raise HelmscopeError(f"{what} is {type_with_article(raw)}, but it must be an object with named values")
    for key in raw:
        check_name(f"key of {what}", printable(key), readers)
    missing = [key for key in readers if key not in raw]
    if missing:
        raise HelmscopeError(f"{what} has no key '{missing[0]}', but it must have {', '.join(readers)}")
    return {key: read(f"{key} of {what}", raw[key]) for key, read in readers.items()}


def text(name: str, value: object) -> str:
    """``value`` if it is a str; raises ``HelmscopeError`` otherwise.

    >>> text("device", "cpu")
    'cpu'
    """
    if not isinstance(value, str):
        raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be a str")
    return value


def plain(name: str, value: object) -> Any:
    """A copy of ``value`` that survives a JSON round trip unchanged: None, bool, int, finite float, str, lists and
    mappings with str keys, nested to any depth; a tuple becomes a list. Raises ``HelmscopeError`` for other types.

    >>> plain("parameters", {"times": (1, 2.5)})
    {'times': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        keys = [text(f"a key of {name}", key) for key in value]
        return {key: plain(f"{printable(key)} of {name}", value[key]) for key in keys}
    if isinstance(value, list | tuple):
        return [plain(f"item {i} of {name}", item) for i, item in enumerate(value)]
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    shown = value if isinstance(value, float) else type_with_article(value)
    raise HelmscopeError(f"{name} is {shown}, but it must be made of None, bool, int, finite float, str, list and dict")
