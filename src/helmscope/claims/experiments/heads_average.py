"""heads-average: several heads move a token by the projection of their mean; whether they share an energy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Count, IdentityErrors
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA, USA
from helmscope.fields.mlp import MLP
from helmscope.fields.multihead import MultiHead
from helmscope.fields.multihead_as_printed import MultiHeadAsPrinted
from helmscope.geometry.sphere import project, retract, tangent_basis
from helmscope.observe.energy import interaction_energy

if TYPE_CHECKING:
    from torch import Tensor

DIM, TOKENS, HEADS, CLOUDS = 4, 6, 3, 32
BETAS, PAIR, STATES = (1.0, 2.0, 4.0, 8.0), 2, 32
SEARCHES = 2  # states of each pair of heads from which equilibria are searched
NEWTON_STEPS, LONGEST_STEP, DAMPING = 40, 0.5, 0.1


@experiment("heads-average", seconds=8)
def heads_average(case: TrialCase) -> Finding:
    """x_i' = (1/K) sum_h P_(x_i) u_h(x)_i = P_(x_i) (1/K) sum_h u_h(x)_i, u_h the sum of head h before projection.

    The identity is tested on random heads, each with its own temperature; the error of an input is the largest
    difference over both forms, SA and USA. Two further questions, on S^2 with pairs of random heads with
    V_h = Q_h^T K_h symmetric, have known answers and are controls. Energies: d/dt sum_h E_h is the inner product of the
    gradient, by automatic differentiation, with x'; for USA it is (K/n) sum_i |x_i'|^2, with an error relative to
    |gradient| |x'|, while along SA heads it is negative at some states. Jacobians: at an equilibrium of a gradient
    flow, in any metric, the eigenvalues of the Jacobian are real; equilibria are found by Newton's method from two
    random states for each pair of heads, and those with a complex pair are counted.
    """
    beta = case.constant("beta")
    errors, fewer_errors, mlp_changes = _velocity_differences(case)
    pairs = case.count(128, quick=64)
    x = retract(case.normal(pairs, STATES, TOKENS, 3, index=5))
    square = case.normal(pairs, PAIR, 3, 3, index=6)
    forms = (square + square.mT) / 2
    rates, squares, scales = torch.stack(
        [
            _energy_rates(_heads(kind, each, forms[p]), x[p])
            for kind in (USA, SA)
            for each in BETAS
            for p in range(pairs)
        ],
        1,
    ).reshape(3, 2, len(BETAS), pairs, STATES)
    rate_error = (rates[0] - PAIR / TOKENS * squares[0]).abs() / scales[0]
    falls = (rates < 0).double()
    sa_falls = falls[1, BETAS.index(beta)]
    searched, starts = forms.repeat_interleave(SEARCHES, 0), x[:, :SEARCHES].flatten(0, 1)
    shares = {kind: _imaginary_shares(kind, beta, searched, starts, case.constant("rest")) for kind in (SA, USA)}
    return Finding(
        evidence=IdentityErrors(errors, "relative difference"),
        controls={
            "one head left out": IdentityErrors(fewer_errors, "relative difference"),
            "sum of energies, USA": IdentityErrors(rate_error.amax(0)),
            "sum of energies, SA": Count(int(sa_falls.amax(-1).sum()), pairs, "pairs of heads"),
            **{
                f"complex pairs, {kind.__name__}": Count(
                    int((share > case.constant("imaginary")).sum()), len(share), "equilibria"
                )
                for kind, share in shares.items()
            },
        },
        data=curve(
            "falling",
            falls.mean(-1).permute(2, 1, 0),
            {"beta": BETAS, "heads": ("two of USA", "two of SA")},
            label="share of states at which sum_h E_h falls",
        ),
        remark=f"Along two heads of SA sum_h E_h falls at {sa_falls.mean():.2%} of the states at beta = {beta:g}. The "
        f"largest imaginary part of an eigenvalue at an equilibrium, over the largest modulus, is "
        f"{float(shares[SA].max()):.2g} for SA and {float(shares[USA].max()):.2g} for USA. An MLP inside each head, as "
        f"printed, changes the velocity by {float(mlp_changes.median()):.2g} of its size in the median.",
        setting=f"simulation on the unit sphere: fields at random states; identity: n = {TOKENS}, d = {DIM}, "
        f"{HEADS} heads, beta = 1 to {HEADS}; energies and equilibria: n = {TOKENS}, d = 3, {PAIR} heads, "
        f"beta = {', '.join(f'{b:g}' for b in BETAS)}; nothing is integrated",
    )


def _heads(kind: type[SA] | type[USA], beta: float, forms: Tensor) -> list[SA | USA]:
    """Heads with V_h = Q_h^T K_h."""
    return [kind(beta, query_key=form, value=form) for form in forms]


def _velocity_differences(case: TrialCase) -> tuple[Tensor, Tensor, Tensor]:
    """Relative differences from MultiHead, one per input: the largest of the mean of projections and the projection of
    the mean; the smallest of the same mean without one head; and the smallest of the printed form with MLPs.
    """
    sets = case.count(96, quick=32)
    shape = (sets, HEADS, DIM, DIM)
    forms, values, inward, outward = (case.normal(*shape, index=k) / DIM**0.5 for k in range(4))
    clouds = retract(case.normal(sets, CLOUDS, TOKENS, DIM, index=4))
    errors, fewer_errors, mlp_changes = [], [], []
    for s, x in enumerate(clouds):
        differences, fewer, from_printed = [], [], []
        for kind in (SA, USA):
            heads = [kind(1.0 + h, query_key=forms[s, h], value=values[s, h]) for h in range(HEADS)]
            velocity = MultiHead(heads)(x)
            projections = torch.stack([head(x) for head in heads])
            mean = torch.stack([head.ambient(x) for head in heads]).mean(0)
            differences += [_difference(velocity, projections.mean(0)), _difference(velocity, project(x, mean))]
            fewer.append(_difference(velocity, projections[1:].mean(0)))
            mlps = [MLP(w_in=inward[s, h], w_out=outward[s, h]) for h in range(HEADS)]
            from_printed.append(_difference(velocity, MultiHeadAsPrinted(heads, mlps)(x)))
        errors.append(torch.stack(differences).amax(0))
        fewer_errors.append(torch.stack(fewer).amin(0))
        mlp_changes.append(torch.stack(from_printed).amin(0))
    return torch.cat(errors), torch.cat(fewer_errors), torch.cat(mlp_changes)


def _difference(velocity: Tensor, other: Tensor) -> Tensor:
    return (velocity - other).abs().amax((-1, -2)) / velocity.abs().amax((-1, -2))


def _energy_rates(heads: Sequence[SA | USA], x: Tensor) -> Tensor:
    """Three values per state: d/dt sum_h E_h along the heads, sum_i |x_i'|^2, and the upper bound |gradient| |x'| of
    the rate.
    """
    tokens = x.clone().requires_grad_()
    terms = [interaction_energy(tokens, beta=head.beta, query_key=head.query_key).sum() for head in heads]
    energy, velocity = torch.stack(terms), MultiHead(heads)(x)
    gradient = torch.autograd.grad(energy.sum(), tokens)[0]
    rate, square = (gradient * velocity).sum((-1, -2)), (velocity**2).sum((-1, -2))
    return torch.stack([rate, square, (gradient**2).sum((-1, -2)).sqrt() * square.sqrt()])


def _imaginary_shares(kind: type[SA] | type[USA], beta: float, forms: Tensor, x: Tensor, rest: float) -> Tensor:
    """max |Im lambda| / max |lambda| over the eigenvalues of the Jacobian at the equilibria found from x (pair, n, d).

    Damped Newton steps, each at most 0.5 long; states that are not at rest afterwards, with a speed above ``rest``
    times the norm of the Jacobian, are left out.
    """
    field = _batched_heads(kind, beta, forms)
    wide = _batched_heads(kind, beta, forms.repeat_interleave(x.shape[-2] * (x.shape[-1] - 1), 0))
    for _ in range(NEWTON_STEPS):
        basis = tangent_basis(x)
        jacobian, speed = tangent_jacobian(wide, x, basis), _coordinates(basis, field.velocity(x))
        damping = DAMPING * speed.square().sum(-1)[:, None, None]
        normal = jacobian.mT @ jacobian + damping * torch.eye(speed.shape[-1], dtype=x.dtype)
        inverse = torch.linalg.pinv(normal, rtol=1e-14, hermitian=True)
        step = -(inverse @ jacobian.mT @ speed.unsqueeze(-1)).squeeze(-1)
        length = torch.linalg.vector_norm(step, dim=-1, keepdim=True)
        step = step * (LONGEST_STEP / length.clamp(min=LONGEST_STEP))
        x = retract(x + (basis @ step.reshape(*basis.shape[:-2], -1, 1)).squeeze(-1))
    jacobian = tangent_jacobian(wide, x, tangent_basis(x))
    speed = torch.linalg.vector_norm(field.velocity(x).flatten(1), dim=-1)
    at_rest = speed <= rest * torch.linalg.matrix_norm(jacobian)
    eigenvalues = torch.linalg.eigvals(jacobian[at_rest])
    shares: Tensor = eigenvalues.imag.abs().amax(-1) / eigenvalues.abs().amax(-1)
    return shares


def _batched_heads(kind: type[SA] | type[USA], beta: float, forms: Tensor) -> MultiHead:
    """A field in which each system has its own heads, from forms (system, head, d, d)."""
    return MultiHead([kind(beta, query_key=forms[:, h], value=forms[:, h]) for h in range(forms.shape[1])])


def tangent_jacobian(wide: MultiHead, x: Tensor, basis: Tensor) -> Tensor:
    """The Jacobian of all tokens' velocities (system, m, m) in tangent coordinates, m = n (d - 1).

    ``wide`` is the field with each system repeated m times: all columns are one directional derivative.
    """
    systems, n, d = x.shape
    directions = torch.zeros(systems, n, d - 1, n, d, dtype=x.dtype)
    for j in range(n):
        directions[:, j, :, j] = basis[:, j].mT
    m = n * (d - 1)
    points, tangents = x.repeat_interleave(m, 0), directions.reshape(systems * m, n, d)
    derivatives = torch.func.jvp(wide.velocity, (points,), (tangents,))[1]
    return _coordinates(basis.repeat_interleave(m, 0), derivatives).reshape(systems, m, m).mT


def _coordinates(basis: Tensor, vectors: Tensor) -> Tensor:
    return (basis.mT @ vectors.unsqueeze(-1)).squeeze(-1).flatten(1)
