"""The command ``helmscope phase``."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from subprocess import DEVNULL

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.jobs.phase import phase_unit
from helmscope.observe.half_times import half_time
from helmscope.observe.phase import phase_diagram, published_scheme_probability
from support.children import child, wait_for

COMMAND = Path(sys.executable).parent / "helmscope"
SMALL = ("phase", "--n", "4", "--dims", "3,9", "--betas", "1,4", "--times", "0,2,4", "--samples", "3", "--seed", "7")
CASE = {"betas": [1.0, 4.0], "times": [0.0, 2.0, 4.0], "samples": 3, "seed": 7}
FILES = ["half-time.nc", "manifest.json", "phase.html", "phase.nc", "phase.png", "spec.toml", "units", "units.json"]


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing takes most of the time of a small run."""
    monkeypatch.setattr("helmscope.plots.style.png", lambda figure: b"")
    monkeypatch.setattr("helmscope.plots.phase.phase_figure", lambda data: None)
    monkeypatch.setattr("helmscope.plots.phase.phase_page", lambda data: "")


def strict(text: str) -> dict:
    """JSON without NaN and Infinity."""

    def forbidden(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=forbidden)


def contents(folder: Path) -> dict[str, bytes]:
    """Every result by its path, without the manifest, which contains the time."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("manifest.json", ".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_matches_the_library(helmscope, tmp_path):
    code, out, err = helmscope(*SMALL, "--out", "run", "--json")
    assert code == 0
    report = strict(out)
    assert sorted(os.listdir(tmp_path / "run")) == FILES
    assert err.splitlines()[1].startswith("4 rows of 3 samples: roughly ")
    assert "phase diagram: 4 of 4 units" in err
    stored = hs.store.RunFolder.open("run").read_results("phase")
    assert stored.probability.dims == ("dim", "beta", "time")
    assert (stored.attrs["n"], stored.attrs["summation"], "dim" in stored.attrs) == (3, "Dense", False)
    for dim in (3, 9):
        start = hs.Uniform(4, dim)
        seen = phase_diagram(hs.SA, start=start, **CASE)
        seen = seen.assign(published_scheme_probability(hs.SA, start=start, **CASE).data_vars)
        here = stored.sel(dim=dim)
        for name in seen.data_vars:
            assert np.array_equal(here[name].values, seen[name].values)
            assert report[name][(3, 9).index(dim)] == seen[name].values.tolist()
        assert np.array_equal(here.hitting_time.values, seen.hitting_time.values)
    half = hs.store.RunFolder.open("run").read_results("half-time")
    assert half.equals(half_time(stored))
    assert report["dims"] == [3, 9]
    assert (report["betas"], report["times"], report["samples"]) == ([1.0, 4.0], [0.0, 2.0, 4.0], 3)
    assert (report["ok"], report["lost_samples"], report["page"]) == (True, 0, "run/phase.html")
    assert (tmp_path / "run" / "phase.png").read_bytes()[:4] == b"\x89PNG"
    assert b"Plotly.newPlot" in (tmp_path / "run" / "phase.html").read_bytes()


@pytest.mark.usefixtures("no_pictures")
def test_the_manifest_names_the_methods_used(helmscope):
    helmscope(*SMALL, "--value", "-1", "--out", "run")
    manifest = hs.store.RunFolder.open("run").read_manifest()
    assert (manifest.seed, manifest.dtype, manifest.device, manifest.threads) == (7, "float64", "cpu", 1)
    given = {"n": 4, "dims": [3, 9], "betas": [1.0, 4.0], "times": [0.0, 2.0, 4.0], "samples": 3}
    used = {"summation": "Dense", "stepper": "DormandPrince(tol=1e-06, max_steps=200000)", "field": "sa"}
    rest = {"value": -1.0, "published": True, "causal": False, "nu": 0.0, "spectrum": None, "delta": 1e-3}
    assert dict(manifest.parameters) == given | used | rest


@pytest.mark.usefixtures("no_pictures")
def test_text_output_and_the_default_folder(helmscope, tmp_path):
    code, out, _ = helmscope(*SMALL)
    assert code == 0
    (folder,) = os.listdir(tmp_path / "runs")
    assert folder.startswith("phase-")
    lines = out.splitlines()
    assert lines[0].startswith("[low, high]")
    lines = lines[1:]
    assert lines[0].split() == ["dim", "beta", "t*", "P", "at", "t", "=", "4", "time", "of", "P", "=", "1/2"]
    assert len(lines) == 1 + 4 + 3
    star = hs.hitting_time(hs.SA(4.0), n=4, delta=1e-3)
    assert lines[2].split()[:3] == ["3", "4", f"{star:.4g}"]
    assert lines[-1] == f"folder: runs/{folder}"


@pytest.mark.usefixtures("no_pictures")
def test_equal_samples_are_called_equal_instead_of_an_interval_of_width_0(helmscope):
    _, out, _ = helmscope(*SMALL, "--times", "0,60", "--betas", "1", "--dims", "3", "--no-published")
    assert " 1, all equal " in out
    assert "[1, 1]" not in out


METRIC = torch.diag(torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64))
OPTIONS = {
    "--field usa": (hs.USA, {}),
    "--field sinkhorn": (hs.SinkhornAttention, {}),
    "--value -1": (lambda beta: hs.SA(beta, value=-torch.eye(3)), {}),
    "--causal": (lambda beta: hs.SA(beta, causal=True), {}),
    "--spectrum 1,0.5,0.25": (lambda beta: hs.SA(beta, query_key=METRIC), {}),
    "--nu 0.05": (hs.SA, {"noise": hs.noise.IsotropicNoise(0.05)}),
    "--delta 0.3": (hs.SA, {"delta": 0.3}),
}


@pytest.mark.parametrize("words", OPTIONS)
@pytest.mark.usefixtures("no_pictures")
def test_every_option_reaches_the_library(helmscope, words):
    field, options = OPTIONS[words]
    assert helmscope(*SMALL, "--dim", "3", *words.split(), "--out", "run")[0] == 0
    seen = phase_diagram(field, start=hs.Uniform(4, 3), **CASE, **options)
    stored = hs.store.RunFolder.open("run").read_results("phase")
    assert np.array_equal(stored.probability.values[0], seen.probability.values)
    assert ("probability_published" in stored) == (words.split()[0] not in ("--field", "--nu"))


@pytest.mark.usefixtures("no_pictures")
def test_ranges_defaults_and_huge_dimensions(helmscope):
    code, out, _ = helmscope(*SMALL, "--betas", "1:4:4", "--dims", "1048576", "--no-published", "--out", "a", "--json")
    assert code == 0
    report = strict(out)
    assert report["betas"] == [1.0, 2.0, 3.0, 4.0]
    assert "probability_published" not in report
    assert helmscope(*SMALL, "--spectrum", "1,0.5,0.25", "--dims", "3", "--out", "b")[0] == 0
    assert helmscope("phase", "--n", "3", "--samples", "2", "--spectrum", "1,2", "--times", "0,1", "--out", "c")[0] == 0
    assert hs.store.RunFolder.open("c").read_results("phase").dim.values.tolist() == [2]


@pytest.mark.usefixtures("no_pictures")
def test_an_infinite_end_of_an_interval_is_not_null(helmscope):
    """P does not reach 1/2 by t = 0.1: the half-time is anywhere above."""
    words = (*SMALL, "--dims", "9", "--betas", "4", "--times", "0,0.1", "--no-published", "--json")
    report = strict(helmscope(*words)[1])
    assert (report["half_time"], report["half_time_high"]) == ([[None]], [["inf"]])
    assert report["half_time_low"] == [[0.1]]


@pytest.mark.usefixtures("no_pictures")
def test_the_curve_has_values_between_the_betas(helmscope):
    helmscope(*SMALL, "--out", "run")
    stored = hs.store.RunFolder.open("run").read_results("phase")
    beta = stored.fine_beta.values
    assert (len(beta), beta[0], beta[-1]) == (201, 1.0, 4.0)
    assert stored.fine_hitting_time.values[100] == hs.hitting_time(hs.SA(beta[100]), n=4, delta=1e-3)
    assert stored.fine_hitting_time.values[[0, -1]].tolist() == stored.hitting_time.values.tolist()
    helmscope(*SMALL, "--causal", "--out", "causal")
    assert "fine_hitting_time" not in hs.store.RunFolder.open("causal").read_results("phase").coords


def test_without_the_extras_the_numbers_are_still_written(helmscope, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    code, out, err = helmscope(*SMALL, "--out", "run", "--json")
    assert code == 0
    assert {"picture", "page"}.isdisjoint(strict(out))
    assert "no picture: matplotlib is not installed" in err
    assert "no page: plotly is not installed" in err
    assert sorted(os.listdir(tmp_path / "run")) == [name for name in FILES if name not in ("phase.png", "phase.html")]


@pytest.mark.usefixtures("no_pictures")
def test_lost_samples_exit_1_but_the_rest_is_printed(helmscope):
    words = (*SMALL, "--field", "usa", "--betas", "1,800", "--times", "1,2", "--dims", "3")
    code, out, err = helmscope(*words, "--out", "run", "--json")
    assert code == 1
    report = strict(out)
    assert (report["ok"], report["lost_samples"]) == (False, 3)
    assert report["probability"][0][1] == [None, None]
    assert None not in report["probability"][0][0]
    assert "3 samples could not be integrated to the last time" in err
    assert err.splitlines()[1].startswith("2 rows of 3 samples: ")


# Resumed runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_pictures")
def test_status_lines_say_what_takes_seconds(helmscope):
    code, _, err = helmscope(*SMALL, "--out", "run")
    assert code == 0
    lines = err.splitlines()
    assert lines[0] == "estimating ..."
    assert lines[-2:] == ["drawing the picture ...", "drawing the page ..."]


@pytest.mark.usefixtures("no_pictures")
def test_a_killed_run_resumes_to_the_same_bytes(helmscope, tmp_path):
    words = (*SMALL, "--n", "16", "--betas", "1:9:4", "--times", "0:20:41", "--no-published")
    assert helmscope(*words, "--out", "undisturbed")[0] == 0
    units = tmp_path / "run" / "units"
    with child([COMMAND, *words, "--out", "run"], cwd=tmp_path, stderr=DEVNULL) as process:
        wait_for(lambda: len(list(units.glob("*.nc"))) >= 2, process)
        process.kill()
    done = len(list(units.glob("*.nc")))
    assert 2 <= done < 8
    code, _, err = helmscope(*words, "--out", "run", "--resume")
    assert code == 0
    assert f"8 units, {done} already done" in err
    assert contents(tmp_path / "run") == contents(tmp_path / "undisturbed")


@pytest.mark.usefixtures("no_pictures")
def test_jobs_do_not_change_the_results_and_a_finished_run_resumes_to_itself(helmscope, tmp_path):
    assert helmscope(*SMALL, "--out", "serial")[0] == 0
    before = contents(tmp_path / "serial")
    assert helmscope(*SMALL, "--workers", "2", "--out", "parallel")[0] == 0
    assert contents(tmp_path / "parallel") == before
    assert helmscope(*SMALL, "--out", "serial", "--resume")[0] == 0
    assert contents(tmp_path / "serial") == before
    code, out, err = helmscope(*SMALL, "--samples", "4", "--out", "serial", "--resume")
    assert (code, out) == (2, "")
    assert "serial was started with samples 3 (now 4): use the original values or choose a new folder" in err
    path = tmp_path / "serial" / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 99'))
    code, out, err = helmscope(*SMALL, "--out", "serial", "--resume")
    assert (code, out) == (2, "")
    assert "the parts of serial disagree: seed is 99 in manifest.json, but 7 in units.json" in err


@pytest.mark.usefixtures("no_pictures")
def test_a_dtype_that_units_choose_is_added_to_the_manifest(helmscope, tmp_path, monkeypatch):
    """As on a GPU, where it is known only when a unit runs."""
    monkeypatch.setattr("helmscope.jobs.phase.default_dtype", lambda device: "auto")
    assert helmscope(*SMALL, "--no-published", "--out", "run")[0] == 0
    manifest = hs.store.RunFolder("run").read_manifest()
    assert (manifest.dtype, manifest.parameters["dtype"]) == ("auto", "float64")
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    assert helmscope(*SMALL, "--no-published", "--out", "run", "--resume")[0] == 0
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before


def test_a_unit_is_a_block_of_the_diagram():
    shared_parameters = {"field": "sa", "value": 1.0, "causal": False, "nu": 0.0, "spectrum": None, "n": 4}
    shared_parameters |= {"times": (0.0, 2.0, 4.0), "samples": 3, "delta": 1e-3, "published": False}
    shared_parameters |= {"seed": 7, "dtype": None, "device": "cpu"}
    part = phase_unit(3, [4.0], shared_parameters)
    whole = phase_diagram(hs.SA, start=hs.Uniform(4, 3), **CASE)
    assert np.array_equal(part.probability.values[0], whole.probability.values[1])


# Refusals -------------------------------------------------------------------------------------------------------------

REFUSED = {
    "--field sb": "unknown field 'sb': did you mean 'sa'?",
    "--field sinkhorn --causal": "the only causal bistochastic kernel is the identity",
    "--value nan": "value is nan",
    "--nu -1": "nu is -1.0",
    "--nu 0.1 --published": "nu is 0.1, but the published scheme has no noise",
    "--spectrum 1,2": "spectrum has 2 eigenvalues, but B has 3 in dimension 3",
    "--spectrum 1,x,2": "spectrum[1] is 'x'",
    "--n 1": "n of start is 1, but a pair needs two tokens",
    "--n 0": "n is 0",
    "--dims 1": "dims[0] is 1",
    "--dims 3,x": "dims[1] is 'x'",
    "--dims 3,3": "dims is [3, 3]",
    "--betas -1": "betas[0] is -1",
    "--betas 2,1": "betas[1] is 1",
    "--betas x": "betas[0] is 'x'",
    "--betas 1:2": "betas is '1:2'",
    "--betas 1:2:1": "betas is '1:2:1'",
    "--times 3,2": "times[1] is 2 after 3",
    "--times 0:1": "times is '0:1'",
    "--samples 0": "samples is 0",
    "--samples 1000000000000": "samples is 1000000000000, n is 4 and times has 3 values, but that makes",
    "--delta -1": "delta is -1.0",
    "--seed -1": "seed is -1",
    "--dtype float16": "dtype is 'float16', but it must be one of float64, float32",
    "--dtype float46": "unknown dtype 'float46': did you mean 'float64'?",
    "--device nosuch": "device is 'nosuch'",
    "--workers 0": "workers is 0",
    "--threads 0": "threads is 0",
    "--max-memory lots": "max_memory is 'lots'",
    "--resume": "--resume is given, but the folder of the run is not: add --out FOLDER",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_exit_2_and_no_folder(helmscope, tmp_path, words):
    code, out, err = helmscope(*SMALL, *words.split())
    assert (code, out) == (2, "")
    assert err.startswith("helmscope: ")
    assert len(err.splitlines()) == 1
    assert REFUSED[words] in err
    assert os.listdir(tmp_path) == []


def test_the_picture_is_written_to_a_file_of_choice(helmscope, tmp_path):
    words = ("phase", "--n", "4", "--dims", "3", "--betas", "1", "--times", "0,4", "--samples", "2", "--no-published")
    code, out, err = helmscope(*words, "--plot", "figure.pdf", "--json")
    assert code == 0
    report = strict(out)
    assert (report["ok"], report["picture"]) == (True, "figure.pdf")
    assert "picture:" not in err
    assert (tmp_path / report["folder"] / "phase.png").exists()
    assert (tmp_path / "figure.pdf").read_bytes()[:4] == b"%PDF"


def test_a_picture_of_another_kind_is_refused_before_the_run(helmscope, tmp_path):
    code, out, err = helmscope(*SMALL, "--plot", "figure.doc")
    assert (code, out) == (2, "")
    assert err == "helmscope: --plot is 'figure.doc', but it must end in one of .png, .svg, .pdf\n"
    assert os.listdir(tmp_path) == []


def test_help_shows_the_whole_figure(helmscope):
    code, out, _ = helmscope("phase", "--help")
    assert code == 0
    assert "--dims 2,8,32,128,512,1024 --betas 0.1:9:90" in " ".join(out.split())


@pytest.mark.usefixtures("no_pictures")
def test_the_half_time_of_one_sample_has_no_interval(helmscope):
    words = ("phase", "--n", "4", "--dims", "3", "--betas", "1", "--times", "0,4,20", "--samples", "1", "--seed", "7")
    code, out, _ = helmscope(*words)
    assert code == 0
    assert "0, no interval" in out or "1, no interval" in out
    assert re.search(r"  \d+(\.\d+)?, no interval$", out, re.M)
    assert "nan" not in out
