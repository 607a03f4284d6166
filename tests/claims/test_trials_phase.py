"""The trial of phase-curve: its verdict, faults that it must notice, and its statistic against loops."""

from __future__ import annotations

import math

import pytest
import torch

from helmscope.claims.experiments import phase_curve as module
from helmscope.claims.judge import judge
from helmscope.claims.reading import entry
from helmscope.claims.registry import Case
from helmscope.fields.attention import SA
from helmscope.solve.published_euler import PublishedEuler
from helmscope.stats.reduce import reduce_replicates
from helmscope.theory.equiangular import hitting_time
from helmscope.theory.starts import Uniform
from helmscope.types import Ruling, Verdict

F64 = torch.float64


def verdict(seed: int = 0, quick: bool = True) -> Verdict:
    return judge(entry("phase-curve"), module.phase_curve(Case(seed, quick=quick)))


@pytest.fixture
def small(monkeypatch):
    """The judged dimension and one below, two betas."""
    monkeypatch.setattr(module, "DIMS", (512, 16_384))
    monkeypatch.setattr(module, "JUDGED", 1)
    monkeypatch.setattr(module, "BETAS", (0.0, 4.0))


def test_the_claim_is_supported_and_every_control_comes_out_as_it_must():
    finding = module.phase_curve(Case(0, quick=True))
    seen = judge(entry("phase-curve"), finding)
    assert seen.ruling is Ruling.SUPPORTED, seen.sentence
    assert seen.null is not None
    assert all(control.as_expected for control in (seen.null, *seen.also))
    assert 0.004 < seen.interval.estimate < 0.011
    data = reduce_replicates(finding.data)
    assert data.attrs["n"] == 32
    assert data.sizes == {"beta": 5, "dimension": 4}
    # cells that do not cross by 1.3 t* are marked, and counted as if they had then
    assert data.censored.sel(dimension=32, beta=9).item() > 5
    assert data.censored.sel(dimension=2**20).sum().item() == 0
    assert data.error.sel(dimension=32, beta=9).item() == pytest.approx(0.3, abs=0.1)
    assert data.error_high.sel(dimension=2**20).max().item() < 0.01
    assert "Censored of 32 starts" in seen.sentence


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_another_seed_gives_the_same_ruling(seed):
    assert verdict(seed, quick=False).ruling is Ruling.SUPPORTED


@pytest.mark.usefixtures("small")
def test_a_curve_that_is_late_is_refuted(monkeypatch):
    assert verdict().ruling is Ruling.SUPPORTED
    monkeypatch.setattr(module, "hitting_time", lambda field, **given: 1.05 * hitting_time(field, **given))
    assert verdict().ruling is Ruling.REFUTED


@pytest.mark.usefixtures("small")
def test_the_published_scheme_is_refuted(monkeypatch):
    """It contracts at the rate 0.953, so its tokens meet 4 % late."""
    monkeypatch.setattr(module, "BETAS", (0.0, 2.0))

    def published(field, x, times, *, stepper):
        # looks at multiples of its step
        grid = [0.1 * max(1, round(t / 0.1)) for t in times]
        unique = sorted(set(grid))
        run = original(field, x, unique, stepper=PublishedEuler(0.1))
        run.trajectory.__dict__["states"] = run.trajectory.states[[unique.index(t) for t in grid]]
        return run

    original = module.integrate
    monkeypatch.setattr(module, "integrate", published)
    assert verdict().ruling is Ruling.REFUTED


def test_half_times_are_those_of_a_loop():
    times = torch.tensor([0.0, 1.0, 3.0, 4.0], dtype=F64)
    share = torch.rand(4, 200, dtype=F64, generator=torch.Generator().manual_seed(0))
    found = module.first_half(times, share)
    for s in range(200):
        column = share[:, s].tolist()
        wanted = math.inf
        for k, p in enumerate(column):
            if p >= 0.5:
                before = column[k - 1]
                wanted = 0.0 if k == 0 else times[k - 1] + (times[k] - times[k - 1]) * (0.5 - before) / (p - before)
                break
        assert float(found[s]) == pytest.approx(float(wanted), rel=1e-14)


def test_orthogonal_tokens_meet_at_the_closed_time():
    x = torch.eye(32, dtype=F64)[None]
    clocks = [hitting_time(SA(beta), n=32, delta=1e-3) for beta in module.BETAS]
    found = module._half_times(x, clocks)[:, 0]
    for time, clock in zip(found.tolist(), clocks, strict=True):
        assert time == pytest.approx(clock, rel=0.0021)  # all pairs at once, between two looks


def test_starts_carried_in_their_span_have_the_law_of_starts_in_all_dimensions(monkeypatch):
    """t_half of full starts at d = 64 against those by Bartlett, five standard errors."""
    monkeypatch.setattr(module, "BETAS", (2.0,))
    clock = [hitting_time(SA(2.0), n=32, delta=1e-3)]
    full = module._half_times(Uniform(32, 64).sample(96, seed=1), clock)[0]
    span = module._half_times(Uniform(32, 64).sample_in_span(96, seed=2), clock)[0]
    error = math.hypot(float(full.std()), float(span.std())) / 96**0.5
    assert abs(float(full.mean() - span.mean())) < 5 * error
    assert 0.5 < float(full.std() / span.std()) < 2
