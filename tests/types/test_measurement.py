"""The rules of a Measurement, with its replicates and reduced over them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xarray as xr

import helmscope as hs
from helmscope.types import check_replicates, replicate_axis
from support.refusal import refused

NAN = math.nan


def measurement(n: object = 8, on_variable: bool = False, **variables: object) -> xr.Dataset:
    data = {name: ("time", np.asarray(values, float)) for name, values in variables.items()}
    dataset = xr.Dataset(data, attrs={} if on_variable or n is None else {"n": n})
    if on_variable:
        for name in dataset.data_vars:
            dataset[name].attrs["n"] = n
    return dataset


@pytest.mark.parametrize(
    "dataset",
    [
        measurement(a=[1, 2], a_stderr=[0.1, 0]),
        measurement(a=[1, NAN], a_stderr=[NAN, NAN]),
        measurement(a=[1, 2], a_low=[1, 1], a_high=[1, 3]),
        measurement(a=[1, NAN], a_low=[0, NAN], a_high=[2, NAN]),
        measurement(a=[1, 2], a_stderr=[0, 0], a_low=[1, 1], a_high=[2, 2], a_null=[5, 5]),
        measurement(a=[1, 2], a_stderr=[0, 0], b=[1, 2], b_low=[1, 1], b_high=[2, 2]),
        measurement(a=[1, 2], a_stderr=[0, 0], n=1),
        measurement(a=[1, 2], a_stderr=[0, 0], n=np.int64(3), on_variable=True),
        measurement(),
    ],
)
def test_check_measurement_gives_back_what_keeps_the_rule(dataset):
    assert hs.types.check_measurement(dataset).identical(dataset)


def test_axes_may_stand_in_another_order():
    dataset = xr.Dataset(
        {"a": (("time", "head"), np.ones((2, 3))), "a_stderr": (("head", "time"), np.ones((3, 2)))}, attrs={"n": 2}
    )
    assert hs.types.check_measurement(dataset).identical(dataset)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (measurement(a=[1, 2]), "'a' has neither 'a_stderr' nor 'a_low' and 'a_high'"),
        (measurement(a=[1, 2], a_low=[0, 0]), "'a' has neither"),
        (measurement(a=[1, 2], a_high=[3, 3]), "'a' has neither"),
        (measurement(a=[1, 2], a_null=[3, 3]), "'a' has neither"),
        (measurement(a_stderr=[1, 2]), "'a_stderr' but no 'a'"),
        (measurement(a=[1, 2], a_stderr=[0, 0], b_null=[1, 2]), "'b_null' but no 'b'"),
        (measurement(a=[1, 2], a_stderr=[0, 0], n=None), "'a' has no attribute n"),
        (measurement(a=[1, 2], a_stderr=[0, 0], n=0), "attribute n of measurement 'a' is 0"),
        (measurement(a=[1, 2], a_stderr=[0, 0], n=2.5), "attribute n of measurement 'a' is 2.5"),
        (measurement(a=[1, 2], a_stderr=[0, 0], n=-1, on_variable=True), "attribute n of measurement 'a' is -1"),
        (measurement(a=[1, 2], a_stderr=[0, -0.1]), "'a_stderr' holds a negative value"),
        (measurement(a=[1, 2], a_low=[0, 2.1], a_high=[3, 3]), "'a' is outside its interval"),
        (measurement(a=[1, 2], a_low=[0, 0], a_high=[3, 1.9]), "'a' is outside its interval"),
        (
            xr.Dataset({"a": ("time", [1.0, 2.0]), "a_stderr": ((), 0.1)}, attrs={"n": 2}),
            "'a_stderr' has axes (), but 'a' has ('time',)",
        ),
        (measurement(a=[1, 2], a_stderr=[0, 0])["a"], "Dataset"),
    ],
)
def test_check_measurement_refuses(dataset, said):
    refused(lambda: hs.types.check_measurement(dataset), said)


def test_n_of_a_variable_stands_before_that_of_the_dataset():
    dataset = measurement(a=[1, 2], a_stderr=[0, 0], n=3)
    dataset["a"].attrs["n"] = 0
    refused(lambda: hs.types.check_measurement(dataset), "attribute n of measurement 'a' is 0")


def kept(**axes: tuple[str, ...]) -> xr.Dataset:
    """A Dataset of variables with these axes, each of length 2."""
    return xr.Dataset({name: (dims, np.zeros((2,) * len(dims))) for name, dims in axes.items()})


@pytest.mark.parametrize("axis", ["prompt", "system", "seed", "group", "layer"])
def test_the_replicate_axis_is_found_by_its_name(axis):
    dataset = kept(a=("head", axis), b=(axis,))
    assert replicate_axis(dataset) == axis
    assert check_replicates(dataset).identical(dataset)


def test_layers_are_replicates_only_where_there_are_no_others():
    dataset = kept(a=("layer", "prompt"))
    assert replicate_axis(dataset) == "prompt"
    assert replicate_axis(dataset, over="layer") == "layer"
    assert check_replicates(dataset, over="layer").identical(dataset)


def test_a_null_may_be_one_number_for_all_replicates():
    for null in ((), ("prompt",), ("prompt", "layer")):
        dataset = kept(a=("prompt", "layer"), a_null=null)
        assert check_replicates(dataset).identical(dataset)


@pytest.mark.parametrize(
    ("dataset", "over", "said"),
    [
        (kept(a=("time", "head")), None, "has the axes ['time', 'head'], but its replicate axis must be one of prompt"),
        (kept(a=("prompt", "seed")), None, "has the replicate axes ['prompt', 'seed'], but it must have one"),
        (kept(a=("prompt", "seed")), "sed", "unknown axis of the measurement 'sed': did you mean 'seed'?"),
        (kept(a=("prompt",)), 3, "unknown axis of the measurement '3'"),
        (kept(a=("prompt",), b=("layer",)), None, "'b' has axes ('layer',), but its replicate axis must be 'prompt'"),
        (kept(a=("prompt",), a_stderr=("prompt",)), None, "is already reduced: it has 'a_stderr', but a Measurement"),
        (kept(a=("prompt",), a_low=()), None, "it has 'a_low', but a Measurement with replicates holds values only"),
        (kept(a=("prompt",), b_null=("prompt",)), None, "has 'b_null' but no 'b' that it belongs to"),
        (kept(a=("prompt",))["a"], None, "measurement is a DataArray, but a Measurement is an xarray Dataset"),
        (
            {"a": kept(a=("prompt",))},
            None,
            "measurement is a dict, but a Measurement is an xarray Dataset: take",
        ),
    ],
)
def test_what_has_no_replicates_is_refused(dataset, over, said):
    refused(lambda: check_replicates(dataset, over), said)
