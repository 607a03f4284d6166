from __future__ import annotations

import json
import platform
import re
import tomllib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import helmscope
from helmscope.store import Manifest, hash_file
from helmscope.store.manifest import DEPENDENCIES, hash_bytes
from helmscope.types import HelmscopeError

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1


def manifest(**changed):
    details = {"seed": 7, "dtype": "float64", "device": "cpu", "threads": 2, "command": ["helmscope", "phase"]}
    return Manifest.collect(**{**details, "inputs": {"texts": ABC}, "parameters": {"times": (1, 2.5)}, **changed})


def test_collect_fills_in_versions_platform_and_time():
    one = manifest()
    assert one.helmscope == helmscope.__version__
    assert one.python == platform.python_version()
    assert one.packages["numpy"] == metadata.version("numpy")
    assert one.platform == platform.platform()
    assert timedelta(0) <= datetime.now(UTC) - datetime.fromisoformat(one.created) < timedelta(minutes=1)
    assert one.command == ("helmscope", "phase")
    assert (one.seed, one.dtype, one.device, one.threads) == (7, "float64", "cpu", 2)
    assert one.parameters == {"times": [1, 2.5]}


def test_packages_not_installed_are_left_out(monkeypatch):
    def version(name):
        if name != "torch":
            raise metadata.PackageNotFoundError(name)
        return "2.11.0"

    monkeypatch.setattr(metadata, "version", version)
    assert manifest().packages == {"torch": "2.11.0"}


def test_dependencies_are_those_of_the_project_file():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [name for name in extras if name not in ("test", "slow", "docs")]
    lines = project["dependencies"] + [line for name in used for line in extras[name]]
    assert sorted(DEPENDENCIES) == sorted(re.match(r"[\w-]+", line)[0] for line in lines)


def test_json_round_trip_is_canonical():
    one = manifest(parameters={"b": "é", "a": 1})
    data = one.to_json()
    assert Manifest.from_json(data) == one
    assert Manifest.from_json(data).to_json() == data
    assert data.decode() == json.dumps(json.loads(data), sort_keys=True, indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("word", ["é 漢 😀", "\udcff.txt", '\\udcff "', "line\nbreak"])
def test_command_line_survives_whatever_its_bytes_were(word):
    data = manifest(command=[word]).to_json()
    assert Manifest.from_json(data).command == (word,)
    assert json.loads(data)["command"] == [word]


_ONE = manifest()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=3))
def test_parameters_round_trip(parameters):
    again = Manifest.from_json(replace(_ONE, parameters=parameters).to_json())
    # compared as text, because 1, 1.0 and True are equal in Python
    assert json.dumps(again.parameters, sort_keys=True) == json.dumps(parameters, sort_keys=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": -1}, "seed is -1, but it must be a whole number >= 0"),
        ({"seed": True}, "seed is True, but it must be a whole number >= 0"),
        ({"threads": 0}, "threads is 0, but it must be a whole number >= 1"),
        ({"dtype": None}, "dtype is a NoneType, but it must be a str"),
        ({"command": "helmscope"}, "command is a str, but it must be a list of str"),
        ({"command": ["a", 1]}, "item 1 of command is an int, but it must be a str"),
        ({"inputs": [ABC]}, "inputs is a list, but it must be a mapping from str"),
        ({"inputs": {"a": "AB"}}, "a of inputs is 'AB', but it must be a SHA-256 in 64 hexadecimal digits"),
        ({"parameters": {1: 2}}, "a key of parameters is an int, but it must be a str"),
        ({"parameters": {"a": [0, float("nan")]}}, "item 1 of a of parameters is nan, but it must be made of"),
        ({"parameters": {"a": {"b": object()}}}, "b of a of parameters is an object, but it must be made of"),
    ],
)
def test_the_error_names_the_wrong_value(change, sentence):
    with pytest.raises(HelmscopeError) as caught:
        manifest(**change)
    assert str(caught.value).startswith(sentence)


def edited(**changes):
    raw = json.loads(_ONE.to_json())
    raw.update({key: value for key, value in changes.items() if value is not ...})
    for key in [key for key, value in changes.items() if value is ...]:
        del raw[key]
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (edited(sed=1), "unknown key of m.json 'sed': did you mean 'seed'?"),
        (edited(seed=...), "m.json has no key 'seed', but it must have helmscope, python, packages, "),
        (edited(seed="1"), "seed of m.json is '1', but it must be a whole number >= 0"),
        (edited(created="yesterday"), "created of m.json is 'yesterday', but it must be a time in UTC"),
        (edited(created="2025-01-31T12:00:00"), "created of m.json is '2025-01-31T12:00:00', but it must be a time in"),
        (edited(created="2025-01-31T12:00:00+01:00"), "created of m.json is '2025-01-31T12:00:00+01:00', but it must"),
        (edited(packages={"a": 1}), "a of packages of m.json is an int, but it must be a str"),
        (b"[]", "m.json is a list, but it must be an object with named values"),
        (b'{"seed": NaN}', "m.json is not valid JSON: NaN is not a JSON number"),
        (b'{"seed": 1, "seed": 2}', "m.json is not valid JSON: the key 'seed' appears twice"),
        (_ONE.to_json()[:50], "m.json is not valid JSON: "),
        (b"\xff", "m.json is not valid JSON: "),
        (b"[" * 100_000, "m.json is not valid JSON: "),
        (b"", "m.json is not valid JSON: "),
    ],
)
def test_strict_decoding(data, sentence):
    with pytest.raises(HelmscopeError) as caught:
        Manifest.from_json(data, "m.json")
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_the_manifest_copies_its_parameters():
    parameters = {"betas": [1.0]}
    one = manifest(parameters=parameters)
    parameters["betas"].append(2.0)
    assert one.parameters == {"betas": [1.0]}


def test_hashes(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert hash_bytes(b"abc") == hash_file(tmp_path / "abc") == ABC
    with pytest.raises(HelmscopeError, match=r"cannot read .*/none: No such file or directory$"):
        hash_file(tmp_path / "none")
    with pytest.raises(HelmscopeError, match=r"cannot read .*: Is a directory$"):
        hash_file(tmp_path)
