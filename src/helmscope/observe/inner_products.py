"""Inner products <x_i, x_j> of different tokens: quantiles, the histogram [Geshkovski et al. 2023, figure 1] and the
close-pair probability (figure 3). The pair i, j has weight m_i m_j, the product of the weights of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.linkage import pairs_within_chord
from helmscope.observe.labels import label_attributes
from helmscope.observe.observable import observable
from helmscope.observe.track import SHARE, counted_tokens, token_weights, trajectory_of, with_bounds, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    System,
    Trajectory,
    check_integer,
    check_memory,
    check_progress,
    check_real,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import Progress
    from helmscope.types.progress import ProgressOption

MET, ALIGNED = 1e-3, 0.5  # 1 - <x_i, x_j> of pairs that have met; of pairs within 60 degrees, for models
QUANTILES = (0.05, 0.5, 0.95)


@observable
def mean_inner_product(
    x: Float[Tensor, "*batch n d"], *, weights: Float[Tensor, "*batch n"] | None = None, distinct: bool = True
) -> Float[Tensor, "*batch"]:
    """Mean inner product over pairs i != j of each cloud, sum m_i m_j <x_i, x_j> / sum m_i m_j; NaN without any pair.

    With ``distinct=False`` pairs i = j count too, so that the result is |mean|^2: for clouds that stand for a density.

    >>> mean_inner_product(torch.eye(2)), mean_inner_product(torch.eye(2), distinct=False)
    (tensor(0.), tensor(0.5000))
    """
    x = counted_tokens(x, weights)
    m = token_weights(x, weights)
    weighted = m.unsqueeze(-1) * x
    # sum_ij m_i m_j <x_i, x_j> = |sum_i m_i x_i|^2 avoids the n^2 pairs
    all_pairs = weighted.sum(-2).square().sum(-1)
    if not distinct:
        return all_pairs / m.sum(-1).square()
    return (all_pairs - weighted.square().sum((-1, -2))) / _total_pair_weight(m)


@observable
def close_pair_share(
    x: Float[Tensor, "*batch n d"], *, delta: float, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Share of pairs i != j of each cloud that have met, <x_i, x_j> >= 1 - delta, computed as |x_i - x_j|^2 <= 2 delta.

    >>> close_pair_share(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), delta=1e-3)
    tensor(0.3333)
    """
    delta = check_real("delta", delta, at_least=0)
    x = counted_tokens(x, weights)
    m = token_weights(x, weights)
    close = pairs_within_chord(x, math.sqrt(2 * delta)).to(x.dtype)
    close.diagonal(dim1=-2, dim2=-1).zero_()
    return (m * (close * m.unsqueeze(-2)).sum(-1)).sum(-1) / _total_pair_weight(m)


@shows_progress("shares of close pairs")
def close_pair_shares(
    system: Trajectory | System, *, delta: float | None = None, progress: ProgressOption = None
) -> xr.Dataset:
    """Probability over time that two tokens are close, P(<x_i, x_j> >= 1 - delta) [Geshkovski et al. 2023, figure 3].

    The variable ``close_pair_share`` (time, system) is the share of the pairs of each system; its mean over systems
    estimates the probability. The standard error is over systems, since pairs of the same system are not independent;
    ``reduce_replicates`` returns both. ``delta`` is 0.001 by default, where tokens have met, and 0.5 for a recording:
    tokens of models hardly meet, and an angle of 60 degrees tells layers and untrained twins apart. Raises
    HelmscopeError for delta < 0. ``progress`` is called with the share of the states done.

    >>> measured = close_pair_shares(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 3, 2, 2)))
    >>> measured.close_pair_share.dims, measured.close_pair_share.values.tolist()
    (('time', 'system'), [[0.0, 0.0, 0.0]])
    """
    path = trajectory_of(system)
    delta = (ALIGNED if path.replicate == "prompt" else MET) if delta is None else delta
    share = _by_state(lambda x, m: close_pair_share(x, delta=delta, weights=m), path, check_progress(progress))
    measurement = with_replicates({"close_pair_share": share}, path)
    met = "share of pairs that have met" if delta <= MET else f"share of pairs with an inner product >= {1 - delta:.4g}"
    measurement.close_pair_share.attrs |= label_attributes(met)
    return with_bounds(measurement, {"close_pair_share": SHARE}).assign_attrs(delta=delta)


