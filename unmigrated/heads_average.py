"""heads-average: several heads move a token by the projection of their mean; whether they share an energy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Count, Finding, Identity, Replicates
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA, USA
from helmscope.fields.mlp import MLP
from helmscope.fields.multihead import MultiHead
from helmscope.fields.multihead_as_printed import MultiHeadAsPrinted
from helmscope.geometry.sphere import project, retract
from helmscope.observe.energy import interaction_energy
from helmscope.types import Region, Ruling

if TYPE_CHECKING:
    from torch import Tensor

DIM, TOKENS, HEADS, CLOUDS = 4, 6, 3, 32
BETAS, COLD, PAIR, STATES = (1.0, 2.0, 4.0, 8.0), 2, 2, 32
FALLS = Region(text=f"sum_h E_h falls at one of {STATES} states, for at least 1 in 50 pairs of heads.", low=0.02)
SHARE = f"share of states at which sum_h E_h rises, two heads of USA, beta = {BETAS[COLD]:g}"
RISES = Region(text="At every state: the share is 1.", low=1.0)
EXACT = Region(text="The error is at most 1e-12.", high=1e-12)


@experiment("heads-average", seconds=3)
def heads_average(case: Case) -> Finding:
    """x_i' = (1/K) sum_h P_(x_i) u_h(x)_i = P_(x_i) (1/K) sum_h u_h(x)_i, u_h the sum of head h before projection;
    printed with an MLP around each u_h.

    The identity is tested on random heads, each with its own temperature; the error of an input is the largest
    difference over both forms, SA and USA. The energy is tested on S^2, at random states of random pairs of heads with
    V_h = Q_h^T K_h symmetric: d/dt sum_h E_h is the inner product of the gradient, by automatic differentiation, with
    x'; for USA it is (K/n) sum_i |x_i'|^2, never negative, with an error relative to |gradient| |x'|. The null counts
    pairs of SA heads at beta = 4. The MLP inside destroys the gradient structure: the same pairs of USA heads with a
    random MLP around each do not raise sum_h E_h at every state; the value of a pair is the share where they do.
    """
    errors, mlp_changes = _velocity_differences(case)
    pairs = case.count(128, quick=64)
    x = retract(case.normal(pairs, STATES, TOKENS, 3, stream=5))
    square = case.normal(pairs, PAIR, 3, 3, stream=6)
    forms = (square + square.mT) / 2
    rates, squares, scales = torch.stack(
        [_energy_rates(_heads(kind, beta, forms[p]), x[p]) for kind, beta, p in _cells(pairs)], 1
    ).reshape(3, 2, len(BETAS), pairs, STATES)
    rate_error = (rates[0] - PAIR / TOKENS * squares[0]).abs() / scales[0]
    falls = (rates < 0).double()
    falling_pairs = int(falls[1, COLD].amax(-1).sum())
    return Finding(
        evidence=Identity(errors, "relative difference"),
        null=Check(
            f"share of pairs of SA heads, beta = {BETAS[COLD]:g}, along which sum_h E_h falls at a state",
            Count(falling_pairs, pairs, "pairs"),
            Ruling.SUPPORTED,
            FALLS,
        ),
        printed=Check(f"{SHARE}, with MLPs inside", _rising_share(_printed_rates(case, forms, x)), region=RISES),
        also=(
            Check(SHARE, _rising_share(rates[0, COLD]), Ruling.SUPPORTED, RISES),
            Check(
                "error of d/dt sum_h E_h = (K/n) sum_i |x_i'|^2 over |gradient| |x'|, two heads of USA",
                Identity(rate_error.amax(0)),
                Ruling.BY_CONSTRUCTION,
                EXACT,
            ),
        ),
        data=curve(
            "falling",
            falls.mean(-1).permute(2, 1, 0),
            {"beta": BETAS, "heads": ("two of USA", "two of SA")},
            label="share of states at which sum_h E_h falls",
        ),
        remark=f"Along two heads of SA sum_h E_h falls at {falls[1, COLD].mean():.2%} of the states at beta = 4 and at "
        f"{falls[1, 0].mean():.2%} at beta = 1. MLPs inside change the velocity by "
        f"{mlp_changes.median():.2g} of its size in the median, by {mlp_changes.min():.2g} at least.",
        where=f"simulation on the unit sphere: fields at random states; identity: n = {TOKENS}, d = {DIM}, "
        f"{HEADS} heads, beta = 1 to {HEADS}; energies: n = {TOKENS}, d = 3, {PAIR} heads, "
        f"beta = {', '.join(f'{b:g}' for b in BETAS)}; nothing is integrated",
    )


def _heads(kind: type[SA] | type[USA], beta: float, forms: Tensor) -> list[SA | USA]:
    """Heads with V_h = Q_h^T K_h."""
    return [kind(beta, query_key=form, value=form) for form in forms]


def _rising_share(rates: Tensor) -> Replicates:
    """The share of the states of each pair at which the energy rises."""
    return Replicates((rates > 0).double().mean(-1), "pairs")


def _printed_rates(case: Case, forms: Tensor, x: Tensor) -> Tensor:
    """d/dt sum_h E_h (pair, state) along two USA heads with an MLP around each."""
    inward, outward = (case.normal(*forms.shape, stream=k) / forms.shape[-1] ** 0.5 for k in (7, 8))
    rates = []
    for form, states, w_in, w_out in zip(forms, x, inward, outward, strict=True):
        mlps = [MLP(w_in=w, w_out=out) for w, out in zip(w_in, w_out, strict=True)]
        rates.append(_energy_rates(_heads(USA, BETAS[COLD], form), states, mlps)[0])
    return torch.stack(rates)


def _cells(pairs: int) -> Iterator[tuple[type[SA] | type[USA], float, int]]:
    return ((kind, beta, p) for kind in (USA, SA) for beta in BETAS for p in range(pairs))


def _velocity_differences(case: Case) -> tuple[Tensor, Tensor]:
    """Relative differences between MultiHead and other forms, one per input: the largest from the mean of projections
    and the projection of the mean, and the smallest from the printed form.
    """
    sets = case.count(96, quick=32)
    shape = (sets, HEADS, DIM, DIM)
    forms, values, inward, outward = (case.normal(*shape, stream=k) / DIM**0.5 for k in range(4))
    clouds = retract(case.normal(sets, CLOUDS, TOKENS, DIM, stream=4))
    errors, mlp_changes = [], []
    for s, x in enumerate(clouds):
        differences, from_printed = [], []
        for kind in (SA, USA):
            heads = [kind(1.0 + h, query_key=forms[s, h], value=values[s, h]) for h in range(HEADS)]
            velocity = MultiHead(heads)(x)
            projections = torch.stack([head(x) for head in heads]).mean(0)
            mean = torch.stack([head.ambient(x) for head in heads]).mean(0)
            differences += [_difference(velocity, projections), _difference(velocity, project(x, mean))]
            mlps = [MLP(w_in=inward[s, h], w_out=outward[s, h]) for h in range(HEADS)]
            from_printed.append(_difference(velocity, MultiHeadAsPrinted(heads, mlps)(x)))
        errors.append(torch.stack(differences).amax(0))
        mlp_changes.append(torch.stack(from_printed).amin(0))
    return torch.cat(errors), torch.cat(mlp_changes)


def _difference(velocity: Tensor, other: Tensor) -> Tensor:
    return (velocity - other).abs().amax((-1, -2)) / velocity.abs().amax((-1, -2))


def _energy_rates(heads: Sequence[SA | USA], x: Tensor, mlps: Sequence[MLP] = ()) -> Tensor:
    """Three values per state: d/dt sum_h E_h along the heads, or along the printed form with ``mlps``;
    sum_i |x_i'|^2; and the upper bound |gradient| |x'| of the rate.
    """
    tokens = x.clone().requires_grad_()
    terms = [interaction_energy(tokens, beta=head.beta, query_key=head.query_key).sum() for head in heads]
    energy, velocity = torch.stack(terms), (MultiHeadAsPrinted(heads, mlps) if mlps else MultiHead(heads))(x)
    gradient = torch.autograd.grad(energy.sum(), tokens)[0]
    rate, square = (gradient * velocity).sum((-1, -2)), (velocity**2).sum((-1, -2))
    return torch.stack([rate, square, (gradient**2).sum((-1, -2)).sqrt() * square.sqrt()])
