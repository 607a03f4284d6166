"""Reads a catalogue of claims: the packaged one, or the TOML files of a user's folder."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from helmscope.claims.entry import Entry, parse_entry
from helmscope.types import HelmscopeError, known_name

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def read_catalogue(folder: str | Path | None = None) -> dict[str, Entry]:
    """Every entry by id, sorted: the packaged claims, or those of ``folder``, which holds one ID.toml per claim.

    What else a user's folder holds is not read here; a folder without entries is refused, and so is an id that the
    packaged catalogue has already. In the packaged catalogue a stray file is refused. The packaged files are read once
    in a process, those of a folder whenever they are asked for.

    >>> len(read_catalogue())
    56
    """
    if folder is None:
        return dict(_packaged())
    if not isinstance(folder, str | Path):
        raise HelmscopeError(f"folder is a {type(folder).__name__}, but it must be a path")
    place = Path(folder)
    if folder == "" or not place.is_dir():
        raise HelmscopeError(f"folder is '{folder}', but it must be a folder that holds one ID.toml per claim")
    entries = _entries(place, [file for file in place.iterdir() if file.name.endswith(".toml")])
    for id in entries:
        if id in _packaged():
            raise HelmscopeError(f"id of {id}.toml in {place} is '{id}', but a packaged claim has that id already")
    return entries


def entry(id: str) -> Entry:
    """The packaged entry of one claim; an unknown id is refused with the nearest one.

    >>> entry("rate").source
    '001'
    """
    return _packaged()[known_name("claim", id, _packaged())]


@functools.cache
def _packaged() -> dict[str, Entry]:
    place = resources.files("helmscope.claims") / "catalogue"
    return _entries(place, list(place.iterdir()))


def _entries(place: Traversable, files: list[Traversable]) -> dict[str, Entry]:
    for file in files:
        if not file.is_file() or not file.name.endswith(".toml"):
            raise HelmscopeError(
                f"'{file.name}' in {place} is a stray file, but a catalogue holds one ID.toml per claim"
            )
    if not files:
        raise HelmscopeError(f"folder is '{place}', but it holds no ID.toml")
    entries = [_parsed(_text(file), file.name) for file in sorted(files, key=lambda file: file.name)]
    return {entry.id: entry for entry in sorted(entries, key=lambda entry: entry.id)}


# by its text, so that a file that has changed is parsed again, whatever its size and time say
_parsed = functools.lru_cache(maxsize=256)(parse_entry)


def _text(file: Traversable) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise HelmscopeError(f"{file.name} is not UTF-8 text, but a TOML file must be") from None
