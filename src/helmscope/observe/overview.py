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
from helmscope.observe.inner_products import close_pair_shares, inner_product_histogram, mean_inner_product
from helmscope.observe.order import order_parameter
from helmscope.observe.rank import effective_rank
from helmscope.observe.track import (
    AT_LEAST_0,
    AT_LEAST_1,
    SHARE,
    track,
    trajectory_of,
    warn_of_short_texts,
    with_bounds,
)
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, System, Trajectory, check_progress, check_real, type_with_article
from helmscope.types.progress import ProgressOption

MAX_PAIRED = 2_048
PAIRS_AT_ONCE = 1 << 20
BOUNDS = {
    "order_parameter": SHARE,
    "mean_inner_product": (-1.0, 1.0),
    "cluster_count": AT_LEAST_1,
    "effective_rank": AT_LEAST_1,
    "interaction_energy": AT_LEAST_0,
}
LONG_NAMES = {
    "order_parameter": "order parameter |mean x|",
    "mean_inner_product": "mean inner product",
    "cluster_count": "number of clusters",
    "effective_rank": "effective rank (entropy)",
    "interaction_energy": "interaction energy",
}


@shows_progress("overview")
def overview(
    system: Trajectory | System,
    *,
    beta: float | None = None,
    delta: float | None = None,
    max_angle: float | None = None,
    bins: int = 50,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Share of close or aligned pairs, order parameter, number of clusters, rank, energy and histogram of inner
    products of every system over time.

    The result has the axes (time, system), or (depth, prompt) for a recording; ``reduce_replicates`` returns means with
    intervals, and ``overview_figure`` plots them. ``beta`` >= 0 is that of the energy, which is omitted at beta = 0,
    where it is infinite, and NaN where it overflows; for a simulation it defaults to the beta of its field, and must be
    given for everything else. ``close_pair_share`` is the share of pairs whose inner product is at least 1 - ``delta``,
    and tokens belong to one cluster within an angle ``max_angle`` of each other: 0.001 and 0.1 by default, where tokens
    have met. Tokens of a recording come near each other at most: there the share is that of aligned pairs,
    ``aligned_pair_share``, and the defaults are 0.1 and 0.45, the angle of an inner product of 0.9. A text with fewer
    than two tokens that count has no pairs: its values are NaN, with a warning. Tokens count by the weights of the
    trajectory. With more than 2,048 tokens, pairs and clusters are computed for every k-th token, with the
    smallest k that leaves at most 2,048; the attribute ``token_stride`` is k. ``progress`` is called with the share of
    the work done.

    >>> import torch
    >>> measured = overview(Trajectory(torch.zeros(1), torch.eye(3).expand(1, 2, 3, 3)), beta=1.0)
    >>> measured.cluster_count.values.tolist(), measured.close_pair_share.values.tolist()
    ([[3.0, 3.0]], [[0.0, 0.0]])
    """
    trajectory = trajectory_of(system)
    beta = check_real("beta", _beta_of(system) if beta is None else beta, at_least=0)
    of_model = trajectory.replicate == "prompt"
    delta = (0.1 if of_model else 1e-3) if delta is None else delta
    max_angle = (0.45 if of_model else 0.1) if max_angle is None else max_angle
    if of_model:
        warn_of_short_texts("pairs", (_token_counts(trajectory) < 2).tolist())
    stride = -(-trajectory.states.shape[-2] // MAX_PAIRED)
    report, parts = check_progress(progress), []
    steps, systems, tokens, _ = trajectory.states.shape
    # a few times at once: bounds the memory, and progress is reported in small steps
    size = max(1, PAIRS_AT_ONCE // (max(1, systems) * (tokens // stride + 1) ** 2))
    for begin in range(0, max(steps, 1), size):
        part = _select_times(trajectory, slice(begin, begin + size))
        thinned = _thin_tokens(part, stride)
        computations: list[Callable[[], xr.Dataset]] = [
            partial(close_pair_shares, thinned, delta=delta),
            partial(track, thinned, cluster_count=partial(cluster_count, max_angle=max_angle)),
            partial(track, part, order_parameter=order_parameter, mean_inner_product=mean_inner_product),
            partial(track, part, effective_rank=effective_rank),
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
    if of_model:
        merged = merged.rename(close_pair_share="aligned_pair_share")
        merged.aligned_pair_share.attrs["long_name"] = f"share of pairs with an inner product of at least {1 - delta:g}"
    for name in LONG_NAMES.keys() & set(merged.data_vars):
        merged[name].attrs["long_name"] = LONG_NAMES[str(name)]
    return with_bounds(merged, BOUNDS).assign_attrs(beta=beta, delta=delta, max_angle=max_angle, token_stride=stride)


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


def _token_counts(path: Trajectory) -> torch.Tensor:
    """The number of tokens of each system that count."""
    _, systems, tokens, _ = path.states.shape
    if path.weights is None:
        return torch.full((systems,), tokens, device="cpu")
    return (path.weights > 0).sum(-1).amax(0).cpu()


def _finite_energy(path: Trajectory, beta: float) -> xr.Dataset:
    """The interaction energy, NaN where it overflows."""
    energy = track(path, interaction_energy=partial(interaction_energy, beta=beta))
    return energy.where(np.isfinite(energy))


def _select_times(path: Trajectory, times: slice) -> Trajectory:
    """The trajectory at some of its times."""
    weights = path.weights if path.weights is None or len(path.weights) == 1 else path.weights[times]
    return replace(path, times=path.times[times], states=path.states[times], weights=weights, radius=None, tokens=None)


def _thin_tokens(path: Trajectory, k: int) -> Trajectory:
    """The trajectory of every k-th token."""
    weights = None if path.weights is None else path.weights[..., ::k]
    return replace(path, states=path.states[:, :, ::k], weights=weights, radius=None, tokens=None)
