"""Resumed runs: --resume, --workers and ``helmscope runs``."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
from pathlib import Path
from subprocess import DEVNULL, CompletedProcess

import pytest

import helmscope as hs
from support.children import child, run_child, wait_for

pytestmark = pytest.mark.usefixtures("no_picture")
COMMAND = Path(sys.executable).parent / "helmscope"
WORDS = ("simulate", "--n", "6", "--batch", "8", "--chunk", "1", "--times", "0,1", "--nu", "0.2", "--step", "0.01")


def contents(folder: Path) -> dict[str, bytes]:
    """Every result by its path, without the manifest, which contains the time."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("manifest.json", ".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def killed(folder: Path, *words: str, after: int) -> None:
    """Start the command and kill it with SIGKILL once this many units are done."""
    with child([COMMAND, *words], cwd=folder, stderr=DEVNULL, stdout=DEVNULL) as process:
        wait_for(lambda: len(list((folder / "run" / "units").glob("*.nc"))) >= after, process)
        process.kill()


def test_a_killed_run_resumes_to_the_same_bytes(helmscope, tmp_path):
    words = (*WORDS, "--n", "24", "--step", "0.004")
    assert helmscope(*words, "--out", "undisturbed")[0] == 0
    killed(tmp_path, *words, "--out", "run", after=2)
    done = len(list((tmp_path / "run" / "units").glob("*.nc")))
    assert 2 <= done < 8
    code, out, _ = helmscope("runs", ".", "--json")
    state = {run["name"]: run for run in json.loads(out)["runs"]}
    assert (code, state["run"]["state"], state["run"]["done"], state["run"]["total"]) == (0, "interrupted", done, 8)
    assert state["undisturbed"]["state"] == "complete"
    line = state["run"]["resume"].split()
    assert line[0] == "helmscope"
    assert line[-3:] == ["--out", "run", "--resume"]
    code, _, err = helmscope(*line[1:])
    assert code == 0
    assert f"8 units, {done} already done" in err
    assert contents(tmp_path / "run") == contents(tmp_path / "undisturbed")


def test_jobs_and_chunks_do_not_change_the_results(helmscope, tmp_path):
    assert helmscope(*WORDS, "--out", "serial")[0] == 0
    assert helmscope(*WORDS, "--workers", "2", "--max-memory", "8GB", "--out", "parallel")[0] == 0
    assert contents(tmp_path / "serial") == contents(tmp_path / "parallel")
    assert helmscope(*WORDS, "--chunk", "5", "--out", "coarse")[0] == 0
    whole, coarse = (hs.store.RunFolder.open(name).read_results("trajectory") for name in ("serial", "coarse"))
    assert whole.identical(coarse)


def test_an_existing_run_is_not_overwritten(helmscope, tmp_path):
    helmscope(*WORDS, "--out", "run")
    before = contents(tmp_path / "run")
    code, _, err = helmscope(*WORDS, "--out", "run")
    assert code == 2
    assert err == "helmscope: run contains an earlier run: add --resume to continue it, or choose a new folder\n"
    code, _, err = helmscope(*WORDS, "--beta", "3", "--out", "run", "--resume")
    assert code == 2
    assert "run was started with beta 4.0 (now 3.0): use the original values or choose a new folder" in err
    code, _, err = helmscope(*WORDS, "--threads", "2", "--out", "run", "--resume")
    assert code == 2
    assert "threads 1 (now 2)" in err
    assert err.endswith("set allow_mixed (--allow-mixed)\n")
    assert helmscope(*WORDS, "--threads", "2", "--out", "run", "--resume", "--allow-mixed")[0] == 0
    assert json.loads((tmp_path / "run" / "units.json").read_text())["mixed"] == ["threads 1 (now 2)"]
    del before["units.json"]
    after = contents(tmp_path / "run")
    del after["units.json"]
    assert after == before


def test_a_finished_run_resumes_to_itself(helmscope, tmp_path):
    helmscope(*WORDS, "--out", "run")
    before = contents(tmp_path / "run")
    assert helmscope(*WORDS, "--out", "run", "--resume")[0] == 0
    assert contents(tmp_path / "run") == before


