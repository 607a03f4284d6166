"""extremes: the uniform law minimises the interaction energy, a point mass maximises it."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Finding, Identity
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.observe.energy import interaction_energy
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.theory.energy import energy_max, energy_min
from helmscope.types import Ruling

if TYPE_CHECKING:
    from torch import Tensor

DIMS, BETAS, TOKENS = (2, 3, 16), (0.5, 2.0, 4.0, 9.0), 12
TIMES = tuple(float(t) for t in range(17))
SIGNS, WAYS = (1.0, -1.0), ("ascent, V = +I", "descent, V = -I")


@experiment("extremes", seconds=4)
def extremes(case: Case) -> Finding:
    """E_min = Gamma(d/2) (2/beta)^(d/2-1) I_(d/2-1)(beta) / (2 beta) <= E <= E_max = e^beta / (2 beta).

    Random clouds, from uniform ones to concentrated ones, each carried by SA with V = +I and with V = -I. The crossing
    of a cloud is the largest of (E_min - E)/E_min and (E - E_max)/E_max over its times, or 0. That the flows do ascend
    and descend is checked beside it: the largest relative change of E the wrong way from one time to the next.
    """
    clouds = case.count(256, quick=112)
    crossings, beyond, wrong, places = [], [], [], []
    high, low = 0.0, math.inf
    lean = torch.linspace(0, 2, clouds, dtype=torch.float64)[:, None, None]
    for stream, (dim, beta) in enumerate(itertools.product(DIMS, BETAS)):
        pole = torch.eye(1, dim, dtype=torch.float64)
        x = retract(case.normal(clouds, TOKENS, dim, stream=stream) + lean * pole)
        bottom, top = energy_min(beta=beta, dim=dim), energy_max(beta=beta)
        energy = torch.stack([_along(x, beta, sign) for sign in SIGNS], -1)  # (cloud, time, way)
        crossings.append(crossing(energy, bottom, top))
        change = energy.diff(dim=1) / energy[:, 1:] * torch.tensor(SIGNS, dtype=x.dtype)
        wrong.append((-change).clamp_min(0.0).flatten(1).amax(-1))
        places.append((energy - bottom) / (top - bottom))
        high, low = max(high, float(energy.max()) / top), min(low, float(energy.min()) / bottom)
        if beta > 1.1:
            beyond.append(crossing(energy[..., 0], bottom, energy_max(beta=0.99 * beta)))
    return Finding(
        evidence=Identity(torch.cat(crossings)),
        null=Check("ascent against E_max at 0.99 beta", Identity(torch.cat(beyond))),
        also=(Check("E the wrong way along V = +I and V = -I", Identity(torch.cat(wrong)), Ruling.BY_CONSTRUCTION),),
        data=curve("place", torch.cat(places), {"time": TIMES, "flow": WAYS}, label="(E - E_min) / (E_max - E_min)"),
        remark=f"The highest energy met has 1 - E/E_max = {1 - high:.1e}, the lowest E/E_min - 1 = {low - 1:.1e}.",
    )


def crossing(energy: Tensor, bottom: float, top: float) -> Tensor:
    """How far, relatively, the energies of each cloud leave [bottom, top], 0 where they do not."""
    outside = torch.maximum((bottom - energy) / bottom, (energy - top) / top)
    return outside.flatten(1).amax(-1).clamp_min(0.0)


def _along(x: Tensor, beta: float, sign: float) -> Tensor:
    """E at the times of the flow with V = sign I, (cloud, time)."""
    field = SA(beta, value=sign * torch.eye(x.shape[-1], dtype=x.dtype))
    return interaction_energy(integrate(field, x, TIMES, stepper=RK4(1.0)).states, beta=beta).T
