"""extremes: the uniform distribution minimises the interaction energy, and a point mass maximises it."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Count, IdentityErrors
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.observe.energy import interaction_energy
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.theory.energy import max_energy, min_energy

if TYPE_CHECKING:
    from torch import Tensor

TIMES, STEP = tuple(float(t) for t in range(17)), 1.0
SIGNS, WAYS = (1.0, -1.0), ("ascent, V = +I", "descent, V = -I")
LEAN = 4.0
POLYGON, RINGS = 48, 14  # exact to degree 47 on the circle, 27 on the sphere: a relative 1e-14 up to beta = 9
ROTATIONS = {2: 224, 3: 32}


@experiment("extremes", seconds=3.5)
def extremes(case: TrialCase) -> Finding:
    """E_min = Gamma(d/2) (2/beta)^(d/2-1) I_(d/2-1)(beta) / (2 beta) <= E <= E_max = e^beta / (2 beta).

    Random clouds, from uniform to concentrated, each integrated under SA with V = +I and with V = -I. The crossing of a
    cloud is the largest of (E_min - E)/E_min and (E - E_max)/E_max over its times, or 0. Further checks: the flows do
    ascend and descend (the largest relative change of E in the wrong direction from one time to the next), and the
    bounds are attained, by the uniform distribution, as a polygon or a weighted quadrature of the sphere that is exact
    to rounding, and by a point mass, both rotated at random.
    """
    dims, betas, tokens, lower = (case.constant(name) for name in ("dims", "betas", "tokens", "lower"))
    clouds = case.count(256, quick=112)
    crossings, beyond, reversals, positions, at_points = ([] for _ in range(5))
    highest, lowest = 0.0, math.inf
    lean = torch.linspace(0, LEAN, clouds, dtype=torch.float64)[:, None, None]
    for index, (dim, beta) in enumerate(itertools.product(dims, betas)):
        pole = torch.eye(1, dim, dtype=torch.float64)
        x = retract(case.normal(clouds, tokens, dim, index=index) + dim**0.5 * lean * pole)
        bottom, top = min_energy(beta=beta, dim=dim), max_energy(beta=beta)
        energy = torch.stack([_energies(x, beta, sign) for sign in SIGNS], -1)  # (cloud, time, way)
        crossings.append(crossing(energy, bottom, top))
        change = energy.diff(dim=1) / energy[:, 1:] * torch.tensor(SIGNS, dtype=x.dtype)
        reversals.append((-change).clamp_min(0.0).flatten(1).amax(-1))
        positions.append((energy - bottom) / (top - bottom))
        highest, lowest = max(highest, float(energy.max()) / top), min(lowest, float(energy.min()) / bottom)
        at_points.append(_relative_gap(interaction_energy(x[:, :1].expand_as(x), beta=beta), top))
        if beta > 1.1:
            beyond.append(energy[..., 0].amax(-1) > max_energy(beta=lower * beta))
    crossed = torch.cat(beyond)
    return Finding(
        evidence={
            "crossing": IdentityErrors(torch.cat(crossings), "relative crossing"),
            "monotone energy": IdentityErrors(torch.cat(reversals), "relative change in the wrong direction"),
            "uniform distribution": IdentityErrors(_uniform_gaps(case), "relative difference"),
            "point mass": IdentityErrors(torch.cat(at_points), "relative difference"),
        },
        controls={"E_max at a lower beta": Count(int(crossed.sum()), len(crossed), "ascents")},
        data=curve("place", torch.cat(positions), {"time": TIMES, "flow": WAYS}, label="(E - E_min) / (E_max - E_min)"),
        remark=f"The highest energy has 1 - E/E_max = {1 - highest:.1e}, the lowest E/E_min - 1 = {lowest - 1:.1e}.",
        setting=f"simulation on the unit sphere: n = {tokens}, d = {', '.join(map(str, dims))}, "
        f"beta = {', '.join(f'{beta:g}' for beta in betas)}, t <= {TIMES[-1]:g}, RK4 step {STEP:g}",
    )


def crossing(energy: Tensor, bottom: float, top: float) -> Tensor:
    """The largest relative distance of each cloud's energies outside [bottom, top], or 0."""
    outside = torch.maximum((bottom - energy) / bottom, (energy - top) / top)
    return outside.flatten(1).amax(-1).clamp_min(0.0)


def _relative_gap(energy: Tensor, exact: float) -> Tensor:
    return (energy - exact).abs() / exact


def _uniform_gaps(case: TrialCase) -> Tensor:
    """The relative difference from E_min of the uniform distribution's energy, by randomly rotated quadratures."""
    errors = []
    for index, (dim, beta) in enumerate(itertools.product(ROTATIONS, case.constant("betas")), start=100):
        x, weights = _polygon() if dim == 2 else _sphere_quadrature()
        rotations = torch.linalg.qr(case.normal(ROTATIONS[dim], dim, dim, index=index)).Q
        energy = interaction_energy(retract(x @ rotations), beta=beta, weights=weights)
        errors.append(_relative_gap(energy, min_energy(beta=beta, dim=dim)))
    return torch.cat(errors)


def _polygon() -> tuple[Tensor, Tensor]:
    """The vertices of a regular polygon, and their weights."""
    angles = 2 * math.pi * torch.arange(POLYGON, dtype=torch.float64) / POLYGON
    return torch.stack([angles.cos(), angles.sin()], -1), torch.ones_like(angles)


def _sphere_quadrature() -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes in height times equally spaced longitudes, and their weights."""
    height, weights = (torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(RINGS))
    angles = math.pi * torch.arange(2 * RINGS, dtype=torch.float64) / RINGS
    radius = (1 - height.square()).sqrt()[:, None]
    x = torch.stack([radius * angles.cos(), radius * angles.sin(), height[:, None].expand(-1, 2 * RINGS)], -1)
    return x.flatten(0, 1), weights.repeat_interleave(2 * RINGS)


def _energies(x: Tensor, beta: float, sign: float) -> Tensor:
    """E along the flow with V = sign I (cloud, time)."""
    field = SA(beta, value=sign * torch.eye(x.shape[-1], dtype=x.dtype))
    return interaction_energy(integrate(field, x, TIMES, stepper=RK4(STEP)).states, beta=beta).T
