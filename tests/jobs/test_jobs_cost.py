"""Cost estimates of jobs."""

from __future__ import annotations

import itertools

import pytest

import helmscope as hs
from helmscope.claims.run_trials import plan_trials
from helmscope.jobs import DensitySpec, MeasurementSpec, PhaseSpec, SimulationSpec, TrialsSpec, cost, sample
from helmscope.jobs.cost import Estimate
from helmscope.solve.flow import Flow

CASES = {
    "adaptive": SimulationSpec(n=8, batch=8, chunk=4, times="0:1:5", field="usa", beta=3.0),
    "long": SimulationSpec(n=4, batch=1, times=[0, 1000], field="usa", beta=6.0),
    "merge": SimulationSpec(n=4, batch=2, chunk=2, times=[0, 1000], field="usa", beta=6.0, merge=0.01),
    "fixed": SimulationSpec(n=8, batch=8, chunk=4, times="0:40:5", stepper="rk4", step=0.1),
    "noise": SimulationSpec(n=8, batch=8, chunk=4, times="0:80:5", nu=0.1, step=0.05),
    "phase": PhaseSpec(n=8, dims=[3], betas=[1, 4], times="0:8:9", samples=16, published=False),
}


@pytest.fixture
def clock(monkeypatch):
    """Replace seconds by the number of evaluations of the flow of one system, which no load changes."""
    evaluations, displacement = [0], Flow.displacement

    def counted(flow, x, h, t):
        evaluations[0] += len(x)
        return displacement(flow, x, h, t)

    monkeypatch.setattr(Flow, "displacement", counted)
    monkeypatch.setattr("helmscope.jobs.cost.time.process_time", lambda: evaluations[0])
    monkeypatch.setattr("helmscope.jobs.cost.PICTURES_S", 0.0)
    monkeypatch.setattr("helmscope.jobs.cost.SAMPLING_S", 4_000)
    return lambda: evaluations[0]


@pytest.mark.parametrize("name", CASES)
def test_an_estimate_is_within_a_third(clock, name):
    """Measured: 0.95 to 1.07 times the true number of evaluations."""
    spec = CASES[name]
    found, started = hs.jobs.estimate(spec), clock()
    for unit in spec.units():
        unit.function(**unit.parameters)
    assert not found.warning
    assert found.seconds == pytest.approx(clock() - started, rel=1 / 3)


def test_the_estimate_grows_with_the_job(clock):
    one = hs.jobs.estimate(SimulationSpec(n=8, batch=8, times=[0, 2], chunk=8))
    assert one.work == "8 systems of 8 tokens"
    many = hs.jobs.estimate(SimulationSpec(n=8, batch=2000, times=[0, 2], chunk=8))
    assert many.seconds == pytest.approx(250 * one.seconds)
    assert many.bytes > one.bytes


def test_the_estimate_of_a_density_grows_with_its_harmonics(monkeypatch):
    monkeypatch.setattr("helmscope.jobs.cost.SAMPLING_S", 0.1)
    coarse, fine = (hs.jobs.estimate(DensitySpec(dim=3, degree=degree, times=[0, 1])) for degree in (16, 48))
    assert (coarse.work, fine.work) == ("289 harmonics at 2 times", "2,401 harmonics at 2 times")
    assert coarse.seconds > 0
    assert fine.bytes > coarse.bytes


def test_a_stiff_flow_is_not_integrated_to_the_end(clock):
    """USA at beta = 9 takes about 2,000 steps per unit of time and is at rest after 26,127 steps, at t = 13.4. The
    estimate is 30,434; at the pace of the first steps, t = 1000 would take 16 million.
    """
    found = hs.jobs.estimate(SimulationSpec(field="usa", beta=9.0, n=4, batch=1, times=[0, 1000]))
    assert clock() < 15_000  # for sample, search and overhead
    assert found.seconds / 6 == pytest.approx(26_127, rel=1 / 3)  # six evaluations per step
    assert not found.warning


def test_the_time_at_which_systems_come_to_rest_is_found():
    problem = SimulationSpec(field="usa", beta=4.0, n=3, batch=2, times=[0, 2000]).problem()
    rest, outcome = sample.find_rest(problem, 100), problem.run().outcome
    assert set(outcome.statuses) == {hs.types.Status.AT_REST}
    assert max(outcome.times) / 2 < rest.time < 2 * max(outcome.times)
    assert rest.pace > 0


