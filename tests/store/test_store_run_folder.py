from __future__ import annotations

import json
import math
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime

import h5py
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from helmscope.runs import list_runs
from helmscope.store import Manifest, RunFolder, run_folder
from helmscope.store.verdicts import decode_verdicts, encode_verdicts
from helmscope.types import (
    Attachment,
    Control,
    HelmscopeError,
    Interval,
    JudgedCondition,
    Judgment,
    PrintedStatement,
    Provenance,
    Region,
    Ruling,
    Verdict,
    type_with_article,
)
from support.children import run_python

MEASUREMENT = xr.Dataset(
    {"energy": ("time", [0.1, math.nan], {"n": 16, "units": "seconds"}), "energy_stderr": ("time", [0.01, math.inf])},
    coords={"time": [0.0, 1.0]},
)
DATA = xr.Dataset(
    {
        "states": (("time", "token", "dim"), np.random.default_rng(0).normal(size=(2, 3, 4))),
        "single": ("dim", np.float32([1, 2, 3, 4])),
        "mask": ("token", [True, False, True]),
        "count": ("token", [1, 2, 3]),
        "scalar": ((), 0.1),
        "none": ("nothing", np.zeros(0)),
    },
    coords={"token": ["a", "é", "漢"], "layer": ("time", [0, 1])},
    attrs={"note": "ü", "n": 3},
)
SLOPE = JudgedCondition(
    "slope", Region(text="slope > 0"), Interval(0.1, -0.2, 0.3, n=12), Ruling.SUPPORTED, "from 12 seeds", 9
)
VERDICT = Verdict(
    claim="c1",
    ruling=Ruling.SUPPORTED,
    conditions=(SLOPE,),
    sentence="The slope is 0.1.",
    attachments=(Attachment("the model", "ok  rows\nok  heads"),),
    provenance=Provenance(entry="ab12", version=2, code="c0de", weights="3e16", texts="7e87"),
)


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run")


def manifest():
    details = {"seed": 0, "dtype": "float64", "device": "cpu", "threads": 1, "command": ["helmscope"]}
    return Manifest.collect(**details, inputs={}, parameters={})


def test_whole_folder_round_trip_without_pickle(run, monkeypatch):
    def forbidden(*arguments, **options):
        raise AssertionError("pickle was called")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    one = manifest()
    run.write_manifest(one)
    run.write_results("energy", MEASUREMENT)
    run.write_data("states", DATA)
    run.write_verdicts([VERDICT])
    run.write_bytes("energy.png", b"\x89PNG")
    again = RunFolder.open(run.path)
    assert again.read_manifest() == one
    assert again.read_results("energy").identical(MEASUREMENT)
    assert again.read_results("states").identical(DATA)
    assert again.read_results("states").dtypes == DATA.dtypes
    assert again.read_verdicts() == (VERDICT,)
    assert (run.path / "energy.png").read_bytes() == b"\x89PNG"
    assert again.results() == ("energy", "states")
    assert sorted(os.listdir(run.path)) == ["energy.nc", "energy.png", "manifest.json", "states.nc", "verdicts.json"]


def test_equal_datasets_are_written_as_equal_bytes(run):
    run.write_data("a", DATA)
    time.sleep(1.1)  # HDF5 can store modification times, in seconds
    run.write_data("b", DATA)
    run.write_data("c", run.read_results("a"))
    first = (run.path / "a.nc").read_bytes()
    assert first == (run.path / "b.nc").read_bytes() == (run.path / "c.nc").read_bytes()


def test_encoding_of_another_file_does_not_round_the_values(run):
    coarse = DATA.copy(deep=True)
    coarse["states"].encoding = {"dtype": "int16", "scale_factor": 0.5}
    run.write_data("states", coarse)
    assert run.read_results("states").identical(DATA)


def test_other_netcdf_readers_open_the_file(run):
    run.write_data("states", DATA)
    assert xr.load_dataset(run.path / "states.nc", engine="h5netcdf").identical(DATA)
    with h5py.File(run.path / "states.nc") as file:
        assert np.array_equal(file["states"][:], DATA["states"].values)


