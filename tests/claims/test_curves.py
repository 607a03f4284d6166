"""Curves hold their replicates, and reduce to means with standard errors or medians with ranges."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.stats.reduce import reduce_replicates
from support.refusal import refused

VALUES = np.random.default_rng(0).lognormal(0.0, 2.0, (9, 4, 2))
AXES = {"time": [0.0, 1.0, 2.0, 4.0], "flow": ["SA", "USA"]}


def test_means_and_standard_errors_are_those_of_numpy():
    measurement = curve("energy", VALUES, AXES, label="energy E")
    assert measurement.energy.dims == ("system", "time", "flow")
    assert np.array_equal(measurement.energy.values, VALUES)
    summary = reduce_replicates(measurement)
    np.testing.assert_allclose(summary.energy, VALUES.mean(0), rtol=1e-12)
    np.testing.assert_allclose(summary.energy_stderr, VALUES.std(0, ddof=1) / 3, rtol=1e-12)
    assert summary.energy.attrs == {"long_name": "energy E", "scale": "linear", "n": 9, "band": "95 % interval"}


def test_with_log_they_reduce_to_the_median_and_the_range():
    summary = reduce_replicates(curve("error", VALUES, AXES, label="error", log=True, over="prompt"))
    assert np.array_equal(summary.error, np.median(VALUES, 0))
    assert np.array_equal(summary.error_low, VALUES.min(0))
    assert np.array_equal(summary.error_high, VALUES.max(0))
    assert (summary.error.attrs["scale"], summary.error.attrs["band"]) == ("log", "range about the median")


def test_merged_curves_may_have_different_numbers_of_replicates():
    both = xr.merge([curve("a", VALUES, AXES, label="a"), curve("b", VALUES[:5], AXES, label="b")], join="outer")
    summary = reduce_replicates(both)
    assert (summary.a.attrs["n"], summary.b.attrs["n"]) == (9, 5)
    assert summary.b.values == pytest.approx(VALUES[:5].mean(0), rel=1e-12)


def test_invalid_shapes_raise():
    refused(lambda: curve("a", VALUES[:1], AXES, label="a"), "a has shape (1, 4, 2), but it must be (replicates, 4, 2)")
    refused(lambda: curve("a", VALUES[0], AXES, label="a"), "a has shape (4, 2), but it must be (replicates, 4, 2)")
