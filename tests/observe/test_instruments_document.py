"""The Python blocks of docs/instruments.md run, and its table names every measurement."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from helmscope.observe import measurement_names

TEXT = (Path(__file__).parents[2] / "docs" / "instruments.md").read_text(encoding="utf8")


def test_the_blocks_run() -> None:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", TEXT, re.S):
        exec(compile(code, "instruments.md", "exec"), names)
    assert set(names["measured"]) == set(measurement_names()) - {"mlp_projection"}  # which needs four prompts
    assert names["means"].attrs["n"] == 3
    assert 0.5 < names["largest"] < 1.5
    assert names["attention"].shape == (12,)
    assert names["exponents"].shape == (2,)
    assert names["worst"].shape == (3,)
    assert 0 < names["over_the_whole_depth"] <= 1
    assert names["page"].axes


def test_every_measurement_has_a_place_in_the_table() -> None:
    for name in measurement_names():
        assert f"`{name}`" in TEXT
