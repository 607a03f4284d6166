"""kuramoto: on the circle at beta = 0 self-attention is the Kuramoto model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Finding, Identity, Replicates
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA, USA
from helmscope.types import Region, Ruling

if TYPE_CHECKING:
    from torch import Tensor

INPUTS, TOKENS = 2_048, 12
BETAS = (1e-4, 1e-3, 1e-2, 1e-1)
EQUAL = Region(text="Equality within 1e-12.", high=1e-12)
FIRST_ORDER = Region(text="The order is 1 within 0.1.", low=0.9, high=1.1)
SECOND_ORDER = Region(text="The order is 2 within 0.1.", low=1.9, high=2.1)
_SMALLEST = 5e-324  # keeps the log of a zero difference finite


@experiment("kuramoto", seconds=1)
def kuramoto(case: Case) -> Finding:
    """theta_i' = (1/n) sum_j sin(theta_j - theta_i) at beta = 0; to first order SA adds
    beta [mean(sin cos) - mean(sin) mean(cos)]; USA is (1/n) sum_j e^(beta cos) sin at any beta.

    Random angles; the angular velocity is the tangential component <(-sin, cos), x'>, and the sums are computed here.
    The order in beta of a difference is the slope of its log between the smallest and the largest beta.
    """
    theta = torch.pi * case.normal(INPUTS, TOKENS, stream=0)
    differences = theta[:, None, :] - theta[:, :, None]
    sine, cosine = differences.sin(), differences.cos()
    sums = sine.mean(-1)
    first = (sine * cosine).mean(-1) - sine.mean(-1) * cosine.mean(-1)
    errors = _largest(angular(SA(beta=0.0), theta) - sums)
    unnormalized = _largest(angular(USA(beta=2.0), theta) - ((2.0 * cosine).exp() * sine).mean(-1))
    deviations = [angular(SA(beta=beta), theta) - sums for beta in BETAS]
    remainders = [_largest(deviation - beta * first) for beta, deviation in zip(BETAS, deviations, strict=True)]
    without = [_largest(deviation) for deviation in deviations]
    gaps = torch.stack([torch.stack(without, -1), torch.stack(remainders, -1)], -1)
    axes = {"beta": BETAS, "against": ("the Kuramoto sum", "with the first-order term")}
    return Finding(
        evidence=Identity(errors, "difference of angular velocity"),
        null=Check(
            f"difference of SA at beta = {BETAS[1]:g} from the Kuramoto sum, without the first-order term",
            Identity(without[1]),
            region=EQUAL,
        ),
        data=curve("difference", gaps, axes, label="largest |difference of angular velocity|", log=True),
        also=(
            Check(
                "difference of USA at beta = 2 from the sum for USA",
                Identity(unnormalized),
                Ruling.BY_CONSTRUCTION,
                EQUAL,
            ),
            Check(
                "order in beta of the difference, without the first-order term",
                Replicates(_order(without), "clouds"),
                Ruling.SUPPORTED,
                FIRST_ORDER,
            ),
            Check(
                "order in beta of the difference, with the first-order term",
                Replicates(_order(remainders), "clouds"),
                Ruling.SUPPORTED,
                SECOND_ORDER,
            ),
        ),
        where=f"simulation on the unit circle: fields at random clouds, n = {TOKENS}, d = 2, beta = 0 and "
        f"{', '.join(f'{beta:g}' for beta in BETAS)}; nothing is integrated",
    )


def angular(field: SA | USA, theta: Tensor) -> Tensor:
    """The angular velocity of tokens on the circle, in radians per unit of time."""
    x = torch.stack([theta.cos(), theta.sin()], -1)
    return (field(x) * torch.stack([-theta.sin(), theta.cos()], -1)).sum(-1)


def _order(differences: list[Tensor]) -> Tensor:
    """The order in beta of differences, one vector per beta: the slope of the log from the first beta to the last."""
    first, last = (difference.clamp_min(_SMALLEST).log() for difference in (differences[0], differences[-1]))
    return (last - first) / math.log(BETAS[-1] / BETAS[0])


def _largest(difference: Tensor) -> Tensor:
    return difference.abs().amax(-1)
