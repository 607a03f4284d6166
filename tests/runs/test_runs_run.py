"""``run``: results as files, resuming, refusing, failing."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from children import run_python
from helmscope.runs import Serial, Unit, UnitsFailed, run
from helmscope.runs.plan import read_plan
from helmscope.runs.results import encode_result, is_whole, read_result
from helmscope.store import RunFolder, is_locked
from helmscope.types import HelmscopeError
from toy_units import contents, dataset, divide, leave, manifest, mixture, noise, numbers, refuse, results

MANIFEST = manifest()


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run")


class Counting(Serial):
    """Notes which units are run."""

    def attempts(self, units):
        self.asked.extend(unit.name for unit in units)
        return super().attempts(units)

    asked: list[str]


def counting() -> Counting:
    engine = Counting()
    object.__setattr__(engine, "asked", [])
    return engine


# Results --------------------------------------------------------------------------------------------------------------


def test_results_come_back_as_they_were(folder):
    result = run(mixture(3), folder, manifest=MANIFEST)
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


@pytest.mark.parametrize(
    "value",
    [None, True, 0, 2**70, 0.1, -0.0, "é\udcff", "", [], {}, [1, [2.5, None]], {"b": {"a": 1}}, b"", bytes(range(256))],
    ids=repr,
)
def test_plain_results_round_trip(tmp_path, value):
    ending, data = encode_result(value)
    path = tmp_path / f"a{ending}"
    path.write_bytes(data)
    assert is_whole(path)
    assert repr(read_result(path)) == repr(value)
    assert encode_result(read_result(path)) == (ending, data)


def test_no_part_of_a_result_passes_for_the_whole(tmp_path):
    rng = np.random.default_rng(0)
    for value in (numbers(0), noise(0, 300), dataset(0)):
        ending, data = encode_result(value)
        path = tmp_path / f"a{ending}"
        cuts = {*range(40), *range(len(data) - 40, len(data)), *rng.integers(0, len(data), 40).tolist()}
        broken = [data[:cut] for cut in cuts]
        for place in rng.integers(0, len(data), 60).tolist():
            broken.append(data[:place] + bytes([data[place] ^ 1 << rng.integers(8)]) + data[place + 1 :])
        for content in (*broken, data + b"x", b"{}", b"[]", b'{"result": 1, "sha256": "ab"}'):
            path.write_bytes(content)
            # white space is no part of a JSON value, and such a file still holds the result
            if is_whole(path):
                assert ending == ".json"
                assert read_result(path) == value
                assert json.loads(content) == json.loads(data)
            else:
                with pytest.raises(HelmscopeError):
                    read_result(path)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (math.nan, "the result is nan, but it must be made of None, bool, int, finite float, str, list and dict"),
        ({"a": [object()]}, "item 0 of a of the result is a object, but it must be made of"),
        (np.int64(3), "the result is a int64, but it must be made of"),
        (xr.Dataset(attrs={"a": None}), "cannot keep the result: "),
    ],
)
def test_result_that_no_file_could_hold_is_refused(value, sentence):
    with pytest.raises(HelmscopeError, match=f"^{sentence}"):
        encode_result(value)


# Resuming -------------------------------------------------------------------------------------------------------------


def test_a_second_call_runs_nothing_and_changes_nothing(folder):
    run(mixture(6), folder, manifest=MANIFEST)
    before = contents(folder.path)
    stamps = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    engine = counting()
    result = run(mixture(6), folder, manifest=manifest(command=["again"]), engine=engine)
    assert engine.asked == []
    assert len(result) == 6
    assert contents(folder.path) == before
    assert {
        path: path.stat().st_mtime_ns for path in folder.path.rglob("*") if path.is_file()
    }.items() <= stamps.items()


def test_what_is_missing_or_damaged_runs_again(folder, caplog):
    run(mixture(6), folder, manifest=MANIFEST)
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
        run(reversed(mixture(6)), folder, manifest=MANIFEST, engine=engine)
    assert sorted(engine.asked) == ["dataset-2", "noise-1", "numbers-0", "numbers-3"]
    assert contents(folder.path) == before
    warned = sorted(record.getMessage() for record in caplog.records)
    assert len(warned) == 3
    assert warned[0].endswith(
        "dataset-2.nc is truncated or damaged, or something else wrote it: unit 'dataset-2' runs again"
    )


def test_a_result_damaged_since_is_one_sentence(folder):
    result = run(mixture(3), folder, manifest=MANIFEST)
    (folder.path / "units" / "noise-1.bin").write_bytes(b"torn")
    with pytest.raises(
        HelmscopeError, match=r"^unit 'noise-1' no longer has a whole result in .*/run/units: run it ag"
    ):
        result["noise-1"]


def test_two_runs_at_different_times_are_byte_equal(tmp_path):
    first, second = RunFolder.create(tmp_path / "a"), RunFolder.create(tmp_path / "b")
    run(mixture(3), first, manifest=MANIFEST)
    time.sleep(1.1)  # HDF5 can store times of change, in seconds
    run(mixture(3), second, manifest=manifest())
    assert results(first.path) == results(second.path)
    assert (first.path / "units.json").read_bytes() == (second.path / "units.json").read_bytes()


@pytest.mark.parametrize(
    ("units", "sentence"),
    [
        (mixture(4), r"unit 'numbers-3' is not in .*/run/units.json: repeat the same units, or take a new folder"),
        (mixture(2), r"unit 'dataset-2' is not asked for, but stands in .*/run/units.json: repeat the same units, or"),
        (mixture(3, size=999), r"unit 'noise-1' has another function or other parameters than in .*/run/units.json: "),
        ([*mixture(2), Unit("dataset-2", numbers, {"seed": 2})], r"unit 'dataset-2' has another function or other par"),
    ],
)
def test_other_units_are_refused(folder, units, sentence):
    run(mixture(3), folder, manifest=MANIFEST)
    before = contents(folder.path)
    with pytest.raises(HelmscopeError, match=f"^{sentence}"):
        run(units, folder, manifest=MANIFEST, allow_mixed=True)
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
        (replace(MANIFEST, platform="Plan 9"), Serial(), f"platform {MANIFEST.platform} (now Plan 9)"),
        (MANIFEST, Serial(threads=2), "threads 1 (now 2)"),
        (
            replace(MANIFEST, python="4.0"),
            Serial(threads=2),
            f"python {MANIFEST.python} (now 4.0) and threads 1 (now 2)",
        ),
    ],
    ids=["numpy", "torch", "helmscope", "python", "platform", "threads", "two"],
)
def test_other_circumstances_are_refused_unless_allowed(folder, now, engine, difference):
    run(mixture(3), folder, manifest=MANIFEST)
    before = contents(folder.path)
    with pytest.raises(HelmscopeError) as caught:
        run(mixture(3), folder, manifest=now, engine=engine)
    assert str(caught.value) == (
        f"{folder.path} was begun with {difference}, so that results may differ in their last bits: go back to what it "
        "was, take a new folder, or set allow_mixed (--allow-mixed)"
    )
    assert contents(folder.path) == before
    assert read_plan(folder).mixed == []
    for _ in range(2):
        run(mixture(3), folder, manifest=now, engine=engine, allow_mixed=True)
        assert read_plan(folder).mixed == difference.split(" and ")
        assert folder.read_manifest() == MANIFEST
    run(mixture(3), folder, manifest=MANIFEST)


def test_another_cpu_is_refused(folder, monkeypatch):
    run(mixture(3), folder, manifest=MANIFEST)
    here = read_plan(folder).cpu
    monkeypatch.setattr(sys.modules["helmscope.runs.run"], "cpu", lambda: "Z80")
    with pytest.raises(HelmscopeError) as caught:
        run(mixture(3), folder, manifest=MANIFEST)
    assert f"was begun with CPU {here} (now Z80), so that results may differ" in str(caught.value)


def test_a_package_installed_or_removed_since_is_no_reason_to_refuse(folder):
    run(mixture(3), folder, manifest=MANIFEST)
    more, fewer = changed(ray="2.60.0"), replace(MANIFEST, packages={"numpy": MANIFEST.packages["numpy"]})
    for now in (more, fewer, replace(MANIFEST, created="2025-01-31T12:00:00+00:00", seed=8)):
        assert len(run(mixture(3), folder, manifest=now)) == 3


@pytest.mark.parametrize("name", ["manifest.json", "units.json"])
def test_a_damaged_record_is_refused_by_its_name(folder, name):
    run(mixture(3), folder, manifest=MANIFEST)
    (folder.path / name).write_text('{"units": 3')
    with pytest.raises(HelmscopeError, match=f"/run/{name} is not valid JSON: "):
        run(mixture(3), folder, manifest=MANIFEST)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", "has no key 'units', but it must have units, cpu, threads, mixed"),
        ('{"units": [], "cpu": "", "threads": 1, "mixed": []}', "units of .*units.json is a list, but it must be"),
        (
            '{"units": {"a": 1}, "cpu": "", "threads": 1, "mixed": []}',
            "a of units of .* is a int, but it must be a str",
        ),
        (
            '{"units": {}, "cpu": "", "threads": 0, "mixed": []}',
            "threads of .* is 0, but it must be a whole number >= 1",
        ),
        (
            '{"units": {}, "cpu": "", "threads": 1, "mixed": ""}',
            "mixed of .*units.json is a str, but it must be a list",
        ),
    ],
)
def test_the_plan_is_decoded_strictly(folder, text, sentence):
    folder.write_manifest(MANIFEST)
    (folder.path / "units.json").write_text(text)
    with pytest.raises(HelmscopeError, match=sentence):
        run(mixture(3), folder, manifest=MANIFEST)


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
        run(units, folder, manifest=MANIFEST)
    assert str(caught.value) == sentence
    assert os.listdir(folder.path) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"manifest": {}}, "manifest is a dict, but it must be a Manifest"),
        ({"folder": "run"}, "folder is a str, but it must be a RunFolder"),
        ({"progress": 3}, "progress is a int, but it must be a str, the heading, or None"),
        ({"fail_fast": "x"}, "fail_fast is a str, but it must be True or False"),
        ({"allow_mixed": 1}, "allow_mixed is a int, but it must be True or False"),
        ({"engine": 4}, "engine is 4, but it must be Serial(), Processes(jobs) or Ray(jobs)"),
        ({"engine": Serial}, f"engine is {Serial!r}, but it must be Serial(), Processes(jobs) or Ray(jobs)"),
    ],
)
def test_other_bad_input(folder, options, sentence):
    with pytest.raises(HelmscopeError) as caught:
        run(mixture(3), **{"folder": folder, "manifest": MANIFEST, **options})
    assert str(caught.value) == sentence
    assert os.listdir(folder.path) == []


def test_a_run_may_live_in_a_thread(folder):
    """Where no signal handler can be set."""
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(run, mixture(3), folder, manifest=MANIFEST).result()) == 3


def test_a_folder_in_use_is_refused(folder):
    with folder.lock(), pytest.raises(HelmscopeError, match=f"/run is in use by process {os.getpid()} on "):
        run(mixture(3), folder, manifest=MANIFEST)
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


def test_the_others_go_on_and_one_sentence_names_the_first(folder, caplog):
    with pytest.raises(UnitsFailed) as caught:
        run(FAULTY, folder, manifest=MANIFEST)
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
        run(FAULTY, folder, manifest=MANIFEST, engine=engine)
    assert engine.asked == ["bad", "sorry", "wrong", "gone"]


def test_fail_fast_stops_at_the_first(folder):
    with pytest.raises(
        UnitsFailed, match=r"^unit 'bad' failed: ZeroDivisionError: division by zero; 0 results are kept"
    ):
        run(FAULTY, folder, manifest=MANIFEST, fail_fast=True)
    assert os.listdir(folder.path / "units") == []
    assert not is_locked(folder.path)


def test_a_picture_cannot_take_the_place_of_the_plan(folder):
    with pytest.raises(HelmscopeError, match=r"name is 'units.json', but the run folder keeps manifest.json, verdict"):
        folder.write_bytes("units.json", b"")


def test_importing_runs_stays_light():
    code = (
        "import sys, helmscope.runs\n"
        "print(sorted({'torch', 'xarray', 'numpy', 'joblib', 'ray', 'rich'} & set(sys.modules)))"
    )
    done = run_python(code, check=True)
    assert done.stdout == "[]\n"
