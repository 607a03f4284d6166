"""``run_units``: results as files, resuming, refusing, failing."""

from __future__ import annotations

import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import xarray as xr

from helmscope.runs import Serial, Unit, UnitsFailed, run_units
from helmscope.store import RunFolder, is_locked
from helmscope.types import HelmscopeError
from support.children import run_python
from support.toy_units import (
    contents,
    counting,
    dataset,
    divide,
    leave,
    manifest,
    mixture,
    noise,
    numbers,
    refuse,
    results,
)

MANIFEST = manifest()


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run")


# Results --------------------------------------------------------------------------------------------------------------


def test_results_round_trip(folder):
    result = run_units(mixture(3), folder, manifest=MANIFEST)
    assert result["numbers-0"] == numbers(0)
    assert result["noise-1"] == noise(1, 1000)
    assert result["dataset-2"].identical(dataset(2))
    assert list(result) == list(result.keys()) == ["numbers-0", "noise-1", "dataset-2"]
    assert len(result) == 3
    assert dict(result).keys() == {"numbers-0", "noise-1", "dataset-2"}
    assert result.failed == {}
    assert set(contents(folder.path)) == {
        *("manifest.json", "units.json", "units/dataset-2.nc", "units/noise-1.bin", "units/numbers-0.json")
    }
    assert folder.read_manifest() == MANIFEST
    assert not is_locked(folder.path)
    assert xr.load_dataset(folder.path / "units" / "dataset-2.nc", engine="h5netcdf").identical(dataset(2))
    assert json.loads((folder.path / "units" / "numbers-0.json").read_text())["result"] == numbers(0)
    with pytest.raises(HelmscopeError, match=r"unknown unit 'noise-2': did you mean 'noise-1'\?"):
        result["noise-2"]


# Resuming -------------------------------------------------------------------------------------------------------------


def test_a_second_call_runs_nothing_and_changes_nothing(folder):
    run_units(mixture(6), folder, manifest=MANIFEST)
    before = contents(folder.path)
    stamps = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    engine = counting()
    result = run_units(mixture(6), folder, manifest=manifest(command=["again"]), engine=engine)
    assert engine.started == []
    assert len(result) == 6
    assert contents(folder.path) == before
    assert {
        path: path.stat().st_mtime_ns for path in folder.path.rglob("*") if path.is_file()
    }.items() <= stamps.items()


def test_units_with_missing_or_damaged_results_run_again(folder, caplog):
    run_units(mixture(6), folder, manifest=MANIFEST)
    before = contents(folder.path)
    units = folder.path / "units"
    (units / "numbers-0.json").unlink()
    (units / "noise-1.bin").write_bytes(b"torn")
    (units / "dataset-2.nc").write_bytes(before["units/dataset-2.nc"][:-1])
    (units / "numbers-3.json").write_text('{"result": 7}')
    (units / ".noise-4.bin.0a1b2c3d.tmp").write_bytes(b"half")
    (folder.path / ".units.json.0a1b2c3d.tmp").write_bytes(b"half")
    (folder.path / ".lock").write_text("process 1 on nowhere")
    engine = counting()
    with caplog.at_level(logging.WARNING):
        run_units(reversed(mixture(6)), folder, manifest=MANIFEST, engine=engine)
    assert sorted(engine.started) == ["dataset-2", "noise-1", "numbers-0", "numbers-3"]
    assert contents(folder.path) == before
    warned = sorted(record.getMessage() for record in caplog.records)
    assert len(warned) == 3
    assert warned[0].endswith(
        "dataset-2.nc is truncated, damaged or not written by helmscope: unit 'dataset-2' runs again"
    )


def test_a_result_damaged_since_is_one_sentence(folder):
    result = run_units(mixture(3), folder, manifest=MANIFEST)
    (folder.path / "units" / "noise-1.bin").write_bytes(b"torn")
    with pytest.raises(
        HelmscopeError, match=r"^unit 'noise-1' no longer has a valid result in .*/run/units: run it ag"
    ):
        result["noise-1"]


