"""JKO steps on the circle and for zonal densities: order, decrease of F, fixed points, slow minimization, splitting."""

from __future__ import annotations

import math
import warnings

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import minimize

from helmscope.fields.attention import SA, USA
from helmscope.fields.field import as_field
from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield import CircleGrid, Density, SphereGrid, ZonalGrid, evolve, free_energy, jko_step
from helmscope.types import HelmscopeError

NU = 0.5
CIRCLE = CircleGrid(degree=24)


def start_on_circle(grid: CircleGrid = CIRCLE) -> Density:
    return Density.from_function(grid, lambda x: (1 + 0.5 * x[:, 1]) / (2 * math.pi))


def energy(x: torch.Tensor) -> torch.Tensor:
    """V = -U, with two wells on the circle."""
    return -x[:, 0] - 0.5 * x[:, 0] ** 2


def force(x: torch.Tensor) -> torch.Tensor:
    """grad U in R^d."""
    first = torch.zeros_like(x)
    first[..., 0] = 1 + x[..., 0]
    return first


def repeated(density: Density, count: int, *, time: float, well=energy, **options) -> Density:
    for _ in range(count):
        density = jko_step(density, well, noise=NU, tau=time / count, **options).density
    return density


def errors(start: Density, exact: Density, counts: tuple[int, ...], **options) -> list[float]:
    return [float((repeated(start, n, **options).modes - exact.modes).abs().max()) for n in counts]


@pytest.mark.parametrize(
    "start",
    [
        start_on_circle(),
        Density.von_mises_fisher(ZonalGrid(dim=2, degree=20), kappa=1.0),
        Density.von_mises_fisher(ZonalGrid(dim=3, degree=20), kappa=1.0),
        Density.von_mises_fisher(ZonalGrid(dim=8, degree=20), kappa=1.0),
    ],
    ids=lambda start: str(start.grid),
)
def test_order_one_against_the_forward_equation(start: Density) -> None:
    time = 0.2 if start.grid.dim <= 3 else 0.05
    exact = evolve(force, start, times=[time], noise=IsotropicNoise(NU))[0]
    found = errors(start, exact, (4, 8, 16), time=time)
    assert found[-1] < 4e-3
    assert 0.9 < math.log2(found[1] / found[2]) < 1.1


def test_order_one_for_attention() -> None:
    for beta, value in ((1.0, None), (0.0, None), (2.0, -torch.eye(2, dtype=torch.float64))):
        field = USA(beta=beta, value=value)
        exact = evolve(field, start_on_circle(), times=[0.2], noise=IsotropicNoise(NU))[0]
        found = errors(start_on_circle(), exact, (4, 8), time=0.2, well=None, attention=field)
        assert 0.9 < math.log2(found[0] / found[1]) < 1.1


@pytest.mark.parametrize("grid", [CIRCLE, ZonalGrid(dim=3, degree=24), ZonalGrid(dim=32, degree=16)], ids=str)
@pytest.mark.parametrize("tau", [0.01, 1.0])
def test_gibbs_densities_stay(grid: CircleGrid | ZonalGrid, tau: float) -> None:
    """At any tau, if the problem is convex: V'' > -1 / tau here."""
    potential = lambda x: -0.8 * x[:, 0]  # noqa: E731
    gibbs = Density.from_function(grid, lambda x: (-potential(x) / NU).exp(), normalize=True)
    step = jko_step(gibbs, potential, noise=NU, tau=tau)
    assert float((step.density.modes - gibbs.modes).abs().max()) < 1e-12
    assert step.squared_distance < 1e-24


@pytest.mark.parametrize("grid", [CIRCLE, ZonalGrid(dim=5, degree=24)], ids=str)
def test_energy_decreases(grid: CircleGrid | ZonalGrid) -> None:
    density = Density.von_mises_fisher(grid, kappa=2.0)
    density = Density(grid, torch.where(grid.degrees % 2 == 1, -1.0, 1.0) * density.modes)  # in the wrong place
    previous, first = math.inf, None
    for _ in range(12):
        step = jko_step(density, energy, noise=NU, tau=0.1)
        density = step.density
        first = step.energy_before if first is None else first
        assert step.energy_after + step.squared_distance / 0.2 < step.energy_before < previous + 1e-9
        free = -NU * density.entropy + float(grid.mean_of(density.values * energy(grid.points)))
        assert abs(free - step.energy_after) < 1e-9
        previous = step.energy_before
        assert abs(float(density.modes[0]) - 1) < 1e-15
    lowest = -NU * (math.log(float(grid.mean_of((-energy(grid.points) / NU).exp()))) + grid.log_area)  # of e^{-V / nu}
    assert lowest < step.energy_after < lowest + 0.5 * (first - lowest)


