"""RandomSource of noise, one step of every noisy stepper, bitwise repeatability, residual streams, and bad input."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.fields.attention import SA, USA
from helmscope.fields.field import Field, StateSpace, as_field
from helmscope.fields.noise import (
    DivergenceForm,
    IsotropicNoise,
    Ito,
    LayerNormChain,
    MatrixNoise,
    StateNoise,
    Stratonovich,
)
from helmscope.geometry.sphere import project, retract
from helmscope.solve.euler_maruyama import EulerMaruyama
from helmscope.solve.events import HittingTime
from helmscope.solve.flow import Flow
from helmscope.solve.heun import Heun
from helmscope.solve.integrate import integrate, make_problem
from helmscope.solve.layer import Layer
from helmscope.solve.noisy import check_noise
from helmscope.solve.noisy_layer import NoisyLayer
from helmscope.solve.projected_euler import ProjectedEuler
from helmscope.solve.random_source import RandomSource
from helmscope.solve.stepper import NOISY_STEP
from helmscope.solve.stochastic_heun import StochasticHeun
from helmscope.theory.starts import Uniform
from helmscope.types import HelmscopeError, Status

F64 = torch.float64
STEPPERS = [EulerMaruyama, StochasticHeun, NoisyLayer]
PROCESSES = {LayerNormChain(): -2, Stratonovich(): -1, Ito(): 0, DivergenceForm(): -3}  # beta / (P M x) for d = 3
PAIRS = [(stepper, process) for stepper in STEPPERS[:2] for process in PROCESSES] + [(NoisyLayer, LayerNormChain())]
M = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=F64))


def tilted(d: int = 3) -> torch.Tensor:
    a = torch.randn(d, d, generator=torch.Generator().manual_seed(5), dtype=F64)
    return a @ a.T / (4 * d)


# RandomSource -------------------------------------------------------------------------------------------------------


def test_streams_are_those_of_numpy() -> None:
    streams = RandomSource(11, [4, 0])
    drawn = torch.cat([streams.normal(3, 2).reshape(2, -1) for _ in range(5)], 1)
    for row, system in zip(drawn, (4, 0), strict=True):
        philox = np.random.Philox(np.random.SeedSequence(11, spawn_key=(system,)))
        assert np.array_equal(row.numpy(), np.random.Generator(philox).standard_normal(30))
    assert drawn.dtype == F64


def test_streams_do_not_depend_on_how_they_are_drawn() -> None:
    """Neither on the batch, nor the order, nor the portions; also past the numbers drawn ahead."""
    whole, parts = RandomSource(3, range(2000)), RandomSource(3, [1999, 7])
    big = torch.cat([whole.normal(25, 40)[[1999, 7]].reshape(2, -1) for _ in range(7)], 1)
    small = torch.cat([parts.normal(7, 10).reshape(2, -1) for _ in range(100)], 1)
    assert torch.equal(big, small)


def test_renewed_seeds() -> None:
    again = [RandomSource.continuation_seed(0, index, None) for index in range(100)]
    assert len({0, *again, *(RandomSource.continuation_seed(1, index, None) for index in range(100))}) == 201
    generator = torch.Generator().manual_seed(1)
    first, second = (RandomSource.continuation_seed(0, 0, generator) for _ in range(2))
    assert second != first == RandomSource.continuation_seed(5, 9, torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: RandomSource(-1, [0]), "seed is -1, but it must be a whole number >= 0"),
        (lambda: RandomSource(0.5, [0]), "seed is 0.5, but it must be a whole number >= 0"),
        (lambda: RandomSource(0, [-1]), "systems is -1, but it must be a whole number >= 0"),
        (lambda: RandomSource(0, 8), "systems is 8, but it must hold the systems' numbers, such as range(8)"),
    ],
)
def test_refusals_of_streams(make, sentence) -> None:
    with pytest.raises(HelmscopeError) as error:
        make()
    assert str(error.value) == sentence


# One step -------------------------------------------------------------------------------------------------------------


@functools.cache
def gauss(k: int, q: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes and weights of N(0, I_k) by a product of Gauss-Hermite rules, without weights below 1e-18."""
    z, w = np.polynomial.hermite_e.hermegauss(q)
    nodes = np.stack(np.meshgrid(*[z] * k, indexing="ij"), -1).reshape(-1, k)
    weights = functools.reduce(np.multiply.outer, [w / w.sum()] * k).ravel()
    keep = weights > 1e-18
    return torch.tensor(nodes[keep]), torch.tensor(weights[keep])


