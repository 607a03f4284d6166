"""mixture: a description of the mixture of clusters that the tokens form before they all merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Count, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.reading import constants
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.observe.clusters import cluster_count
from helmscope.observe.mixture import vmf_mixture
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.observe.mixture import VMFMixture

CONSTANTS = constants("mixture")
TOKENS, DIM, RADIUS = (CONSTANTS[name] for name in ("tokens", "dim", "radius"))
BETAS, TIMES = (CONSTANTS[name] for name in ("betas", "times"))
STATED = (BETAS.index(CONSTANTS["beta"]), TIMES.index(CONSTANTS["time"]))
MOST, KAPPA_MAX, TOL = 8, 1e3, 1e-6
LABELS = {
    "components": "number of components",
    "largest_mass": "largest mass of a component",
    "centers": "|sum w mu| of the centers (1: one center)",
}


@experiment("mixture", seconds=12)
def mixture(case: Case) -> Finding:
    """sum_k w_k f(x; mu_k, kappa_k), f(x; mu, kappa) ~ e^(kappa <mu, x>), kappa <= 1000, the number of components of 1
    to 8 by the least BIC = -2 log-likelihood + (k (d + 1) - 1) log n.

    64 tokens on the circle, uniform at t = 0, are integrated under SA at beta = 1, 4, 9, and the mixture is fitted to
    each start at t = 0, 1, 2, 4, 8, 16. The statistic is the number of components at beta = 9, t = 8. It is compared
    with the number of clusters by single linkage at 0.1 radians, with that at beta = 1, and with fits to uniform
    tokens. The centers are summarised by |sum_k w_k mu_k|, which is 1 if all agree.
    """
    x0 = retract(case.normal(case.count(64, quick=32), TOKENS, DIM, stream=0))
    uniform = retract(case.normal(case.count(128, quick=64), TOKENS, DIM, stream=1))
    states = torch.stack([_states(beta, x0) for beta in BETAS])
    start, later, null = (vmf_mixture(x, max_components=MOST, kappa_max=KAPPA_MAX) for x in (x0, states, uniform))
    stated = later.count[STATED].double()
    linked = cluster_count(states[STATED], radius=RADIUS)
    beta, time = BETAS[STATED[0]], TIMES[STATED[1]]
    at = f"beta = {beta:g}, t = {time:g}"
    capped = (later.kappas[STATED] == KAPPA_MAX).sum() / later.count[STATED].sum()
    return Finding(
        evidence=Replicates(stated, "starts"),
        controls={
            "uniform tokens": Count(int((null.count == 1).sum()), len(null.count), "clouds"),
            "clusters by single linkage": Replicates(stated - linked, "starts"),
            "components at beta = 1": Replicates(stated - later.count[0, STATED[1]], "starts"),
        },
        data=_curves(start, later),
        remark=(
            f"The number of components at {at} ranges from {int(stated.min())} to {int(stated.max())}, the largest "
            f"mass is {float(later.weights[STATED][:, 0].mean()):.2f} on average, and {float(capped):.0%} of the "
            f"components are tighter than kappa = {KAPPA_MAX:g}. The largest number fitted to uniform tokens is "
            f"{int(null.count.max())}."
        ),
        where=(
            f"simulation on the unit sphere: n = {TOKENS}, d = {DIM}, beta = {BETAS[0]:g} to {BETAS[-1]:g}, t <= "
            f"{TIMES[-1]:g}, Dormand-Prince"
        ),
    )


def _states(beta: float, x0: Tensor) -> Tensor:
    return integrate(SA(beta=beta), x0, times=TIMES, stepper=DormandPrince(tol=TOL)).states


def _curves(start: VMFMixture, later: VMFMixture) -> xr.Dataset:
    """The number of components, the largest mass and the agreement of the centers, over time by beta."""
    axes = {"time": (0.0, *TIMES), "beta": [f"beta = {beta:g}" for beta in BETAS]}
    first, rest = _summaries(start), _summaries(later)
    curves = []
    for name, label in LABELS.items():
        values = torch.cat([first[name].expand(len(BETAS), 1, -1), rest[name]], 1)  # (beta, time, start)
        curves.append(curve(name, values.permute(2, 1, 0), axes, label=label))
    return xr.merge(curves, join="outer")


def _summaries(fitted: VMFMixture) -> dict[str, Tensor]:
    """The plotted values of each fit, by the names in ``LABELS``."""
    mean = (fitted.weights.unsqueeze(-1) * fitted.centers).sum(-2)
    agreement = torch.linalg.vector_norm(mean, dim=-1)
    return {"components": fitted.count.double(), "largest_mass": fitted.weights[..., 0], "centers": agreement}
