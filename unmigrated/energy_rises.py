"""energy-rises: the interaction energy rises along self-attention with V = +I and falls with V = -I."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Count, EveryLayer, Finding, Identity, Replicates
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA, USA
from helmscope.geometry import sphere
from helmscope.observe.energy import interaction_energy, interaction_energy_rate
from helmscope.solve.integrate import integrate
from helmscope.solve.layer import Layer
from helmscope.solve.rk4 import RK4
from helmscope.types import Region, Ruling

if TYPE_CHECKING:
    from torch import Tensor

BETAS, TOKENS, DIM = (1.0, 4.0, 9.0), 16, 4
MIDDLE = BETAS[1]
STEP, HALF_STEPS, LAYERS = 0.1, 10, 6
CLOUDS, PAIRS = 1_024, 32
EYE = torch.eye(DIM, dtype=torch.float64)
EXACT = Region(text="The relative error is at most 1e-12.", high=1e-12)
SHARE = Region(text="At least 90 % of the starts.", low=0.9)
WHOLE = Region(text="The signed change is above 0 at every layer.", low=0.0)
LISTED = ", ".join(f"{beta:g}" for beta in BETAS)
LEAST = "smallest change of E over its range"


@experiment("energy-rises", seconds=2)
def energy_rises(case: Case) -> Finding:
    """With V = +-I, Z_i = sum_j e^(beta <x_i, x_j>):  dE/dt = +-(1/n) sum_i (Z_i/n) |x_i'|^2 for SA, without Z_i/n for
    USA. Nothing of the kind holds for unrelated B = Q^T K and V; for V = +-B symmetric the signs hold again.

    Uniform starts, integrated for 10 half-steps of 0.1 (USA: 0.1 e^-beta), long before they converge. The statistic of
    a start is the smallest change of E over a half-step, times the sign of V, over the range of E on its path. Whole
    layers N(x + f(x)) are tried as well: with V = -I they overshoot at large beta. The identity is compared with the
    gradient of E by automatic differentiation and with ``interaction_energy_rate``.
    """
    starts = case.count(256, quick=64)
    x = sphere.retract(case.normal(starts, TOKENS, DIM, stream=0))
    up = [path(SA(beta=beta, value=EYE), x) for beta in BETAS]
    down = [path(SA(beta=beta, value=-EYE), x) for beta in BETAS]
    flat = [path(USA(beta=beta, value=sign * EYE), x, math.exp(-beta)) for beta in BETAS for sign in (1.0, -1.0)]
    layered, repelled = ([through_layers(SA(beta=beta, value=v), x) for beta in BETAS] for v in (EYE, -EYE))
    b, v = case.normal(2, PAIRS, DIM, DIM, stream=1) / DIM**0.5
    symmetric = (b + b.mT) / 2
    signs = torch.tensor((1.0, -1.0), dtype=torch.float64).repeat(PAIRS // 2)
    unrelated, related = _energies(x, b, v), _energies(x, symmetric, signs[:, None, None] * symmetric)
    clouds = sphere.retract(case.normal(CLOUDS, TOKENS, DIM, stream=2))
    overshooting = [f"{float((smallest(energy, -1.0) < 0).double().mean()):.0%}" for energy in repelled]
    plotted = torch.stack([up[1][:, :PAIRS], down[1][:, :PAIRS], unrelated], -1)
    gained = ((plotted - plotted[0]) / (plotted.amax(0) - plotted.amin(0))).transpose(0, 1)
    axes = {"time": [STEP * k for k in range(HALF_STEPS + 1)], "flow": ("V = +I", "V = -I", "unrelated B and V")}
    return Finding(
        evidence=_at_every_beta(up, 1.0),
        null=Check(f"{LEAST}, unrelated Q^T K and V for each start", Replicates(smallest(unrelated), "starts")),
        printed=Check(
            "relative error of the identity for dE/dt, softmax with 1/beta and energy with beta",
            Identity(error(SA(beta=1 / MIDDLE, value=EYE), clouds, MIDDLE)),
            region=EXACT,
        ),
        also=(
            Check(f"{LEAST} times -1, V = -I", _at_every_beta(down, -1.0), Ruling.SUPPORTED),
            Check("share of starts that rise at every half-step, V = +I", _monotone(up, 1.0), Ruling.SUPPORTED, SHARE),
            Check(
                "share of starts that fall at every half-step, V = -I", _monotone(down, -1.0), Ruling.SUPPORTED, SHARE
            ),
            Check(f"{LEAST}, USA, V = +I", _at_every_beta(flat[::2], 1.0), Ruling.SUPPORTED),
            Check(f"{LEAST} times -1, USA, V = -I", _at_every_beta(flat[1::2], -1.0), Ruling.SUPPORTED),
            Check(
                f"{LEAST} times the sign, V = +-Q^T K symmetric",
                Replicates(smallest(related, signs), "starts"),
                Ruling.SUPPORTED,
            ),
            Check(f"whole post-norm layers, {LEAST}, V = +I", _at_every_beta(layered, 1.0), Ruling.SUPPORTED, WHOLE),
            Check(f"whole post-norm layers, {LEAST} times -1, V = -I", _at_every_beta(repelled, -1.0), region=WHOLE),
            *_identities(clouds),
        ),
        data=curve("gained", gained, axes, label=f"(E - E(0)) / range of E, beta = {MIDDLE:g}"),
        remark=(
            f"Unrelated Q^T K and V: E falls at {float((unrelated.diff(dim=0) < 0).double().mean()):.0%} of the "
            f"half-steps. {LAYERS} whole post-norm layers with V = -I, no small steps: E rises at one or more for "
            f"{', '.join(overshooting)} of the starts at beta = {LISTED}."
        ),
        where=f"simulation on the unit sphere: n = {TOKENS}, d = {DIM}, beta = {LISTED}; the half-steps of the verdict "
        f"are {HALF_STEPS} steps of {STEP:g} of the flow, RK4",
    )


def path(field: SA | USA, x: Tensor, unit: float = 1.0) -> Tensor:
    """E (time, *batch), with the beta and B of the field, at the start and after each half-step."""
    times = [STEP * unit * k for k in range(HALF_STEPS + 1)]
    states = integrate(field, x, times, stepper=RK4(STEP * unit)).states
    return interaction_energy(states, beta=field.beta, query_key=field.query_key)


def through_layers(field: SA | USA, x: Tensor) -> Tensor:
    """E at the start and after each whole layer N(x + f(x))."""
    states = integrate(field, x, range(LAYERS + 1), stepper=Layer()).states
    return interaction_energy(states, beta=field.beta)


def _energies(x: Tensor, query_keys: Tensor, values: Tensor) -> Tensor:
    """E (time, start) where each start has its own pair of matrices."""
    return path(SA(beta=MIDDLE, query_key=query_keys, value=values), x[: len(query_keys)])


def smallest(energy: Tensor, sign: float | Tensor = 1.0) -> Tensor:
    """The smallest signed change of E along each path, over the range of E on that path."""
    return (sign * energy.diff(dim=0)).amin(0) / (energy.amax(0) - energy.amin(0))


def _at_every_beta(energies: list[Tensor], sign: float) -> EveryLayer:
    return EveryLayer([smallest(energy, sign) for energy in energies], "starts", [f"beta = {beta:g}" for beta in BETAS])


def _monotone(energies: list[Tensor], sign: float) -> Count:
    """The number of starts whose energy changes in the direction of the sign at every half-step and every beta."""
    monotone = torch.stack([smallest(energy, sign) > 0 for energy in energies]).all(0)
    return Count(int(monotone.sum()), len(monotone), "starts")


def _identities(clouds: Tensor) -> list[Check]:
    """The identity for dE/dt of each flow that has one: the largest error over beta, per cloud."""
    checks = []
    for name, kind, sign in (("SA, V = +I", SA, 1.0), ("SA, V = -I", SA, -1.0), ("USA, V = +I", USA, 1.0)):
        errors = [error(kind(beta=beta, value=sign * EYE), clouds, beta, sign) for beta in BETAS]
        worst = Identity(torch.stack(errors).amax(0))
        checks.append(Check(f"relative error of dE/dt, {name}", worst, Ruling.BY_CONSTRUCTION, EXACT))
    return checks


def error(field: SA | USA, x: Tensor, beta: float, sign: float = 1.0) -> Tensor:
    """The difference between dE_beta/dt and +-(1/n) sum_i (Z_i/n) |x_i'|^2, relative to the latter."""
    tokens = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(interaction_energy(tokens, beta=beta).sum(), tokens)
    velocity = field(x)
    exact = (gradient * velocity).sum((-1, -2))
    weight = (field.beta * x @ x.mT).exp().mean(-1) if field.normalized else 1.0
    stated = sign * (weight * velocity.square().sum(-1)).mean(-1)
    gap = (exact - stated).abs()
    if field.beta == beta:
        gap = torch.maximum(gap, (interaction_energy_rate(x, field) - stated).abs())
    return gap / stated.abs()
