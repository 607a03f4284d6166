"""Transport ratios against all permutations, convex potentials and planted exchanges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.models.record import record
from helmscope.observe import transport_ratio
from helmscope.observe.transport_ratio import squared_distances
from helmscope.solve.integrate import integrate
from helmscope.types import HelmscopeError, Trajectory
from support.model_families import inputs_of, tiny_model

F64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def path_of(*states, **options):
    return Trajectory(torch.arange(len(states), dtype=F64), torch.stack(states), **options)


def brute_force(x, y, distance):
    """W2^2 over the mean squared displacement, by all permutations."""
    n = len(x)
    cost = [[distance(x[i], y[j]) ** 2 for j in range(n)] for i in range(n)]
    least = min(sum(cost[i][p[i]] for i in range(n)) for p in itertools.permutations(range(n)))
    return least / sum(cost[i][i] for i in range(n))


def test_five_tokens_against_all_permutations():
    before = retract(randn(3, 5, 3))
    after = retract(before + 1.5 * randn(3, 5, 3, seed=1))
    radius = randn(2, 3, 5, seed=2).exp()
    measured = transport_ratio(path_of(before, after, radius=radius), include_first_token=True)
    for b in range(3):
        geodesic = brute_force(before[b], after[b], lambda u, v: math.acos(float(u @ v)))
        assert float(measured.ratio[1, b]) == pytest.approx(geodesic, abs=1e-12)
        x, y = (r[b, :, None] * cloud[b] for r, cloud in zip(radius, (before, after), strict=True))
        euclidean = brute_force(x, y, lambda u, v: float((u - v).norm()))
        assert float(measured.euclidean_ratio[1, b]) == pytest.approx(euclidean, abs=1e-12)
    assert float(measured.ratio.min()) < 0.95  # the tokens are not where an optimal plan puts them
    assert np.isnan(measured.ratio.values[0]).all()


def test_the_first_token_is_left_out_by_default():
    before, after = retract(randn(1, 6, 3)), retract(randn(1, 6, 3, seed=1))
    measured = transport_ratio(path_of(before, after))
    expected = brute_force(before[0, 1:], after[0, 1:], lambda u, v: math.acos(float(u @ v)))
    assert float(measured.ratio[1, 0]) == pytest.approx(expected, abs=1e-12)


def test_the_gradient_of_a_convex_potential_is_optimal_and_its_outputs_permuted_are_not():
    before = randn(1, 40, 4)
    root = randn(4, 4, seed=1)
    after = before @ (root @ root.T + torch.eye(4, dtype=F64))  # symmetric and positive definite
    states = [retract(cloud) for cloud in (before, after)]
    radius = torch.stack([torch.linalg.vector_norm(cloud, dim=-1) for cloud in (before, after)])
    optimal = transport_ratio(path_of(*states, radius=radius), include_first_token=True)
    assert float(optimal.euclidean_ratio[1, 0]) == pytest.approx(1, abs=1e-12)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    radius[1] = radius[1][:, order]
    permuted = transport_ratio(path_of(states[0], states[1][:, order], radius=radius), include_first_token=True)
    assert float(permuted.euclidean_ratio[1, 0]) < 0.8
    assert float(permuted.ratio[1, 0]) < 0.8


def test_a_rotation_of_the_circle_by_more_than_the_spacing_is_not_optimal():
    places = torch.arange(4, dtype=F64) * math.pi / 2
    # a quarter turn maps the square to itself, so that nothing need move at all
    square = torch.stack([places.cos(), places.sin()], -1)[None]
    turned = torch.stack([-places.sin(), places.cos()], -1)[None]
    measured = transport_ratio(path_of(square, turned), include_first_token=True)
    assert float(measured.ratio[1, 0]) == pytest.approx(0, abs=1e-20)
    assert float(measured.relative_step[1, 0]) == pytest.approx(1, abs=1e-12)


def test_small_steps_are_optimal_whatever_they_are():
    before = retract(randn(1, 30, 8))
    measured = transport_ratio(path_of(before, retract(before + 1e-3 * randn(1, 30, 8, seed=1))))
    assert float(measured.ratio[1, 0]) == 1
    assert float(measured.relative_step[1, 0]) < 0.02


def test_the_whole_depth_is_compared_with_the_first_state():
    states = [retract(randn(1, 5, 3, seed=seed)) for seed in range(3)]
    measured = transport_ratio(path_of(*states), include_first_token=True)
    expected = brute_force(states[0][0], states[2][0], lambda u, v: math.acos(float(u @ v)))
    assert float(measured.ratio_from_start[2, 0]) == pytest.approx(expected, abs=1e-12)
    assert float(measured.ratio_from_start[1, 0]) == float(measured.ratio[1, 0])


def test_nothing_moves_and_identical_tokens():
    before = retract(randn(1, 5, 3))
    still = transport_ratio(path_of(before, before))
    assert np.isnan(still.ratio.values).all()
    one = before[:, :1].expand(1, 5, 3)
    merged = transport_ratio(path_of(one, retract(one + 0.1)))
    assert float(merged.ratio[1, 0]) == 1
    assert np.isnan(merged.relative_step.values).all()


def test_weights_are_masses():
    before, after = retract(randn(1, 4, 3)), retract(randn(1, 4, 3, seed=1))
    repeated = [torch.cat([cloud, cloud[:, 3:]], 1) for cloud in (before, after)]
    weights = torch.tensor([[[1.0, 1, 1, 2]]], dtype=F64)
    found = transport_ratio(path_of(before, after, weights=weights), include_first_token=True)
    twice = transport_ratio(path_of(*repeated), include_first_token=True)
    assert float(found.ratio[1, 0]) == pytest.approx(float(twice.ratio[1, 0]), abs=1e-12)
    spoiled = torch.stack([before, after])
    spoiled[:, :, 3] = torch.nan
    without = Trajectory(torch.arange(2.0), spoiled, torch.tensor([[[1.0, 1, 1, 0]]], dtype=F64))
    alone = transport_ratio(path_of(before[:, :3], after[:, :3]), include_first_token=True)
    assert float(transport_ratio(without, include_first_token=True).ratio[1, 0]) == float(alone.ratio[1, 0])


def test_changing_weights_and_lost_states_are_refused():
    before, after = retract(randn(1, 4, 3)), retract(randn(1, 4, 3, seed=1))
    with pytest.raises(HelmscopeError, match="weights of the trajectory change over time"):
        transport_ratio(path_of(before, after, weights=torch.tensor([[[1.0, 1, 1, 1]], [[1.0, 1, 1, 0]]])))
    after[0, 2] = torch.nan
    with pytest.raises(HelmscopeError, match=r"system 0 .* at time 1, token 2"):
        transport_ratio(path_of(before, after))


def test_distances_of_close_pairs_keep_their_digits():
    x = retract(randn(6, 5))
    y = x + 1e-9 * randn(6, 5, seed=1)
    exact = (x[:, None] - y[None]).square().sum(-1)
    assert float(((squared_distances(x, y) - exact) / exact).abs().max()) < 1e-9


def test_a_recording_and_a_simulation_are_measured_by_the_same_function():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2", batch=2))
    measured = transport_ratio(recording)
    path = recording.trajectory
    kept = [i for i in range(1, path.states.shape[2]) if path.weights is None or path.weights[0, 1, i] > 0]
    states = retract(path.states[:, 1:2, kept].double())
    again = transport_ratio(Trajectory(path.times, states), include_first_token=True)
    assert measured.ratio.values[1:, 1] == pytest.approx(again.ratio.values[1:, 0], abs=1e-12)
    assert measured.half.values[1] == "attention"
    run = integrate(SA(beta=1.0), retract(randn(2, 6, 3)), times=[0.0, 1.0])
    assert transport_ratio(run).ratio.dims == ("time", "system")
