"""The Python blocks of docs/instruments.md and its pages run, and the table names every measurement."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from helmscope import theory
from helmscope.observe import SyntheticOperator, intervention_names, measurement_names, synthetic_operators
from helmscope.stats import quantile_interval
from helmscope.stats.intervals import mean_interval

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


def test_the_blocks_on_spectra_run() -> None:
    names = run_blocks("instruments_spectra.md")
    assert names["states"].effective_rank.shape == (25, 6, 2, 2)
    assert names["quantiles"].log_condition_number.shape == (5, 6, 2)
    assert names["heads"].r_squared.shape == (12, 4, 6, 3)
    logits = names["logits"]
    parts = (logits.attention_attribution + logits.mlp_attribution).sum("layer") + logits.embedding_attribution
    assert float(abs(parts + logits.bias_attribution - logits.centered_next_token_logit).max()) < 1e-4
    page = (DOCS / "instruments_spectra.md").read_text(encoding="utf8")
    measured = [names[each] for each in ("states", "along", "gradients", "heads", "logits", "composition", "weights")]
    for each in (*measured, *names["measured"].values()):
        for variable in each.data_vars:
            name = str(variable).removesuffix("_null")
            assert f"`{name}`" in page, name
            assert each[name].attrs["long_name"] != name
    assert names["page"].axes


def test_table_2_of_the_source_is_what_the_constructions_give() -> None:
    """The numbers of the table at T = 128, for one application, and its limits, made again."""
    page = (DOCS / "instruments_spectra.md").read_text(encoding="utf8")
    options = {"tokens": [128], "applications": [1], "seeds": 64, "progress": False}
    found = synthetic_operators(operators=[SyntheticOperator.MIXING, SyntheticOperator.RETRIEVAL], **options)
    for operator, limit in (("mixing", theory.softmax_retention(128)), ("retrieval", theory.retrieval_retention())):
        interval = mean_interval(found.nuclear_retention.sel(operator=operator).values.ravel())
        shown = f"{interval.estimate:.4f} [{interval.low:.4f}, {interval.high:.4f}]"
        assert f"| {operator} | 128 | 1 | {shown} | {limit:.4f} |" in page
    low, median, high = (
        quantile_interval(found.log_condition_number.sel(operator="mixing").values, share)
        for share in (0.25, 0.5, 0.75)
    )
    middle = f"{median.estimate:.2f} [{median.low:.2f}, {median.high:.2f}]"
    limits = [math.log(theory.softmax_condition_number_quantile(128, share)) for share in (0.25, 0.5, 0.75)]
    cells = f"{low.estimate:.2f}, {middle}, {high.estimate:.2f} | {', '.join(f'{each:.2f}' for each in limits)} |"
    assert cells in page


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
