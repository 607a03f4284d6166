"""What every refusal has in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helmscope.types import HelmscopeError


def refused(call: Callable[[], object], *words: str) -> str:
    """The one sentence of the refusal, which holds all the words."""
    with pytest.raises(HelmscopeError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 250
    for word in words:
        assert word in text
    return text
