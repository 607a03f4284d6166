"""The command ``helmscope density``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.meanfield import CircleGrid, Density, SphereGrid, ZonalGrid, evolve
from helmscope.meanfield.growth import growth_rates
from helmscope.meanfield.stationary import stationary_density
from helmscope.observe.density_overview import density_overview

SMALL = ("density", "--beta", "1", "--nu", "0.2", "--degree", "16", "--times", "0,0.5,1")
FILES = ["density.nc", "density.png", "manifest.json", "overview.nc", "spec.toml", "units", "units.json"]
MEASURED = {
    *("mass", "order_parameter", "entropy", "relative_entropy", "minimum", "negative_mass"),
    *("interaction_energy", "free_energy", "free_energy_rate"),
}


def strict(text: str) -> dict:
    """JSON without NaN and Infinity."""

    def forbidden(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=forbidden)


def perturbed(grid, size=0.1):
    return Density.from_function(grid, lambda x: 1 + size * x[..., 0], normalize=True)


def by_library(field=None, *, grid=None, start=None, noise=0.2, **options):
    field = hs.SA(beta=1.0) if field is None else field
    start = perturbed(CircleGrid(degree=16) if grid is None else grid) if start is None else start
    if isinstance(noise, float):
        noise = hs.noise.IsotropicNoise(noise) if noise else None
    return evolve(field, start, times=[0, 0.5, 1], noise=noise, **options)


def contents(folder: Path) -> dict[str, bytes]:
    """Every result by its path, without the manifest, which contains the time."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("manifest.json", ".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_matches_the_library(helmscope, tmp_path):
    code, out, err = helmscope(*SMALL, "--field", "usa", "--out", "run", "--json")
    assert code == 0
    report = strict(out)
    assert sorted(os.listdir(tmp_path / "run")) == FILES
    path = by_library(hs.USA(beta=1.0))
    stored = hs.store.RunFolder.open("run").read_results("density")
    assert stored.modes.dims == ("time", "harmonic")
    assert np.array_equal(stored.modes.values, path.modes.numpy())
    assert np.array_equal(stored.degree.values, path.grid.degrees.numpy())
    overview = density_overview(path)
    assert hs.store.RunFolder.open("run").read_results("overview").identical(overview)
    assert set(report["measured"]) == MEASURED
    for name, values in report["measured"].items():
        assert values == overview[name].values[:, 0].tolist()
    assert report["times"] == [0.0, 0.5, 1.0]
    assert (report["ok"], report["outcome"], report["steps"]) == (True, "finished at t=1", path.steps)
    assert (report["folder"], report["picture"]) == ("run", "run/density.png")
    assert (tmp_path / "run" / "density.png").read_bytes()[:4] == b"\x89PNG"
    assert "evolving: 1 of 1 unit" in err


OPTIONS = {
    "--field sa": lambda: by_library(),
    "--field none": lambda: by_library(lambda x: 0 * x),
    "--value -1": lambda: by_library(hs.SA(beta=1.0, value=-torch.eye(2))),
    "--nu 0": lambda: by_library(noise=0.0),
    "--tol 1e-5": lambda: by_library(tol=1e-5),
    "--positive": lambda: by_library(positive=True),
    "--perturbation -0.5": lambda: by_library(start=perturbed(CircleGrid(degree=16), -0.5)),
    "--start vmf --kappa 2": lambda: by_library(start=Density.von_mises_fisher(CircleGrid(degree=16), kappa=2.0)),
    "--dim 3": lambda: by_library(grid=SphereGrid(degree=16)),
    "--dim 3 --zonal": lambda: by_library(grid=ZonalGrid(dim=3, degree=16)),
    "--dim 8": lambda: by_library(grid=ZonalGrid(dim=8, degree=16)),
    "--nu-axis 0.1": lambda: by_library(noise=along_axis(0.1)),
    "--nu-axis 0.1 --process ito": lambda: by_library(noise=along_axis(0.1, process=hs.noise.Ito())),
    "--nu-axis 0.4 --process stratonovich --dim 3": lambda: by_library(
        grid=SphereGrid(degree=16), noise=along_axis(0.4, dim=3, process=hs.noise.Stratonovich())
    ),
    "--nu-axis 0.4 --process divergence --dim 8": lambda: by_library(
        grid=ZonalGrid(dim=8, degree=16), noise=along_axis(0.4, dim=8, process=hs.noise.DivergenceForm())
    ),
    "--field force": lambda: by_library(lambda x: torch.eye(x.shape[-1]).to(x)[0].expand_as(x)),
    "--field force --strength -0.5 --dim 8": lambda: by_library(
        lambda x: -0.5 * torch.eye(x.shape[-1]).to(x)[0].expand_as(x), grid=ZonalGrid(dim=8, degree=16)
    ),
    "--field force --strength 0 --swirl 0.7": lambda: by_library(
        lambda x: 0.7 * torch.stack([-x[..., 1], x[..., 0]], -1)
    ),
}


