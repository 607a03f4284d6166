"""Curves keep their replicates, and are reduced to what used to be computed at once."""

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
    kept = curve("energy", VALUES, AXES, label="energy E")
    assert kept.energy.dims == ("system", "time", "flow")
    assert np.array_equal(kept.energy.values, VALUES)
    seen = reduce_replicates(kept)
    np.testing.assert_allclose(seen.energy, VALUES.mean(0), rtol=1e-12)
    np.testing.assert_allclose(seen.energy_stderr, VALUES.std(0, ddof=1) / 3, rtol=1e-12)
    assert seen.energy.attrs == {"long_name": "energy E", "scale": "linear", "n": 9, "band": "95 % interval"}


def test_over_decades_they_are_the_median_and_the_range():
    seen = reduce_replicates(curve("error", VALUES, AXES, label="error", log=True, over="prompt"))
    assert np.array_equal(seen.error, np.median(VALUES, 0))
    assert np.array_equal(seen.error_low, VALUES.min(0))
    assert np.array_equal(seen.error_high, VALUES.max(0))
    assert (seen.error.attrs["scale"], seen.error.attrs["band"]) == ("log", "range about the median")


def test_joined_curves_may_have_different_numbers_of_replicates():
    both = xr.merge([curve("a", VALUES, AXES, label="a"), curve("b", VALUES[:5], AXES, label="b")], join="outer")
    seen = reduce_replicates(both)
    assert (seen.a.attrs["n"], seen.b.attrs["n"]) == (9, 5)
    assert seen.b.values == pytest.approx(VALUES[:5].mean(0), rel=1e-12)


def test_bad_shapes_and_axes_are_refused():
    refused(lambda: curve("a", VALUES[:1], AXES, label="a"), "a has shape (1, 4, 2), but it must be (replicates, 4, 2)")
    refused(lambda: curve("a", VALUES[0], AXES, label="a"), "a has shape (4, 2), but it must be (replicates, 4, 2)")
