"""histogram-width: do inner products concentrate about gamma_beta(t) like 1/sqrt(d) as the dimension grows?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.theory.equiangular import hitting_time
from helmscope.theory.starts import Uniform

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-6  # far below the smallest width, 0.004


@experiment("histogram-width", seconds=6)
def histogram_width(case: TrialCase) -> Finding:
    """Random tokens are orthogonal up to 1/sqrt(d), and the flow carries these deviations along the path of orthogonal
    tokens, gamma_beta(t), to first order linearly: for fixed t the inner products are gamma_beta(t) + O(1/sqrt(d)).

    A replicate is a seed with one uniform start in each dimension; its statistic is the least-squares slope of the log
    of the width, the root mean square of <x_i, x_j> - gamma_beta(t) over pairs, in log d, at the time at which
    gamma_beta reaches a level. The flow commutes with rotations, so the tokens are integrated in R^n. In fixed
    clusters the tokens of a cluster have the inner product 1/2 in every dimension.
    """
    n, dims, betas, levels = (case.constant(name) for name in ("tokens", "dims", "betas", "levels"))
    seeds = case.count(128, quick=64)
    uniform = [Uniform(n, dim).sample_in_span(seeds, seed=case.seed_for(k)) for k, dim in enumerate(dims)]
    clustered = [in_clusters(x, case.constant("clusters")) for x in uniform]
    cells = [(beta, level) for beta in betas for level in levels]
    names = [f"beta = {beta:g}, gamma = {level:g}" for beta, level in cells]
    spread = {beta: widths(uniform, beta, levels) for beta in betas}  # (level, dimension, seed)
    slopes = [log_slope(dims, spread[beta][levels.index(level)]) for beta, level in cells]
    fixed = widths(clustered, betas[0], levels)
    middle = len(levels) // 2
    shown = torch.stack([spread[beta][middle].mT for beta in betas], -1)
    largest = max(float(abs(slope.mean() + 0.5)) for slope in slopes)
    return Finding(
        evidence=ReplicatesInEveryCase(slopes, "seeds", names),
        controls={
            "starts in fixed clusters": ReplicatesInEveryCase(
                [log_slope(dims, each) for each in fixed], "seeds", [f"gamma = {level:g}" for level in levels]
            ),
            "random starts at time 0": Replicates(log_slope(dims, torch.stack([width(x, 0.0) for x in uniform]))),
        },
        data=curve(
            "width",
            shown,
            {"dimension": dims, "beta": betas},
            label=f"RMS of <x_i, x_j> - gamma_beta(t) where gamma_beta = {levels[middle]:g}",
            log=True,
            over="seed",
        ),
        remark=f"Over {len(cells)} combinations of beta and time no mean slope is farther from -0.5 than "
        f"{largest:.2g}.",
        setting=f"simulation on the unit sphere: {n} uniform tokens, d = {dims[0]} to {dims[-1]:,}, SA, "
        f"Dormand-Prince, {'; '.join(names)}",
    )


def widths(starts: Sequence[Tensor], beta: float, levels: Sequence[float]) -> Tensor:
    """The width (level, dimension, seed) at the times at which gamma_beta reaches the levels; one batch of starts
    (seed, n, n) per dimension.
    """
    field, n = SA(beta=beta), starts[0].shape[-2]
    times = [hitting_time(field, n=n, delta=1 - level) for level in levels]
    states = integrate(field, torch.cat(list(starts)), times, stepper=DormandPrince(tol=TOLERANCE)).states
    spread = torch.stack([width(state, level) for state, level in zip(states, levels, strict=True)])
    return torch.stack(spread.chunk(len(starts), -1), 1)


def width(x: Tensor, gamma: float) -> Tensor:
    """The root mean square of <x_i, x_j> - gamma over pairs."""
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], offset=1)
    return ((x @ x.mT)[..., i, j] - gamma).square().mean(-1).sqrt()


def in_clusters(x: Tensor, clusters: int) -> Tensor:
    """Tokens (seed, n, n) moved halfway towards the first ones, so that they form fixed clusters: in high dimension the
    inner product is 1/2 within a cluster and 0 between clusters.
    """
    size = x.shape[-2] // clusters
    centers = x[:, ::size].repeat_interleave(size, dim=-2)
    return retract(x + centers)


def log_slope(dims: Sequence[int], values: Tensor) -> Tensor:
    """The least-squares slope of log values (dimension, seed) in log d, one per seed."""
    x = torch.tensor(dims, dtype=torch.float64).log()
    x = x - x.mean()
    slope: Tensor = x @ values.log() / x.square().sum()
    return slope
