"""one-cluster: from almost every start all tokens gather in one cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from helmscope.types import Ruling

if TYPE_CHECKING:
    from torch import Tensor

MEET, TRIES, REPELLED = 1e-9, 5_000, 10.0
LOG_TIMES = np.linspace(-1.0, 15.0, 25)


@dataclass(frozen=True)
class _Regime:
    """What one theorem speaks of."""

    beta: float
    n: int
    dim: int

    def __str__(self) -> str:
        return f"beta = {self.beta:.3g}, n = {self.n}, d = {self.dim}"

    @property
    def horizon(self) -> float:
        """Ten times what two equal clusters take from the inner product -0.99 to 1 - 1e-9."""
        return 10 * metastable_time(SA(beta=self.beta), gamma0=-0.99, gamma1=1 - 1e-9)


# Theorems 4.1 (beta = 0), 4.3 (beta <= C / n), 5.1 (beta >= C n^2, C about d - 1) and 6.1 (d >= 3)
REGIMES = (_Regime(0.0, 8, 2), _Regime(1 / 8, 8, 2), _Regime(16.0, 4, 2), _Regime(4.0, 8, 3))


@experiment("one-cluster", seconds=12)
def one_cluster(case: Case) -> Finding:
    """x_i' = P sum_j e^(beta <x_i, x_j>) x_j / Z_i from uniform starts, in the regime of each of the four theorems.

    Tokens closer than 1e-9 are carried as one weighted token, so that the time e^(beta (1 - gamma)) is reached in few
    steps. The count is taken at the regime's own horizon; the picture goes on to the longest. A run that needs more
    than 5,000 steps has not ended in one cluster. For V = -I, where near tokens part, nothing is merged, and the time
    is 10: the flow has come to rest and a longer run is stiff.
    """
    starts = case.count(192, quick=40)
    ends, paths, repelled = [], [], []
    for k, regime in enumerate(REGIMES):
        x = retract(case.normal(starts, regime.n, regime.dim, stream=k))
        times = sorted({*(10.0**LOG_TIMES).tolist(), regime.horizon})
        seen = _clusters(SA(beta=regime.beta), x, times, merge=MEET)
        at = times.index(regime.horizon)
        ends.append(int((seen[at] == 1).sum()))
        paths.append(torch.cat([seen[:at], seen[at + 1 :]]).mT)
        away = SA(beta=regime.beta, value=-torch.eye(regime.dim, dtype=x.dtype))
        repelled.append(int((_clusters(away, x, [REPELLED], merge=None)[-1] == 1).sum()))
    total = len(REGIMES) * starts
    axes = {"log10 time": LOG_TIMES.tolist(), "regime": [str(regime) for regime in REGIMES]}
    return Finding(
        evidence=Count(sum(ends), total, "starts", refutes=False),
        null=Check("V = -I", Count(sum(repelled), total, "starts")),
        data=curve("clusters", torch.stack(paths, -1), axes, label="clusters left"),
        also=tuple(
            Check(str(regime), Count(end, starts, "starts", refutes=False), Ruling.SUPPORTED)
            for regime, end in zip(REGIMES, ends, strict=True)
        ),
        remark=f"Horizons: {'; '.join(f'{regime}: {regime.horizon:.2g}' for regime in REGIMES)}.",
    )


def _clusters(field: SA, x: Tensor, times: list[float], *, merge: float | None) -> Tensor:
    """The number of clusters at each time, (time, start); a start that was lost has as many as it began with."""
    states = integrate(field, x, times, merge=merge, stepper=DormandPrince(max_steps=TRIES)).states
    alive = states.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    return cluster_count(torch.where(alive, states, x), radius=MEET)
