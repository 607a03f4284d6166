"""Cost estimates of jobs."""

from __future__ import annotations

import time

import pytest

import helmscope as hs
from helmscope.claims.run_trials import plan_trials
from helmscope.jobs import Phase, Simulate, Trials, cost
from helmscope.jobs.cost import Estimate

CASES = {
    "adaptive": Simulate(n=8, batch=4, chunk=4, times="0:1:5", field="usa", beta=3.0),
    "noise": Simulate(n=8, batch=4, chunk=4, times="0:4:5", nu=0.1, step=0.02),
    "phase": Phase(n=8, dims=[3], betas=[1, 4], times="0:8:9", samples=16, published=False),
}


@pytest.mark.parametrize("name", CASES)
def test_an_estimate_is_within_a_factor_of_four(monkeypatch, name):
    """Measured as processor time of the units, which other load does not change."""
    monkeypatch.setattr("helmscope.jobs.cost.PICTURES_S", 0.0)
    monkeypatch.setattr("helmscope.jobs.cost.SAMPLING_S", 0.5)
    monkeypatch.setattr("helmscope.jobs.cost._overview_seconds", lambda *_: 0.0)
    spec = CASES[name]
    units, seconds = spec.units(), hs.jobs.estimate(spec).seconds
    started = time.process_time()
    for unit in units:
        unit.function(**unit.parameters)
    took = time.process_time() - started
    assert took / 4 < seconds < took * 4


def test_the_estimate_grows_with_the_job():
    one = hs.jobs.estimate(Simulate(n=8, batch=8, times=[0, 2]))
    assert one.work == "8 systems of 8 tokens"
    many = hs.jobs.estimate(Simulate(n=8, batch=2000, times=[0, 2], chunk=8))
    assert many.seconds > 5 * one.seconds
    assert many.bytes > one.bytes


def test_a_stiff_flow_is_not_integrated_to_the_end(monkeypatch):
    """USA at beta = 9 takes about 2,000 steps per unit of time, but the sample stays short."""
    monkeypatch.setattr("helmscope.jobs.cost.SAMPLING_S", 0.2)
    started = time.process_time()
    found = hs.jobs.estimate(Simulate(field="usa", beta=9.0, n=4, batch=1, times=[0, 1000]))
    assert time.process_time() - started < 10
    assert found.seconds > 60


def test_an_estimate_as_text():
    assert str(Estimate("1 row of 1 sample", 3.4, 460_000_000)) == "1 row of 1 sample: roughly 3 s on one core, 460 MB"
    assert str(Estimate("x", 600, 2_500_000_000)) == "x: roughly 10 min on one core, 2.5 GB"
    assert str(Estimate("x", 36_000)) == "x: roughly 10 h on one core"
    assert str(Estimate("x", 1e7)) == "x: more than a week on one core"
    assert str(Estimate("x")) == "x"
    assert cost.trials_cost(Trials(), plan_trials(["kuramoto"])).work == "1 trial"


def test_the_estimate_of_trials_scales_with_the_subject(tmp_path):
    """The declared seconds are those of model A on its texts."""
    a = hs.Subject("A")
    size = cost.subject_size(a)
    assert (size.parameters, size.tokens) == (cost.REFERENCE_PARAMETERS, cost.REFERENCE_TOKENS)
    assert size.relative_time == 1
    assert cost.subject_size(hs.Subject.simulation()).relative_time == 1
    half = cost.subject_size(hs.Subject("A", a.texts[:64]))
    assert half.relative_time == pytest.approx(0.5)
    assert half.recorded == size.recorded / 2
    larger = cost.SubjectSize(1_000 * size.parameters, size.tokens, size.recorded)
    assert larger.relative_time == 1_000
    assert larger.bytes > 1_000 * 4 * size.parameters
    plan = plan_trials(["kuramoto"])
    assert cost.trials_cost(Trials(), plan).bytes == cost.LIBRARY_BYTES
    quick, full = (cost.trials_cost(Trials(quick=quick), plan).seconds for quick in (True, False))
    assert quick == cost.QUICK * full


def test_a_tied_block_is_computed_once_for_each_call():
    tied = cost.subject_size(hs.Subject("tied"))
    assert tied.loops == 24
    once = cost.SubjectSize(tied.parameters, tied.tokens, tied.recorded, embedding=tied.embedding)
    assert 4 < tied.relative_time / once.relative_time < 24
    assert 1 < tied.relative_time < 4  # of model A: fewer parameters, called more often


def test_the_verb_prints_an_estimate_and_runs_nothing(helmscope, tmp_path):
    hs.jobs.write(Trials(claims=["kuramoto", "radial"]), tmp_path / "two.toml")
    code, out, err = helmscope("run", "two.toml", "--estimate")
    assert (code, err) == (0, "estimating ...\n")
    assert out.startswith("2 trials: roughly ")
    code, out, _ = helmscope("run", "two.toml", "--estimate", "--json")
    assert code == 0
    assert '"work": "2 trials"' in out
    assert [path.name for path in tmp_path.iterdir()] == ["two.toml"]
