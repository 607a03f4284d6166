"""Estimators on synthetic laws: expectations in closed form, intervals that cover them, planted faults that are seen,
and docs/calibration.md in step with its script.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy import stats

from helmscope.observe.context_group import ContextGroup
from helmscope.observe.interventions import intervention_names
from helmscope.observe.measure import measurement_names
from helmscope.stats import reduce
from helmscope.stats.intervals import mean_interval

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def calibration() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_calibration", DOCS / "calibration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclass
    spec.loader.exec_module(module)
    return module


def law_of(calibration, measurement, number=0):
    return [law for law in calibration.LAWS if law.measurement == measurement][number]


def row_of(calibration, measurement, quantity, size, repetitions=100, number=0):
    rows = calibration.calibrated(law_of(calibration, measurement, number), size, repetitions)
    (row,) = [row for row in rows if row.quantity == f"`{quantity}`"]
    return row


# what the estimators have on average at a finite size, by hand
EXPECTED = [
    (
        "attention_diffusion",
        "nu_token_sampling",
        8,
        (7 / 8) ** 2 / 8,
    ),  # T x_i = 0: n - 1 values about a mean of which they are 1/n each
    ("attention_diffusion", "nu_random_values", 8, (7 / 8) ** 2 / 64),
    ("attention_surface_divergence", "surface_divergence", 8, -3 / 8),  # -(d - 1) <x_i, m>
    ("mlp_jacobian", "weighted_trace", 8, 7 / 8),  # C divides by n, and tr(J E C) = 1
    ("gate_sparsity", "silent_share", 8, (0.5**8 + 0.25**8 + 0.95**8) / 3),
    # the mean of log |T w| over the circle
    ("perturbation_growth", "lyapunov_exponent", 1, math.log((1.5 + 0.75) / 2)),
    ("perturbation_growth", "lyapunov_exponent", 4, math.log((1.5**4 + 0.75**4) / 2) / 4),
    ("perturbation_growth", "square", 4, (1.5**8 + 0.75**8) / 2),
    ("context_noise", "nu_context", 8, 1.5 * 1.25 / 5 / 2),
    ("context_noise", "total_nu_random_values", 8, 0.8 * 1.25 / 5 / 2),
]

SLOW = {"context_noise": 25, "mlp_jacobian": 25}  # repetitions of the measurements that loop over prompts


@pytest.mark.parametrize(("measurement", "quantity", "size", "expected"), EXPECTED)
def test_expectations_at_a_finite_size(calibration, measurement, quantity, size, expected):
    row = row_of(calibration, measurement, quantity, size, repetitions=SLOW.get(measurement, 100))
    assert row.expectation == pytest.approx(expected, abs=4 * row.error)
    assert row.error < 0.05 * abs(expected)


def misses(calibration, measurement, quantity, size, repetitions):
    row = row_of(calibration, measurement, quantity, size, repetitions)
    return round(repetitions * row.low), round(repetitions * row.high)


@pytest.mark.parametrize(
    ("measurement", "quantity", "size"),
    [
        ("attention_diffusion", "nu_token_sampling", 8),
        ("depth_steps", "median_angle", 8),
        ("effective_beta", "beta_without_self", 8),
    ],
)
def test_intervals_cover_the_expectation(calibration, measurement, quantity, size):
    low, high = misses(calibration, measurement, quantity, size, 400)
    assert stats.binom.ppf(0.001, 400, 0.05) <= low + high <= stats.binom.ppf(0.999, 400, 0.05)
    assert max(low, high) <= stats.binom.ppf(0.999, 400, 0.04)


def test_standard_errors_that_are_too_small_are_noticed(calibration, monkeypatch):
    """As if the tokens of a prompt were replicates: errors smaller by a factor of 2 for four tokens each."""
    plain = reduce.moments
    monkeypatch.setattr(reduce, "moments", lambda x, scale: (plain(x, scale)[0], plain(x, scale)[1] / 2))
    low, high = misses(calibration, "attention_diffusion", "nu_token_sampling", 8, 400)
    assert low + high > 2 * stats.binom.ppf(0.999, 400, 0.068)


def test_a_covariance_that_divides_by_n_is_noticed(calibration, monkeypatch):
    def biased(group, outputs):
        moved = group.increments(outputs)
        moved = moved - moved.mean(0)
        return moved.mT @ moved / (2 * len(moved))

    monkeypatch.setattr(ContextGroup, "sigma_of", biased)
    row = row_of(calibration, "context_noise", "nu_context", 8, repetitions=25)
    assert row.truth - row.expectation > 4 * row.error
    assert row.expectation == pytest.approx(7 / 8 * row.truth, abs=4 * row.error)


def test_a_held_out_r_squared_needs_its_scale(calibration):
    """On the linear scale, with Student's or percentile intervals, far too many miss; as log(1 - x) they do not."""
    values = calibration.draws(law_of(calibration, "context_noise"), 16, 100).r_squared
    assert values.attrs["averaged_as"] == "log(1 - x)"
    draw = np.random.default_rng(0)
    reduced = reduce.reduce_replicates(values.to_dataset())
    center = 1 - math.exp(float(np.log(1 - values.values).mean()))
    wrong = {"student": 0, "percentile": 0}
    for row in values.values.T:
        mean, student = float(values.mean()), mean_interval(row)
        low, high = np.quantile(draw.choice(row, (400, row.size)).mean(1), [0.025, 0.975])
        wrong["student"] += not student.low <= mean <= student.high
        wrong["percentile"] += not low <= mean <= high
    right = int(((reduced.r_squared_low > center) | (reduced.r_squared_high < center)).sum())
    assert right <= stats.binom.ppf(0.999, 100, 0.08) < min(wrong.values())


