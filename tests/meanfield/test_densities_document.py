"""The Python blocks of the pages on densities run, in order, and give the numbers that are written there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def run_page(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf8"), re.S):
        exec(compile(code, name, "exec"), names)
    return names


def test_densities() -> None:
    names = run_page("densities.md")
    assert abs(float(names["gibbs"][0].mean[0]) - 0.6977746579640083) < 1e-6
    assert abs(float(names["plain"].minimum[0]) + 1.3e-6) < 1e-7
    assert abs(float(names["positive"].minimum[0]) - 9.7e-9) < 1e-10
    assert float(names["later"].mean[0]) < float(names["zonal"].mean[0])
    assert len(names["cluster"]) == 1
    assert "raise degree" in str(names["cluster"].outcome)
    assert names["measured"]["order"].shape == (4, 1)
    assert names["diagram"].continuous.values.tolist() == [True, False]
    assert float(names["diagram"].fold_nu[1]) == pytest.approx(0.8275, abs=1e-4)


def test_gradient_flows(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("gradient_flows.md")
    descent, ascent = (float(line) for line in capsys.readouterr().out.splitlines()[:2])
    assert (descent, ascent) == (pytest.approx(-0.5), pytest.approx(0.5))
    assert float((names["density"].modes - names["path"][-1].modes).abs().max()) < 0.015