def test_reading_closes_the_file_and_does_not_cache_it(run):
    run.write_data("a", DATA)
    before = os.listdir("/proc/self/fd")
    first = run.read_results("a")
    assert os.listdir("/proc/self/fd") == before
    run.write_data("a", MEASUREMENT)
    assert run.read_results("a").identical(MEASUREMENT)
    assert first.identical(DATA)


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (DATA, "measurement 'states' has neither"),
        (MEASUREMENT.drop_vars("energy_stderr"), "measurement 'energy' has neither"),
        (MEASUREMENT["energy"], "dataset is a DataArray, but it must be an xarray Dataset"),
        ({"energy": 1.0}, "dataset is a dict, but it must be an xarray Dataset"),
    ],
)
def test_results_keep_the_measurement_rule(run, dataset, sentence):
    with pytest.raises(HelmscopeError, match=sentence):
        run.write_results("energy", dataset)
    assert os.listdir(run.path) == []


@pytest.mark.parametrize(
    "dataset",
    [
        xr.Dataset({"a": ("x", np.array([object()]))}),
        xr.Dataset({"a": ("x", np.array([{}, []], dtype=object))}),
        xr.Dataset(attrs={"a": None}),
        xr.Dataset({"a/b": 1.0}),
    ],
)
def test_dataset_that_netcdf_cannot_hold_is_one_sentence(run, dataset):
    with pytest.raises(HelmscopeError, match=r"^cannot write .*/a\.nc: .+$"):
        run.write_data("a", dataset)
    assert os.listdir(run.path) == []


def damaged(data):
    rng = np.random.default_rng(1)
    yield from (b"", b"x", data[:32], data[: len(data) // 2], data[:-1], data[1:], data + b"\0", data[:-32])
    for place in rng.integers(0, len(data), size=40):
        yield data[:place] + bytes([data[place] ^ (1 << rng.integers(8))]) + data[place + 1 :]


def test_damaged_file_is_one_sentence(run):
    run.write_data("a", DATA)
    for data in list(damaged((run.path / "a.nc").read_bytes())):
        (run.path / "a.nc").write_bytes(data)
        with pytest.raises(HelmscopeError, match=r"^cannot read .*/a\.nc: it is truncated, damaged or not written"):
            run.read_results("a")


def test_full_disk_keeps_the_old_result_and_the_process(run):
    run.write_data("a", DATA)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "import numpy as np, xarray as xr\n"
        "from helmscope.store import RunFolder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    RunFolder(Path(sys.argv[1])).write_data('a', xr.Dataset({'x': ('i', np.zeros(100_000))}))\n"
        "except ValueError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = run_python(code, run.path, check=True)
    assert done.stdout == f"HelmscopeError cannot write {run.path}/a.nc: File too large\n"
    assert done.stderr == ""
    assert run.read_results("a").identical(DATA)
    assert os.listdir(run.path) == ["a.nc"]


def test_unknown_result_offers_the_nearest(run):
    run.write_data("phase", DATA)
    (run.path / ".phase.nc.0a1b2c3d.tmp").write_bytes(b"half")
    (run.path / ".phas.nc").write_bytes(b"not ours")
    with pytest.raises(
        HelmscopeError, match=r"unknown result in .*/run 'phas': did you mean 'phase'\? Allowed: phase$"
    ):
        run.read_results("phas")


HOSTILE = ["", ".", "..", "../x", "a/b", "/etc/x", ".hidden", "-rf", "a\0b", "a\n", "a b", "é", "a\\b", "x" * 201, None]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_name_is_refused_everywhere(run, name):
    for call in (
        lambda: run.write_results(name, MEASUREMENT),
        lambda: run.write_data(name, DATA),
        lambda: run.read_results(name),
        lambda: run.write_bytes(name, b""),
        lambda: RunFolder.new(run.path, name),
    ):
        with pytest.raises(HelmscopeError, match=r"^name is .*, but it must be 1 to 200 letters, digits"):
            call()
    assert os.listdir(run.path) == []


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "_x", "7", "x" * 200])
def test_plain_name_is_accepted(run, name):
    run.write_data(name, MEASUREMENT)
    assert run.results() == (name,)
    assert run.read_results(name).identical(MEASUREMENT)