@pytest.mark.parametrize("limit", [50, 100, 200])  # less than the sample, as much, and more
@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_the_step_limit_is_announced(monkeypatch, limit, seconds):
    """No measured time changes whether the limit is announced, nor where."""
    monkeypatch.setattr("helmscope.jobs.sample.MAX_STEPS", 100)
    monkeypatch.setattr("helmscope.jobs.simulate.make_stepper", lambda spec: hs.DormandPrince(max_steps=limit))
    ticks = itertools.count()
    monkeypatch.setattr("helmscope.jobs.cost.time.process_time", lambda: seconds * (1 + next(ticks)))
    monkeypatch.setattr("helmscope.jobs.cost._step_seconds", lambda problem: 1.0)
    spec = SimulationSpec(field="usa", beta=12.0, n=8, batch=1, times=[0, 1000])
    found, outcome = hs.jobs.estimate(spec), spec.problem().run().outcome
    assert outcome.statuses == (hs.types.Status.STEP_LIMIT,)
    assert found.warning.startswith("the step limit will probably be reached, at about t=")
    assert str(found).endswith(f"; {found.warning}")
    announced = float(found.warning.split("t=")[1].split(" of ")[0])
    if limit <= 100:
        assert announced == pytest.approx(outcome.times[0], rel=0.05)  # two digits are printed
    else:  # 0.00056 instead of 0.0028, as 100 steps are few; the usual 300 give 0.047 instead of 0.048 for limit 2,000
        assert outcome.times[0] / 10 < announced < outcome.times[0]


def test_an_estimate_as_text():
    assert str(Estimate("1 row of 1 sample", 3.4, 460_000_000)) == "1 row of 1 sample: roughly 3 s on one core, 460 MB"
    assert str(Estimate("x", 600, 2_500_000_000)) == "x: roughly 10 min on one core, 2.5 GB"
    assert str(Estimate("x", 36_000)) == "x: roughly 10 h on one core"
    assert str(Estimate("x", 1e7)) == "x: more than a week on one core"
    assert str(Estimate("x")) == "x"
    assert cost.trials_cost(TrialsSpec(), plan_trials(["kuramoto"])).work == "1 trial"


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
    assert cost.trials_cost(TrialsSpec(), plan).bytes == cost.LIBRARY_BYTES
    quick, full = (cost.trials_cost(TrialsSpec(quick=quick), plan).seconds for quick in (True, False))
    assert quick == cost.QUICK * full


def test_a_tied_block_is_computed_once_for_each_call():
    tied = cost.subject_size(hs.Subject("tied"))
    assert tied.loops == 24
    once = cost.SubjectSize(tied.parameters, tied.tokens, tied.recorded, embedding=tied.embedding)
    assert 4 < tied.relative_time / once.relative_time < 24
    assert 1 < tied.relative_time < 4  # of model A: fewer parameters, called more often


def test_the_verb_prints_an_estimate_and_runs_nothing(helmscope, tmp_path):
    hs.jobs.write_spec(TrialsSpec(claims=["kuramoto", "radial"]), tmp_path / "two.toml")
    code, out, err = helmscope("run", "two.toml", "--estimate")
    assert (code, err) == (0, "estimating ...\n")
    assert out.startswith("2 trials: roughly ")
    code, out, _ = helmscope("run", "two.toml", "--estimate", "--json")
    assert code == 0
    assert '"work": "2 trials"' in out
    assert [path.name for path in tmp_path.iterdir()] == ["two.toml"]


@pytest.mark.parametrize(
    ("spec", "work"),
    [(SimulationSpec(n=4, batch=2, times=[0, 1]), "2 systems"), (DensitySpec(field="none", times=[0, 1]), "65 harm")],
)
@pytest.mark.parametrize(("seconds", "shown"), [(2.5, True), (1.5, False), (None, False)])
def test_the_estimate_is_printed_before_a_job_of_more_than_two_seconds(
    monkeypatch, capsys, tmp_path, spec, work, seconds, shown
):
    name = "simulation_cost" if isinstance(spec, SimulationSpec) else "density_cost"
    monkeypatch.setattr(cost, name, lambda _: cost.Estimate(work, seconds, 10**9))
    hs.jobs.run(spec, folder=tmp_path / "run", show_progress=True)
    first, *_ = capsys.readouterr().err.splitlines()
    assert (first == f"{work}: roughly 2 s on one core, 1.0 GB") is shown
    assert first.startswith(work) is shown
    hs.jobs.run(spec, folder=tmp_path / "quiet")
    assert capsys.readouterr().err == ""


def test_an_estimate_that_fails_does_not_stop_the_job(monkeypatch, tmp_path):
    def fail(spec):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cost, "simulation_cost", fail)
    assert hs.jobs.run(SimulationSpec(n=4, batch=2, times=[0, 1]), folder=tmp_path / "run", show_progress=True).ok


def test_the_seconds_of_the_units_add_up_to_those_of_the_job():
    spec = TrialsSpec(claims=["kuramoto", "tokens-cluster"], quick=True)
    job = spec.prepare()
    found = job.cost()
    assert set(found.unit_seconds) == {unit.name for unit in job.units}
    assert sum(found.unit_seconds.values()) == pytest.approx(found.seconds)
    measured = MeasurementSpec(text_count=2, text_length=8, only=["depth_steps", "query_key_metric"])
    found = hs.jobs.estimate(measured)
    assert set(found.unit_seconds) == {unit.name for unit in measured.units()}
    assert 0 < sum(found.unit_seconds.values()) < found.seconds  # the recording and the picture are no units