def manifest_edited(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_inconsistent_folder_is_not_resumed(helmscope, tmp_path):
    """States of one beta are never combined with the energy of another."""
    helmscope(*WORDS, "--beta", "1", "--out", "run")
    plan = (tmp_path / "run" / "units.json").read_bytes()
    (tmp_path / "run" / "units.json").unlink()
    before = contents(tmp_path / "run")
    for beta in ("1", "4"):
        code, out, err = helmscope(*WORDS, "--beta", beta, "--out", "run", "--resume")
        assert (code, out, err) == (
            *(2, ""),
            "helmscope: the parts of run disagree: units holds the result 'systems-000000.nc', but units.json is "
            "missing: put back what was there, or take a new folder\n",
        )
    assert contents(tmp_path / "run") == before
    (tmp_path / "run" / "units.json").write_bytes(plan)
    manifest_edited(tmp_path / "run", seed=99)
    for seed in ("0", "99"):
        code, out, err = helmscope(*WORDS, "--beta", "1", "--seed", seed, "--out", "run", "--resume")
        assert (code, out) == (2, "")
        assert "the parts of run disagree: seed is 99 in manifest.json, but 0 in units.json" in err
    manifest_edited(tmp_path / "run", seed=0)
    code, out, err = helmscope(*WORDS, "--beta", "1", "--delta", "0.5", "--out", "run", "--resume")
    assert (code, out) == (2, "")
    assert "run was started with delta 0.001 (now 0.5): use the original values" in err
    assert helmscope(*WORDS, "--beta", "1", "--out", "run", "--resume")[0] == 0


def test_swapped_units_are_reported_and_recomputed(helmscope, tmp_path):
    helmscope(*WORDS, "--out", "run")
    helmscope(*WORDS, "--beta", "1", "--out", "other")
    before = contents(tmp_path / "run")
    units, others = tmp_path / "run" / "units", tmp_path / "other" / "units"
    one, two, three = (f"systems-00000{k}.nc" for k in (1, 2, 3))
    (units / one).write_bytes(before[f"units/{two}"])
    (units / two).write_bytes(before[f"units/{one}"])
    (units / three).write_bytes((others / three).read_bytes())
    code, _, err = helmscope(*WORDS, "--out", "run", "--resume")
    assert code == 0
    assert err.splitlines()[:3] == [
        f"integrating: run/units/{name} is the result of another unit or of another run: unit '{name[:-3]}' runs again"
        for name in (one, two, three)
    ]
    assert contents(tmp_path / "run") == before


def test_resume_needs_a_folder(helmscope, tmp_path):
    code, _, err = helmscope(*WORDS, "--resume")
    assert (code, err.count("\n")) == (2, 1)
    assert "add --out FOLDER" in err
    code, _, err = helmscope(*WORDS, "--resume", "--out", "nothing")
    assert code == 2
    assert "nothing is not a run folder" in err
    assert os.listdir(tmp_path) == []


def test_a_locked_folder_is_rejected(helmscope, tmp_path):
    helmscope(*WORDS, "--out", "run")
    with hs.store.RunFolder.open("run").lock():
        code, _, err = helmscope(*WORDS, "--out", "run", "--resume")
    assert code == 2
    assert f"run is in use by process {os.getpid()}" in err


def test_two_processes_on_one_folder_do_not_disturb_each_other(helmscope, tmp_path):
    words = (*WORDS, "--n", "24", "--step", "0.004")
    assert helmscope(*words, "--out", "undisturbed")[0] == 0
    with child([COMMAND, *words, "--out", "run"], cwd=tmp_path, stdout=DEVNULL) as first:
        wait_for(lambda: list((tmp_path / "run" / "units").glob("*.nc")), first)
        first.send_signal(signal.SIGSTOP)  # it holds the folder for as long as the second takes to start
        code, out, err = helmscope(*words, "--out", "run", "--resume")  # the second process is this one
        first.send_signal(signal.SIGCONT)
        assert first.wait(timeout=60) == 0
    assert (code, out) == (2, "")
    assert err.startswith(f"helmscope: run is in use by process {first.pid} on ")
    assert err.count("\n") == 1
    (tmp_path / "run" / "overview.png").write_bytes(b"")  # as in this process, which draws none
    assert contents(tmp_path / "run") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_an_unwritable_standard_error_does_not_stop_the_run(tmp_path, where):
    def shell(words: str) -> CompletedProcess[str]:
        return run_child(["sh", "-c", f"'{COMMAND}' {words} {where}"], cwd=tmp_path)

    done = shell("simulate --n 4 --batch 2 --times 0,1 --out run --json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] is True
    assert hs.store.RunFolder.open(tmp_path / "run").read_results("overview").sizes["system"] == 2
    refused = shell("simulate --n 0")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_the_list_of_runs(helmscope, tmp_path):
    assert helmscope("runs") == (0, "no runs in runs\n", "")
    code, _, err = helmscope("runs", "elsewhere")
    assert code == 2
    assert err == "helmscope: cannot read elsewhere: No such file or directory\n"
    helmscope(*WORDS)
    (name,) = os.listdir("runs")
    code, out, _ = helmscope("runs")
    assert code == 0
    assert out.startswith(f"{name}  complete, 8 of 8 units  ")
    assert "simulate --n 6" in out
    assert "resume with" not in out
    (tmp_path / "runs" / name / "units" / "systems-000003.nc").unlink()
    code, out, _ = helmscope("runs")
    assert f"--out runs/{name} --resume" in out
    (tmp_path / "runs" / name / "manifest.json").write_text("{")
    assert "damaged" in helmscope("runs")[1]


EVIL = "\x1b]0;pwned\x07\x9b31m\u202e\nrm -rf ~"


@pytest.fixture
def stopped(tmp_path):
    """An interrupted run."""
    folder = hs.store.RunFolder.create(tmp_path / "runs" / "a")
    hs.runs.run_units([hs.runs.Unit(name, statistics.fmean, {"data": [1, 2]}) for name in ("one", "two")], folder)
    (folder.path / "units" / "one.json").unlink()
    return folder.path


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["helmscope", "simulate", "--n", "6; rm -rf ~"], "helmscope simulate --n '6; rm -rf ~' --out runs/a --resume"),
        (["helmscope", "phase", "$(id)", "`id`"], "helmscope phase '$(id)' '`id`' --out runs/a --resume"),
        (["helmscope", "report", "it's", "!!"], "helmscope report 'it'\"'\"'s' '!!' --out runs/a --resume"),
    ],
)
def test_a_command_to_paste_is_quoted(helmscope, stopped, command, line):
    manifest_edited(stopped, command=command)
    assert helmscope("runs")[1].splitlines()[2] == f"    resume with: {line}"
    assert json.loads(helmscope("runs", "--json")[1])["runs"][0]["resume"] == line


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["helmscope", "simulate", EVIL], "its command line or path contains control characters or other"),
        (
            ["helmscope", "simulate", "\udcff"],
            "its command line or path contains control characters or other",
        ),
        (
            ["rm", "-rf", "/home/me"],
            "it was not started by a command with the option --resume: repeat the original call",
        ),
        (["helmscope", "doctor", "x"], "it was not started by a command with the option --resume"),
        ([], "it was not started by a command with the option --resume"),
    ],
)
def test_a_hostile_command_is_not_suggested(helmscope, stopped, command, why):
    manifest_edited(stopped, command=command)
    code, out, _ = helmscope("runs")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert lines[2].startswith(f"    no command to resume it is suggested, because {why}")
    record = json.loads(helmscope("runs", "--json")[1])["runs"][0]
    assert (record["resume"], record["command"]) == ("", command)
    assert record["resume_refused"].startswith(why)