def test_every_measurement_is_calibrated_or_exact(calibration):
    estimated = {law.measurement for law in calibration.LAWS}
    assert not estimated & set(calibration.EXACT)
    assert estimated | set(calibration.EXACT) == set(measurement_names())


def test_the_page_is_in_step_with_the_script(calibration):
    page = (DOCS / "calibration.md").read_text(encoding="utf8")
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert list(sections) == [f"{law.measurement}: {law.text}" for law in calibration.LAWS] + [
        "Missed bounds",
        "No estimates",
    ]
    for law in calibration.LAWS:
        rows = re.findall(r"^\| `(\w+)` \| (\d+) (\w+) \| (\S+) ", sections[f"{law.measurement}: {law.text}"], re.M)
        assert [row[:3] for row in rows] == [(name, str(n), law.unit) for n in law.sizes for name in law.truths(n)]
        for name, size, _, truth in rows:
            assert float(truth) == pytest.approx(law.truths(int(size))[name], rel=1e-3)
    law = law_of(calibration, "mlp_force")
    text = sections[f"{law.measurement}: {law.text}"]
    for row in calibration.calibrated(law, law.sizes[0], law.repetitions):
        written = next(line for line in text.splitlines() if line.startswith(f"| {row.quantity} | {row.size} |"))
        assert float(written.split("|")[4]) == pytest.approx(row.expectation, rel=1e-3)


def test_only_known_quantities_miss_their_bound_on_the_page(calibration):
    page = (DOCS / "calibration.md").read_text(encoding="utf8")
    missed = set()
    for part in page.split("\n## ")[1:]:
        rows = re.findall(r"^\| `(\w+)` \| (\d+) \w+ \|.*missed\*\* \|$", part, re.M)
        missed |= {(part.split(":")[0], name, int(size)) for name, size in rows}
    assert missed == set(calibration.MISSES)
    assert all(reason in page for reason in calibration.MISSES.values())
    assert len(re.findall(r"\| (?:3\.2 to 6\.8|at most 8) \|$", page, re.M)) > 60


@pytest.fixture(scope="module")
def of_edits(calibration) -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_calibration_edits", DOCS / "calibration_edits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_measurement_under_edits_is_calibrated_or_says_why_not(of_edits):
    estimated = {law.measurement for law in of_edits.EDIT_LAWS}
    listed = [*estimated, *of_edits.MEANS, *of_edits.EXACT]
    assert sorted(listed) == sorted(intervention_names())


def test_the_page_of_edits_is_in_step_with_its_script(of_edits):
    page = (DOCS / "calibration_edits.md").read_text(encoding="utf8")
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    laws = of_edits.EDIT_LAWS
    assert list(sections)[: len(laws)] == [f"{law.measurement}: {law.text}" for law in laws]
    missed = set()
    for law in laws:
        text = sections[f"{law.measurement}: {law.text}"]
        rows = re.findall(r"^\| `(\w+)` \| (\d+) (\w+) \| (\S+) ", text, re.M)
        assert [row[:3] for row in rows] == [(name, str(n), law.unit) for n in law.sizes for name in law.truths(n)]
        for name, size, _, truth in rows:
            assert float(truth) == pytest.approx(law.truths(int(size))[name], rel=1e-3)
        for name, size in re.findall(r"^\| `(\w+)` \| (\d+) \w+ \|.*missed\*\* \|$", text, re.M):
            missed.add((law.measurement, name, int(size)))
    assert missed == set(of_edits.MISSES)
    (law,) = [each for each in laws if each.measurement == "query_key_metric"]
    for row in of_edits.calibrated(law, 2, law.repetitions):
        assert str(row) in page


def test_noise_has_the_damage_of_its_law_and_few_draws_bias_the_ratio(of_edits):
    (law,) = [each for each in of_edits.EDIT_LAWS if each.measurement == "query_key_noise"]
    rows = {row.quantity: row for row in of_edits.calibrated(law, 8, 20)}
    for name in ("`kl_of_queries`", "`kl_of_keys`"):
        assert rows[name].expectation == pytest.approx(1, abs=4 * rows[name].error)
        assert rows[name].error < 0.03
    biased = {row.quantity: row for row in of_edits.calibrated(law, 2, 20)}["`ratio`"]
    assert biased.expectation < 1 - 3 * biased.error


def test_seeds_repeat(calibration):
    law = law_of(calibration, "gate_sparsity")
    first, second = (calibration.draws(law, 8, 2) for _ in range(2))
    assert torch.equal(*(torch.from_numpy(each.gate_sparsity.values) for each in (first, second)))
