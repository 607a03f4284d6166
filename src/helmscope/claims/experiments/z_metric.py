"""z-metric: self-attention with V = Q^T K symmetric is a gradient flow in the metric weighted by Z."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA, USA
from helmscope.geometry.sphere import project, retract, tangent_basis
from helmscope.observe.energy import interaction_energy

if TYPE_CHECKING:
    from torch import Tensor

FORMS = ("with 1/Z", "without 1/Z", "as printed")


@experiment("z-metric", seconds=2)
def z_metric(case: TrialCase) -> Finding:
    """dE_sum(w) = sum_i Z_i <x_i', w_i>, E_sum = (1/(2 beta)) sum_ij e^(beta <V x_i, x_j>), V symmetric,
    Z_i = sum_j e^(beta <V x_i, x_j>), x_i' = P(Z_i^-1 sum_j e^(beta <V x_i, x_j>) V x_j); without the 1/Z the flow is
    the gradient in the flat metric.

    The left side is computed by automatic differentiation along a random tangent w, the right side with Z computed
    here. The error is abs(dE_sum(w) - sum_i Z_i <x_i', w_i>) relative to sum_i abs(Z_i <x_i', w_i>), the sum of the
    absolute terms on the right, not to dE_sum(w), which may be near 0 if they cancel; the error of every other form is
    relative to the absolute terms of its own right side. The Jacobian is the covariant one on the stacked tangent
    spaces, its asymmetry |J - J^T| / |J| in Frobenius norms.
    """
    dim, tokens, clouds, betas = (case.constant(name) for name in ("dim", "tokens", "clouds", "betas"))
    matrices = case.count(32, quick=16)
    errors, bare, printed, flat, usa, sa = ([] for _ in range(6))
    for beta, v, x, w in _inputs(case, matrices):
        derivative = _derivative(x, v, beta, w)
        z, z_printed = (torch.exp(beta * x @ form @ x.mT).sum(-1) for form in (v, torch.eye(dim, dtype=x.dtype)))
        normalized = (SA(beta, query_key=v, value=v)(x) * w).sum(-1)
        unnormalized = tokens * (USA(beta, query_key=v, value=v)(x) * w).sum(-1)  # USA divides by n
        errors.append(_relative_error(derivative, z * normalized))
        bare.append(_relative_error(derivative, z * unnormalized))
        printed.append(_relative_error(derivative, z_printed * unnormalized))
        flat.append(_relative_error(derivative, unnormalized))
        usa.append(asymmetry(USA(beta, query_key=v, value=v), x))
        sa.append(asymmetry(SA(beta, query_key=v, value=v), x))
    forms = (errors, bare, printed)
    worst = torch.stack([torch.stack(form).amax(-1).reshape(len(betas), matrices).T for form in forms])
    return Finding(
        evidence={
            "weighted metric": IdentityErrors(torch.cat(errors), "error over sum_i |Z_i <x_i', w_i>|"),
            "flat metric": IdentityErrors(torch.cat(flat), "relative error"),
            "Jacobian of USA": IdentityErrors(torch.cat(usa), "asymmetry"),
        },
        controls={
            "flow without 1/Z in the weighted metric": IdentityErrors(torch.cat(bare)),
            "Jacobian of SA in the flat metric": IdentityErrors(torch.cat(sa)),
        },
        printed=IdentityErrors(torch.cat(printed)),
        data=curve(
            "error",
            worst.permute(1, 2, 0),
            {"beta": betas, "form": FORMS},
            label=f"largest relative error of dE_sum over {clouds} clouds",
            log=True,
        ),
        setting=f"simulation on the unit sphere: fields at random clouds, n = {tokens}, d = {dim}, "
        f"beta = {', '.join(f'{beta:g}' for beta in betas)}, random symmetric V; nothing is integrated",
    )


def _inputs(case: TrialCase, matrices: int) -> Iterator[tuple[float, Tensor, Tensor, Tensor]]:
    """Yield beta, a symmetric V, clouds, and a random tangent at each token."""
    dim, tokens, count, betas = (case.constant(name) for name in ("dim", "tokens", "clouds", "betas"))
    square = case.normal(len(betas), matrices, dim, dim, index=0)
    shape = (len(betas), matrices, count, tokens, dim)
    clouds = retract(case.normal(*shape, index=1))
    tangents = project(clouds, case.normal(*shape, index=2))
    for b, beta in enumerate(betas):
        for m in range(matrices):
            yield beta, (square[b, m] + square[b, m].T) / 2, clouds[b, m], tangents[b, m]


def _derivative(x: Tensor, v: Tensor, beta: float, w: Tensor) -> Tensor:
    """The derivative of E_sum along w, one value per cloud."""
    tokens = x.clone().requires_grad_()
    energy = x.shape[-2] ** 2 * interaction_energy(tokens, beta=beta, query_key=v)
    return (torch.autograd.grad(energy.sum(), tokens)[0] * w).sum((-1, -2))


def _relative_error(derivative: Tensor, terms: Tensor) -> Tensor:
    return (derivative - terms.sum(-1)).abs() / terms.abs().sum(-1)


def asymmetry(field: SA | USA, x: Tensor) -> Tensor:
    """|J - J^T| / |J| of the covariant Jacobian, one value per cloud."""
    clouds, n, d = x.shape
    basis = tangent_basis(x)
    units = torch.eye(n * (d - 1), dtype=x.dtype).reshape(-1, 1, n, d - 1, 1)
    directions = (basis @ units).squeeze(-1)  # (direction, cloud, n, d)
    change: Tensor = torch.func.jvp(field.velocity, (x.expand_as(directions).contiguous(),), (directions,))[1]
    transposed = (basis.mT @ change.unsqueeze(-1)).reshape(len(units), clouds, -1).transpose(0, 1)
    norm, asymmetric_norm = (
        matrix.square().sum((-1, -2)).sqrt() for matrix in (transposed, transposed - transposed.mT)
    )
    return asymmetric_norm / norm
