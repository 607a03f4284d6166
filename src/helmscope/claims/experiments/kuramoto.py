"""kuramoto: on the circle at beta = 0 self-attention is the Kuramoto model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.entry import Region
from helmscope.claims.finding import Check, Finding, Identity, Replicates
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA, USA
from helmscope.types import Ruling

if TYPE_CHECKING:
    from torch import Tensor

INPUTS, TOKENS = 2_048, 12
BETAS = (1e-4, 1e-3, 1e-2, 1e-1)
SECOND_ORDER = Region(text="The order is 2 within 0.1.", low=1.9, high=2.1)


@experiment("kuramoto", seconds=1)
def kuramoto(case: Case) -> Finding:
    """theta_i' = (1/n) sum_j sin(theta_j - theta_i) at beta = 0; to first order SA adds
    beta [mean(sin cos) - mean(sin) mean(cos)]; USA is (1/n) sum_j e^(beta cos) sin at any beta.

    Random angles; the angular velocity is the tangent component <(-sin, cos), x'>, and the sums are written out here.
    """
    theta = torch.pi * case.normal(INPUTS, TOKENS, stream=0)
    apart = theta[:, None, :] - theta[:, :, None]
    sine, cosine = apart.sin(), apart.cos()
    sums = sine.mean(-1)
    first = (sine * cosine).mean(-1) - sine.mean(-1) * cosine.mean(-1)
    errors = _worst(angular(SA(beta=0.0), theta) - sums)
    unnormalized = _worst(angular(USA(beta=2.0), theta) - ((2.0 * cosine).exp() * sine).mean(-1))
    seen = [angular(SA(beta=beta), theta) - sums for beta in BETAS]
    remainders = [_worst(each - beta * first) for beta, each in zip(BETAS, seen, strict=True)]
    logs = torch.stack(remainders).log10()
    orders = (logs[-1] - logs[0]) / (math.log10(BETAS[-1]) - math.log10(BETAS[0]))
    gaps = torch.stack([torch.stack([_worst(each) for each in seen], -1), torch.stack(remainders, -1)], -1)
    axes = {"beta": BETAS, "against": ("the Kuramoto sum", "with the first-order term")}
    return Finding(
        evidence=Identity(errors),
        null=Check("SA at beta = 1e-3 without the first-order term", Identity(_worst(seen[1]))),
        data=curve("difference", gaps, axes, label="largest |difference of angular velocity|", log=True),
        also=(
            Check("USA at beta = 2 against its own sum", Identity(unnormalized), Ruling.BY_CONSTRUCTION),
            Check("order in beta of the remainder", Replicates(orders, "clouds"), Ruling.SUPPORTED, SECOND_ORDER),
        ),
    )


def angular(field: SA | USA, theta: Tensor) -> Tensor:
    """The velocity of tokens on the circle, as angles a unit of time."""
    x = torch.stack([theta.cos(), theta.sin()], -1)
    return (field(x) * torch.stack([-theta.sin(), theta.cos()], -1)).sum(-1)


def _worst(difference: Tensor) -> Tensor:
    return difference.abs().amax(-1)
