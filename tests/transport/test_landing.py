"""Bridges integrated by ``hs.integrate`` land on their targets; what steppers may do at the horizon."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise
from helmscope.solve import StochasticHeun
from helmscope.theory.starts import VonMisesFisher
from helmscope.transport import GaussianBridge, bridge_clouds, bridge_particles
from helmscope.types import HelmscopeError

NU = 0.3
ONE = torch.ones(1, 1, dtype=torch.float64)


def source(n: int, dim: int, seed: int) -> torch.Tensor:
    return VonMisesFisher(n=n, dim=dim, kappa=4.0, mean=torch.eye(dim)[0]).sample(seed=seed)


def target(n: int, dim: int, seed: int) -> torch.Tensor:
    return VonMisesFisher(n=n, dim=dim, kappa=8.0, mean=torch.eye(dim)[1]).sample(seed=seed)


def integrated(dim: int, fit: int, n: int, seed: int, *, as_printed: bool = False) -> torch.Tensor:
    """Where n fresh particles end that ``integrate`` moves by the field of a bridge fitted to ``fit`` points."""
    bridge = bridge_clouds(source(fit, dim, seed), target(fit, dim, seed + 1), nu=NU)
    run = hs.integrate(
        bridge.field(as_printed=as_printed),
        source(n, dim, seed + 2),
        bridge.graded_times(),
        noise=bridge.noise,
        stepper=hs.EulerMaruyama(bridge.horizon),
        seed=seed,
    )
    assert run.outcome.ok
    return run.states[-1]


def landing_statistic(dim: int, fit: int, n: int, seed: int, *, as_printed: bool = False) -> float:
    """W2^2(X, Y) - [W2^2(X, X') + W2^2(Y, Y')] / 2, X' from an independent fit, Y and Y' fresh."""
    x, other_x = (integrated(dim, fit, n, first, as_printed=as_printed) for first in (seed, seed + 10))
    y, other_y = target(n, dim, seed + 20), target(n, dim, seed + 21)
    across, within, within_y = (float(hs.w2(*pair)) ** 2 for pair in ((x, y), (x, other_x), (y, other_y)))
    return across - (within + within_y) / 2


def in_standard_errors(values: list[float]) -> float:
    return float(np.mean(values) / (np.std(values, ddof=1) / math.sqrt(len(values))))


@pytest.mark.parametrize("dim", [2, 3, 8])
def test_integrated_bridges_land_on_their_targets(dim: int) -> None:
    """20 independent systems; the printed sign is seen in two."""
    values = [landing_statistic(dim, 192, 24, 1000 * k) for k in range(20)]
    assert abs(in_standard_errors(values)) < 4
    printed = [landing_statistic(dim, 192, 24, 1000 * k, as_printed=True) for k in range(2)]
    assert min(printed) > 5 * np.abs(values).max()


@pytest.mark.slow
@pytest.mark.parametrize("dim", [2, 3, 8])
def test_integrated_bridges_land_on_their_targets_in_full(dim: int) -> None:
    values = [landing_statistic(dim, 1024, 64, 1000 * k) for k in range(20)]
    assert abs(in_standard_errors(values)) < 4


# The horizon ----------------------------------------------------------------------------------------------------------


def bridges() -> dict[str, Any]:
    x, y = source(20, 3, 1), target(20, 3, 2)
    return {
        "clouds": bridge_clouds(x, y, nu=NU),
        "particles": bridge_particles(x, y, noise=IsotropicNoise(NU), particles=50, steps=1),
    }


@pytest.mark.parametrize("name", ["clouds", "particles"])
def test_steppers_that_evaluate_the_field_at_the_horizon_are_refused_before_any_work(name: str) -> None:
    bridge, x0 = bridges()[name], source(5, 3, 3)
    remedy = "the horizon of the bridge, where its control is infinite, .* take EulerMaruyama, .* or times before"
    for options in (
        {"stepper": StochasticHeun(0.1), "noise": bridge.noise},
        {"stepper": hs.RK4(0.1)},
        {"stepper": hs.DormandPrince()},
        {},
    ):
        with pytest.raises(HelmscopeError, match=f"times holds 1, {remedy}"):
            hs.integrate(bridge.field(), x0, [0.5, 1.0], **options)
        with pytest.raises(
            HelmscopeError, match=r"times holds 1\.5, but it must not exceed the horizon 1 of the bridge"
        ):
            hs.integrate(bridge.field(), x0, [1.5], **options)
        assert hs.integrate(bridge.field(), x0, [0.5, 0.9], **options).outcome.ok
    with pytest.raises(HelmscopeError, match=r"times holds 1\.5"):
        hs.integrate(bridge.field(), x0, [1.5], noise=bridge.noise)
    assert hs.integrate(bridge.field(), x0, [1.0], noise=bridge.noise).outcome.ok


@pytest.mark.parametrize("horizon", [1.0, 0.7])
def test_a_gaussian_bridge_is_integrated_up_to_its_horizon_by_every_stepper(horizon: float) -> None:
    bridge = GaussianBridge(torch.zeros(1), ONE, torch.ones(1), ONE / 4, nu=NU, horizon=horizon)
    x0 = bridge.marginal(0.0, n=4000, seed=1)
    for stepper in (StochasticHeun(0.03), hs.EulerMaruyama(0.03)):
        end = hs.integrate(bridge.field(), x0, [horizon], noise=bridge.noise, stepper=stepper, seed=2).states[-1]
        assert float(end.mean()) == pytest.approx(1, abs=0.05)
        assert float(end.std()) == pytest.approx(0.5, abs=0.03)
    for deterministic in (hs.RK4(0.03), hs.DormandPrince()):
        assert hs.integrate(bridge.field(), x0[:3], [horizon], stepper=deterministic).outcome.ok
    with pytest.raises(HelmscopeError, match=r"must not exceed the horizon"):
        hs.integrate(bridge.field(), x0, [horizon + 0.1], noise=bridge.noise)
