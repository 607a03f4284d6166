"""Arguments: accepted and rejected values, error messages, and the imports of the types."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import helmscope as hs
import helmscope.types
from helmscope.types import (
    MissingExtra,
    check_integer,
    check_memory,
    check_name,
    check_real,
    check_times,
    pluralized,
    type_with_article,
)
from support.children import run_python
from support.refusal import refused

NAN, INF = math.nan, math.inf


def test_types_need_nothing_that_must_be_installed():
    """Not even msgspec, which decodes their Region: machines that only carry out units of work may lack it."""
    code = (
        "import sys\n"
        "missing = 'torch', 'numpy', 'xarray', 'scipy', 'msgspec'\n"
        "sys.modules.update(dict.fromkeys(missing))\n"
        "import helmscope.types"
    )
    run_python(code, check=True)


def test_tracebacks_show_the_import_path_of_errors():
    for error in (hs.HelmscopeError, MissingExtra):
        assert error.__module__ == "helmscope.types"
        assert getattr(helmscope.types, error.__name__) is error


def test_a_refusal_is_a_value_error_and_a_missing_extra_says_how_to_get_it():
    assert issubclass(hs.HelmscopeError, ValueError)
    error = MissingExtra("plotly", "report")
    assert isinstance(error, hs.HelmscopeError)
    said = "plotly is not installed, and this needs it: pip install 'helmscope[report]', in a clone '.[report]'"
    assert str(error) == said


@pytest.mark.parametrize(
    "value",
    [4, 4.0, Fraction(4), Decimal(4), np.float32(4), np.int64(4), np.array(4.0), torch.tensor(4), torch.ones(1) * 4],
)
def test_real_number_gives_a_plain_float(value):
    number = check_real("beta", value, at_least=4)
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
    refused(lambda: check_real("beta", value), "beta is ", "but it must be a finite number")


def test_real_number_keeps_its_bounds():
    assert check_real("x", 0.0, at_least=0) == 0
    assert check_real("x", 5e-324, above=0) == 5e-324
    refused(lambda: check_real("x", -5e-324, at_least=0), "x is -5e-324", ">= 0")
    refused(lambda: check_real("x", 0.0, above=0), "x is 0.0", "> 0")
    refused(lambda: check_real("x", -1, above=-0.5), "x is -1", "> -0.5")


@pytest.mark.parametrize("value", [3, 3.0, np.int64(3), np.float64(3), torch.tensor(3), Fraction(3)])
def test_whole_number_gives_a_plain_int(value):
    number = check_integer("n", value, at_least=3)
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
    refused(lambda: check_integer("n", value, at_least=1), "n is ", "but it must be a whole number >= 1")


@pytest.mark.parametrize("value", [2**63, 10**400, 10**5000, 1e300, np.uint64(2**63)], ids=range(5))
def test_whole_number_rejects_sizes_beyond_tensors(value):
    refused(lambda: check_integer("n", value, at_least=1), "n is ", "below 2^63 = 9223372036854775808")
    assert check_integer("n", 2**63 - 1, at_least=1) == 2**63 - 1


def test_real_number_refuses_an_int_beyond_all_floats():
    refused(
        lambda: check_real("beta", 10**5000), "beta is a whole number of 16610 bits, but it must be a finite number"
    )


def test_fits_memory_refuses_more_than_there_is():
    check_memory("n is 10", 10)
    refused(lambda: check_memory("n is 10^12", 10**12), "n is 10^12, but that makes 8e+03 GB, and this machine has ")


def test_a_refusal_shows_a_large_value_shortly_and_on_one_line():
    text = refused(lambda: check_real("beta", torch.ones(30, 30)), "beta is tensor([[1., 1.")
    assert "..." in text
    refused(lambda: check_real("beta", "a\nb"), "'a\\nb'")


@pytest.mark.parametrize(
    "times", [[0, 1, 2.5], (0, 1, 2.5), np.array([0, 1, 2.5]), torch.tensor([0, 1, 2.5]), [0, np.float32(1), 2.5]]
)
def test_increasing_times_gives_plain_floats(times):
    assert check_times(times) == [0.0, 1.0, 2.5]
    assert all(type(t) is float for t in check_times(times))
    assert check_times(times[1:2]) == [1.0]


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
    refused(lambda: check_times(times), said, "must")


def test_of_many_names_the_nearest_is_offered_or_five_are_listed():
    many = [f"claim-number-{k}" for k in range(40)]
    text = refused(lambda: check_name("claim", "claim-numbr-17", many))
    assert text == "unknown claim 'claim-numbr-17': did you mean 'claim-number-17'?"
    text = refused(lambda: check_name("claim", "xumber", [*many, "zeta"]))
    assert text.startswith("unknown claim 'xumber'; similar: claim-number-")
    assert text.count(",") == 4
    assert "zeta" not in text
    text = refused(lambda: check_name("claim", "zet-of-mine", [*many, "zeta"]))
    assert text == "unknown claim 'zet-of-mine'; similar: zeta"
    text = refused(lambda: check_name("claim", "zzz", many, listed_by="`helmscope claims list`"))
    assert text == "unknown claim 'zzz' (`helmscope claims list` prints all 40)"
    text = refused(lambda: check_name("claim", "xumber", ["number", *many], listed_by="`list`"))
    assert text == "unknown claim 'xumber': did you mean 'number'?"
    text = refused(
        lambda: check_name("claim", "mean", [*many, "no-mean-drift", "means", "breathing"], listed_by="`ls`")
    )
    assert text == "unknown claim 'mean': did you mean 'means'?"
    text = refused(lambda: check_name("claim", "drift", [*many, "no-mean-drift", "breathing"]))
    assert text == "unknown claim 'drift': did you mean 'no-mean-drift'?"
    far = refused(lambda: check_name("claim", "zzz", [*many, "zeta"]))  # one letter in common is not near
    assert far == "unknown claim 'zzz'; 41 are allowed"


def test_one_singular():
    assert [pluralized(k, "text") for k in (0, 1, 2)] == ["0 texts", "1 text", "2 texts"]


def test_known_name_offers_the_nearest():
    allowed = {"uniform", "vmf", "orthonormal"}
    assert check_name("start", "vmf", allowed) == "vmf"
    text = refused(lambda: check_name("start", "orthonormol", allowed))
    assert text == "unknown start 'orthonormol': did you mean 'orthonormal'? Allowed: orthonormal, uniform, vmf"
    text = refused(lambda: check_name("start", "zzz", allowed), "unknown start 'zzz'", "orthonormal, uniform, vmf")
    assert "did you mean" not in text
    assert text == "unknown start 'zzz'; allowed: orthonormal, uniform, vmf"
    many = [f"claim-{k}" for k in range(56)]
    assert refused(lambda: check_name("claim", "clam-7", many)) == "unknown claim 'clam-7': did you mean 'claim-7'?"
    assert refused(lambda: check_name("claim", "!!!", many)) == "unknown claim '!!!'; 56 are allowed"


def test_one_thing_is_counted_in_the_singular():
    assert [pluralized(count, "unit") for count in (0, 1, 2)] == ["0 units", "1 unit", "2 units"]
    assert repr(hs.Subject("A", ["Once"])) == "<Subject A: 1 text>"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("int", "an int"), ("str", "a str"), ("object", "an object"), ("NoneType", "a NoneType"), ("Unit", "a Unit")),
        *(("ndarray", "an ndarray"), ("MLP", "an MLP"), ("SA", "an SA"), ("USA", "a USA"), ("RK4", "an RK4")),
        *(("LlamaModel", "a LlamaModel"), ("Heun", "a Heun"), ("EulerMaruyama", "an EulerMaruyama")),
    ],
)
def test_types_are_named_with_their_article(name: str, expected: str):
    assert type_with_article(type(name, (), {})()) == expected


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("pwsh", ["bash", "zsh", "fish"]),
        ("cosine", ["sa", "usa", "sinkhorn"]),
        ("layers", ["targets", "keep", "dtype"]),
        ("colour", ["log", "title"]),
    ],
)
def test_a_name_that_is_spelled_otherwise_is_not_suggested(name, allowed):
    text = refused(lambda: check_name("option", name, allowed))
    assert text == f"unknown option '{name}'; allowed: {', '.join(sorted(allowed))}"


@pytest.mark.parametrize(
    ("name", "allowed", "meant"),
    [
        ("sa", ["USA", "SA", "save"], "SA"),  # the same in other case
        ("loss", ["plots", "next_token_loss"], "next_token_loss"),  # contains the word
        ("rk5", ["rk4", "heun"], "rk4"),
        ("ssa", ["sa", "sinkhorn"], "sa"),
    ],
)
def test_what_is_suggested(name, allowed, meant):
    assert f"did you mean '{meant}'?" in refused(lambda: check_name("name", name, allowed))
