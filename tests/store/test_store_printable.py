"""Characters that a terminal would interpret are escaped."""

from __future__ import annotations

import json
import unicodedata

import pytest

from helmscope.store import Manifest
from helmscope.store.printable import printable
from helmscope.types import HelmscopeError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, é 漢 😀 'quoted' \\", "plain, é 漢 😀 'quoted' \\"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\nb\rc\td\x7f", r"a\nb\rc\td\x7f"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("\u2028\u200b\ufeff\U000e0041", r"\u2028\u200b\ufeff\U000e0041"),
        ("\udcff.txt", r"\udcff.txt"),
    ],
)
def test_non_printable_characters_are_escaped(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_no_control_or_format_character_is_left():
    for code in range(0x110000):
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            assert printable(chr(code)).isascii()


@pytest.mark.parametrize(
    "change", [{"se\x1bed": 1}, {"created": "\x9b"}, {"inputs": {"\x1b": "\x1b"}}, {"packages": {"\n": 1}}]
)
def test_errors_escape_the_content_of_a_manifest(change):
    details = {"seed": 0, "dtype": "float64", "device": "cpu", "threads": 1, "command": []}
    raw = json.loads(Manifest.collect(**details, inputs={}, parameters={}).to_json())
    with pytest.raises(HelmscopeError) as caught:
        Manifest.from_json(json.dumps({**raw, **change}).encode(), "m.json")
    assert str(caught.value).isprintable()
