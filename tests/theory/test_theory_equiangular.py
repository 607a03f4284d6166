"""The equiangular flow against tables, mpmath, quadrature, an ODE solver and sums over tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from helmscope.theory.equiangular import EquiangularFlow, equiangular, equiangular_rate, hitting_time
from helmscope.types import HelmscopeError


@dataclass(frozen=True)
class Flow:
    """A minimal ``EquiangularFlow``."""

    beta: float
    normalized: bool = True
    isotropic: bool = True


def SA(beta: float) -> Flow:
    return Flow(beta)


def USA(beta: float) -> Flow:
    return Flow(beta, normalized=False)


def printed_rate(flow: Flow, gamma: mp.mpf, n: int) -> mp.mpf:
    """gamma' as [Geshkovski et al. 2023] prints it."""
    kernel = mp.exp(flow.beta * gamma)
    rise = 2 * kernel * (1 - gamma) * ((n - 1) * gamma + 1)
    return rise / (mp.exp(flow.beta) + (n - 1) * kernel) if flow.normalized else rise / n


def exact_time(flow: Flow, n: int, gamma0: float, remaining: mp.mpf) -> mp.mpf:
    """Time until 1 - gamma = remaining: the closed form, with enough digits to survive its cancellations."""
    with mp.workdps(80 + int(flow.beta)):
        b, length = mp.mpf(flow.beta), mp.mpf(n) / (n - 1)
        u0, u1 = 1 - mp.mpf(gamma0), mp.mpf(remaining)
        logs = mp.log(u0 / u1) + mp.log((length - u1) / (length - u0))
        integrals = logs
        if b > 0:
            integrals = mp.ei(b * u0) - mp.ei(b * u1)
            integrals += mp.exp(b * length) * (mp.e1(b * (length - u0)) - mp.e1(b * (length - u1)))
        return ((n - 1) * logs + integrals) / (2 * n) if flow.normalized else mp.exp(-b) * integrals / 2


HITTING_TIMES = {  # n = 32, delta = 1e-3: beta -> SA, USA
    0: (5.18626098112015614, 5.18626098112015614),
    1: (5.2702839075862406, 2.89704862298957426),
    4: (6.95350184880806874, 1.1307703412964512),
    9: (178.730929519039129, 0.68598766887729669),
}


@pytest.mark.parametrize("beta", HITTING_TIMES)
def test_hitting_time_table(beta):
    sa, usa = HITTING_TIMES[beta]
    assert hitting_time(SA(beta), n=32, delta=1e-3) == pytest.approx(sa, rel=1e-15)
    assert hitting_time(USA(beta), n=32, delta=1e-3) == pytest.approx(usa, rel=1e-15)


GAMMAS = {  # SA, n = 32, t = 1, 3, 5
    0: (0.16642910110803, 0.92634005738265, 0.99854924403838),
    1: (0.15184933554388, 0.91420701165418, 0.99828424862229),
    2: (0.12209825966576, 0.8801831087793, 0.99750262442),
    4: (0.035441398374468, 0.33298670234181, 0.95277484974288),
    9: (0.00024706197464466, 0.00074837828174087, 0.0012594985645506),
}


@pytest.mark.parametrize("beta", GAMMAS)
def test_gamma_table(beta):
    gamma = equiangular(SA(beta), n=32, times=[1, 3, 5])
    assert gamma.dtype == torch.float64
    assert gamma.tolist() == pytest.approx(GAMMAS[beta], rel=1e-13)  # as many digits as the table prints


@pytest.mark.parametrize("flow", [SA(0.0), USA(0.0)])
@pytest.mark.parametrize("n", [2, 32, 10**6])
def test_beta_zero_is_elementary(flow, n):
    times = torch.tensor([1e-9, 1e-3, 0.1, 1.0, 5.0, 17.0])
    t = times.double()
    gamma = equiangular(flow, n=n, times=times)
    expected = torch.expm1(2 * t) / (torch.exp(2 * t) + n - 1)
    torch.testing.assert_close(gamma, expected, rtol=5e-15, atol=0)
    if n == 2:
        torch.testing.assert_close(gamma, torch.tanh(t), rtol=5e-15, atol=0)
    for delta in (1.0, 0.3, 1e-3, 1e-300, 5e-324):
        expected = 0.5 * (mp.log(n - (n - 1) * mp.mpf(delta)) - mp.log(mp.mpf(delta)))
        assert hitting_time(flow, n=n, delta=delta) == pytest.approx(float(expected), rel=1e-14, abs=1e-15)


