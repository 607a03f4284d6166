"""Units: what they accept, and that different units have different keys."""

from __future__ import annotations

import math
import pickle
import threading
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from helmscope.fields.attention import SA, USA
from helmscope.runs import Unit
from helmscope.theory.starts import Uniform
from helmscope.types import HelmscopeError
from support.toy_units import divide, noise, numbers


class Color(Enum):
    RED = 1
    BLUE = 2


class Level(IntEnum):
    ONE = 1


@dataclass(frozen=True)
class Scaled:
    factor: float

    def __call__(self, x: float) -> float:
        return self.factor * x


@dataclass(frozen=True)
class Other:
    factor: float


DIFFERENT = [
    *(None, True, False, 0, 1, 1.0, -0.0, 0.0, 0.1, np.nextafter(0.1, 1), math.nan, math.inf, "1", "", b"1", b""),
    *([], [1], [1, 2], [2, 1], [[1], 2], [1.0], ["1"], {}, {"a": 1}, {"a": 1.0}, {"b": 1}, {"a": {"b": 1}}),
    *(Path("a"), "a", Color.RED, Color.BLUE, Level.ONE, Scaled(1.0), Scaled(2.0), Other(1.0), Scaled, Color),
    *(divide, noise, partial(divide, 1), partial(divide, 2), partial(divide, b=1), partial(noise, 1), np.linalg.norm),
    *(np.zeros(2), np.zeros(3), np.zeros((2, 1)), np.zeros(2, np.float32), np.array([0.0, -0.0]), np.float32(1)),
    *(np.int64(1), np.bool_(True), np.array(["a", "b"]), np.zeros((2, 0)), np.zeros((0, 2)), np.eye(2), -np.eye(2)),
    *(torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1), torch.zeros(2, dtype=torch.bfloat16)),
    *(torch.ones(2, dtype=torch.bfloat16), torch.tensor(True), torch.tensor(1j), torch.tensor(-1j)),
    *(SA(beta=1.0), SA(beta=2.0), USA(beta=1.0), SA(beta=1.0, causal=True), SA(beta=1.0, value=torch.eye(2))),
    *(SA(beta=1.0, value=2 * torch.eye(2)), Uniform(4, 3), Uniform(3, 4)),
]


def key(value: object) -> str:
    return Unit("a", divide, {"a": value}).key


def test_different_values_have_different_keys():
    for one, two in combinations(range(len(DIFFERENT)), 2):
        assert key(DIFFERENT[one]) != key(DIFFERENT[two]), (DIFFERENT[one], DIFFERENT[two])
    assert len(DIFFERENT) == 74


@pytest.mark.parametrize("value", DIFFERENT)
def test_a_copy_has_the_same_key(value):
    """So that a resumed run, in another process, finds its units again."""
    assert key(pickle.loads(pickle.dumps(value))) == key(value)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((1, 2), [1, 2]),
        (np.float64(0.1), 0.1),
        (np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(6.0).reshape(2, 3)),
        (np.arange(6.0)[::2], np.array([0.0, 2.0, 4.0])),
        (torch.arange(6.0).reshape(2, 3).T, torch.arange(6.0).reshape(2, 3).T.contiguous()),
        (torch.ones(2, requires_grad=True), torch.ones(2)),
        (torch.tensor(1j).conj(), torch.tensor(complex(0, -1))),
    ],
)
def test_the_key_does_not_depend_on_the_memory_layout(one, two):
    assert key(one) == key(two)


def test_the_key_is_that_of_function_and_parameters_not_of_the_name():
    assert Unit("a", numbers, {"seed": 1}).key == Unit("b", numbers, {"seed": 1}).key
    assert Unit("a", numbers, {"seed": 1}).key != Unit("a", noise, {"seed": 1}).key
    assert Unit("a", partial(noise, 1), {"size": 2}).key != Unit("a", noise, {"seed": 1, "size": 2}).key
    # keys are stored in run folders: if they were computed differently, no earlier run could be resumed
    assert Unit("a", numbers, {"seed": 1}).key[:8] == "ff3b1506"


def inner():
    def function() -> None: ...

    return function


@dataclass(frozen=True)
class Hidden:
    rng: object


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.random.default_rng(0), "a of parameters of unit 'u' is a random Generator, whose state units would share"),
        (Hidden(np.random.default_rng(0)), "rng of a of parameters of unit 'u' is a random Generator, whose state"),
        ({1: 2}, "a key of a of parameters of unit 'u' is an int, but it must be a str"),
        (lambda: 1, "a of parameters of unit 'u' is <lambda>, but it must be picklable"),
        ([threading.Lock()], "item 0 of a of parameters of unit 'u' is lock, but it must be picklable"),
        (np.array([{}]), "a of parameters of unit 'u' is an ndarray of object, but it must be a dense array of plain"),
        (torch.eye(2).to_sparse(), "a of parameters of unit 'u' is a Tensor of torch.float32, but it must be a dense"),
    ],
)
def test_parameters_that_cannot_be_pickled_are_refused(value, sentence):
    with pytest.raises(HelmscopeError) as caught:
        Unit("u", divide, {"a": value})
    assert str(caught.value).replace(f"{__name__}.", "test_runs_unit.").startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("function", [lambda: 1, inner(), partial(inner())])
def test_functions_that_another_process_cannot_import_are_refused(function):
    with pytest.raises(
        HelmscopeError, match=r"^(item 0 of )?function of unit 'u' is .+, but it must be picklable, to be sent to"
    ):
        Unit("u", function)


class Plain:
    """Picklable, but not a dataclass."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def times(self, a: float) -> float:
        return self.factor * a


def test_the_key_of_a_picklable_callable_depends_on_its_state():
    assert Unit("u", Plain(2.0).times).key == Unit("u", Plain(2.0).times).key != Unit("u", Plain(3.0).times).key
    assert Unit("u", Scaled(2.0).__call__).key != Unit("u", Scaled(3.0).__call__).key
    assert Unit("u", divide, {"a": Plain(2.0)}).key == Unit("u", divide, {"a": Plain(2.0)}).key
    assert Unit("u", divide, {"a": {"p", "q", "r"}}).key == Unit("u", divide, {"a": {"r", "q", "p"}}).key


def test_other_bad_input():
    with pytest.raises(HelmscopeError, match=r"^function of unit 'u' is an int, but it must be callable$"):
        Unit("u", 3)
    with pytest.raises(HelmscopeError, match=r"^parameters of unit 'u' is a list, but it must be a mapping$"):
        Unit("u", divide, [1, 2])
    for name in ("", "../a", ".a", "a b", None, "x" * 201):
        with pytest.raises(HelmscopeError, match=r"^name is .*, but it must be 1 to 200 letters, digits"):
            Unit(name, divide)


def test_a_callable_dataclass_is_a_function():
    assert Unit("u", Scaled(2.0), {"x": 3.0}).key != Unit("u", Scaled(3.0), {"x": 3.0}).key
