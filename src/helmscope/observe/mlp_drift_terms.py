"""The parts of an MLP's force at given tokens that entropies and free energies use: its potential, and the terms into
which its drift b = P f / r enters.

With U the potential of the exact per-neuron split (psi(0) = Psi(0) = 0) in the coordinates of the unit sphere, D the
dimension of the space of the tokens (d, and d - 1 after a LayerNorm) and P the projection onto the tangent space:

    div_S b = [tr Df - x^T Df x - (D - 1) <x, f>] / r,
    Lap_S U = tr Df - x^T Hess U x - (D - 1) <x, grad U>,

traces on that space. tr Hess U = tr Df, since the swirl of the split is divergence-free in R^d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.helmholtz import helmholtz
from helmscope.fields.jacobian_algebra import jacobian_algebra, slopes_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.mlp import MLP, GatedMLP


@dataclass(frozen=True, eq=False)
class MlpDriftTerms:
    """What a force does at each token of radius r: ``divergence`` div_S(P f) / r, ``work`` <P f, grad_S U> / r^2, the
    rate of U / r along the drift, and ``laplacian`` Lap_S U / r.

    >>> from helmscope.fields.activations import Identity
    >>> from helmscope.fields.mlp import MLP
    >>> pull = MLP(w_in=torch.tensor([[1.0, 0.0]]), w_out=torch.tensor([[1.0], [0.0]]), activation=Identity())
    >>> mlp_drift_terms(pull, torch.tensor([[0.0, 1.0]]), torch.ones(1)).laplacian  # of U = x_1^2 / 2
    tensor([1.])
    """

    divergence: Float[Tensor, "*batch"]
    work: Float[Tensor, "*batch"]
    laplacian: Float[Tensor, "*batch"]


def mlp_drift_terms(
    force: MLP | GatedMLP, x: Float[Tensor, "*batch d"], radius: Float[Tensor, "*batch"], *, centered: bool = False
) -> MlpDriftTerms:
    """The terms of a force at unit vectors x of given radius; with ``centered`` among vectors of mean 0.

    >>> from helmscope.fields.mlp import MLP
    >>> mlp_drift_terms(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2), torch.ones(2)).work
    tensor([0., 0.])
    """
    split, slopes = helmholtz(force), slopes_of(force, x)
    algebra = jacobian_algebra(force, like=x)
    gradient, f = split.gradient(x), force.ambient(x)
    sphere = x.shape[-1] - 1 - centered
    trace = (slopes * (algebra.rows * algebra.columns.mT).sum(-1)).sum(-1)
    flat, bend = trace, trace - (x * split.hessian_product(x, x)).sum(-1)
    if centered:
        one = torch.ones_like(x) / x.shape[-1] ** 0.5
        flat = flat - algebra.radial(slopes, one)
        bend = bend - (one * split.hessian_product(x, one)).sum(-1)
        gradient, f = (each - each.mean(-1, keepdim=True) for each in (gradient, f))
    divergence = flat - algebra.radial(slopes, x) - sphere * (x * f).sum(-1)
    tangential = f - (x * f).sum(-1, keepdim=True) * x
    return MlpDriftTerms(
        divergence / radius,
        (tangential * gradient).sum(-1) / radius.square(),
        (bend - sphere * (x * gradient).sum(-1)) / radius,
    )