def step(stepper, field, noise, x: torch.Tensor, h: float, dw: torch.Tensor) -> torch.Tensor:
    """One step of the single token x for each row of dw."""
    many = x.expand(len(dw), 1, len(x))
    size = torch.full((len(dw), 1, 1), h, dtype=F64)
    return stepper(h).step(Flow(as_field(field)), noise, many, size, 0 * size, dw.unsqueeze(1))[:, 0]


def mean_rate(stepper, field, noise, x, h, phi) -> float:
    """(E phi(x') - phi(x)) / h, by quadrature over dW."""
    nodes, weights = gauss(noise.brownian_dim(x[None]))
    return float((weights * (phi(step(stepper, field, noise, x, h, math.sqrt(h) * nodes)) - phi(x))).sum() / h)


def limit(rate) -> float:
    """A rate at h -> 0 by two Richardson steps: error O(h^3)."""
    a, b, c = (rate(h) for h in (4e-4, 2e-4, 1e-4))
    return (8 * c - 6 * b + a) / 3


@pytest.mark.parametrize(("stepper", "process"), PAIRS)
def test_one_step_has_the_generator_of_000_5(stepper, process) -> None:
    x = torch.full((3,), 1 / math.sqrt(3), dtype=F64)
    noise = MatrixNoise(M, process=process)
    rate = limit(lambda h: mean_rate(stepper, torch.zeros_like, noise, x, h, lambda y: y[..., 0]))
    expected = (-4 - PROCESSES[process]) / math.sqrt(3)  # -2, -3, -4, -1 over sqrt 3
    assert rate == pytest.approx(expected, abs=3e-7)


def test_the_chain_at_finite_eps() -> None:
    """The numbers of [Helmholtz Transformer, no. 5] belong to noise along one random axis, +-sqrt(6 M_kk) e_k; Gaussian
    noise has others."""
    x = torch.full((3,), 1 / math.sqrt(3), dtype=F64)
    axes = math.sqrt(3) * torch.cat([torch.eye(3, dtype=F64), -torch.eye(3, dtype=F64)])
    for eps, printed, gaussian in (
        (1e-2, -1.4492, -1.2965),
        (1e-3, -1.18746, -1.1696511343),
        (1e-4, -1.15801, -1.1562010689),
    ):
        moved = step(NoisyLayer, torch.zeros_like, MatrixNoise(M), x, eps, math.sqrt(eps) * axes)
        digits = len(str(printed)) - 3
        assert round(float((moved[:, 0] - x[0]).mean() / eps), digits) == printed
        rate = mean_rate(NoisyLayer, torch.zeros_like, MatrixNoise(M), x, eps, lambda y: y[..., 0])
        assert round(rate, len(str(gaussian)) - 3) == gaussian


def waves(x: torch.Tensor) -> torch.Tensor:
    j = torch.arange(1, 3, dtype=x.dtype)
    return 0.5 * torch.sin(x.unsqueeze(-1) * j + x.sum(-1)[..., None, None])


@pytest.mark.parametrize(("stepper", "process"), PAIRS)
def test_one_step_with_a_field_and_noise_that_depends_on_the_state(stepper, process) -> None:
    """(E phi(x') - phi) / h -> <P f + beta, grad phi> + tr(M P D^2 phi P) - tr(P M) <x, grad phi>, phi quadratic."""
    x = retract(torch.tensor([1.0, -2.0, 0.5], dtype=F64))
    c, f = (torch.tensor(v, dtype=F64) for v in ([0.3, 1.0, -0.4], [0.7, -0.2, 0.5]))
    q = torch.tensor([[0.2, 0.5, 0.0], [0.5, -0.3, 0.1], [0.0, 0.1, 0.4]], dtype=F64)
    noise = StateNoise(waves, process=process)
    p, m = torch.eye(3, dtype=F64) - torch.outer(x, x), waves(x) @ waves(x).T / 2
    drift = p @ f + process.drift(noise, x[None])[0]
    slope = c + 2 * q @ x
    expected = drift @ slope + torch.trace(m @ p @ (2 * q) @ p) - torch.trace(p @ m) * (x @ slope)

    def phi(y):
        return y @ c + ((y @ q) * y).sum(-1)

    rate = limit(lambda h: mean_rate(stepper, lambda y: project(y, f.expand_as(y)), noise, x, h, phi))
    assert rate == pytest.approx(float(expected), abs=1e-10)