def along_axis(strength, *, dim=2, **options):
    """nu = 0.2 in all directions but the first."""
    diagonal = torch.tensor([strength] + (dim - 1) * [0.2], dtype=torch.float64)
    return hs.noise.MatrixNoise(torch.diag(diagonal), **options)


@pytest.mark.parametrize("words", OPTIONS)
@pytest.mark.usefixtures("no_picture")
def test_every_option_reaches_the_library(helmscope, words):
    attention = "--field none" not in words and "--field force" not in words
    common = SMALL if attention else ("density", *SMALL[3:])  # no beta without attention
    assert helmscope(*common, *words.split(), "--out", "run")[0] == 0
    stored = hs.store.RunFolder.open("run").read_results("density")
    path = OPTIONS[words]()
    assert np.abs(stored.modes.values - path.modes.numpy()).max() < 1e-12
    assert ("log_modes" in stored) == (path.log_modes is not None)


@pytest.mark.usefixtures("no_picture")
def test_a_mode_of_the_uniform_density_grows_at_its_rate(helmscope):
    """k (k + d - 2) (lambda_k / beta - nu), the closed form, at k = 2 on the circle."""
    words = (
        "--perturbation-degree",
        "2",
        "--perturbation",
        "3e-5",
        "--times",
        "0,2",
        "--beta",
        "4",
        "--nu",
        "0.1",
        "--tol",
        "1e-14",
    )
    assert helmscope(*SMALL, *words, "--out", "run")[0] == 0
    modes = hs.store.RunFolder.open("run").read_results("density").modes.values
    (k,) = np.flatnonzero(np.abs(modes[0]) > 1e-8)[1:]
    rate = float(growth_rates(hs.SA(beta=4.0), dim=2, nu=0.1)[2])
    assert np.log(modes[1, k] / modes[0, k]) / 2 == pytest.approx(rate, abs=1e-8)


@pytest.mark.usefixtures("no_picture")
def test_the_default_run_ends_at_the_stationary_density(helmscope, tmp_path):
    code, out, _ = helmscope("density", "--times", "0,60")
    assert code == 0
    lines = out.splitlines()
    assert lines[:2] == ["finished at t=60", "at t=60:"]
    (order,) = (float(line.split(": ")[1]) for line in lines if line.strip().startswith("order_parameter"))
    stationary = stationary_density(hs.SA(beta=4.0), CircleGrid(degree=64), hs.noise.IsotropicNoise(0.1))
    assert order == pytest.approx(float(stationary.mean.norm()), abs=1e-5)
    (folder,) = os.listdir(tmp_path / "runs")
    assert folder.startswith("density-")
    assert lines[-1] == f"folder: runs/{folder}"


