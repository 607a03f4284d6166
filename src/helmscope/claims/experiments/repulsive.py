"""repulsive: does self-attention with V = +I descend a repulsive energy and spread its tokens?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Count, IdentityErrors, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import angle, retract
from helmscope.observe.energy import gaussian_energy_as_printed, interaction_energy_sum
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.stats.scales import LogScale

if TYPE_CHECKING:
    from torch import Tensor

STEP = 0.25
TIMES = tuple(float(t) for t in range(21))
ROOT = 1 / math.sqrt(5)
# name, tokens, beta, time, and the inner products of all pairs
SHARP = (
    ("tetrahedron", 4, 2.0, 200.0, [-1 / 3] * 6),
    ("octahedron", 6, 2.0, 200.0, [-1.0] * 3 + [0.0] * 12),
    ("icosahedron", 12, 4.0, 400.0, [-1.0] * 6 + [-ROOT] * 30 + [ROOT] * 30),
)


@experiment("repulsive", seconds=2)
def repulsive(case: TrialCase) -> Finding:
    """F = 1/2 sum_ij e^(-(beta/2)|x_i - x_j|^2) = beta e^-beta E_sum on the unit sphere; V = +I increases it, V = -I
    decreases it.

    d log F/dt = <grad F, x'> / F at uniform starts on S^2, the gradient by automatic differentiation. The flow with
    V = -I and 4, 6, 12 tokens is integrated until it rests, and its sorted inner products are compared with those of
    the tetrahedron, octahedron and icosahedron; under V = +I the smallest angle between two tokens is recorded.
    """
    n, beta, starts = case.constant("tokens"), case.constant("beta"), case.count(256, quick=64)
    x, other = (retract(case.normal(starts, n, 3, index=index)) for index in (0, 1))
    paths = {sign: integrate(_flow(beta, sign), x, TIMES, stepper=RK4(STEP)).states for sign in (1.0, -1.0)}
    energy = torch.stack([gaussian_energy_as_printed(path, beta=beta).T for path in paths.values()], -1)
    smallest = torch.stack([_smallest_angle(path).T for path in paths.values()], -1)
    medians = smallest.median(0).values
    axes = {"time": TIMES, "value": ("V = +I", "V = -I")}
    return Finding(
        evidence=Replicates(_log_rate(x, beta, 1.0), "starts"),
        controls={
            "V = -I": Replicates(_log_rate(other, beta, -1.0), "starts"),
            "F and beta e^-beta E_sum": IdentityErrors(_identity_errors(case), "relative difference"),
            "smallest angle, V = +I": Replicates(smallest[:, -1, 0], "starts", LogScale()),
            **{sharp[0]: _reaches_polyhedron(case, number, *sharp[1:]) for number, sharp in enumerate(SHARP)},
        },
        data=xr.merge(
            [
                curve("energy", energy, axes, label="F as printed"),
                curve("angle", smallest, axes, label="smallest angle between two tokens (rad)"),
            ],
            join="outer",
        ),
        remark=f"From t = 0 to {TIMES[-1]:g} the median of the smallest angle goes from {medians[0, 0]:.2g} rad to "
        f"{medians[-1, 0]:.2g} under V = +I and to {medians[-1, 1]:.2g} under V = -I.",
        setting=f"simulation on the unit sphere: n = {n}, d = 3, beta = {beta:g}, t <= {TIMES[-1]:g}, RK4 step "
        f"{STEP:g}; polyhedra: {'; '.join(f'n = {k}, beta = {b:g}, t = {end:g}' for _, k, b, end, _ in SHARP)}",
    )


def _flow(beta: float, sign: float) -> SA:
    return SA(beta, value=sign * torch.eye(3, dtype=torch.float64))


def _log_rate(x: Tensor, beta: float, sign: float) -> Tensor:
    """d log F/dt along V = sign I, one value per start."""
    tokens = x.clone().requires_grad_()
    energy = gaussian_energy_as_printed(tokens, beta=beta)
    gradient = torch.autograd.grad(energy.sum(), tokens)[0]
    return (gradient * _flow(beta, sign)(x)).sum((-1, -2)) / energy.detach()


def _identity_errors(case: TrialCase) -> Tensor:
    """The relative error of F = beta e^-beta E_sum, at several beta and d."""
    errors = []
    for number, (beta, dim) in enumerate(((0.5, 2), (2.0, 3), (4.0, 8), (9.0, 32))):
        x = retract(case.normal(256, case.constant("tokens"), dim, index=10 + number))
        energy = gaussian_energy_as_printed(x, beta=beta)
        errors.append((energy - beta * math.exp(-beta) * interaction_energy_sum(x, beta=beta)).abs() / energy)
    return torch.cat(errors)


def _pairs(states: Tensor) -> tuple[Tensor, Tensor]:
    i, j = torch.triu_indices(states.shape[-2], states.shape[-2], 1)
    return states[..., i, :], states[..., j, :]


def _smallest_angle(states: Tensor) -> Tensor:
    return angle(*_pairs(states)).amin(-1)


def _reaches_polyhedron(case: TrialCase, number: int, n: int, beta: float, end: float, exact: list[float]) -> Count:
    """The share of starts that come to rest at a regular polyhedron."""
    starts = case.count(64, quick=32)
    x = retract(case.normal(starts, n, 3, index=20 + number))
    left, right = _pairs(integrate(_flow(beta, -1.0), x, [end], stepper=RK4(1.0)).states[-1])
    error = ((left * right).sum(-1).sort(-1).values - torch.tensor(exact, dtype=x.dtype)).abs().amax(-1)
    return Count(int((error <= 1e-6).sum()), starts, "starts")
