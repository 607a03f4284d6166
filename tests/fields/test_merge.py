"""Merged clouds against the loop oracle, and the velocity that merging must not change."""

from __future__ import annotations

import math

import pytest
import torch

from helmscope.fields.attention import SA, USA
from helmscope.fields.merge import merge_tokens
from helmscope.geometry.sphere import retract
from helmscope.types import HelmscopeError
from support import oracles

F32, F64 = torch.float32, torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return retract(normal(*shape, seed=seed))


def circle(*angles: float) -> torch.Tensor:
    t = torch.tensor(angles, dtype=F64)
    return torch.stack([t.cos(), t.sin()], -1)


@pytest.mark.parametrize("d", [2, 3, 5])
@pytest.mark.parametrize("tol", [0.0, 0.1, 0.3])
def test_merge_oracle(d, tol):
    for seed in range(10):
        x, weights = tokens(8, d, seed=seed), normal(8, seed=seed).abs()
        x[5] = x[1]
        merged = merge_tokens(x, tol, weights=weights)
        expected = oracles.merge(x.tolist(), weights.tolist(), tol)
        states, masses = merged.distinct()
        assert len(states) == len(expected)
        assert (states - torch.tensor([point for point, _ in expected], dtype=F64)).abs().max() < 1e-15
        assert (masses - torch.tensor([mass for _, mass in expected], dtype=F64)).abs().max() < 2e-15
        assert merged.leader.tolist() == oracles.cluster_labels(x.tolist(), tol)


def test_leaders_weights_and_states():
    x = circle(0.0, 2.0, 0.1, 2.1, -2.0)
    weights = torch.tensor([1.0, 2.0, 3.0, 0.5, 4.0], dtype=F64)
    merged = merge_tokens(x, 0.15, weights=weights)
    assert merged.leader.tolist() == [0, 1, 0, 1, 4]
    assert merged.weights.tolist() == [4.0, 2.5, 0.0, 0.0, 4.0]
    assert torch.equal(merged.states, merged.states[merged.leader])
    states, masses = merged.distinct()
    assert torch.equal(states, merged.states[[0, 1, 4]])
    assert masses.tolist() == [4.0, 2.5, 4.0]
    mean = retract(x[0] + 3 * x[2])
    assert (states[0] - mean).abs().max() < 2e-16


def test_without_weights_every_token_has_weight_one():
    x = tokens(4, 3)[[0, 1, 0, 2, 0]]
    merged = merge_tokens(x, 0)
    assert merged.weights.tolist() == [3.0, 1.0, 0.0, 1.0, 0.0]
    assert (merged.states - x).abs().max() < 2e-16


def test_tolerance_zero_merges_only_equal_tokens():
    near = circle(0.5, 0.5 + 1e-15, 0.5)
    assert merge_tokens(near, 0.0).leader.tolist() == [0, 1, 0]
    assert merge_tokens(near, 1e-14).leader.tolist() == [0, 0, 0]


def test_a_chain_is_one_cluster():
    x = circle(0.0, 0.2, 0.1)  # the ends are 0.2 apart and meet through the token between them
    assert merge_tokens(x, 0.11).leader.tolist() == [0, 0, 0]
    assert merge_tokens(x[:2], 0.11).leader.tolist() == [0, 1]
    assert (merge_tokens(x, 0.11).states - circle(0.1)).abs().max() < 2e-16
    long = circle(*(0.1 * k for k in (0, 5, 3, 1, 4, 2, 6)))
    assert merge_tokens(long, 0.11).leader.tolist() == [0] * 7


def test_tokens_without_weight_are_not_merged():
    """They neither merge nor link: two tokens that meet through one of weight 0 alone do not meet."""
    x = circle(0.0, 0.1, 0.2)
    weights = torch.tensor([1.0, 0.0, 2.0], dtype=F64)
    merged = merge_tokens(x, 0.11, weights=weights)
    assert merged.leader.tolist() == [0, 1, 2]
    assert torch.equal(merged.states, x)
    assert torch.equal(merged.weights, weights)
    again = merge_tokens(x[[0, 0, 2]], 0.11, weights=weights)  # coincident with a token of weight
    assert again.leader.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [F32, F64])
def test_tokens_that_are_not_merged_are_unchanged_to_the_bit(dtype):
    x = tokens(6, 3).to(dtype)
    x[4] = x[2]
    merged = merge_tokens(x, 1e-3, weights=torch.rand(6, generator=torch.Generator().manual_seed(0)) + 0.1)
    assert merged.leader.tolist() == [0, 1, 2, 3, 2, 5]
    lone = [0, 1, 3, 5]
    assert torch.equal(merged.states[lone], x[lone])
    assert merged.states.dtype == merged.weights.dtype == dtype
    assert (merged.states.norm(dim=-1) - 1).abs().max() <= 2 * torch.finfo(dtype).eps


