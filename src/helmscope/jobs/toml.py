"""TOML on the way out: flat tables of plain values, which ``tomllib`` reads back as they were."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from helmscope.types import HelmscopeError, shown


def encode_toml(values: Mapping[str, object], what: str) -> str:
    r"""One line per key, in the order given; None, which TOML does not have, is left out. ``what`` begins the sentence
    that refuses anything else than bool, int, finite float, str and lists of them.

    >>> print(encode_toml({"job": "phase", "dims": (8, 32), "delta": 1e-3, "kappa": None}, "the spec"), end="")
    job = "phase"
    dims = [8, 32]
    delta = 0.001
    """
    lines = [f"{key} = {_value(value, f'{key} of {what}')}\n" for key, value in values.items() if value is not None]
    return "".join(lines)


def _value(value: object, what: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value, what)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item, what) for item in value)}]"
    raise HelmscopeError(f"{what} is {shown(value)}, but TOML holds texts, numbers, true, false and lists of them")


def _string(value: str, what: str) -> str:
    """A basic string. JSON escapes the same characters as TOML, but for DEL."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise HelmscopeError(f"{what} is {shown(value)}, but TOML is UTF-8, which cannot write it") from None
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
