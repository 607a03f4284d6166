"""Escapes for text from files and file names before it is printed on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""``text`` on one line, with every non-printable character replaced by its escape.

    A terminal interprets some of these characters: escape sequences (C0 and C1), line breaks, marks that reverse the
    direction of writing. Others, such as the lone surrogates of a file name that is not UTF-8, cannot be encoded.

    >>> printable("red \x1b[31m, reversed \u202e, two\nlines")
    'red \\x1b[31m, reversed \\u202e, two\\nlines'
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