@pytest.mark.parametrize("name", ["manifest.json", "verdicts.json", "spec.toml", "phase.nc"])
def test_reserved_names_are_refused(run, name):
    with pytest.raises(HelmscopeError, match=f"^name is '{name}', but manifest.json, .* are reserved$"):
        run.write_bytes(name, b"")


def test_a_spec_is_kept_as_text(run):
    assert not run.has_spec()
    run.write_spec('job = "é"\n')
    assert (run.has_spec(), run.read_spec()) == (True, 'job = "é"\n')
    (run.path / "spec.toml").write_bytes(b"\xff")
    with pytest.raises(HelmscopeError, match=r"^cannot read .*/spec\.toml: it is not UTF-8 text$"):
        run.read_spec()


def test_create_refuses_a_folder_that_holds_files(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(
        HelmscopeError, match=r"already holds 'thesis.tex', but a new run needs an empty or a new folder"
    ):
        RunFolder.create(tmp_path)
    with pytest.raises(HelmscopeError, match=r"cannot use .*/thesis.tex as a run folder: Not a directory"):
        RunFolder.create(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_create_accepts_an_empty_folder_or_the_remains_of_a_killed_run(tmp_path):
    assert RunFolder.create(tmp_path) == RunFolder(tmp_path)
    (tmp_path / ".manifest.json.0a1b2c3d.tmp").write_bytes(b"{")
    assert RunFolder.create(tmp_path) == RunFolder(tmp_path)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("root", lambda value: RunFolder.new(value, "a")),
        ("path", RunFolder.create),
        ("path", RunFolder.open),
        ("path", RunFolder),
    ],
    ids=["new", "create", "open", "itself"],
)
@pytest.mark.parametrize("value", [3, None, b"run"], ids=repr)
def test_a_value_that_is_not_a_path_is_one_sentence(name, make, value):
    with pytest.raises(HelmscopeError) as caught:
        make(value)
    assert str(caught.value) == f"{name} is {type_with_article(value)}, but it must be a path, as a str or a Path"


def test_a_folder_given_as_a_str(run):
    run.write_manifest(manifest())
    named = RunFolder(str(run.path))
    assert (named, hash(named), named.path) == (run, hash(run), run.path)
    assert named.read_manifest() == run.read_manifest()
    with named.lock():
        assert named.results() == ()


def test_open_needs_a_manifest(run):
    with pytest.raises(HelmscopeError, match=r"/run is not a run folder: there is no manifest.json in it$"):
        RunFolder.open(run.path)
    run.write_manifest(manifest())
    assert RunFolder.open(str(run.path)) == run


def test_the_error_names_a_missing_or_broken_file(run):
    with pytest.raises(HelmscopeError, match=r"cannot read .*/verdicts.json: No such file or directory$"):
        run.read_verdicts()
    (run.path / "manifest.json").write_text("{")
    with pytest.raises(HelmscopeError, match=r"/manifest.json is not valid JSON: "):
        run.read_manifest()
    with pytest.raises(HelmscopeError, match=r"cannot read .*/none: No such file or directory$"):
        RunFolder(run.path / "none").results()


class Noon(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 1, 31, 12, 0, 0, tzinfo=tz)


def test_new_folders_never_collide(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "datetime", Noon)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: RunFolder.new(tmp_path / "runs", "phase").path.name, range(24)))
    stem = "phase-20250131-120000"
    assert sorted(made) == sorted([stem, *(f"{stem}-{i}" for i in range(2, 25))])
    assert sorted(os.listdir(tmp_path / "runs")) == sorted(made)


FINITE = st.floats(allow_nan=False, allow_infinity=False)
SIDE = st.floats(min_value=0, allow_nan=False)
INTERVAL = st.builds(lambda at, down, up: Interval(at, at - down, at + up, n=12), FINITE, SIDE, SIDE)
REGION = st.one_of(
    st.builds(lambda ends: Region(text="both", low=min(ends), high=max(ends)), st.tuples(FINITE, FINITE)),
    st.builds(lambda low: Region(text="low", low=low), FINITE),
    st.builds(lambda high: Region(text="high", high=high), FINITE),
    st.builds(lambda above: Region(text="above", above=above), FINITE),
    st.builds(lambda below: Region(text="below", below=below), FINITE),
    st.just(Region(text="none")),
)


