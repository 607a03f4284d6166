"""one-cluster: from almost every start all tokens converge to one cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Count
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.observe.clusters import cluster_count
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.theory.metastable import metastable_time

if TYPE_CHECKING:
    from torch import Tensor

MAX_STEPS = 5_000
LOG_TIMES = np.linspace(-4.0, 0.0, 9)  # in units of the horizon
REGIMES = {"beta = 0": "zero", "small beta": "small", "large beta": "large", "d >= 3": "high_dim"}  # by condition


@dataclass(frozen=True)
class _Setting:
    """A temperature, number of tokens and dimension at which the theorem of one regime applies."""

    regime: str
    beta: float
    n: int
    dim: int
    lifetimes: float

    def __str__(self) -> str:
        return f"beta = {self.beta:.3g}, n = {self.n}, d = {self.dim}"

    @property
    def horizon(self) -> float:
        """``lifetimes`` times the time that two equal clusters take from the inner product -0.99 to 1 - 1e-9."""
        return self.lifetimes * metastable_time(SA(beta=self.beta), gamma0=-0.99, gamma1=1 - 1e-9)


class _ClusterCounts(NamedTuple):
    """The number of clusters (time, start), and the number of starts that reached the step limit."""

    clusters: Tensor
    stopped: int


@experiment("one-cluster", seconds=20)
def one_cluster(case: TrialCase) -> Finding:
    """x_i' = P sum_j e^(beta <x_i, x_j>) V x_j / Z_i, V = I, from uniform starts, at several beta (at beta = 0: several
    n) in the regime of each of the four theorems.

    Tokens closer than 1e-9 are merged into one weighted token, so that times of order e^(2 beta) are reached in few
    steps. Clusters are counted at the horizon of each setting. A run that needs more
    than 5,000 steps counts as not in one cluster. Each regime is judged by the setting with the fewest starts in one
    cluster. The control differs only by V = -I, with the same starts, merging, horizon and count, at the first setting
    of each regime; a run of it that needs more steps counts as one cluster, against the control. It is limited to small
    beta, because with V = -I the tokens come to rest apart, steps remain of order 1, and longer horizons cannot be
    reached.
    """
    starts = case.count(128, quick=40)
    merge, largest = case.constant("merge"), case.constant("control_beta")
    settings = _settings(case)
    in_one: dict[_Setting, int] = {}
    null_in_one: dict[_Setting, int] = {}
    paths, stopped = [], 0
    for k, setting in enumerate(settings):
        x = retract(case.normal(starts, setting.n, setting.dim, index=k))
        times = (setting.horizon * 10.0**LOG_TIMES).tolist()
        counts = _count_clusters(SA(beta=setting.beta), x, times, merge)
        in_one[setting] = int((counts.clusters[-1] == 1).sum())
        stopped += counts.stopped
        paths.append(counts.clusters.mT)
        if setting.beta <= largest and setting.regime not in {tried.regime for tried in null_in_one}:
            repulsion = SA(beta=setting.beta, value=-torch.eye(setting.dim, dtype=x.dtype))
            null = _count_clusters(repulsion, x, times[-1:], merge)
            null_in_one[setting] = int((null.clusters[-1] == 1).sum()) + null.stopped
    fewest = {
        name: min((setting for setting in settings if setting.regime == name), key=lambda setting: in_one[setting])
        for name in REGIMES
    }
    return Finding(
        evidence={
            name: Count(in_one[setting], starts, f"starts at {setting}", refutes=False)
            for name, setting in fewest.items()
        },
        controls={"V = -I": Count(max(null_in_one.values()), starts, "starts")},
        data=curve(
            "clusters",
            torch.stack(paths, -1),
            {"log10 of time over horizon": LOG_TIMES.tolist(), "setting": [str(setting) for setting in settings]},
            label="clusters left",
        ),
        remark=f"Starts in one cluster, of {starts} each: {'; '.join(f'{s}: {count}' for s, count in in_one.items())}. "
        f"The step limit stopped {stopped} starts with V = +I; V = -I was tried at "
        f"{'; '.join(map(str, null_in_one))}.",
        setting=f"simulation on the unit sphere: t <= {settings[0].lifetimes:g} lifetimes of two clusters, "
        f"{min(s.horizon for s in settings):.2g} to {max(s.horizon for s in settings):.2g}, "
        f"Dormand-Prince, merging at {merge:g}",
    )


def _settings(case: TrialCase) -> list[_Setting]:
    """The settings of all regimes, from the lists of the catalogue entry."""
    settings, lifetimes = [], case.constant("lifetimes")
    for name, key in REGIMES.items():
        betas, tokens, dims = (case.constant(f"{key}_{what}") for what in ("betas", "tokens", "dims"))
        settings += [_Setting(name, beta, n, dim, lifetimes) for beta, n, dim in zip(betas, tokens, dims, strict=True)]
    return settings


def _count_clusters(field: SA, x: Tensor, times: list[float], merge: float) -> _ClusterCounts:
    """Integrate and count clusters; a start that reaches the step limit keeps its initial number of clusters."""
    states = integrate(field, x, times, merge=merge, stepper=DormandPrince(max_steps=MAX_STEPS)).states
    finished = states.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    clusters = cluster_count(torch.where(finished, states, x), max_angle=merge)
    return _ClusterCounts(clusters, int((~finished[-1]).sum()))
