"""rate: near a cluster tokens converge exponentially, at rate 1 under SA and e^beta under USA."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates, ReplicatesInEveryCase, ReplicatesInSomeCase
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA, USA
from helmscope.geometry import sphere
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.stats.scales import LogScale

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

SPREAD = 1e-5  # up to beta = 9 the next order is below 1e-8 of the rate, and rounding far below that
LENGTH, STEP, REST = 1.2, 0.04, 30.0  # in units of the time 1 / rate


@experiment("rate", seconds=4)
def rate(case: TrialCase) -> Finding:
    """Near a cluster x_i' = P_{x_i} sum_j p_ij x_j is (1/n) sum_j x_j - x_i to first order whatever beta, so that
    |x_i - x*| falls as e^-t under SA and as e^(-e^beta t) under USA, and 1 - <x_i, x_j> = |x_i - x_j|^2 / 2 twice as
    fast.

    Clusters of size 1e-5, integrated by RK4 over 1.2 units of the time 1 / rate; x* is their state 30 units later. The
    statistic of a start is the slope of log |x_i - x*| over the corrected rate, at the token where it is farthest from
    1.
    """
    betas, sizes, dim, excess = (case.constant(name) for name in ("betas", "sizes", "dim", "faster"))
    starts = case.count(128, quick=32)
    cells = [(kind, beta, n) for kind in (SA, USA) for beta in betas for n in sizes]
    names = [f"{kind.__name__}, beta = {beta:g}, n = {n}" for kind, beta, n in cells]
    clusters = {n: _cluster(case.normal(starts, n, dim, index=n)) for n in sizes}
    largest = clusters[sizes[-1]]
    theory = [corrected(kind(beta=beta)) for kind, beta, _ in cells]
    measured = [slopes(kind(beta=beta), clusters[n], rate) for (kind, beta, n), rate in zip(cells, theory, strict=True)]
    faster, _ = slopes(_scaled(1.0, 1 + excess, dim), largest, 1.0)
    ratios = [tokens / rate for (tokens, _), rate in zip(measured, theory, strict=True)]
    pair_ratios = [pairs / (2 * rate) for (_, pairs), rate in zip(measured, theory, strict=True)]
    over_bound = [tokens.amin(-1) / math.exp(-beta) for (_, beta, _), (tokens, _) in zip(cells, measured, strict=True)]
    planted = {beta: slopes(_scaled(beta, math.exp(-beta), dim), largest, math.exp(-beta))[0] for beta in betas if beta}
    planted_ratios = [farthest(tokens / math.exp(-beta)) for beta, tokens in planted.items()]
    means = [tokens.mean(-1) for (_, _, n), (tokens, _) in zip(cells, measured, strict=True) if n == sizes[-1]]
    return Finding(
        evidence={
            "rate": ReplicatesInEveryCase([farthest(ratio) for ratio in ratios], "starts", names, LogScale()),
            "rate of pairs": ReplicatesInEveryCase(
                [farthest(ratio) for ratio in pair_ratios], "starts", names, LogScale()
            ),
        },
        controls={
            "planted flow with rate e^-beta": ReplicatesInSomeCase(
                [farthest(rate) for rate in planted.values()], "starts", scale=LogScale()
            ),
            "planted flow, over e^-beta": ReplicatesInEveryCase(planted_ratios, "starts", scale=LogScale()),
            "SA made faster by 1e-5": Replicates(farthest(faster), "starts", LogScale()),
        },
        printed=ReplicatesInEveryCase(over_bound, "starts", names, LogScale()),
        data=_rate_curves(torch.stack(means, -1), betas, sizes[-1]),
        remark=(
            f"Over {len(cells)} combinations of flow, beta and n no token's ratio is farther from 1 than "
            f"{max(float((ratio - 1).abs().max()) for ratio in ratios):.1e}."
        ),
        setting=f"simulation on the unit sphere: clusters of size {SPREAD:g}, n = {', '.join(map(str, sizes))}, "
        f"d = {dim}, beta = {', '.join(f'{beta:g}' for beta in betas)}, t <= {LENGTH:g} / rate, RK4 step "
        f"{STEP:g} / rate",
    )


def _rate_curves(means: Tensor, betas: tuple[float, ...], n: int) -> xr.Dataset:
    """The rates of SA and of USA at every beta, from means (start, 2 betas), and the printed rate."""
    sa, usa = means.chunk(2, -1)
    printed = (-torch.tensor(betas, dtype=torch.float64)).exp().expand_as(sa)
    return curve(
        "rate",
        torch.stack([sa, usa, printed], -1),
        {"beta": betas, "flow": ("SA", "USA", "e^-beta, as printed")},
        label=f"rate of |x_i - x*|, n = {n}",
        log=True,
    )


def corrected(field: SA | USA) -> float:
    """The corrected rate: 1 for SA, e^beta for USA."""
    return 1.0 if field.normalized else math.exp(field.beta)


def _cluster(noise: Tensor) -> Tensor:
    return sphere.retract(torch.eye(1, noise.shape[-1], dtype=torch.float64) + SPREAD * noise)


def _scaled(beta: float, factor: float, dim: int) -> SA:
    """SA with V = factor I, whose rate is ``factor``."""
    return SA(beta=beta, value=factor * torch.eye(dim, dtype=torch.float64))


def slopes(field: SA | USA, x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """The decay rates of |x_i - x*| (starts, n) and of |x_i - x_j|^2 / 2 (starts, pairs), measured over 1.2 / rate."""
    unit = 1 / rate
    end = integrate(field, x, [LENGTH * unit], stepper=RK4(STEP * unit)).states[-1]
    rest = integrate(field, end, [REST * unit]).states[-1]
    cluster = sphere.retract(rest.mean(-2, keepdim=True))
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], offset=1)
    tokens = [_length(state - cluster).log() for state in (x, end)]
    pairs = [_length(state[:, i] - state[:, j]).log() for state in (x, end)]
    time = LENGTH * unit
    return (tokens[0] - tokens[1]) / time, 2 * (pairs[0] - pairs[1]) / time


def _length(difference: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(difference, dim=-1)
    return length


def farthest(ratios: Tensor) -> Tensor:
    """The ratio of each start that is farthest from 1."""
    return ratios.gather(-1, (ratios - 1).abs().argmax(-1, keepdim=True)).squeeze(-1)