def exchange(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


@pytest.mark.parametrize(("one", "two"), [(0, 3), (1, 4), (2, 5)], ids=["json", "bin", "nc"])
def test_exchanged_results_are_named_and_run_again(folder, caplog, capsys, one, two):
    units = mixture(6)
    run_units(units, folder, manifest=MANIFEST)
    before = contents(folder.path)
    (first, second) = (next((folder.path / "units").glob(f"{units[k].name}.*")) for k in (one, two))
    exchange(first, second)
    engine = counting()
    capsys.readouterr()
    with caplog.at_level(logging.WARNING):
        run_units(units, folder, manifest=MANIFEST, engine=engine, heading="toys")
    assert engine.started == [units[one].name, units[two].name]
    assert contents(folder.path) == before
    messages = [
        f"{path} is the result of another unit or of another run: unit '{path.stem}' runs again"
        for path in (first, second)
    ]
    assert [record.getMessage() for record in caplog.records] == messages
    assert [line for line in capsys.readouterr().err.splitlines() if "another" in line] == [
        f"toys: {message}" for message in messages
    ]


@pytest.mark.parametrize("begun", [replace(MANIFEST, seed=8), replace(MANIFEST, packages={"numpy": "0.1"})])
def test_a_result_of_another_run_is_not_accepted(tmp_path, begun):
    """Even for the same unit: it was computed with another seed or by other versions."""
    here, there = RunFolder(tmp_path / "here"), RunFolder(tmp_path / "there")
    for folder, what in ((here, MANIFEST), (there, begun)):
        run_units(mixture(3), RunFolder.create(folder.path), manifest=what)
    before = contents(here.path)
    for path in (there.path / "units").iterdir():
        (here.path / "units" / path.name).write_bytes(path.read_bytes())
    engine = counting()
    run_units(mixture(3), here, manifest=MANIFEST, engine=engine)
    assert len(engine.started) == 3
    assert contents(here.path) == before


def test_a_result_exchanged_since_is_refused(folder):
    result = run_units(mixture(6), folder, manifest=MANIFEST)
    exchange(folder.path / "units" / "noise-1.bin", folder.path / "units" / "noise-4.bin")
    with pytest.raises(HelmscopeError) as caught:
        result["noise-4"]
    assert str(caught.value) == (
        f"unit 'noise-4' no longer has a valid result in {folder.path}/units: run it again, because noise-4.bin is the "
        "result of another unit or of another run"
    )


def test_two_runs_at_different_times_are_byte_equal(tmp_path):
    first, second = RunFolder.create(tmp_path / "a"), RunFolder.create(tmp_path / "b")
    run_units(mixture(3), first, manifest=MANIFEST)
    time.sleep(1.1)  # HDF5 can store modification times, in seconds
    run_units(mixture(3), second, manifest=manifest())
    assert results(first.path) == results(second.path)
    assert (first.path / "units.json").read_bytes() == (second.path / "units.json").read_bytes()


@pytest.mark.parametrize(
    ("units", "sentence"),
    [
        ([], "units is empty, but a run needs at least one unit"),
        (Unit("a", divide), "units is a Unit, but it must be a list of Units"),
        ([divide], "units[0] is a function, but it must be a Unit"),
        (
            [*mixture(2), Unit("noise-1", divide)],
            "units[2] has the name 'noise-1' of an earlier one, but names must differ",
        ),
    ],
)
def test_bad_units_are_refused_before_anything_is_written(folder, units, sentence):
    with pytest.raises(HelmscopeError) as caught:
        run_units(units, folder, manifest=MANIFEST)
    assert str(caught.value) == sentence
    assert os.listdir(folder.path) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"manifest": {}}, "manifest is a dict, but it must be a Manifest"),
        ({"folder": "run"}, "folder is a str, but it must be a RunFolder"),
        ({"heading": 3}, "heading is an int, but it must be a str or None"),
        ({"fail_fast": "x"}, "fail_fast is a str, but it must be True or False"),
        ({"allow_mixed": 1}, "allow_mixed is an int, but it must be True or False"),
        ({"engine": 4}, "engine is 4, but it must be Serial(), Processes(workers) or Ray(workers)"),
        ({"engine": Serial}, f"engine is {Serial!r}, but it must be Serial(), Processes(workers) or Ray(workers)"),
    ],
)
def test_other_bad_input(folder, options, sentence):
    with pytest.raises(HelmscopeError) as caught:
        run_units(mixture(3), **{"folder": folder, "manifest": MANIFEST, **options})
    assert str(caught.value) == sentence
    assert os.listdir(folder.path) == []


