"""Gaussians on R^d: known digits, moment equations by another integrator, tilted means, blow-up, faults."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.stats import multivariate_normal

import helmscope as hs
from helmscope.meanfield import (
    Gaussian,
    attention_blow_up_time,
    evolve_attention_gaussian,
    evolve_gaussian,
    gaussian_entropy_rate,
    gaussian_free_energy,
    gaussian_free_energy_rate,
    stationary_gaussian,
)
from helmscope.types import Status


def matrix(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


MEAN, COV = torch.tensor([1.0, -0.5], dtype=torch.float64), matrix([1.0, 0.2], [0.2, 0.5])
START = Gaussian(MEAN, COV)
DRIFT, NOISE = matrix([-1.0, 0.7], [-0.4, -0.3]), matrix([0.5, 0.1], [0.1, 0.2])


def test_entropy_and_distance() -> None:
    assert START.entropy == pytest.approx(multivariate_normal(MEAN.numpy(), COV.numpy()).entropy(), abs=1e-14)
    other = Gaussian(MEAN + 3, COV)
    assert START.w2(other) == pytest.approx(3 * math.sqrt(2), abs=1e-7)


def test_known_digits() -> None:
    ou = Gaussian(torch.zeros(2), matrix([2.0, 0.5], [0.5, 1.0]))
    rate = gaussian_entropy_rate(ou, drift=-matrix([1.0, 0.5], [0.0, 2.0]), diffusion=matrix([1.0, 0.0], [0.0, 2.0]))
    assert rate.total == pytest.approx(-1 / 7, abs=1e-15)
    stiff, swirl = matrix([2.0, 0.3], [0.3, 1.0]), matrix([0.0, 1.5], [-1.5, 0.0])
    fall = gaussian_free_energy_rate(Gaussian(torch.zeros(2), COV), drift=swirl - stiff, nu=0.4)
    assert fall.relaxation == pytest.approx(-3.116739130434783, abs=1e-14)
    assert fall.total == pytest.approx(-3.0417391304347827, abs=1e-14)
    found = stationary_gaussian(drift=-matrix([1.0, 0.5], [0.5, 2.0]), diffusion=matrix([1.0, 0.0], [0.0, 4.0]))
    assert torch.allclose(found.covariance, matrix([9 / 7, -4 / 7], [-4 / 7, 15 / 7]), rtol=0, atol=1e-14)
    start = Gaussian(torch.tensor([2.0], dtype=torch.float64), matrix([1.69]))
    later = evolve_gaussian(start, drift=matrix([-1.5]), diffusion=0.4, times=[0.1])[0]
    assert later.mean.item() == pytest.approx(1.7214159528501156, rel=1e-15)
    assert math.sqrt(later.covariance.item()) == pytest.approx(1.1493902444790651, rel=1e-15)


def reference(rate: object, start: Gaussian, t: float) -> tuple[np.ndarray, np.ndarray]:
    """The moments at t by Radau's method, from (m', C') = rate(m, C)."""
    dim = start.dim

    def flat(_: float, y: np.ndarray) -> np.ndarray:
        m, c = rate(y[:dim], y[dim:].reshape(dim, dim))  # type: ignore[operator]
        return np.concatenate([m, c.ravel()])

    first = np.concatenate([start.mean.numpy(), start.covariance.numpy().ravel()])
    last = solve_ivp(flat, (0, t), first, "Radau", rtol=1e-11, atol=1e-13).y[:, -1]
    return last[:dim], last[dim:].reshape(dim, dim)


@pytest.mark.parametrize("t", [0.3, 5.0])
def test_moment_equations_by_another_integrator(t: float) -> None:
    a, m, offset = DRIFT.numpy(), NOISE.numpy(), np.array([0.3, -1.0])
    path = evolve_gaussian(START, drift=DRIFT, offset=torch.from_numpy(offset), diffusion=NOISE, times=[0.0, t / 3, t])
    mean, covariance = reference(lambda x, c: (a @ x + offset, a @ c + c @ a.T + 2 * m), START, t)
    assert torch.equal(path.means[0], MEAN)
    assert np.abs(path.means[-1].numpy() - mean).max() < 1e-9
    assert np.abs(path.covariances[-1].numpy() - covariance).max() < 1e-9


def test_long_times_reach_the_stationary_law() -> None:
    offset = torch.tensor([0.3, -1.0], dtype=torch.float64)
    late = evolve_gaussian(START, drift=1e3 * DRIFT, offset=offset, diffusion=NOISE, times=[1e4])[0]
    still = stationary_gaussian(drift=1e3 * DRIFT, offset=offset, diffusion=NOISE)
    assert torch.allclose(late.mean, still.mean, rtol=1e-12, atol=0)
    assert torch.allclose(late.covariance, still.covariance, rtol=1e-12, atol=0)
    assert late.w2(still) < 1e-8


