"""A Measurement as a table: the numbers of the Measurement, few enough to read."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import helmscope as hs
from helmscope.types import type_with_article
from support.refusal import refused


def reduced(size: int = 2) -> xr.Dataset:
    value = np.arange(size, dtype=float) + 0.5
    return xr.Dataset(
        {"order": ("time", value), "order_stderr": ("time", np.full(size, 0.1)), "order_null": ("time", -value)},
        {"time": np.arange(size, dtype=float)},
        {"n": 1234},
    )


def test_estimates_with_two_standard_errors():
    lines = str(hs.summary(reduced())).splitlines()
    assert [line.split() for line in lines] == [
        ["variable", "at", "estimate", "null"],
        ["order", "time", "=", "0", "0.5", "[0.3,", "0.7],", "n", "=", "1,234", "-0.5"],
        ["order", "time", "=", "1", "1.5", "[1.3,", "1.7],", "n", "=", "1,234", "-1.5"],
        ["in", "brackets:", "two", "standard", "errors"],
    ]


def test_replicates_are_reduced_first():
    kept = xr.Dataset({"rank": (("prompt", "layer"), [[1.0, 4.0], [2.0, 6.0], [3.0, 8.0]]), "rank_null": 2.0})
    done = hs.reduce_replicates(kept)
    rows = hs.summary(kept).rows
    assert [row.at for row in rows] == ["layer = 0", "layer = 1"]
    for k, row in enumerate(rows):
        assert row.estimate == f"{2.0 + 4 * k:g} [{done.rank_low.values[k]:.3g}, {done.rank_high.values[k]:.3g}], n = 3"
        assert row.null == "2"
    assert hs.summary(kept) == hs.summary(done)
    assert hs.summary(done).note == "in brackets: 95 % interval"


def test_equal_replicates_are_called_equal_instead_of_an_interval_of_width_0():
    share = xr.Dataset({"share": ("system", np.ones(4), {"valid_min": 0.0, "valid_max": 1.0})})
    assert [row.estimate for row in hs.summary(share).rows] == ["1, all equal, n = 4"]


def test_of_many_entries_the_first_and_the_last_are_shown():
    assert [row.at for row in hs.summary(reduced(8)).rows] == [f"time = {k}" for k in range(8)]
    assert "not shown" not in hs.summary(reduced(8)).note
    many = hs.summary(reduced(100))
    assert [row.at for row in many.rows] == ["time = 0", "time = 99"]
    hidden = "98 entries are not shown: summary(measurement, rows=None) shows all"
    assert str(many).splitlines()[-1] == hidden
    assert hidden in many._repr_html_()
    assert len(hs.summary(reduced(100), rows=None).rows) == len(hs.summary(reduced(100), rows=100).rows) == 100
    refused(lambda: hs.summary(reduced(), rows=0), "rows is 0")


def test_of_many_heads_those_of_largest_magnitude_are_shown():
    numbers = np.arange(20.0).reshape(5, 4)
    numbers[1, 2], numbers[3, 3] = -50.0, np.nan
    heads = xr.Dataset(
        {"mass": (("layer", "head"), numbers), "mass_stderr": (("layer", "head"), np.zeros((5, 4)))}, attrs={"n": 3}
    )
    shown = hs.summary(heads)
    assert [row.at for row in shown.rows[:2]] == ["layer = 1, head = 2", "layer = 4, head = 3"]
    assert len(shown.rows) == 8
    assert shown.note.endswith("12 entries are not shown: summary(measurement, rows=None) shows all")
    (first,) = hs.summary(heads, rows=1).rows
    assert first == shown.rows[0]


def test_a_number_alone_and_words_on_an_axis():
    values = {"x": 0.5, "x_stderr": np.nan, "y": ("kind", [1.0]), "y_stderr": ("kind", [0.1])}
    x, y = hs.summary(xr.Dataset(values, {"kind": ["long"]}, {"n": 1})).rows
    assert (x.variable, x.at, x.estimate) == ("x", "", "0.5, n = 1")
    assert (y.variable, y.at, y.estimate) == ("y", "kind = long", "1 [0.8, 1.2], n = 1")


def test_a_null_over_another_axis_is_not_one_number():
    data = reduced().assign(order_null=(("time", "twin"), np.zeros((2, 3))))
    assert {row.null for row in hs.summary(data).rows} == {"varies"}


def test_both_kinds_of_intervals_in_one_table():
    data = reduced().assign(x=0.5, x_low=0.4, x_high=0.75)
    seen = hs.summary(data)
    assert seen.rows[-1].estimate == "0.5 [0.4, 0.75], n = 1,234"
    assert seen.note == "in brackets: two standard errors, low to high"


def test_without_nulls_there_is_no_column_for_them():
    assert hs.summary(reduced()).columns == ("variable", "at", "estimate", "null")
    assert hs.summary(reduced().drop_vars("order_null")).columns == ("variable", "at", "estimate")


def test_one_line_and_html():
    seen = hs.summary(reduced())
    assert repr(seen) == "<Summary of 1 variable: order>"
    html = seen._repr_html_()
    assert html.count("<tr>") == 3
    assert "0.5 [0.3, 0.7], n = 1,234" in html


@pytest.mark.parametrize("given", [3, None, "order"])
def test_anything_but_a_measurement_raises(given):
    refused(lambda: hs.summary(given), f"measurement is {type_with_article(given)}")


def test_an_empty_or_broken_measurement_is_refused():
    refused(lambda: hs.summary(xr.Dataset()), "measurement has no variables")
    refused(lambda: hs.summary(reduced().drop_attrs()), "no attribute n")
