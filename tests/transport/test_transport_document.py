"""The Python blocks of docs/transport.md run, section by section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

SECTIONS = re.split(r"(?m)^## ", (Path(__file__).parents[2] / "docs" / "transport.md").read_text(encoding="utf8"))[1:]


def run_section(*titles: str) -> dict[str, Any]:
    """Run the blocks of sections, in order, and return the names that they define."""
    names: dict[str, Any] = {}
    for title in titles:
        (section,) = (text for text in SECTIONS if text.startswith(title))
        for code in re.findall(r"```python\n(.*?)```", section, re.S):
            exec(compile(code, title, "exec"), names)
    return names


def test_distances() -> None:
    names = run_section("Distances")
    assert names["plan"].ok
    assert names["images"].shape == (40, 3)
    assert names["interval"].low < names["interval"].estimate < names["interval"].high
    assert names["straight"] < names["distance"]


def test_entropic_transport_divergence_and_barycenters() -> None:
    names = run_section("Entropic transport", "Debiased divergence", "Barycenters")
    assert 0.4 < float(names["transported"]) < 1
    assert names["gradient"].shape == (200, 3)
    assert float(names["weights"].sum()) == pytest.approx(1.0)
    assert names["moved"].points.shape == (20, 3)


def test_bridges() -> None:
    names = run_section("Schroedinger bridges")
    assert names["bridge"].ok
    assert names["run"].states.shape == (2, 20, 3)
