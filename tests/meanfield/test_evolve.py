"""The forward equation: known digits, closed forms, growth rates, mass, positivity, convergence."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from scipy.special import iv, ive

import helmscope as hs
from helmscope.fields.noise import DivergenceForm, IsotropicNoise, Ito, LayerNormChain, MatrixNoise, Stratonovich
from helmscope.meanfield import CircleGrid, Density, Grid, SphereGrid, ZonalGrid, evolve
from helmscope.meanfield.etd import EtdFactors, etd_step, integrate_etd, phi_functions
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.types import Status
from support.refusal import refused

F64 = torch.float64
PROCESSES = [LayerNormChain(), Stratonovich(), Ito(), DivergenceForm()]


def toward_first_axis(x: torch.Tensor) -> torch.Tensor:
    """The gradient of U = x_1, before projection."""
    return torch.eye(x.shape[-1], dtype=x.dtype)[0].expand_as(x)


def tilted(grid: Grid) -> Density:
    """(1 + sin t / 2) / 2 pi."""
    return Density.from_function(grid, lambda x: (1 + 0.5 * x[..., 1]) / (2 * math.pi))


def mixed(grid: Grid, amount: float = 0.4) -> Density:
    """A start without symmetries, or with that of a zonal grid."""
    modes = (grid.degrees == 0).double()
    others = torch.arange(1, len(modes), dtype=F64)
    modes[1:] = amount * torch.cos(others) * torch.exp(-grid.degrees[1:].double())
    return Density(grid, modes)


# Known digits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positive", [False, True])
def test_free_energy_of_fokker_planck_on_the_circle(positive: bool) -> None:
    """U = cos t, nu = 1/2: F = nu int rho log rho - int U rho at six times."""
    known = [-0.8866194672, -1.0042195061, -1.0938903150, -1.2099136761, -1.3017633086, -1.3244103308]
    times = [0, 0.25, 0.5, 1, 2, 3]
    path = evolve(
        toward_first_axis, tilted(CircleGrid(24)), times=times, noise=IsotropicNoise(0.5), positive=positive, tol=1e-11
    )
    energies = [-0.5 * density.entropy - float(density.mean[0]) for density in path]
    assert max(abs(energy - exact) for energy, exact in zip(energies, known, strict=True)) < 1e-10


def test_fokker_planck_tends_to_the_gibbs_density() -> None:
    noise = IsotropicNoise(0.5)
    path = evolve(toward_first_axis, tilted(CircleGrid(24)), times=[32], noise=noise, tol=1e-10)
    assert abs(float(path[0].mean[0]) - 0.6977746579640083) < 1e-11  # I_1(2) / I_0(2)
    assert torch.allclose(path[0].modes, Density.von_mises_fisher(CircleGrid(24), kappa=2.0).modes, rtol=0, atol=1e-10)


@pytest.mark.parametrize("process", [LayerNormChain(), Stratonovich(), DivergenceForm()], ids=repr)
def test_stationary_density_under_anisotropic_noise(process) -> None:
    """sigma = diag(2, 1) on the circle: uniform, or ~ (4 sin^2 + cos^2)^(-1/2) for Stratonovich."""
    grid = CircleGrid(64)
    equation = ForwardEquation.of(None, grid, MatrixNoise(torch.diag(torch.tensor([2.0, 0.5])), process=process))
    values = torch.ones(len(grid.points), dtype=F64)
    if isinstance(process, Stratonovich):
        values = (4 * grid.points[:, 1] ** 2 + grid.points[:, 0] ** 2) ** -0.5
    modes = grid.analyze(values / grid.mean_of(values))
    assert float((equation.rate(modes, 0.0) - equation.decay * modes).abs().max()) < 1e-11
    wrong = modes.clone()
    wrong[3] += 0.01
    assert float((equation.rate(wrong, 0.0) - equation.decay * wrong).abs().max()) > 1e-2


def test_stratonovich_noise_tends_to_its_stationary_law() -> None:
    """E cos 2t for sigma = diag(2, 1)."""
    noise = MatrixNoise(torch.diag(torch.tensor([2.0, 0.5])), process=Stratonovich())
    path = evolve(None, mixed(CircleGrid(24)), times=[16], noise=noise, tol=1e-9)
    assert path.outcome.ok
    assert abs(float(path.modes[0, 3]) / math.sqrt(2) - 0.16912003679316695) < 1e-9


@pytest.mark.parametrize(
    "grid", [CircleGrid(6), SphereGrid(5), ZonalGrid(dim=3, degree=6), ZonalGrid(dim=8, degree=6)], ids=repr
)
@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_harmonics_decay_under_isotropic_noise(grid: Grid, process) -> None:
    """e^{-nu k (k + d - 2) t}: for M = nu I all processes are Brownian motion."""
    start = mixed(grid, 0.2)
    for noise in (IsotropicNoise(0.3, process=process), MatrixNoise(0.3 * torch.eye(grid.dim), process=process)):
        path = evolve(None, start, times=[0.1, 0.7], noise=noise)
        for t, modes in zip(path.times, path.modes, strict=True):
            exact = start.modes * torch.exp(-0.3 * grid.eigenvalues * t)
            assert torch.allclose(modes, exact, rtol=0, atol=2e-8 if isinstance(noise, MatrixNoise) else 1e-14)


@pytest.mark.parametrize("value", [1.0, -1.0])
@pytest.mark.parametrize(
    "grid", [CircleGrid(24), SphereGrid(22), ZonalGrid(dim=3, degree=22), ZonalGrid(dim=8, degree=20)], ids=repr
)
def test_growth_rates_of_the_uniform_density(grid: Grid, value: float) -> None:
    """k (k + d - 2) (+-lambda_k / beta - nu), lambda_k = I_{k+d/2-1} / I_{d/2-1}: all degrees at once."""
    beta, nu, size = 4.0, 0.1, 1e-5
    field = hs.SA(beta=beta, value=value * torch.eye(grid.dim, dtype=F64))
    equation = ForwardEquation.of(field, grid, IsotropicNoise(nu))
    k = grid.degrees.double()
    ratio = torch.from_numpy(ive(k.numpy() + grid.dim / 2 - 1, beta) / ive(grid.dim / 2 - 1, beta))
    exact = grid.eigenvalues * (value * ratio / beta - nu)
    direction = torch.cos(torch.arange(len(k), dtype=F64)) / (1 + k) ** 2
    direction[0] = 0
    uniform = Density.uniform(grid).modes
    up, down = (equation.rate(uniform + sign * size * direction, 0.0) for sign in (1, -1))
    computed = (up - down) / (2 * size) - equation.decay * direction
    assert torch.allclose(computed, exact * direction, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("grid", "degree"), [(CircleGrid(24), 1), (CircleGrid(24), 3), (SphereGrid(22), 2)])
def test_growth_over_time(grid: Grid, degree: int) -> None:
    """A perturbation of size 1e-6 grows by e^{rate t}, to 1e-8 of the rate."""
    modes = Density.uniform(grid).modes
    index = int((grid.degrees == degree).nonzero()[0])
    modes[index] = 1e-6
    path = evolve(hs.SA(beta=4.0), Density(grid, modes), times=[1.0], noise=IsotropicNoise(0.05), tol=1e-16)
    ratio = ive(degree + grid.dim / 2 - 1, 4.0) / ive(grid.dim / 2 - 1, 4.0)
    rate = degree * (degree + grid.dim - 2) * (ratio / 4 - 0.05)
    assert abs(math.log(float(path.modes[0, index]) / 1e-6) - rate) < 1e-8


@pytest.mark.parametrize(
    ("grid", "known"),
    [
        (CircleGrid(24), 0.2158806527561376),
        (SphereGrid(22), 0.18766778760042),
        (ZonalGrid(dim=2, degree=24), 0.2158806527561376),
        (ZonalGrid(dim=3, degree=22), 0.18766778760042),
    ],
    ids=repr,
)
def test_critical_noise(grid: Grid, known: float) -> None:
    """nu_c(4): the noise at which degree 1, the first to grow, neither grows nor decays."""
    uniform, size = Density.uniform(grid).modes, 1e-5
    direction = torch.zeros_like(uniform)
    direction[1] = size
    rate = ForwardEquation.of(hs.SA(beta=4.0), grid).rate
    growth = (rate(uniform + direction, 0.0) - rate(uniform - direction, 0.0))[1] / (2 * size)
    assert abs(float(growth) / (grid.dim - 1) - known) < 1e-10


def test_usa_gains_by_the_kernel_itself() -> None:
    """USA: k (k + d - 2) (a_k / beta - nu), a_k = I_k on the circle."""
    grid, beta, size = CircleGrid(24), 2.0, 1e-6
    uniform = Density.uniform(grid).modes
    rate = ForwardEquation.of(hs.USA(beta=beta), grid).rate
    for k in (1, 2, 5):
        direction = torch.zeros_like(uniform)
        direction[2 * k] = size
        growth = (rate(uniform + direction, 0.0) - rate(uniform - direction, 0.0))[2 * k] / (2 * size)
        assert abs(float(growth) - k * k * iv(k, beta) / beta) < 1e-9


def test_attention_without_temperature_is_the_mean_field_of_kuramoto() -> None:
    """beta = 0 on the circle: the degree-1 coefficients obey z' = (z - conj(z) z_2)/2, SA and USA alike."""
    grid = CircleGrid(32)
    start = mixed(grid)
    rates = [ForwardEquation.of(field(beta=0.0), grid).rate(start.modes, 0.0) for field in (hs.SA, hs.USA)]
    assert torch.equal(*rates)
    z = torch.complex(start.modes[1::2], start.modes[2::2]) / math.sqrt(2)  # E e^{ikt}
    exact = (z[0] - z[0].conj() * z[1]) / 2
    computed = torch.complex(rates[0][1], rates[0][2]) / math.sqrt(2)
    assert abs(complex(computed) - complex(exact)) < 1e-15