@settings(max_examples=100, deadline=None)
@given(st.none() | INTERVAL, REGION, st.sampled_from(Ruling), st.text())
def test_verdicts_round_trip_as_valid_json(interval, region, ruling, sentence):
    slope = replace(SLOPE, interval=interval, region=region, ruling=ruling)
    one = replace(VERDICT, conditions=(slope,), ruling=ruling, sentence=sentence)
    data = encode_verdicts([one, VERDICT])
    json.loads(data, parse_constant=pytest.fail)
    again, second = decode_verdicts(data)
    assert repr(again) == repr(one)
    assert again.conditions[0].region == region
    assert second == VERDICT
    assert encode_verdicts([again, second]) == data


def test_conditions_controls_described_and_printed_round_trip():
    region = Region(text="at least .9", low=0.9)
    control = Control("V = -I", region, Interval(0.0, 0.0, 0.1, n=32), Ruling.REFUTED, "from 32 starts")
    either = replace(control, interval=None, expected=(Ruling.REFUTED, Ruling.INCONCLUSIVE))
    wide = Interval(0.0, -math.inf, 0.1, n=32)
    measured = PrintedStatement("R = O(e^-beta)", "slide 9", Judgment.NOT_SHARP, "R is 1", Judgment.TRUE, wide, region)
    described = JudgedCondition("spread", Region(text="described"), wide, Ruling.DESCRIBED)
    one = replace(
        VERDICT,
        setting="the unit sphere",
        conditions=(SLOPE, replace(SLOPE, name="R^2", ruling=Ruling.REFUTED)),
        controls=(control, either),
        described=(described,),
        printed=measured,
    )
    bare = replace(one, printed=PrintedStatement("R", "", Judgment.NOT_TESTABLE, ""))
    assert decode_verdicts(encode_verdicts([one, bare])) == (one, bare)
    with pytest.raises(HelmscopeError, match=r"controls of v.json\[0\] is a NoneType, but it must be a list of contr"):
        decode_verdicts(verdicts(controls=None), "v.json")
    with pytest.raises(HelmscopeError, match=r"unknown key of printed of v.json\[0\] 'txet': did you mean 'text'"):
        decode_verdicts(verdicts(printed={"txet": "V = -I"}), "v.json")
    with pytest.raises(HelmscopeError, match=r"unknown by_theory of printed of v.json\[0\] 'yes'"):
        decode_verdicts(verdicts(printed=asdict(bare.printed) | {"by_theory": "yes"}), "v.json")


def test_the_hashes_that_a_verdict_depends_on_round_trip():
    (raw,) = json.loads(encode_verdicts([VERDICT]))
    assert raw["provenance"] == {"entry": "ab12", "version": 2, "code": "c0de", "weights": "3e16", "texts": "7e87"}
    (again,) = decode_verdicts(encode_verdicts([VERDICT]))
    assert again.provenance == VERDICT.provenance
    with pytest.raises(HelmscopeError, match=r"code of provenance of v.json\[0\] is"):
        decode_verdicts(verdicts(provenance=raw["provenance"] | {"code": None}), "v.json")


def test_verdicts_read_as_nested_objects():
    """The schema of verdicts.json is public: other programs read it."""
    (raw,) = json.loads(encode_verdicts([with_slope(interval=Interval(0.1, -math.inf, 0.3, n=12))]))
    (condition,) = raw["conditions"]
    assert condition["interval"] == {"estimate": 0.1, "low": "-inf", "high": 0.3, "n": 12}
    assert condition["region"] == {"text": "slope > 0", "low": None, "high": None, "above": None, "below": None}
    assert json.loads(encode_verdicts([with_slope(interval=None)]))[0]["conditions"][0]["interval"] is None
    assert raw["printed"] is None