@pytest.mark.usefixtures("no_picture")
def test_a_density_that_the_grid_cannot_resolve_exits_1_with_the_times_before(helmscope, tmp_path):
    words = ("--nu", "0", "--beta", "4", "--times", "0:20:21")
    code, out, _ = helmscope(*SMALL, *words, "--out", "run", "--json")
    report = strict(out)
    assert (code, report["ok"]) == (1, False)
    assert report["outcome"].startswith("the grid no longer resolves the density at t=")
    assert 0 < len(report["times"]) < 21
    assert len(report["measured"]["mass"]) == len(report["times"])
    code, out, _ = helmscope(*SMALL, *words[:-1], "20", "--out", "none", "--json")
    report = strict(out)
    assert (code, report["times"], report["measured"], "picture" in report) == (1, [], {}, False)
    code, out, _ = helmscope(*SMALL, *words[:-1], "20", "--out", "text")
    assert code == 1
    assert out.splitlines()[1:] == ["folder: text"]


def test_the_picture_is_written_even_if_the_run_ended_early(helmscope, tmp_path):
    words = ("--nu", "0", "--beta", "4", "--times", "0:20:21")
    code, out, err = helmscope(*SMALL, *words, "--plot", "figure.svg")
    assert code == 1
    assert [line for line in (out + err).splitlines() if line.startswith("picture")] == ["picture: figure.svg"]
    assert (tmp_path / "figure.svg").read_bytes()[:5] == b"<?xml"


