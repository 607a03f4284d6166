"""stable-softmax: does the factor 1/sqrt(d) keep the gradients of the softmax alive in high dimension?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment

if TYPE_CHECKING:
    from torch import Tensor

Scaling = Callable[[int], float]


@experiment("stable-softmax", seconds=2)
def stable_softmax(case: TrialCase) -> Finding:
    """The Jacobian of p = softmax(s) is diag(p) - p p^T. For queries and keys with standard normal components the
    dot-products s_j = <q, k_j> have variance d: at large d the largest of them has all the weight unless another one is
    within O(1) of it, which has a probability of order 1/sqrt(d), and so has the mean norm of the Jacobian. Divided by
    sqrt(d) they have variance 1, and nothing depends on d.

    A replicate is a seed with its own queries, each with its own keys; its statistic is the least-squares slope of the
    log of the mean Frobenius norm over queries in log d.
    """
    dims, keys, queries = (case.constant(name) for name in ("dims", "keys", "queries"))
    seeds = case.count(128, quick=32)

    def norms(index: int, scaling: Scaling, n: int = keys, m: int = queries) -> Tensor:
        """The mean norm (seed, dimension)."""
        samples = (dot_products(case, seeds, m, n, dim, index=8 * k + index) for k, dim in enumerate(dims))
        means = [jacobian_norm(scaling(dim) * s).mean(-1) for s, dim in zip(samples, dims, strict=True)]
        return torch.stack(means, -1)

    scaled = norms(0, lambda dim: dim**-0.5)
    plain = norms(2, lambda dim: 1.0)
    # near ties, which the mean rests on, are rarer among two keys than among many
    pairs = norms(4, lambda dim: 1.0, n=2, m=8 * queries)
    unit = norms(6, lambda dim: 1 / dim)  # for large d standard normal vectors have length sqrt(d)
    with_factor, without = log_slope(dims, scaled), log_slope(dims, plain)
    names = ("with 1/sqrt(d)", "without", "two keys, without")
    return Finding(
        evidence={"with the factor": Replicates(with_factor), "without the factor": Replicates(without)},
        controls={
            "no factor where one is claimed": Replicates(without),
            "the factor where none is claimed": Replicates(with_factor),
            "two keys without the factor": Replicates(log_slope(dims, pairs)),
            "unit vectors without the factor": Replicates(log_slope(dims, unit)),
        },
        data=curve(
            "norm",
            torch.stack([scaled, plain, pairs], -1),
            {"dimension": dims, "dot_products": names},
            label="mean Frobenius norm of the softmax Jacobian",
            log=True,
            over="seed",
        ),
        remark=(
            f"From d = {dims[0]:,} to {dims[-1]:,} the mean norm goes from {scaled[:, 0].mean():.3g} to "
            f"{scaled[:, -1].mean():.3g} with the factor, and from {plain[:, 0].mean():.3g} to "
            f"{plain[:, -1].mean():.3g} without."
        ),
        setting=f"simulation: standard normal queries and keys in R^d, {keys} keys per query, {queries:,} queries per "
        f"seed, d = {', '.join(f'{dim:,}' for dim in dims)}",
    )


def dot_products(case: TrialCase, seeds: int, queries: int, keys: int, dim: int, *, index: int) -> Tensor:
    """<q, k_j> for standard normal queries, each with its own standard normal keys: (seed, query, key).

    Given q they are independent and normal with variance |q|^2, and |q|^2 is chi-squared with ``dim`` degrees of
    freedom, so that no vector of R^dim is needed. The numbered streams ``index`` and ``index + 1`` are used.
    """
    squared_length = np.random.default_rng(case.seed_for(index + 1)).chisquare(dim, (seeds, queries, 1))
    return torch.from_numpy(squared_length).sqrt() * case.normal(seeds, queries, keys, index=index)


def jacobian_norm(logits: Tensor) -> Tensor:
    """The Frobenius norm of diag(p) - p p^T, p = softmax(logits): its square is the sum of (p_j (1 - p_j))^2 over j and
    of (p_i p_j)^2 over i != j. 1 - p_j is summed from the other weights, so that nothing cancels where p_j is near 1.
    """
    p = logits.softmax(-1).sort(-1).values
    others = torch.cat([1 - p[..., :-1], p[..., :-1].sum(-1, keepdim=True)], -1)
    squares = p.square()
    smaller = squares[..., :-1].cumsum(-1)  # sums over all smaller weights
    return ((p * others).square().sum(-1) + 2 * (squares[..., 1:] * smaller).sum(-1)).sqrt()


def log_slope(dims: Sequence[int], values: Tensor) -> Tensor:
    """The least-squares slope of log values (seed, dimension) in log d, one per seed."""
    x = torch.tensor(dims, dtype=torch.float64).log()
    x = x - x.mean()
    slope: Tensor = values.log() @ x / x.square().sum()
    return slope
