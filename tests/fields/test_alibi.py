"""The bias that falls with distance."""

from __future__ import annotations

import math

import pytest
import torch

import support.attention_family_oracles as family
from helmscope.fields.alibi import alibi_bias, alibi_slopes
from helmscope.fields.attention import SA, USA
from helmscope.fields.hardmax import Hardmax
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.types import HelmscopeError
from support.attention_cases import F64, tokens
from support.attention_family_cases import assert_oracle


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("slope", [0.0, 0.25, 3.0])
def test_loops(n, slope):
    bias = alibi_bias(n, slope)
    assert bias.dtype == F64
    assert torch.equal(bias, torch.tensor(family.alibi(n, slope), dtype=F64))
    for field in (SA(2.0, bias=bias, causal=True), USA(2.0, bias=bias), Hardmax(bias=bias)):
        assert_oracle(field, tokens(n, 3), {})
    assert_oracle(SinkhornAttention(2.0, bias=bias), tokens(n, 3), {})


def test_it_favors_nearby_tokens():
    """At beta = 0 the causal weights are a geometric sequence of ratio e^{-slope}."""
    kernel = SA(0.0, bias=alibi_bias(5, 0.7), causal=True).kernel(tokens(5, 3))
    ratios = kernel[4, :4] / kernel[4, 1:]
    assert (ratios - math.exp(-0.7)).abs().max() < 1e-15
    assert torch.equal(SA(1.0, bias=alibi_bias(5, 0.0)).kernel(tokens(5, 3)), SA(1.0).kernel(tokens(5, 3)))


def test_slopes():
    """For 8 heads the published 1/2, 1/4, ..., 1/256; the last slope is 1/256 for any number."""
    assert alibi_slopes(8) == tuple(2.0**-k for k in range(1, 9))
    for heads in (1, 3, 12, 16):
        slopes = alibi_slopes(heads)
        assert len(slopes) == heads
        assert slopes[-1] == 2**-8
        assert slopes == pytest.approx([math.exp(-8 * k / heads * math.log(2)) for k in range(1, heads + 1)], rel=1e-14)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: alibi_bias(0, 1.0), ["n is 0", ">= 1"]),
        (lambda: alibi_bias(2.5, 1.0), ["n is 2.5"]),
        (lambda: alibi_bias(3, -1.0), ["slope is -1.0", ">= 0"]),
        (lambda: alibi_bias(3, math.nan), ["slope is nan"]),
        (lambda: alibi_bias(3, "steep"), ["slope is 'steep'"]),
        (lambda: alibi_bias(10**7, 1.0), ["n is 10000000, but that makes 8e+05 GB"]),
        (lambda: alibi_slopes(0), ["heads is 0", ">= 1"]),
        (lambda: alibi_slopes(10**12), ["heads is 1000000000000, but that makes 8e+03 GB"]),
        (lambda: alibi_slopes(1.5), ["heads is 1.5"]),
        (lambda: SA(1.0, bias=alibi_bias(4, 1.0))(tokens(5, 3)), ["bias", "(4, 4)", "(5, 5)"]),
    ],
)
def test_refusals(call, words):
    with pytest.raises(HelmscopeError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value
