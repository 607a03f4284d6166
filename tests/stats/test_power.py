"""Power: the closed form, and the curves stored with the documentation."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, stats

from helmscope.stats.power import detection_power, minimum_detectable_effect
from helmscope.types import HelmscopeError

DOCS = Path(__file__).parents[2] / "docs"
CURVES = json.loads((DOCS / "power.json").read_text())


@pytest.mark.parametrize("n", [2, 8, 32, 128])
@pytest.mark.parametrize("effect", [0.0, 0.3, 1.0])
def test_the_closed_form_is_the_integral_over_the_standard_deviation(n: int, effect: float) -> None:
    """P(mean / (s / sqrt n) > t) by quadrature over the chi law of s, the mean being normal and independent of it."""
    t = stats.t.ppf(0.975, n - 1)

    def part(chi: float) -> float:
        return stats.chi.pdf(chi, n - 1) * stats.norm.sf(t * chi / math.sqrt(n - 1) - effect * math.sqrt(n))

    center = math.sqrt(n - 1)
    value = integrate.quad(part, 0, center + 12, points=[center], epsabs=1e-13, epsrel=1e-13)[0]
    assert detection_power(effect, n) == pytest.approx(value, abs=1e-10)


def test_no_effect_is_a_false_verdict_on_one_side() -> None:
    assert detection_power(0.0, 32) == pytest.approx(0.025, abs=1e-12)


@pytest.mark.parametrize("n", [2, 32, 1000])
def test_the_decisive_effect_inverts_the_power(n: int) -> None:
    for power in (0.5, 0.9, 0.99):
        assert detection_power(minimum_detectable_effect(n, power=power), n) == pytest.approx(power, abs=1e-9)
    with pytest.raises(HelmscopeError, match=r"power is 0\.01, but it must be between 0.025 and 1"):
        minimum_detectable_effect(n, power=0.01)


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: f"{curve['law'][:14]}-{curve['n']}")
def test_stored_curves_can_be_made_again(curve: dict) -> None:
    """Two effects of each with other seeds, 400 vectors, within 4.5 standard errors; never fewer than both shares."""
    spec = importlib.util.spec_from_file_location("docs_power", DOCS / "power.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    few = 60 if "bootstrap" in curve["law"] else 400
    for at in (0, 3):
        again = script.shares(curve["law"], curve["effect"][at], curve["n"], vectors=few, seed=1)
        for share, stored in zip(again, (curve["supported"][at], curve["refuted"][at]), strict=True):
            error = math.sqrt(max(stored * (1 - stored), 0.01) * (1 / few + 1 / curve["vectors"]))
            assert abs(share - stored) < 4.5 * error


@pytest.mark.parametrize("curve", [c for c in CURVES if c["law"].startswith("normal")], ids=lambda c: str(c["n"]))
def test_stored_curves_of_the_normal_law_are_the_closed_form(curve: dict) -> None:
    exact = np.array([detection_power(effect, curve["n"]) for effect in curve["effect"]])
    error = np.sqrt(exact * (1 - exact) / curve["vectors"])
    for side in ("supported", "refuted"):
        assert np.all(np.abs(np.array(curve[side]) - exact) < 4.5 * error + 1e-9)
