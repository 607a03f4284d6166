"""The standard set of observables of a trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import xarray as xr

from helmscope.fields.field import Field
from helmscope.observe.clusters import cluster_count
from helmscope.observe.energy import interaction_energy
from helmscope.observe.inner_products import clustering_probability, inner_product_histogram, mean_inner_product
from helmscope.observe.order import order_parameter
from helmscope.observe.rank import entropy_rank
from helmscope.observe.track import AT_LEAST_0, AT_LEAST_1, SHARE, track, trajectory_of, with_bounds
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, System, Trajectory, check_progress, real_number, type_with_article
from helmscope.types.progress import ProgressOption

MOST_PAIRED = 2_048
PAIRS_AT_ONCE = 1 << 20
BOUNDS = {
    "order": SHARE,
    "mean_inner_product": (-1.0, 1.0),
    "clusters": AT_LEAST_1,
    "entropy_rank": AT_LEAST_1,
    "energy": AT_LEAST_0,
}
LONG_NAMES = {
    "order": "order parameter |mean x|",
    "mean_inner_product": "mean inner product",
    "clusters": "number of clusters",
    "entropy_rank": "effective rank (entropy)",
    "energy": "interaction energy",
}


@shows_progress("overview")
def overview(
    trajectory: Trajectory | System,
    *,
    beta: float | None = None,
    delta: float = 1e-3,
    radius: float = 0.1,
    bins: int = 50,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Clustering probability, order, clusters, rank, energy and histogram of inner products of every system over time.

    The result has the axes (time, system), or (depth, prompt) for a recording; ``reduce_replicates`` returns means with
    intervals, and ``overview_figure`` plots them. ``beta`` >= 0 is that of the energy, which is omitted at beta = 0,
    where it is infinite, and NaN where it overflows; for a simulation it defaults to the beta of its field, and must be
    given for everything else. Tokens count by the weights of the trajectory. With more than
    2,048 tokens, pairs and clusters are computed for every k-th token, with the smallest k that leaves at most 2,048;
    the attribute ``every`` is k. ``progress`` is called with the share of the work done.

    >>> import torch
    >>> measured = overview(Trajectory(torch.zeros(1), torch.eye(3).expand(1, 2, 3, 3)), beta=1.0)
    >>> measured.clusters.values.tolist(), measured.probability.values.tolist()
    ([[3.0, 3.0]], [[0.0, 0.0]])
    """
    system, trajectory = trajectory, trajectory_of(trajectory)
    beta = real_number("beta", _beta_of(system) if beta is None else beta, at_least=0)
    every = -(-trajectory.states.shape[-2] // MOST_PAIRED)
    report, parts = check_progress(progress), []
    steps, systems, tokens, _ = trajectory.states.shape
    # a few times at once: bounds the memory, and progress is reported in small steps
    size = max(1, PAIRS_AT_ONCE // (max(1, systems) * (tokens // every + 1) ** 2))
    for begin in range(0, max(steps, 1), size):
        part = _select_times(trajectory, slice(begin, begin + size))
        thinned = _thin_tokens(part, every)
        computations: list[Callable[[], xr.Dataset]] = [
            partial(clustering_probability, thinned, delta=delta),
            partial(track, thinned, clusters=partial(cluster_count, radius=radius)),
            partial(track, part, order=order_parameter, mean_inner_product=mean_inner_product),
            partial(track, part, entropy_rank=entropy_rank),
            partial(inner_product_histogram, thinned, bins=bins),
        ]
        if beta > 0:
            computations.append(partial(_finite_energy, part, beta))
        measurements = []
        for compute in computations:
            measurements.append(compute())
            done = len(measurements) / len(computations)
            report((begin + done * len(part.times)) / max(steps, 1))
        parts.append(xr.merge(measurements, compat="equals", combine_attrs="no_conflicts"))
    merged = xr.concat(parts, trajectory.axis, data_vars="minimal", coords="minimal", compat="equals", join="exact")
    for name in LONG_NAMES.keys() & set(merged.data_vars):
        merged[name].attrs["long_name"] = LONG_NAMES[str(name)]
    return with_bounds(merged, BOUNDS).assign_attrs(beta=beta, delta=delta, radius=radius, every=every)


def _beta_of(system: Trajectory | System) -> float:
    """The beta of a simulation's field; raises HelmscopeError unless there is one value for all its systems."""
    field = getattr(system, "field", None)
    beta = getattr(field, "beta", None)
    if beta is None:
        owner = f"the field {field.name}" if isinstance(field, Field) else type_with_article(system)
        raise HelmscopeError(f"beta is missing, and {owner} has none: pass the beta of the energy, such as beta=1.0")
    values = set(beta.detach().flatten().tolist()) if isinstance(beta, torch.Tensor) else {float(beta)}
    if len(values) > 1:
        raise HelmscopeError("beta is missing, but the systems of the simulation have several: pass that of the energy")
    return float(values.pop())


def _finite_energy(path: Trajectory, beta: float) -> xr.Dataset:
    """The interaction energy, NaN where it overflows."""
    energy = track(path, energy=partial(interaction_energy, beta=beta))
    return energy.where(np.isfinite(energy))


def _select_times(path: Trajectory, times: slice) -> Trajectory:
    """The trajectory at some of its times."""
    weights = path.weights if path.weights is None or len(path.weights) == 1 else path.weights[times]
    return replace(path, times=path.times[times], states=path.states[times], weights=weights, radius=None, tokens=None)


def _thin_tokens(path: Trajectory, k: int) -> Trajectory:
    """The trajectory of every k-th token."""
    weights = None if path.weights is None else path.weights[..., ::k]
    return replace(path, states=path.states[:, :, ::k], weights=weights, radius=None, tokens=None)