@shows_progress("quantiles of inner products")
@full_precision
def inner_product_quantiles(
    system: Trajectory | System, *, quantiles: Sequence[float] = QUANTILES, progress: ProgressOption = None
) -> xr.Dataset:
    """Quantiles of <x_i, x_j>, i < j, of each system at each time: by default the median and the middle 90 % of pairs.

    ``inner_product_quantile`` is along (time, system, quantile). The quantile q is the smallest inner product x such
    that the pairs with <x_i, x_j> <= x have at least the share q of the weight (``numpy.quantile`` with the method
    "inverted_cdf"); NaN without any pair. Raises HelmscopeError unless ``quantiles`` are increasing and in [0, 1].
    ``progress`` is called with the share of the states done.

    >>> tokens = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    >>> measured = inner_product_quantiles(Trajectory(torch.zeros(1), tokens.expand(1, 1, 3, 2)))
    >>> measured.inner_product_quantile.values.round(6).tolist()
    [[[0.0, 0.6, 0.8]]]
    """
    levels = [check_real("a quantile", level, at_least=0) for level in quantiles]
    if not levels or max(levels) > 1 or levels != sorted(set(levels)):
        raise HelmscopeError(f"quantiles is {quantiles!r:.60}, but it must hold increasing numbers between 0 and 1")
    path = trajectory_of(system)

    def pair_quantiles(x: Tensor, weights: Tensor | None) -> Tensor:
        m = token_weights(x, weights).expand(x.shape[:-1])
        i, j = torch.triu_indices(x.shape[-2], x.shape[-2], 1, device=x.device)
        pairs = (m[..., i] * m[..., j]).double()
        if not pairs.shape[-1]:
            return pairs.new_full((*x.shape[:-2], len(levels)), math.nan)
        # pairs without weight come last, where no quantile reads them
        products, order = (x @ x.mT)[..., i, j].double().where(pairs > 0, math.inf).sort(-1)
        cumulated = pairs.gather(-1, order).cumsum(-1)
        wanted = torch.tensor(levels, dtype=torch.float64, device=x.device).repeat(*x.shape[:-2], 1)
        places = torch.searchsorted(cumulated / cumulated[..., -1:], wanted)
        found = products.gather(-1, places.clamp(max=products.shape[-1] - 1))
        return found.where(cumulated[..., -1:] > 0, math.nan)

    values = _by_state(pair_quantiles, path, check_progress(progress))
    measurement = with_replicates({"inner_product_quantile": values}, path, {"quantile": levels})
    measurement.inner_product_quantile.attrs |= label_attributes("quantiles of inner products")
    return with_bounds(measurement, {"inner_product_quantile": (-1.0, 1.0)})


@shows_progress("histogram of inner products")
@full_precision
def inner_product_histogram(
    system: Trajectory | System, *, bins: int = 100, progress: ProgressOption = None
) -> xr.Dataset:
    """Histogram of <x_i, x_j>, i != j, on [-1, 1] for each system at each time: the share of its pairs in each bin.

    ``inner_product_histogram`` is along (time, system, inner_product), the latter with the bin centers. Bins are closed
    on the left, the last one on both sides. ``progress`` is called with the share of the states done.

    >>> histogram = inner_product_histogram(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 2, 2, 2)), bins=3)
    >>> histogram.inner_product_histogram.dims, histogram.inner_product_histogram[0].values.tolist()
    (('time', 'system', 'inner_product'), [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    """
    bins = check_integer("bins", bins, at_least=1)
    check_memory(f"bins is {bins}", bins)
    path = trajectory_of(system)
    x = path.states
    edges = np.linspace(-1, 1, bins + 1)
    inner = torch.as_tensor(edges[1:-1], device=x.device)

    def histogram(x: Tensor, weights: Tensor | None) -> Tensor:
        m = token_weights(x, weights)
        pairs = m.unsqueeze(-1) * m.unsqueeze(-2) * ~torch.eye(m.shape[-1], dtype=torch.bool, device=m.device)
        index = torch.bucketize((x @ x.mT).to(torch.float64), inner, right=True)
        counts = torch.zeros(*x.shape[:-2], bins, dtype=x.dtype, device=x.device)
        counts.scatter_add_(-1, index.flatten(-2), pairs.flatten(-2))
        return counts / counts.sum(-1, keepdim=True)

    share = _by_state(histogram, path, check_progress(progress))
    measurement = with_replicates(
        {"inner_product_histogram": share}, path, {"inner_product": (edges[1:] + edges[:-1]) / 2}
    )
    measurement.inner_product_histogram.attrs |= {"long_name": "share of pairs", "scale": "sqrt"}
    return with_bounds(measurement, {"inner_product_histogram": SHARE})


def _by_state(
    function: Callable[[Tensor, Tensor | None], Tensor], path: Trajectory, report: Progress
) -> Float[Tensor, "time batch *rest"]:
    """The values of a function of tokens and weights at each state of a trajectory, one state at a time."""
    values = []
    for k, x in enumerate(path.states):
        weights = None if path.weights is None else path.weights[k if len(path.weights) > 1 else 0]
        values.append(function(x, weights))
        report(len(values) / len(path.states))
    return torch.stack(values)


def _total_pair_weight(m: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Sum of m_i m_j over i != j."""
    return m.sum(-1).square() - m.square().sum(-1)