# Anisotropic noise ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
@pytest.mark.parametrize("positive", [False, True])
def test_zonal_densities_are_those_of_the_sphere(process, positive: bool) -> None:
    """M = a I + b e e^T, with SA: the same density on ZonalGrid and on SphereGrid, whose axis is another one."""
    noise = MatrixNoise(torch.diag(torch.tensor([0.5, 0.2, 0.2], dtype=F64)), process=process)
    options = {"times": [0.3], "noise": noise, "tol": 1e-10, "positive": positive}
    zonal = evolve(hs.SA(beta=2.0), Density.von_mises_fisher(ZonalGrid(3, 18), kappa=1.0), **options)
    sphere = evolve(hs.SA(beta=2.0), Density.von_mises_fisher(SphereGrid(18), kappa=1.0), **options)
    x = hs.Uniform(n=20, dim=3).sample(seed=0)
    assert torch.allclose(zonal[0](x), sphere[0](x), rtol=0, atol=1e-9)
    isotropic = evolve(hs.SA(beta=2.0), Density.von_mises_fisher(ZonalGrid(3, 18), kappa=1.0), times=[0.3])
    assert float((zonal[0](x) - isotropic[0](x)).abs().max()) > 1e-2


def test_processes_differ_by_their_drift() -> None:
    """-c div_S(rho P M x), c = d - 2, d - 1, d, 0, from the table of processes."""
    grid, m = SphereGrid(8), torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=F64))
    start = mixed(grid)

    def rate(process) -> torch.Tensor:
        equation = ForwardEquation.of(None, grid, MatrixNoise(m, process=process))
        return equation.rate(start.modes, 0.0) - equation.decay * start.modes

    transport = grid.divergence(start.values[:, None] * grid.components(grid.points @ m))
    for process, c in zip(PROCESSES, (1, 2, 3, 0), strict=True):
        assert torch.allclose(rate(process) - rate(DivergenceForm()), -c * transport, rtol=0, atol=1e-11)


