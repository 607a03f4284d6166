"""Statistics of the cloud of all tokens of all prompts, with prompts as replicates.

The cloud of one prompt has fewer tokens than dimensions, and no covariance of full rank; that of all prompts has one. A
statistic theta of its mean and covariance gets its replicates from the delete-one-prompt jackknife: with theta_(-k) of
the cloud without prompt k, out of N,

    pseudo-value  p_k = N theta - (N - 1) theta_(-k),

whose mean is theta corrected for its bias of order 1/N, and whose Student interval is the jackknife interval. Prompts
are never drawn with replacement, which would double tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.track import token_weights
from helmscope.stats.replicates import pseudo_values
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

RANK_TOLERANCE = 1e-10  # of the largest eigenvalue of a covariance: smaller ones are 0


@dataclass(frozen=True, eq=False)
class CloudMoments:
    """Mean (*batch, d), covariance (*batch, d, d) and mass (*batch,) of clouds.

    >>> CloudMoments(torch.zeros(2), torch.eye(2).double(), torch.tensor(8.0)).gaussian_entropy.item()
    2.8378770664093453
    """

    mean: Float[Tensor, "*batch d"]
    covariance: Float[Tensor, "*batch d d"]
    mass: Float[Tensor, "*batch"]

    @cached_property
    def eigenvalues(self) -> Float[Tensor, "*batch d"]:
        """The eigenvalues of the covariance, ascending; what is 0 within rounding is 0.

        >>> CloudMoments(torch.zeros(2), torch.diag(torch.tensor([2.0, 0.0])), torch.tensor(1.0)).eigenvalues
        tensor([0., 2.])
        """
        values: Tensor = torch.linalg.eigvalsh(self.covariance)
        return torch.where(values > RANK_TOLERANCE * values[..., -1:], values, 0.0)

    @property
    def gaussian_entropy(self) -> Float[Tensor, "*batch"]:
        """(1/2) log det(2 pi e C), the entropy of the normal law of the same covariance and the largest that any law of
        it has; minus infinity where C is singular.

        >>> CloudMoments(torch.zeros(1), torch.zeros(1, 1), torch.tensor(1.0)).gaussian_entropy
        tensor(-inf)
        """
        return (self.eigenvalues.log() + math.log(2 * math.pi * math.e)).sum(-1) / 2

    @property
    def gaussian_fisher_information(self) -> Float[Tensor, "*batch"]:
        """E|grad log rho|^2 = tr C^-1 of the normal law of the same covariance, the least that any law of it has;
        infinite where C is singular.

        >>> CloudMoments(torch.zeros(2), 2 * torch.eye(2), torch.tensor(1.0)).gaussian_fisher_information
        tensor(1.)
        """
        return (1 / self.eigenvalues).sum(-1)


@dataclass(frozen=True, eq=False)
class PooledMoments:
    """Sums over the tokens of each prompt, from which the moments of all tokens, and without one prompt, follow.

    Sums are about ``center``, so that no digits are lost where the cloud is far from 0.

    >>> x = torch.tensor([[[1.0], [-1.0]], [[2.0], [-2.0]]]).double()
    >>> PooledMoments.of(x).whole.covariance  # the mean square about the mean
    tensor([[2.5000]], dtype=torch.float64)
    """

    mass: Float[Tensor, " prompt"]
    first: Float[Tensor, "prompt d"]
    second: Float[Tensor, "prompt d d"]
    center: Float[Tensor, " d"]

    @classmethod
    @full_precision
    def of(cls, x: Float[Tensor, "prompt n d"], weights: Float[Tensor, "prompt n"] | None = None) -> PooledMoments:
        """The sums of points x, in float64; those of weight 0 do not count. Raises HelmscopeError for fewer than two
        prompts and where a prompt has no token that counts.

        >>> PooledMoments.of(torch.ones(2, 3, 4)).mass
        tensor([3., 3.], dtype=torch.float64)
        """
        counts = token_weights(x, weights).double()
        if len(x) < 2:
            raise HelmscopeError(f"x has {len(x)} prompt, but statistics over prompts need at least 2")
        x = torch.where(counts.unsqueeze(-1) > 0, x.double(), 0.0)
        weighted = counts.unsqueeze(-1) * x
        center = weighted.sum((0, 1)) / counts.sum()
        moved = x - center
        weighted = counts.unsqueeze(-1) * moved
        return cls(counts.sum(-1), weighted.sum(-2), weighted.mT @ moved, center)

    @cached_property
    def whole(self) -> CloudMoments:
        """The moments of all tokens.

        >>> PooledMoments.of(torch.ones(2, 3, 4)).whole.mean
        tensor([1., 1., 1., 1.], dtype=torch.float64)
        """
        return self._moments(self.mass.sum(), self.first.sum(0), self.second.sum(0))

    @cached_property
    def without_one(self) -> CloudMoments:
        """The moments without each prompt in turn, (prompt, ...).

        >>> x = torch.tensor([[[1.0]], [[2.0]], [[5.0]]])
        >>> PooledMoments.of(x).without_one.mean.flatten()
        tensor([3.5000, 3.0000, 1.5000], dtype=torch.float64)
        """
        sums = (self.mass, self.first, self.second)
        mass, first, second = (each.sum(0) - each for each in sums)
        return self._moments(mass, first, second)

    def _moments(self, mass: Tensor, first: Tensor, second: Tensor) -> CloudMoments:
        shift = first / mass.unsqueeze(-1)
        covariance = second / mass[..., None, None] - shift.unsqueeze(-1) * shift.unsqueeze(-2)
        return CloudMoments(self.center + shift, covariance, mass)

    def pseudo_values(self, statistic: Callable[[CloudMoments], Float[Tensor, "*batch"]]) -> Float[Tensor, " prompt"]:
        """The jackknife pseudo-values of a statistic of the moments, one per prompt.

        >>> x = torch.tensor([[[1.0]], [[2.0]], [[5.0]]])
        >>> values = PooledMoments.of(x).pseudo_values(lambda moments: moments.mean[..., 0])
        >>> values.round(decimals=12)  # of a mean: the values
        tensor([1., 2., 5.], dtype=torch.float64)
        """
        return pseudo_values(statistic(self.whole), statistic(self.without_one), len(self.mass))
