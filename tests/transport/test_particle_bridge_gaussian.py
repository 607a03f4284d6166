"""Bridges over an Ornstein-Uhlenbeck process between Gaussians against closed forms: of the laws, and of the points."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

from helmscope.fields.field import StateSpace
from helmscope.fields.noise import MatrixNoise
from helmscope.transport.diffusion import FlatDiffusion
from helmscope.transport.gaussian_bridge import GaussianBridge
from helmscope.transport.particle_bridge import ParticleBridge, bridge_particles
from helmscope.transport.splitting import Drift
from support.planting import Plant, outcome
from support.transport_oracles import normal_cloud, relative_gap

DECAY = torch.tensor([[1.0, 0.5], [-0.3, 0.8]], dtype=torch.float64)  # A of dX = -A X dt + sqrt(2 Sigma) dW
SIGMA = torch.tensor([[0.5, 0.2], [0.2, 0.25]], dtype=torch.float64)
ROOT = torch.tensor([[0.8, 0.3], [0.3, 0.5]], dtype=torch.float64)  # the target is N(1, ROOT^2)


def decay(x: torch.Tensor) -> torch.Tensor:
    return -x @ DECAY.mT


class ClosedForm:
    """The bridge from N(0, I) to N(1, ROOT^2) over dX = -A X dt + sqrt(2 Sigma) dW, T = 1, by Sinkhorn on quadratic
    potentials: phi_T = exp(-y'By/2 + l'y) and phihat_0 = exp(-x'Fx/2 + m'x), with integrals of Gaussians.
    """

    def __init__(self) -> None:
        self.a, self.sigma = DECAY.numpy(), SIGMA.numpy()
        end = np.linalg.inv((ROOT @ ROOT).numpy())
        self.b, self.shift = np.zeros((2, 2)), np.zeros(2)
        for _ in range(100):
            p, q = self._backward(self.b, self.shift, 1.0)  # phi_0 = exp(-x'Px/2 + q'x)
            self.f, self.m = np.eye(2) - p, -q
            p, q = self._forward(self.f, self.m, 1.0)
            self.b, self.shift = end - p, end @ np.ones(2) - q

    @functools.cache  # noqa: B019
    def _transition(self, s: float) -> tuple[Any, Any]:
        nodes, weights = np.polynomial.legendre.leggauss(30)
        q = sum(
            w * s * (e := scipy.linalg.expm(-self.a * s * (1 + node) / 2)) @ self.sigma @ e.T
            for node, w in zip(nodes, weights, strict=True)
        )
        return scipy.linalg.expm(-self.a * s), q

    def _backward(self, b: Any, shift: Any, s: float) -> tuple[Any, Any]:
        """int N(y; Ex, Q) exp(-y'By/2 + l'y) dy, as a function of x."""
        e, q = self._transition(s)
        inner = np.linalg.inv(np.eye(2) + b @ q)
        return e.T @ inner @ b @ e, e.T @ inner @ shift

    def _forward(self, f: Any, m: Any, s: float) -> tuple[Any, Any]:
        """int N(y; Ex, Q) exp(-x'Fx/2 + m'x) dx, as a function of y; F may be indefinite."""
        e, q = self._transition(s)
        precision = np.linalg.inv(q)
        total = np.linalg.inv(f + e.T @ precision @ e)
        return precision - precision @ e @ total @ e.T @ precision, precision @ e @ total @ m

    def control(self, x: torch.Tensor, t: float) -> torch.Tensor:
        p, q = self._backward(self.b, self.shift, 1 - t)
        return torch.from_numpy(2 * (q - x.numpy() @ p.T) @ self.sigma)

    def moments(self, t: float) -> tuple[torch.Tensor, torch.Tensor]:
        if t == 0:
            return torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
        p, q = self._backward(self.b, self.shift, 1 - t)
        p_hat, q_hat = self._forward(self.f, self.m, t)
        cov = np.linalg.inv(p + p_hat)
        return torch.from_numpy(cov @ (q + q_hat)), torch.from_numpy(cov)

    def sample(self, t: float, n: int) -> torch.Tensor:
        mean, cov = self.moments(t)
        return mean + normal_cloud(n, 7) @ torch.linalg.cholesky(cov).mT


@pytest.fixture(scope="module")
def exact() -> ClosedForm:
    return ClosedForm()


@pytest.fixture(scope="module")
def relaxing() -> ParticleBridge:
    x, y = normal_cloud(2048, 1), normal_cloud(2048, 2) @ ROOT + 1
    return bridge_particles(
        x, y, noise=MatrixNoise(SIGMA), reference=decay, space=StateSpace.FLAT, particles=300, steps=4, rounds=1
    )


def control_error(bridge: Any, exact: Any, t: float) -> float:
    """The relative error of the control in L2 of the marginal at t, by 1,000 points."""
    points = ClosedForm().sample(t, 1000)
    return relative_gap(bridge.control(points, t), exact.control(points, t))


def control_is_right(bridge: ParticleBridge, exact: ClosedForm) -> bool:
    return all(control_error(bridge, exact, t) < 0.02 for t in (0.0, 0.25, 0.5, 0.75))


def test_control_over_an_ornstein_uhlenbeck_process_is_that_of_the_closed_form(
    relaxing: ParticleBridge, exact: ClosedForm
) -> None:
    assert relaxing.ok, relaxing.outcome
    assert control_is_right(relaxing, exact)


class BetweenPoints:
    """The bridge between two clouds over the same process, by Sinkhorn with its exact transition density."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, law: ClosedForm) -> None:
        self.y, self.law = y, law
        log_kernel, self.g = self._log_kernel(x, 1.0), torch.zeros(len(y), dtype=torch.float64)
        for _ in range(100):
            f = -math.log(len(x)) - torch.logsumexp(log_kernel + self.g, 1)
            self.g = -math.log(len(y)) - torch.logsumexp(log_kernel + f[:, None], 0)

    def _transition(self, s: float) -> tuple[torch.Tensor, torch.Tensor]:
        e, q = self.law._transition(s)
        return torch.from_numpy(e), torch.from_numpy(np.linalg.inv(q))

    def _log_kernel(self, x: torch.Tensor, s: float) -> torch.Tensor:
        e, precision = self._transition(s)
        gap = self.y - (x @ e.mT)[:, None]
        return -((gap @ precision) * gap).sum(-1) / 2

    def control(self, x: torch.Tensor, t: float) -> torch.Tensor:
        e, precision = self._transition(1 - t)
        ends = torch.softmax(self._log_kernel(x, 1 - t) + self.g, 1) @ self.y
        return 2 * (ends - x @ e.mT) @ precision @ e @ SIGMA


