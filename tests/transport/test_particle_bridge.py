"""Bridges over the dynamics of a field: a grid on the circle, rotating frames, cloud bridges, landing, bad input."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

from helmscope.fields.attention import SA
from helmscope.fields.cross import CrossAttention
from helmscope.fields.field import StateSpace
from helmscope.fields.mlp import MLP
from helmscope.fields.noise import IsotropicNoise, MatrixNoise, StateNoise
from helmscope.theory.starts import Uniform, VonMisesFisher
from helmscope.transport.cloud_bridge import bridge_clouds
from helmscope.transport.gaussian_bridge import GaussianBridge
from helmscope.transport.particle_bridge import bridge_particles
from helmscope.types import HelmscopeError
from support.transport_oracles import normal_cloud, relative_gap

# Without drift, and in rotating frames --------------------------------------------------------------------------------


def source(n: int, dim: int, seed: int) -> torch.Tensor:
    return VonMisesFisher(n=n, dim=dim, kappa=4.0, mean=torch.eye(dim)[0]).sample(seed=seed)


def target(n: int, dim: int, seed: int) -> torch.Tensor:
    return VonMisesFisher(n=n, dim=dim, kappa=8.0, mean=torch.eye(dim)[1]).sample(seed=seed)


X, Y = source(4, 3, 1), target(5, 3, 2)
NOISE = IsotropicNoise(0.3)


@pytest.mark.parametrize("matrix", [False, True])
def test_noise_alone_on_the_sphere_has_the_bridge_between_clouds(matrix: bool) -> None:
    x, y = source(100, 3, 1), target(100, 3, 2)
    wanted = bridge_clouds(x, y, nu=0.3)
    noise = MatrixNoise(0.3 * torch.eye(3)) if matrix else IsotropicNoise(0.3)
    bridge = bridge_particles(x, y, noise=noise, particles=150, steps=4, rounds=1)
    assert bridge.ok, bridge.outcome
    for t in (0.0, 0.4, 0.9):
        points = wanted.marginal(t, n=100, seed=1)
        # the step of a geodesic random walk is exact to first order in its length
        assert relative_gap(bridge.control(points, t), wanted.control(points, t)) < (0.08 if matrix else 0.01)


def test_noise_alone_in_the_plane_has_the_gaussian_bridge_and_the_bridge_between_clouds() -> None:
    root = torch.tensor([[0.8, 0.3], [0.3, 0.5]], dtype=torch.float64)
    x, y = normal_cloud(300, 1), normal_cloud(300, 2) @ root + 1
    clouds = bridge_clouds(x, y, nu=0.3, space=StateSpace.FLAT)
    closed = GaussianBridge(torch.zeros(2), torch.eye(2), torch.ones(2), root @ root, nu=0.3)
    bridge = bridge_particles(x, y, noise=IsotropicNoise(0.3), space=StateSpace.FLAT, particles=200, steps=3, rounds=1)
    points = closed.marginal(0.4, n=200, seed=2)
    assert relative_gap(bridge.control(points, 0.4), clouds.control(points, 0.4)) < 0.05
    assert relative_gap(bridge.control(points, 0.4), closed.control(points, 0.4)) < 0.08
    single = bridge_particles(x, y, noise=IsotropicNoise(0.3), space=StateSpace.FLAT, steps=1)
    assert relative_gap(single.control(points, 0.4), clouds.control(points, 0.4)) < 1e-6  # no particles


def test_rotation_whose_speed_depends_on_time_is_a_rotating_frame() -> None:
    """b = (1 + 2 t) e_3 x X commutes with the noise: in the frame that rotates with it, the reference is the noise."""

    def spin(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (1 + 2 * t) * torch.stack([-x[..., 1], x[..., 0], 0 * x[..., 2]], -1)

    def turned(x: torch.Tensor, t: float) -> torch.Tensor:
        c, s = math.cos(t + t * t), math.sin(t + t * t)
        return x @ torch.tensor([[c, s, 0], [-s, c, 0], [0, 0, 1]], dtype=torch.float64)

    x, y = source(80, 3, 1), target(80, 3, 2)
    bridge = bridge_particles(x, turned(y, 1.0), noise=IsotropicNoise(0.3), reference=spin, particles=150, steps=4)
    still = bridge_clouds(x, y, nu=0.3)
    for t in (0.0, 0.4, 0.8):
        points = still.marginal(t, n=50, seed=1)
        assert relative_gap(bridge.control(turned(points, t), t), turned(still.control(points, t), t)) < 0.01


def test_rotation_in_eight_dimensions() -> None:
    """As above on S^7: few particles are enough, because densities around the targets represent phi."""
    turn = torch.zeros(8, 8, dtype=torch.float64)
    turn[[0, 1], [1, 0]] = torch.tensor([-1.2, 1.2], dtype=torch.float64)

    def turned(x: torch.Tensor, t: float) -> torch.Tensor:
        return x @ torch.linalg.matrix_exp(t * turn).mT

    x, y = source(150, 8, 1), target(150, 8, 2)
    bridge = bridge_particles(
        x, turned(y, 1.0), noise=NOISE, reference=lambda x: x @ turn.mT, particles=300, steps=3, rounds=1
    )
    assert bridge.ok, bridge.outcome
    still = bridge_clouds(x, y, nu=0.3)
    for t in (0.0, 0.5, 0.9):
        points = still.marginal(t, n=50, seed=1)
        gap = relative_gap(bridge.control(turned(points, t), t), turned(still.control(points, t), t))
        assert gap < 0.05


@pytest.mark.parametrize(
    ("drift", "steps"),
    [(lambda x: x - x**3, 8), (lambda x: -(x**3), 16), (lambda x: -4 * x, 16)],
    ids=["double well", "cubic", "contracting"],
)
def test_flows_that_cannot_be_reversed(drift: Any, steps: int) -> None:
    """Carried back, targets reach infinity in finite time, or are far away. Steps that are too long are reported."""
    x, y = normal_cloud(60, 1) / 2, normal_cloud(60, 2) / 4 + 1
    fit = functools.partial(
        bridge_particles, x, y, noise=NOISE, reference=drift, space=StateSpace.FLAT, particles=200, rounds=1
    )
    bridge = fit(steps=steps)
    assert bridge.ok, bridge.outcome
    ends = bridge.simulate(x, [0.99], seed=1).states[-1]
    assert (ends.mean(0) - y.mean(0)).abs().max() < 4 * 0.25 / math.sqrt(60)
    long = fit(steps=steps // 2)
    assert not long.ok
    assert f"take more than {steps // 2} steps" in long.outcome


def test_a_time_at_which_the_flow_ends_up_to_rounding() -> None:
    bridge = bridge_particles(X, Y, noise=NOISE, reference=pulled, particles=20, steps=3, rounds=1)
    for t in (0.5, math.nextafter(0.5, 0), math.nextafter(0.5, 1)):  # halfway between the second cloud and the third
        torch.testing.assert_close(bridge.control(X, t), bridge.control(X, 0.5))


# A potential on the circle, on a grid ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("diagonal", "steps", "tol"), [((0.4, 0.4), 8, 0.03), ((0.5, 0.3), 16, 0.08), ((0.5, 0.3), 32, 0.04)]
)
def test_potential_drift_on_the_circle_agrees_with_a_discrete_bridge_on_a_fine_grid(
    diagonal: tuple[float, float], steps: int, tol: float
) -> None:
    """U = 1.5 <e_1, x> and noise with the matrix M: phi_t = e^{(T - t) L} phi_T on 360 points, L by differences,
    L f = (U' + beta) f' + m f'', m = <v, M v> for the tangent v, beta = -2 <v, M x> for the noise of a layer.
    """
    n = 360
    angles = 2 * np.pi * np.arange(n) / n
    point, tangent = np.stack([np.cos(angles), np.sin(angles)], -1), np.stack([-np.sin(angles), np.cos(angles)], -1)
    h, m = 2 * np.pi / n, (tangent**2) @ diagonal
    drift = (1.5 * tangent[:, 0] - 2 * (tangent * point) @ diagonal) / (2 * h)
    generator = -2 * np.diag(m) / h**2
    for shift, values in ((1, m / h**2 + drift), (-1, m / h**2 - drift)):
        generator[np.arange(n), (np.arange(n) + shift) % n] += values
    start, end = np.arange(30, 90, 2), np.arange(190, 280, 3)
    kernel = scipy.linalg.expm(generator)[np.ix_(start, end)]
    v = np.ones(len(end))
    for _ in range(500):
        v = 1 / len(end) / ((1 / len(start) / (kernel @ v)) @ kernel)
    phi_end, hat_start = np.zeros(n), np.zeros(n)
    phi_end[end], hat_start[start] = v, 1 / len(start) / (kernel @ v)

    isotropic = diagonal[0] == diagonal[1]
    noise = IsotropicNoise(diagonal[0]) if isotropic else MatrixNoise(torch.diag(torch.tensor(diagonal)))
    # with a matrix the error is of first order: 20, 12, 7 and 3 % at t = 0 for 4, 8, 16 and 32 steps
    pull = torch.tensor([1.5, 0.0], dtype=torch.float64)
    points = torch.from_numpy(point)
    bridge = bridge_particles(
        points[start], points[end], noise=noise, reference=lambda x: pull.expand_as(x), particles=100, steps=steps
    )
    assert bridge.ok, bridge.outcome
    assert tol / 4 < bridge.splitting_error < tol
    for t in (0.0, 0.3, 0.8):
        phi = scipy.linalg.expm((1 - t) * generator) @ phi_end
        density = phi * (hat_start @ scipy.linalg.expm(t * generator))
        wanted = m * (np.roll(np.log(phi), -1) - np.roll(np.log(phi), 1)) / h
        found = (bridge.control(points, t).numpy() * tangent).sum(-1)
        scale = math.sqrt(density @ wanted**2)
        error = math.sqrt(density @ (found - wanted) ** 2) / scale
        assert error < tol, t
        if not isotropic:  # nu for Sigma, or M for P M P
            assert math.sqrt(density @ (0.4 * found / m - wanted) ** 2) / scale > 0.1
        assert math.sqrt(density @ (-found - wanted) ** 2) > 1.9 * scale


# Landing --------------------------------------------------------------------------------------------------------------


def pulled(x: torch.Tensor) -> torch.Tensor:
    """grad of U = 1.5 <e_1, x>, before projection: away from the target."""
    return (1.5 * torch.eye(x.shape[-1], dtype=x.dtype)[0]).expand_as(x)


def test_particles_land_on_the_target_on_the_sphere_but_not_with_the_printed_sign() -> None:
    x, y = source(100, 3, 1), target(100, 3, 2)
    bridge = bridge_particles(x, y, noise=IsotropicNoise(0.3), reference=pulled, particles=150, steps=4, rounds=1)
    start = source(100, 3, 5)
    run = bridge.simulate(start, [0.5, 1.0], seed=1)
    ends = run.states[-1]
    assert run.outcome.ok
    assert ((ends[:, None] == y).all(-1).any(1)).all()  # at points of the target
    gap = (ends.mean(0) - y.mean(0)).abs() / (y.std(0) / math.sqrt(len(ends)))
    assert gap.max() < 4
    again = [bridge.simulate(start[:5], [0.1], seed=seed).states for seed in (1, 1, 2)]
    assert torch.equal(again[0], again[1])
    assert not torch.equal(again[0], again[2])
    printed = bridge.simulate(start, [1.0], seed=1, as_printed=True).states[-1]
    assert ((printed.mean(0) - y.mean(0)).abs() / (y.std(0) / math.sqrt(len(ends)))).max() > 20


def squared_distance(x: torch.Tensor, y: torch.Tensor) -> float:
    cost = torch.arccos((x @ y.mT).clamp(-1, 1)).numpy() ** 2
    rows, columns = scipy.optimize.linear_sum_assignment(cost)
    return float(cost[rows, columns].mean())


def landing_statistic(dim: int, seed: int, *, as_printed: bool) -> float:
    """W2^2(X, Y) - [W2^2(X, X') + W2^2(Y, Y')] / 2 for two independent fits and fresh samples of the target."""
    fit, particles, steps = {2: (128, 100, 4), 3: (128, 150, 4), 8: (256, 400, 3)}[dim]

    def simulated(seed: int) -> torch.Tensor:
        x, y = source(fit, dim, seed), target(fit, dim, seed + 1)
        bridge = bridge_particles(
            x, y, noise=NOISE, reference=pulled, particles=particles, steps=steps, rounds=1, seed=seed
        )
        assert bridge.ok, bridge.outcome
        return bridge.simulate(source(64, dim, seed + 2), [1.0], seed=seed, as_printed=as_printed).states[-1]

    x, other_x = simulated(seed), simulated(seed + 10)
    y, other_y = target(64, dim, seed + 20), target(64, dim, seed + 21)
    return squared_distance(x, y) - (squared_distance(x, other_x) + squared_distance(y, other_y)) / 2


@pytest.mark.slow
@pytest.mark.parametrize("dim", [2, 3, 8])
def test_landing_over_twenty_systems(dim: int) -> None:
    """The statistic is 0 on average; with the printed sign it is not, for any system."""
    values = [landing_statistic(dim, 1000 * k, as_printed=False) for k in range(20)]
    assert abs(np.mean(values)) < 4 * np.std(values, ddof=1) / math.sqrt(20)
    printed = [landing_statistic(dim, 1000 * k, as_printed=True) for k in range(2)]
    assert min(printed) > 10 * np.abs(values).max()


# Fields, coverage, bad input ------------------------------------------------------------------------------------------


def test_fields_of_the_library_are_references() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = source(40, 3, 1), target(40, 3, 2)
    frozen = CrossAttention(beta=2.0, memory=Uniform(n=8, dim=3).sample(seed=3))
    mlp = MLP(w_in=torch.randn(6, 3, generator=generator), w_out=torch.randn(3, 6, generator=generator) / 3)
    for field in (frozen, mlp):
        bridge = bridge_particles(x, y, noise=IsotropicNoise(0.3), reference=field, particles=200, steps=4, rounds=1)
        assert bridge.ok, bridge.outcome
        assert bridge.reference is field
        control = bridge.control(x, 0.2)
        assert (control * x).sum(-1).abs().max() < 1e-9
        drift = bridge.field()(x, t=0.2)
        torch.testing.assert_close(drift, field.velocity(x) + control)
        # the control is the gradient of its own potential
        step = 1e-5 * control / control.norm(dim=-1, keepdim=True)
        rise = bridge.log_potential(_unit(x + step), 0.2) - bridge.log_potential(_unit(x - step), 0.2)
        torch.testing.assert_close(2 * 0.3 * rise / 2e-5, control.norm(dim=-1), rtol=1e-4, atol=0)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def test_poor_coverage_and_iteration_limits_are_reported() -> None:
    x, y = source(60, 8, 1), target(60, 8, 2)
    poor = bridge_particles(x, y, noise=IsotropicNoise(0.1), particles=20, steps=6, rounds=1)
    assert not poor.ok
    assert "poor coverage" in poor.outcome
    assert "raise particles" in poor.outcome
    early = bridge_particles(x, y, noise=IsotropicNoise(0.3), steps=1, max_iterations=1, tol=1e-12)
    assert not early.ok
    assert "raise max_iterations" in early.outcome


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": IsotropicNoise(0.0)}, "noise has the diffusion matrix"),
        ({"noise": MatrixNoise(torch.diag(torch.tensor([1.0, 1.0, 0.0])))}, "positive definite"),
        ({"noise": MatrixNoise(torch.eye(2))}, "diffusion has shape"),
        ({"noise": IsotropicNoise(0.3, common=True)}, "points do not share"),
        ({"noise": StateNoise(lambda x: x[..., None])}, "noise is StateNoise"),
        ({"noise": 0.3}, "noise is 0.3"),
        ({"horizon": 0.0}, "horizon is 0"),
        ({"space": StateSpace.STREAM}, "space is"),
        ({"reference": SA(beta=1.0, causal=True)}, "depends on the other points, but not through their law alone"),
        ({"reference": lambda x: x.flip(-2)}, "depends on the other points, but not through their law alone"),
        ({"reference": SA(beta=1.0), "space": StateSpace.FLAT}, "reference is SA"),
        ({"reference": 3}, "field is 3"),
        ({"reference": lambda x: x / 0}, "not finite"),
        ({"particles": 3}, "particles is 3"),
        ({"steps": 0}, "steps is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"particles": 10**7}, "particles is 10000000"),
        ({"noise": IsotropicNoise(1e-5), "space": StateSpace.FLAT, "x": 200 * X}, "raise noise or horizon"),
        ({"x": X[:0]}, "x"),
        ({"x": X[None]}, "one cloud"),
        ({"y_weights": -torch.ones(5)}, "y_weights holds the entry -1"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": X, "y": Y, "noise": NOISE, **options}
    with pytest.raises(HelmscopeError, match=message):
        bridge_particles(**arguments)


def test_bad_times_and_shapes() -> None:
    bridge = bridge_particles(X, Y, noise=NOISE, steps=1)
    with pytest.raises(HelmscopeError, match="t is 1"):
        bridge.control(X, 1.0)
    with pytest.raises(HelmscopeError, match="x has dimension 2"):
        bridge.control(torch.eye(2, dtype=torch.float64), 0.5)
    with pytest.raises(HelmscopeError, match="must not exceed the horizon"):
        bridge.simulate(X, [1.5])
    with pytest.raises(HelmscopeError, match="at least 32 points of equal y_weights only, and y has 5"):
        bridge.cost()
