"""The trials of phase-curve and histogram-width: their verdicts, faults that they must detect, and their statistics
against loops and closed forms.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from helmscope.claims.experiments import histogram_width
from helmscope.claims.experiments import phase_curve as module
from helmscope.claims.reading import entry
from helmscope.claims.registry import TrialCase, registered_case
from helmscope.claims.trial import run_trial
from helmscope.fields.attention import SA
from helmscope.observe.inner_products import close_pair_share
from helmscope.solve.integrate import integrate
from helmscope.solve.unprojected_euler import UnprojectedEuler
from helmscope.stats.reduce import reduce_replicates
from helmscope.theory.equiangular import hitting_time
from helmscope.theory.starts import Uniform
from helmscope.types import Ruling

F64 = torch.float64


BETAS = entry("phase-curve").constants["betas"]


@pytest.fixture
def small(monkeypatch):
    """The judged dimension and one below, two betas."""
    original = TrialCase.constant
    replaced = {"dims": (512, 16_384), "betas": (0.0, 2.0)}
    monkeypatch.setattr(TrialCase, "constant", lambda case, name: replaced.get(name, original(case, name)))


def test_the_claim_is_supported_and_the_control_is_not():
    trial = run_trial("phase-curve", quick=True)
    verdict = trial.verdict
    assert verdict.ruling is Ruling.SUPPORTED, verdict.sentence
    assert all(control.as_expected for control in verdict.controls)
    error, falling = verdict.conditions
    assert 0.003 < error.interval.estimate < 0.009
    assert falling.region.below == 1
    assert 0.3 < falling.interval.estimate < 0.7  # the smallest fall, from d = 32, where starts are censored, to 512
    data = reduce_replicates(trial.data)
    assert data.attrs["n"] == 32
    assert data.sizes == {"beta": 5, "dimension": 4}
    # cells that do not cross by 1.3 t* are marked, and counted as if they had then
    assert data.censored.sel(dimension=32, beta=9).item() > 5
    assert data.censored.sel(dimension=2**20).sum().item() == 0
    assert data.error.sel(dimension=32, beta=9).item() == pytest.approx(0.3, abs=0.1)
    assert data.error_high.sel(dimension=2**20).max().item() < 0.01
    assert "Censored of 32 starts" in verdict.sentence


@pytest.mark.usefixtures("small")
def test_the_interval_is_that_of_the_logarithms():
    """The errors of starts are positive and skewed: an interval of their plain mean would be symmetric."""
    case = registered_case("phase-curve", quick=True)
    evidence = module.phase_curve(case).evidence["error"]
    logs = np.log(np.asarray(evidence.values))
    half = stats.t.ppf(0.975, 31) * logs.std(ddof=1) / math.sqrt(32)
    interval = evidence.weigh(case.entry.conditions[0].region).interval
    assert (interval.low, interval.high) == pytest.approx((math.exp(logs.mean() - half), math.exp(logs.mean() + half)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_another_seed_gives_the_same_ruling(seed):
    assert run_trial("phase-curve", seed=seed).verdict.ruling is Ruling.SUPPORTED


@pytest.mark.usefixtures("small")
def test_a_curve_that_is_late_is_refuted(monkeypatch):
    monkeypatch.setattr(module, "hitting_time", lambda field, **given: 1.05 * hitting_time(field, **given))
    verdict = run_trial("phase-curve", quick=True).verdict
    assert verdict.conditions[0].ruling is verdict.ruling is Ruling.REFUTED


def test_an_error_that_does_not_fall_does_not_support_the_claim(monkeypatch):
    """Starts of one dimension under two names are off by the same error, which is within 2 % at beta = 0."""
    original = TrialCase.constant
    replaced = {"dims": (8_192, 16_384), "betas": (0.0,)}
    monkeypatch.setattr(TrialCase, "constant", lambda case, name: replaced.get(name, original(case, name)))
    monkeypatch.setattr(TrialCase, "seed_for", lambda case, number: 0)
    monkeypatch.setattr(module, "Uniform", lambda n, dim: Uniform(n, 16_384))
    error, falling = run_trial("phase-curve", quick=True).verdict.conditions
    assert error.ruling is Ruling.SUPPORTED
    assert falling.interval.estimate == 1
    assert falling.ruling is Ruling.INCONCLUSIVE  # supported with a closed bound


@pytest.mark.usefixtures("small")
def test_the_published_scheme_is_refuted(monkeypatch):
    """It contracts at the rate 0.953, so its tokens meet 4 % late."""

    def published(field, x, times, *, stepper, events):
        return integrate(field, x, [0.1 * round(times[0] / 0.1)], stepper=UnprojectedEuler(0.1), events=events)

    monkeypatch.setattr(module, "integrate", published)
    assert run_trial("phase-curve", quick=True).verdict.conditions[0].ruling is Ruling.REFUTED


@pytest.mark.parametrize("n", [4, 5, 6])
def test_the_event_is_that_half_of_the_pairs_have_met(n):
    """6, 10 and 15 pairs."""
    x = Uniform(n, 3).sample(200, seed=0)
    signal = module.HalfClustered(0.9).signal(x)
    assert (signal >= 0).tolist() == (close_pair_share(x, delta=0.9) >= 0.5).tolist()
    assert 20 < int((signal >= 0).sum()) < 180


def test_the_time_is_that_at_which_the_share_passes_one_half():
    x = Uniform(32, 64).sample_in_span(4, seed=0)
    for k, time in enumerate(module.half_times(x, (2.0,), [20.0], 1e-3)[0].tolist()):
        before, after = integrate(SA(2.0), x[k], [0.999 * time, 1.001 * time]).states
        assert close_pair_share(before, delta=1e-3) < 0.5 <= close_pair_share(after, delta=1e-3)


def test_a_start_that_does_not_cluster_by_the_horizon_is_censored():
    x = Uniform(32, 64).sample_in_span(4, seed=0)
    assert module.half_times(x, (2.0,), [1.0], 1e-3).isinf().all()


def test_orthogonal_tokens_meet_at_the_closed_time():
    x = torch.eye(32, dtype=F64)[None]
    clocks = [hitting_time(SA(beta), n=32, delta=1e-3) for beta in BETAS]
    times = module.half_times(x, BETAS, [1.3 * clock for clock in clocks], 1e-3)[:, 0]
    assert times.tolist() == pytest.approx(clocks, rel=1e-5)


def test_starts_in_their_span_have_the_distribution_of_starts_in_all_dimensions():
    """t_half of full starts at d = 64 against those by Bartlett, five standard errors."""
    horizon = [2 * hitting_time(SA(2.0), n=32, delta=1e-3)]
    full = module.half_times(Uniform(32, 64).sample(96, seed=1), (2.0,), horizon, 1e-3)[0]
    span = module.half_times(Uniform(32, 64).sample_in_span(96, seed=2), (2.0,), horizon, 1e-3)[0]
    error = math.hypot(float(full.std()), float(span.std())) / 96**0.5
    assert abs(float(full.mean() - span.mean())) < 5 * error
    assert 0.5 < float(full.std() / span.std()) < 2


# histogram-width


def test_the_width_falls_like_one_over_the_square_root_of_d():
    trial = run_trial("histogram-width", quick=True)
    verdict = trial.verdict
    assert verdict.ruling is Ruling.SUPPORTED, verdict.sentence
    assert all(control.as_expected for control in verdict.controls)
    clustered, at_start = (control.interval for control in verdict.controls)
    assert abs(clustered.estimate) < 0.01
    assert at_start.estimate == pytest.approx(-0.5, abs=0.005)
    assert verdict.printed.judgment.value == "true, not sharp"
    again = run_trial("histogram-width", quick=True)
    assert (again.verdict, again.data.identical(trial.data)) == (verdict, True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_another_seed_finds_the_same_width(seed):
    assert run_trial("histogram-width", seed=seed).verdict.ruling is Ruling.SUPPORTED


def test_the_width_is_the_root_mean_square_over_pairs():
    x = Uniform(5, 3).sample(2, seed=0)
    for cloud, found in zip(x, histogram_width.width(x, 0.3).tolist(), strict=True):
        squares = [(float(cloud[i] @ cloud[j]) - 0.3) ** 2 for i in range(5) for j in range(i)]
        assert found == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-12)


def test_orthogonal_tokens_have_no_width():
    """At every time that is judged they are at gamma_beta."""
    x = torch.eye(32, dtype=F64)[None]
    for beta in (0.0, 1.0, 4.0):
        assert histogram_width.widths([x, x], beta, (0.1, 0.5, 0.9)).max() < 1e-6


def test_the_width_at_time_0_is_one_over_the_square_root_of_d():
    """E <x_i, x_j>^2 = 1/d for independent uniform tokens."""
    for dim in (64, 4096):
        x = Uniform(32, dim).sample_in_span(400, seed=1)
        assert float(histogram_width.width(x, 0.0).square().mean()) * dim == pytest.approx(1, abs=0.02)


def test_fixed_clusters_have_the_inner_product_one_half_within():
    x = histogram_width.in_clusters(Uniform(32, 2**20).sample_in_span(2, seed=0), 4)
    products = x @ x.mT
    same = torch.arange(32)[:, None] // 8 == torch.arange(32) // 8
    first = (torch.arange(32) % 8 == 0)[:, None] | (torch.arange(32) % 8 == 0)
    others = same & ~first & ~torch.eye(32, dtype=torch.bool)
    assert products[:, others].numpy() == pytest.approx(0.5, abs=0.01)
    assert products[:, ~same].numpy() == pytest.approx(0, abs=0.01)


def test_the_slope_of_a_power_is_its_exponent():
    dims = (512, 2048, 65_536)
    values = torch.tensor(dims, dtype=F64)[:, None] ** torch.tensor([-0.5, -0.25, 0.0], dtype=F64)
    assert histogram_width.log_slope(dims, values).tolist() == pytest.approx([-0.5, -0.25, 0.0], abs=1e-12)


def test_tokens_that_do_not_approach_gamma_refute_the_width(monkeypatch):
    """A field that is 5 % too slow is off gamma_beta(t) by an amount that does not depend on d."""

    class Slow(SA):
        def velocity(self, x, weights=None, *, t=0.0):
            return 0.95 * super().velocity(x, weights)

    monkeypatch.setattr(histogram_width, "SA", Slow)
    assert run_trial("histogram-width", quick=True).verdict.ruling is Ruling.REFUTED
