"""whitening: does rescaling by Sigma^(-1/2) turn a gradient drift with constant noise into a gradient flow?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import EverySample, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.meanfield.whitening import whiten

if TYPE_CHECKING:
    from torch import Tensor

F64 = torch.float64
HESSIAN = torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=F64)  # the counterexample
SIGMA = torch.diag(torch.tensor([1.0, 4.0], dtype=F64))


@experiment("whitening", seconds=2)
def whitening(case: TrialCase) -> Finding:
    """In the coordinates Sigma^(-1/2) x the Jacobian -S of a drift is -Sigma^(-1/2) S Sigma^(1/2). For -grad V, S is
    Hess V, which is symmetric before, but not after unless it commutes with Sigma; for -Sigma grad V, S = Sigma Hess V,
    it is the other way round.

    Random Hess V and Sigma = W W^T / d with Gaussian W (Sigma also of rank d/2 for d >= 4, where whitening is on its
    range); the first draw in two dimensions is the counterexample. The share is |A|^2 / |S|^2, A the antisymmetric
    part of S.
    """
    draws = case.count(128, quick=32)
    cells = [(d, rank) for d in case.constant("dims") for rank in sorted({d, d // 2}) if rank > 1]
    names = [f"d = {d}" if rank == d else f"d = {d}, rank {rank}" for d, rank in cells]
    gradient, carried, commuting = [], [], []
    for k, (d, rank) in enumerate(cells):
        hessian = _wishart(case.normal(draws, d, d, stream=2 * k))
        sigma = _wishart(case.normal(draws, d, rank, stream=2 * k + 1))
        if d == 2:
            hessian[0], sigma[0] = HESSIAN, SIGMA
        gradient.append(shares(hessian, sigma))
        carried.append(shares(sigma @ hessian, sigma))
        commuting.append(shares(sigma @ sigma + sigma, sigma))
    largest = max(float(after.max()) for _, after in commuting)
    changes = [after - before for before, after in gradient]
    table = torch.stack([torch.stack(pair, -1) for pairs in (gradient, carried) for pair in pairs], 1)
    whole = table.reshape(draws, 2, len(cells), 2).transpose(1, 2).flatten(2)
    return Finding(
        evidence={"change of the share": EverySample(changes, "draws", names)},
        controls={
            "drift -Sigma grad V": EverySample([after - before for before, after in carried], "draws", names),
            "counterexample": Replicates(turned_counterexample(case, draws), "rotations of the axes"),
        },
        described={
            "share if Hess V and Sigma commute": Replicates(torch.cat([after for _, after in commuting]), "draws")
        },
        data=curve(
            "share",
            whole,
            {"case": names, "drift": ("-grad V", "-grad V, whitened", "-Sigma grad V", "-Sigma grad V, whitened")},
            label="antisymmetric share of the drift's Jacobian",
        ),
        remark=f"Where Hess V and Sigma commute the share stays below {largest:.1g}.",
        setting=f"simulation: quadratic V with random Hess V and constant random Sigma, d = "
        f"{', '.join(map(str, case.constant('dims')))}, {draws} draws each",
    )


def shares(drift: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The antisymmetric shares |A|^2 / |S|^2 of drifts -S x before and after whitening by Sigma, one per pair."""
    pairs = [whiten(s, noise) for s, noise in zip(drift, sigma, strict=True)]
    before = torch.tensor([pair.antisymmetric_share_before for pair in pairs], dtype=F64)
    return before.square(), torch.tensor([pair.antisymmetric_share for pair in pairs], dtype=F64).square()


def turned_counterexample(case: TrialCase, count: int) -> list[float]:
    """|S'_12 - S'_21| / 2 of the whitened counterexample in turned axes, on which it does not depend: 0.375."""
    entries = []
    for angle in (math.pi * case.normal(count, stream=100)).tolist():
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=F64)
        white = whiten(turn @ HESSIAN @ turn.mT, turn @ SIGMA @ turn.mT).drift
        entries.append(abs(float(white[0, 1] - white[1, 0])) / 2)
    return entries


def _wishart(root: Tensor) -> Tensor:
    return root @ root.mT / root.shape[-2]
