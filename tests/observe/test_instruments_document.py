"""The Python blocks of docs/instruments.md and its pages run, and the table names every measurement."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from helmscope.observe import intervention_names, measurement_names

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "instruments.md").read_text(encoding="utf8")


def run_blocks(file: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (DOCS / file).read_text(encoding="utf8"), re.S):
        exec(compile(code, file, "exec"), names)
    return names


def test_the_blocks_run() -> None:
    names = run_blocks("instruments.md")
    assert set(names["measured"]) == set(measurement_names()) - {"mlp_swirl_bound", "jko_step_test"}  # four prompts
    assert names["means"].attrs["n"] == 3
    assert 0.5 < names["largest"] < 1.5
    assert names["attention"].shape == (12,)
    assert names["exponents"].shape == (2,)
    assert names["worst"].shape == (3,)
    assert 0 < names["over_the_whole_depth"] <= 1
    assert names["page"].axes


def test_the_blocks_on_entropy_run() -> None:
    names = run_blocks("instruments_entropy.md")
    assert names["exact"].entropy_change.shape == (12, 3)
    assert names["entropies"].gaussian_entropy.notnull().all()
    assert names["energies"].free_energy_change[1:].notnull().all()
    assert names["picture"].axes


def test_the_blocks_about_generators_run() -> None:
    names = run_blocks("instruments_generator.md")
    assert 0.5 < names["median_share"] < 0.9
    assert names["by_kind"].shape == (12, 5)
    assert names["values"].shape[-1] == len(names["bank"]) == 40
    assert names["rates"].shape == (8,)
    assert names["figure"].axes


def test_the_blocks_about_gradient_flows_run() -> None:
    names = run_blocks("instruments_gradient_flows.md")
    for name in ("change", "constant", "share", "closed"):
        assert names[name].shape == (12,)
    assert float(names["change"].mean()) > 0
    assert 0.1 < float(names["share"].mean()) < 0.6


def test_the_blocks_on_dimension_run() -> None:
    names = run_blocks("instruments_dimension.md")
    assert names["tokens"].two_nn.shape == names["positions"].position_two_nn.shape == (25, 12)
    assert 1 < float(names["tokens"].two_nn[0].mean()) < 3  # of embeddings and positions


def test_the_blocks_on_interventions_run() -> None:
    names = run_blocks("instruments_interventions.md")
    assert names["damage"].sizes == {"temperature": 2}
    assert (names["damage"] > 0).all()
    assert list(names["reasons"]) == list(intervention_names())
    page = (DOCS / "instruments_interventions.md").read_text(encoding="utf8")
    assert all(f"`{name}`" in page for name in intervention_names())


def test_every_measurement_has_a_place_in_the_table() -> None:
    for name in measurement_names():
        assert f"`{name}`" in TEXT
