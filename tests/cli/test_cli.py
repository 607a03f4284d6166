"""The command line: standard output and error, the run folder, and error messages."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, CompletedProcess

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.cli import SUMMARIES
from support.children import child, run_child, run_python, wait_for

COMMAND = Path(sys.executable).parent / "helmscope"
SMALL = ("--n", "4", "--batch", "2", "--times", "0,0.5,1", "--beta", "2", "--seed", "7")
FILES = ["manifest.json", "overview.nc", "overview.png", "spec.toml", "trajectory.nc", "units", "units.json"]


def process(*words: str, folder: Path) -> CompletedProcess[str]:
    """The same through the installed command."""
    return run_child([COMMAND, *words], cwd=folder)


def strict(text: str) -> dict:
    """JSON without NaN and Infinity, which most JSON parsers reject."""

    def forbidden(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=forbidden)


def by_library() -> hs.Simulation:
    return hs.integrate(hs.SA(2.0), hs.Uniform(4, 3).sample(2, seed=7), [0.0, 0.5, 1.0])


# A run ----------------------------------------------------------------------------------------------------------------


def test_a_run_matches_the_library(helmscope, tmp_path):
    code, out, err = helmscope("simulate", *SMALL, "--out", "run", "--json")
    assert code == 0
    report = strict(out)
    assert "integrating: 2 of 2 units, in 0 s" in [re.sub("[0-9]+ s$", "0 s", line) for line in err.splitlines()]
    assert sorted(os.listdir(tmp_path / "run")) == FILES
    simulation = by_library()
    kept = hs.overview(simulation.trajectory, beta=2.0)
    seen = hs.reduce_replicates(kept)
    run = hs.store.RunFolder.open("run")
    states = run.read_results("trajectory")
    assert states.states.dims == ("time", "system", "token", "axis")
    assert np.array_equal(states.states.values, simulation.states.numpy())
    assert states.time.values.tolist() == report["times"] == [0.0, 0.5, 1.0]
    stored = run.read_results("overview")
    assert stored.identical(kept)
    for name, rows in report["measured"].items():
        assert rows["value"] == seen[name].values.tolist()
        assert rows["stderr"] == seen[f"{name}_stderr"].values.tolist()
    assert set(report["measured"]) == {
        *(
            "close_pair_share",
            "order_parameter",
            "mean_inner_product",
            "cluster_count",
            "effective_rank",
            "interaction_energy",
        )
    }
    assert (report["ok"], report["outcome"], report["seed"], report["systems"]) == (True, "finished at t=1", 7, 2)
    assert (report["folder"], report["picture"]) == ("run", "run/overview.png")
    assert (tmp_path / "run" / "overview.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.usefixtures("no_picture")
def test_the_manifest_has_everything_to_repeat_the_run(helmscope):
    helmscope("simulate", *SMALL, "--causal", "--value", "-0.5", "--out", "run")
    manifest = hs.store.RunFolder.open("run").read_manifest()
    assert manifest.command == ("helmscope", "simulate", *SMALL, "--causal", "--value", "-0.5", "--out", "run")
    assert (manifest.seed, manifest.dtype, manifest.device) == (7, "float64", "cpu")
    assert manifest.threads == 1
    assert manifest.helmscope == hs.__version__
    given = {"beta": 2.0, "value": -0.5, "causal": True, "n": 4, "batch": 2, "times": [0.0, 0.5, 1.0]}
    chosen = {"field": "sa", "start": "uniform", "stepper": None, "dim": 3, "kappa": None, "step": None}
    defaults = {"nu": 0.0, "chunk": None, "tol": None, "merge": None, "delta": 1e-3, "max_angle": 0.1}
    assert dict(manifest.parameters) == given | chosen | defaults | {"summation": "auto", "summations": "Dense"}
    assert set(manifest.inputs) == {"start"}


def test_the_same_seed_gives_the_same_bytes_in_any_process(helmscope, tmp_path):
    """Standard output has only the JSON, standard error the progress."""
    assert helmscope("simulate", *SMALL, "--out", "first")[0] == 0
    # starting a process takes over a second: times of change, which HDF5 can store, would differ
    other = process("simulate", *SMALL, "--out", "second", "--json", folder=tmp_path)
    assert other.returncode == 0
    assert strict(other.stdout)["folder"] == "second"
    *lines, last = other.stderr.splitlines()
    assert all(line.startswith("integrating: ") for line in lines)
    assert last == "drawing the picture ..."
    assert helmscope("simulate", *SMALL[:-1], "8", "--out", "third")[0] == 0
    for name in (*FILES[1:5], "units/systems-000001.nc"):
        first, second, third = ((tmp_path / run / name).read_bytes() for run in ("first", "second", "third"))
        assert first == second != third


@pytest.mark.parametrize(
    ("words", "field", "start", "options"),
    [
        (["--field", "usa"], hs.USA(2.0), hs.Uniform(4, 3), {}),
        (["--value", "-1"], hs.SA(2.0, value=-torch.eye(3)), hs.Uniform(4, 3), {}),
        (["--causal"], hs.SA(2.0, causal=True), hs.Uniform(4, 3), {}),
        (["--merge", "0.3"], hs.SA(2.0), hs.Uniform(4, 3), {"merge": 0.3}),
        (["--tol", "1e-5"], hs.SA(2.0), hs.Uniform(4, 3), {"stepper": hs.DormandPrince(tol=1e-5)}),
        (["--start", "vmf", "--kappa", "5"], hs.SA(2.0), hs.VonMisesFisher(4, 3, kappa=5.0), {}),
        (["--start", "orthonormal", "--dim", "6"], hs.SA(2.0), hs.Orthonormal(4, 6), {}),
        (["--stepper", "euler"], hs.SA(2.0), hs.Uniform(4, 3), {"stepper": hs.solve.ProjectedEuler(0.05)}),
        (["--stepper", "heun"], hs.SA(2.0), hs.Uniform(4, 3), {"stepper": hs.solve.Heun(0.05)}),
        (["--stepper", "rk4", "--step", "0.1"], hs.SA(2.0), hs.Uniform(4, 3), {"stepper": hs.RK4(0.1)}),
        (["--stepper", "geodesic-euler"], hs.SA(2.0), hs.Uniform(4, 3), {"stepper": hs.solve.GeodesicEuler(0.05)}),
        (["--stepper", "geodesic-heun"], hs.SA(2.0), hs.Uniform(4, 3), {"stepper": hs.solve.GeodesicHeun(0.05)}),
        (["--stepper", "geodesic-rk4"], hs.SA(2.0), hs.Uniform(4, 3), {"stepper": hs.solve.GeodesicRK4(0.05)}),
        (["--stepper", "layer", "--step", "0.5"], hs.SA(2.0), hs.Uniform(4, 3), {"stepper": hs.Layer(0.5)}),
        (
            ["--stepper", "unprojected-euler"],
            hs.SA(2.0),
            hs.Uniform(4, 3),
            {"stepper": hs.solve.UnprojectedEuler(0.05)},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("no_picture")
def test_every_option_reaches_the_library(helmscope, words, field, start, options):
    assert helmscope("simulate", *SMALL, *words, "--out", "run")[0] == 0
    expected = hs.integrate(field, start.sample(2, seed=7), [0.0, 0.5, 1.0], **options).states.numpy()
    assert np.array_equal(hs.store.RunFolder.open("run").read_results("trajectory").states.values, expected)


@pytest.mark.usefixtures("no_picture")
def test_dtype_delta_radius_and_a_range_of_times(helmscope):
    helmscope(
        "simulate", *SMALL, "--times", "0:2:5", "--dtype", "float32", "--delta", "0.5", "--max-angle", "1", "--out", "a"
    )
    states = hs.store.RunFolder.open("a").read_results("trajectory")
    assert states.states.dtype == np.float32
    assert states.time.values.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    seen = hs.store.RunFolder.open("a").read_results("overview")
    cloud = torch.tensor(states.states.values)
    assert seen.close_pair_share.values.tolist() == hs.observe.close_pair_share(cloud, delta=0.5).double().tolist()
    assert seen.cluster_count.values.tolist() == hs.cluster_count(cloud, max_angle=1.0).double().tolist()


def test_text_output_and_the_default_folder(helmscope, tmp_path):
    code, out, _ = helmscope("simulate", *SMALL)
    assert code == 0
    (folder,) = os.listdir(tmp_path / "runs")
    assert folder.startswith("simulate-")
    assert sorted(os.listdir(tmp_path / "runs" / folder)) == FILES
    order = hs.overview(by_library().trajectory, beta=2.0).order_parameter.values[-1].mean()
    lines = out.splitlines()
    assert lines[0] == "finished at t=1"
    (systems,) = (words for words in lines if words.startswith("means over the systems at the end, with 95 %"))
    assert systems.endswith(f"n = {len(by_library().states[0])}:")
    (text,) = (line.split(": ")[1] for line in lines if line.strip().startswith("order_parameter: "))
    value, low, high = (float(word.strip("[],")) for word in text.split())
    assert low < value < high
    assert value == pytest.approx(order, rel=0.01)
    assert lines[-1] == f"folder: runs/{folder}"


def test_without_matplotlib_the_numbers_are_still_written(helmscope, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = helmscope("simulate", *SMALL, "--out", "run", "--json")
    assert code == 0
    assert "picture" not in strict(out)
    assert "pip install 'helmscope[report]'" in err
    assert sorted(os.listdir(tmp_path / "run")) == [name for name in FILES if name != "overview.png"]


# Edges ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--batch", "1"], ["--n", "1"], ["--times", "0"], ["--beta", "0"]], ids=" ".join)
def test_small_runs_succeed_with_text_and_json_output(helmscope, words):
    code, out, _ = helmscope("simulate", *SMALL, *words, "--out", "plain")
    assert code == 0
    assert out.startswith("finished at t=")
    code, out, _ = helmscope("simulate", *SMALL, *words, "--out", "json", "--json")
    assert code == 0
    assert strict(out)["ok"] is True


@pytest.mark.usefixtures("no_picture")
def test_an_energy_beyond_float64_is_not_json_infinity(helmscope):
    code, out, _ = helmscope("simulate", *SMALL, "--beta", "800", "--out", "run", "--json")
    assert code == 0
    assert strict(out)["measured"]["interaction_energy"]["value"] == [None] * 3


def test_a_run_that_cannot_finish_says_why_and_exits_1(helmscope, tmp_path):
    code, out, err = helmscope("simulate", *SMALL, "--field", "usa", "--beta", "800", "--out", "run", "--json")
    assert code == 1
    report = strict(out)
    assert report["ok"] is False
    assert report["outcome"].startswith("system 0 (of 0 to 1): step size fell below rounding at t=")
    assert "lower beta" in report["outcome"]
    assert "Traceback" not in err
    assert sorted(os.listdir(tmp_path / "run")) == [name for name in FILES if not name.startswith("overview")]
    states = hs.store.RunFolder.open("run").read_results("trajectory").states.values
    assert np.isfinite(states[0]).all()
    assert np.isnan(states[-1]).all()


def test_the_picture_is_also_written_where_plot_says(helmscope, tmp_path):
    code, out, _ = helmscope("simulate", *SMALL, "--out", "run", "--plot", "figure.pdf")
    assert code == 0
    assert "picture: figure.pdf" in out.splitlines()
    assert (tmp_path / "figure.pdf").read_bytes()[:5] == b"%PDF-"
    assert (tmp_path / "run" / "overview.png").is_file()
    unfinished = ("--field", "usa", "--beta", "800", "--plot", "none.png", "--out", "other")
    code, _, err = helmscope("simulate", *SMALL, *unfinished)
    assert code == 1
    assert "--plot: none.png is not written, because an incomplete run has no picture" in err
    assert not (tmp_path / "none.png").exists()


def test_a_step_limit_exits_1(helmscope, monkeypatch):
    monkeypatch.setattr("helmscope.jobs.simulate.make_stepper", lambda spec: hs.DormandPrince(max_steps=2))
    code, out, _ = helmscope("simulate", *SMALL, "--out", "run")
    assert code == 1
    assert "step limit reached at t=" in out
    assert "raise max_steps" in out


# Refusals -------------------------------------------------------------------------------------------------------------

REFUSED = {
    "--beta -1": "beta is -1.0",
    "--beta nan": "beta is nan",
    "--beta inf": "beta is inf",
    "--value nan": "value is nan",
    "--n 0": "n is 0",
    "--n -3": "n is -3",
    "--dim 1": "dim is 1",
    "--batch 0": "batch is 0",
    "--seed -1": "seed is -1",
    "--seed 4294967296": "seed is 4294967296",
    "--times 3,2": "times[1] is 2 after 3",
    "--times -1": "times[0] is -1",
    "--times x": "times[0] is 'x'",
    "--times 0,nan": "times[1] is nan",
    "--times 0,": "times[1] is ''",
    "--times 0:1": "times is '0:1'",
    "--times 0:1:1": "times is '0:1:1'",
    "--times 0:x:3": "times is 'x'",
    "--times 5:1:3": "times[1] is 3 after 5",
    "--field sb": "unknown field 'sb': did you mean 'sa'?",
    "--start unifrom": "unknown start 'unifrom': did you mean 'uniform'?",
    "--stepper rk5": "unknown stepper 'rk5': did you mean 'rk4'?",
    "--dtype float16": "dtype is 'float16', but it must be one of float64, float32",
    "--dtype float46": "unknown dtype 'float46': did you mean 'float64'?",
    "--device nosuch": "device is 'nosuch'",
    "--device cuda:99": "device is 'cuda:99'",
    "--device meta": "device is 'meta'",
    "--start vmf --kappa -1": "kappa is -1.0",
    "--start orthonormal --n 4 --dim 3": "n is 4",
    "--start vmf --kappa nan": "kappa is nan",
    "--kappa 2": "kappa is 2.0, but the start 'uniform' has no concentration: set start to 'vmf'",
    "--start orthonormal --dim 6 --kappa 1": "kappa is 1.0, but the start 'orthonormal' has no concentration",
    "--step 0.1": "step is 0.1, but the adaptive stepper chooses its own: use another stepper, such as rk4",
    "--stepper adaptive --step 0.1": "step is 0.1, but the adaptive stepper chooses its own",
    "--stepper rk4 --step 0": "step is 0.0",
    "--stepper rk4 --step nan": "step is nan",
    "--stepper rk4 --tol 1e-5": "tol is 1e-05, but the stepper 'rk4' has a fixed step size: set step instead",
    "--nu 0.1 --tol 1e-5": "tol is 1e-05, but the stepper 'euler-maruyama' has a fixed step size",
    "--allow-mixed": "--allow-mixed is given, but it applies only to a resumed run: add --resume",
    "--batch 1000000000000": "batch is 1000000000000, n is 4 and dim is 3, but that makes 9.6e+04 GB",
    f"--n 1{'0' * 400}": "000..., but it must be a whole number below 2^63",
    "--dim 10000000 --value 2": "value is 2 and dim is 10000000, but that makes 8e+05 GB",
    "--stepper layer --step 0.3": "multiples of",
    "--tol -1": "tol is -1.0",
    "--tol 0": "tol is 0.0",
    "--merge -1": "merge is -1.0",
    "--merge nan": "merge is nan",
    "--merge 0.1 --causal": "merge is 0.1",
    "--delta -1": "delta is -1.0",
    "--delta nan": "delta is nan",
    "--max-angle -1": "max_angle is -1.0",
    "--max-angle inf": "max_angle is inf",
    "--nu -1": "nu is -1.0",
    "--nu nan": "nu is nan",
    "--nu 0.1 --stepper rk4": "'rk4' and nu is 0.1, but noise requires euler-maruyama, stochastic-heun or noisy-layer",
    "--stepper euler-maruyama": "stepper is 'euler-maruyama', but it requires noise: set nu, for example nu = 0.1",
    "--nu abc": "--nu is 'abc', but it must be a number",
    "--workers 1.5": "--workers is '1.5', but it must be a whole number",
    "--times 0-2": "times is '0-2', but it must be numbers such as 0,1,5 or a range FROM:TO:COUNT such as 0:9:91",
    "--field cosine": "unknown field 'cosine'; allowed: sa, sinkhorn, usa",
    "--nu 0.1 --merge 0.1": "merge is 0.1",
    "--field sinkhorn --causal": "the only causal bistochastic kernel is the identity",
    "--chunk 0": "chunk is 0",
    "--workers 0": "workers is 0",
    "--threads 0": "threads is 0",
    "--max-memory 4": "max_memory is 4 bytes and workers is 1, but each worker needs at least 64 MB",
    "--max-memory 1MB --workers 2": "max_memory is 1000000 bytes and workers is 2, but each worker needs at least",
    "--max-memory lots": "max_memory is 'lots'",
    "--ray local --max-memory 4GB": "max_memory is 4GB, but with --ray",
}


def check_unsupported(code: object, out: str, err: str, sentence: str) -> None:
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("helmscope: ")
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_exit_2_and_no_folder(helmscope, tmp_path, words):
    check_unsupported(*helmscope("simulate", *SMALL, *words.split(), "--out", "run"), REFUSED[words])
    assert os.listdir(tmp_path) == []
    helmscope("simulate", *SMALL, *words.split())  # nor runs/simulate-DATE-TIME
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("words", ["--beta x", "--n 2.5", "--nosuch 1", "--beta", "extra"])
def test_parser_errors_have_the_same_form(helmscope, tmp_path, words):
    check_unsupported(*helmscope("simulate", *words.split()), words.split()[0])
    check_unsupported(*helmscope("simulat"), "simulat")
    assert os.listdir(tmp_path) == []


def test_a_folder_with_files_is_rejected_and_unchanged(helmscope, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    check_unsupported(*helmscope("simulate", *SMALL, "--out", "run"), "run already holds 'thesis.tex'")
    assert os.listdir(tmp_path / "run") == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    assert helmscope("simulate", *SMALL, "--out", "empty")[0] == 0


def test_a_file_instead_of_a_folder_is_rejected(helmscope, tmp_path):
    (tmp_path / "run").write_text("mine")
    check_unsupported(*helmscope("simulate", *SMALL, "--out", "run"), "run")
    check_unsupported(*helmscope("simulate", *SMALL, "--out", "run/below"), "run/below")
    assert (tmp_path / "run").read_text() == "mine"


def test_the_installed_command_rejects_bad_input_too(tmp_path):
    refused = process("simulate", "--beta", "-1", folder=tmp_path)
    check_unsupported(
        refused.returncode, refused.stdout, refused.stderr, "beta is -1.0, but it must be a finite number >= 0"
    )
    assert os.listdir(tmp_path) == []


# Help -----------------------------------------------------------------------------------------------------------------


def test_help_responds_within_half_a_second(tmp_path):
    took = []
    for _ in range(5):
        started = time.perf_counter()
        answer = process("--help", folder=tmp_path)
        took.append(time.perf_counter() - started)
        assert answer.returncode == 0
        assert "simulate" in answer.stdout
    assert min(took) < 0.5


def test_help_imports_nothing_heavy():
    code = "import sys, helmscope.cli; print({'torch', 'numpy', 'xarray', 'scipy', 'matplotlib'} & set(sys.modules))"
    answer = run_python(code, check=True)
    assert answer.stdout.strip() == "set()"


def test_the_help_cuts_no_summary_off(helmscope):
    code, out, _ = helmscope("--help")
    assert code == 0
    assert "..." not in out.partition("Commands:")[2]
    assert max(map(len, SUMMARIES.values())) <= 55
    assert len(SUMMARIES) == 8
    _, out, _ = helmscope("simulate", "--help")
    assert "default: 0.05, with noise 0.02" in " ".join(out.split())


def test_version_and_help(helmscope):
    assert helmscope("--version") == (0, f"helmscope {hs.__version__}\n", "")
    code, out, err = helmscope("simulate", "--help")
    assert (code, err) == (0, "")
    assert all(option in out for option in ("--beta", "--seed", "--device", "--out", "--json", "--times"))
    for words in ([], ["simulate"], ["claims"], ["claims", "list"]):
        assert helmscope(*words, "-h") == helmscope(*words, "--help")


def test_an_interrupt_prints_one_sentence_and_leaves_complete_files(tmp_path: Path) -> None:
    command = [COMMAND, "simulate", "--field", "usa", "--beta", "9", "--times", "0,1000", "--out", "run"]
    with child(command, cwd=tmp_path, stderr=PIPE, stdout=PIPE, text=True) as process:
        wait_for((tmp_path / "run" / "units.json").exists, process)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.splitlines()[-1].startswith("helmscope: interrupted")
    assert "Traceback" not in stderr
    assert sorted(os.listdir(tmp_path / "run")) == ["manifest.json", "spec.toml", "units", "units.json"]
    last_lines = stderr.splitlines()[-3:]
    assert last_lines == [
        "integrating: interrupted; finished units are kept in run, and a run of the same units resumes there",
        "resume with: helmscope simulate --field usa --beta 9 --times 0,1000 --out run --resume",
        "helmscope: interrupted; all files already written are complete",
    ]


def test_many_tokens_are_summed_without_their_pairs(helmscope):
    for method, name in (("auto", "Harmonic"), ("blockwise", "Blockwise")):
        words = ("--n", "2500", "--batch", "1", "--times", "0,0.05", "--summation", method, "--out", name)
        code, out, _ = helmscope("simulate", *words, "--json")
        assert code == 0
        assert hs.store.RunFolder.open(name).read_manifest().parameters["summations"] == name
        assert strict(out)["measured"]["order_parameter"]["value"][0] < 0.1


def test_an_unsuitable_summation_is_rejected(helmscope):
    code, _, err = helmscope("simulate", *SMALL, "--causal", "--summation", "harmonic")
    assert code == 2
    assert "summation is Harmonic(tol=None), but" in err
    code, _, err = helmscope("simulate", *SMALL, "--summation", "dens")
    assert (code, "did you mean 'dense'" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--times", "0:1:99999999999"), "COUNT from 2 to 1000000"),
        (("--out", ""), "out is ''"),
        (
            ("--field", "sinkhorn", "--n", "2000000", "--batch", "1", "--times", "0,1"),
            "n is 2000000 and chunk is 1, but 3.2e+04 GB",
        ),
    ],
)
def test_excessive_sizes_are_rejected_in_one_sentence(helmscope, words, sentence):
    code, out, err = helmscope("simulate", *words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("helmscope: ")
    assert sentence in err.splitlines()[-1]


def test_no_arguments_show_the_help(helmscope):
    code, out, err = helmscope()
    assert (code, err) == (0, "")
    assert "simulate" in out


def test_a_full_standard_output_is_one_sentence(tmp_path):
    with open("/dev/full", "w") as full:
        done = run_child([COMMAND, "simulate", *SMALL, "--json"], cwd=tmp_path, stdout=full)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "helmscope: cannot write" in done.stderr
