"""Estimators on laws of von Mises and Fisher, drawn by SciPy, against closed forms with Bessel functions; attention as
a barycentric projection [Helmholtz Transformer, no. 10].
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats

import helmscope as hs
from helmscope.fields.activations import Identity
from helmscope.observe.entropy import entropy_along_depth
from helmscope.observe.free_energy import free_energy_along_depth
from helmscope.observe.mlp_entropy_change import mlp_entropy_change
from helmscope.solve.layer import Layer
from helmscope.stats.reduce import reduce_replicates
from helmscope.types import Trajectory

F64 = torch.float64
PROMPTS, TOKENS = 60, 40


def tokens(d: int, kappa: float, seed: int) -> torch.Tensor:
    """Independent tokens around the first axis."""
    axis = np.eye(d)[0]
    drawn = stats.vonmises_fisher(axis, kappa).rvs(PROMPTS * TOKENS, random_state=seed)
    return torch.tensor(drawn).reshape(PROMPTS, TOKENS, d)


def moments(d: int, kappa: float) -> tuple[float, float, float]:
    """E x_1 = I_(d/2) / I_(d/2-1), E x_1^2 = 1 - (d - 1) E x_1 / kappa, and E x_j^2 = E x_1 / kappa across."""
    mean = special.iv(d / 2, kappa) / special.iv(d / 2 - 1, kappa)
    return mean, 1 - (d - 1) * mean / kappa, mean / kappa


def holds(measured: object, name: str, expected: float) -> bool:
    """Whether the 99.9 % interval of a quantity contains a value."""
    reduced = reduce_replicates(measured, confidence=0.999)  # type: ignore[arg-type]
    return bool(reduced[f"{name}_low"] <= expected <= reduced[f"{name}_high"])


@pytest.mark.parametrize(("d", "kappa"), [(3, 2.0), (8, 5.0)])
def test_entropies_of_a_concentrated_law(d: int, kappa: float) -> None:
    """The laws whose entropies and Fisher informations the theory prints: 2.0516 and 2.1493, 2.3861 and 17.3057."""
    path = Trajectory(torch.zeros(1, dtype=F64), tokens(d, kappa, 1)[None], replicate="prompt", axis="depth")
    measured = entropy_along_depth(path, include_first_token=True, progress=False).isel(depth=0)
    mean, along, across = moments(d, kappa)
    variances = np.array([along - mean**2, *[across] * (d - 1)])
    entropy = (d * np.log(2 * np.pi * np.e) + np.log(variances).sum()) / 2
    assert holds(measured, "gaussian_entropy", entropy)
    assert not holds(measured, "gaussian_entropy", entropy + 0.4)
    assert holds(measured, "fisher_information", (1 / variances).sum())
    surface = (1 / variances).sum() - d**2 - mean**2 / variances[0]
    assert holds(measured, "surface_fisher_information", surface)
    shares = np.array([along, *[across] * (d - 1)])
    assert holds(measured, "matrix_entropy", -(shares * np.log(shares)).sum())
    true = (d - 1) * kappa * mean  # E|grad log rho|^2 of the law itself
    assert true == pytest.approx({3: 2.149258882910192, 8: 17.30574174222759}[d], rel=1e-14)
    assert abs(surface / true - 1) > 0.05  # the Gaussian score is not that of the law


@pytest.mark.parametrize(("d", "kappa"), [(3, 2.0), (8, 5.0)])
def test_the_first_order_of_a_linear_field_on_a_concentrated_law(d: int, kappa: float) -> None:
    """div_S(T M x) = tr M - d <x, M x>, whose mean follows from E x x^T."""
    matrix = torch.randn(d, d, dtype=F64, generator=torch.Generator().manual_seed(0)) / 10
    mlp = hs.MLP(w_in=torch.eye(d, dtype=F64), w_out=matrix, activation=Identity())
    run = hs.integrate(mlp, tokens(d, kappa, 2), times=[0.0, 1.0], stepper=Layer(1.0))
    measured = mlp_entropy_change(run, sampled_tokens=TOKENS, progress=False).isel(time=0)
    _, along, across = moments(d, kappa)
    second = np.array([along, *[across] * (d - 1)])
    assert holds(
        measured, "first_order_entropy_change", float(matrix.trace()) - d * float(second @ matrix.diagonal().numpy())
    )


def test_the_entropy_of_a_concentrated_law_grows_as_its_fisher_information_says() -> None:
    """Under diffusion nu the Gaussian entropy of a cloud grows at nu times its surface Fisher information, that of the
    law at nu (d - 1) kappa A: on S^2 at kappa = 2 they differ, and the measured curve follows the first.
    """
    nu, time, d, kappa = 0.05, 0.02, 3, 2.0
    still = hs.MLP(w_in=torch.eye(d, dtype=F64), w_out=torch.zeros(d, d, dtype=F64), activation=Identity())
    run = hs.integrate(
        still, tokens(d, kappa, 3), times=[0.0, time], noise=hs.fields.IsotropicNoise(nu),
        stepper=hs.solve.StochasticHeun(0.005), seed=4,
    )  # fmt: skip
    measured = free_energy_along_depth(run, sampled_tokens=None, include_first_token=True, progress=False).isel(time=1)
    mean, along, across = moments(d, kappa)
    surface = 1 / (along - mean**2) + 2 / across - d**2 - mean**2 / (along - mean**2)
    assert holds(measured, "gaussian_entropy_change", nu * time * surface)
    predicted = reduce_replicates(measured)
    assert float(predicted.predicted_entropy_change) == pytest.approx(nu * time * surface, rel=0.1)


def test_attention_leaves_tokens_below_their_law_in_convex_order() -> None:
    """T(x_i) = sum_j P_ij x_j for a bistochastic P: no convex function has a larger mean over the images. With the
    kernel of SA, whose columns do not sum to 1, one does.
    """
    generator = torch.Generator().manual_seed(5)
    x = hs.sphere.retract(torch.randn(64, 6, dtype=F64, generator=generator) + torch.eye(6, dtype=F64)[0])
    balanced = hs.SinkhornAttention(beta=2.0).kernel(x)
    assert balanced.sum(0).numpy() == pytest.approx(np.ones(64), abs=1e-6)
    slopes = 3 * torch.randn(200, 6, dtype=F64, generator=generator)

    def means(y: torch.Tensor) -> torch.Tensor:
        along = y @ slopes.mT
        return torch.cat([along.exp().mean(0), along.abs().mean(0), along.square().mean(0), along.relu().mean(0)])

    assert bool((means(balanced @ x) < means(x)).all())
    assert bool((means(hs.SA(beta=2.0).kernel(x) @ x) > means(x)).any())
