"""rate: near the cluster tokens converge exponentially, at rate 1 under SA and e^beta under USA."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, EveryLayer, Finding, Replicates, SomeLayer
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA, USA
from helmscope.geometry import sphere
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.types import Ruling

if TYPE_CHECKING:
    from torch import Tensor

BETAS, SIZES, DIM = (0.0, 1.0, 4.0, 9.0), (2, 16), 8
SPREAD = 1e-5  # up to beta = 9 the next order is below 1e-8 of the rate, and rounding far below that
LENGTH, STEP, REST = 1.2, 0.04, 30.0  # in units of the time 1 / rate
FASTER = 1e-5


@experiment("rate", seconds=2.7)
def rate(case: Case) -> Finding:
    """Near a cluster x_i' = P_{x_i} sum_j p_ij x_j is (1/n) sum_j x_j - x_i to first order whatever beta, so that
    |x_i - x*| falls as e^-t under SA and as e^(-e^beta t) under USA, and 1 - <x_i, x_j> = |x_i - x_j|^2 / 2 twice as
    fast.

    Clusters of size 1e-5, carried by RK4 over 1.2 units of the time 1 / rate; x* is where they are 30 units later. A
    number a start: the slope of log |x_i - x*| over the corrected rate, at the token where it is farthest from 1.
    """
    starts = case.count(128, quick=32)
    cells = [(kind, beta, n) for kind in (SA, USA) for beta in BETAS for n in SIZES]
    names = [f"{kind.__name__}, beta = {beta:g}, n = {n}" for kind, beta, n in cells]
    clusters = {n: _cluster(case.normal(starts, n, DIM, stream=n)) for n in SIZES}
    seen = [slopes(kind(beta=beta), clusters[n]) for kind, beta, n in cells]
    faster = slopes(SA(beta=1.0, value=(1 + FASTER) * torch.eye(DIM, dtype=torch.float64)), clusters[SIZES[-1]])
    ratios = [tokens / corrected(kind(beta=beta)) for (kind, beta, _), (tokens, _) in zip(cells, seen, strict=True)]
    doubled = [
        pairs / (2 * corrected(kind(beta=beta))) for (kind, beta, _), (_, pairs) in zip(cells, seen, strict=True)
    ]
    over_printed = [
        tokens.mean(-1) / math.exp(-beta) for (_, beta, _), (tokens, _) in zip(cells, seen, strict=True) if beta > 0
    ]
    printed = Check("the rate over e^-beta, at every beta > 0", SomeLayer(over_printed, "starts"))
    largest = {
        n: [tokens.mean(-1) for cell, (tokens, _) in zip(cells, seen, strict=True) if cell[2] == n] for n in SIZES
    }
    sa, usa = torch.stack(largest[SIZES[-1]], -1).reshape(starts, 2, len(BETAS)).unbind(1)
    bound = (-torch.tensor(BETAS, dtype=torch.float64)).exp().expand_as(sa)
    return Finding(
        evidence=EveryLayer([farthest(each) for each in ratios], "starts", names),
        null=printed,
        printed=printed,
        also=(
            Check(
                "1 - <x_i, x_j> twice as fast", EveryLayer([farthest(e) for e in doubled], "starts"), Ruling.SUPPORTED
            ),
            Check(f"SA made faster by {FASTER:g}", Replicates(farthest(faster[0]), "starts")),
        ),
        data=curve(
            "rate",
            torch.stack([sa, usa, bound], -1),
            {"beta": BETAS, "flow": ("SA", "USA", "e^-beta, as printed")},
            label=f"rate of |x_i - x*|, n = {SIZES[-1]}",
            log=True,
        ),
        remark=(
            f"Over {len(cells)} combinations of flow, beta in {{{', '.join(f'{b:g}' for b in BETAS)}}} and n in "
            f"{{{', '.join(map(str, SIZES))}}} no token's ratio is farther from 1 than "
            f"{max(float((each - 1).abs().max()) for each in ratios):.1e}."
        ),
    )


def corrected(field: SA | USA) -> float:
    """1 for SA, e^beta for USA."""
    return 1.0 if field.normalized else math.exp(field.beta)


def _cluster(noise: Tensor) -> Tensor:
    return sphere.retract(torch.eye(1, DIM, dtype=torch.float64) + SPREAD * noise)


def slopes(field: SA | USA, x: Tensor) -> tuple[Tensor, Tensor]:
    """The decay rates of |x_i - x*| (starts, n) and of |x_i - x_j|^2 / 2 (starts, pairs)."""
    unit = 1 / corrected(field)
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
    """Of each start the ratio farthest from 1."""
    return ratios.gather(-1, (ratios - 1).abs().argmax(-1, keepdim=True)).squeeze(-1)
