"""phase-curve: does the time at which random starts cluster approach the closed curve as the dimension grows?"""

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
# looks in units of t*: the jump narrows as d grows
LOOKS = tuple(
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
    w = n - (n-1) delta: when orthogonal tokens come to gamma = 1 - delta under SA.

    A replicate is a uniform start of 32 tokens; its t_half(beta) is the first time at which half of its pairs have an
    inner product of at least 1 - delta, linear between looks, and its number the largest |t_half / t* - 1| over beta.
    A start that has not come so far by 1.3 t* is censored and counts as if it had then. The flow commutes with
    rotations, so the tokens are carried in R^32 in every dimension. The null predicts the time of beta = 0 for all.
    """
    starts = case.count(64, quick=32)
    clocks = [hitting_time(SA(beta), n=TOKENS, delta=DELTA) for beta in BETAS]
    times = torch.stack(
        [
            _half_times(Uniform(TOKENS, dim).sample_in_span(starts, seed=case.seed_for(k)), clocks)
            for k, dim in enumerate(DIMS)
        ]
    )  # (dimension, beta, start), infinite where censored
    late = times.isinf()
    seen = torch.minimum(times, HORIZON * _column(clocks))
    errors = (seen / _column(clocks) - 1).abs()
    worst = errors.amax(1)
    ratios = [after / before for before, after in pairwise(worst)]
    return Finding(
        evidence=Replicates(worst[JUDGED], "starts"),
        null=Check(
            "largest relative error of t_half against the hitting time of beta = 0",
            Replicates((seen[JUDGED] / clocks[0] - 1).abs().amax(0), "starts"),
        ),
        also=(
            Check(
                "largest relative error over that in the dimension before",
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
        ).assign_coords(censored=(("beta", "dimension"), late.sum(-1).mT.numpy())),
        remark=f"{_censored(late)} Over all starts together the largest error is {_together(seen, clocks)}.",
        where=f"simulation on the unit sphere: {TOKENS} uniform tokens, d = {DIMS[0]} to {DIMS[-1]:,}, SA, beta = "
        f"{BETAS[0]:g} to {BETAS[-1]:g}, delta = {DELTA:g}, t <= {HORIZON:g} t*, Dormand-Prince",
    )


def _column(clocks: list[float]) -> Tensor:
    return torch.tensor(clocks, dtype=torch.float64)[:, None]


def _half_times(x: Tensor, clocks: list[float]) -> Tensor:
    """t_half (beta, start) of starts (start, n, d); infinite where it is not reached."""
    found = []
    for beta, clock in zip(BETAS, clocks, strict=True):
        looks = [clock * look for look in LOOKS]
        states = integrate(SA(beta), x, looks, stepper=DormandPrince(tol=TOL)).states
        found.append(first_half(torch.tensor(looks, dtype=torch.float64), clustering_fraction(states, delta=DELTA)))
    return torch.stack(found)


def first_half(times: Tensor, share: Tensor) -> Tensor:
    """When shares (time, start) first reach 1/2, linear between times; the first time where they begin above it,
    infinity where they never do.
    """
    above = share >= 0.5
    k = above.int().argmax(0, keepdim=True)
    before = (k - 1).clamp(min=0)
    low, high = share.gather(0, before), share.gather(0, k)
    part = torch.where(k > 0, (0.5 - low) / torch.where(high > low, high - low, 1.0), 0.0)
    reached = (times[before] + part * (times[k] - times[before])).squeeze(0)
    return torch.where(above.any(0), reached, torch.inf)


def _censored(late: Tensor) -> str:
    cells = [
        f"{int(late[k, b].sum())} at d = {dim:,}, beta = {beta:g}"
        for k, dim in enumerate(DIMS)
        for b, beta in enumerate(BETAS)
        if bool(late[k, b].any())
    ]
    total = late.shape[-1]
    return f"Censored of {total} starts: {'; '.join(cells)}." if cells else f"None of {total} starts is censored."


def _together(seen: Tensor, clocks: list[float]) -> str:
    """The largest error of the median t_half, dimension by dimension."""
    errors = (seen.median(-1).values / _column(clocks).T - 1).abs().amax(-1)
    return ", ".join(f"{float(error):.2g} at d = {dim:,}" for dim, error in zip(DIMS, errors, strict=True))
