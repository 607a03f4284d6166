"""The trial of ``mixture``, described and not judged, with controls that a wrong flow or a wrong count breaks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.cluster import hierarchy

from helmscope.claims.experiments import mixture as home
from helmscope.claims.reading import entry
from helmscope.claims.registry import TrialCase
from helmscope.claims.trial import run_trial
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.observe.mixture import vmf_mixture
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.stats.reduce import reduce_replicates
from helmscope.types import Judgment, Ruling
from support.trials import failures, interval, rulings, set_constants


@pytest.fixture(scope="module")
def trial():
    return run_trial("mixture", quick=True)


@pytest.fixture
def one_time(monkeypatch):
    """Two betas and one time, for the tests that need no picture."""
    set_constants(monkeypatch, "mixture", betas=[1.0, 9.0], times=[8.0])


def test_it_is_described_and_not_judged(trial):
    verdict = trial.verdict
    assert verdict.ruling is Ruling.DESCRIBED
    assert verdict.sentence.startswith("Described (")
    assert "from 32 starts." in verdict.sentence
    assert "control failed" not in verdict.sentence
    assert verdict.provenance.entry == entry("mixture").hash
    assert rulings(verdict) == {
        "number of components": Ruling.DESCRIBED,
        "uniform tokens": Ruling.SUPPORTED,
        "clusters by single linkage": Ruling.SUPPORTED,
        "components at beta = 1": Ruling.SUPPORTED,
    }
    assert failures(verdict) == set()
    components = interval(verdict, "number of components")
    assert components == verdict.interval
    assert 3.4 < components.low < components.estimate < components.high < 4.3
    assert interval(verdict, "uniform tokens").n == 64
    assert interval(verdict, "uniform tokens").estimate >= 60 / 64
    assert interval(verdict, "components at beta = 1").low > 1
    assert verdict.printed.judgment is Judgment.NOT_TESTABLE  # the source asks a question


def test_the_picture(trial):
    data = reduce_replicates(trial.data)
    assert data.attrs["n"] == 32
    assert data.components.dims == data.largest_mass.dims == data.centers.dims == ("time", "beta")
    at = {"time": 8.0, "beta": "beta = 9"}
    assert float(data.components.sel(at)) == trial.verdict.interval.estimate
    # all start alike, from uniform tokens; at beta = 1 one cluster is left at last, at beta = 9 several
    assert np.ptp(data.components[0].values) == 0
    assert float(data.components[0, 0]) < 1.2
    last = data.components[-1].values
    assert last[0] < 1.2 < 2 < last[1] < last[2]
    assert np.all(np.diff(data.largest_mass[-1].values) < 0)


def test_the_number_by_another_flow_and_another_count(trial):
    """RK4 instead of the adaptive stepper, and SciPy's linkage instead of a mixture."""
    x0 = retract(TrialCase(quick=True).normal(32, 64, 2, index=0))
    states = integrate(SA(beta=9.0), x0, times=[8.0], stepper=RK4(h=0.1)).states[0]
    angles = [np.arccos(np.clip((x @ x.T).numpy()[np.triu_indices(len(x), 1)], -1, 1)) for x in states]
    counts = [hierarchy.fcluster(hierarchy.single(a), 0.1, "distance").max() for a in angles]
    assert abs(np.mean(counts) - trial.verdict.interval.estimate) < 0.1
    linked = interval(trial.verdict, "clusters by single linkage")
    assert linked.estimate == pytest.approx(trial.verdict.interval.estimate - np.mean(counts), abs=1e-12)


def test_bic_by_scipy():
    """On the circle the law is SciPy's von Mises; 3 k - 1 parameters."""
    x0 = retract(TrialCase(quick=True).normal(4, 64, 2, index=0))
    states = integrate(SA(beta=9.0), x0, times=[4.0], stepper=RK4(h=0.1)).states[0]
    fitted = vmf_mixture(states, max_components=8, max_kappa=1e3)
    for i, x in enumerate(states):
        k = fitted.count[i].item()
        theta = np.arctan2(*x.T.flip(0).numpy())
        parts = zip(
            fitted.weights[i, :k].numpy(), fitted.centers[i, :k].numpy(), fitted.kappas[i, :k].numpy(), strict=True
        )
        density = sum(w * stats.vonmises(kappa, np.arctan2(mu[1], mu[0])).pdf(theta) for w, mu, kappa in parts)
        bic = (3 * k - 1) * np.log(len(x)) - 2 * np.log(density).sum()
        assert fitted.bic[i].min().item() == pytest.approx(bic, abs=1e-8)
        assert bic < fitted.bic[i, 0].item() - 20  # far from one component


def test_another_seed_rules_alike_and_equal_seeds_give_equal_bytes(one_time):
    verdict = run_trial("mixture", quick=True, seed=1).verdict
    assert verdict.ruling is Ruling.DESCRIBED
    assert failures(verdict) == set()
    assert 3.3 < verdict.interval.low < verdict.interval.high < 4.4
    assert run_trial("mixture", quick=True, seed=1).verdict == verdict


def failed_controls() -> set[str]:
    """The controls that do not come out, of a trial that is then inconclusive and says so."""
    verdict = run_trial("mixture", quick=True).verdict
    failed = failures(verdict)
    assert verdict.ruling is (Ruling.INCONCLUSIVE if failed else Ruling.DESCRIBED)
    assert bool(failed) == verdict.sentence.startswith("A control failed, so there is no ruling")
    return failed


def test_repelling_tokens_break_the_controls(one_time, monkeypatch):
    monkeypatch.setattr(home, "SA", lambda beta: SA(beta=beta, value=-torch.eye(2, dtype=torch.float64)))
    assert failed_controls() == {"clusters by single linkage", "components at beta = 1"}


def test_a_beta_that_is_ignored_breaks_a_control(one_time, monkeypatch):
    monkeypatch.setattr(home, "SA", lambda beta: SA(beta=1.0))
    assert "components at beta = 1" in failed_controls()


def test_a_count_without_penalty_breaks_the_null(one_time, monkeypatch):
    def likeliest(x, *, max_components, max_kappa):
        fitted = vmf_mixture(x, max_components=max_components, max_kappa=max_kappa)
        free = (3 * torch.arange(1, max_components + 1) - 1) * np.log(x.shape[-2])
        return dataclasses.replace(fitted, count=(fitted.bic - free).argmin(-1) + 1)

    monkeypatch.setattr(home, "vmf_mixture", likeliest)
    assert "uniform tokens" in failed_controls()


def test_a_start_that_is_not_uniform_breaks_the_null(one_time, monkeypatch):
    """Tokens on two opposite sides alone: a normal that is stretched before it is put on the circle."""
    stretch = torch.tensor([8.0, 1.0], dtype=torch.float64)
    monkeypatch.setattr(home, "retract", lambda y: retract(y * stretch))
    assert "uniform tokens" in failed_controls()
