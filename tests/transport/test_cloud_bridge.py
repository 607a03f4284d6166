"""Bridges between clouds: the Gaussian closed form, naive loops, densities by quadrature, and where they land."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from helmscope.fields.field import StateSpace
from helmscope.geometry.heat_kernel import heat_kernel_series
from helmscope.geometry.sphere import angle
from helmscope.stats.intervals import mean_interval
from helmscope.theory.starts import Uniform, VonMisesFisher
from helmscope.transport.brownian import SphereBrownian
from helmscope.transport.cloud_bridge import CloudBridge, bridge_clouds
from helmscope.transport.gaussian_bridge import GaussianBridge
from helmscope.types import HelmscopeError
from support.planting import Plant, outcome
from support.transport_oracles import normal_cloud

NU = 0.3


def normal_quantiles(n: int) -> torch.Tensor:
    return math.sqrt(2) * torch.erfinv(2 * (torch.arange(n, dtype=torch.float64) + 0.5) / n - 1)


def source(n: int, dim: int, seed: int) -> torch.Tensor:
    return VonMisesFisher(n=n, dim=dim, kappa=4.0, mean=torch.eye(dim)[0]).sample(seed=seed)


def target(n: int, dim: int, seed: int) -> torch.Tensor:
    return VonMisesFisher(n=n, dim=dim, kappa=8.0, mean=torch.eye(dim)[1]).sample(seed=seed)


def small(dim: int) -> CloudBridge:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    return bridge_clouds(source(4, dim, 1), target(5, dim, 2), weights, nu=NU, horizon=1.2, tol=1e-13)


# Closed form and oracles ----------------------------------------------------------------------------------------------


def test_gaussian_clouds_have_the_drift_and_the_marginals_of_the_closed_form() -> None:
    zero, one = torch.zeros(1), torch.ones(1, 1, dtype=torch.float64)
    exact = GaussianBridge(zero, one, zero + 0.5, one / 4, nu=NU)
    q = normal_quantiles(600)[:, None]
    bridge = bridge_clouds(q, 0.5 + q / 2, nu=NU, space=StateSpace.FLAT)
    grid = torch.linspace(-4, 4, 401, dtype=torch.float64)[:, None]
    density = torch.exp(bridge.log_density(grid, 0.5)) * 0.02
    mean, variance = exact.moments(0.5)
    assert float(density.sum()) == pytest.approx(1, abs=1e-6)
    assert float(density @ grid[:, 0]) == pytest.approx(float(mean), rel=0.02)
    assert float(density @ (grid[:, 0] - mean) ** 2) == pytest.approx(float(variance), rel=0.02)
    for t in (0.0, 0.5):
        found, wanted = bridge.control(grid, t)[:, 0], exact.control(grid, t)[:, 0]
        scale = math.sqrt(float(density @ wanted**2))
        assert math.sqrt(float(density @ (found - wanted) ** 2)) < 0.02 * scale
        assert math.sqrt(float(density @ (found / 2 - wanted) ** 2)) > 0.4 * scale  # nu grad log phi would be seen
        assert math.sqrt(float(density @ (-found - wanted) ** 2)) > 1.9 * scale  # and the printed sign
    entropy = math.log(2 * math.pi * math.e / 4) / 2
    cost = bridge.cost(target_entropy=entropy)
    assert cost.estimate == pytest.approx(exact.cost().estimate, rel=0.02)
    assert cost.low < exact.cost().estimate < cost.high


def test_gaussian_clouds_in_the_plane_agree_with_the_closed_form() -> None:
    root = torch.tensor([[0.8, 0.3], [0.3, 0.5]], dtype=torch.float64)
    zero, eye = torch.zeros(2), torch.eye(2)
    exact = GaussianBridge(zero, eye, zero + 1, root @ root, nu=NU)
    bridge = bridge_clouds(normal_cloud(1024, 1), normal_cloud(1024, 2) @ root + 1, nu=NU, space=StateSpace.FLAT)
    sample = bridge.marginal(0.5, n=20_000, seed=1)
    mean, cov = exact.moments(0.5)
    assert (sample.mean(0) - mean).abs().max() < 0.02
    assert (sample.mT.cov() - cov).norm() < 0.02 * cov.norm()
    typical = exact.marginal(0.5, n=1000)
    wanted = exact.control(typical, 0.5)
    assert (bridge.control(typical, 0.5) - wanted).norm() < 0.02 * wanted.norm()


def test_error_of_random_gaussian_clouds_is_a_sampling_error() -> None:
    """It falls like n^(-1/2): 15, 7.8 and 4.1 % for 50, 200 and 800 points."""
    exact = GaussianBridge(torch.zeros(2), torch.eye(2), torch.ones(2), torch.eye(2) / 4, nu=NU)
    points, random = exact.marginal(0.5, n=300), torch.Generator().manual_seed(0)
    wanted = exact.control(points, 0.5)

    def squared_error(n: int) -> float:
        x, y = (torch.randn(n, 2, dtype=torch.float64, generator=random) for _ in range(2))
        found = bridge_clouds(x, y / 2 + 1, nu=NU, space=StateSpace.FLAT).control(points, 0.5)
        return float((found - wanted).square().sum() / wanted.square().sum())

    errors = [math.sqrt(np.mean([squared_error(n) for _ in range(20)])) for n in (50, 200, 800)]
    slope = np.polyfit(np.log([50, 200, 800]), np.log(errors), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.1)


def naive_log_potential(bridge: CloudBridge, x: torch.Tensor, t: float) -> torch.Tensor:
    """log sum_j e^{g_j} p(x, y_j) for one point, from the series, term by term."""
    dim, tau = len(x), bridge.nu * (bridge.horizon - t)
    terms = [
        math.exp(float(g)) * heat_kernel_series((x * y).sum(), dim=dim, tau=tau)
        for g, y in zip(bridge.potentials[1], bridge.clouds.y, strict=True)
    ]
    return torch.log(torch.stack(terms).sum())


@pytest.mark.parametrize("dim", [2, 3, 8])
def test_potential_control_and_plan_agree_with_naive_loops(dim: int) -> None:
    bridge, t = small(dim), 0.3
    x = Uniform(n=3, dim=dim).sample(seed=9)
    x[0] = -bridge.clouds.y[0]  # antipodal to a target point
    value, control = bridge.log_potential(x, t), bridge.control(x, t)
    for k in range(3):
        gradient = torch.func.grad(lambda z: naive_log_potential(bridge, z / z.norm(), t))(x[k])
        assert float(value[k]) == pytest.approx(float(naive_log_potential(bridge, x[k], t)), abs=1e-6)
        torch.testing.assert_close(control[k], 2 * NU * gradient, rtol=1e-5, atol=1e-6)
    assert ((control * x).sum(-1).abs() < 1e-12).all()
    f, g = bridge.potentials
    kernel = heat_kernel_series(bridge.clouds.x @ bridge.clouds.y.mT, dim=dim, tau=NU * 1.2)
    plan = torch.exp(f)[:, None] * kernel * torch.exp(g)
    torch.testing.assert_close(plan.sum(1), bridge.clouds.a, rtol=1e-6, atol=0)
    torch.testing.assert_close(plan.sum(0), bridge.clouds.b, rtol=1e-6, atol=0)


def control_is_right(bridge: CloudBridge) -> bool:
    """Whether the control agrees with the gradient of the naive potential."""
    x, t = Uniform(n=2, dim=3).sample(seed=9), 0.3
    control = bridge.control(x, t)
    gradients = [torch.func.grad(lambda z: naive_log_potential(bridge, z / z.norm(), t))(point) for point in x]
    return torch.allclose(control, 2 * NU * torch.stack(gradients), rtol=1e-4, atol=1e-5)


def swapped(right: Callable[..., Any], process: Any, x: Any, y: Any, log_weights: Any, t: float) -> Any:
    return right(process, x, y, log_weights.flip(0), t)


FAULTS = {
    "sign": Plant(lambda right, *a: (right(*a)[0], -right(*a)[1]), (SphereBrownian, ["log_sum"])),
    "factor": Plant(lambda right, *a: (right(*a)[0], right(*a)[1] / 2), (SphereBrownian, ["log_sum"])),
    "axis": Plant(lambda right, *a: (right(*a)[0], right(*a)[1].flip(-1)), (SphereBrownian, ["log_sum"])),
    "order of the targets": Plant(swapped, (SphereBrownian, ["log_sum"])),
    "time from the start": Plant(
        lambda right, process, x, y, w, t: right(process, x, y, w, 1.2 - t), (SphereBrownian, ["log_sum"])
    ),
    "twice the diffusivity": Plant(
        lambda right, process, *a: right(SphereBrownian(2 * process.nu), *a), (SphereBrownian, ["log_sum"])
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name: str) -> None:
    bridge = small(3)
    assert control_is_right(bridge)
    assert outcome(FAULTS[name], lambda: control_is_right(bridge)) == "seen"


def test_plan_is_the_entropic_plan_of_pot() -> None:
    import ot

    bridge = small(3)
    kernel = heat_kernel_series(bridge.clouds.x @ bridge.clouds.y.mT, dim=3, tau=NU * 1.2)
    cost = -torch.log(kernel)
    wanted = ot.sinkhorn(bridge.clouds.a, bridge.clouds.b, cost, reg=1.0, stopThr=1e-13)
    f, g = bridge.potentials
    torch.testing.assert_close(torch.exp(f[:, None] - cost + g), wanted, rtol=0, atol=1e-8)


def test_points_between_pinned_ends_have_the_law_of_the_process() -> None:
    for dim in (2, 3, 8):
        nu, n, t, duration = 0.4, 4000, 0.35, 1.0
        process = SphereBrownian(nu)
        x = torch.eye(dim, dtype=torch.float64)[:1].expand(n, dim)
        random = torch.Generator().manual_seed(0)
        y = x
        for _ in range(100):  # a path of Brownian motion, in small steps
            step = torch.randn(n, dim, dtype=torch.float64, generator=random)
            y = y + math.sqrt(2 * nu * duration / 100) * (step - (step * y).sum(-1, keepdim=True) * y)
            y = y / y.norm(dim=-1, keepdim=True)
        for time in (t, duration - t):
            z = process.pinned(x, y, time, duration, random)
            decay = math.exp(-nu * (dim - 1) * time)
            assert float((z * x).sum(-1).mean()) == pytest.approx(decay, abs=4 / math.sqrt(n))
            left = math.exp(-nu * (dim - 1) * (duration - time))
            assert float((z * y).sum(-1).mean()) == pytest.approx(left, abs=4 / math.sqrt(n))


def test_marginals_on_the_circle_have_their_density() -> None:
    bridge = bridge_clouds(source(200, 2, 1), target(200, 2, 2), nu=NU)
    angles = 2 * math.pi * torch.arange(400, dtype=torch.float64) / 400
    grid = torch.stack([torch.cos(angles), torch.sin(angles)], -1)
    for t in (0.2, 0.6):
        mass = torch.exp(bridge.log_density(grid, t)) * (2 * math.pi / 400)
        assert float(mass.sum()) == pytest.approx(1, abs=1e-6)
        sample = bridge.marginal(t, n=4000, seed=3)
        assert (sample.mean(0) - mass @ grid).abs().max() < 4 / math.sqrt(4000)
    assert torch.equal(bridge.marginal(0.2, n=5, seed=3), bridge.marginal(0.2, n=5, seed=3))
    ends = bridge.marginal(1.0, n=50)
    assert (angle(ends[:, None], bridge.clouds.y).amin(1) < 1e-7).all()


# Simulation -----------------------------------------------------------------------------------------------------------


def test_cost_is_the_energy_of_the_control_along_paths() -> None:
    bridge = bridge_clouds(source(200, 3, 1), target(200, 3, 2), nu=NU)
    x0, times = source(400, 3, 3), np.linspace(0, 0.6, 31)
    run = bridge.simulate(x0, times.tolist(), seed=4)
    energy = torch.stack(
        [bridge.control(x, t).square().sum(-1) / (4 * NU) for x, t in zip(run.states, times, strict=True)]
    )
    paths = mean_interval(torch.trapezoid(energy, dx=0.02, dim=0).numpy())
    exact = bridge.cost_until(0.6, n=4000, seed=5)
    assert abs(paths.estimate - exact.estimate) < 2 * (paths.high - paths.low) / 2 + (exact.high - exact.low) / 2
    assert paths.estimate > 0.5  # so that a factor of 2 would be seen


def test_simulation_returns_the_requested_times_and_ends_in_the_cloud() -> None:
    bridge = bridge_clouds(source(40, 3, 1), target(40, 3, 2), nu=NU)
    x0 = source(10, 3, 3)
    run = bridge.simulate(x0.expand(2, 10, 3), [0.25, 1.0], seed=1)
    assert run.states.shape == (2, 2, 10, 3)
    assert run.times.tolist() == [0.25, 1.0]
    assert str(run.outcome) == "finished at t=1"
    assert (angle(run.states[-1].unsqueeze(-2), bridge.clouds.y).amin(-1) < 1e-7).all()
    assert not torch.equal(run.states[:, 0], run.states[:, 1])  # systems have random streams of their own
    assert torch.equal(bridge.simulate(x0, [0.25, 1.0], seed=1).states, run.states[:, 0])
    again = run.resume(depth=0, states=run.states[0])
    assert float(angle(again.states[-1].unsqueeze(-2), bridge.clouds.y).amin(-1).mean()) < 0.3
    before = bridge.simulate(x0, [0.9985], seed=1).states[-1]  # the control alone has come close already
    assert float(angle(before[:, None], bridge.clouds.y).amin(1).mean()) < 0.1


def landing_statistics(dim: int, fit: int, n: int, seed: int, *, as_printed: bool) -> list[float]:
    """W2^2(X, Y) - [W2^2(X, X') + W2^2(Y, Y')] / 2 for two independent fits and fresh samples of the target: just
    before the last step, where the control alone has led, and at the horizon.
    """
    import ot

    def squared_w2(x: torch.Tensor, y: torch.Tensor) -> float:
        return float(ot.emd2([], [], angle(x[:, None], y).square().numpy()))

    def simulated(seed: int) -> torch.Tensor:
        bridge = bridge_clouds(source(fit, dim, seed), target(fit, dim, seed + 1), nu=NU)
        return bridge.simulate(source(n, dim, seed + 2), [0.9985, 1.0], seed=seed, as_printed=as_printed).states

    x, other_x = simulated(seed), simulated(seed + 10)
    y, other_y = target(n, dim, seed + 20), target(n, dim, seed + 21)
    within = squared_w2(y, other_y)
    return [squared_w2(a, y) - (squared_w2(a, b) + within) / 2 for a, b in zip(x, other_x, strict=True)]


def ratios(values: list[list[float]]) -> np.ndarray:
    """Means in units of their standard errors."""
    return np.mean(values, 0) / (np.std(values, 0, ddof=1) / math.sqrt(len(values)))


def test_controlled_particles_land_on_the_target_and_printed_ones_do_not() -> None:
    landed = [landing_statistics(3, 256, 24, 100 * k, as_printed=False) for k in range(6)]
    printed = [landing_statistics(3, 256, 24, 100 * k, as_printed=True) for k in range(2)]
    assert np.abs(ratios(landed)).max() < 4
    assert np.min(printed) > 1 > 10 * np.abs(landed).max()


@pytest.mark.slow
@pytest.mark.parametrize("dim", [2, 3, 8])
@pytest.mark.parametrize("as_printed", [False, True])
def test_landing_over_twenty_systems(dim: int, as_printed: bool) -> None:
    values = [landing_statistics(dim, 1024, 64, 1000 * k, as_printed=as_printed) for k in range(20)]
    inside = np.abs(ratios(values)) < 4
    assert not inside.any() if as_printed else inside.all()


# Input ----------------------------------------------------------------------------------------------------------------


def test_points_without_mass_are_left_out_and_the_dtype_of_points_is_kept() -> None:
    x, y = source(6, 3, 1), target(5, 3, 2)
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    with_zero = bridge_clouds(x, y, None, weights, nu=NU)
    without = bridge_clouds(x, y[weights > 0], nu=NU)
    assert torch.equal(with_zero.control(x, 0.5), without.control(x, 0.5))
    assert bridge_clouds(x.float(), y.float(), nu=NU).control(x.float(), 0.5).dtype == torch.float32


def test_a_system_does_not_depend_on_its_batch() -> None:
    bridge = small(3)
    x = Uniform(n=7, dim=3).sample(4, seed=1)
    times = torch.tensor([0.1, 0.2, 0.3, 0.2], dtype=torch.float64).reshape(4, 1, 1)
    whole = bridge.control(x, times)
    assert all(torch.equal(whole[k], bridge.control(x[k], float(times[k]))) for k in range(4))
    assert torch.equal(bridge.field(as_printed=True)(x[1], t=0.2), -whole[1])


def test_too_little_noise_is_reported_with_an_amount_that_converges() -> None:
    x, y = source(30, 2, 1), target(30, 2, 2)
    bridge = bridge_clouds(x, y, nu=0.0005, max_iterations=100)
    assert not bridge.ok
    assert "iteration limit reached after 100 iterations" in bridge.outcome
    enough = float(bridge.outcome.rpartition(">= ")[2])
    assert bridge_clouds(x, y, nu=enough, max_iterations=100).ok


def test_antipodal_points_are_bridged() -> None:
    x = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    bridge = bridge_clouds(x, -x, nu=0.1)
    assert bridge.control(x, 0.0).abs().max() < 1e-6  # no direction is preferred
    end = bridge.simulate(x.expand(20, 3), [1.0], seed=1).states[-1]
    torch.testing.assert_close(end, -x.expand(20, 3))


def test_bad_input_is_named() -> None:
    x, y = source(4, 3, 1), target(4, 3, 2)
    with pytest.raises(HelmscopeError, match="horizon is 0, but it must be a finite number > 0"):
        bridge_clouds(x, y, nu=NU, horizon=0)
    with pytest.raises(HelmscopeError, match="nu is -1, but it must be a finite number > 0"):
        bridge_clouds(x, y, nu=-1)
    with pytest.raises(HelmscopeError, match=r"y holds a token of norm 2 .*, but tokens must be on the unit sphere"):
        bridge_clouds(x, 2 * y, nu=NU)
    with pytest.raises(HelmscopeError, match="x has dimension d=1, but a sphere needs d >= 2"):
        bridge_clouds(x[:, :1], y[:, :1], nu=NU)
    with pytest.raises(HelmscopeError, match=r"x has shape \(2, 4, 3\), but a bridge takes one cloud \(n, d\)"):
        bridge_clouds(x.expand(2, 4, 3), y, nu=NU)
    with pytest.raises(HelmscopeError, match=r"space is .*, but it must be"):
        bridge_clouds(x, y, nu=NU, space=StateSpace.STREAM)
    bridge = bridge_clouds(x, y, nu=NU)
    for t in (1.0, -0.1, math.nan):
        with pytest.raises(HelmscopeError, match=r"t is .*, but it must be (in \[0, 1\)|a finite number)"):
            bridge.control(x, t)
    with pytest.raises(HelmscopeError, match="x has dimension 2, but the bridge is between clouds of dimension 3"):
        bridge.simulate(torch.eye(2), [1.0])
    with pytest.raises(HelmscopeError, match=r"times holds 1\.5, but it must not exceed the horizon 1"):
        bridge.simulate(x, [1.5])
    with pytest.raises(
        HelmscopeError,
        match="target_entropy is None, but it can be estimated for at least 32 points of equal y_weights",
    ):
        bridge_clouds(x, y, None, torch.tensor([1.0, 2.0, 3.0, 4.0]), nu=NU).cost()
    with pytest.raises(HelmscopeError, match="x holds equal points"):
        bridge_clouds(x, y[:1].expand(40, 3), nu=NU).cost()
    with pytest.raises(HelmscopeError, match="y has 1 point, but a sampling error of the cost needs at least two"):
        bridge_clouds(x, y[:1], nu=NU).cost(target_entropy=0.0)