def test_the_generator_on_coordinates() -> None:
    """Oracle of the four processes at x = (1, 1, 1)/sqrt 3, M = diag(1, 2, 3): d/dt E x_1 = int L x_1 rho."""
    grid, m = SphereGrid(8), torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=F64))
    start = mixed(grid)
    x = grid.points
    quadratic = (x @ m * x).sum(-1)
    for process, c in zip(PROCESSES, (2, 1, 0, 3), strict=True):
        # L x_1 = beta_1 - tr(P M P) x_1, with beta = -c P M x and Hess_S x_1 = -x_1 P
        drift = -c * (x @ m - quadratic[:, None] * x)[:, 0]
        exact = grid.mean_of(start.values * (drift - (m.trace() - quadratic) * x[:, 0]))
        equation = ForwardEquation.of(None, grid, MatrixNoise(m, process=process))
        rate = equation.rate(start.modes, 0.0) - equation.decay * start.modes
        assert abs(float(grid.mean_of(grid.synthesize(rate) * x[:, 0])) - float(exact)) < 1e-12


# Mass and sign --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("grid", [CircleGrid(24), SphereGrid(16), ZonalGrid(dim=8, degree=24)], ids=repr)
def test_mass_is_kept(grid: Grid, positive: bool) -> None:
    start = Density.von_mises_fisher(grid, kappa=1.0)
    path = evolve(hs.USA(beta=1.0), start, times=[0.2, 0.5], noise=IsotropicNoise(0.1), positive=positive)
    assert float((grid.mean_of(grid.synthesize(path.modes)) - 1).abs().max()) < 1e-12
    assert path.mass_error < 1e-7  # of one step, before it is restored


