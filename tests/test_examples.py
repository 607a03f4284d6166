"""Every example runs, says what it should and writes what it names."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import xarray as xr

from support.children import run_child

EXAMPLES = Path(__file__).parent.parent / "examples"


def printed(name: str, folder: Path) -> str:
    """What an example prints in a process of its own; it writes into the folder."""
    return run_child([sys.executable, EXAMPLES / name, folder], check=True, cwd=folder).stdout


@pytest.fixture
def printed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What an example prints in this process, which does not have to import transformers once more."""

    def run(name: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def numbers(text: str) -> list[float]:
    """All numbers in a text, in their order."""
    return [float(number) for number in re.findall(r"[-+]?\d+(?:\.\d+)?", text)]


def test_there_are_five_of_at_most_thirty_lines():
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lengths) == 5
    assert max(lengths.values()) <= 30
    assert all(f"test_{name}" in globals() for name in lengths)


def test_clustering(tmp_path):
    first, *rows, last = printed("clustering.py", tmp_path).splitlines()
    assert first == "finished at t=10"
    orders, clusters = zip(*(numbers(row)[1:] for row in rows), strict=True)
    assert orders[0] < orders[1] < orders[2]
    assert clusters[0] > 25 > 5 > clusters[2]
    assert last.endswith("clustering.png")
    assert (tmp_path / "clustering.png").read_bytes().startswith(b"\x89PNG")


def test_phase_diagram(tmp_path):
    for row in printed("phase_diagram.py", tmp_path).splitlines()[:2]:
        _, found, theory = numbers(row)
        assert found == pytest.approx(theory, rel=0.05)
    assert (tmp_path / "phase.pdf").read_bytes().startswith(b"%PDF")


def test_trained_and_untrained(printed_here):
    _, *rows = printed_here("trained_and_untrained.py").splitlines()
    values = {int(row[0]): row[1:] for row in map(numbers, rows)}
    assert list(values) == [0, 4, 8, 12, 16, 20, 24]
    trained, *twins = values[4]
    assert trained > 3 * max(twins)


def test_ablated_heads(tmp_path, printed_here):
    first, *rows, last, saved = printed_here("ablated_heads.py").splitlines()
    loss, uniform = numbers(first)
    assert 1.0 < loss < 3.0 < 8.0 < uniform < 8.4
    assert len(rows) == 12
    assert all(len(numbers(row)) == 7 for row in rows)
    assert last.startswith("without L0H4 the loss is higher by ")
    with xr.open_dataset(tmp_path / "ablated_heads.nc", engine="h5netcdf") as seen:
        assert dict(seen.loss_increase.sizes) == {"layer": 12, "head": 6}
        assert float(seen.loss_increase.sel(layer=0, head=4)) == float(seen.loss_increase.max()) > 0.1
    assert saved.endswith("ablated_heads.png")
    assert (tmp_path / "ablated_heads.png").read_bytes().startswith(b"\x89PNG")


def test_own_claim(tmp_path):
    text = printed("own_claim.py", tmp_path)
    statement, region, verdict, control = text.splitlines()
    assert statement.startswith("At beta = 1 sixteen random tokens")
    assert region == "region: At least 0.8."
    assert verdict.startswith("Supported (")
    assert text.lower().count("supported") == 1
    estimate, low, high = numbers(verdict)[:3]
    assert 0.8 < low <= estimate <= high <= 1  # a share
    assert control.startswith("control, the starts: refuted, 0 [0, ")
