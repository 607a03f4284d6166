"""Resuming requires the same units, the same manifest and the same conditions, in a folder with consistent files."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helmscope.runs import Serial, Unit, run_units
from helmscope.runs.plan import read_plan
from helmscope.store import RunFolder
from helmscope.types import HelmscopeError
from support.toy_units import contents, counting, manifest, mixture, numbers

MANIFEST = manifest()


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run")


@pytest.mark.parametrize(
    ("units", "sentence"),
    [
        (mixture(4), r"unit 'numbers-3' is not in .*/run/units.json: repeat the same units, or take a new folder"),
        (mixture(2), r"unit 'dataset-2' is missing, but it is in .*/run/units.json: repeat the same units, or"),
        (mixture(3, size=999), r"unit 'noise-1' has another function or other parameters than in .*/run/units.json: "),
        ([*mixture(2), Unit("dataset-2", numbers, {"seed": 2})], r"unit 'dataset-2' has another function or other par"),
    ],
)
def test_other_units_are_refused(folder, units, sentence):
    run_units(mixture(3), folder, manifest=MANIFEST)
    before = contents(folder.path)
    with pytest.raises(HelmscopeError, match=f"^{sentence}"):
        run_units(units, folder, manifest=MANIFEST, allow_mixed=True)
    assert contents(folder.path) == before


def changed(**versions: str):
    return replace(MANIFEST, packages={**MANIFEST.packages, **versions})


@pytest.mark.parametrize(
    ("now", "engine", "difference"),
    [
        (changed(numpy="0.1"), Serial(), f"numpy {MANIFEST.packages['numpy']} (now 0.1)"),
        (changed(torch="9.9"), Serial(), f"torch {MANIFEST.packages['torch']} (now 9.9)"),
        (replace(MANIFEST, helmscope="9"), Serial(), f"helmscope {MANIFEST.helmscope} (now 9)"),
        (replace(MANIFEST, python="4.0"), Serial(), f"python {MANIFEST.python} (now 4.0)"),
        (replace(MANIFEST, platform="RunPlan 9"), Serial(), f"platform {MANIFEST.platform} (now RunPlan 9)"),
        (MANIFEST, Serial(threads=2), "threads 1 (now 2)"),
        (
            replace(MANIFEST, python="4.0"),
            Serial(threads=2),
            f"python {MANIFEST.python} (now 4.0) and threads 1 (now 2)",
        ),
    ],
    ids=["numpy", "torch", "helmscope", "python", "platform", "threads", "two"],
)
def test_other_versions_and_threads_are_refused_unless_allowed(folder, now, engine, difference):
    run_units(mixture(3), folder, manifest=MANIFEST)
    before = contents(folder.path)
    with pytest.raises(HelmscopeError) as caught:
        run_units(mixture(3), folder, manifest=now, engine=engine)
    assert str(caught.value) == (
        f"{folder.path} was started with {difference}, so that results may differ in their last bits: go back to the "
        "original, choose a new folder, or set allow_mixed (--allow-mixed)"
    )
    assert contents(folder.path) == before
    assert read_plan(folder).mixed == []
    for _ in range(2):
        run_units(mixture(3), folder, manifest=now, engine=engine, allow_mixed=True)
        assert read_plan(folder).mixed == difference.split(" and ")
        assert folder.read_manifest() == MANIFEST
    run_units(mixture(3), folder, manifest=MANIFEST)


def test_another_cpu_is_refused(folder, monkeypatch):
    run_units(mixture(3), folder, manifest=MANIFEST)
    here = read_plan(folder).cpu
    monkeypatch.setattr(sys.modules["helmscope.runs.run_units"], "cpu", lambda: "Z80")
    with pytest.raises(HelmscopeError) as caught:
        run_units(mixture(3), folder, manifest=MANIFEST)
    assert f"was started with CPU {here} (now Z80), so that results may differ" in str(caught.value)


def test_a_package_installed_or_removed_since_does_not_matter(folder):
    run_units(mixture(3), folder, manifest=MANIFEST)
    more, fewer = changed(ray="2.60.0"), replace(MANIFEST, packages={"numpy": MANIFEST.packages["numpy"]})
    for now in (more, fewer, replace(MANIFEST, created="2025-01-31T12:00:00+00:00", command=["again"])):
        assert len(run_units(mixture(3), folder, manifest=now)) == 3


HASH = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
BEGUN = replace(MANIFEST, inputs={"texts": HASH}, parameters={"beta": 4.0})


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 8}, "seed 0 (now 8)"),
        ({"dtype": "float32"}, "dtype 'float64' (now 'float32')"),
        ({"device": "cuda"}, "device 'cpu' (now 'cuda')"),
        ({"parameters": {"beta": 1.0}}, "parameter 'beta' 4.0 (now 1.0)"),
        ({"parameters": {"beta": 4.0, "n": 2}}, "parameter 'n' missing (now 2)"),
        ({"parameters": {}, "seed": 8}, "seed 0 (now 8) and parameter 'beta' 4.0 (now missing)"),
        ({"inputs": {"texts": HASH[::-1]}}, f"input 'texts' '{HASH[:56]}... (now '{HASH[::-1][:56]}...)"),
    ],
)
def test_another_manifest_is_refused(folder, change, difference):
    run_units(mixture(3), folder, manifest=BEGUN)
    before = contents(folder.path)
    with pytest.raises(HelmscopeError) as caught:
        run_units(mixture(3), folder, manifest=replace(BEGUN, **change), allow_mixed=True)
    assert str(caught.value) == (
        f"{folder.path} was started with {difference}: use the original values or choose a new folder"
    )
    assert contents(folder.path) == before


def test_if_versions_changed_computed_inputs_may_change_too(folder):
    run_units(mixture(3), folder, manifest=BEGUN)
    now = replace(BEGUN, python="4.0", inputs={"texts": HASH[::-1]})
    with pytest.raises(HelmscopeError, match=r"python .* \(now 4.0\) and input 'texts' .*, so that results may differ"):
        run_units(mixture(3), folder, manifest=now)
    run_units(mixture(3), folder, manifest=now, allow_mixed=True)
    assert [change[:13] for change in read_plan(folder).mixed] == ["input 'texts'", f"python {MANIFEST.python}"[:13]]


def test_without_a_manifest_that_of_the_folder_is_kept(folder):
    run_units(mixture(3), folder, manifest=replace(BEGUN, seed=8))
    before = contents(folder.path)
    assert len(run_units(mixture(3), folder)) == 3
    assert contents(folder.path) == before


def test_a_run_killed_before_its_plan_was_written_is_resumed(folder):
    folder.write_manifest(BEGUN)
    with pytest.raises(HelmscopeError, match=r"was started with parameter 'beta' 4.0 \(now 1.0\)"):
        run_units(mixture(3), folder, manifest=replace(BEGUN, parameters={"beta": 1.0}))
    assert os.listdir(folder.path) == ["manifest.json"]
    assert len(run_units(mixture(3), folder, manifest=BEGUN)) == 3


# Inconsistent folders -------------------------------------------------------------------------------------------------


def without(name: str):
    return lambda folder: (folder / name).unlink()


def edited(name: str, old: str, new: str):
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return edit


@pytest.mark.parametrize(
    ("damage", "how"),
    [
        (without("units.json"), "units holds the result 'dataset-2.nc', but units.json is missing"),
        (without("manifest.json"), "units.json is there, but manifest.json is missing"),
        (edited("manifest.json", '"seed": 0', '"seed": 9'), "seed is 9 in manifest.json, but 0 in units.json"),
        (edited("units.json", '"seed": 0', '"seed": 9'), "seed is 0 in manifest.json, but 9 in units.json"),
        (
            edited("manifest.json", '"beta": 4.0', '"beta": 1.0'),
            "parameter 'beta' is 1.0 in manifest.json, but 4.0 in units.json",
        ),
        (
            edited("manifest.json", '"beta": 4.0', '"b\\u001b": 4.0'),
            "parameter 'beta' is missing in manifest.json, but 4.0 in units.json",
        ),
        (
            edited("manifest.json", f'"python": "{MANIFEST.python}"', '"python": "4.0"'),
            f"python is '4.0' in manifest.json, but '{MANIFEST.python}' in units.json",
        ),
        (edited("manifest.json", '"threads": 1', '"threads": 2'), "threads is 2 in manifest.json, but 1 in units.json"),
    ],
)
@pytest.mark.parametrize("allow_mixed", [False, True])
def test_inconsistent_files_are_named_and_nothing_is_changed(folder, damage, how, allow_mixed):
    run_units(mixture(3), folder, manifest=BEGUN)
    damage(folder.path)
    before = contents(folder.path)
    with pytest.raises(HelmscopeError) as caught:
        run_units(mixture(3), folder, manifest=BEGUN, allow_mixed=allow_mixed)
    assert str(caught.value) == (
        f"the parts of {folder.path} disagree: {how}: put back what was there, or take a new folder"
    )
    assert contents(folder.path) == before


def test_a_plan_or_a_manifest_of_another_run_is_refused(tmp_path):
    here, there = RunFolder.create(tmp_path / "here"), RunFolder.create(tmp_path / "there")
    run_units(mixture(3), here, manifest=BEGUN)
    run_units(mixture(3), there, manifest=replace(BEGUN, seed=8))
    for name, sentence in (("units.json", "seed is 0 in .* but 8 in"), ("manifest.json", "seed is 8 in .* but 0 in")):
        kept = (here.path / name).read_bytes()
        (here.path / name).write_bytes((there.path / name).read_bytes())
        for asked in (BEGUN, replace(BEGUN, seed=8)):
            with pytest.raises(HelmscopeError, match=sentence):
                run_units(mixture(3), here, manifest=asked)
        (here.path / name).write_bytes(kept)
    assert len(run_units(mixture(3), here, manifest=BEGUN)) == 3


def test_the_manifest_may_gain_parameters(folder):
    """Such as the kernel that was used, which is known only at the end."""
    run_units(mixture(3), folder, manifest=BEGUN)
    folder.write_manifest(replace(BEGUN, parameters={**BEGUN.parameters, "kernel": "Dense"}))
    before = contents(folder.path)
    run_units(mixture(3), folder, manifest=BEGUN)
    assert contents(folder.path) == before


def test_editing_the_threads_in_the_plan_invalidates_its_results(folder):
    run_units(mixture(3), folder, manifest=MANIFEST)
    plan = json.loads((folder.path / "units.json").read_text())
    (folder.path / "units.json").write_text(json.dumps({**plan, "threads": 2}))
    engine = counting(threads=2)
    run_units(mixture(3), folder, manifest=MANIFEST, engine=engine)
    assert len(engine.started) == 3


@pytest.mark.parametrize("name", ["manifest.json", "units.json"])
def test_the_error_names_a_damaged_file(folder, name):
    run_units(mixture(3), folder, manifest=MANIFEST)
    (folder.path / name).write_text('{"units": 3')
    with pytest.raises(HelmscopeError, match=f"/run/{name} is not valid JSON: "):
        run_units(mixture(3), folder, manifest=MANIFEST)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"units": ...}, "has no key 'units', but it must have units, manifest, cpu, threads, mixed"),
        ({"units": []}, "units of .*units.json is a list, but it must be"),
        ({"units": {"a": 1}}, "a of units of .* is an int, but it must be a str"),
        ({"manifest": 3}, "manifest of .*units.json is an int, but it must be an object with named values"),
        ({"threads": 0}, "threads of .* is 0, but it must be a whole number >= 1"),
        ({"mixed": ""}, "mixed of .*units.json is a str, but it must be a list"),
        ({"\x1b[2J": 1}, r"unknown key of .*units.json '\\x1b\[2J'; allowed"),
    ],
)
def test_the_plan_is_decoded_strictly(folder, change, sentence):
    folder.write_manifest(MANIFEST)
    plan = {"units": {}, "manifest": {}, "cpu": "", "threads": 1, "mixed": [], **change}
    text = json.dumps({key: value for key, value in plan.items() if value is not ...})
    (folder.path / "units.json").write_text(text)
    with pytest.raises(HelmscopeError, match=sentence):
        run_units(mixture(3), folder, manifest=MANIFEST)
