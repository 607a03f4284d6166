"""The shared types: what they accept, what they refuse and with which words."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
import xarray as xr

import helmscope as hs
from helmscope.types import MissingExtra, fits_memory, increasing_times, known_name, real_number, whole_number

NAN, INF = math.nan, math.inf


def refused(call, *words: str) -> str:
    """The one sentence of the refusal, which holds all the words."""
    with pytest.raises(hs.HelmscopeError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 250
    for word in words:
        assert word in text
    return text


def test_types_need_neither_torch_nor_numpy():
    code = "import sys, helmscope.types; print({'torch', 'numpy', 'xarray', 'scipy'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


def test_a_refusal_is_a_value_error_and_a_missing_extra_says_how_to_get_it():
    assert issubclass(hs.HelmscopeError, ValueError)
    error = MissingExtra("plotly", "report")
    assert isinstance(error, hs.HelmscopeError)
    assert str(error) == "plotly is not installed, and this needs it: pip install 'helmscope[report]'"


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [4, 4.0, Fraction(4), Decimal(4), np.float32(4), np.int64(4), np.array(4.0), torch.tensor(4), torch.ones(1) * 4],
)
def test_real_number_gives_a_plain_float(value):
    number = real_number("beta", value, at_least=4)
    assert type(number) is float
    assert number == 4.0


@pytest.mark.parametrize(
    "value",
    [
        *(NAN, INF, -INF, True, False, None, "warm", "4", "", "nan", [1.0], {}, 1j, object, 10**400),
        *(np.bool_(True), np.nan, np.ones(2), torch.tensor(True), torch.ones(2), torch.tensor(NAN), torch.tensor(1j)),
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:12]}",
)
def test_real_number_refuses(value):
    refused(lambda: real_number("beta", value), "beta is ", "but it must be a finite number")


def test_real_number_keeps_its_bounds():
    assert real_number("x", 0.0, at_least=0) == 0
    assert real_number("x", 5e-324, above=0) == 5e-324
    refused(lambda: real_number("x", -5e-324, at_least=0), "x is -5e-324", ">= 0")
    refused(lambda: real_number("x", 0.0, above=0), "x is 0.0", "> 0")
    refused(lambda: real_number("x", -1, above=-0.5), "x is -1", "> -0.5")


@pytest.mark.parametrize("value", [3, 3.0, np.int64(3), np.float64(3), torch.tensor(3), Fraction(3)])
def test_whole_number_gives_a_plain_int(value):
    number = whole_number("n", value, at_least=3)
    assert type(number) is int
    assert number == 3


@pytest.mark.parametrize(
    "value",
    [
        *(NAN, INF, True, None, "3", "x", 2.5, -1, 0, [3], 1j, np.bool_(True), np.ones(2)),
        *(torch.tensor(2.5), torch.tensor(True), torch.ones(2), "9" * 5000),
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:12]}",
)
def test_whole_number_refuses(value):
    refused(lambda: whole_number("n", value, at_least=1), "n is ", "but it must be a whole number >= 1")


@pytest.mark.parametrize("value", [2**63, 10**400, 10**5000, 1e300, np.uint64(2**63)], ids=range(5))
def test_whole_number_refuses_what_no_tensor_can_have(value):
    refused(lambda: whole_number("n", value, at_least=1), "n is ", "below 2^63 = 9223372036854775808")
    assert whole_number("n", 2**63 - 1, at_least=1) == 2**63 - 1


def test_real_number_refuses_an_int_beyond_all_floats():
    refused(
        lambda: real_number("beta", 10**5000), "beta is a whole number of 16610 bits, but it must be a finite number"
    )


def test_fits_memory_refuses_more_than_there_is():
    fits_memory("n is 10", 10)
    refused(lambda: fits_memory("n is 10^12", 10**12), "n is 10^12, but that makes 8e+03 GB, and this machine has ")


def test_a_refusal_shows_a_large_value_shortly_and_on_one_line():
    text = refused(lambda: real_number("beta", torch.ones(30, 30)), "beta is tensor([[1., 1.")
    assert "..." in text
    refused(lambda: real_number("beta", "a\nb"), "'a\\nb'")


@pytest.mark.parametrize(
    "times", [[0, 1, 2.5], (0, 1, 2.5), np.array([0, 1, 2.5]), torch.tensor([0, 1, 2.5]), [0, np.float32(1), 2.5]]
)
def test_increasing_times_gives_plain_floats(times):
    assert increasing_times(times) == [0.0, 1.0, 2.5]
    assert all(type(t) is float for t in increasing_times(times))
    assert increasing_times(times[1:2]) == [1.0]


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([], "times is []"),
        ("12", "times is '12'"),
        (3.0, "times is 3.0"),
        (None, "times is None"),
        (torch.tensor(1.0), "times is tensor(1.)"),
        (torch.zeros(0), "times is tensor([])"),
        (iter([1.0]), "times is <list_iterator"),
        ({1.0, 2.0}, "times is {1.0, 2.0}"),
        ([0, NAN], "times[1] is nan"),
        ([INF], "times[0] is inf"),
        ([-1, 2], "times[0] is -1"),
        ([0, True], "times[1] is True"),
        ([0, "x"], "times[1] is 'x'"),
        ([[0, 1]], "times[0] is [0, 1]"),
        ([0, 1, 1], "times[2] is 1 after 1, but times must increase"),
        ([3, 2], "times[1] is 2 after 3, but times must increase"),
    ],
)
def test_increasing_times_refuses(times, said):
    refused(lambda: increasing_times(times), said, "must")


def test_known_name_offers_the_nearest():
    allowed = {"uniform", "vmf", "orthonormal"}
    assert known_name("start", "vmf", allowed) == "vmf"
    text = refused(lambda: known_name("start", "orthonormol", allowed))
    assert text == "unknown start 'orthonormol': did you mean 'orthonormal'? Allowed: orthonormal, uniform, vmf"
    text = refused(lambda: known_name("start", "zzz", allowed), "unknown start 'zzz'", "orthonormal, uniform, vmf")
    assert "did you mean" not in text
    assert "name Allowed" not in text  # two sentences without a stop between them


# Outcomes -------------------------------------------------------------------------------------------------------------


def test_outcome_names_the_first_failure_and_its_remedy():
    done, limit, small, lost = hs.Status.FINISHED, hs.Status.STEP_LIMIT, hs.Status.STEP_TOO_SMALL, hs.Status.NOT_FINITE
    good = hs.Outcome((done, done), (10.0, 10.0))
    assert good.ok
    assert str(good) == "finished at t=10"
    bad = hs.Outcome((done, small, lost, limit), (10.0, 0.123456789, 2.0, 3.0))
    assert not bad.ok
    assert str(bad) == (
        "system 1 of 4: step size fell below rounding at t=0.123457: use float64, loosen tol, lower beta or pass "
        "merge= (and 2 more systems)"
    )
    assert "max_steps" in str(hs.Outcome((limit,), (1.0,)))
    assert str(hs.Outcome((lost,), (2.0,))) == (
        "system 0 of 1: velocity is not finite at t=2: lower beta or use float64"
    )
    assert [status for status in hs.Status if status.ok] == [done, hs.Status.AT_REST]
    assert all("{time" in status.value for status in hs.Status)


def test_one_more_failed_system_is_not_many():
    text = str(hs.Outcome((hs.Status.NOT_FINITE,) * 2, (1.0, 1.0)))
    assert "1 more system)" in text


def test_no_systems_is_an_outcome():
    assert hs.Outcome((), ()).ok
    assert str(hs.Outcome((), ())) == "no systems"


# Trajectories ---------------------------------------------------------------------------------------------------------

STATES = torch.eye(3).expand(2, 4, 3, 3)  # time, batch, token, dim
TIMES = torch.tensor([0.0, 1.0])


def test_trajectory_takes_everything_that_fits():
    whole = hs.Trajectory(
        TIMES,
        STATES,
        mask=torch.ones(4, 3, dtype=torch.bool),
        radius=torch.ones(2, 4, 3),
        tokens=[["a", "b", "c"]] * 4,
        outcome=hs.Outcome((), ()),
    )
    assert whole.states is STATES
    with pytest.raises(FrozenInstanceError):
        whole.states = STATES


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"states": torch.eye(3)}, "states has shape (3, 3), but it must be (time, batch, token, dim)"),
        ({"times": torch.zeros(3)}, "times has shape (3,), but states asks for (2,)"),
        ({"times": torch.zeros(2, 1)}, "times has shape (2, 1)"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "mask has shape (3,), but states asks for (4, 3)"),
        ({"radius": torch.ones(4, 3)}, "radius has shape (4, 3), but states asks for (2, 4, 3)"),
        ({"tokens": [["a", "b", "c"]] * 3}, "tokens must hold 3 labels for each of 4 systems"),
        ({"tokens": [["a", "b"]] * 4}, "tokens must hold 3 labels for each of 4 systems"),
        ({"times": None}, "times is None"),
        ({"times": [0.0, 1.0]}, "times is"),
        ({"states": STATES.tolist()}, "states is"),
    ],
)
def test_trajectory_refuses(given, said):
    refused(lambda: hs.Trajectory(**{"times": TIMES, "states": STATES, **given}), said)


def test_a_simulation_is_a_system_and_a_trajectory_is_not():
    simulation = hs.integrate(hs.SA(1.0), torch.eye(2, dtype=torch.float64), [1.0])
    assert isinstance(simulation, hs.System)
    assert not isinstance(simulation.trajectory, hs.System)
    assert not isinstance(simulation, hs.Reducer)


# Measurements ---------------------------------------------------------------------------------------------------------


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
    assert hs.check_measurement(dataset) is dataset


def test_axes_may_stand_in_another_order():
    dataset = xr.Dataset(
        {"a": (("time", "head"), np.ones((2, 3))), "a_stderr": (("head", "time"), np.ones((3, 2)))}, attrs={"n": 2}
    )
    assert hs.check_measurement(dataset) is dataset


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
        (measurement(a=[1, 2], a_low=[0, 2.1], a_high=[3, 3]), "'a' leaves its own interval"),
        (measurement(a=[1, 2], a_low=[0, 0], a_high=[3, 1.9]), "'a' leaves its own interval"),
        (
            xr.Dataset({"a": ("time", [1.0, 2.0]), "a_stderr": ((), 0.1)}, attrs={"n": 2}),
            "'a_stderr' has axes (), but 'a' has ('time',)",
        ),
        (measurement(a=[1, 2], a_stderr=[0, 0])["a"], "Dataset"),
    ],
)
def test_check_measurement_refuses(dataset, said):
    refused(lambda: hs.check_measurement(dataset), said)


def test_n_of_a_variable_stands_before_that_of_the_dataset():
    dataset = measurement(a=[1, 2], a_stderr=[0, 0], n=3)
    dataset["a"].attrs["n"] = 0
    refused(lambda: hs.check_measurement(dataset), "attribute n of measurement 'a' is 0")


# Verdicts -------------------------------------------------------------------------------------------------------------


def test_a_verdict_holds_what_a_reader_needs_and_does_not_change():
    verdict = hs.Verdict("c1", hs.Ruling.SUPPORTED, 0.1, -0.2, 0.3, 12, "slope > 0", "ab12", "The slope is 0.1.")
    assert verdict == hs.Verdict(**{item.name: getattr(verdict, item.name) for item in fields(verdict)})
    with pytest.raises(FrozenInstanceError):
        verdict.ruling = hs.Ruling.REFUTED
    assert [ruling.value for ruling in hs.Ruling] == [
        *("supported", "refuted", "inconclusive", "true by construction", "premise impossible here"),
    ]
