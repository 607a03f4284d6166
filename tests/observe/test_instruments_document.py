"""The Python blocks of docs/instruments.md and docs/instruments_flow.md run, and a table names every measurement."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from helmscope.observe import measurement_names

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "instruments.md").read_text(encoding="utf8")


def test_the_blocks_run() -> None:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", TEXT, re.S):
        exec(compile(code, "instruments.md", "exec"), names)
    assert set(names["measured"]) == set(measurement_names()) - {"mlp_projection", "jko_layer"}  # four prompts
    assert names["means"].attrs["n"] == 3
    assert 0.5 < names["largest"] < 1.5
    assert names["attention"].shape == (12,)
    assert names["exponents"].shape == (2,)
    assert names["worst"].shape == (3,)
    assert 0 < names["over_the_whole_depth"] <= 1
    assert names["page"].axes


def test_the_blocks_about_flows_run() -> None:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (DOCS / "instruments_flow.md").read_text(encoding="utf8"), re.S):
        exec(compile(code, "instruments_flow.md", "exec"), names)
    for name in ("change", "constant", "share", "closed"):
        assert names[name].shape == (12,)
    assert float(names["change"].mean()) > 0
    assert 0.1 < float(names["share"].mean()) < 0.6


def test_every_measurement_has_a_place_in_the_table() -> None:
    for name in measurement_names():
        assert f"`{name}`" in TEXT
