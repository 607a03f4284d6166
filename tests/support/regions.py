"""One-sided regions for tests of rulings."""

from __future__ import annotations

from helmscope.types import Region


def above(low: float) -> Region:
    return Region(text="above", low=low)


def below(high: float) -> Region:
    return Region(text="below", high=high)
