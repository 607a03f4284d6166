"""The Python blocks of docs/instruments.md and docs/instruments_flow.md run, and the table names every measurement."""

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
    assert set(names["measured"]) == set(measurement_names()) - {"mlp_projection"}  # which needs four prompts
    assert names["means"].attrs["n"] == 3
    assert 0.5 < names["largest"] < 1.5
    assert names["attention"].shape == (12,)
    assert names["exponents"].shape == (2,)
    assert names["worst"].shape == (3,)
    assert 0 < names["over_the_whole_depth"] <= 1
    assert names["page"].axes


def test_the_blocks_on_entropy_run() -> None:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (DOCS / "instruments_flow.md").read_text(encoding="utf8"), re.S):
        exec(compile(code, "instruments_flow.md", "exec"), names)
    assert names["exact"].entropy_change.shape == (12, 3)
    assert names["entropies"].gaussian_entropy.notnull().all()
    assert names["energies"].free_energy_change[1:].notnull().all()
    assert names["picture"].axes


def test_every_measurement_has_a_place_in_the_table() -> None:
    for name in measurement_names():
        assert f"`{name}`" in TEXT
