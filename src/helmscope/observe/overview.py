"""The first look at a trajectory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import xarray as xr

from helmscope.observe.clusters import cluster_count
from helmscope.observe.energy import interaction_energy
from helmscope.observe.inner_products import clustering_probability, inner_product_histogram, mean_inner_product
from helmscope.observe.order import order_parameter
from helmscope.observe.rank import entropy_rank
from helmscope.observe.track import AT_LEAST_0, AT_LEAST_1, SHARE, track, trajectory_of, with_bounds
from helmscope.types import System, Trajectory, real_number

MOST_PAIRED = 2_048
BOUNDS = {
    "order": SHARE,
    "mean_inner_product": (-1.0, 1.0),
    "clusters": AT_LEAST_1,
    "entropy_rank": AT_LEAST_1,
    "energy": AT_LEAST_0,
}


def overview(
    trajectory: Trajectory | System, *, beta: float, delta: float = 1e-3, radius: float = 0.1, bins: int = 50
) -> xr.Dataset:
    """Clustering probability, order, clusters, rank, energy and histogram of inner products of every system over time.
    ``reduce_replicates`` gives means with intervals, and ``overview_figure`` draws them.

    ``beta`` is that of the energy, which is left out at beta = 0, where it is infinite, and NaN where it leaves the
    dtype. Tokens count by the weights of the trajectory. Of more than 2,048 tokens, pairs and clusters are those of
    every k-th, with the least k that leaves so few; the attribute ``every`` is k.

    >>> import torch
    >>> seen = overview(Trajectory(torch.zeros(1), torch.eye(3).expand(1, 2, 3, 3)), beta=1.0)
    >>> seen.clusters.values.tolist(), seen.probability.values.tolist()
    ([[3.0, 3.0]], [[0.0, 0.0]])
    """
    beta, trajectory = real_number("beta", beta, at_least=0), trajectory_of(trajectory)
    every = -(-trajectory.states.shape[-2] // MOST_PAIRED)
    few = _every(trajectory, every)
    parts = [
        clustering_probability(few, delta=delta),
        track(few, clusters=partial(cluster_count, radius=radius)),
        track(trajectory, order=order_parameter, mean_inner_product=mean_inner_product, entropy_rank=entropy_rank),
        inner_product_histogram(few, bins=bins),
    ]
    if beta > 0:
        energy = track(trajectory, energy=partial(interaction_energy, beta=beta))
        parts.append(energy.where(np.isfinite(energy)))
    merged = xr.merge(parts, combine_attrs="no_conflicts")
    return with_bounds(merged, BOUNDS).assign_attrs(beta=beta, delta=delta, radius=radius, every=every)


def _every(path: Trajectory, k: int) -> Trajectory:
    """Every k-th token."""
    weights = None if path.weights is None else path.weights[..., ::k]
    return replace(path, states=path.states[:, :, ::k], weights=weights, radius=None, tokens=None)