@pytest.mark.parametrize("make", [SA, USA])
@pytest.mark.parametrize("beta", [0.0, 1e-8, 0.5, 3.0, 12.0])
@pytest.mark.parametrize("n", [2, 5, 1000])
def test_hitting_time_is_the_integral_of_one_over_the_rate(make, beta, n):
    flow, gamma0 = make(beta), -0.3 / (n - 1)
    with mp.workdps(25):
        start = mp.mpf(gamma0)

        def integrand(y):
            """dt/dy with gamma = gamma0 + (1 - gamma0)/(1 + e^-y), which is smooth and bounded."""
            s = 1 / (1 + mp.exp(-y))
            return (1 - start) * s * (1 - s) / printed_rate(flow, start + (1 - start) * s, n)

        for delta in (0.9, 0.05, 1e-6):
            stop = mp.log((1 - start - mp.mpf(delta)) / mp.mpf(delta))
            quadrature = mp.quad(integrand, [-60, *mp.linspace(-20, stop, 8)])
            assert hitting_time(flow, n=n, delta=delta, gamma0=gamma0) == pytest.approx(float(quadrature), rel=2e-14)


@pytest.mark.parametrize("make", [SA, USA])
@pytest.mark.parametrize(
    ("n", "beta"),
    [*itertools.product([2, 32, 10**6], [0.0, 1e-8, 0.3, 1.0, 9.0, 39.0, 41.0, 100.0]), (3, 1e-300), (3, 480.0)],
)
def test_hitting_time_has_relative_error_2e_14_and_is_inverted_by_equiangular(make, n, beta):
    flow = make(beta)
    for gamma0 in (0.0, -0.4 / (n - 1), 0.5):
        for share in (1e-12, 1e-3, 0.3, 0.8, 1 - 1e-9):
            delta = (1 - gamma0) * share
            t = hitting_time(flow, n=n, delta=delta, gamma0=gamma0)
            assert t == pytest.approx(float(exact_time(flow, n, gamma0, delta)), rel=2e-14, abs=0)
            # the inverse is the rounded gamma of a time within t (1 +- 1e-15 max(5, beta))
            with mp.workdps(40):
                remaining = 1 - mp.mpf(equiangular(flow, n=n, times=[t], gamma0=gamma0).item())
                if remaining + 2.3e-16 < 1 - mp.mpf(gamma0):
                    assert exact_time(flow, n, gamma0, remaining + 2.3e-16) < t * (1 + 1e-15 * max(5, beta))
                if remaining > 2.3e-16:
                    assert exact_time(flow, n, gamma0, remaining - 2.3e-16) > t * (1 - 1e-15 * max(5, beta))


@pytest.mark.parametrize("make", [SA, USA])
@pytest.mark.parametrize(("n", "beta", "gamma0"), [(32, 0.0, 0.0), (32, 4.0, 0.0), (3, 2.0, -0.45), (100, 9.0, 0.1)])
def test_equiangular_solves_its_equation(make, n, beta, gamma0):
    flow = make(beta)
    times = np.array([0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0])
    rate = lambda t, g: [float(printed_rate(flow, mp.mpf(float(g[0])), n))]  # noqa: E731
    solved = solve_ivp(rate, (0, 4), [gamma0], t_eval=times, method="DOP853", rtol=3e-14, atol=1e-15)
    gamma = equiangular(flow, n=n, times=times, gamma0=gamma0)
    assert gamma[0].item() == gamma0
    np.testing.assert_allclose(gamma.numpy(), solved.y[0], rtol=0, atol=1e-12)


def test_late_and_early_times():
    gamma = equiangular(SA(2.0), n=10, times=[0.0, 1e-320, 1e-200, 1e6])
    assert gamma[0] == 0
    assert gamma[2].item() == pytest.approx(1e-200 * equiangular_rate(SA(2.0), 0.0, n=10).item(), rel=1e-12)
    assert gamma[-1] == 1
    # at beta = 100 orthonormal tokens hardly move before time e^100: gamma = gamma' t to first order
    slow = equiangular(SA(100.0), n=32, times=[1.0, 100.0])
    first = 2 * math.exp(-100)
    assert slow.tolist() == pytest.approx([first, 100 * first], rel=1e-13)
    # 1 - gamma falls like e^{-2t} (SA) and e^{-2 e^b t} (USA)
    remaining = 1 - equiangular(SA(1.0), n=32, times=[8.0, 9.0])
    assert torch.log(remaining[0] / remaining[1]).item() == pytest.approx(2, abs=1e-5)


