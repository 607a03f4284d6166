"""The sources of the packaged claims: title, authors, identifier and link."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources

import msgspec

from helmscope.types import one_line_repr


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A source of claims. ``number`` is its short number, ``identifier`` and ``link`` are empty if there is none.

    >>> sources()["perspective"].identifier
    'arXiv:2312.10794v5'
    """

    number: str
    title: str
    authors: str
    date: str
    identifier: str
    link: str

    def __repr__(self) -> str:
        return one_line_repr(f"Source {self.number}: {self.citation}")

    @property
    def citation(self) -> str:
        """Authors, title, identifier and date in one line.

        >>> sources()["additive-transport"].citation.partition(",")[0]
        'J. Rainstar'
        """
        parts = [self.authors, f'"{self.title}"', *([self.identifier] if self.identifier else []), self.date]
        return ", ".join(parts)


@functools.cache
def sources() -> dict[str, Source]:
    """The sources of the packaged claims by key.

    >>> list(sources())[:2]
    ['helmholtz-transformer', 'perspective']
    """
    text = (resources.files("helmscope.claims") / "sources.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Source])


def citation(key: str) -> str:
    """The citation of a source; a key that is not packaged, as in a user's catalogue, is returned unchanged.

    >>> citation("my notes")
    'my notes'
    """
    return sources()[key].citation if key in sources() else key


def short_citation(key: str) -> str:
    """The identifier of a source where it has a public one, else its title; a key that is not packaged is returned
    unchanged.

    >>> short_citation("perspective"), short_citation("mean-field-notes")
    ('arXiv:2312.10794v5', 'Mean-field notes')
    """
    if key not in sources():
        return key
    source = sources()[key]
    return source.identifier if source.link else source.title
