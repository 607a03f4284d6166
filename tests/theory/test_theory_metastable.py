"""The lifetime of two clusters against tables, quadrature, a simulation of six tokens and its asymptotic form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mpmath as mp
import numpy as np
import pytest

from helmscope.theory.equiangular import equiangular
from helmscope.theory.metastable import metastable_time, metastable_time_asymptotic
from helmscope.types import HelmscopeError


@dataclass(frozen=True)
class Flow:
    beta: float
    normalized: bool = True
    isotropic: bool = True


@pytest.mark.parametrize(
    ("beta", "time"), [(1, 4.27106768030934), (4, 10.831207009995), (9, 466.710652910029), (16, 279981.160099382)]
)
def test_metastable_time_table(beta, time):
    assert metastable_time(Flow(beta), gamma0=0.0) == pytest.approx(time, rel=5e-15)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("beta", [0.0, 1e-8, 1.0, 4.0, 16.0])
@pytest.mark.parametrize(("gamma0", "gamma1"), [(-0.9, 0.999), (0.0, 0.5), (0.3, 0.9999)])
def test_metastable_time_is_the_integral_of_one_over_the_rate(normalized, beta, gamma0, gamma1):
    def reciprocal_rate(g):
        if normalized:
            return (mp.exp(beta) + mp.exp(beta * g)) / (2 * mp.exp(beta * g) * (1 - g**2))
        return 1 / (mp.exp(beta * g) * (1 - g**2))

    with mp.workdps(25):
        angles = mp.linspace(mp.atanh(mp.mpf(gamma0)), mp.atanh(mp.mpf(gamma1)), 7)
        expected = mp.quad(lambda a: reciprocal_rate(mp.tanh(a)) / mp.cosh(a) ** 2, angles)
    time = metastable_time(Flow(beta, normalized), gamma0=gamma0, gamma1=gamma1)
    assert time == pytest.approx(float(expected), rel=5e-15)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("beta", "gamma0", "gamma1"), [(0.0, -0.5, 0.9), (1.0, 0.0, 0.999), (3.0, 0.2, 0.8)])
def test_two_simulated_clusters_of_three_tokens_reach_gamma1_at_the_metastable_time(normalized, beta, gamma0, gamma1):
    half = math.acos(gamma0) / 2
    left, right = np.array([math.cos(half), math.sin(half), 0.0]), np.array([math.cos(half), -math.sin(half), 0.0])
    x = np.stack([left, left, left, right, right, right])

    def velocity(x):
        kernel = np.exp(beta * (x @ x.T))
        pull = kernel @ x / (kernel.sum(1, keepdims=True) if normalized else len(x))
        return pull - (pull * x).sum(1, keepdims=True) * x

    steps = 2000
    h = metastable_time(Flow(beta, normalized), gamma0=gamma0, gamma1=gamma1) / steps
    for _ in range(steps):
        k1 = velocity(x)
        k2 = velocity(x + h / 2 * k1)
        k3 = velocity(x + h / 2 * k2)
        k4 = velocity(x + h * k3)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    assert x[0] @ x[-1] == pytest.approx(gamma1, abs=2e-12)


def test_metastable_time_inverts_the_equiangular_flow():
    time = metastable_time(Flow(6.0), gamma0=-0.2, gamma1=0.7)
    assert equiangular(Flow(6.0), n=2, times=[time], gamma0=-0.2).item() == pytest.approx(0.7, abs=1e-13)
    assert metastable_time(Flow(6.0), gamma0=0.5, gamma1=0.5) == 0


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("gamma0", [-0.3, 0.0, 0.5])
def test_asymptotic_ratio_tends_to_one(normalized, gamma0):
    betas = [50.0, 100.0, 200.0, 400.0]
    flows = [Flow(beta, normalized) for beta in betas]
    errors = [
        metastable_time(flow, gamma0=gamma0) / metastable_time_asymptotic(flow, gamma0=gamma0) - 1 for flow in flows
    ]
    # the next term of Laplace's method: 2 gamma0 / (beta (1 - gamma0^2)), and at gamma0 = 0 one of order 2/beta^2
    second = 2 * gamma0 / (1 - gamma0**2)
    for beta, error in zip(betas, errors, strict=True):
        assert abs(beta * error - second) < 25 / beta
    assert abs(errors[-1]) < abs(errors[0]) / 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metastable_time(object(), gamma0=0.0), "field is an object"),
        (lambda: metastable_time(Flow(1.0, isotropic=False), gamma0=0.0), "field is a Flow"),
        (lambda: metastable_time(Flow(1.0), gamma0=-1.0), "gamma0 is -1"),
        (lambda: metastable_time(Flow(1.0), gamma0=0.5, gamma1=0.4), "gamma1 is 0.4"),
        (lambda: metastable_time(Flow(1.0), gamma0=0.5, gamma1=1.0), "gamma1 is 1"),
        (lambda: metastable_time(Flow(1.0), gamma0=math.nan), "gamma0 is nan"),
        (lambda: metastable_time(Flow(800.0), gamma0=0.0), "beta is 800"),
        (lambda: metastable_time_asymptotic(Flow(0.0), gamma0=0.0), "beta is 0.0"),
        (lambda: metastable_time_asymptotic(Flow(1.0), gamma0=1.0), "gamma0 is 1"),
        (lambda: metastable_time_asymptotic(Flow(800.0), gamma0=0.0), "beta is 800"),
    ],
)
def test_bad_input_raises_one_sentence(call, message):
    with pytest.raises(HelmscopeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
