"""Reads the packaged catalogue of claims, or the TOML files of a user's folder."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from helmscope.claims.entry import Entry, parse_entry
from helmscope.types import HelmscopeError, check_name, type_with_article

LISTED_BY = "`helmscope claims list`"

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def read_catalogue(claims_folder: str | Path | None = None) -> dict[str, Entry]:
    """All entries by id, in sorted order: the packaged claims, or those of ``claims_folder``, which holds one ID.toml
    each.

    Other files in a user's folder are ignored. Raises HelmscopeError for a folder without entries, for an id that a
    packaged claim already has, and for a stray file in the packaged catalogue. The packaged files are read once per
    process, those of a folder on every call.

    >>> len(read_catalogue())
    69
    """
    if claims_folder is None:
        return dict(_packaged_entries())
    if not isinstance(claims_folder, str | Path):
        raise HelmscopeError(f"claims_folder is {type_with_article(claims_folder)}, but it must be a path")
    path = Path(claims_folder)
    if claims_folder == "" or not path.is_dir():
        raise HelmscopeError(
            f"claims_folder is '{claims_folder}', but it must be a folder that holds one ID.toml per claim"
        )
    entries = _read_entries(path, [file for file in path.iterdir() if file.name.endswith(".toml")])
    for id in entries:
        if id in _packaged_entries():
            raise HelmscopeError(f"id of {id}.toml in {path} is '{id}', but a packaged claim has that id already")
    return entries


def check_claim(claim: str, claims_folder: str | Path | None = None) -> str:
    """``claim`` if it is in the catalogue, or in ``claims_folder``; raises HelmscopeError otherwise, with similar ids,
    or with the place of the list and how to name the folder of a claim of one's own.

    >>> check_claim("rate")
    'rate'
    """
    entries = read_catalogue(claims_folder)
    try:
        listed_by = LISTED_BY if claims_folder is None else ""
        return check_name("claim", claim, entries, listed_by=listed_by)
    except HelmscopeError as error:
        if claims_folder is not None or "did you mean" in str(error):
            raise
        raise HelmscopeError(
            f"{error}; for your own claim pass `claims_folder=` (`--from` on the command line)"
        ) from None


def entry(id: str) -> Entry:
    """The packaged entry of a claim; an unknown id raises HelmscopeError that suggests the nearest one.

    >>> entry("rate").source
    'perspective'
    """
    return _packaged_entries()[check_name("claim", id, _packaged_entries(), listed_by=LISTED_BY)]


@functools.cache
def _packaged_entries() -> dict[str, Entry]:
    folder = resources.files("helmscope.claims") / "catalogue"
    return _read_entries(folder, list(folder.iterdir()))


def _read_entries(folder: Traversable, files: list[Traversable]) -> dict[str, Entry]:
    for file in files:
        if not file.is_file() or not file.name.endswith(".toml"):
            raise HelmscopeError(
                f"'{file.name}' in {folder} is a stray file, but a catalogue holds one ID.toml per claim"
            )
    if not files:
        raise HelmscopeError(f"claims_folder is '{folder}', but it holds no ID.toml")
    entries = [_parse_cached(_read_text(file), file.name) for file in sorted(files, key=lambda file: file.name)]
    return {entry.id: entry for entry in sorted(entries, key=lambda entry: entry.id)}


# keyed by the text, so that a changed file is parsed again even if its size and modification time stay the same
_parse_cached = functools.lru_cache(maxsize=256)(parse_entry)


def _read_text(file: Traversable) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise HelmscopeError(f"{file.name} is not UTF-8 text, but a TOML file must be") from None
