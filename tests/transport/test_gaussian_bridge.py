"""The bridge between Gaussians: known digits, the backward equation, moment equations and simulation."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad, solve_ivp

from helmscope.solve.euler_maruyama import EulerMaruyama
from helmscope.transport.gaussian_bridge import GaussianBridge
from helmscope.types import HelmscopeError
from support.planting import Plant, outcome

ONE = torch.ones(1, 1, dtype=torch.float64)
ZERO = torch.zeros(1, dtype=torch.float64)


def narrow(**options: object) -> GaussianBridge:
    """N(0, 1) to N(0, 1/4)."""
    return GaussianBridge(ZERO, ONE, ZERO, ONE / 4, nu=0.3, **options)  # type: ignore[arg-type]


def turning() -> GaussianBridge:
    """Two dimensions, anisotropic noise and a reference with rotation."""
    return GaussianBridge(
        torch.tensor([1.0, -0.5]),
        torch.tensor([[1.0, 0.3], [0.3, 0.5]]),
        torch.tensor([-1.0, 2.0]),
        torch.tensor([[0.4, -0.1], [-0.1, 0.8]]),
        diffusion=torch.tensor([[0.5, 0.2], [0.2, 0.3]]),
        drift=torch.tensor([[-0.4, 1.5], [-1.0, 0.2]]),
        horizon=0.8,
    )


def test_known_digits() -> None:
    bridge = narrow()
    assert float(bridge.cross_cov) == pytest.approx(0.28309518948453, abs=1e-14)
    assert float(bridge.end_precision) == pytest.approx(4.220634596563533, abs=1e-13)
    x = torch.tensor([[1.3]], dtype=torch.float64)
    assert float(bridge.log_potential(x, 1.0)) == pytest.approx(-4.220634596563533 * 1.3**2 / 2, abs=1e-12)


def terminal_deviation(bridge: GaussianBridge, sign: float) -> float:
    """The standard deviation at the horizon, by the equation v' = 2 k v + 2 nu of the variance under the drift k x."""

    def rate(t: float, v: np.ndarray) -> np.ndarray:
        slope = float(bridge.control(ONE, t))
        return 2 * sign * slope * v + 2 * 0.3

    return math.sqrt(solve_ivp(rate, (0, 1), [1.0], rtol=1e-8, atol=1e-10).y[0, -1])


def test_the_sign_decides_the_terminal_deviation() -> None:
    assert terminal_deviation(narrow(), +1) == pytest.approx(0.5, abs=1e-6)
    assert terminal_deviation(narrow(), -1) == pytest.approx(3.985, abs=5e-4)  # as printed
    assert terminal_deviation(narrow(), 0.5) > 0.6  # nu in place of 2 nu would be seen


@pytest.mark.parametrize(("as_printed", "deviation"), [(False, 0.5), (True, 3.985)])
def test_simulation_has_that_deviation(as_printed: bool, deviation: float) -> None:
    bridge, n = narrow(), 8000
    run = bridge.simulate(
        bridge.marginal(0.0, n=n, seed=1), [1.0], seed=2, as_printed=as_printed, stepper=EulerMaruyama(0.005)
    )
    spread = float(run.states[-1].std())
    assert spread == pytest.approx(deviation, rel=4 / math.sqrt(2 * n) + 0.01)


def test_control_is_the_gradient_of_a_solution_of_the_backward_equation() -> None:
    bridge = turning()
    x = torch.tensor([[0.3, -0.7]], dtype=torch.float64)
    sigma, drift = bridge.diffusion, bridge.drift
    assert isinstance(sigma, torch.Tensor)
    assert isinstance(drift, torch.Tensor)
    for t in (0.0, 0.5, 0.8):
        gradient = torch.func.grad(lambda z, t=t: bridge.log_potential(z, t).sum())(x)
        torch.testing.assert_close(bridge.control(x, t), 2 * gradient @ sigma, rtol=1e-12, atol=1e-12)
    t, step = 0.5, 1e-4
    gradient = torch.func.grad(lambda z: bridge.log_potential(z, t).sum())(x)[0]
    hessian = torch.func.hessian(lambda z: bridge.log_potential(z, t).sum())(x)[0, :, 0]
    change = float(bridge.log_potential(x, t + step) - bridge.log_potential(x, t - step)) / (2 * step)
    # (d_t + L) phi = 0, divided by phi
    generator = (drift @ x[0]) @ gradient + (sigma * (hessian + torch.outer(gradient, gradient))).sum()
    assert change + float(generator) == pytest.approx(0, abs=1e-6)


def test_moments_follow_the_drift_and_reach_the_target() -> None:
    bridge = turning()
    sigma = bridge.diffusion
    origin, axes = torch.zeros(1, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)

    def rate(t: float, state: np.ndarray) -> np.ndarray:
        mean, cov = torch.tensor(state[:2]), torch.tensor(state[2:]).reshape(2, 2)
        shift = bridge.field().velocity(origin, t=t)[0]
        matrix = (bridge.field().velocity(axes, t=t) - shift).mT
        growth = matrix @ cov + cov @ matrix.mT + 2 * sigma
        return np.concatenate([(matrix @ mean + shift).numpy(), growth.flatten().numpy()])

    start = np.concatenate([bridge.start_mean.numpy(), bridge.start_covariance.flatten().numpy()])
    path = solve_ivp(rate, (0, 0.8), start, t_eval=[0.3, 0.8], rtol=1e-8, atol=1e-10).y
    for k, t in enumerate((0.3, 0.8)):
        mean, cov = bridge.moments(t)
        np.testing.assert_allclose(path[:2, k], mean, atol=1e-6)
        np.testing.assert_allclose(path[2:, k].reshape(2, 2), cov, atol=1e-6)
    np.testing.assert_allclose(bridge.moments(0.8)[1], bridge.end_covariance, atol=1e-12)


