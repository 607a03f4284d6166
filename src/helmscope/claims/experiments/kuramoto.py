"""kuramoto: on the circle at beta = 0 self-attention is the Kuramoto model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA, USA

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST = 5e-324  # keeps the log of a zero difference finite


@experiment("kuramoto", seconds=1)
def kuramoto(case: TrialCase) -> Finding:
    """theta_i' = (1/n) sum_j sin(theta_j - theta_i) at beta = 0; to first order SA adds
    beta [mean(sin cos) - mean(sin) mean(cos)]; USA is (1/n) sum_j e^(beta cos) sin at any beta.

    Random angles; the angular velocity is the tangential component <(-sin, cos), x'>, and the sums are computed here.
    The order in beta of a difference is the slope of its log between the smallest and the largest beta.
    """
    betas, tokens = case.constant("betas"), case.constant("tokens")
    theta = torch.pi * case.normal(case.constant("inputs"), tokens, index=0)
    differences = theta[:, None, :] - theta[:, :, None]
    sine, cosine = differences.sin(), differences.cos()
    sums = sine.mean(-1)
    first = (sine * cosine).mean(-1) - sine.mean(-1) * cosine.mean(-1)
    errors = _largest(angular(SA(beta=0.0), theta) - sums)
    unnormalized = _largest(angular(USA(beta=2.0), theta) - ((2.0 * cosine).exp() * sine).mean(-1))
    deviations = [angular(SA(beta=beta), theta) - sums for beta in betas]
    remainders = [_largest(deviation - beta * first) for beta, deviation in zip(betas, deviations, strict=True)]
    without = [_largest(deviation) for deviation in deviations]
    gaps = torch.stack([torch.stack(without, -1), torch.stack(remainders, -1)], -1)
    axes = {"beta": betas, "against": ("the Kuramoto sum", "with the first-order term")}
    return Finding(
        evidence={
            "SA at beta = 0": IdentityErrors(errors, "difference of angular velocity"),
            "USA at beta = 2": IdentityErrors(unnormalized, "difference of angular velocity"),
        },
        controls={
            "SA at beta = 1e-3 without the first-order term": IdentityErrors(without[betas.index(1e-3)]),
            "order without the first-order term": Replicates(_order(without, betas), "clouds"),
            "order of the remainder": Replicates(_order(remainders, betas), "clouds"),
        },
        data=curve("difference", gaps, axes, label="largest |difference of angular velocity|", log=True),
        setting=f"simulation on the unit circle: fields at random clouds, n = {tokens}, d = 2, beta = 0 and "
        f"{', '.join(f'{beta:g}' for beta in betas)}; nothing is integrated",
    )


def angular(field: SA | USA, theta: Tensor) -> Tensor:
    """The angular velocity of tokens on the circle, in radians per unit of time."""
    x = torch.stack([theta.cos(), theta.sin()], -1)
    return (field(x) * torch.stack([-theta.sin(), theta.cos()], -1)).sum(-1)


def _order(differences: list[Tensor], betas: tuple[float, ...]) -> Tensor:
    """The order in beta of differences, one vector per beta: the slope of the log from the first beta to the last."""
    first, last = (difference.clamp_min(_SMALLEST).log() for difference in (differences[0], differences[-1]))
    return (last - first) / math.log(betas[-1] / betas[0])


def _largest(difference: Tensor) -> Tensor:
    return difference.abs().amax(-1)