def test_one_step_by_hand() -> None:
    x, dw, h = torch.tensor([0.6, 0.8], dtype=F64), torch.tensor([[0.1, -0.3]], dtype=F64), 0.25
    m = torch.tensor([[2.0, 0.0], [0.0, 0.5]], dtype=F64)  # sigma = diag(2, 1)
    force = torch.tensor([1.0, 0.0], dtype=F64)
    tangent = torch.tensor([-0.8, 0.6], dtype=F64)

    def increment(y, t, factor):  # h (P f + factor P M y) + P sigma dW in the coordinate along t
        along = h * float(t @ force + factor * t @ m @ y) + float(t @ (torch.tensor([2.0, 1.0], dtype=F64) * dw[0]))
        return along * t

    def field(y):
        return project(y, force.expand_as(y))

    noise = MatrixNoise(m, process=Ito())
    assert (step(EulerMaruyama, field, noise, x, h, dw)[0] - retract(x + increment(x, tangent, 0))).abs().max() < 1e-15
    first = increment(x, tangent, 1)  # beta - beta_S = P M x for Ito
    y = retract(x + first)
    second = increment(y, torch.stack([-y[1], y[0]]), 1)
    assert (step(StochasticHeun, field, noise, x, h, dw)[0] - retract(x + (first + second) / 2)).abs().max() < 1e-15
    layer = step(NoisyLayer, field, MatrixNoise(m), x, h, dw)[0]
    kick = torch.tensor([0.2, -0.3], dtype=F64)
    assert (layer - retract(x + h * project(x, force) + kick)).abs().max() < 1e-15


@pytest.mark.parametrize(
    ("noisy", "quiet"), [(EulerMaruyama, ProjectedEuler), (StochasticHeun, Heun), (NoisyLayer, Layer)]
)
def test_without_noise_they_are_the_steppers_of_flows(noisy, quiet) -> None:
    x0 = Uniform(n=6, dim=3).sample(4, seed=1)
    field = SA(beta=2.0)
    still = integrate(field, x0, [0.5, 1.0], stepper=noisy(0.1), noise=IsotropicNoise(0.0)).states
    assert torch.equal(still, integrate(field, x0, [0.5, 1.0], stepper=quiet(0.1)).states)


# Batches --------------------------------------------------------------------------------------------------------------


def noises():
    return [
        IsotropicNoise(0.2),
        MatrixNoise(tilted(), common=True, process=Stratonovich()),
        StateNoise(waves, process=DivergenceForm()),
        StateNoise(waves),
    ]


@pytest.mark.parametrize("stepper", STEPPERS)
@pytest.mark.parametrize("noise", noises())
def test_a_system_does_not_depend_on_its_batch(stepper, noise) -> None:
    """Alone, in parts and in another order a system has the same bits."""
    if stepper is NoisyLayer:
        noise = replace(noise, process=LayerNormChain())
    x0 = Uniform(n=5, dim=3).sample(6, seed=3)
    whole = make_problem(SA(beta=1.5), x0, [0.2, 0.5], stepper=stepper(0.05), noise=noise, seed=9)
    states = whole.run().states
    split = torch.cat([whole.part(a, b).run().states for a, b in ((0, 1), (1, 4), (4, 6))], 1)
    assert torch.equal(states, split)
    order = (3, 5, 0, 2, 4, 1)
    shuffled = replace(whole, start=whole.start[list(order)], systems=order)
    assert torch.equal(states[:, order], shuffled.run().states)
    assert not torch.equal(
        states, make_problem(SA(beta=1.5), x0, [0.2, 0.5], stepper=stepper(0.05), noise=noise).run().states
    )
    assert (states.norm(dim=-1) - 1).abs().max() < 1e-15


def test_float32_sees_the_same_noise() -> None:
    x0 = Uniform(n=4, dim=3).sample(5, seed=0)
    runs = [
        integrate(SA(beta=1.0), x, [1.0], stepper=EulerMaruyama(0.01), noise=MatrixNoise(tilted())).states[-1]
        for x in (x0, x0.float())
    ]
    assert runs[1].dtype == torch.float32
    assert (runs[0] - runs[1]).abs().max() < 2e-6