def test_merging_twice_changes_nothing_more():
    once = merge_tokens(tokens(12, 2), 0.2)
    assert (once.weights == 0).any()
    twice = merge_tokens(once.states, 0.0, weights=once.weights)
    assert torch.equal(twice.states, once.states)
    assert torch.equal(twice.weights, once.weights)


def test_clouds_of_a_batch_are_merged_separately():
    x = tokens(2, 3, 6, 2)
    weights = normal(2, 3, 6).abs()
    weights[0, 1, 2] = 0
    together = merge_tokens(x, 0.3, weights=weights)
    for a in range(2):
        for b in range(3):
            alone = merge_tokens(x[a, b], 0.3, weights=weights[a, b])
            assert torch.equal(together.leader[a, b], alone.leader)
            assert (together.states[a, b] - alone.states).abs().max() < 2e-16
            assert (together.weights[a, b] - alone.weights).abs().max() < 1e-15
    assert len({len(set(row)) for row in together.leader.reshape(6, 6).tolist()}) > 1
    shared = merge_tokens(x, 0.3, weights=weights[1, 1])  # one row of weights serves all clouds
    assert torch.equal(shared.leader[1, 1], together.leader[1, 1])


@pytest.mark.parametrize("kind", [SA, USA])
@pytest.mark.parametrize("minus", [False, True])
def test_velocity_of_coincident_tokens_is_that_of_the_merged_cloud(kind, minus):
    given = {"value": -torch.eye(3)} if minus else {"query_key": normal(3, 3, seed=1), "value": normal(3, 3, seed=2)}
    x = tokens(4, 3)[[0, 1, 0, 2, 0, 1, 3]]
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25, 1.5, 3.0], dtype=F64)
    field = kind(2.0, **given)
    merged = merge_tokens(x, 0.0, weights=weights)
    expected = field(x, weights=weights)
    bound = 2e-15 * expected.abs().max().clamp(min=1)  # measured 7e-16 of it
    moved = field(merged.states, weights=merged.weights)
    assert (moved[merged.leader] - expected).abs().max() < bound
    states, masses = merged.distinct()
    assert (field(states, weights=masses) - expected[[0, 1, 3, 6]]).abs().max() < bound


def test_error_of_merging_near_tokens_is_of_the_order_of_the_tolerance():
    x = circle(0.0, 1.0, 2.5)
    errors = []
    for gap in (1e-2, 1e-3):
        pair = torch.cat([circle(-gap / 2, gap / 2), x[1:]])
        merged = merge_tokens(pair, 2 * gap)
        assert merged.leader.tolist() == [0, 0, 2, 3]
        change = SA(4.0)(merged.states, weights=merged.weights)[2:] - SA(4.0)(pair)[2:]
        errors.append(change.abs().max().item())
    assert errors[0] < 1e-3
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.01)  # the mean takes the first order away


@pytest.mark.parametrize(
    ("x", "tol"),
    [(circle(0.0, math.pi), 3.2), (circle(0.0, math.pi / 2, math.pi, 3 * math.pi / 2), 1.6)],
)
def test_a_cluster_without_a_mean_direction_is_refused_by_name(x, tol):
    """Tokens around the whole circle, chained into one cluster, sum to 0 or to the rounding of it."""
    with pytest.raises(HelmscopeError, match="max_angle"):
        merge_tokens(x, tol)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: merge_tokens(tokens(3, 3), -0.1), ["max_angle", "-0.1"]),
        (lambda: merge_tokens(tokens(3, 3), math.nan), ["max_angle", "nan"]),
        (lambda: merge_tokens(tokens(3, 3), math.inf), ["max_angle", "inf"]),
        (lambda: merge_tokens(tokens(3, 3), "near"), ["max_angle", "near"]),
        (lambda: merge_tokens(tokens(3, 3), True), ["max_angle", "True"]),
        (lambda: merge_tokens(2 * tokens(3, 3), 0.1), ["x ", "norm 2"]),
        (lambda: merge_tokens([[1.0, 0.0]], 0.1), ["x ", "list"]),
        (lambda: merge_tokens(tokens(3, 3), 0.1, weights=torch.ones(2)), ["weights", "(2,)"]),
        (lambda: merge_tokens(tokens(3, 3), 0.1, weights=torch.tensor([1.0, -2.5, 1.0])), ["weights", "-2.5"]),
        (lambda: merge_tokens(tokens(3, 3), 0.1, weights=torch.zeros(3)), ["weights", "positive"]),
        (lambda: merge_tokens(tokens(2, 3, 3), 0.1).distinct(), ["states", "(2, 3, 3)"]),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(HelmscopeError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
