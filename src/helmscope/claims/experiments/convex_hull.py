"""convex-hull: the outputs of an attention head are in the convex hull of its values."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Count, IdentityErrors, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.fields.lowrank import LowRank
from helmscope.geometry.sphere import retract
from helmscope.observe.hull import hull_distance

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("head", "head and residual", "sum of two heads", "farthest value pushed out by 1 %")


class HeadStatistics(NamedTuple):
    """One head on its clouds: for each of ``KINDS`` the largest distance to the hull over the tokens of a cloud, over
    the largest value norm (cloud, 4); the relative error of the last one, whose exact value is known (cloud,); and
    the diameter of the outputs divided by that of the values (cloud,).
    """

    distance: Tensor
    error: Tensor
    diameter: Tensor


@experiment("convex-hull", seconds=5)
def convex_hull(case: TrialCase) -> Finding:
    """o_i = sum_j P_ij V x_j with P_ij >= 0 and sum_j P_ij = 1, so o_i is in conv{V x_j : j visible to i}.

    Random heads, full and causal, with values of full or low rank, on random clouds. The values V x_j are computed here
    and the outputs by the head; the distance is computed by a quadratic program over all weights, independently of P.
    Also measured: o_i + x_i; the sum of two heads against the values of both; and the value farthest from the mean
    value, moved away from the mean by 1 %. That value is in the hull, and the hull is in the ball about the mean whose
    sphere contains that value, so its distance is 1 % of the ball's radius. Diameters are averaged without logarithms,
    since at beta = 0 without a mask all outputs coincide.
    """
    betas, per_cell = case.constant("betas"), case.count(24, quick=8)
    shapes = tuple(zip(case.constant("tokens"), case.constant("dims"), strict=True))
    cells = list(product(betas, (False, True), range(per_cell)))
    heads = [_measure_head(case, k, *cell) for k, cell in enumerate(cells)]
    distance = torch.stack([head.distance for head in heads])
    diameter = torch.stack([head.diameter for head in heads])
    error = torch.cat([head.error for head in heads])
    alone, residual, pair, pushed = distance.flatten(0, 1).unbind(-1)
    outside = int((pushed > 1e-10).sum())
    by_beta = distance.mean(1).reshape(len(betas), -1, len(KINDS)).movedim(1, 0)
    spread = diameter.mean(1).reshape(len(betas), 2, per_cell).movedim(-1, 0)
    distances = curve(
        "distance", by_beta, {"beta": betas, "point": KINDS}, label="distance to the hull / largest value norm"
    )
    diameters = curve(
        "diameter", spread, {"beta": betas, "mask": ("full", "causal")}, label="diameter of outputs / of values"
    )
    return Finding(
        evidence=IdentityErrors(alone, "distance"),
        controls={
            "farthest value pushed out by 1 %": IdentityErrors(pushed, "distance"),
            "share of pushed values outside": Count(outside, len(pushed), "clouds"),
            "distance of the pushed value": IdentityErrors(error, "relative error"),
            "with the residual added": IdentityErrors(residual, "distance"),
            "sum of two heads": IdentityErrors(pair, "distance"),
        },
        described={"diameter of the outputs over that of the values": Replicates(diameter.mean(1), "heads")},
        data=xr.merge([distances, diameters], join="outer"),
        remark=f"The largest diameter of a head's outputs is {float(diameter.max()):.3f} of its values'.",
        setting=(
            f"simulation: random heads, (n, d) = {', '.join(map(str, shapes))}, beta = {betas[0]:g} to {betas[-1]:g}, "
            "full and causal, tokens on the unit sphere"
        ),
    )


def _measure_head(case: TrialCase, k: int, beta: float, causal: bool, number: int) -> HeadStatistics:
    tokens, dims = case.constant("tokens"), case.constant("dims")
    n, d = tokens[number % len(tokens)], dims[number % len(dims)]
    clouds, push = case.constant("clouds"), case.constant("push")
    x = retract(case.normal(clouds, n, d, index=3 * k))
    first, second = (_random_head(case, 3 * k + 1 + i, beta, causal, d, low_rank=number % 2 == 1) for i in range(2))
    (out, values), (other_out, other_values) = ((head.ambient(x), x @ v.mT) for head, v in (first, second))
    mask = torch.ones(n, n, dtype=torch.bool).tril() if causal else torch.ones(n, n, dtype=torch.bool)
    mask = mask.expand(clouds, n, n)
    center = values.mean(-2, keepdim=True)
    from_center = (values - center).norm(dim=-1, keepdim=True)
    farthest = values.gather(-2, from_center.argmax(-2, keepdim=True).expand(-1, 1, d))
    both = torch.cat([values, other_values], -2)
    largest, largest_of_both = (v.norm(dim=-1).amax(-1, keepdim=True) for v in (values, both))
    pushed = hull_distance(center + push * (farthest - center), values)
    distances = (
        hull_distance(out, values, mask=mask) / largest,
        hull_distance(x + out, values, mask=mask) / largest,
        hull_distance(out + other_out, both, mask=torch.cat([mask, mask], -1)) / largest_of_both,
        pushed / largest,
    )
    error = (pushed / ((push - 1) * from_center.amax(-2)) - 1).abs()[..., 0]
    by_kind = torch.stack([distance.amax(-1) for distance in distances], -1)
    return HeadStatistics(by_kind, error, _diameter(out) / _diameter(values))


def _random_head(
    case: TrialCase, index: int, beta: float, causal: bool, d: int, *, low_rank: bool
) -> tuple[SA, Tensor]:
    """A head with random matrices, and its V."""
    query_key, value = case.normal(2, d, d, index=index)
    if low_rank:
        rank_two = LowRank(value[:, :2], value[:2].mT)
        return SA(beta, query_key=query_key, value=rank_two, causal=causal), rank_two.dense()
    return SA(beta, query_key=query_key, value=value, causal=causal), value


def _diameter(points: Tensor) -> Tensor:
    """The largest distance between two points of each cloud."""
    return torch.cdist(points, points).amax((-1, -2))
