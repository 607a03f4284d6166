"""Replicates of a fitted JKO step: the jackknife of both halves against one that computes everything again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import helmscope as hs
from helmscope.fields.activations import Identity
from helmscope.meanfield.gaussian import Gaussian
from helmscope.meanfield.jko_gaussian import QuadraticSteps
from helmscope.observe.gaussian_step import CloudPair, FittedStep, largest_tau
from helmscope.observe.jko_step_test import LayerSteps
from helmscope.observe.quadratic_free_energy import EnergyParts, QuadraticFreeEnergy
from helmscope.observe.step_replicates import step_replicates
from helmscope.stats.intervals import mean_interval

F64 = torch.float64
FIRST, SECOND = [0, 2, 3, 6, 7], [1, 4, 5, 8]  # halves of different sizes


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def energies(mass: torch.Tensor, *, softest: float = 0.5) -> EnergyParts:
    """The energies of five prompts, with a nu that one of them lacks."""
    roots = random(len(mass), 3, 3, seed=1) / 3
    stiffness = roots @ roots.mT + softest * torch.eye(3, dtype=F64)
    nu = torch.tensor([0.1, 0.3, torch.nan, 0.2, 0.2], dtype=F64)
    return EnergyParts(mass, stiffness, random(len(mass), 3, seed=2), random(len(mass), 3, seed=3), nu)


def mean_energy(parts: EnergyParts, kept: list[int]) -> QuadraticFreeEnergy:
    """The energy of some of these prompts, by loops."""
    total = sum(float(parts.mass[k]) for k in kept)
    stiffness, slope, at = (
        sum(float(parts.mass[k]) / total * each[k] for k in kept) for each in (parts.stiffness, parts.slope, parts.at)
    )
    known = [float(parts.nu[k]) for k in kept if not torch.isnan(parts.nu[k])]
    return QuadraticFreeEnergy(stiffness, slope, at, sum(known) / len(known), parts)


def values(step: FittedStep, pair: CloudPair, prompts: list[int]) -> np.ndarray:
    """Share and objectives from the moments of all tokens of some prompts."""
    laws = []
    for cloud in (pair.before, pair.after):
        x = cloud[prompts].flatten(0, 1).numpy()
        laws.append(Gaussian(torch.tensor(x.mean(0)), torch.tensor(np.cov(x.T, ddof=0))))
    before, after = laws
    least = step.minimizer(before)
    objectives = [step.objective(law, before) for law in (before, after, least)]
    return np.array([1 - after.w2(least) / before.w2(least), *objectives])


def test_every_prompt_is_left_out_of_the_half_that_it_is_in() -> None:
    pair = CloudPair(random(9, 20, 3), 0.8 * random(9, 20, 3) + 0.1, torch.ones(9, 20, dtype=F64))
    parts, eye = energies(torch.tensor([20.0, 20.0, 19.0, 20.0, 11.0], dtype=F64)), torch.eye(3, dtype=F64)
    step = FittedStep(mean_energy(parts, [0, 1, 2, 3, 4]), 0.4, eye)
    found = step_replicates(pair, step, step.energy, FIRST, SECOND).numpy()
    whole = values(step, pair, SECOND)
    tests = np.array([3 * (whole - values(step, pair, [j for j in SECOND if j != k])) for k in SECOND])
    changed = [mean_energy(parts, [j for j in range(5) if j != k]) for k in range(5)]
    fits = np.array([4 * (whole - values(FittedStep(one, 0.4, eye), pair, SECOND)) for one in changed])
    center = whole + tests.mean(0)  # corrected for the bias of the half on which the share is taken
    assert found.mean(0) == pytest.approx(center, rel=1e-6)
    variance = fits.var(0, ddof=1) / 5 + tests.var(0, ddof=1) / 4  # of two independent halves
    degrees = stats.t.ppf(0.975, 3)  # those of the smaller half
    for k in range(4):
        interval = mean_interval(found[:, k])
        assert interval.high - interval.estimate == pytest.approx(degrees * variance[k] ** 0.5, rel=1e-5)
    ratio = (found[FIRST] - center) / (fits - fits.mean(0))
    assert ratio == pytest.approx(np.broadcast_to(ratio[0], ratio.shape), rel=1e-4)  # energies are kept in float32


def test_tau_stays_below_what_the_other_prompts_allow() -> None:
    """One prompt has all of the stiffness: without it the step has a minimum for smaller tau only."""
    mass, eye = torch.full((5,), 20.0, dtype=F64), torch.eye(3, dtype=F64)
    parts = energies(mass)
    flat = torch.stack([-(0.5 if k else -3.0) * eye for k in range(5)])
    parts = EnergyParts(mass, flat, parts.slope, parts.at, parts.nu)
    energy = mean_energy(parts, [0, 1, 2, 3, 4])
    pair = CloudPair(random(9, 20, 3), 0.8 * random(9, 20, 3) + 0.1, torch.ones(9, 20, dtype=F64))
    without = mean_energy(parts, [1, 2, 3, 4])
    assert largest_tau(without) == pytest.approx(1.8)
    step = FittedStep(energy, 5.0, eye)
    found = step_replicates(pair, step, energy, FIRST, SECOND, parts=1).numpy()[:, 0]
    assert np.isfinite(found).all()
    fits = [values(FittedStep(without, 1.8, eye), pair, SECOND)[0]]
    fits += [
        values(FittedStep(mean_energy(parts, [j for j in range(5) if j != k]), 5.0, eye), pair, SECOND)[0]
        for k in (1, 2, 3, 4)
    ]
    spread = np.array(fits).mean() - np.array(fits)
    ratio = (found[FIRST] - found.mean()) / spread
    assert ratio == pytest.approx(np.full(5, ratio[0]), rel=1e-4)


def test_the_parts_of_a_system_add_up_to_its_energy() -> None:
    x = torch.nn.functional.normalize(random(10, 12, 3), dim=-1)
    turned = torch.tensor([[1.0, 0.6, 0.0], [-0.2, 0.0, 0.5], [0.0, 0.1, -1.0]], dtype=F64)
    mlp = hs.MLP(w_in=torch.eye(3, dtype=F64), w_out=turned, activation=Identity())
    steps = LayerSteps.of(hs.integrate(hs.Block(hs.SA(beta=1.0), mlp), x, times=[0.0, 0.1]), seed=1)
    energy = steps.energies[0]
    assert energy.parts is not None
    for row, k in enumerate(steps.selection):
        slope, stiffness = torch.zeros(3, dtype=F64), torch.zeros(3, 3, dtype=F64)
        for point in x[k, 1:]:
            onto, along = torch.eye(3, dtype=F64) - torch.outer(point, point), point @ turned @ point
            slope -= onto @ turned @ point / 11
            stiffness -= (onto @ (turned + turned.mT) / 2 @ onto - along * onto) / 11
        assert energy.parts.slope[row].numpy() == pytest.approx(slope.numpy(), abs=1e-12)
        assert energy.parts.stiffness[row].numpy() == pytest.approx(stiffness.numpy(), abs=1e-6)
    assert mean_energy(energy.parts, list(range(5))).stiffness.numpy() == pytest.approx(
        energy.stiffness.numpy(), abs=1e-6
    )
    silent = energy.with_noise_of(None)
    assert silent.nu == 0
    assert silent.parts is not None
    assert not silent.parts.nu.any()


@pytest.mark.parametrize("nu", [0.0, 0.3])
def test_a_step_of_covariances_has_the_determinant_and_distance_of_its_laws(nu: float) -> None:
    root, stiffness = random(4, 4), random(4, 4, seed=5)
    old, stiffness = root @ root.mT, (stiffness + stiffness.mT) / 4
    step = QuadraticSteps.of(stiffness, nu).step(old, 0.3)
    zero = torch.zeros(4, dtype=F64)
    new = Gaussian(zero, step.covariance)
    assert step.log_det == pytest.approx(float(torch.linalg.slogdet(step.covariance).logabsdet), abs=1e-12)
    assert step.squared_distance == pytest.approx(new.w2(Gaussian(zero, old)) ** 2, abs=1e-12)
    back = torch.eye(4, dtype=F64) + 0.3 * stiffness - 0.3 * nu * torch.linalg.inv(step.covariance)
    assert (back @ step.covariance @ back).numpy() == pytest.approx(old.numpy(), abs=1e-12)  # the optimal map
