"""The trial of ``one-cluster``: every regime is judged, at its worst beta, and faults are noticed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from scipy import integrate as quadrature

from helmscope.claims.evidence import Count
from helmscope.claims.experiments import one_cluster
from helmscope.claims.finding import Finding
from helmscope.claims.reading import entry
from helmscope.claims.registry import TrialCase, registered_case
from helmscope.claims.trial import Trial, run_trial
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.stats.reduce import reduce_replicates
from helmscope.types import Ruling

SMALL = msgspec.structs.replace(
    entry("one-cluster"),
    constants={**entry("one-cluster").constants, "zero_betas": [0.0], "zero_tokens": [8], "zero_dims": [2]},
)


@functools.cache
def trial(seed: int = 0) -> Trial:
    return run_trial("one-cluster", seed=seed, quick=True)


def zero_beta_only(monkeypatch: pytest.MonkeyPatch, **replaced: object) -> Finding:
    """The finding at beta = 0, n = 8, d = 2 alone, with attributes of the module replaced."""
    monkeypatch.setattr(one_cluster, "REGIMES", {"beta = 0": "zero"})
    for name, value in replaced.items():
        monkeypatch.setattr(one_cluster, name, value)
    return one_cluster.one_cluster(TrialCase(0, quick=True, entry=SMALL))


def successes(finding: Finding) -> tuple[int, int]:
    """The starts in one cluster, with V = +I and with V = -I."""
    counts = finding.evidence["beta = 0"], finding.controls["V = -I"]
    assert all(isinstance(count, Count) and count.n == 40 for count in counts)
    return counts[0].successes, counts[1].successes


def test_each_of_the_four_regimes_is_supported_at_its_worst_setting() -> None:
    verdict = trial().verdict
    assert verdict.ruling is Ruling.SUPPORTED, verdict.sentence
    assert [condition.name for condition in verdict.conditions] == ["beta = 0", "small beta", "large beta", "d >= 3"]
    for condition in verdict.conditions:
        assert condition.interval.low == pytest.approx(0.025 ** (1 / 40), rel=1e-12)  # Clopper-Pearson, all successes
    (control,) = verdict.controls
    assert control.as_expected
    assert control.interval.estimate == 0.0
    assert "stopped 0 starts" in verdict.sentence


def test_settings_are_inside_their_regimes_and_several_each() -> None:
    settings = one_cluster._settings(registered_case("one-cluster"))
    for name in one_cluster.REGIMES:
        assert sum(setting.regime == name for setting in settings) >= 2
    for setting in settings:
        inside = {
            "beta = 0": setting.beta == 0,
            "small beta": 0 < setting.beta <= 1 / setting.n,
            "large beta": setting.beta >= (setting.dim - 1) * setting.n**2,
            "d >= 3": setting.dim >= 3 and 1 / setting.n < setting.beta < (setting.dim - 1) * setting.n**2,
        }
        assert inside[setting.regime], str(setting)


def test_the_worst_setting_decides_a_regime(monkeypatch: pytest.MonkeyPatch) -> None:
    """One failing beta among three that succeed must not be averaged away."""
    failing = {0.05}

    class Lazy(SA):
        def velocity(self, x, weights=None, *, t=0.0):
            return (0.0 if self.beta in failing else 1.0) * super().velocity(x, weights)

    monkeypatch.setattr(one_cluster, "REGIMES", {"small beta": "small"})
    monkeypatch.setattr(one_cluster, "SA", Lazy)
    finding = one_cluster.one_cluster(registered_case("one-cluster", quick=True))
    evidence = finding.evidence["small beta"]
    assert (evidence.successes, evidence.refutes) == (0, False)
    assert evidence.weigh(entry("one-cluster").conditions[1].region).ruling is Ruling.INCONCLUSIVE


def test_clusters_that_have_merged_stay_merged() -> None:
    paths = reduce_replicates(trial().data).clusters.values
    assert (np.diff(paths, axis=0) <= 0).all()
    assert (paths[-1] == 1.0).all()


def test_the_horizon_is_a_multiple_of_the_quadrature() -> None:
    for setting in one_cluster._settings(registered_case("one-cluster")):
        b = setting.beta

        def slowness(a: float, b: float = b) -> float:  # of 1 - g = e^a, minus its logarithm
            u = math.exp(a)
            return (math.exp(b * u) + 1) / (2 * (2 - u))

        knots = np.linspace(math.log(1e-9), math.log(1.99), 60)
        time = sum(quadrature.quad(slowness, low, high)[0] for low, high in pairwise(knots))
        assert setting.horizon == pytest.approx(setting.lifetimes * time, rel=1e-6)


def test_angles_integrated_by_scipy_end_in_one_cluster_too() -> None:
    setting = one_cluster._Setting("small beta", 0.125, 8, 2, 10)
    x = retract(TrialCase(0, quick=True).normal(64, 8, 2, index=1))[:3]

    def turning(_: float, theta: np.ndarray) -> np.ndarray:
        apart = theta[None, :] - theta[:, None]
        weight = np.exp(setting.beta * np.cos(apart))
        return (weight * np.sin(apart)).sum(1) / weight.sum(1)

    counts = one_cluster._count_clusters(SA(beta=setting.beta), x, [1.0, setting.horizon], 1e-9)
    assert counts.stopped == 0
    assert counts.clusters.tolist() == [[8] * 3, [1] * 3]
    for cloud in x:
        start = torch.atan2(cloud[:, 1], cloud[:, 0]).numpy()
        end = quadrature.solve_ivp(turning, (0, setting.horizon), start, rtol=1e-9, atol=1e-12).y[:, -1]
        assert abs(np.exp(1j * end).mean()) > 1 - 1e-12


def field(velocity: Callable[[SA, torch.Tensor, torch.Tensor | None], torch.Tensor]) -> type[SA]:
    """SA with another velocity."""
    return type("Faulty", (SA,), {"velocity": lambda self, x, weights=None, *, t=0.0: velocity(self, x, weights)})


def halves(self: SA, x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Tokens that attend to their own half only."""
    masses = (None, None) if weights is None else weights.chunk(2, -1)
    return torch.cat([SA.velocity(self, y, m) for y, m in zip(x.chunk(2, -2), masses, strict=True)], -2)