FAULTS = {
    "sign": Plant(lambda right, *a: -right(*a), (GaussianBridge, ["control"])),
    "nu for 2 nu": Plant(lambda right, *a: right(*a) / 2, (GaussianBridge, ["control"])),
    "axis": Plant(lambda right, *a: right(*a).flip(-1), (GaussianBridge, ["control"])),
    "time from the start": Plant(lambda right, bridge, x, t: right(bridge, x, 0.8 - t), (GaussianBridge, ["control"])),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name: str) -> None:
    bridge = turning()
    x = torch.tensor([[0.3, -0.7], [1.2, 0.4]], dtype=torch.float64)

    def check() -> bool:
        gradient = torch.func.grad(lambda z: bridge.log_potential(z, 0.3).sum())(x)
        return torch.allclose(bridge.control(x, 0.3), 2 * gradient @ bridge.diffusion)

    assert check()
    assert outcome(FAULTS[name], check) == "seen"


@pytest.mark.parametrize("bridge", [narrow(), turning()])
def test_cost_is_the_expected_square_of_the_control(bridge: GaussianBridge) -> None:
    dim = len(bridge.start_mean)
    sigma = bridge._sigma
    origin, axes = torch.zeros(1, dim, dtype=torch.float64), torch.eye(dim, dtype=torch.float64)

    def density(t: float) -> float:
        shift = bridge.control(origin, t)[0]
        matrix = (bridge.control(axes, t) - shift).mT
        mean, cov = bridge.moments(t)
        u = matrix @ mean + shift
        second = torch.outer(u, u) + matrix @ cov @ matrix.mT
        return float(torch.linalg.solve(sigma, second).trace()) / 4

    assert bridge.cost().estimate == pytest.approx(quad(density, 0, bridge.horizon, epsabs=1e-11)[0], abs=1e-9)


def test_cross_covariance_agrees_with_scaling_on_a_grid() -> None:
    grid = torch.linspace(-8, 8, 401, dtype=torch.float64)
    kernel = torch.exp(-((grid[:, None] - grid) ** 2) / (4 * 0.3))
    a, b = (torch.exp(-(grid**2) / (2 * v)) for v in (1.0, 0.25))
    a, b = a / a.sum(), b / b.sum()
    v = torch.ones_like(b)
    for _ in range(200):
        u = a / (kernel @ v)
        v = b / (u @ kernel)
    plan = u[:, None] * kernel * v
    assert float(grid @ plan @ grid) == pytest.approx(float(narrow().cross_cov), abs=1e-9)


def test_field_and_marginal_shapes() -> None:
    bridge = turning()
    x = bridge.marginal(0.4, n=6, seed=1).reshape(2, 3, 2)
    times = torch.tensor([0.1, 0.7], dtype=torch.float64).reshape(2, 1, 1)
    both = bridge.control(x, times)
    assert torch.equal(both[1], bridge.control(x[1], 0.7))
    assert torch.equal(bridge.control_as_printed(x, times), -both)
    assert bridge.control(x.float(), 0.1).dtype == torch.float32
    mean, cov = bridge.moments(0.4)
    sample = bridge.marginal(0.4, n=20_000, seed=3)
    assert (sample.mean(0) - mean).abs().max() < 0.03
    assert (sample.mT.cov() - cov).abs().max() < 0.03


def test_bad_input_is_named() -> None:
    with pytest.raises(HelmscopeError, match="horizon is 0, but it must be a finite number > 0"):
        narrow(horizon=0)
    with pytest.raises(HelmscopeError, match="nu is -1, but it must be a finite number > 0"):
        GaussianBridge(ZERO, ONE, ZERO, ONE, nu=-1)
    with pytest.raises(HelmscopeError, match="neither of nu and diffusion is given, but one must be"):
        GaussianBridge(ZERO, ONE, ZERO, ONE)
    with pytest.raises(HelmscopeError, match="both of nu and diffusion is given, but one must be"):
        GaussianBridge(ZERO, ONE, ZERO, ONE, nu=1.0, diffusion=ONE)
    with pytest.raises(HelmscopeError, match=r"diffusion is 0\.3, but it must be a matrix \(1, 1\)"):
        GaussianBridge(ZERO, ONE, ZERO, ONE, diffusion=0.3)  # type: ignore[arg-type]
    with pytest.raises(
        HelmscopeError, match=r"end_covariance has the eigenvalue -1, but it must be .* positive definite"
    ):
        GaussianBridge(ZERO, ONE, ZERO, -ONE, nu=1)
    with pytest.raises(HelmscopeError, match=r"end_mean is \(2,\), but it must be a vector of length 1"):
        GaussianBridge(ZERO, ONE, torch.zeros(2), ONE, nu=1)
    with pytest.raises(HelmscopeError, match=r"drift is \(2, 2\), but it must be a matrix \(1, 1\)"):
        narrow(drift=torch.eye(2))
    with pytest.raises(HelmscopeError, match=r"t is 1\.5, but it must be in \[0, 1\]"):
        narrow().control(ONE, 1.5)
    with pytest.raises(HelmscopeError, match=r"t is -0\.1, but it must be in \[0, 1\]"):
        narrow().moments(-0.1)
