"""The attributes of measured variables: what they are called, and their units."""

from __future__ import annotations

import re

UNITS = re.compile(r"(.+) \((nats|(?:squared )?radians(?: per layer)?|per layer)\)")


def label_attributes(text: str) -> dict[str, str]:
    """``long_name`` and ``units`` of a variable, from a label that ends with its units in parentheses; without units,
    ``long_name`` alone.

    >>> label_attributes("mean tangential drift of a head (radians per layer)")
    {'long_name': 'mean tangential drift of a head', 'units': 'radians per layer'}
    >>> label_attributes("share of the largest weight (of a row)")
    {'long_name': 'share of the largest weight (of a row)'}
    """
    found = UNITS.fullmatch(text)
    return {"long_name": text} if found is None else {"long_name": found[1], "units": found[2]}
