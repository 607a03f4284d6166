"""Half-times of Measurements that keep their replicates; those of phase diagrams are in ``test_phase.py``."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import helmscope as hs


def test_half_times_of_a_measurement_with_replicates_are_those_of_its_reduction():
    share = np.array([[0.0, 0.2, 0.9], [0.1, 0.4, 1.0], [0.0, 0.3, 0.8]])
    kept = xr.Dataset({"probability": (("system", "time"), share)}, {"time": [0.0, 1.0, 2.0]})
    found = hs.observe.half_time(kept)
    assert found.identical(hs.observe.half_time(hs.reduce_replicates(kept)))
    assert float(found.half_time) == pytest.approx(1 + 0.2 / 0.6, rel=1e-12)
