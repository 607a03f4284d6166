"""Reads a catalogue of claims: the packaged one, or the TOML files of a user's folder."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from helmscope.claims.entry import Entry, parse_entry
from helmscope.types import HelmscopeError, known_name

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def read_catalogue(folder: str | Path | None = None) -> dict[str, Entry]:
    """Every entry by id, sorted: the packaged claims, or those of ``folder``, which holds one ID.toml a claim.

    What else a user's folder holds is not read here; a folder without entries is refused, and so is an id that the
    packaged catalogue has already. In the packaged catalogue a stray file is refused.

    >>> len(read_catalogue())
    56
    """
    if folder is not None and not isinstance(folder, str | Path):
        raise HelmscopeError(f"folder is a {type(folder).__name__}, but it must be a path")
    if folder == "":
        raise HelmscopeError("folder is '', but it must be a folder that holds one ID.toml a claim")
    place: Traversable = resources.files("helmscope.claims") / "catalogue" if folder is None else Path(folder)
    if not place.is_dir():
        raise HelmscopeError(f"folder is '{place}', but it must be a folder that holds one ID.toml a claim")
    taken = [] if folder is None else list(read_catalogue())
    entries: dict[str, Entry] = {}
    for file in sorted(place.iterdir(), key=lambda each: each.name):
        if folder is not None and not file.name.endswith(".toml"):
            continue
        if not file.is_file() or not file.name.endswith(".toml"):
            raise HelmscopeError(f"'{file.name}' in {place} is a stray file, but a catalogue holds one ID.toml a claim")
        found = parse_entry(_text(file), file.name)
        if found.id in taken:
            raise HelmscopeError(
                f"id of {file.name} in {place} is '{found.id}', but a packaged claim has that id already"
            )
        entries[found.id] = found
    if not entries:
        raise HelmscopeError(f"folder is '{place}', but it holds no ID.toml")
    return dict(sorted(entries.items()))


def entry(id: str) -> Entry:
    """The packaged entry of one claim; an unknown id is refused with the nearest one.

    >>> entry("rate").source
    '001'
    """
    catalogue = read_catalogue()
    return catalogue[known_name("claim", id, catalogue)]


def _text(file: Traversable) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise HelmscopeError(f"{file.name} is not UTF-8 text, but a TOML file must be") from None