def test_dw_has_the_requested_steps() -> None:
    """A time between two steps shortens them: 3 steps of 0.1 to t = 0.3, then 3 of 0.25/3 to t = 0.55."""
    x0 = torch.tensor([[[1.0, 0.0]]], dtype=F64)
    noise = IsotropicNoise(0.5)
    run = integrate(torch.zeros_like, x0, [0.3, 0.55], stepper=EulerMaruyama(0.1), noise=noise, seed=4).states[:, 0, 0]
    numbers, angle, seen = RandomSource(4, [0]), 0.0, []
    for h in [0.1] * 3 + [0.25 / 3] * 3:
        z = numbers.normal(1, 2)[0, 0]
        angle += math.atan(math.sqrt(h) * float(z[1] * math.cos(angle) - z[0] * math.sin(angle)))
        seen.append([math.cos(angle), math.sin(angle)])
    assert (run - torch.tensor([seen[2], seen[5]], dtype=F64)).abs().max() < 1e-15


def test_gradients_go_through_the_steps() -> None:
    x0 = Uniform(n=2, dim=2).sample(seed=2)
    for stepper, process in (
        (EulerMaruyama, DivergenceForm()),
        (StochasticHeun, Ito()),
        (NoisyLayer, LayerNormChain()),
    ):
        noise = StateNoise(waves, process=process)

        def end(x, stepper=stepper, noise=noise):
            return integrate(SA(beta=1.0), x, [0.2], stepper=stepper(0.1), noise=noise, normalize=True).states[-1]

        assert torch.autograd.gradcheck(end, (x0.clone().requires_grad_(),))


def test_events_happen_at_the_ends_of_steps() -> None:
    x0 = Uniform(n=4, dim=3).sample(20, seed=0)
    run = integrate(
        SA(beta=1.0), x0, [0.33, 9.0], stepper=EulerMaruyama(0.1), noise=IsotropicNoise(1e-3), events=[HittingTime(0.1)]
    )
    assert bool((run.event_times[0] > 0.33).all())
    steps = (run.event_times[0] - 0.33) / ((9 - 0.33) / 87)
    assert (steps - steps.round()).abs().max() < 1e-9


def test_a_velocity_that_is_not_finite_ends_its_system_only() -> None:
    def field(x):
        return torch.where(x[..., :1].amin(-2, keepdim=True) < -0.5, torch.nan, 1.0) * torch.zeros_like(x)

    x0 = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]], dtype=F64)
    run = integrate(field, x0, [0.1, 0.2], stepper=EulerMaruyama(0.1), noise=IsotropicNoise(1e-4))
    assert run.outcome.statuses == (Status.FINISHED, Status.NOT_FINITE)
    assert run.outcome.times == (0.2, 0.1)
    assert bool(torch.isfinite(run.states[:, 0]).all())


def test_progress_is_reported() -> None:
    told = []
    x0 = torch.tensor([[1.0, 0.0]], dtype=F64)
    integrate(torch.zeros_like, x0, [1.0], stepper=EulerMaruyama(0.1), noise=IsotropicNoise(0.1), progress=told.append)
    assert told[0] == pytest.approx(0.1)
    assert told[-1] == 1.0


# Residual streams -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream(Field):
    """y' = g with a constant force, a residual stream."""

    g: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def space(self):
        return StateSpace.STREAM

    def velocity(self, y, weights=None, *, t=0.0):
        return torch.tensor(self.g, dtype=y.dtype).expand_as(y)

    def direction(self, y):
        return retract(y)

    def radius(self, y):
        return y.norm(dim=-1)


@pytest.mark.parametrize("stepper", STEPPERS)
def test_noise_is_added_to_a_residual_stream(stepper) -> None:
    """y(t) = y0 + t g + sigma W(t) exactly, for every stepper."""
    y0 = 5 * Uniform(n=2, dim=3).sample(4, seed=1)
    g = (0.1, -0.2, 0.3)
    noise = MatrixNoise(tilted())
    run = integrate(Stream(g), y0, [0.5], stepper=stepper(0.1), noise=noise, seed=3)
    streams = RandomSource(3, range(4))
    w = math.sqrt(0.1) * sum(streams.normal(2, 3) for _ in range(5))
    expected = y0 + 0.5 * torch.tensor(g, dtype=F64) + w @ noise.root
    assert (run.trajectory.radius[0].unsqueeze(-1) * run.states[0] - expected).abs().max() < 5e-15