def test_spectral_convergence() -> None:
    fine = jko_step(start_on_circle(CircleGrid(degree=48)), energy, noise=NU, tau=0.1).density.modes
    found = []
    for degree in (11, 15, 19):
        coarse = jko_step(start_on_circle(CircleGrid(degree=degree)), energy, noise=NU, tau=0.1).density.modes
        found.append(float((coarse - fine[: len(coarse)]).abs().max()))
    assert found[1] < 0.03 * found[0]
    assert found[2] < 0.03 * found[1]
    assert found[2] < 1e-10


def test_slow_minimization_over_particles() -> None:
    """N ordered particles of mass 1/N, with the entropy of the gaps: an independent form of the same step."""
    n, tau = 400, 0.1
    angles = np.linspace(0, 2 * np.pi, 20_001)
    cumulative = (angles + 0.5 * (1 - np.cos(angles))) / (2 * np.pi)
    x = np.interp((np.arange(n) + 0.5) / n, cumulative, angles)

    def objective(y: np.ndarray) -> tuple[float, np.ndarray]:
        gaps = np.diff(np.append(y, y[0] + 2 * np.pi))
        value = (
            ((y - x) ** 2).sum() / (2 * tau) - NU * np.log(n * gaps).sum() - (np.cos(y) + 0.5 * np.cos(y) ** 2).sum()
        )
        slope = (y - x) / tau + NU * (1 / gaps - np.roll(1 / gaps, 1)) + np.sin(y) + np.cos(y) * np.sin(y)
        return value / n, slope / n

    result = minimize(
        objective, x, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "maxfun": 9000, "ftol": 1e-15}
    )
    step = jko_step(start_on_circle(), energy, noise=NU, tau=tau)
    moments = np.array([np.cos(result.x).mean(), np.sin(result.x).mean(), np.cos(2 * result.x).mean()])
    ours = step.density.modes[1:4].numpy() / math.sqrt(2)
    assert np.abs(moments - ours).max() < 2e-4  # gaps of 0.016 radians: 5e-5 measured
    assert abs(((result.x - x) ** 2).mean() - step.squared_distance) < 1e-4


def test_the_distance_is_that_of_optimal_transport() -> None:
    """A map of the circle with a mean rotation would not be optimal: int u da = 0."""
    n = 600
    start = Density.from_function(CIRCLE, lambda x: (0.7 * x[:, 1] + 0.6 * x[:, 0] * x[:, 1]).exp(), normalize=True)
    step = jko_step(start, energy, noise=NU, tau=0.5)
    assert abs(float(step.displacement.mean())) < 1e-14
    angles = (np.arange(n) + 0.5) / n
    points = torch.from_numpy(np.stack([np.cos(2 * np.pi * angles), np.sin(2 * np.pi * angles)], -1))
    weights = [(CIRCLE.evaluate(density.modes, points) / n).numpy() for density in (start, step.density)]
    weights = [w / w.sum() for w in weights]
    distance = float(ot.wasserstein_circle(angles, angles, *weights, p=2).item()) * (2 * np.pi) ** 2
    assert abs(distance - step.squared_distance) < 1e-4
    best = step.energy_after + distance  # W2^2 / (2 tau) with tau = 0.5
    for seed in range(5):  # other densities are no better
        noise = torch.zeros_like(start.modes)
        noise[1:7] = 0.02 * torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        other = Density(CIRCLE, step.density.modes + noise)
        w = (CIRCLE.evaluate(other.modes, points) / n).numpy()
        moved = float(ot.wasserstein_circle(angles, angles, weights[0], w / w.sum(), p=2).item()) * (2 * np.pi) ** 2
        free = -NU * other.entropy + float(CIRCLE.mean_of(other.values * energy(CIRCLE.points)))
        assert free + moved > best


def test_splitting_with_a_swirl() -> None:
    """A rotation is no gradient flow, but T_# rho takes it in: order 1 in tau."""
    turn = as_field(lambda x: torch.stack([-x[..., 1], x[..., 0]], -1) * (1 + 0.5 * x[..., :1]))
    start = start_on_circle()
    both = lambda x: force(x) + turn.ambient(x)  # noqa: E731
    exact = evolve(both, start, times=[0.2], noise=IsotropicNoise(NU))[0]
    found = errors(start, exact, (4, 8, 16), time=0.2, transported=turn)
    assert found[-1] < 4e-3
    assert 0.9 < math.log2(found[1] / found[2]) < 1.1
    moved = evolve(turn, start, times=[0.1])[0]
    same = [jko_step(start, energy, noise=NU, tau=0.1, transported=each).density for each in (turn, moved)]
    assert torch.equal(same[0].modes, same[1].modes)