def test_without_matplotlib_the_numbers_are_still_written(helmscope, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = helmscope(*SMALL, "--out", "run", "--json")
    assert code == 0
    assert "picture" not in strict(out)
    assert "no picture: matplotlib is not installed" in err
    assert sorted(os.listdir(tmp_path / "run")) == [name for name in FILES if name != "density.png"]


@pytest.mark.usefixtures("no_picture")
def test_a_run_resumes_to_itself_and_from_its_spec(helmscope, tmp_path):
    assert helmscope(*SMALL, "--out", "run")[0] == 0
    before = contents(tmp_path / "run")
    assert helmscope(*SMALL, "--out", "run", "--resume")[0] == 0
    assert contents(tmp_path / "run") == before
    (tmp_path / "run" / "units" / "density.nc").unlink()  # as after a kill
    assert helmscope("run", "--out", "run", "--resume")[0] == 0
    assert contents(tmp_path / "run") == before
    assert helmscope("run", "run", "--out", "again")[0] == 0
    assert contents(tmp_path / "again") == before
    code, out, err = helmscope(*SMALL, "--nu", "0.3", "--out", "run", "--resume")
    assert (code, out) == (2, "")
    assert "run was started with nu 0.2 (now 0.3): use the original values or choose a new folder" in err
    code, out, _ = helmscope("runs")
    assert code == 0


@pytest.mark.usefixtures("no_picture")
def test_the_manifest_has_everything_to_repeat_the_run(helmscope):
    helmscope(*SMALL, "--out", "run")
    manifest = hs.store.RunFolder.open("run").read_manifest()
    assert manifest.command == ("helmscope", *SMALL, "--out", "run")
    assert (manifest.seed, manifest.dtype, manifest.device, manifest.threads) == (0, "float64", "cpu", 1)
    given = {"field": "sa", "beta": 1.0, "nu": 0.2, "degree": 16, "times": [0.0, 0.5, 1.0]}
    filled = {"value": 1.0, "start": "uniform", "perturbation": 0.1, "perturbation_degree": 1, "kappa": None}
    rest = {"dim": 2, "zonal": False, "positive": False, "tol": 1e-9}
    absent = dict.fromkeys(("strength", "swirl", "nu_axis", "process"))
    assert dict(manifest.parameters) == given | filled | rest | absent
    assert set(manifest.inputs) == {"start"}


@pytest.mark.usefixtures("no_picture")
def test_the_free_energy_of_a_force_and_its_rate(helmscope):
    """U = cos t, nu = 1/2: F of the known digits at t = 0 and 1; with a swirl it may rise."""
    words = ("density", "--field", "force", "--nu", "0.5", "--degree", "24", "--tol", "1e-11")
    code, out, _ = helmscope(*words, "--perturbation", "0", "--times", "0,0.001,40", "--json")
    assert code == 0
    report = strict(out)["measured"]
    times, energy, rate = [0.0, 0.001, 40.0], report["free_energy"], report["free_energy_rate"]
    assert energy[0] == pytest.approx(-0.5 * np.log(2 * np.pi), abs=1e-12)
    assert (energy[1] - energy[0]) / times[1] == pytest.approx((rate[0] + rate[1]) / 2, rel=1e-6)
    gibbs = -0.5 * np.log(2 * np.pi * np.i0(2.0))  # -nu log int e^{U / nu}
    assert energy[2] == pytest.approx(gibbs, abs=1e-8)
    assert rate[2] == pytest.approx(0, abs=1e-8)
    words = (*words, "--swirl", "8", "--start", "vmf", "--kappa", "2", "--times", "0:0.5:51", "--json")
    report = strict(helmscope(*words)[1])["measured"]
    energy, rate = np.array(report["free_energy"]), np.array(report["free_energy_rate"])
    assert (np.diff(energy) > 0).any()
    middle = (rate[1:] + rate[:-1]) / 2
    assert np.abs(np.diff(energy) / 0.01 - middle).max() < 2e-2 * np.abs(rate).max()


def test_the_picture_of_a_force_names_it(helmscope, tmp_path):
    words = ("density", "--field", "force", "--swirl", "0.5", "--nu-axis", "0.3", "--times", "0,1")
    code, out, err = helmscope(*words, "--plot", "figure.svg")
    assert code == 0, err
    text = (tmp_path / "figure.svg").read_text()
    assert "AxisForce" in text
    assert "MatrixNoise" in text
    assert "free_energy" not in out  # anisotropic noise has none


REFUSED = {
    "--strength 1": "strength is 1, but the field 'sa' is not a force: omit it",
    "--field force": "beta is 1, but the field 'force' has no attention: omit it",
    "--process ito": "process is 'ito', but it makes a difference for anisotropic noise only",
    "--nu-axis 0.1 --process itos": "unknown process 'itos': did you mean 'ito'?",
    "--nu-axis -1": "nu_axis is -1.0, but it must be a finite number >= 0",
    "--field sb": "unknown field 'sb': did you mean 'sa'?",
    "--field none": "beta is 1, but the field 'none' has no attention: omit it",
    "--beta -1": "beta is -1.0",
    "--beta 99": "degree is 16, but the kernel e^(beta <x, y>) with beta=99 needs a grid with degree=",
    "--value nan": "value is nan",
    "--nu -1": "nu is -1.0, but it must be a finite number >= 0",
    "--start vfm": "unknown start 'vfm': did you mean 'vmf'?",
    "--start vmf --kappa 99": "degree is 16, but a density with kappa=99 needs a grid with degree=",
    "--kappa 2": "kappa is 2, but it belongs to the start 'vmf', not to 'uniform'",
    "--perturbation 1.5": "perturbation is 1.5, but it must be in [-1, 1]",
    "--perturbation 1 --positive": "with positive=True it must be above",
    "--perturbation-degree 17": "perturbation_degree is 17, but it must be at most degree, 16",
    "--perturbation-degree 0": "perturbation_degree is 0, but it must be a whole number >= 1",
    "--dim 1": "dim is 1, but it must be a whole number >= 2",
    "--dim 4 --no-zonal": "in more than 3 dimensions only zonal densities can be evolved: set zonal to true",
    "--degree 0": "degree is 0",
    "--times 1,0": "times[1] is 0 after 1",
    "--times x": "times[0] is 'x'",
    "--tol 0": "tol is 0.0",
    "--workers 0": "workers is 0",
    "--plot figure.doc": "--plot is 'figure.doc', but it must end in one of .png, .svg, .pdf",
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
