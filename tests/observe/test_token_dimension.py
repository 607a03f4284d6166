"""The dimension of tokens along depth against loops over prompts and positions, at equal numbers of points."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helmscope.observe.dimension import gride_of_ratios, two_nn
from helmscope.observe.token_dimension import position_dimension, token_dimension
from helmscope.stats.reduce import reduce_replicates
from helmscope.types import HelmscopeError, Trajectory


def on_circles(depths: int, prompts: int, n: int, d: int = 6, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(depths, prompts, n, d, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1)


def path(states: torch.Tensor, weights: torch.Tensor | None = None) -> Trajectory:
    return Trajectory(torch.arange(float(len(states))), states, weights)


def ratios(cloud: np.ndarray, k: int = 1) -> np.ndarray:
    """r_2k / r_k of each point, from all distances."""
    distances = np.sort(np.linalg.norm(cloud[:, None] - cloud[None], axis=-1), 1)[:, 1:]
    return np.asarray(distances[:, 2 * k - 1] / distances[:, k - 1])


def test_tokens_of_a_prompt_equal_loops() -> None:
    states = on_circles(3, 4, 20)
    measured = token_dimension(path(states), neighbors=(2, 3))
    assert measured.attrs["points"] == 19
    for depth in range(3):
        for prompt in range(4):
            cloud = states[depth, prompt, 1:]
            assert float(measured.two_nn[depth, prompt]) == pytest.approx(two_nn(cloud).estimate, rel=1e-12)
            expected = gride_of_ratios(ratios(cloud.numpy(), 3), 3).estimate
            assert float(measured.gride.sel(neighbor=3)[depth, prompt]) == pytest.approx(expected, rel=1e-10)


def test_equal_numbers_of_points_without_copies_and_padding() -> None:
    """Copies at one depth are left out at all, and every prompt is cut to the smallest number of points."""
    states = on_circles(2, 3, 20)
    states[1, 0, 7] = states[1, 0, 4]
    states[0, 0, 9] = states[0, 0, 5]
    weights = torch.ones(1, 3, 20)
    weights[:, 2, 16:] = 0
    measured = token_dimension(path(states, weights), neighbors=())
    kept = {0: [i for i in range(1, 20) if i not in (7, 9)][:15], 1: list(range(1, 16)), 2: list(range(1, 16))}
    assert measured.attrs["points"] == 15
    for depth in range(2):
        for prompt, members in kept.items():
            expected = two_nn(states[depth, prompt, members]).estimate
            assert float(measured.two_nn[depth, prompt]) == pytest.approx(expected, rel=1e-12)


def test_a_first_token_counts_on_request() -> None:
    states = on_circles(1, 2, 12)
    every = token_dimension(path(states), neighbors=(), include_first_token=True)
    assert float(every.two_nn[0, 1]) == pytest.approx(two_nn(states[0, 1]).estimate, rel=1e-12)


def test_positions_equal_a_jackknife_with_new_searches() -> None:
    """One estimate from the ratios at all positions, and pseudo-values from clouds without each prompt."""
    prompts, n = 11, 4
    states = on_circles(2, prompts, n, d=3, seed=5)
    weights = torch.ones(1, prompts, n)
    weights[:, 3, 2:] = 0
    measured = position_dimension(path(states, weights))

    def estimate(depth: int, left_out: int | None) -> float:
        logs = []
        for k in range(1, n):
            members = [p for p in range(prompts) if weights[0, p, k] > 0 and p != left_out]
            logs.append(np.log(ratios(states[depth, members, k].numpy())))
        joined = np.concatenate(logs)
        return float(len(joined) / joined.sum())

    for depth in range(2):
        whole = estimate(depth, None)
        expected = [prompts * whole - (prompts - 1) * estimate(depth, p) for p in range(prompts)]
        np.testing.assert_allclose(measured.position_two_nn[depth].values, expected, rtol=1e-10)
    assert measured.attrs["positions"] == 3
    assert measured.attrs["points"] == pytest.approx((11 + 10 + 10) / 3)


def test_known_dimensions_of_a_simulated_cloud() -> None:
    """Tokens on a plane through a sphere of many dimensions have dimension 1, and off it more."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.zeros(1, 8, 150, 20, dtype=torch.float64)
    flat[..., :2] = torch.randn(1, 8, 150, 2, generator=generator, dtype=torch.float64)
    noisy = flat + 0.3 * torch.randn(1, 8, 150, 20, generator=generator, dtype=torch.float64)
    states = torch.nn.functional.normalize(torch.cat([flat, noisy]), dim=-1)
    reduced = reduce_replicates(token_dimension(path(states), neighbors=(4,)))
    assert float(reduced.two_nn_low[0]) < 1 < float(reduced.two_nn_high[0])
    assert float(reduced.two_nn_low[1]) > 3
    assert reduced.gride[0].item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: token_dimension(path(x[:, :, :8])), "system 0 has 7 different tokens that count, but .* at least 9"),
        (lambda x: token_dimension(path(x), neighbors=(1,)), "neighbors is 1, but it must be a whole number >= 2"),
        (lambda x: position_dimension(path(x[:, :8])), "system has 8 systems, but the dimension of the tokens at one"),
        (lambda x: token_dimension(path(torch.full_like(x, torch.nan))), "states of system 0 hold NaN"),
    ],
)
def test_bad_input(call: object, message: str) -> None:
    with pytest.raises(HelmscopeError, match=message):
        call(on_circles(1, 10, 14))  # type: ignore[operator]
