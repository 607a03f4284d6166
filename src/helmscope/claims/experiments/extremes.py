"""extremes: the uniform law minimises the interaction energy, a point mass maximises it."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Count, Finding, Identity
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.observe.energy import interaction_energy
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.theory.energy import energy_max, energy_min
from helmscope.types import Region, Ruling

if TYPE_CHECKING:
    from torch import Tensor

DIMS, BETAS, TOKENS = (2, 3, 16), (0.5, 2.0, 4.0, 9.0), 12
TIMES, STEP = tuple(float(t) for t in range(17)), 1.0
SIGNS, WAYS = (1.0, -1.0), ("ascent, V = +I", "descent, V = -I")
LEAN, LOWER = 4.0, 0.99
POLYGON, RINGS = 48, 14  # exact up to degree 47 on the circle and 27 on the sphere: up to beta = 9, to 1e-14 of E
TURNS = {2: 224, 3: 32}
CROSSED = Region(text="More than half of the ascents cross it.", low=0.5)
MONOTONE = Region(text="No change the wrong way beyond a relative rounding of 1e-12.", high=1e-12)
UNIFORM = Region(text="The uniform law has the energy E_min within a relative 1e-12.", high=1e-12)
POINT = Region(text="A point mass has the energy E_max within a relative 1e-12.", high=1e-12)


@experiment("extremes", seconds=3.5)
def extremes(case: Case) -> Finding:
    """E_min = Gamma(d/2) (2/beta)^(d/2-1) I_(d/2-1)(beta) / (2 beta) <= E <= E_max = e^beta / (2 beta).

    Random clouds, from uniform ones to concentrated ones, each carried by SA with V = +I and with V = -I. The crossing
    of a cloud is the largest of (E_min - E)/E_min and (E - E_max)/E_max over its times, or 0. That the flows do ascend
    and descend is checked beside it: the largest relative change of E the wrong way from one time to the next. And so
    is that the bounds are attained: by the uniform law, as a polygon or a weighted quadrature of the sphere that is
    exact to rounding, and by a point mass, both turned at random.
    """
    clouds = case.count(256, quick=112)
    crossings, beyond, wrong, places, points = ([] for _ in range(5))
    high, low = 0.0, math.inf
    lean = torch.linspace(0, LEAN, clouds, dtype=torch.float64)[:, None, None]
    for stream, (dim, beta) in enumerate(itertools.product(DIMS, BETAS)):
        pole = torch.eye(1, dim, dtype=torch.float64)
        x = retract(case.normal(clouds, TOKENS, dim, stream=stream) + dim**0.5 * lean * pole)
        bottom, top = energy_min(beta=beta, dim=dim), energy_max(beta=beta)
        energy = torch.stack([_along(x, beta, sign) for sign in SIGNS], -1)  # (cloud, time, way)
        crossings.append(crossing(energy, bottom, top))
        change = energy.diff(dim=1) / energy[:, 1:] * torch.tensor(SIGNS, dtype=x.dtype)
        wrong.append((-change).clamp_min(0.0).flatten(1).amax(-1))
        places.append((energy - bottom) / (top - bottom))
        high, low = max(high, float(energy.max()) / top), min(low, float(energy.min()) / bottom)
        points.append(_apart(interaction_energy(x[:, :1].expand_as(x), beta=beta), top))
        if beta > 1.1:
            beyond.append(energy[..., 0].amax(-1) > energy_max(beta=LOWER * beta))
    crossed = torch.cat(beyond)
    return Finding(
        evidence=Identity(torch.cat(crossings), "relative crossing"),
        null=Check(
            f"share of ascents that cross E_max taken at {LOWER:g} beta",
            Count(int(crossed.sum()), len(crossed), "ascents"),
            Ruling.SUPPORTED,
            CROSSED,
        ),
        also=(
            Check(
                "relative change of E the wrong way from one time to the next, V = +I and V = -I",
                Identity(torch.cat(wrong)),
                Ruling.BY_CONSTRUCTION,
                MONOTONE,
            ),
            *_attained(_uniform(case), torch.cat(points)),
        ),
        data=curve("place", torch.cat(places), {"time": TIMES, "flow": WAYS}, label="(E - E_min) / (E_max - E_min)"),
        remark=f"The highest energy met has 1 - E/E_max = {1 - high:.1e}, the lowest E/E_min - 1 = {low - 1:.1e}.",
        where=f"simulation on the unit sphere: n = {TOKENS}, d = {', '.join(map(str, DIMS))}, "
        f"beta = {', '.join(f'{beta:g}' for beta in BETAS)}, t <= {TIMES[-1]:g}, RK4 step {STEP:g}",
    )


def crossing(energy: Tensor, bottom: float, top: float) -> Tensor:
    """How far, relatively, the energies of each cloud leave [bottom, top], 0 where they do not."""
    outside = torch.maximum((bottom - energy) / bottom, (energy - top) / top)
    return outside.flatten(1).amax(-1).clamp_min(0.0)


def _attained(uniform: Tensor, points: Tensor) -> tuple[Check, Check]:
    """That the two bounds are energies of laws, from the relative differences."""
    low, high = "the uniform law's energy and E_min, d = 2 and 3", "a point mass's energy and E_max"
    return (
        Check(f"relative difference of {low}", Identity(uniform), Ruling.BY_CONSTRUCTION, UNIFORM),
        Check(f"relative difference of {high}", Identity(points), Ruling.BY_CONSTRUCTION, POINT),
    )


def _apart(energy: Tensor, exact: float) -> Tensor:
    return (energy - exact).abs() / exact


def _uniform(case: Case) -> Tensor:
    """The relative differences of the uniform law's energy, as quadratures turned at random, from E_min."""
    errors = []
    for stream, (dim, beta) in enumerate(itertools.product(TURNS, BETAS), start=100):
        x, weights = _circle() if dim == 2 else _sphere()
        turns = torch.linalg.qr(case.normal(TURNS[dim], dim, dim, stream=stream)).Q
        energy = interaction_energy(retract(x @ turns), beta=beta, weights=weights)
        errors.append(_apart(energy, energy_min(beta=beta, dim=dim)))
    return torch.cat(errors)


def _circle() -> tuple[Tensor, Tensor]:
    """A regular polygon, with its weights."""
    angles = 2 * math.pi * torch.arange(POLYGON, dtype=torch.float64) / POLYGON
    return torch.stack([angles.cos(), angles.sin()], -1), torch.ones_like(angles)


def _sphere() -> tuple[Tensor, Tensor]:
    """Gauss's nodes of the height times equal longitudes, with their weights."""
    height, weights = (torch.from_numpy(each) for each in np.polynomial.legendre.leggauss(RINGS))
    angles = math.pi * torch.arange(2 * RINGS, dtype=torch.float64) / RINGS
    radius = (1 - height.square()).sqrt()[:, None]
    x = torch.stack([radius * angles.cos(), radius * angles.sin(), height[:, None].expand(-1, 2 * RINGS)], -1)
    return x.flatten(0, 1), weights.repeat_interleave(2 * RINGS)


def _along(x: Tensor, beta: float, sign: float) -> Tensor:
    """E at the times of the flow with V = sign I, (cloud, time)."""
    field = SA(beta, value=sign * torch.eye(x.shape[-1], dtype=x.dtype))
    return interaction_energy(integrate(field, x, TIMES, stepper=RK4(STEP)).states, beta=beta).T
