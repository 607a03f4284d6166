"""phase-curve: does the clustering time of random starts approach the closed-form curve as the dimension grows?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.stats.scales import LogScale
from helmscope.theory.equiangular import hitting_time
from helmscope.theory.starts import Uniform

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-6


@experiment("phase-curve", seconds=15)
def phase_curve(case: TrialCase) -> Finding:
    """t* = (n-1)/(2n) ln(w/delta) + (1/2n) [Ei(b) - Ei(b delta) + e^(bn/(n-1)) (E1(b/(n-1)) - E1(bw/(n-1)))], with
    w = n - (n-1) delta: the time at which orthogonal tokens reach gamma = 1 - delta under SA.

    A replicate is a uniform start of 32 tokens; its t_half(beta) is the first time at which half of its pairs have an
    inner product of at least 1 - delta, located by the solver, and its statistic the largest |t_half / t* - 1| over
    beta. A start that has not reached it by 1.3 t* is censored there. The flow commutes with rotations, so the tokens
    are integrated in R^32 in every dimension. The control predicts the time of beta = 0 for every beta.
    """
    n, delta, horizon = (case.constant(name) for name in ("tokens", "delta", "horizon"))
    betas, dims = case.constant("betas"), case.constant("dims")
    judged = dims.index(case.constant("judged_dim"))
    starts = case.count(64, quick=32)
    clocks = [hitting_time(SA(beta), n=n, delta=delta) for beta in betas]
    x = torch.cat([Uniform(n, dim).sample_in_span(starts, seed=case.seed_for(k)) for k, dim in enumerate(dims)])
    reached = half_times(x, betas, [horizon * clock for clock in clocks], delta)
    times = torch.stack(reached.chunk(len(dims), -1))  # (dimension, beta, start)
    censored = times.isinf()
    observed = torch.minimum(times, horizon * _column(clocks))
    errors = (observed / _column(clocks) - 1).abs()
    worst = errors.amax(1)
    ratios = [after / before for before, after in pairwise(worst)]
    return Finding(
        evidence={
            "error": Replicates(worst[judged], "starts", LogScale()),
            "falling in d": ReplicatesInEveryCase(ratios, "starts", [f"d = {dim:,}" for dim in dims[1:]], LogScale()),
        },
        controls={
            "hitting time of beta = 0": Replicates(
                (observed[judged] / clocks[0] - 1).abs().amax(0), "starts", LogScale()
            ),
        },
        data=curve(
            "error",
            errors.permute(2, 1, 0),
            {"beta": betas, "dimension": dims},
            label=f"|t_half / t* - 1|, of a censored start {horizon - 1:.1g}",
            log=True,
        ).assign_coords(censored=(("beta", "dimension"), censored.sum(-1).mT.numpy())),
        remark=f"{_censored_text(censored, dims, betas)} The largest error of the median over starts is "
        f"{_median_errors(observed, clocks, dims)}.",
        setting=f"simulation on the unit sphere: {n} uniform tokens, d = {dims[0]} to {dims[-1]:,}, SA, beta = "
        f"{betas[0]:g} to {betas[-1]:g}, delta = {delta:g}, t <= {horizon:g} t*, Dormand-Prince",
    )


def _column(clocks: list[float]) -> Tensor:
    return torch.tensor(clocks, dtype=torch.float64)[:, None]


@dataclass(frozen=True)
class HalfClustered:
    """Event: half of the pairs have an inner product of at least 1 - delta; its signal is the median, the lower one of
    the upper half, less 1 - delta.
    """

    delta: float
    terminal: bool = True

    def signal(self, x: Tensor) -> Tensor:
        """Negative before the event, nonnegative after it."""
        i, j = torch.triu_indices(x.shape[-2], x.shape[-2], offset=1)
        products = (x @ x.mT)[..., i, j]
        return products.kthvalue(len(i) // 2 + 1, dim=-1).values - (1 - self.delta)


def half_times(x: Tensor, betas: Sequence[float], horizons: Sequence[float], delta: float) -> Tensor:
    """t_half (beta, start) of starts (start, n, d); infinite if it is not reached by the horizon."""
    times = [
        integrate(SA(beta), x, [end], stepper=DormandPrince(tol=TOLERANCE), events=[HalfClustered(delta)]).event_times[
            0
        ]
        for beta, end in zip(betas, horizons, strict=True)
    ]
    return torch.stack(times).nan_to_num(torch.inf)


def _censored_text(censored: Tensor, dims: Sequence[int], betas: Sequence[float]) -> str:
    cells = [
        f"{int(censored[k, b].sum())} at d = {dim:,}, beta = {beta:g}"
        for k, dim in enumerate(dims)
        for b, beta in enumerate(betas)
        if bool(censored[k, b].any())
    ]
    total = censored.shape[-1]
    return f"Censored of {total} starts: {'; '.join(cells)}." if cells else f"None of {total} starts is censored."


def _median_errors(observed: Tensor, clocks: list[float], dims: Sequence[int]) -> str:
    """The largest error of the median t_half over beta, for each dimension, as text."""
    errors = (observed.median(-1).values / _column(clocks).T - 1).abs().amax(-1)
    return ", ".join(f"{float(error):.2g} at d = {dim:,}" for dim, error in zip(dims, errors, strict=True))