def test_a_function_transports_as_a_field_does() -> None:
    turn = lambda x: torch.stack([-x[..., 1], x[..., 0]], -1)  # noqa: E731
    start = start_on_circle()
    steps = [jko_step(start, energy, noise=NU, tau=0.1, transported=each).density for each in (turn, as_field(turn))]
    assert torch.equal(steps[0].modes, steps[1].modes)
    assert not torch.equal(steps[0].modes, jko_step(start, energy, noise=NU, tau=0.1).density.modes)


def test_noise_is_a_number_or_an_object_and_the_energy_is_minus_the_potential() -> None:
    start = start_on_circle()
    one, other = (jko_step(start, energy, noise=noise, tau=0.1) for noise in (NU, IsotropicNoise(NU)))
    assert torch.equal(one.density.modes, other.density.modes)
    before = free_energy(start, noise=NU, potential=lambda x: -energy(x))
    assert before == pytest.approx(one.energy_before, abs=1e-12)


def test_attention_counted_twice_warns() -> None:
    start = start_on_circle()
    with pytest.warns(
        UserWarning, match="SA.*noise must not contain the diffusion of attention, or it is counted twice"
    ):
        jko_step(start, energy, noise=NU, tau=0.1, transported=SA(beta=1.0))
    with pytest.warns(UserWarning, match="attention is in F as well"):
        jko_step(start, None, noise=NU, tau=0.1, transported=SA(beta=1.0), attention=USA(beta=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jko_step(start, energy, noise=0.0, tau=0.1, transported=SA(beta=1.0))
        jko_step(start, None, noise=NU, tau=0.1, attention=USA(beta=1.0))


def test_without_noise_a_step_is_implicit_euler_for_each_particle() -> None:
    """y + tau V'(y) = x with V = -0.3 cos."""
    step = jko_step(start_on_circle(), lambda x: -0.3 * x[:, 0], noise=0.0, tau=0.5)
    x = 2 * np.pi * np.arange(len(CIRCLE.points)) / len(CIRCLE.points)
    y = x.copy()
    for _ in range(100):
        y = x - 0.15 * np.sin(y)
    assert np.abs(step.displacement.numpy() - (y - x)).max() < 1e-10


def test_bad_input() -> None:
    start = start_on_circle()
    zonal = Density.uniform(ZonalGrid(dim=3, degree=8))
    negative = Density(CIRCLE, start.modes + torch.eye(len(start.modes), dtype=torch.float64)[1])
    narrow = Density.von_mises_fisher(CIRCLE, kappa=4.0)
    for density, options, message in (
        (None, {}, "density is None"),
        (Density.uniform(SphereGrid(degree=4)), {}, "CircleGrid or ZonalGrid"),
        (start, {"noise": -1.0}, "noise is -1"),
        (start, {"tau": 0.0}, "tau is 0"),
        (start, {"energy": 3}, "energy is 3"),
        (start, {"energy": lambda x: x}, "energy returns"),
        (start, {"energy": lambda x: x[:, 0] / 0}, "energy returns"),
        (negative, {}, "positive everywhere"),
        (zonal, {"energy": lambda x: x[:, 1]}, "must depend on the first coordinate only"),
        (zonal, {"attention": USA(beta=1.0)}, "on a CircleGrid"),
        (start, {"attention": SA(beta=1.0)}, "attention is SA"),
        (start, {"attention": USA(beta=60.0)}, "needs a grid with degree=45"),
        (start, {"energy": lambda x: 9 * x[:, 0], "tau": 10.0, "noise": 0.01}, "use a smaller tau"),
        (narrow, {"energy": lambda x: -4 * x[:, 0], "noise": 0.01, "tau": 0.2}, "raise degree"),
        (start, {"transported": 1}, "transported is 1"),
        (start, {"transported": zonal}, "must be on the grid of density"),
    ):
        arguments = {"energy": energy, "noise": NU, "tau": 0.1, **options}
        with pytest.raises(HelmscopeError, match=message):
            jko_step(density, arguments.pop("energy"), **arguments)
