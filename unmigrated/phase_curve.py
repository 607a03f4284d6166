"""phase-curve: does the clustering time of random starts approach the closed-form curve as the dimension grows?"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, EveryLayer, Finding, Replicates
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA
from helmscope.observe.inner_products import clustering_fraction
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.stats.scales import LogScale
from helmscope.theory.equiangular import hitting_time
from helmscope.theory.starts import Uniform
from helmscope.types import Region, Ruling

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, DELTA, TOL, HORIZON = 32, 1e-3, 1e-6, 1.3
BETAS = (0.0, 2.0, 4.0, 6.5, 9.0)
DIMS = (32, 512, 16_384, 2**20)
JUDGED = DIMS.index(16_384)
# evaluation times in units of t*, denser near 1: the jump narrows as d grows
GRID = tuple(
    sorted(
        {
            *(0.05 * k for k in range(1, 27)),
            *(0.9 + 0.01 * k for k in range(21)),
            *(0.98 + 0.002 * k for k in range(21)),
            *(0.998 + 0.0005 * k for k in range(9)),
        }
    )
)
FALLS = Region(text="The error falls: its ratio is below 1.", high=1.0)


@experiment("phase-curve", seconds=15)
def phase_curve(case: Case) -> Finding:
    """t* = (n-1)/(2n) ln(w/delta) + (1/2n) [Ei(b) - Ei(b delta) + e^(bn/(n-1)) (E1(b/(n-1)) - E1(bw/(n-1)))], with
    w = n - (n-1) delta: the time at which orthogonal tokens reach gamma = 1 - delta under SA.

    A replicate is a uniform start of 32 tokens; its t_half(beta) is the first time at which half of its pairs have an
    inner product of at least 1 - delta, interpolated linearly, and its statistic the largest |t_half / t* - 1| over
    beta. A start that has not reached it by 1.3 t* is censored there. The flow commutes with rotations, so the tokens
    are integrated in R^32 in every dimension. The null predicts the time of beta = 0 for every beta.
    """
    starts = case.count(64, quick=32)
    clocks = [hitting_time(SA(beta), n=TOKENS, delta=DELTA) for beta in BETAS]
    times = torch.stack(
        [
            _half_times(Uniform(TOKENS, dim).sample_in_span(starts, seed=case.seed_for(k)), clocks)
            for k, dim in enumerate(DIMS)
        ]
    )  # (dimension, beta, start), infinite where censored
    censored = times.isinf()
    observed = torch.minimum(times, HORIZON * _column(clocks))
    errors = (observed / _column(clocks) - 1).abs()
    worst = errors.amax(1)
    ratios = [after / before for before, after in pairwise(worst)]
    return Finding(
        evidence=Replicates(worst[JUDGED], "starts"),
        null=Check(
            "largest relative error of t_half against the hitting time of beta = 0",
            Replicates((observed[JUDGED] / clocks[0] - 1).abs().amax(0), "starts"),
        ),
        also=(
            Check(
                "largest relative error over that in the previous dimension",
                EveryLayer(ratios, "starts", [f"d = {dim:,}" for dim in DIMS[1:]], LogScale()),
                Ruling.SUPPORTED,
                FALLS,
            ),
        ),
        data=curve(
            "error",
            errors.permute(2, 1, 0),
            {"beta": BETAS, "dimension": DIMS},
            label="|t_half / t* - 1|, of a censored start 0.3",
            log=True,
        ).assign_coords(censored=(("beta", "dimension"), censored.sum(-1).mT.numpy())),
        remark=f"{_censored_text(censored)} The largest error of the median over starts is "
        f"{_median_errors(observed, clocks)}.",
        where=f"simulation on the unit sphere: {TOKENS} uniform tokens, d = {DIMS[0]} to {DIMS[-1]:,}, SA, beta = "
        f"{BETAS[0]:g} to {BETAS[-1]:g}, delta = {DELTA:g}, t <= {HORIZON:g} t*, Dormand-Prince",
    )


def _column(clocks: list[float]) -> Tensor:
    return torch.tensor(clocks, dtype=torch.float64)[:, None]


def _half_times(x: Tensor, clocks: list[float]) -> Tensor:
    """t_half (beta, start) of starts (start, n, d); infinite if it is not reached."""
    times = []
    for beta, clock in zip(BETAS, clocks, strict=True):
        grid = [clock * t for t in GRID]
        states = integrate(SA(beta), x, grid, stepper=DormandPrince(tol=TOL)).states
        times.append(first_half(torch.tensor(grid, dtype=torch.float64), clustering_fraction(states, delta=DELTA)))
    return torch.stack(times)


def first_half(times: Tensor, share: Tensor) -> Tensor:
    """The time at which shares (time, start) first reach 1/2, interpolated linearly; the first time if they start above
    it, infinity if they never reach it.
    """
    above = share >= 0.5
    k = above.int().argmax(0, keepdim=True)
    before = (k - 1).clamp(min=0)
    low, high = share.gather(0, before), share.gather(0, k)
    fraction = torch.where(k > 0, (0.5 - low) / torch.where(high > low, high - low, 1.0), 0.0)
    reached = (times[before] + fraction * (times[k] - times[before])).squeeze(0)
    return torch.where(above.any(0), reached, torch.inf)


def _censored_text(censored: Tensor) -> str:
    cells = [
        f"{int(censored[k, b].sum())} at d = {dim:,}, beta = {beta:g}"
        for k, dim in enumerate(DIMS)
        for b, beta in enumerate(BETAS)
        if bool(censored[k, b].any())
    ]
    total = censored.shape[-1]
    return f"Censored of {total} starts: {'; '.join(cells)}." if cells else f"None of {total} starts is censored."


def _median_errors(observed: Tensor, clocks: list[float]) -> str:
    """The largest error of the median t_half over beta, for each dimension, as text."""
    errors = (observed.median(-1).values / _column(clocks).T - 1).abs().amax(-1)
    return ", ".join(f"{float(error):.2g} at d = {dim:,}" for dim, error in zip(DIMS, errors, strict=True))
