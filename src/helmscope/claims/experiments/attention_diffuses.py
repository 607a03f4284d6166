"""attention-diffuses: for large beta attention moves a density along the heat equation, backward for V = +I. On a
model, the covariance of attention's increments over contexts is compared with Sigma_A.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates
from helmscope.claims.experiments.attention_diffuses_model import on_model
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.density import Density
from helmscope.meanfield.forward_equation import ForwardEquation

if TYPE_CHECKING:
    from torch import Tensor

HARMONICS = 3
DEGREE = 256  # resolves e^(beta cos) up to beta = 1000


@experiment("attention-diffuses", seconds={"simulation": 1, "model": 60})
def attention_diffuses(case: TrialCase) -> Finding:
    """In simulation, the sign of the heat limit; on a model, the covariance of increments over contexts."""
    return _simulated(case) if case.subject.is_simulation else on_model(case)


def _simulated(case: TrialCase) -> Finding:
    """X[rho] = (1 / beta) grad log int e^(beta <x, y>) rho(dy) tends to +(1 / beta) grad log rho for V = +I, so that
    d_t rho = -div(rho X) tends to -(1 / beta) Lap rho, the backward heat equation, and to the forward one for V = -I.

    Random densities on the circle, (1 + a sum_k (p_k cos k t + q_k sin k t)) / 2 pi with a random direction of (p, q);
    the slope is that of beta X on -grad log rho by least squares over the circle. The rate of the entropy, beta dH/dt
    over the Fisher information, has the same limits.
    """
    betas = case.constant("betas")
    grid = CircleGrid(degree=DEGREE)
    densities = random_densities(case, grid, case.count(128, quick=32))
    equations = [[ForwardEquation.of(_attention(beta, sign), grid) for beta in betas] for sign in (1.0, -1.0)]
    table = torch.tensor(
        [
            [[heat_slope(density, each, beta) for each, beta in zip(row, betas, strict=True)] for row in equations]
            for density in densities
        ]
    )
    attracted, repelled = table[:, 0, -1], table[:, 1, -1]
    rates = [[entropy_rate(density, row[-1], betas[-1]) for density in densities] for row in equations]
    means = [f"{float(s):.5f} at beta = {beta:g}" for s, beta in zip(table[:, 0].mean(0), betas, strict=True)]
    return Finding(
        evidence={"sign of the heat limit": Replicates(attracted, "densities")},
        controls={
            "V = -I": Replicates(repelled, "densities"),
            "size of the heat limit": Replicates(attracted.abs(), "densities"),
        },
        described={
            f"beta dH/dt over the Fisher information, V = {name}": Replicates(rate, "densities")
            for name, rate in zip(("+I", "-I"), rates, strict=True)
        },
        data=curve(
            "slope",
            table.transpose(1, 2),
            {"beta": betas, "V": ("+I", "-I")},
            label="slope of beta X on -grad log rho",
        ),
        remark=f"For V = +I the slope is {', '.join(means)}: attention gathers the law as backward heat does.",
        setting=f"simulation: densities on the circle with {HARMONICS} random harmonics and a modulation of "
        f"{case.constant('modulation'):g}, the exact field of SA",
    )  # fmt: skip


def random_densities(case: TrialCase, grid: CircleGrid, count: int) -> list[Density]:
    """Densities 1 + a sum_k (p_k cos k t + q_k sin k t), relative to the uniform one, with sum_k |(p_k, q_k)| = 1."""
    sample = case.normal(count, HARMONICS, 2, stream=0)
    sample = sample / sample.norm(dim=-1).sum(-1)[:, None, None]
    modes = torch.zeros(count, len(grid.degrees), dtype=torch.float64)
    modes[:, 0] = 1
    modes[:, 1 : 1 + 2 * HARMONICS] = case.constant("modulation") * sample.flatten(1) / math.sqrt(2)
    return [Density(grid, each) for each in modes]


def _attention(beta: float, sign: float) -> SA:
    return SA(beta=beta, value=sign * torch.eye(2, dtype=torch.float64))


def heat_slope(density: Density, equation: ForwardEquation, beta: float) -> float:
    """The least-squares slope of beta X on -grad log rho: 1 for forward heat, -1 for backward heat."""
    velocity, score = equation.velocity(density.modes, 0.0)[:, 0], _score(density)
    return -beta * float((velocity * score).mean() / score.square().mean())


def entropy_rate(density: Density, equation: ForwardEquation, beta: float) -> float:
    """beta dH/dt over E |grad log rho|^2 along the continuity equation, dH/dt = E div X = -E X . grad log rho."""
    velocity, score, rho = equation.velocity(density.modes, 0.0)[:, 0], _score(density), density.values
    return -beta * float((rho * velocity * score).mean() / (rho * score.square()).mean())


def _score(density: Density) -> Tensor:
    """grad log rho at the points of the grid."""
    return density.grid.gradient(density.modes)[:, 0] / density.values
