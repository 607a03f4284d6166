"""mixture: a description of the mixture of clusters that the tokens form before they all merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Count, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.observe.clusters import cluster_count
from helmscope.observe.mixture import vmf_mixture
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from helmscope.observe.mixture import VMFMixture

TOL = 1e-6
LABELS = {
    "components": "number of components",
    "largest_mass": "largest mass of a component",
    "centers": "|sum w mu| of the centers (1: one center)",
}


@experiment("mixture", seconds=12)
def mixture(case: TrialCase) -> Finding:
    """sum_k w_k f(x; mu_k, kappa_k), f(x; mu, kappa) ~ e^(kappa <mu, x>), kappa <= 1000, the number of components of 1
    to 8 by the least BIC = -2 log-likelihood + (k (d + 1) - 1) log n.

    64 tokens on the circle, uniform at t = 0, are integrated under SA at beta = 1, 4, 9, and the mixture is fitted to
    each start at t = 0, 1, 2, 4, 8, 16. The statistic is the number of components at beta = 9, t = 8. It is compared
    with the number of clusters by single linkage at 0.1 radians, with that at beta = 1, and with fits to uniform
    tokens. The centers are summarised by |sum_k w_k mu_k|, which is 1 if all agree.
    """
    n, dim, betas, times = (case.constant(name) for name in ("tokens", "dim", "betas", "times"))
    beta, time, most, largest = (case.constant(name) for name in ("beta", "time", "most_components", "largest_kappa"))
    at_stated = (betas.index(beta), times.index(time))
    x0 = retract(case.normal(case.count(64, quick=32), n, dim, index=0))
    uniform = retract(case.normal(case.count(128, quick=64), n, dim, index=1))
    states = torch.stack([_states(each, x0, times) for each in betas])
    start, later, null = (vmf_mixture(x, max_components=most, max_kappa=largest) for x in (x0, states, uniform))
    stated = later.count[at_stated].double()
    linked = cluster_count(states[at_stated], max_angle=case.constant("radius"))
    at = f"beta = {beta:g}, t = {time:g}"
    capped = (later.kappas[at_stated] == largest).sum() / later.count[at_stated].sum()
    return Finding(
        evidence=Replicates(stated, "starts"),
        controls={
            "uniform tokens": Count(int((null.count == 1).sum()), len(null.count), "clouds"),
            "clusters by single linkage": Replicates(stated - linked, "starts"),
            "components at beta = 1": Replicates(stated - later.count[0, at_stated[1]], "starts"),
        },
        data=_curves(start, later, betas, times),
        remark=(
            f"The number of components at {at} ranges from {int(stated.min())} to {int(stated.max())}, the largest "
            f"mass is {float(later.weights[at_stated][:, 0].mean()):.2f} on average, and {float(capped):.0%} of the "
            f"components are tighter than kappa = {largest:g}. The largest number fitted to uniform tokens is "
            f"{int(null.count.max())}."
        ),
        setting=(
            f"simulation on the unit sphere: n = {n}, d = {dim}, beta = {betas[0]:g} to {betas[-1]:g}, t <= "
            f"{times[-1]:g}, Dormand-Prince"
        ),
    )


def _states(beta: float, x0: Tensor, times: Sequence[float]) -> Tensor:
    return integrate(SA(beta=beta), x0, times=times, stepper=DormandPrince(tol=TOL)).states


def _curves(start: VMFMixture, later: VMFMixture, betas: Sequence[float], times: Sequence[float]) -> xr.Dataset:
    """The number of components, the largest mass and the agreement of the centers, over time by beta."""
    axes = {"time": (0.0, *times), "beta": [f"beta = {beta:g}" for beta in betas]}
    first, rest = _summaries(start), _summaries(later)
    curves = []
    for name, label in LABELS.items():
        values = torch.cat([first[name].expand(len(betas), 1, -1), rest[name]], 1)  # (beta, time, start)
        curves.append(curve(name, values.permute(2, 1, 0), axes, label=label))
    return xr.merge(curves, join="outer")


def _summaries(fitted: VMFMixture) -> dict[str, Tensor]:
    """The plotted values of each fit, by the names in ``LABELS``."""
    mean = (fitted.weights.unsqueeze(-1) * fitted.centers).sum(-2)
    agreement = torch.linalg.vector_norm(mean, dim=-1)
    return {"components": fitted.count.double(), "largest_mass": fitted.weights[..., 0], "centers": agreement}
