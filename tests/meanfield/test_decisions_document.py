"""The page on decisions runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "decisions.md"


def test_the_page_runs(capsys) -> None:
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(code, PAGE.name, "exec"), names)
    assert [round(value, 9) for value in names["detector"].tolist()] == [-3.0, -2.0, 2.0]
    assert "6 critical points from 96 starts: sum of (-1)^index is 2 = chi(S^2)" in capsys.readouterr().out
    assert (names["labels"] >= 0).all()
    assert len(names["joins"]) == 2
    assert int(names["paths"].undecided.sum()) == 0
