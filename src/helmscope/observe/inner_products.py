"""Inner products <x_i, x_j> of different tokens: their histogram (source 001, figure 1) and the clustering probability
(figure 3).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import check_tokens
from helmscope.observe.track import mean_and_stderr, real_tokens, trajectory_of
from helmscope.types import System, Trajectory, check_measurement, fits_memory, real_number, whole_number

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


def mean_inner_product(
    x: Float[Tensor, "*batch n d"], *, mask: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Mean of <x_i, x_j> over pairs i != j of real tokens; NaN where there is no pair.

    >>> mean_inner_product(torch.eye(2))
    tensor(0.)
    """
    real = real_tokens(check_tokens(x), mask).to(x).unsqueeze(-1)
    # sum_ij <x_i, x_j> = |sum_i x_i|^2: no pair is looked at
    all_pairs = (real * x).sum(-2).square().sum(-1)
    count = real.sum((-1, -2))
    return (all_pairs - (real * x).square().sum((-1, -2))) / (count * (count - 1))


def clustering_fraction(
    x: Float[Tensor, "*batch n d"], *, delta: float, mask: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Share of pairs i != j of real tokens with <x_i, x_j> >= 1 - delta, read off |x_i - x_j|^2 <= 2 delta.

    >>> clustering_fraction(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), delta=1e-3)
    tensor(0.3333)
    """
    delta = real_number("delta", delta, at_least=0)
    pairs = _pairs(real_tokens(check_tokens(x), mask))
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    close = (distance <= math.sqrt(2 * delta)) & pairs
    return close.sum((-1, -2)).to(x.dtype) / pairs.sum((-1, -2))


def clustering_probability(trajectory: Trajectory | System, *, delta: float) -> xr.Dataset:
    """The probability that two tokens have met, P(<x_i, x_j> >= 1 - delta), over time (source 001, figure 3).

    Estimated by the mean ``clustering_fraction``; its standard error comes from the systems, since the pairs of one
    system are not independent.

    >>> seen = clustering_probability(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 3, 2, 2)), delta=1e-3)
    >>> float(seen.probability[0]), seen.attrs["n"]
    (0.0, 3)
    """
    path = trajectory_of(trajectory)
    share = clustering_fraction(path.states, delta=delta, mask=path.mask)
    dataset = mean_and_stderr(path, {"probability": share})
    return dataset.assign_attrs(delta=delta)


@full_precision
def inner_product_histogram(trajectory: Trajectory | System, *, bins: int = 100) -> xr.Dataset:
    """Histogram of <x_i, x_j>, i != j, on [-1, 1] at each time: the share of pairs in each bin, averaged over systems.

    Bins are closed on the left, the last one on both sides.

    >>> seen = inner_product_histogram(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 3, 2, 2)), bins=3)
    >>> seen.share[0].values.tolist()
    [0.0, 1.0, 0.0]
    """
    bins = whole_number("bins", bins, at_least=1)
    fits_memory(f"bins is {bins}", bins)
    path = trajectory_of(trajectory)
    x = path.states
    real = real_tokens(x, path.mask)
    pairs = _pairs(real).expand(*x.shape[:-1], x.shape[-2])
    edges = np.linspace(-1, 1, bins + 1)
    inner = torch.as_tensor(edges[1:-1], device=x.device)
    index = torch.bucketize((x @ x.mT).to(torch.float64), inner, right=True)
    counts = torch.zeros(*x.shape[:2], bins, dtype=x.dtype, device=x.device)
    counts.scatter_add_(-1, index.flatten(-2), pairs.flatten(-2).to(x.dtype))
    share = counts / counts.sum(-1, keepdim=True)
    dataset = mean_and_stderr(path, {"share": share}, extra={"inner_product": (edges[1:] + edges[:-1]) / 2})
    return check_measurement(dataset)


def _pairs(real: Bool[Tensor, "*batch n"]) -> Bool[Tensor, "*batch n n"]:
    n = real.shape[-1]
    different = ~torch.eye(n, dtype=torch.bool, device=real.device)
    return real.unsqueeze(-1) & real.unsqueeze(-2) & different