def test_error_of_the_control_is_that_of_the_steps_which_is_estimated_and_that_of_the_clouds(exact: ClosedForm) -> None:
    """Against the exact bridge between the same points, without the sampling error of the clouds."""
    x, y = normal_cloud(500, 1), normal_cloud(500, 2) @ ROOT + 1
    points = BetweenPoints(x, y, exact)
    for steps in (2, 4, 8):
        bridge = bridge_particles(
            x, y, noise=MatrixNoise(SIGMA), reference=decay, space=StateSpace.FLAT, steps=steps, particles=300, rounds=1
        )
        found = control_error(bridge, points, 0.5)
        assert found < (0.05, 0.017, 0.006)[int(math.log2(steps)) - 1], steps
        assert found / 2 < bridge.splitting_error < 2 * found
    assert 0.01 < control_error(points, exact, 0.5) < 0.03  # that of the clouds


def test_closed_form_of_the_test_is_that_of_the_gaussian_bridge(exact: ClosedForm) -> None:
    eye, one = torch.eye(2), torch.ones(2)
    library = GaussianBridge(0 * one, eye, one, ROOT @ ROOT, diffusion=SIGMA, drift=-DECAY)
    points = exact.sample(0.3, 10)
    torch.testing.assert_close(library.control(points, 0.3), exact.control(points, 0.3))


def test_marginal_over_an_ornstein_uhlenbeck_process(relaxing: ParticleBridge, exact: ClosedForm) -> None:
    sample = relaxing.marginal(0.5, n=20_000, seed=3)  # with sampling errors of 1 % in both
    mean, cov = exact.moments(0.5)
    assert relative_gap(sample.mean(0), mean) < 0.02
    assert relative_gap(sample.mT.cov(), cov) < 0.02


def test_costs_over_an_ornstein_uhlenbeck_process(relaxing: ParticleBridge, exact: ClosedForm) -> None:
    eye, one = torch.eye(2), torch.ones(2)
    closed = GaussianBridge(0 * one, eye, one, ROOT @ ROOT, diffusion=SIGMA, drift=-DECAY).cost().estimate
    cost = relaxing.cost(target_entropy=1 + math.log(2 * math.pi) + float(torch.logdet(ROOT)))
    assert cost.low < closed < cost.high
    assert cost.estimate == pytest.approx(closed, rel=0.05)
    assert cost.high - cost.low < 1.5
    until = relaxing.cost_until(0.5, n=200)
    times = np.linspace(0, 0.5, 26)
    rates = [
        float(((points := exact.control(exact.sample(t, 200), t)) @ torch.linalg.inv(SIGMA) * points).sum(-1).mean())
        / 4
        for t in times
    ]
    wanted = float(np.trapezoid(rates, times))
    error = (until.high - until.low) / 4
    assert abs(until.estimate - wanted) < 4 * error
    assert abs(until.estimate / 2 - wanted) > 4 * error


FAULTS = {
    "nu for 2 nu": Plant(lambda right, *a: right(*a) / 2, (ParticleBridge, ["control"])),
    "sign": Plant(lambda right, *a: -right(*a), (ParticleBridge, ["control"])),
    "identity for Sigma": Plant(lambda right, process, x, v: 0.375 * v, (FlatDiffusion, ["times_sigma"])),
    "Sigma inverse": Plant(lambda right, process, x, v: v @ torch.linalg.inv(SIGMA), (FlatDiffusion, ["times_sigma"])),
    "axis": Plant(lambda right, *a: right(*a).flip(-1), (ParticleBridge, ["control"])),
    "no derivative of the flow": Plant(
        lambda right, drift, x, start, end, gradient: gradient(drift.flow(x, start, end)), (Drift, ["pull_back"])
    ),
    "no flow": Plant(lambda right, drift, x, start, end, gradient: gradient(x), (Drift, ["pull_back"])),
    "flow backwards": Plant(lambda right, drift, x, start, end: right(drift, x, end, start), (Drift, ["flow"])),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name: str, relaxing: ParticleBridge, exact: ClosedForm) -> None:
    assert outcome(FAULTS[name], lambda: control_is_right(relaxing, exact)) == "seen"
