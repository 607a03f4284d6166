"""Bridges of finite chains against iterative proportional fitting of the whole path tensor."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from helmscope.transport.discrete_bridge import bridge_chain
from helmscope.transport.scaling import Scaling, scale_to_marginals
from helmscope.types import HelmscopeError
from support.planting import Plant, outcome

STEPS, STATES = 3, 3


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    steps = torch.rand(STEPS, STATES, STATES, dtype=torch.float64, generator=random) ** 3
    steps = steps / steps.sum(-1, keepdim=True)
    start, end = torch.tensor([0.7, 0.1, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    return steps, start / start.sum(), end / end.sum()


def path_measure(steps: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The bridge and the reference as tensors over all paths, by proportional fitting with plain loops."""
    shape = (STATES,) * (STEPS + 1)
    reference = np.zeros(shape)
    for path in itertools.product(range(STATES), repeat=STEPS + 1):
        reference[path] = start[path[0]] * math.prod(float(steps[k, path[k], path[k + 1]]) for k in range(STEPS))
    bridge, inner = reference.copy(), tuple(range(1, STEPS))
    for _ in range(3000):
        bridge *= (start.numpy() / bridge.sum((*inner, STEPS))).reshape(-1, *(1,) * STEPS)
        bridge *= end.numpy() / bridge.sum((0, *inner))
    return bridge, reference


def test_agrees_with_fitting_of_all_paths() -> None:
    steps, start, end = example()
    exact, reference = path_measure(steps, start, end)
    bridge = bridge_chain(list(steps), start, end)
    assert bridge.ok
    for k in range(STEPS + 1):
        law = exact.sum(tuple(j for j in range(STEPS + 1) if j != k))
        np.testing.assert_allclose(bridge.marginals[k], law, atol=1e-11)
    for k in range(STEPS):
        pair = exact.sum(tuple(j for j in range(STEPS + 1) if j not in (k, k + 1)))
        np.testing.assert_allclose(bridge.transitions[k], pair / pair.sum(1, keepdims=True), atol=1e-11)
    assert bridge.cost().estimate == pytest.approx(float((exact * np.log(exact / reference)).sum()), abs=1e-11)
    # swapped axes are seen: the bridge of the transposed chain is another one
    turned = steps.mT / steps.mT.sum(-1, keepdim=True)
    assert (bridge_chain(turned, start, end).marginals - bridge.marginals).abs().max() > 0.01


def test_potentials_solve_the_backward_equation() -> None:
    steps, start, end = example()
    phi = torch.exp(bridge_chain(steps, start, end).log_potentials)
    for k in range(STEPS):
        torch.testing.assert_close(phi[k], (steps[k] * phi[k + 1]).sum(1), rtol=1e-12, atol=0)


FAULTS = {
    "sign of the potential": lambda right, kernel, a, b, **options: _with_g(right(kernel, a, b, **options), -1.0),
    "half of the potential": lambda right, kernel, a, b, **options: _with_g(right(kernel, a, b, **options), 0.5),
    "axes of the kernel": lambda right, kernel, a, b, **options: right(kernel.mT, a, b, **options),
    "laws exchanged": lambda right, kernel, a, b, **options: right(kernel, b, a, **options),
}


def _with_g(scaling: Scaling, factor: float) -> Scaling:
    return replace(scaling, g=factor * scaling.g)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name: str) -> None:
    steps, start, end = example()
    middle = path_measure(steps, start, end)[0].sum((0, 2, 3))

    def check() -> bool:
        return np.allclose(bridge_chain(steps, start, end).marginals[1], middle, rtol=0, atol=1e-9)

    assert check()
    assert outcome(Plant(FAULTS[name], scale_to_marginals), check) == "seen"


def test_paths_follow_the_marginals() -> None:
    steps, start, end = example()
    bridge = bridge_chain(steps, start, end)
    paths = bridge.sample(4000, seed=1)
    assert torch.equal(paths, bridge.sample(4000, seed=1))
    for k in range(STEPS + 1):
        shares = torch.bincount(paths[:, k], minlength=STATES) / 4000
        assert (shares - bridge.marginals[k]).abs().max() < 0.03


def test_tiny_probabilities_are_bridged_in_the_log_domain() -> None:
    rare = 1e-200
    step = torch.tensor([[1.0, rare], [rare, 1.0]], dtype=torch.float64)
    bridge = bridge_chain([step, step], torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(bridge.marginals[1], torch.tensor([0.5, 0.5]).double())
    assert bridge.cost().estimate == pytest.approx(-math.log(2 * rare), rel=1e-12)


def test_states_without_mass_and_impossible_steps_stay_finite() -> None:
    step = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)
    bridge = bridge_chain([step, step], torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]))
    assert torch.isfinite(bridge.transitions).all()
    assert math.isfinite(bridge.cost().estimate)
    torch.testing.assert_close(bridge.marginals[1], torch.tensor([0.5, 0.5, 0.0]).double())


def test_masses_that_no_path_provides_do_not_converge() -> None:
    step = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    bridge = bridge_chain([step], torch.tensor([0.8, 0.2]), torch.tensor([0.5, 0.5]), max_iterations=50)
    assert not bridge.ok
    assert "iteration limit reached after 50 iterations" in bridge.outcome
    assert "use a reference that connects" in bridge.outcome


def test_bad_input_is_named() -> None:
    steps, start, end = example()
    half = torch.tensor([0.5, 0.5])
    with pytest.raises(HelmscopeError, match="transitions is a list, but it must be a sequence of at least one matrix"):
        bridge_chain([], start, end)
    with pytest.raises(HelmscopeError, match=r"transitions\[1\] is not stochastic"):
        bridge_chain([steps[0], 2 * steps[1]], start, end)
    with pytest.raises(HelmscopeError, match=r"transitions\[0\] has shape \(2, 3\), but it must be square"):
        bridge_chain([steps[0][:2]], start, end)
    with pytest.raises(HelmscopeError, match=r"start is \(2,\), but it must be .* one probability per state \(3\)"):
        bridge_chain(steps, half, end)
    with pytest.raises(HelmscopeError, match="end has the sum 2, but"):
        bridge_chain(steps, start, 2 * end)
    with pytest.raises(HelmscopeError, match="end has mass at state 1, but no path of the chain connects it"):
        bridge_chain([torch.eye(2)], torch.tensor([1.0, 0.0]), half)
    with pytest.raises(HelmscopeError, match="tol is 0, but it must be a finite number > 0"):
        bridge_chain(steps, start, end, tol=0)
