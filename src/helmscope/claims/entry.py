"""A claim as data: its statement and source, how it is tried, and the region that decides."""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import fields
from enum import StrEnum

import msgspec

from helmscope.types import HelmscopeError, Region, known_name, whole_number

MAY_BE_EMPTY = ("printed", "corrected")


class Ground(StrEnum):
    """What a claim is tried on: a simulation, or a recorded model.

    >>> Ground("model").name
    'MODEL'
    """

    SIMULATION = "simulation"
    MODEL = "model"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One claim of the catalogue. An entry is pure data and cannot refer to code.

    ``printed`` quotes the source where it is wrong or incomplete, and ``corrected`` is the form that holds; both are
    empty if the source is correct as printed.

    >>> from helmscope.claims.reading import entry
    >>> entry("rate").region.high
    1.000001
    """

    id: str
    statement: str
    source: str
    printed: str
    corrected: str
    decided: tuple[Ground, ...]
    experiment: str
    statistic: str
    null: str
    region: Region
    version: int

    @property
    def hash(self) -> str:
        """SHA-256 of ``content`` as JSON with sorted keys; independent of comments, layout and the order of keys.

        >>> from helmscope.claims.reading import entry
        >>> len(entry("rate").hash)
        64
        """
        return hashlib.sha256(msgspec.json.encode(self.content, order="sorted")).hexdigest()

    @property
    def content(self) -> dict[str, object]:
        """The entry as plain data, ready for JSON; a missing bound of its region is left out.

        >>> from helmscope.claims.reading import entry
        >>> list(entry("jko-step").content["region"])
        ['text', 'low']
        """
        builtins: dict[str, object] = msgspec.to_builtins(self)
        bounds = {"low": self.region.low, "high": self.region.high}
        region = {"text": self.region.text, **{name: bound for name, bound in bounds.items() if bound is not None}}
        return {**builtins, "region": region}


def parse_entry(text: str, name: str) -> Entry:
    """Parse the TOML ``text`` of the file ``name``, ID.toml, into an entry.

    Raises HelmscopeError for invalid TOML, for an unknown or missing key, for a value of the wrong type, and for an id
    that differs from the file name.

    >>> parse_entry('id = "rate"', "rate.toml")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: rate.toml is not a valid entry: Object missing required field `statement`
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HelmscopeError(f"{name} is not TOML: {error}") from None
    # msgspec ignores unknown keys of a dataclass, such as Region
    allowed = {"": Entry.__struct_fields__, "region of ": [field.name for field in fields(Region)]}
    for (where, keys), table in zip(allowed.items(), (raw, raw.get("region")), strict=True):
        for key in table if isinstance(table, dict) else ():
            known_name(f"key of {where}{name}", key, keys)
    decided = raw.get("decided")
    for ground in decided if isinstance(decided, list) else ():
        if isinstance(ground, str):
            known_name(f"ground in decided of {name}", ground, [known.value for known in Ground])
    try:
        entry = msgspec.convert(raw, Entry)
    except msgspec.ValidationError as error:
        raise HelmscopeError(f"{name} is not a valid entry: {error}") from None
    _check_values(entry, name)
    return entry


def _check_values(entry: Entry, name: str) -> None:
    """Raise HelmscopeError for values that have the right type but are not allowed."""
    if name != f"{entry.id}.toml":
        raise HelmscopeError(f"id of {name} is '{entry.id}', but it must be the file's name without .toml")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.id):
        raise HelmscopeError(f"id of {name} must be lower-case words and digits joined by hyphens, such as my-claim")
    if not entry.region.text.strip():
        raise HelmscopeError(f"region.text of {name} is empty, but it must be a text")
    for key in entry.__struct_fields__:
        value = getattr(entry, key)
        if isinstance(value, str) and not value.strip() and key not in MAY_BE_EMPTY:
            raise HelmscopeError(f"{key} of {name} is empty, but it must be a text")
    if not entry.decided or len(set(entry.decided)) < len(entry.decided):
        names = [ground.value for ground in entry.decided]
        raise HelmscopeError(f"decided of {name} is {names}, but it must hold 'simulation', 'model' or both, once each")
    whole_number(f"version of {name}", entry.version, at_least=1)