def with_slope(**changes):
    """VERDICT with some fields of its condition changed."""
    return replace(VERDICT, conditions=(replace(SLOPE, **changes),))


def verdicts(**changes):
    """VERDICT as JSON with some of its values changed."""
    (raw,) = json.loads(encode_verdicts([VERDICT]))
    return json.dumps([raw | changes], default=lambda value: value.value).encode()


def condition(**changes):
    """VERDICT as JSON with some values of its condition changed, or those of its ``interval`` or ``region``."""
    (raw,) = json.loads(encode_verdicts([VERDICT]))
    (slope,) = raw["conditions"]
    for name, change in changes.items():
        slope[name] = {**slope[name], **change} if isinstance(change, dict) else change
    return json.dumps([raw]).encode()


CASE = "item 0 of conditions of v.json[0]"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (verdicts(conditons=1.0), "unknown key of v.json[0] 'conditons': did you mean 'conditions'?"),
        (condition(interval={"hgih": 1.0}), f"unknown key of interval of {CASE} 'hgih': did you mean 'high'?"),
        (condition(region={"lwo": 1.0}), f"unknown key of region of {CASE} 'lwo': did you mean 'low'?"),
        (condition(ruling="suported"), f"unknown ruling of {CASE} 'suported': did you mean 'supported'?"),
        (verdicts(ruling="suported"), "unknown ruling of v.json[0] 'suported': did you mean 'supported'?"),
        (condition(interval={"low": "nan"}), f"low of interval of {CASE} is 'nan', but it must be a finite number, "),
        (condition(interval={"low": None}), f"low of interval of {CASE} is None, but it must be a finite number, 'in"),
        (condition(interval={"low": True}), f"low of interval of {CASE} is True, but it must be a finite number, 'in"),
        (condition(interval={"low": 9.0}), f"interval of {CASE} cannot be read: the interval is [9.0, 0.3], but it"),
        (condition(interval={"estimate": "inf"}), f"estimate of interval of {CASE} is 'inf', but it must be a finite"),
        (condition().replace(b"0.3", b"1e999"), f"high of interval of {CASE} is inf, but it must be a finite number"),
        (condition(interval={"n": -1}), f"n of interval of {CASE} is -1, but it must be a whole number >= 1"),
        (condition(interval=[]), f"interval of {CASE} is a list, but it must be an object with named values"),
        (condition(region=None), f"region of {CASE} is a NoneType, but it must be an object with named values"),
        (condition(region={"low": "-inf"}), f"low of region of {CASE} is '-inf', but it must be a finite number"),
        (condition(region={"low": 1, "high": 0}), f"region of {CASE} cannot be read: region is 1 to 0, but its"),
        (condition(region={"low": 0, "above": 0}), f"region of {CASE} cannot be read: region 'slope > 0' has low ="),
        (b'[{"claim": "a"}]', "v.json[0] has no key 'ruling', but it must have"),
        (b"{}", "v.json is a dict, but it must be a list of verdicts"),
        (b"[3]", "v.json[0] is an int, but it must be an object with named values"),
    ],
)
def test_verdicts_are_decoded_strictly(data, sentence):
    with pytest.raises(HelmscopeError) as caught:
        decode_verdicts(data, "v.json")
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    "unreadable",
    [
        with_slope(interval=Interval(0.0, 0.0, 0.0, n=np.int64(3))),
        with_slope(interval="high"),
        with_slope(region=None),
        replace(VERDICT, claim=1),
        replace(VERDICT, provenance=None),
    ],
)
def test_verdict_that_could_not_be_read_back_is_not_written(run, unreadable):
    run.write_verdicts([VERDICT])
    with pytest.raises(HelmscopeError, match="verdicts"):
        run.write_verdicts([unreadable])
    assert run.read_verdicts() == (VERDICT,)


def test_a_path_with_nul_is_refused():
    path = "a\0b"
    for ask in (RunFolder, RunFolder.create, RunFolder.open, lambda root: RunFolder.new(root, "x"), list_runs):
        with pytest.raises(
            HelmscopeError, match=r"^(path|root) is 'a\\x00b', but a path must not hold the character NUL"
        ):
            ask(path)
