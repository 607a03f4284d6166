"""Laws of noisy flows: weak and strong orders, independence, decay of harmonics, stationary laws on the circle.

On the circle a step of size h acts on functions as the operator (T_h phi)(t) = E phi(t'), t' the angle after one step
from t. Here it is a matrix on Fourier modes, exact to quadrature over dW: no sampling stands between a stepper and its
weak order or its stationary law.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.linalg import expm
from scipy.special import eval_gegenbauer
from scipy.stats import chi2

from helmscope.fields.field import as_field
from helmscope.fields.noise import (
    DivergenceForm,
    IsotropicNoise,
    Ito,
    LayerNormChain,
    MatrixNoise,
    StateNoise,
    Stratonovich,
)
from helmscope.geometry.sphere import project
from helmscope.solve.euler_maruyama import EulerMaruyama
from helmscope.solve.flow import Flow
from helmscope.solve.integrate import integrate
from helmscope.solve.noisy_layer import NoisyLayer
from helmscope.solve.random_source import RandomSource
from helmscope.solve.stochastic_heun import StochasticHeun

F64 = torch.float64
FACTORS = {LayerNormChain(): -2, Stratonovich(): -1, Ito(): 0, DivergenceForm(): -2}  # beta / (P M x) for d = 2
PAIRS = [(stepper, process) for stepper in (EulerMaruyama, StochasticHeun) for process in FACTORS]
PAIRS.append((NoisyLayer, LayerNormChain()))

MODES = np.arange(-20, 21)
ANGLES = 2 * np.pi * np.arange(len(MODES)) / len(MODES)
TO_GRID = np.exp(1j * np.outer(ANGLES, MODES))
TO_MODES = TO_GRID.conj().T / len(MODES)
ZERO, TWO = 20, 22  # where modes 0 and 2 stand


def transition(stepper, field, noise, h: float, nodes: int = 24) -> np.ndarray:
    """T_h on Fourier modes; column k holds the modes of E e^{i k t'}."""
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    pairs = np.stack(np.meshgrid(z, z, indexing="ij"), -1).reshape(-1, 2)
    weights = np.outer(w, w).ravel() / w.sum() ** 2
    start = np.stack([np.cos(ANGLES), np.sin(ANGLES)], -1)
    x = torch.tensor(np.repeat(start, len(pairs), 0)).unsqueeze(1)
    dw = math.sqrt(h) * torch.tensor(np.tile(pairs, (len(ANGLES), 1))).unsqueeze(1)
    size = torch.full((len(x), 1, 1), h, dtype=F64)
    y = stepper(h).step(Flow(as_field(field)), noise, x, size, 0 * size, dw)
    turn = (y[:, 0, 0] + 1j * y[:, 0, 1]).numpy().reshape(len(ANGLES), -1)
    return TO_MODES @ np.stack([np.power(turn, k) @ weights for k in MODES], -1)


def generator(diffusion: np.ndarray, drift: np.ndarray) -> np.ndarray:
    """phi -> drift phi' + diffusion phi'' on Fourier modes, the coefficients given on the grid of angles."""
    return TO_MODES @ ((drift[:, None] * (1j * MODES) - diffusion[:, None] * MODES**2) * TO_GRID)


# Weak order -----------------------------------------------------------------------------------------------------------

FORCE = np.array([0.3, 0.7])
SIGMA = np.array([[0.6, 0.2], [0.1, 0.4]])


def weak_order(stepper, noise, exact: np.ndarray) -> float:
    """Of the greatest error of E[cos t + sin 2 t] at time 1 over all starts."""
    phi = TO_MODES @ (np.cos(ANGLES) + np.sin(2 * ANGLES))

    def field(x: torch.Tensor) -> torch.Tensor:
        return project(x, torch.tensor(FORCE).expand_as(x))

    errors = []
    for count in (32, 64, 128):
        ends = np.linalg.matrix_power(transition(stepper, field, noise, 1 / count), count)
        errors.append(np.abs(TO_GRID @ (ends - exact) @ phi).max())
    assert errors[0] < 0.03
    assert errors[-1] > 1e-4  # far above the quadrature's error
    return -np.polyfit(range(3), np.log2(errors), 1)[0]


@pytest.mark.parametrize(("stepper", "process"), PAIRS)
def test_weak_order_one(stepper, process) -> None:
    m = SIGMA @ SIGMA.T / 2
    x, tangent = (np.stack(v, -1) for v in ((np.cos(ANGLES), np.sin(ANGLES)), (-np.sin(ANGLES), np.cos(ANGLES))))
    drift = tangent @ FORCE + FACTORS[process] * (tangent @ m * x).sum(1)
    exact = expm(generator((tangent @ m * tangent).sum(1), drift))
    order = weak_order(stepper, MatrixNoise(torch.tensor(m), process=process), exact)
    assert order == pytest.approx(stepper.weak_order, abs=0.05)  # measured 0.97 to 1.02


@pytest.mark.parametrize(("stepper", "process"), PAIRS)
def test_weak_order_one_with_noise_that_depends_on_the_state(stepper, process) -> None:
    """sigma = s(t) I, s = 0.4 + 0.2 cos t: the diffusion s^2 / 2 has drifts 0, s s' / 2, 0, s s'."""
    s, slope = 0.4 + 0.2 * np.cos(ANGLES), -0.2 * np.sin(ANGLES)
    share = {LayerNormChain(): 0, Stratonovich(): 0.5, Ito(): 0, DivergenceForm(): 1}[process]
    drift = np.stack([-np.sin(ANGLES), np.cos(ANGLES)], -1) @ FORCE + share * s * slope
    noise = StateNoise(lambda x: (0.4 + 0.2 * x[..., :1, None]) * torch.eye(2, dtype=F64), process=process)
    order = weak_order(stepper, noise, expm(generator(s * s / 2, drift)))
    assert order == pytest.approx(stepper.weak_order, abs=0.05)


# Strong order ---------------------------------------------------------------------------------------------------------

FINE = 2**12
FORCE_3 = np.array([0.3, -0.5, 0.4])
TILTED = torch.tensor([[0.30, 0.05, -0.10], [0.05, 0.15, 0.08], [-0.10, 0.08, 0.25]], dtype=F64)


@functools.cache
def paths() -> np.ndarray:
    """Increments of 400 Brownian paths in R^3 over t = 1, (step, path, 3)."""
    return np.random.default_rng(2).standard_normal((FINE, 400, 3)) / math.sqrt(FINE)


@functools.cache
def reference(factor: int) -> np.ndarray:
    """dX = (P f + factor P M X - tr(P M) X) dt + P sigma dW by plain Euler in R^3 on the finest grid."""
    m = TILTED.numpy()
    values, vectors = np.linalg.eigh(2 * m)
    sigma = vectors * np.sqrt(values) @ vectors.T
    x = np.tile(np.array([0.6, 0.0, 0.8]), (400, 1))

    def tangent(v: np.ndarray) -> np.ndarray:
        return v - (x * v).sum(1, keepdims=True) * x

    for dw in paths():
        pull = np.trace(m) - (x * (x @ m)).sum(1, keepdims=True)
        x = x + (tangent(FORCE_3 + factor * x @ m) - pull * x) / FINE + tangent(dw @ sigma)
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return x


@pytest.mark.parametrize(("stepper", "process"), PAIRS)
def test_strong_order_one_half(stepper, process) -> None:
    noise = MatrixNoise(TILTED, process=process)
    flow = Flow(as_field(lambda y: project(y, torch.tensor(FORCE_3).expand_as(y))))
    exact = reference(-3 if process == DivergenceForm() else FACTORS[process])
    counts, errors = (8, 16, 32, 64, 128), []
    for count in counts:
        coarse = torch.tensor(paths().reshape(count, FINE // count, 400, 3).sum(1))
        x = torch.tensor([[0.6, 0.0, 0.8]], dtype=F64).expand(400, 1, 3)
        for dw in coarse:
            size = torch.full((400, 1, 1), 1 / count, dtype=F64)
            x = stepper(1 / count).step(flow, noise, x, size, 0 * size, dw.unsqueeze(1))
        errors.append(math.sqrt(((x[:, 0].numpy() - exact) ** 2).sum(1).mean()))
    order = -np.polyfit(np.log2(counts), np.log2(errors), 1)[0]
    assert order == pytest.approx(stepper.strong_order, abs=0.1)  # measured 0.48 to 0.56
    assert errors[-1] < 0.05


# Independence ---------------------------------------------------------------------------------------------------------


def test_streams_are_independent_and_normal() -> None:
    draws = torch.cat([RandomSource(seed, range(50)).normal(1, 4000)[:, 0] for seed in range(4)])
    correlation = torch.corrcoef(draws) - torch.eye(200)
    assert correlation.abs().max() < 5.5 / math.sqrt(4000)  # 19,900 pairs
    assert abs(float(draws.mean())) < 4 / math.sqrt(8e5)
    assert abs(float(draws.var()) - 1) < 4 * math.sqrt(2 / 8e5)
    assert abs(float((draws**4).mean()) - 3) < 4 * math.sqrt(96 / 8e5)


def test_common_noise_moves_tokens_follow_leaders() -> None:
    """Equal tokens stay equal under common noise and part under noise of their own; systems part under both."""
    x0 = torch.tensor([1.0, 0.0, 0.0], dtype=F64).expand(3, 4, 3)
    for stepper in (EulerMaruyama, StochasticHeun, NoisyLayer):
        for common in (True, False):
            noise = IsotropicNoise(0.5, common=common)
            x = integrate(torch.zeros_like, x0, [1.0], stepper=stepper(0.1), noise=noise).states[-1]
            apart = (x - x[:, :1]).norm(dim=-1)
            assert bool((apart == 0).all()) == common
            assert bool((x[0, 0] - x[1, 0]).norm() > 0.1)


# Isotropic noise ------------------------------------------------------------------------------------------------------


def zonal(k: int, d: int, t: float) -> float:
    """The Gegenbauer polynomial of degree k on S^(d-1), 1 at t = 1."""
    return eval_gegenbauer(k, d / 2 - 1, t) / eval_gegenbauer(k, d / 2 - 1, 1.0)


@functools.cache
def decay(k: int, d: int, spread: float) -> float:
    """What a degree-k harmonic keeps in one Euler-Maruyama step: E P_k(1 / sqrt(1 + |p|^2)), p ~ N(0, spread I_{d-1}).

    The step goes in every direction alike, so harmonics are its eigenfunctions.
    """
    return quad(
        lambda u: zonal(k, d, 1 / math.sqrt(1 + spread * u)) * chi2.pdf(u, d - 1),
        0,
        60 + 8 * d,
        epsabs=1e-13,
        limit=200,
    )[0]


@pytest.mark.parametrize("d", [3, 6])
@pytest.mark.parametrize("k", [1, 2])
def test_harmonics_decay_at_their_rates(d, k) -> None:
    """e^{-nu k (k + d - 2) t} with weak order 1, from the exact factor of a step."""
    nu, exact = 0.2, math.exp(-0.2 * k * (k + d - 2))
    errors = [abs(decay(k, d, 2 * nu / n) ** n - exact) for n in (64, 128)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("stepper", [EulerMaruyama, StochasticHeun, NoisyLayer])
def test_simulated_harmonics_decay(stepper) -> None:
    """10,000 tokens on S^3 at t = 1 within 4 standard errors, where the bias of the step is half of one."""
    d, nu, count = 4, 0.1, 200
    x0 = torch.zeros(100, 100, d, dtype=F64)
    x0[..., 0] = 1
    x = integrate(torch.zeros_like, x0, [1.0], stepper=stepper(1 / count), noise=IsotropicNoise(nu), seed=1).states[-1]
    for k in (1, 2):
        value = torch.tensor(zonal(k, d, x[..., 0].numpy())).mean(1)
        error = float(value.std()) / math.sqrt(len(value))
        assert error < 0.006
        assert abs(float(value.mean()) - math.exp(-nu * k * (k + d - 2))) < 4 * error
        if stepper is EulerMaruyama:
            assert abs(float(value.mean()) - decay(k, d, 2 * nu / count) ** count) < 4 * error


# Stationary laws on the circle, sigma = diag(2, 1) --------------------------------------------------------------------

# E cos 2t: uniform; rho ~ 1 / sqrt(4 sin^2 + cos^2); rho ~ 1 / (4 sin^2 + cos^2) from (Sigma rho)'' = 0; uniform
STATIONARY = {LayerNormChain(): 0.0, Stratonovich(): 0.16912003679316695, Ito(): 1 / 3, DivergenceForm(): 0.0}


def wide(process) -> MatrixNoise:
    return MatrixNoise(torch.diag(torch.tensor([2.0, 0.5], dtype=F64)), process=process)


@functools.cache
def kernel_law(stepper, process, h: float) -> float:
    """E cos 2t under the exact stationary law of one step: the left eigenvector of T_h for the eigenvalue 1."""
    values, vectors = np.linalg.eig(transition(stepper, torch.zeros_like, wide(process), h, nodes=40).T)
    law = vectors[:, np.abs(values - 1).argmin()]
    return float((law[TWO] / law[ZERO]).real)


def test_the_laws_by_integration() -> None:
    """Of stationary densities ~ (4 sin^2 + cos^2)^-p, p = (d + beta / P M x) / d = 0, 1/2, 1, 0."""

    def moment(p: float) -> float:
        weight = lambda t: (4 * math.sin(t) ** 2 + math.cos(t) ** 2) ** -p  # noqa: E731
        above = quad(lambda t: math.cos(2 * t) * weight(t), 0, math.pi, epsabs=1e-13)[0]
        return above / quad(weight, 0, math.pi, epsabs=1e-13)[0]

    for process, factor in FACTORS.items():
        assert moment((2 + factor) / 2) == pytest.approx(STATIONARY[process], abs=1e-14)


@pytest.mark.parametrize(("stepper", "process"), PAIRS)
def test_stationary_laws_of_one_step(stepper, process) -> None:
    a, b, c = (kernel_law(stepper, process, h) for h in (0.005, 0.0025, 0.00125))
    assert (8 * c - 6 * b + a) / 3 == pytest.approx(STATIONARY[process], abs=2e-5)


def test_the_chain_is_uniform_beyond_every_power_of_eps() -> None:
    """[Helmholtz Transformer, no. 5]: E cos 2t = .0005 at eps = .02."""
    assert round(kernel_law(NoisyLayer, LayerNormChain(), 0.02), 4) == 0.0005
    assert abs(kernel_law(NoisyLayer, LayerNormChain(), 0.005)) < 1e-10


def simulated_law(stepper, process, h: float) -> tuple[float, float]:
    """E cos 2t and its standard error from 100 systems of 20 tokens, over 11 times from t = 1.5 to t = 6.5."""
    x0 = torch.tensor([1.0, 0.0], dtype=F64).expand(100, 20, 2)
    times = np.arange(3, 14) / 2
    x = integrate(torch.zeros_like, x0, times, stepper=stepper(h), noise=wide(process), seed=6).states
    systems = (2 * x[..., 0] ** 2 - 1).mean((0, 2))
    return float(systems.mean()), float(systems.std()) / math.sqrt(len(systems))


@pytest.mark.parametrize(("stepper", "process"), PAIRS)
def test_simulations_have_the_law_of_their_step(stepper, process) -> None:
    mean, error = simulated_law(stepper, process, 0.02)
    assert error < 0.007
    assert abs(mean - kernel_law(stepper, process, 0.02)) < 4 * error


@pytest.mark.parametrize(
    ("stepper", "process", "h"),
    [
        (NoisyLayer, LayerNormChain(), 0.01),
        (StochasticHeun, Stratonovich(), 0.004),
        (StochasticHeun, Ito(), 0.01),
        (StochasticHeun, DivergenceForm(), 0.004),
    ],
)
def test_simulated_stationary_laws(stepper, process, h) -> None:
    """Within 4 standard errors of what theory says; the step's bias, known from its exact law, is below one."""
    mean, error = simulated_law(stepper, process, h)
    assert abs(kernel_law(stepper, process, h) - STATIONARY[process]) < error < 0.007
    assert abs(mean - STATIONARY[process]) < 4 * error
