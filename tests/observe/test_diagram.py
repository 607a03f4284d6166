"""A phase diagram is an xarray Dataset in every way, and draws itself."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import xarray as xr

import helmscope as hs
from support.refusal import refused

SEEN = hs.phase_diagram(hs.SA, betas=[1, 4], times=[0, 4, 9], start=hs.Uniform(4, 8), samples=3)


def test_it_is_a_dataset_and_stays_a_diagram():
    assert isinstance(SEEN, hs.observe.PhaseDiagram)
    assert isinstance(SEEN, xr.Dataset)
    again = [
        SEEN.sel(beta=[1.0]),
        SEEN.isel(time=slice(2)),
        SEEN.assign(other=SEEN.probability),
        SEEN.assign_attrs(seed=3),
        SEEN.drop_vars("lost_samples"),
        SEEN.expand_dims({"dim": [8]}),
        copy.deepcopy(SEEN),
        pickle.loads(pickle.dumps(SEEN)),
        xr.concat([SEEN.isel(beta=[0]), SEEN.isel(beta=[1])], "beta"),
    ]
    assert {type(each) for each in again} == {hs.observe.PhaseDiagram}
    assert hs.types.check_measurement(SEEN) is SEEN
    assert hs.observe.half_time(SEEN).half_time.shape == (2,)


def test_it_is_written_and_read_as_any_dataset(tmp_path):
    folder = hs.store.RunFolder.new(tmp_path, "diagram")
    folder.write_results("phase", SEEN)
    read = folder.read_results("phase")
    assert type(read) is xr.Dataset
    assert read.equals(SEEN)
    for figure in (hs.observe.PhaseDiagram.of(read).plot(), hs.plot(read)):
        assert np.array_equal(figure.axes[0].collections[0].get_array(), SEEN.probability.values)


def test_its_picture_is_the_heat_map():
    figure = SEEN.plot(title="mine")
    assert figure.get_suptitle().startswith("mine\n")
    assert figure.axes[0].get_xlabel() == "time"
    assert np.array_equal(figure.axes[0].collections[0].get_array(), SEEN.probability.values)
    assert hs.plot(SEEN).axes[0].get_ylabel() == "beta"
    assert len(SEEN.expand_dims({"dim": [8]}).plot().axes) == 2


def test_what_is_no_diagram_any_more_is_refused():
    refused(SEEN.isel(time=0).plot, "diagram has no 'probability' over beta and time")


def test_it_prints_as_xarray_does():
    assert repr(SEEN).startswith("<xarray.PhaseDiagram>")
    assert "probability" in SEEN._repr_html_()


def test_the_same_data_from_either_type():
    plain = xr.Dataset(SEEN.data_vars, SEEN.coords, SEEN.attrs)
    assert hs.observe.PhaseDiagram.of(plain).identical(SEEN)
    with pytest.raises(AttributeError):
        SEEN.anything = 3