FAULTS = {
    "sign": (field(lambda self, x, weights: -SA.velocity(self, x, weights)), 40),
    "nothing moves": (field(lambda self, x, weights: 0 * SA.velocity(self, x, weights)), 0),
    "halves": (field(halves), 0),
}


@pytest.mark.parametrize(("fault", "repelled"), FAULTS.values(), ids=FAULTS.keys())
def test_a_wrong_flow_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: type[SA], repelled: int) -> None:
    merged, with_minus = successes(zero_beta_only(monkeypatch, SA=fault, MAX_STEPS=300))
    assert merged < 4
    assert with_minus == repelled  # V = -I attracts where the sign is turned


def test_an_ignored_value_matrix_breaks_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    assert successes(zero_beta_only(monkeypatch, SA=lambda beta, value=None: SA(beta=beta))) == (40, 40)


def test_starts_that_reach_the_step_limit_count_against_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    assert successes(zero_beta_only(monkeypatch, MAX_STEPS=5)) == (0, 40)


def test_a_run_that_is_too_short_refutes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = zero_beta_only(monkeypatch, metastable_time=lambda *_, **__: 0.5)
    region = entry("one-cluster").conditions[0].region
    assert finding.evidence["beta = 0"].weigh(region).ruling is Ruling.INCONCLUSIVE
    assert successes(finding)[0] < 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_another_seed_gives_the_same_ruling(seed: int) -> None:
    assert trial(seed).verdict.ruling is Ruling.SUPPORTED, trial(seed).verdict.sentence