def test_rates_are_derivatives() -> None:
    h, nu = 1e-3, 0.4
    stiffness = -(DRIFT + DRIFT.mT) / 2
    path = evolve_gaussian(START, drift=DRIFT, diffusion=nu, times=[0.0, h, 2 * h, 3 * h, 4 * h])
    weights = (-25, 48, -36, 16, -3)
    entropy = sum(w * law.entropy for w, law in zip(weights, path, strict=True)) / (12 * h)
    energies = [gaussian_free_energy(law, stiffness=stiffness, nu=nu) for law in path]
    energy = sum(w * value for w, value in zip(weights, energies, strict=True)) / (12 * h)
    assert gaussian_entropy_rate(START, drift=DRIFT, diffusion=nu).total == pytest.approx(entropy, abs=1e-9)
    assert gaussian_free_energy_rate(START, drift=DRIFT, nu=nu).total == pytest.approx(energy, abs=1e-9)


def test_a_tilted_gaussian_has_the_mean_that_the_flow_uses() -> None:
    """int e^{beta <x, y>} y rho / Z = m + beta C x, by quadrature on a grid of the plane."""
    grid = torch.linspace(-12, 12, 1201, dtype=torch.float64)
    y = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2)
    beta, x = 0.8, torch.tensor([0.7, -0.4], dtype=torch.float64)
    shifted = y - MEAN
    weight = (-(shifted @ torch.linalg.inv(COV) * shifted).sum(-1) / 2 + beta * y @ x).exp()
    assert torch.allclose(weight @ y / weight.sum(), MEAN + beta * COV @ x, rtol=1e-10)


def test_attention_on_flat_space_in_closed_form() -> None:
    beta, eye = 0.7, torch.eye(2, dtype=torch.float64)
    end = attention_blow_up_time(START, beta=beta)
    assert end == pytest.approx(1 / (2 * beta * float(torch.linalg.eigvalsh(COV)[-1])), rel=1e-15)
    times = [0.3 * end, 0.9 * end, 1.5 * end]
    path = evolve_attention_gaussian(START, beta=beta, times=times)
    assert len(path) == 2
    assert path.outcome.statuses == (Status.NOT_FINITE,)
    assert path.outcome.times[0] == pytest.approx(end, rel=1e-9)
    for k, t in enumerate(times[:2]):
        inverse = torch.linalg.inv(COV) - 2 * beta * t * eye
        assert torch.allclose(path.covariances[k], torch.linalg.inv(inverse), rtol=1e-8)
        values, vectors = torch.linalg.eigh(COV)
        growth = math.exp(t) / (1 - 2 * beta * t * values).sqrt()
        assert torch.allclose(path.means[k], vectors @ (growth * (vectors.mT @ MEAN)), rtol=1e-8)


def test_attention_with_noise_and_other_values_by_another_integrator() -> None:
    beta, value = 0.5, matrix([-1.0, 0.3], [0.2, -0.5])
    v, m = value.numpy(), NOISE.numpy()

    def rate(x: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return v @ (x + beta * c @ x), beta * (v @ c @ c + c @ c @ v.T) + 2 * m

    mean, covariance = reference(rate, START, 2.0)
    path = evolve_attention_gaussian(START, beta=beta, value=value, diffusion=NOISE, times=[2.0])
    assert np.abs(path[0].mean.numpy() - mean).max() < 1e-9
    assert np.abs(path[0].covariance.numpy() - covariance).max() < 1e-9
    assert path.outcome.ok


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Gaussian(torch.zeros(2), torch.ones(2, 2)),
            "covariance has the eigenvalue .*positive definite",
        ),
        (lambda: Gaussian(torch.zeros(2), torch.eye(3)), r"covariance is .*, but it must be a matrix \(2, 2\)"),
        (lambda: Gaussian([0.0], torch.eye(1)), "mean is .*, but it must be a vector"),
        (lambda: Gaussian(torch.zeros(2), matrix([1.0, 0.5], [0.0, 1.0])), "covariance differs from its transpose"),
        (lambda: Gaussian(torch.zeros(2), matrix([1.0, 0.0], [0.0, -1.0])), "covariance has the eigenvalue -1"),
        (lambda: Gaussian(torch.full((1,), math.nan), torch.eye(1)), "mean is .*, but it must hold finite"),
        (
            lambda: START.w2(Gaussian(torch.zeros(1), torch.eye(1))),
            "other is .* a Gaussian of dimension 2",
        ),
        (lambda: evolve_gaussian(START, drift=torch.eye(3), times=[1]), "drift is .*, but it must be a matrix"),
        (lambda: evolve_gaussian(START, drift=DRIFT, times=[1], diffusion=-1.0), "diffusion is -1.0"),
        (lambda: evolve_gaussian(START, drift=DRIFT, times=[2, 1]), "times must increase"),
        (lambda: evolve_gaussian("rho", drift=DRIFT, times=[1]), "start is 'rho', but it must be a Gaussian"),
        (lambda: stationary_gaussian(drift=torch.eye(2), diffusion=1.0), "drift has an eigenvalue with real part 1"),
        (
            lambda: evolve_attention_gaussian(START, beta=-1.0, times=[1]),
            "beta is -1.0, but it must be a finite",
        ),
        (lambda: gaussian_free_energy(START, stiffness=DRIFT, nu=1.0), "stiffness differs from its transpose"),
        (
            lambda: gaussian_free_energy_rate(START, drift=DRIFT, nu=-1.0),
            "nu is -1.0, but it must be a finite number >= 0",
        ),
    ],
)
def test_bad_input(call: object, message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        call()  # type: ignore[operator]
