"""one-cluster: from almost every start all tokens converge to one cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Count, Finding
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.observe.clusters import cluster_count
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.theory.metastable import metastable_time
from helmscope.types import Region, Ruling

if TYPE_CHECKING:
    from torch import Tensor

MEET, TRIES = 1e-9, 5_000
LOG_TIMES = np.linspace(-1.0, 15.0, 25)
MOST = Region(text="The lower bound of the share is at least 0.8 in this regime.", low=0.8)


@dataclass(frozen=True)
class _Regime:
    """The regime of one theorem. ``lives`` is its horizon in lifetimes of two clusters; ``repelled`` tells whether
    V = -I can be integrated that far.
    """

    beta: float
    n: int
    dim: int
    lives: int = 10
    repelled: bool = True

    def __str__(self) -> str:
        return f"beta = {self.beta:.3g}, n = {self.n}, d = {self.dim}"

    @property
    def horizon(self) -> float:
        """``lives`` times the time that two equal clusters take from the inner product -0.99 to 1 - 1e-9."""
        return self.lives * metastable_time(SA(beta=self.beta), gamma0=-0.99, gamma1=1 - 1e-9)


# Theorems 4.1 (beta = 0), 4.3 (beta <= C / n), 5.1 (beta >= C n^2, C about d - 1) and 6.1 (d >= 3)
REGIMES = (
    _Regime(0.0, 8, 2),
    _Regime(1 / 8, 8, 2),
    _Regime(16.0, 4, 2, repelled=False),
    _Regime(4.0, 8, 3, lives=2),
)


class _ClusterCounts(NamedTuple):
    """The number of clusters (time, start), and the number of starts that reached the step limit."""

    clusters: Tensor
    stopped: int


@experiment("one-cluster", seconds=16)
def one_cluster(case: Case) -> Finding:
    """x_i' = P sum_j e^(beta <x_i, x_j>) V x_j / Z_i, V = I, from uniform starts, in the regime of each of the four
    theorems.

    Tokens closer than 1e-9 are merged into one weighted token, so that the time e^(beta (1 - gamma)) is reached in few
    steps. Clusters are counted at the horizon of each regime; the plot continues to the longest. A run that needs more
    than 5,000 steps counts as not in one cluster. The null differs only by V = -I, with the same starts, merging,
    horizon and count; a run of it that needs more steps counts as one cluster, against the null. It omits beta = 16,
    whose horizon of 3e14 cannot be reached with V = -I: the tokens come to rest apart, and steps remain of order 1. To
    keep the null feasible, the horizon at beta = 4 is 2 lifetimes of two clusters instead of 10.
    """
    starts = case.count(192, quick=32)
    in_one, paths, stopped, null_in_one, null_stopped = [], [], 0, 0, 0
    for k, regime in enumerate(REGIMES):
        x = retract(case.normal(starts, regime.n, regime.dim, stream=k))
        times = sorted({*(10.0**LOG_TIMES).tolist(), regime.horizon})
        counts, at = _count_clusters(SA(beta=regime.beta), x, times), times.index(regime.horizon)
        in_one.append(int((counts.clusters[at] == 1).sum()))
        stopped += counts.stopped
        paths.append(torch.cat([counts.clusters[:at], counts.clusters[at + 1 :]]).mT)
        if regime.repelled:
            repulsion = SA(beta=regime.beta, value=-torch.eye(regime.dim, dtype=x.dtype))
            null = _count_clusters(repulsion, x, [regime.horizon])
            null_in_one += int((null.clusters[-1] == 1).sum())
            null_stopped += null.stopped
    axes = {"log10 time": LOG_TIMES.tolist(), "regime": [str(regime) for regime in REGIMES]}
    tried = [regime for regime in REGIMES if regime.repelled]
    betas = ", ".join(f"{regime.beta:.3g}" for regime in tried)
    return Finding(
        evidence=Count(sum(in_one), len(REGIMES) * starts, "starts", refutes=False),
        null=Check(
            f"share of starts that end in one cluster with V = -I, beta = {betas}",
            Count(null_in_one + null_stopped, len(tried) * starts, "starts"),
        ),
        data=curve("clusters", torch.stack(paths, -1), axes, label="clusters left"),
        also=tuple(
            Check(
                f"share of starts that end in one cluster, {regime}",
                Count(count, starts, "starts", refutes=False),
                Ruling.SUPPORTED,
                MOST,
            )
            for regime, count in zip(REGIMES, in_one, strict=True)
        ),
        remark=(
            f"Horizons: {'; '.join(f'{regime}: {regime.horizon:.2g}' for regime in REGIMES)}. The step limit stopped "
            f"{stopped} of {len(REGIMES) * starts} starts with V = +I and {null_stopped} of {len(tried) * starts} with "
            f"V = -I, which is tried only at beta = {betas}."
        ),
        where=(
            f"simulation on the unit sphere: four regimes of beta, n, d, t <= {min(r.horizon for r in REGIMES):.3g} to "
            f"{max(r.horizon for r in REGIMES):.2g}, Dormand-Prince, merging at {MEET:g}"
        ),
    )


def _count_clusters(field: SA, x: Tensor, times: list[float]) -> _ClusterCounts:
    """Integrate and count clusters; a start that reaches the step limit keeps its initial number of clusters."""
    states = integrate(field, x, times, merge=MEET, stepper=DormandPrince(max_steps=TRIES)).states
    finished = states.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    clusters = cluster_count(torch.where(finished, states, x), radius=MEET)
    return _ClusterCounts(clusters, int((~finished[-1]).sum()))