@pytest.mark.parametrize("grid", [CircleGrid(48), SphereGrid(24), ZonalGrid(dim=8, degree=48)], ids=repr)
def test_both_forms_agree(grid: Grid) -> None:
    start = Density.von_mises_fisher(grid, kappa=1.0)
    paths = [evolve(hs.SA(beta=2.0), start, times=[0.5], noise=IsotropicNoise(0.2), positive=p) for p in (0, 1)]
    assert torch.allclose(paths[0].modes, paths[1].modes, rtol=0, atol=1e-7)
    assert float(paths[1].minimum.min()) > 0


def test_the_plain_form_undershoots_where_the_positive_one_does_not() -> None:
    """Fokker-Planck with nu = 0.07 from kappa = 10: values down to 1e-9 of the largest, at degree 20."""
    start, finer = (Density.von_mises_fisher(CircleGrid(degree), kappa=10.0) for degree in (20, 48))
    options = {"times": [0.2, 1.0], "noise": IsotropicNoise(0.07)}
    plain = evolve(toward_first_axis, start, **options)
    positive = evolve(toward_first_axis, start, positive=True, **options)
    exact = evolve(toward_first_axis, finer, tol=1e-13, **options)
    assert plain.outcome.ok
    assert float(plain.minimum[1]) < -1e-6
    assert float(plain.negative_mass[1]) > 1e-7
    assert torch.allclose(positive.minimum, exact.minimum, rtol=1e-3, atol=0)
    assert torch.equal(positive.negative_mass, torch.zeros(2, dtype=F64))
    assert float(positive[1](start.grid.points).min()) > 0
    again = evolve(toward_first_axis, positive[0], times=[0.8], noise=IsotropicNoise(0.07), positive=True)
    assert torch.allclose(again.modes[0], positive.modes[1], rtol=0, atol=1e-8)


def test_a_run_ends_where_the_density_is_no_longer_resolved() -> None:
    """Attention without noise forms a cluster in infinite time; no grid resolves it for ever."""
    path = evolve(hs.SA(beta=4.0), Density.von_mises_fisher(CircleGrid(32), kappa=1.0), times=[0.1, 0.2, 50.0])
    assert len(path) == 2
    assert path.outcome.statuses == (Status.UNRESOLVED,)
    assert 0.2 < path.outcome.times[0] < 5
    assert "raise degree" in str(path.outcome)
    assert "no longer resolves" in str(path.outcome)
    finer = evolve(hs.SA(beta=4.0), Density.von_mises_fisher(CircleGrid(128), kappa=1.0), times=[0.2, 50.0])
    assert finer.outcome.times[0] > path.outcome.times[0]
    x = CircleGrid(8).points
    assert torch.allclose(finer[0](x), path[1](x), rtol=0, atol=1e-6)


def test_a_run_ends_at_its_step_limit() -> None:
    path = evolve(hs.SA(beta=4.0), Density.von_mises_fisher(CircleGrid(32), kappa=1.0), times=[0, 0.5], max_steps=1)
    assert path.outcome.statuses == (Status.STEP_LIMIT,)
    assert len(path) == 1


def test_a_path_without_times_says_why() -> None:
    start = Density.von_mises_fisher(CircleGrid(32), kappa=1.0)
    for positive in (False, True):
        path = evolve(hs.SA(beta=4.0), start, times=[60.0], positive=positive)
        assert len(path) == len(path.minimum) == len(path.negative_mass) == 0
        with pytest.raises(IndexError, match=r"0 times.*no longer resolves"):
            path[0]
        refused(lambda path=path: path.trajectory, "no times", "no longer resolves")


