"""Names that are similar to one that does not exist, for error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

CLOSE = 0.65  # share of equal letters from which a name is probably what was meant: rk5 for rk4, not log for colour


def containing_names(name: str, allowed: Iterable[str]) -> list[str]:
    """The allowed names that contain ``name`` as a whole word, then those that contain at least four letters of it
    anywhere, each shortest first.

    >>> containing_names("loss", ["plots", "next_token_loss", "flossing"])
    ['next_token_loss', 'flossing']
    """
    asked, found = name.lower(), []
    for each in allowed:
        words = [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+", each)]
        if (len(asked) > 2 and asked in words) or (len(asked) > 3 and asked in each.lower()):
            found.append((asked not in words, len(each), each))
    return [each for _, _, each in sorted(found)]


def close_names(name: str, allowed: Iterable[str], *, cutoff: float = CLOSE, count: int = 1) -> list[str]:
    """The allowed names whose spelling is closest to ``name``, apart from upper and lower case, at most ``count`` of
    those with at least the share ``cutoff`` of equal letters, half for names of one or two letters.

    >>> close_names("sa", ["SA", "save"]), close_names("colour", ["log"])
    (['SA'], [])
    """
    if len(name) < 3:  # one wrong letter of two
        cutoff = min(cutoff, 0.5)
    by_lower: dict[str, list[str]] = {}
    for each in sorted(allowed):
        by_lower.setdefault(each.lower(), []).append(each)
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=count, cutoff=cutoff)
    return [each for lower in close for each in by_lower[lower]][:count]


def similar_names(name: str, allowed: Iterable[str], *, cutoff: float = CLOSE, count: int = 1) -> list[str]:
    """At most ``count`` of the allowed names that ``name`` may stand for: the same in other case, then those that
    contain it, then those spelled alike.

    >>> similar_names("loss", ["plots", "next_token_loss", "LOSS"], count=3)
    ['LOSS', 'next_token_loss', 'plots']
    """
    names = sorted(set(allowed))
    same = [each for each in names if each.lower() == name.lower()]
    containing = [*same, *containing_names(name, names)]
    if containing:
        cutoff = max(cutoff, CLOSE)
    return list(dict.fromkeys([*containing, *close_names(name, names, cutoff=cutoff, count=count)]))[:count]
