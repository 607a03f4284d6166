"""The standard set of observables of a trajectory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import xarray as xr

from helmscope.observe.clusters import cluster_count
from helmscope.observe.energy import interaction_energy
from helmscope.observe.inner_products import (
    MET,
    close_pair_shares,
    inner_product_histogram,
    inner_product_quantiles,
    mean_inner_product,
)
from helmscope.observe.labels import label_attributes
from helmscope.observe.order import order_parameter
from helmscope.observe.rank import effective_rank
from helmscope.observe.track import (
    AT_LEAST_0,
    AT_LEAST_1,
    SHARE,
    origin_attributes,
    token_weights,
    track,
    trajectory_of,
    warn_of_short_texts,
    with_bounds,
)
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, System, Trajectory, check_progress, check_real
from helmscope.types.progress import ProgressOption

MET_ANGLE, ALIGNED_ANGLE = 0.1, math.pi / 3  # within which tokens have met; of an inner product of 1/2, for models
MAX_PAIRED = 2_048
PAIRS_AT_ONCE = 1 << 20
BOUNDS = {
    "order_parameter": SHARE,
    "mean_inner_product": (-1.0, 1.0),
    "cluster_count": AT_LEAST_1,
    "clusters_per_token": SHARE,
    "effective_rank": AT_LEAST_1,
    "interaction_energy": AT_LEAST_0,
}
LONG_NAMES = {
    "order_parameter": "order parameter |mean x|",
    "mean_inner_product": "mean inner product",
    "cluster_count": "number of clusters",
    "clusters_per_token": "clusters per token",
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
    """Closeness of pairs, order parameter, clusters, rank, energy and histogram of inner products of every system over
    time.

    The result has the axes (time, system), or (depth, prompt) for a recording; ``reduce_replicates`` returns means with
    intervals, and ``plot`` draws one or several overviews. Tokens belong to one cluster within an angle ``max_angle``
    of each other. ``beta`` >= 0 is that of the energy, which is NaN where it overflows. For a simulation it defaults to
    the beta of its field; without any, as for a recording, and at beta = 0, where it is infinite, the energy is left
    out.

    Tokens of a simulation meet: ``close_pair_share`` is the share of pairs whose inner product is at least 1 -
    ``delta``, 0.001 by default, and ``cluster_count`` the number of clusters at ``max_angle`` = 0.1. Tokens of a
    recording come near each other at most, and texts have different lengths: ``inner_product_quantile`` (axis
    ``quantile``) has the median and the middle 90 % of the inner products, ``clusters_per_token`` the number of
    clusters over that of tokens, at ``max_angle`` = pi/3, and ``close_pair_share`` is there only if ``delta`` is given.

    A text with fewer than two tokens that count has no pairs: its values are NaN, with a warning. Tokens count by the
    weights of the trajectory. With more than 2,048 tokens, pairs and clusters are computed for every k-th token, with
    the smallest k that leaves at most 2,048; the attribute ``token_stride`` is k. ``progress`` is called with the share
    of the work done.

    >>> import torch
    >>> measured = overview(Trajectory(torch.zeros(1), torch.eye(3).expand(1, 2, 3, 3)), beta=1.0)
    >>> measured.cluster_count.values.tolist(), measured.close_pair_share.values.tolist()
    ([[3.0, 3.0]], [[0.0, 0.0]])
    """
    trajectory = trajectory_of(system)
    beta = _beta_of(system) if beta is None else beta
    beta = beta if beta is None else check_real("beta", beta, at_least=0)
    of_model = trajectory.replicate == "prompt"
    delta = MET if delta is None and not of_model else delta
    max_angle = (ALIGNED_ANGLE if of_model else MET_ANGLE) if max_angle is None else max_angle
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
        clusters = partial(cluster_count, max_angle=max_angle)
        computations: list[Callable[[], xr.Dataset]] = [
            partial(_clusters_per_token, thinned, clusters)
            if of_model
            else partial(track, thinned, cluster_count=clusters),
            partial(track, part, order_parameter=order_parameter, mean_inner_product=mean_inner_product),
            partial(track, part, effective_rank=effective_rank),
            partial(inner_product_histogram, thinned, bins=bins),
        ]
        if of_model:
            computations.append(partial(inner_product_quantiles, thinned))
        if delta is not None:
            computations.append(partial(close_pair_shares, thinned, delta=delta))
        if beta:
            computations.append(partial(_finite_energy, part, beta))
        measurements = []
        for compute in computations:
            measurements.append(compute())
            done = len(measurements) / len(computations)
            report((begin + done * len(part.times)) / max(steps, 1))
        parts.append(xr.merge(measurements, compat="equals", combine_attrs="no_conflicts"))
    merged = xr.concat(parts, trajectory.axis, data_vars="minimal", coords="minimal", compat="equals", join="exact")
    for name in LONG_NAMES.keys() & set(merged.data_vars):
        merged[name].attrs |= label_attributes(LONG_NAMES[str(name)])
    parameters: dict[str, object] = {"beta": beta, "delta": delta, "max_angle": max_angle, "token_stride": stride}
    parameters |= origin_attributes(system)
    return with_bounds(merged, BOUNDS).assign_attrs({k: each for k, each in parameters.items() if each is not None})


def _beta_of(system: Trajectory | System) -> float | None:
    """The beta of a simulation's field, None if there is none; raises HelmscopeError for several values."""
    beta = getattr(getattr(system, "field", None), "beta", None)
    if beta is None:
        return None
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


def _clusters_per_token(path: Trajectory, clusters: Callable[..., torch.Tensor]) -> xr.Dataset:
    """The number of clusters over the number of tokens that count, at every time."""

    def per_token(x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        counted = (token_weights(x, weights) > 0).sum(-1)
        return clusters(x, weights=weights).double() / counted

    return track(path, clusters_per_token=per_token)


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
