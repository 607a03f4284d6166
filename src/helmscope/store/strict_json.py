"""JSON with one spelling on the way out and no tolerance on the way in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from helmscope.store.printable import printable
from helmscope.types import HelmscopeError, known_name

Reader = Callable[[str, object], Any]


def encode(value: object, what: str) -> bytes:
    """``value`` as UTF-8 JSON: sorted keys, indent 2, a newline at the end; equal values give equal bytes.

    NaN, infinity and every type that JSON does not know are refused, with ``what`` as the name. A file name that is
    not UTF-8 reaches Python as lone surrogates; they are written as \\\\udcXX escapes and read back as they were.

    >>> encode({"b": 1, "a": "é"}, "numbers").decode()
    '{\\n  "a": "é",\\n  "b": 1\\n}\\n'
    """
    try:
        text = json.dumps(value, sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise HelmscopeError(f"{what} cannot be written as JSON: {error}") from error
    return f"{text}\n".encode("utf-8", "backslashreplace")


def decode(data: bytes, what: str) -> object:
    """The value of UTF-8 JSON. Refused, with ``what`` as its name: broken text, a key that stands twice, NaN.

    >>> decode(b'{"a": 1, "a": 2}', "manifest.json")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: manifest.json is not valid JSON: the key 'a' stands twice
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise HelmscopeError(f"{what} is not valid JSON: {error}") from error


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen: dict[str, object] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} stands twice")
        seen[key] = value
    return seen


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def record(raw: object, readers: Mapping[str, Reader], what: str) -> dict[str, Any]:
    """The values of a JSON object that must have exactly the keys of ``readers``, each passed through its reader.

    >>> record({"nmae": "a"}, {"name": text}, "x.json")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: unknown key of x.json 'nmae': did you mean 'name'? Allowed: name
    """
    if not isinstance(raw, dict):
        raise HelmscopeError(f"{what} is a {type(raw).__name__}, but it must be an object with named values")
    for key in raw:
        known_name(f"key of {what}", printable(key), readers)
    missing = [key for key in readers if key not in raw]
    if missing:
        raise HelmscopeError(f"{what} has no key '{missing[0]}', but it must have {', '.join(readers)}")
    return {key: read(f"{key} of {what}", raw[key]) for key, read in readers.items()}


def text(name: str, value: object) -> str:
    """``value`` if it is a str.

    >>> text("device", "cpu")
    'cpu'
    """
    if not isinstance(value, str):
        raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be a str")
    return value


def plain(name: str, value: object) -> Any:
    """A copy of ``value`` that JSON gives back unchanged: None, bool, int, finite float, str, lists and mappings with
    str keys, at any depth. A tuple becomes a list.

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
    shown = value if isinstance(value, float) else f"a {type(value).__name__}"
    raise HelmscopeError(f"{name} is {shown}, but it must be made of None, bool, int, finite float, str, list and dict")