@pytest.mark.parametrize("stepper", STEPPERS)
def test_directions_of_a_residual_stream_are_the_chain_with_m_over_radius_squared(stepper) -> None:
    x, radius = torch.full((3,), 1 / math.sqrt(3), dtype=F64), 4.0
    rate = limit(
        lambda h: mean_rate(
            stepper, Stream((0.7, 0.1, 0.4)), MatrixNoise(M), radius * x, h, lambda y: retract(y)[..., 0]
        )
    )
    drift = project(x, torch.tensor([0.7, 0.1, 0.4], dtype=F64))[0] / radius
    assert rate == pytest.approx(float(drift) - 2 / math.sqrt(3) / radius**2, abs=1e-11)


@pytest.mark.parametrize("stepper", STEPPERS)
def test_state_dependent_noise_on_a_stream_is_ito(stepper) -> None:
    """dy_a = y_a dW_a keeps its mean and E y^2 = y0^2 e^t: one step to O(h^2)."""
    y = torch.tensor([1.0, -2.0], dtype=F64)
    noise = StateNoise(torch.diag_embed)
    first = limit(lambda h: mean_rate(stepper, Stream((0.0, 0.0)), noise, y, h, lambda z: z[..., 1]))
    second = limit(lambda h: mean_rate(stepper, Stream((0.0, 0.0)), noise, y, h, lambda z: z[..., 1] ** 2))
    assert first == pytest.approx(0.0, abs=1e-9)
    assert second == pytest.approx(4.0, abs=1e-8)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", [Stratonovich(), Ito(), DivergenceForm()])
def test_the_layer_is_one_process_only(process) -> None:
    noise = IsotropicNoise(0.1, process=process)
    with pytest.raises(HelmscopeError) as error:
        NoisyLayer(0.1).check(noise)
    assert str(error.value) == (
        f"process is {process!r}, but NoisyLayer simulates the layer-norm chain only: use LayerNormChain(), or another "
        "stepper such as EulerMaruyama(h)"
    )
    for stepper in (EulerMaruyama(0.1), StochasticHeun(0.1)):
        with pytest.raises(HelmscopeError) as error:
            check_noise(Stream(), noise, stepper)
        assert str(error.value) == (
            f"process is {process!r}, but noise is added to a residual stream without projection, and its directions "
            "then follow LayerNormChain()"
        )


@pytest.mark.parametrize("stepper", STEPPERS)
def test_step_sizes(stepper) -> None:
    assert stepper.weak_order == 1
    with pytest.raises(HelmscopeError, match="h is 0, but it must be a finite number > 0"):
        stepper(0)
    x0 = torch.tensor([[1.0, 0.0]], dtype=F64)
    arguments = {"stepper": stepper(0.3), "noise": IsotropicNoise(0.1)}
    if stepper is NoisyLayer:
        with pytest.raises(HelmscopeError, match=r"times must be multiples of its h=0\.3"):
            integrate(torch.zeros_like, x0, [1.0], **arguments)
    else:
        assert integrate(torch.zeros_like, x0, [1.0], **arguments).outcome.ok


def test_the_default_step_under_noise_is_the_same_everywhere():
    x0, noise = hs.Uniform(4, 3).sample(2), IsotropicNoise(0.1)
    run = integrate(SA(beta=4.0), x0, [0.0, 0.3], noise=noise, seed=3)
    assert run.problem.stepper == EulerMaruyama(NOISY_STEP)
    chosen = integrate(SA(beta=4.0), x0, [0.0, 0.3], noise=noise, seed=3, stepper=EulerMaruyama(0.02))
    assert torch.equal(run.states, chosen.states)
    spec = hs.jobs.SimulationSpec(nu=0.1, n=4, batch=2)
    assert spec.problem().stepper == run.problem.stepper
    start = hs.Uniform(4, 3)
    diagram = hs.phase_diagram(SA, betas=[1.0], times=[0.1], start=start, samples=2, noise=noise)
    assert diagram.attrs["stepper"] == repr(run.problem.stepper)


def test_the_default_step_is_stable_where_a_larger_one_is_not():
    """Under USA with beta = 4 and little noise all tokens of a cluster stay together; with steps of 0.05 they jump."""
    x0 = (torch.eye(3, dtype=torch.float64)[:1].repeat(16, 1)).expand(32, 16, 3)
    options = {"noise": IsotropicNoise(0.002), "seed": 1}
    together = integrate(USA(beta=4.0), x0, [1.0], **options).states[-1]
    apart = integrate(USA(beta=4.0), x0, [1.0], **options, stepper=EulerMaruyama(0.05)).states[-1]
    assert float(1 - (together @ together.mT).mean()) < 0.01
    assert float(1 - (apart @ apart.mT).mean()) > 0.03