# Convergence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "degrees", "fine"),
    [
        (CircleGrid, (8, 11, 14), 28),
        (SphereGrid, (8, 11, 14), 24),
        (lambda degree: ZonalGrid(dim=8, degree=degree), (8, 11, 14), 28),
    ],
    ids=["Fourier", "Y_lm", "Gegenbauer"],
)
def test_convergence_in_the_degree_is_spectral(make, degrees: tuple[int, ...], fine: int) -> None:
    """Every three degrees more divide the error by at least 8, faster than any power of the degree would."""

    def solution(degree: int) -> Density:
        grid = make(degree)
        start = Density.von_mises_fisher(grid, kappa=0.2)
        return evolve(toward_first_axis, start, times=[0.8], noise=IsotropicNoise(0.5), tol=1e-10)[0]

    x = hs.Uniform(n=200, dim=make(2).dim).sample(seed=0)
    exact = solution(fine)(x)
    errors = [float((solution(degree)(x) - exact).abs().max() / exact.abs().max()) for degree in degrees]
    assert errors[0] < 1e-2
    assert errors[1] < errors[0] / 8
    assert errors[2] < errors[1] / 8


@pytest.mark.parametrize(
    ("grid", "field"),
    [
        (CircleGrid(16), hs.SA(beta=2.0)),
        (SphereGrid(14), hs.USA(beta=1.0)),
        (ZonalGrid(dim=8, degree=14), hs.SA(beta=2.0)),
    ],
    ids=["SA on S^1", "USA on S^2", "SA zonal, d=8"],
)
@pytest.mark.parametrize("log", [False, True], ids=["plain", "positive"])
def test_temporal_order(grid: Grid, field, log: bool) -> None:
    """Halving the step divides the error by 2^4, within 0.2 in the exponent."""
    equation = ForwardEquation.of(field, grid, IsotropicNoise(0.1))
    start = Density.von_mises_fisher(grid, kappa=1.0)
    rate = equation.log_rate if log else equation.rate
    y0 = grid.analyze(start.values.log()) if log else start.modes

    def after(steps: int) -> torch.Tensor:
        y, h = y0, 0.4 / steps
        factors = EtdFactors.of(equation.decay, h)
        for k in range(steps):
            y = etd_step(rate, factors, y, k * h, h, rate(y, k * h))
        return y

    exact = after(64)
    errors = [float((after(steps) - exact).norm()) for steps in (8, 16)]
    assert abs(math.log2(errors[0] / errors[1]) - 4) < 0.2


@pytest.mark.parametrize("tol", [1e-6, 1e-9])
def test_error_control_keeps_the_tolerance(tol: float) -> None:
    grid = CircleGrid(24)
    options = {"times": [1.0], "noise": IsotropicNoise(0.1)}
    exact = evolve(hs.SA(beta=2.0), mixed(grid), tol=1e-13, **options)
    path = evolve(hs.SA(beta=2.0), mixed(grid), tol=tol, **options)
    assert float((path.modes - exact.modes).norm()) < 20 * tol  # of a few dozen steps
    assert path.steps < exact.steps


def test_phi_functions_to_rounding() -> None:
    """Against mpmath with 80 digits."""
    z = -torch.logspace(-12, 2, 57, dtype=F64)
    computed = phi_functions(z).mT.tolist()
    with mpmath.workdps(80):
        for value, row in zip(z.tolist(), computed, strict=True):
            point = mpmath.mpf(value)
            phi1 = mpmath.expm1(point) / point
            phi2 = (phi1 - 1) / point
            for exact, found in zip((phi1, phi2, (phi2 - mpmath.mpf(1) / 2) / point), row, strict=True):
                assert abs(float((mpmath.mpf(found) - exact) / exact)) < 1e-15


def test_times_of_the_output_do_not_change_the_result() -> None:
    decay = torch.tensor([0.0, 3.0, 50.0], dtype=F64)
    rate = lambda y, t: torch.sin(y.flip(0) + t)  # noqa: E731
    many = [k / 10 for k in range(11)]
    dense = integrate_etd(rate, decay, torch.ones(3, dtype=F64), many, tol=1e-11, max_steps=10_000)
    sparse = integrate_etd(rate, decay, torch.ones(3, dtype=F64), [1.0], tol=1e-11, max_steps=10_000)
    assert torch.allclose(dense.states[-1], sparse.states[-1], rtol=0, atol=1e-9)
    assert dense.status is sparse.status is Status.FINISHED
