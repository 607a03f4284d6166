"""Text that came from a file or a file's name, on its way to a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""``text`` on one line, with every character that does not print written as its escape.

    A terminal obeys some of them: escape sequences (C0 and C1), line breaks, marks that reverse the direction of
    writing. Others, such as the lone surrogates of a file name that is not UTF-8, cannot be written at all.

    >>> printable("red \x1b[31m, reversed \u202e, two\nlines")
    'red \\x1b[31m, reversed \\u202e, two\\nlines'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
