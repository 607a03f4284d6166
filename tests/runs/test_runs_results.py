"""Files of results: valid or refused, and tied to one unit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import xarray as xr

from helmscope.runs.results import encode_result, fault_of, read_result, stamped
from helmscope.types import HelmscopeError
from support.toy_units import dataset, noise, numbers

STAMP, OTHER = "ab" * 32, "cd" * 32


@pytest.mark.parametrize(
    "value",
    [None, True, 0, 2**70, 0.1, -0.0, "é\udcff", "", [], {}, [1, [2.5, None]], {"b": {"a": 1}}, b"", bytes(range(256))],
    ids=repr,
)
def test_plain_results_round_trip(tmp_path, value):
    suffix, content = encode_result(value)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(stamped(suffix, content, STAMP))
    assert fault_of(path, STAMP) == ""
    assert repr(read_result(path, STAMP)) == repr(value)
    assert encode_result(read_result(path, STAMP)) == (suffix, content)


@pytest.mark.parametrize("value", [[0.5], b"", bytes(100), dataset(0)], ids=["json", "empty", "bin", "nc"])
def test_a_result_belongs_to_one_unit(tmp_path, value):
    suffix, content = encode_result(value)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(stamped(suffix, content, STAMP))
    assert fault_of(path, OTHER) == "is the result of another unit or of another run"
    with pytest.raises(HelmscopeError) as caught:
        read_result(path, OTHER)
    assert str(caught.value) == f"cannot read {path}: it is the result of another unit or of another run"
    forged = (
        path.read_bytes().replace(STAMP.encode(), OTHER.encode()).replace(bytes.fromhex(STAMP), bytes.fromhex(OTHER))
    )
    path.write_bytes(forged)  # replacing the stamp breaks the checksum
    assert fault_of(path, OTHER) == "is truncated, damaged or not written by helmscope"


def test_truncated_and_damaged_results_are_detected(tmp_path):
    rng = np.random.default_rng(0)
    for value in (numbers(0), noise(0, 300), dataset(0)):
        suffix, whole = encode_result(value)
        data = stamped(suffix, whole, STAMP)
        path = tmp_path / f"a{suffix}"
        cuts = {*range(40), *range(len(data) - 40, len(data)), *rng.integers(0, len(data), 40).tolist()}
        broken = [data[:cut] for cut in cuts]
        for place in rng.integers(0, len(data), 60).tolist():
            broken.append(data[:place] + bytes([data[place] ^ 1 << rng.integers(8)]) + data[place + 1 :])
        for content in (*broken, data + b"x", b"{}", b"[]", b'{"result": 1, "sha256": "ab"}'):
            path.write_bytes(content)
            # changed whitespace does not change a JSON value: such a file still holds the result
            if not fault_of(path, STAMP):
                assert suffix == ".json"
                assert read_result(path, STAMP) == value
                assert json.loads(content) == json.loads(data)
            else:
                with pytest.raises(HelmscopeError):
                    read_result(path, STAMP)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (math.nan, "the result is nan, but it must be made of None, bool, int, finite float, str, list and dict"),
        ({"a": [object()]}, "item 0 of a of the result is an object, but it must be made of"),
        (np.int64(3), "the result is an int64, but it must be made of"),
        (xr.Dataset(attrs={"a": None}), "cannot keep the result: "),
    ],
)
def test_a_result_that_cannot_be_stored_is_refused(value, sentence):
    with pytest.raises(HelmscopeError, match=f"^{sentence}"):
        encode_result(value)
