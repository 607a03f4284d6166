"""Jobs run from Python: same results as the command line, resumed after an interrupt, rejected when changed."""

from __future__ import annotations

import html
import io
import json
import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.claims.run_trials import TrialsFailed
from helmscope.jobs import (
    DensitySpec,
    PhaseSpec,
    ReportSpec,
    SimulationResult,
    SimulationSpec,
    TrialsResult,
    TrialsSpec,
)
from helmscope.jobs.run import Interrupted
from helmscope.runs import RunResult, bar
from support.children import child, wait_for, with_tests_on_path
from support.refusal import refused

SIMULATE = SimulationSpec(n=4, batch=4, times=[0, 0.5, 1], beta=2, seed=7)
PHASE = PhaseSpec(n=4, dims=[3, 9], betas=[1, 4], times=[0, 2, 4], samples=3, seed=7)
TRIALS = TrialsSpec(claims=["kuramoto"], quick=True, seed=3)
WORDS = {
    "simulate": (SIMULATE, "simulate --n 4 --batch 4 --times 0,0.5,1 --beta 2 --seed 7"),
    "phase": (PHASE, "phase --n 4 --dims 3,9 --betas 1,4 --times 0,2,4 --samples 3 --seed 7"),
    "trials": (TRIALS, "claims test kuramoto --quick --seed 3"),
}


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing takes most of the time of a small run."""
    monkeypatch.setattr("helmscope.plots.style.png", lambda figure: b"")
    monkeypatch.setattr("helmscope.plots.phase.phase_figure", lambda data: None)
    monkeypatch.setattr("helmscope.plots.phase.phase_page", lambda data: "")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its path, without the manifest, which contains the time."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.usefixtures("no_pictures")
def test_python_the_verb_and_a_file_write_the_same_bytes(helmscope, tmp_path, name):
    spec, words = WORDS[name]
    assert hs.jobs.run(spec, folder=tmp_path / "python").ok
    assert helmscope(*words.split(), "--out", "verb", "--json")[0] == 0
    hs.jobs.write_spec(spec, "spec.toml")
    code, out, err = helmscope("run", "spec.toml", "--out", "file", "--json")
    assert code == 0, err
    assert contents(tmp_path / "python") == contents(tmp_path / "verb") == contents(tmp_path / "file")
    assert hs.jobs.read_spec("python") == spec
    output = helmscope(*words.split(), "--out", "again", "--json")[1]
    assert json.loads(out) == json.loads(output.replace('"again', '"file'))


@pytest.mark.usefixtures("no_pictures")
def test_the_result_of_a_simulation(tmp_path):
    result = hs.jobs.run(SIMULATE, folder=tmp_path / "run")
    expected = hs.integrate(hs.SA(2.0), hs.Uniform(4, 3).sample(4, seed=7), [0.0, 0.5, 1.0])
    assert np.array_equal(result.trajectory.states.numpy(), expected.states.numpy())
    assert result.overview.equals(hs.overview(expected, beta=2.0))
    assert (result.ok, str(result.outcome), result.notes) == (True, "finished at t=1", ())
    assert result.picture == tmp_path / "run" / "overview.png"
    assert [unit.name for unit in SIMULATE.units()] == [f"systems-{k:06d}" for k in range(4)]


@pytest.mark.usefixtures("no_pictures")
def test_the_result_of_a_phase_diagram(tmp_path):
    result = hs.jobs.run(PHASE, folder=tmp_path / "run", engine=hs.runs.Processes(2))
    case = {"betas": [1.0, 4.0], "times": [0.0, 2.0, 4.0], "samples": 3, "seed": 7}
    seen = hs.phase_diagram(hs.SA, start=hs.Uniform(4, 9), **case)
    assert np.array_equal(result.diagram.probability.sel(dim=9).values, seen.probability.values)
    assert (result.ok, result.lost_samples) == (True, 0)
    assert result.half_time.equals(hs.observe.half_time(result.diagram))


def test_the_results_of_trials_and_a_report(tmp_path):
    result = hs.jobs.run(ReportSpec(claims=["kuramoto"], quick=True, seed=3), folder=tmp_path / "run")
    assert [verdict.claim for verdict in result.verdicts] == ["kuramoto"]
    assert result.verdicts[0] == hs.run_trial("kuramoto", quick=True, seed=3).verdict
    assert 'data-claim="kuramoto"' in result.page.read_text()
    assert hs.store.RunFolder.open(tmp_path / "run").read_verdicts() == tuple(result.verdicts)


@pytest.mark.parametrize(
    ("spec", "summary", "cells"),
    [
        (
            SIMULATE,
            "4 systems x 4 tokens, dimension 3; 3 times, 0 to 1; finished",
            [
                "SimulationSpec(beta=2.0, n=4, batch=4, times=(0.0, 0.5, 1.0), seed=7)",
                "overview.png",
                "order_parameter",
            ],
        ),
        (
            PHASE,
            "2 dimensions x 2 betas x 3 times; 3 samples; complete",
            ["phase.html", "half_time", "dim = 9, beta = 4"],
        ),
        (
            DensitySpec(field="none", times=[0, 1]),
            "on S^1, degree 64: 2 times, 0 to 1; finished",
            ["density.png", "free_energy"],
        ),
        (TRIALS, "1 trial; 1 true by construction", ["kuramoto", "simulation", "n = 2,048"]),
        (ReportSpec(claims=["kuramoto"], quick=True), "1 trial; 1 true by construction", ["report.html", "kuramoto"]),
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_a_result_shows_itself_in_one_line_and_as_a_table(tmp_path, spec, summary, cells):
    result = hs.jobs.run(spec, folder=tmp_path / "a <b>")
    assert repr(result) == f"<{type(result).__name__}: {summary}; in {tmp_path}/a <b>>"
    text = result._repr_html_()
    for words in (type(result).__name__, summary, *cells):
        assert html.escape(words) in text
    assert "a &lt;b&gt;" in text
    assert "<b>" not in text


def test_an_incomplete_result_says_so(tmp_path):
    folder = hs.store.RunFolder.create(tmp_path / "run")
    status = hs.types.Outcome((hs.types.Status.STEP_LIMIT,) * 2, (0.5, 0.5))
    states = hs.Trajectory(torch.zeros(1), torch.eye(3).expand(1, 2, 3, 3))
    stopped = SimulationResult(spec=SIMULATE, folder=folder, trajectory=states, outcome=status, notes=("no picture",))
    assert "; step limit; in " in repr(stopped)
    assert ">no picture<" in stopped._repr_html_()
    error = TrialsFailed(RunResult(tmp_path, {}, {"my-claim": "ZeroDivisionError"}), [])
    failed = TrialsResult(spec=TRIALS, folder=folder, trials=[], failed=error)
    assert repr(failed).startswith("<TrialsResult: 0 trials; ")
    assert "my-claim" in repr(failed)
    assert "my-claim" in failed._repr_html_()


def test_the_default_folder_is_created(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = hs.jobs.run(TRIALS)
    (name,) = os.listdir("runs")
    assert name.startswith("claims-")
    assert str(result.folder.path) == f"runs/{name}"


@pytest.mark.usefixtures("no_pictures")
def test_resuming_with_another_spec_is_rejected(tmp_path):
    where = tmp_path / "run"
    hs.jobs.run(SIMULATE, folder=where)
    before = contents(where)
    changed = SimulationSpec(n=4, batch=4, times=[0, 0.5, 1], beta=3, delta=0.5, seed=8)
    message = refused(lambda: hs.jobs.run(changed, folder=where, resume=True))
    changes = "beta 2.0 (now 3.0) and delta 0.001 (now 0.5) and seed 7 (now 8)"
    assert message.startswith(f"{where} was started with {changes}: ")
    refused(lambda: hs.jobs.run(PHASE, folder=where, resume=True), "was started with job simulate (now phase)")
    refused(lambda: hs.jobs.run(SIMULATE, folder=where), "contains an earlier run: set resume=True to continue it")
    refused(lambda: hs.jobs.run(SIMULATE, resume=True), "resume is set, but the folder of the run is not: set folder,")
    refused(lambda: hs.jobs.run(SIMULATE, folder=where, allow_mixed=True), "a resumed run: set resume=True or omit it")
    assert contents(where) == before
    assert hs.jobs.run(SIMULATE, folder=where, resume=True).ok
    assert contents(where) == before


@pytest.mark.usefixtures("no_pictures")
def test_a_run_killed_before_its_spec_was_written_gets_it(tmp_path):
    hs.jobs.run(SIMULATE, folder=tmp_path / "run")
    whole = contents(tmp_path / "run")
    for name in [*whole, "units"]:
        path = tmp_path / "run" / name
        path.rmdir() if path.is_dir() else path.unlink()
    assert os.listdir(tmp_path / "run") == ["manifest.json"]
    hs.jobs.run(SIMULATE, folder=tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == whole


def test_bad_arguments_are_rejected(tmp_path):
    where = {"folder": tmp_path / "run"}
    refused(lambda: hs.jobs.run("simulate", **where), "spec is 'simulate', but it must be a spec of hs.jobs")
    refused(lambda: hs.jobs.run(SIMULATE, engine="serial", **where), "engine is 'serial', but it must be Serial()")
    refused(
        lambda: hs.jobs.run(SIMULATE, show_progress="bar", **where),
        "show_progress is 'bar', but it must be True or False",
    )
    refused(lambda: hs.jobs.estimate(None), "spec is None, but it must be a spec of hs.jobs")
    assert os.listdir(tmp_path) == []


# Interrupts -----------------------------------------------------------------------------------------------------------

SLOW = SimulationSpec(n=24, batch=8, chunk=1, times=[0, 1], nu=0.2, step=0.004)
PROGRAM = """
import sys, helmscope as hs
hs.jobs.run(hs.jobs.read_spec(sys.argv[1]), folder=sys.argv[2])
"""


@pytest.mark.usefixtures("no_picture")
def test_an_interrupted_job_resumes_to_the_same_bytes(helmscope, tmp_path):
    """From Python, and by the command that ``helmscope runs`` suggests."""
    hs.jobs.write_spec(SLOW, tmp_path / "slow.toml")
    hs.jobs.run(SLOW, folder=tmp_path / "undisturbed")
    units = tmp_path / "runs" / "a" / "units"
    command = [sys.executable, "-c", PROGRAM, "slow.toml", "runs/a"]
    with child(command, cwd=tmp_path, stderr=PIPE, text=True, env=with_tests_on_path()) as process:
        wait_for(lambda: len(list(units.glob("*.nc"))) >= 2, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (
        "finished units are kept in runs/a: run(read_spec('runs/a'), folder='runs/a', resume=True) continues the run"
        in err
    )
    done = len(list(units.glob("*.nc")))
    assert 2 <= done < 8
    (run,) = json.loads(helmscope("runs", "--json")[1])["runs"]
    assert (run["state"], run["resume"]) == ("interrupted", "helmscope run --out runs/a --resume")
    code, _, err = helmscope(*run["resume"].split()[1:])
    assert code == 0, err
    assert f"8 units, {done} already done" in err
    assert contents(tmp_path / "runs" / "a") == contents(tmp_path / "undisturbed")


def test_an_interrupt_names_the_folder(tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("helmscope.jobs.simulate.SimulateJob.execute", stop)
    with pytest.raises(Interrupted) as caught:
        hs.jobs.run(SIMULATE, folder=tmp_path / "run")
    assert caught.value.folder.path == tmp_path / "run"
    assert hs.jobs.read_spec(tmp_path / "run") == SIMULATE


# The verb -------------------------------------------------------------------------------------------------------------


def test_the_verb_rejects_bad_input_in_one_sentence(helmscope, tmp_path):
    (tmp_path / "bad.toml").write_text('job = "simulate"\nbta = 1\n')
    for words, sentence in (
        (["bad.toml"], "unknown key of bad.toml 'bta': did you mean 'beta'?"),
        (["none.toml"], "cannot read none.toml: No such file or directory"),
        ([], "spec is missing, but it must be a TOML file; with --resume, --out FOLDER suffices"),
        (["--resume", "--out", "nowhere"], "cannot read nowhere: No such file or directory"),
    ):
        code, out, err = helmscope("run", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert sentence in err
    assert os.listdir(tmp_path) == ["bad.toml"]


def test_a_spec_that_runs_code_is_not_suggested_for_pasting(helmscope, tmp_path):
    """A spec names the folder whose code it runs, and a pasted line would not show it."""
    folder = hs.store.RunFolder.create(tmp_path / "runs" / "a")
    hs.runs.run_units([hs.runs.Unit("one", os.getcwd)], folder)
    (folder.path / "units" / "one.json").unlink()
    folder.write_spec(hs.jobs.spec_to_toml(TrialsSpec(claims_folder="evil")))
    (run,) = json.loads(helmscope("runs", "--json")[1])["runs"]
    assert (run["resume"], run["resume_refused"] != "") == ("", True)
    folder.write_spec(hs.jobs.spec_to_toml(TrialsSpec()))
    (run,) = json.loads(helmscope("runs", "--json")[1])["runs"]
    assert run["resume"] == "helmscope run --out runs/a --resume"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("no_pictures")
def test_a_long_run_shows_a_bar_unless_it_is_silenced(tmp_path, monkeypatch):
    """As if every run were a long one."""
    monkeypatch.setattr(bar, "PATIENCE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    hs.jobs.run(PHASE, folder=tmp_path / "silent", show_progress=False)
    assert sys.stderr.getvalue() == ""
    hs.jobs.run(PHASE, folder=tmp_path / "default")
    written = sys.stderr.getvalue()
    assert written.count("100%") == written.count("\n") == 1
    assert "running 4 units" in written
