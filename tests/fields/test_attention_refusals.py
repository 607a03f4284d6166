"""What SA and USA refuse, and in which words."""

from __future__ import annotations

import pytest
import torch

from helmscope.types import HelmscopeError, short_repr
from support.attention_cases import (
    BOTH,
    INF,
    NAN,
    tokens,
)


def assert_refused(call, *words):
    """One sentence that holds the argument's name and its value or shape."""
    with pytest.raises(HelmscopeError) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@BOTH
@pytest.mark.parametrize(
    "beta",
    [-1.0, -1e-300, NAN, INF, -INF, "hot", "4", None, True, [1.0], 1j, 10**400],
    ids=lambda b: repr(b)[:9],
)
def test_bad_beta(kind, beta):
    assert_refused(lambda: kind(beta), "beta", short_repr(beta)[:60])


@BOTH
def test_bad_beta_of_some_system(kind):
    assert_refused(lambda: kind(torch.tensor([1.0, -2.0])), "beta", "-2", ">= 0")
    assert_refused(lambda: kind(torch.tensor([1.0, NAN])), "beta", "nan")
    assert_refused(lambda: kind(torch.tensor([1, 2])), "beta", "torch.int64")


@BOTH
def test_batch_axes_that_do_not_fit(kind):
    assert_refused(lambda: kind(torch.ones(2), query_key=torch.eye(3).expand(5, 3, 3)), "(2,)", "(5,)")
    assert_refused(lambda: kind(torch.ones(2))(tokens(5, 4, 3)), "(2,)", "(5, 4, 3)")
    assert_refused(lambda: kind(torch.ones(2))(tokens(4, 3)), "(2,)", "(4, 3)")


@BOTH
@pytest.mark.parametrize("name", ["query_key", "value", "bias"])
@pytest.mark.parametrize(
    ("matrix", "word"),
    [
        (torch.ones(2, 3), "(2, 3)"),
        (torch.ones(3), "(3,)"),
        (torch.ones(1, 3, 2), "(1, 3, 2)"),
        (torch.empty(0, 0), "(0, 0)"),
        (torch.ones(3, 3, dtype=torch.int64), "torch.int64"),
        (torch.ones(3, 3, dtype=torch.bool), "torch.bool"),
        (torch.ones(3, 3, dtype=torch.complex64), "torch.complex64"),
        (torch.full((3, 3), NAN), "nan"),
        (torch.full((3, 3), INF), "inf"),
        ([[1.0, 0.0], [0.0, 1.0]], "list"),
        (2.0, "float"),
    ],
)
def test_bad_matrix(kind, name, matrix, word):
    assert_refused(lambda: kind(1.0, **{name: matrix}), name, word)


@BOTH
def test_matrix_that_does_not_fit_the_tokens(kind):
    for name in ("query_key", "value", "bias"):
        field = kind(1.0, **{name: torch.eye(5)})
        assert_refused(lambda field=field: field(tokens(2, 4, 3)), name, "(5, 5)", "(2, 4, 3)")
    for name in ("query_key", "value"):
        assert_refused(lambda name=name: kind(1.0, **{name: torch.full((3, 3), -INF)}), name, "-inf")


@BOTH
@pytest.mark.parametrize("causal", ["no", 2, None])
def test_bad_causal(kind, causal):
    assert_refused(lambda: kind(1.0, causal=causal), "causal", repr(causal))


@BOTH
@pytest.mark.parametrize(
    ("x", "word"),
    [
        ([[1.0, 0.0]], "list"),
        (None, "NoneType"),
        (torch.ones(2, 2, dtype=torch.int64), "torch.int64"),
        (torch.eye(2).half(), "torch.float16"),
        (torch.tensor([1.0, 0.0]), "(2,)"),
        (torch.empty(0, 3), "(0, 3)"),
        (torch.ones(3, 1), "d=1"),
        (torch.tensor([[1.0, 0.0], [NAN, 0.0]]), "token 1"),
        (torch.tensor([[INF, 0.0]]), "token 0"),
        (torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "zero"),
        (torch.tensor([[2.0, 0.0]]), "norm 2"),
        (torch.tensor([[[1.0, 0.0]], [[1.001, 0.0]]]), "norm 1.001"),
    ],
)
def test_bad_tokens(kind, x, word):
    assert_refused(lambda: kind(1.0)(x), "x ", word)


@BOTH
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"weights": torch.tensor([1.0, -2.5, 1.0])}, ["weights", "-2.5"]),
        ({"weights": torch.tensor([1.0, NAN, 1.0])}, ["weights", "nan"]),
        ({"weights": torch.tensor([1.0, INF, 1.0])}, ["weights", "inf"]),
        ({"weights": torch.zeros(3)}, ["weights", "positive"]),
        ({"weights": torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])}, ["weights", "positive"]),
        ({"weights": torch.ones(4)}, ["weights", "(4,)"]),
        ({"weights": torch.ones(3, 2)}, ["weights", "(3, 2)"]),
        ({"weights": torch.ones(2, 3, 1)}, ["weights", "(2, 3, 1)"]),
        ({"weights": [1.0, 1.0, 1.0]}, ["weights", "list"]),
        ({"mask": torch.ones(3)}, ["mask", "torch.float32"]),
        ({"mask": torch.ones(4, dtype=torch.bool)}, ["mask", "(4,)"]),
        ({"mask": [True, True, True]}, ["mask", "list"]),
        ({"mask": torch.zeros(3, dtype=torch.bool)}, ["mask", "positive"]),
        (
            {"weights": torch.tensor([1.0, 0.0, 0.0]), "mask": torch.tensor([False, True, True])},
            ["weights", "mask", "positive"],
        ),
    ],
)
def test_bad_measure(kind, given, words):
    assert_refused(lambda: kind(1.0)(tokens(2, 3, 3), **given), *words)