def test_a_run_works_in_a_thread(folder):
    """In which no signal handler can be set."""
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(run_units, mixture(3), folder, manifest=MANIFEST).result()) == 3


def test_a_folder_in_use_is_refused(folder):
    with folder.lock(), pytest.raises(HelmscopeError, match=f"/run is in use by process {os.getpid()} on "):
        run_units(mixture(3), folder, manifest=MANIFEST)
    assert os.listdir(folder.path) == []


# Units that fail ------------------------------------------------------------------------------------------------------

FAULTY = [
    Unit("bad", divide, {"a": 1, "b": 0}),
    Unit("good", divide, {"a": 1, "b": 2}),
    Unit("sorry", refuse, {"value": -1}),
    Unit("wrong", divide, {"a": 1, "c": 2}),
    Unit("gone", leave),
    Unit("fine", numbers, {"seed": 1}),
]


def test_the_other_units_still_run_and_the_error_names_the_first_failure(folder, caplog):
    with pytest.raises(UnitsFailed) as caught:
        run_units(FAULTY, folder, manifest=MANIFEST)
    results = folder.path / "units"
    reason = "ZeroDivisionError: division by zero"
    assert str(caught.value) == f"unit 'bad' failed (and 3 more): {reason}; 2 results are kept in {results}"
    result = caught.value.result
    assert dict(result) == {"good": 0.5, "fine": numbers(1)}
    assert result.failed == {
        "bad": reason,
        "sorry": "value is -1, but it must be positive",
        "wrong": "TypeError: divide() got an unexpected keyword argument 'c'",
        "gone": "SystemExit: 3",
    }
    assert "in divide\n    return a / b" in caplog.text
    assert sorted(os.listdir(results)) == ["fine.json", "good.json"]
    with pytest.raises(HelmscopeError, match="unknown unit 'bad'"):
        result["bad"]
    engine = counting()
    with pytest.raises(UnitsFailed):
        run_units(FAULTY, folder, manifest=MANIFEST, engine=engine)
    assert engine.started == ["bad", "sorry", "wrong", "gone"]


def test_fail_fast_stops_at_the_first(folder):
    with pytest.raises(
        UnitsFailed, match=r"^unit 'bad' failed: ZeroDivisionError: division by zero; 0 results are kept"
    ):
        run_units(FAULTY, folder, manifest=MANIFEST, fail_fast=True)
    assert os.listdir(folder.path / "units") == []
    assert not is_locked(folder.path)


def test_the_name_of_the_plan_is_reserved(folder):
    with pytest.raises(HelmscopeError, match=r"name is 'units.json', but manifest.json, verdicts.json, units.json"):
        folder.write_bytes("units.json", b"")


def test_importing_runs_stays_light():
    code = (
        "import sys, helmscope.runs\n"
        "print(sorted({'torch', 'xarray', 'numpy', 'joblib', 'ray', 'rich'} & set(sys.modules)))"
    )
    done = run_python(code, check=True)
    assert done.stdout == "[]\n"
