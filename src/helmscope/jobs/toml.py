"""A TOML encoder for flat tables of plain values, which ``tomllib`` reads back unchanged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from helmscope.types import HelmscopeError, short_repr


def encode_toml(values: Mapping[str, object], what: str) -> str:
    r"""Encode a mapping as TOML, one line per key in the given order. None, which TOML does not have, is omitted.
    Values other than bool, int, finite float, str and lists of these raise a ``HelmscopeError`` that names the key and
    ``what``.

    >>> print(encode_toml({"job": "phase", "dims": (8, 32), "delta": 1e-3, "kappa": None}, "the spec"), end="")
    job = "phase"
    dims = [8, 32]
    delta = 0.001
    """
    lines = [
        f"{key} = {_encode_value(value, f'{key} of {what}')}\n" for key, value in values.items() if value is not None
    ]
    return "".join(lines)


def _encode_value(value: object, what: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _encode_string(value, what)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_encode_value(item, what) for item in value)}]"
    raise HelmscopeError(
        f"{what} is {short_repr(value)}, but it must be a string, finite number, boolean or list of them"
    )


def _encode_string(value: str, what: str) -> str:
    """Encode a basic string. JSON escapes the same characters as TOML, except DEL."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise HelmscopeError(f"{what} is {short_repr(value)}, but TOML requires text that UTF-8 can encode") from None
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
