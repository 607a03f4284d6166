"""The statistics of one group of contexts: covariances between contexts, and distances from a normal distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.geometry.arithmetic import full_precision

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import NDArray
    from torch import Tensor

    from helmscope.observe.context_group import ContextGroup

DIRECTIONS, NULL_SAMPLES = 16, 200


def covariance_regression(known: tuple[Tensor, Tensor], held_out: Float[Tensor, "d d"]) -> tuple[float, float, float]:
    """Regression of a held-out Sigma_C on Sigma_A, given (Sigma_C, Sigma_A) of the other contexts: the slope on
    held-out contexts, the held-out R^2 of the slope that the others give, and R^2 corrected for the number of contexts.
    NaN if Sigma_A is 0.

    >>> sigma = torch.diag(torch.tensor([1.0, 2.0]))
    >>> covariance_regression((2 * sigma, sigma), 2 * sigma)
    (2.0, 1.0, 1.0)
    """
    other, sampling = known
    size = float((sampling * sampling).sum())
    if not size > 0:
        return (float("nan"),) * 3
    slope = float((held_out * sampling).sum()) / size
    fitted = float((other * sampling).sum()) / size
    spread = float((held_out - held_out.mean()).square().sum())
    r_squared = 1 - float((held_out - fitted * sampling).square().sum()) / spread if spread > 0 else float("nan")
    product = float((held_out * other).sum())
    corrected = slope * fitted * size / product if product > 0 else float("nan")
    return slope, r_squared, corrected


@full_precision
def group_statistics(group: ContextGroup, seed: int, number: int) -> dict[str, float]:
    """The quantities of one group, the one of that number; see ``context_noise``."""
    outputs = group.outputs
    halves = [group.sigma_of(outputs[k::2]) for k in (0, 1)]
    sampling = [group.sigma_sampling(each) for each in group.covariances]
    fits = [covariance_regression((halves[k], sampling[k]), halves[1 - k]) for k in (0, 1)]
    slope, r_squared, corrected = (float(np.mean(each)) for each in zip(*fits, strict=True))
    whole = group.sigma_of(outputs)
    trace = float(whole.trace())
    per_head = outputs - outputs.mean(0)
    gram = group.writes.mT @ group.writes
    heads = float(torch.einsum("chs,hst,cht->", per_head, gram, per_head)) / (2 * (len(outputs) - 1))
    source = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(number,))))
    distance, null = _kolmogorov_distances(group.increments(outputs).numpy(), source)
    some = trace > 0
    return {
        "slope": slope,
        "r_squared": r_squared,
        "r_squared_corrected": corrected,
        "nu_context": trace / group.dim,
        "total_nu_token_sampling": float(sum(each.trace() for each in sampling)) / 2 / group.dim,
        "total_nu_random_values": group.random_trace / group.dim,
        "cross_head_share": (trace - heads) / trace if some else float("nan"),
        "cross_key_share": (trace - group.key_traces / 2) / trace if some else float("nan"),
        "kolmogorov_distance": distance,
        "kolmogorov_distance_null": null,
        "effective_keys": group.effective_keys,
        "context_count": float(len(outputs)),
    }


@full_precision
def _kolmogorov_distances(increments: np.ndarray, source: np.random.Generator) -> tuple[float, float]:
    """The mean Kolmogorov distance over random directions, and that of normal samples of the same size."""
    directions = source.standard_normal((increments.shape[1], DIRECTIONS))
    projected = increments @ directions
    return kolmogorov_distance(projected), kolmogorov_distance(source.standard_normal((len(increments), NULL_SAMPLES)))


def kolmogorov_distance(samples: NDArray[np.float64]) -> float:
    """The mean over columns of the Kolmogorov distance from N(0, 1) of samples standardized by their own mean and
    standard deviation; NaN for columns without spread.

    >>> round(kolmogorov_distance(np.array([[-1.0], [1.0]])), 4)
    0.2602
    """
    from scipy.special import ndtr

    spread = samples.std(0, ddof=1)
    usable = spread > 0
    if not usable.any():
        return float("nan")
    standard = np.sort((samples[:, usable] - samples[:, usable].mean(0)) / spread[usable], axis=0)
    levels = np.arange(len(samples) + 1)[:, None] / len(samples)
    expected = ndtr(standard)
    return float(np.maximum(levels[1:] - expected, expected - levels[:-1]).max(0).mean())
