"""The first look at a trajectory."""

from __future__ import annotations

from dataclasses import replace

import xarray as xr

from helmscope.observe.clusters import cluster_count
from helmscope.observe.energy import interaction_energy
from helmscope.observe.inner_products import clustering_probability, inner_product_histogram, mean_inner_product
from helmscope.observe.order import order_parameter
from helmscope.observe.rank import entropy_rank
from helmscope.observe.track import track, trajectory_of
from helmscope.types import System, Trajectory, real_number

MOST_PAIRED = 2_048


def overview(
    trajectory: Trajectory | System, *, beta: float, delta: float = 1e-3, radius: float = 0.1, bins: int = 50
) -> xr.Dataset:
    """Clustering probability, order, clusters, rank, energy and histogram of inner products over time, each with its
    standard error over the systems.

    ``beta`` is that of the energy, which is left out at beta = 0, where it is infinite. Every real token counts alike:
    for a weighted cloud call the functions that take ``weights``. Of more than 2,048 tokens, pairs and clusters are
    those of every k-th, with the least k that leaves so few; the attribute ``every`` is k.

    >>> import torch
    >>> seen = overview(Trajectory(torch.zeros(1), torch.eye(3).expand(1, 2, 3, 3)), beta=1.0)
    >>> float(seen.clusters[0]), float(seen.probability[0])
    (3.0, 0.0)
    """
    beta, trajectory = real_number("beta", beta, at_least=0), trajectory_of(trajectory)
    mask = trajectory.mask
    seen = track(
        trajectory,
        order=lambda x: order_parameter(x, mask=mask),
        mean_inner_product=lambda x: mean_inner_product(x, mask=mask),
        entropy_rank=lambda x: entropy_rank(x, mask=mask),
    )
    every = -(-trajectory.states.shape[-2] // MOST_PAIRED)
    thin = None if mask is None else mask[:, ::every]
    few = replace(trajectory, states=trajectory.states[:, :, ::every], mask=thin, radius=None, tokens=None)
    parts = [
        clustering_probability(few, delta=delta),
        track(few, clusters=lambda x: cluster_count(x, radius=radius, mask=thin)),
        seen,
        inner_product_histogram(few, bins=bins),
    ]
    if beta > 0:
        parts.append(track(trajectory, energy=lambda x: interaction_energy(x, beta=beta, mask=mask)))
    merged = xr.merge(parts, combine_attrs="no_conflicts")
    return merged.assign_attrs(beta=beta, delta=delta, radius=radius, every=every)
