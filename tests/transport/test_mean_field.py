"""Interacting fields as references: closed forms, Fourier series, CrossAttention, and plain functions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise
from helmscope.theory.starts import Uniform, VonMisesFisher
from helmscope.transport import MeanFieldReference, bridge_clouds, bridge_particles, mean_field_reference
from helmscope.types import HelmscopeError
from support.transport_oracles import on_circle, random_weights, relative_gap

F64 = torch.float64
NOISE = IsotropicNoise(0.3)


def source(n: int, dim: int, seed: int) -> torch.Tensor:
    return VonMisesFisher(n=n, dim=dim, kappa=4.0, mean=torch.eye(dim)[0]).sample(seed=seed)


def target(n: int, dim: int, seed: int) -> torch.Tensor:
    return VonMisesFisher(n=n, dim=dim, kappa=8.0, mean=torch.eye(dim)[1]).sample(seed=seed)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=F64)


FIELDS = {
    "SA": hs.SA(beta=2.0, value=normal(3, 3)),
    "USA": hs.USA(beta=1.5),
    "MultiHead": hs.MultiHead([hs.SA(beta=1.0), hs.SA(beta=3.0, query_key=normal(3, 3))]),
    "Block": hs.Block(attention=hs.SA(beta=1.0), mlp=hs.MLP(w_in=normal(6, 3), w_out=normal(3, 6) / 5)),
}


@pytest.mark.parametrize("name", FIELDS)
def test_the_drift_of_a_token_of_the_cloud_is_its_velocity_there(name: str) -> None:
    """At the stored times, and halfway between two of them the mean of both."""
    x, weights = source(9, 3, 1), random_weights(9, 2)
    reference = mean_field_reference(FIELDS[name], x, weights, horizon=0.5, steps=4)
    run = hs.integrate(FIELDS[name], x, [0.0, 0.125, 0.25], weights=weights)
    torch.testing.assert_close(reference.path[:3], run.states, rtol=0, atol=1e-9)
    for k, t in enumerate((0.0, 0.125, 0.25)):
        wanted = FIELDS[name](run.states[k], weights=weights)
        torch.testing.assert_close(reference(run.states[k], t=t), wanted, rtol=0, atol=1e-9)
    points = Uniform(n=5, dim=3).sample(seed=3)
    halfway = (reference(points, t=0.125) + reference(points, t=0.25)) / 2
    torch.testing.assert_close(reference(points, t=0.1875), halfway, rtol=0, atol=1e-12)
    times = torch.tensor([0.125, 0.1875], dtype=F64).reshape(2, 1, 1)
    both = reference.velocity(points.expand(2, 5, 3), t=times)
    torch.testing.assert_close(both[1], halfway, rtol=0, atol=1e-12)


def test_attention_to_the_frozen_path_is_cross_attention() -> None:
    x, points = source(20, 3, 1), Uniform(n=6, dim=3).sample(seed=2)
    reference = mean_field_reference(hs.SA(beta=2.0), x, noise=NOISE, particles=60, steps=8, seed=3)
    assert reference.path.shape == (9, 60, 3)
    general = replace(reference, field=hs.MultiHead([hs.SA(beta=2.0)]))  # by tokens without mass
    for k in (0, 4, 8):
        wanted = hs.CrossAttention(beta=2.0, memory=reference.path[k])(points)
        for found in (reference, general):
            torch.testing.assert_close(found(points, t=k / 8), wanted, rtol=0, atol=1e-12)


def test_mean_field_of_the_kuramoto_model_is_its_fourier_series() -> None:
    """SA with beta = 0 on the circle: c_k = E e^{i k theta} has c_k' = k (c_1 c_(k-1) - conj(c_1) c_(k+1)) / 2
    - nu k^2 c_k, integrated by Runge-Kutta for 40 modes from those of the start.
    """
    nu, angles = 0.2, np.array([-0.5, 0.2, 0.4, 1.9])
    k = np.arange(1, 41)
    c = np.exp(1j * np.outer(k, angles)).mean(1)

    def rate(c: np.ndarray) -> np.ndarray:
        padded = np.concatenate([[1.0], c, [0.0]])
        return k * (c[0] * padded[:-2] - c[0].conjugate() * padded[2:]) / 2 - nu * k**2 * c

    h = 1 / 4000
    for _ in range(4000):
        r1 = rate(c)
        r2 = rate(c + h / 2 * r1)
        r3 = rate(c + h / 2 * r2)
        c = c + h / 6 * (r1 + 2 * r2 + 2 * r3 + rate(c + h * r3))
    x = on_circle(torch.from_numpy(angles))
    count = 40_000
    reference = mean_field_reference(hs.SA(beta=0.0), x, noise=IsotropicNoise(nu), particles=count, steps=20, seed=1)
    mean = reference.path[-1].mean(0)
    assert abs(complex(*mean.tolist()) - c[0]) < 4 * math.sqrt(1 / count) + 0.003  # the latter of Euler-Maruyama
    assert abs(complex(*x.mean(0).tolist()) - c[0]) > 0.05


def test_two_tokens_without_noise_are_a_function_of_points_and_time() -> None:
    """SA with beta = 0 from e_1 and e_2: their inner product is tanh t, hence their mean m_t, and b = P_x m_t."""
    x, y = torch.eye(3, dtype=F64)[:2], target(30, 3, 2)
    direction = torch.tensor([1.0, 1.0, 0.0], dtype=F64) / math.sqrt(2)

    def closed(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (torch.sqrt((1 + torch.tanh(torch.as_tensor(t))) / 2) * direction).expand_as(x)

    reference = mean_field_reference(hs.SA(beta=0.0), x)
    points = Uniform(n=10, dim=3).sample(seed=1)
    wanted = hs.fields.field.as_field(closed)
    for t in (0.0, 0.333, 0.99):
        torch.testing.assert_close(reference(points, t=t), wanted(points, t=t), rtol=0, atol=3e-5)
    options: dict[str, Any] = {"noise": NOISE, "particles": 100, "steps": 4, "rounds": 1}
    tagged = bridge_particles(x, y, reference=reference, **options)
    plain = bridge_particles(x, y, reference=closed, **options)
    for t in (0.0, 0.4, 0.9):
        assert relative_gap(tagged.control(points, t), plain.control(points, t)) < 1e-3
    without = bridge_particles(x, y, **options)
    assert relative_gap(tagged.control(points, 0.0), without.control(points, 0.0)) > 0.05  # the drift is seen


def test_a_symmetric_law_has_no_mean_field_and_the_brownian_bridge() -> None:
    """SA with beta = 0 and as many tokens at x as at -x: without noise exactly, with noise up to N^(-1/2)."""
    half, y = source(20, 3, 1), target(40, 3, 2)
    x = torch.cat([half, -half])
    brownian = bridge_clouds(x, y, nu=0.3)
    still = mean_field_reference(hs.SA(beta=0.0), x)
    assert still(y, t=0.5).abs().max() < 1e-9
    noisy = bridge_particles(x, y, noise=NOISE, reference=hs.SA(beta=0.0), particles=200, steps=4, rounds=1)
    assert isinstance(noisy.reference, MeanFieldReference)
    assert noisy.reference.path.shape == (65, 480, 3)
    assert noisy.ok, noisy.outcome
    for t in (0.0, 0.4, 0.8):
        points = brownian.marginal(t, n=100, seed=1)
        assert relative_gap(noisy.control(points, t), brownian.control(points, t)) < 0.03


def test_tagged_tokens_land_on_the_target() -> None:
    x, y = source(100, 3, 1), target(100, 3, 2)
    bridge = bridge_particles(x, y, noise=NOISE, reference=hs.SA(beta=4.0), particles=150, steps=4, rounds=1)
    assert bridge.ok, bridge.outcome
    assert "MeanFieldReference(SA(beta=4.0), 500 tokens" in repr(bridge)
    run = bridge.simulate(source(100, 3, 5), [1.0], seed=1)
    gap = (run.states[-1].mean(0) - y.mean(0)).abs() / (y.std(0) / 10)
    assert gap.max() < 4
    printed = bridge.simulate(source(100, 3, 5), [1.0], seed=1, as_printed=True).states[-1]
    assert ((printed.mean(0) - y.mean(0)).abs() / (y.std(0) / 10)).max() > 20
    again = bridge_particles(x, y, noise=NOISE, reference=hs.SA(beta=4.0), particles=150, steps=4, rounds=1)
    assert torch.equal(again.control(x, 0.3), bridge.control(x, 0.3))


def test_bad_input() -> None:
    x = source(4, 3, 1)
    with pytest.raises(HelmscopeError, match=r"reference is SA, .* without causal mask"):
        mean_field_reference(hs.SA(beta=1.0, causal=True), x)
    with pytest.raises(HelmscopeError, match=r"x has shape \(1, 4, 3\), but a mean field is that of one cloud"):
        mean_field_reference(hs.SA(beta=1.0), x[None])
    with pytest.raises(HelmscopeError, match="x holds a token of norm 2"):
        mean_field_reference(hs.SA(beta=1.0), 2 * x)
    with pytest.raises(HelmscopeError, match="horizon is 0"):
        mean_field_reference(hs.SA(beta=1.0), x, horizon=0)
    short = mean_field_reference(hs.SA(beta=1.0), x, horizon=0.5, steps=2)
    with pytest.raises(HelmscopeError, match=r"times holds 1, but the mean field is known up to its horizon 0\.5"):
        bridge_particles(x, x, noise=NOISE, reference=short)
    with pytest.raises(HelmscopeError, match="x has dimension 2, but the mean field has 3"):
        short(torch.eye(2, dtype=F64))