def test_control_characters_of_a_run_folder_are_escaped(helmscope, stopped, tmp_path):
    manifest_edited(stopped, created="2025-01-31\x1b12:00:00+00:00")  # Python takes any character between them
    (tmp_path / "runs" / "a").rename(tmp_path / "runs" / "\x1b[2J\u202e")
    (tmp_path / "runs" / "b").mkdir()
    (tmp_path / "runs" / "b" / "manifest.json").write_text(json.dumps({EVIL: 1}))
    code, out, err = helmscope("runs")
    lines = out.splitlines()
    assert (code, err, len(lines)) == (0, "", 5)
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("b  damaged")
    assert r"\x1b]0;pwned\x07\x9b31m\u202e\nrm -rf ~" in lines[1]
    assert lines[2].startswith(r"\x1b[2J\u202e  interrupted, 1 of 2 units  2025-01-31\x1b12:00:00+00:00")
    code, _, err = helmscope(*WORDS, "--out", "runs/b", "--resume")
    assert (code, err.count("\n"), err[:-1].isprintable()) == (2, 1, True)


def test_memory_is_limited(helmscope):
    """A share that holds the program but not the pairs of 2,000 tokens: 256 MB for each matrix of them in 8 systems."""
    words = ("simulate", "--n", "2000", "--batch", "8", "--chunk", "8", "--times", "0,0.01", "--max-memory", "600MB")
    code, out, err = helmscope(*words)
    assert (code, out) == (2, "")
    assert "unit 'systems-000000' failed" in err.splitlines()[-1]
    assert "lower" in err.splitlines()[-1]


def test_libraries_that_do_not_fit_are_a_memory_error(tmp_path):
    """Not a missing package, as h5netcdf reports if h5py could not be loaded."""
    words = ("simulate", "--n", "4", "--batch", "4", "--times", "0,1", "--max-memory", "100MB")
    done = run_child([COMMAND, *words], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(
        "helmscope: unit 'systems-000000' failed (and 3 more): it needs more memory than its 100 MB, max_memory: raise"
    )
