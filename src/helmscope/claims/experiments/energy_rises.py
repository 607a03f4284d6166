"""energy-rises: the interaction energy rises along self-attention with V = +I and falls with V = -I."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors, Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA, USA
from helmscope.geometry import sphere
from helmscope.observe.energy import interaction_energy, interaction_energy_rate
from helmscope.solve.integrate import integrate
from helmscope.solve.layer import Layer
from helmscope.solve.rk4 import RK4

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CLOUDS, PAIRS = 1_024, 32


@experiment("energy-rises", seconds=2)
def energy_rises(case: TrialCase) -> Finding:
    """With V = +-I, Z_i = sum_j e^(beta <x_i, x_j>):  dE/dt = +-(1/n) sum_i (Z_i/n) |x_i'|^2 for SA, without Z_i/n for
    USA. Nothing of the kind holds for unrelated B = Q^T K and V; for V = +-B symmetric the signs hold again.

    Uniform starts, integrated for 10 half-steps of 0.1 (USA: 0.1 e^-beta), long before they converge. The statistic of
    a start is the largest change of E over a half-step against the sign of V, over the range of E on its path. Whole
    layers N(x + f(x)) are tried as well: with V = -I they overshoot at large beta. The identity is compared with the
    gradient of E by automatic differentiation and with ``interaction_energy_rate``.
    """
    betas, n, dim, step, steps, layers = (
        case.constant(name) for name in ("betas", "tokens", "dim", "step", "steps", "layers")
    )
    times = [step * k for k in range(steps + 1)]
    starts, middle, eye = case.count(256, quick=96), betas[1], torch.eye(dim, dtype=torch.float64)
    listed = ", ".join(f"{beta:g}" for beta in betas)
    x = sphere.retract(case.normal(starts, n, dim, index=0))
    up = [path(SA(beta=beta, value=eye), x, times) for beta in betas]
    down = [path(SA(beta=beta, value=-eye), x, times) for beta in betas]
    flat = [path(USA(beta=beta, value=sign * eye), x, times, math.exp(-beta)) for beta in betas for sign in (1.0, -1.0)]
    layered, repelled = ([through_layers(SA(beta=beta, value=v), x, layers) for beta in betas] for v in (eye, -eye))
    b, v = case.normal(2, PAIRS, dim, dim, index=1) / dim**0.5
    symmetric = (b + b.mT) / 2
    signs = torch.tensor((1.0, -1.0), dtype=torch.float64).repeat(PAIRS // 2)
    unrelated, related = (
        _energies(middle, x, times, b, v),
        _energies(middle, x, times, symmetric, signs[:, None, None] * symmetric),
    )
    clouds = sphere.retract(case.normal(CLOUDS, n, dim, index=2))
    overshooting = [f"{float((smallest(energy, -1.0) < 0).double().mean()):.0%}" for energy in repelled]
    plotted = torch.stack([up[1][:, :PAIRS], down[1][:, :PAIRS], unrelated], -1)
    gained = ((plotted - plotted[0]) / (plotted.amax(0) - plotted.amin(0))).transpose(0, 1)
    axes = {"time": times, "flow": ("V = +I", "V = -I", "unrelated B and V")}
    wrong = [_against(energy, 1.0) for energy in (*up, *flat[::2])] + [
        _against(energy, -1.0) for energy in (*down, *flat[1::2])
    ]
    return Finding(
        evidence={
            "identity of dE/dt": IdentityErrors(_identity_errors(clouds, betas), "relative error"),
            "change against the sign": IdentityErrors(torch.cat(wrong), "change against the sign"),
        },
        controls={
            "unrelated Q^T K and V": Replicates(smallest(unrelated), "starts"),
            "V = +-Q^T K symmetric": Replicates(smallest(related, signs), "starts"),
            "whole layers, V = +I": _at_every_beta(layered, betas, 1.0),
            "whole layers, V = -I": _at_every_beta(repelled, betas, -1.0),
        },
        printed=IdentityErrors(error(SA(beta=middle, value=eye), clouds, middle)),
        data=curve("gained", gained, axes, label=f"(E - E(0)) / range of E, beta = {middle:g}"),
        remark=(
            f"Unrelated Q^T K and V: E falls at {float((unrelated.diff(dim=0) < 0).double().mean()):.0%} of the "
            f"half-steps. {layers} whole post-norm layers with V = -I, no small steps: E rises at one or more for "
            f"{', '.join(overshooting)} of the starts at beta = {listed}."
        ),
        setting=f"simulation on the unit sphere: n = {n}, d = {dim}, beta = {listed}; the half-steps of the "
        f"verdict are {steps} steps of {step:g} of the flow, RK4",
    )


def path(field: SA | USA, x: Tensor, times: Sequence[float], unit: float = 1.0) -> Tensor:
    """E (time, *batch), with the beta and B of the field, at evenly spaced times, in units of ``unit``."""
    states = integrate(field, x, [unit * t for t in times], stepper=RK4(unit * (times[1] - times[0]))).states
    return interaction_energy(states, beta=field.beta, query_key=field.query_key)


def through_layers(field: SA | USA, x: Tensor, layers: int) -> Tensor:
    """E at the start and after each whole layer N(x + f(x))."""
    states = integrate(field, x, range(layers + 1), stepper=Layer()).states
    return interaction_energy(states, beta=field.beta)


def _energies(beta: float, x: Tensor, times: Sequence[float], query_keys: Tensor, values: Tensor) -> Tensor:
    """E (time, start) where each start has its own pair of matrices."""
    return path(SA(beta=beta, query_key=query_keys, value=values), x[: len(query_keys)], times)


def smallest(energy: Tensor, sign: float | Tensor = 1.0) -> Tensor:
    """The smallest signed change of E along each path, over the range of E on that path."""
    return (sign * energy.diff(dim=0)).amin(0) / (energy.amax(0) - energy.amin(0))


def _at_every_beta(energies: list[Tensor], betas: Sequence[float], sign: float) -> ReplicatesInEveryCase:
    return ReplicatesInEveryCase(
        [smallest(energy, sign) for energy in energies], "starts", [f"beta = {beta:g}" for beta in betas]
    )


def _against(energy: Tensor, sign: float) -> Tensor:
    """The largest change of E against the sign along each path, over the range of E on that path; 0 if none."""
    return (-smallest(energy, sign)).clamp_min(0.0)


def _identity_errors(clouds: Tensor, betas: Sequence[float]) -> Tensor:
    """The largest relative error of the identity for dE/dt over flows, signs and beta, per cloud."""
    eye = torch.eye(clouds.shape[-1], dtype=clouds.dtype)
    flows = ((SA, 1.0), (SA, -1.0), (USA, 1.0), (USA, -1.0))
    errors = [error(kind(beta=beta, value=sign * eye), clouds, beta, sign) for kind, sign in flows for beta in betas]
    return torch.stack(errors).amax(0)


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
