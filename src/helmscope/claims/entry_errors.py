"""Errors of msgspec about the TOML file of a claim, as sentences that name file, key, value and what is allowed."""

from __future__ import annotations

import re
from typing import Any

from helmscope.types import short_repr

KINDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "a text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table of keys and values",
}
EXAMPLES = {
    "statement": 'statement = "Tokens meet."',
    "conditions": "conditions = [{ low = 0.8 }]",
    "name": 'name = "random starts"',
    "place": 'place = "Theorem 2"',
    "judgment": 'judgment = "true, not sharp"',
    "reason": 'reason = "The constant can be lower."',
    "version": "version = 1",
}
PATH = r"(?: - at `(?P<path>[^`]+)`)?"


def type_error_sentence(message: str, raw: dict[str, Any], file: str) -> str:
    """The sentence for a message of msgspec about the content ``raw`` of a file; ``file`` is its name. A message of
    another form is kept.

    >>> type_error_sentence("Expected `float | null`, got `str` - at `$.low`", {"low": "x"}, "mine.toml")
    "low of mine.toml is 'x', but it must be a number"
    """
    missing = re.fullmatch(rf"Object missing required field `(?P<key>\w+)`{PATH}", message)
    if missing:
        key, where = missing["key"], _key_of(missing["path"])
        example = f", such as {EXAMPLES[key]}" if key in EXAMPLES else ""
        return f"{f'{where} of ' if where else ''}{file} has no {key}, but it must have one{example}"
    wrong = re.fullmatch(rf"Expected `(?P<kinds>[^`]+)`, got `(?P<got>[^`]+)`{PATH}", message)
    enum = re.fullmatch(rf"Invalid enum value .+?{PATH}", message)
    found = wrong or enum
    if found is None:
        return f"{file} is not a valid entry: {message}"
    names = [kind for kind in wrong["kinds"].split(" | ") if kind != "null"] if wrong else []
    allowed = " or ".join(KINDS.get(kind, kind) for kind in names) or "simulation or model"
    key = _key_of(found["path"])
    if "..." in key:  # msgspec does not name the key of a table
        key, shown = f"a value in {key.partition('[')[0]}", f"of type {found['got']}" if wrong else "unknown"
    else:
        shown = short_repr(_value_at(raw, key))
    return f"{key} of {file} is {shown}, but it must be {allowed}"


def _key_of(path: str | None) -> str:
    """The key that a path such as "$.conditions[0].low" leads to, written from the top of the file."""
    return (path or "$").removeprefix("$").removeprefix(".")


def _value_at(raw: Any, key: str) -> Any:
    """The value of a key such as "conditions[0].low"."""
    for word in re.findall(r"\w+", key):
        raw = raw[int(word)] if isinstance(raw, list) else raw[word]
    return raw