def simplex(n: int, gamma: float) -> list[list[float]]:
    """n unit vectors of R^n with equal inner products: rows of the square root of (1 - gamma) I + gamma 11^T."""
    root, rest = math.sqrt(1 - gamma), math.sqrt(1 + (n - 1) * gamma)
    return [[(rest - root) / n + (root if i == j else 0.0) for j in range(n)] for i in range(n)]


@pytest.mark.parametrize("make", [SA, USA])
@pytest.mark.parametrize(("n", "beta", "gamma"), [(2, 1.0, -0.5), (5, 3.0, 0.2), (7, 0.0, 0.9), (4, 20.0, 0.0)])
def test_rate_agrees_with_the_velocities_of_the_tokens(make, n, beta, gamma):
    flow, x = make(beta), simplex(n, gamma)
    dot = lambda a, b: math.fsum(p * q for p, q in zip(a, b, strict=True))  # noqa: E731

    def velocity(i: int) -> list[float]:
        weights = [math.exp(beta * dot(x[i], x[j])) for j in range(n)]
        divisor = sum(weights) if flow.normalized else n
        ambient = [math.fsum(weights[j] * x[j][a] for j in range(n)) / divisor for a in range(n)]
        return [ambient[a] - dot(x[i], ambient) * x[i][a] for a in range(n)]

    expected = dot(velocity(0), x[1]) + dot(x[0], velocity(1))
    assert equiangular_rate(flow, gamma, n=n).item() == pytest.approx(expected, rel=1e-13)


def test_rate_takes_a_tensor_and_vanishes_at_both_ends():
    rate = equiangular_rate(SA(3.0), torch.tensor([[-0.5, 0.0], [0.5, 1.0]], dtype=torch.float64), n=3)
    assert rate.shape == (2, 2)
    assert rate[0, 0] == 0
    assert rate[1, 1] == 0
    assert rate[1, 0].item() == pytest.approx(float(printed_rate(SA(3.0), mp.mpf("0.5"), 3)), rel=1e-15)
    assert equiangular_rate(SA(1e5), 0.0, n=3) == 0


def test_protocol():
    assert isinstance(SA(1.0), EquiangularFlow)
    assert not isinstance(object(), EquiangularFlow)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: equiangular(object(), n=3, times=[1]), "field is an object"),
        (lambda: hitting_time(Flow(1.0, isotropic=False), n=3, delta=0.1), "field is a Flow"),
        (lambda: equiangular_rate(lambda x: x, 0.0, n=3), "field is a function"),
        (lambda: equiangular(SA(-1.0), n=3, times=[1]), "beta is -1.0"),
        (lambda: equiangular(SA(1.0), n=1, times=[1]), "n is 1"),
        (lambda: equiangular(SA(1.0), n=3, times=[]), r"times is \[\]"),
        (lambda: equiangular(SA(1.0), n=3, times=2.0), "times is 2.0"),
        (lambda: equiangular(SA(1.0), n=3, times=[-1.0]), r"times\[0\] is -1.0"),
        (lambda: equiangular(SA(1.0), n=3, times=[1.0, math.nan]), r"times\[1\] is nan"),
        (lambda: equiangular(SA(1.0), n=3, times=torch.ones(1, 2)), r"times\[0\] is \[1.0, 1.0\]"),
        (lambda: equiangular(SA(1.0), n=3, times=[1.0, 1.0]), r"times\[1\] is 1 after 1"),
        (lambda: equiangular(SA(1.0), n=3, times=[2.0, 1.0]), r"times\[1\] is 1 after 2"),
        (lambda: equiangular(SA(1.0), n=3, times=[1.0], gamma0=-0.6), "gamma0 is -0.6"),
        (lambda: equiangular(SA(1.0), n=3, times=[1.0], gamma0=1.0), "gamma0 is 1"),
        (lambda: equiangular(SA(800.0), n=3, times=[1.0]), "beta is 800"),
        (lambda: hitting_time(SA(1.0), n=3, delta=0.0), "delta is 0.0"),
        (lambda: hitting_time(SA(1.0), n=3, delta=0.6, gamma0=0.5), "delta is 0.6"),
        (lambda: equiangular_rate(SA(1.0), -0.6, n=3), "gamma is -0.6"),
        (lambda: equiangular_rate(SA(1.0), math.nan, n=3), "gamma is nan"),
        (lambda: equiangular_rate(SA(1.0), "high", n=3), "gamma is 'high'"),
        (lambda: equiangular_rate(USA(800.0), 0.5, n=3), "beta is 800"),
    ],
)
def test_bad_input_raises_one_sentence(call, message):
    with pytest.raises(HelmscopeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
