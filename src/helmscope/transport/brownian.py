"""Brownian motion with the generator nu Lap, on the sphere and in R^d, as the reference process of bridges: its
transition density p_t(x, y), sums of that density over weighted points, and the process pinned at both ends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import StateSpace
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.heat_kernel import heat_kernel_table
from helmscope.geometry.sphere import exp, project
from helmscope.types import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_BLOCK = 2**20  # pairs of points that are computed at a time
_PINNED_STEPS = 24


@dataclass(frozen=True)
class Brownian(ConciseRepr, ABC):
    """Base class: Brownian motion with the generator nu Lap, Sigma = nu I. Everything is unchecked and in float64."""

    nu: float

    @property
    @abstractmethod
    def space(self) -> StateSpace:
        """The sphere, or R^d."""

    @abstractmethod
    def log_density(self, x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], t: float) -> Float[Tensor, "n m"]:
        """log p_t(x_i, y_j), t > 0; with respect to surface area on the sphere."""

    @abstractmethod
    def _block(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], log_weights: Float[Tensor, " m"], t: float
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, "n d"]]:
        """The result of ``log_sum`` for a block of points x."""

    @abstractmethod
    def pinned(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "n d"], t: float, duration: float, generator: torch.Generator
    ) -> Float[Tensor, "n d"]:
        """A point at time t of the process that is at x_i at time 0 and at y_i after ``duration``, for every i."""

    def log_sum(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], log_weights: Float[Tensor, " m"], t: float
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, "n d"]]:
        """log phi and 2 nu grad log phi at x_i, where phi(x) = sum_j w_j p_t(x, y_j); in blocks of points x."""
        rows = max(1, _BLOCK // len(y))
        blocks = [self._block(part, y, log_weights, t) for part in torch.split(x, rows)]
        return torch.cat([block[0] for block in blocks]), torch.cat([block[1] for block in blocks])


@dataclass(frozen=True)
class SphereBrownian(Brownian):
    """Brownian motion on S^(d-1), by its heat kernel.

    >>> x = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    >>> SphereBrownian(nu=1.0).log_density(x, x, 100.0)  # -log 4 pi
    tensor([[-2.5310]], dtype=torch.float64)
    """

    @property
    def space(self) -> StateSpace:
        """The sphere."""
        return StateSpace.SPHERE

    @full_precision
    def log_density(self, x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], t: float) -> Float[Tensor, "n m"]:
        """log p_t(x_i, y_j), interpolated in a table."""
        table = heat_kernel_table(x.shape[-1], self.nu * t)
        return torch.cat([table(part @ y.mT)[0] for part in torch.split(x, max(1, _BLOCK // len(y)))])

    @full_precision
    def _block(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], log_weights: Float[Tensor, " m"], t: float
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, "n d"]]:
        log_p, slope = heat_kernel_table(x.shape[-1], self.nu * t)(x @ y.mT)
        log_p += log_weights
        log_phi = torch.logsumexp(log_p, 1)
        pull = (torch.exp(log_p - log_phi[:, None]) * slope) @ y
        return log_phi, 2 * self.nu * project(x, pull)

    def pinned(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "n d"], t: float, duration: float, generator: torch.Generator
    ) -> Float[Tensor, "n d"]:
        """By 24 steps of the pinned process z' = exp_z(h b + noise), from the nearer end, with the drift
        b = 2 nu grad log p_r(z, y), r the time left, and noise of the variance 2 nu h (r - h) / r, with which the step
        is exact in flat space.
        """
        if t > duration / 2:
            x, y, t = y, x, duration - t
        z, h = x, t / _PINNED_STEPS
        for k in range(_PINNED_STEPS if t > 0 else 0):
            left = duration - k * h
            slope = heat_kernel_table(z.shape[-1], self.nu * left)((z * y).sum(-1))[1]
            xi = torch.randn(z.shape, dtype=z.dtype, device=z.device, generator=generator)
            noise = math.sqrt(2 * self.nu * h * (left - h) / left) * xi
            z = exp(z, project(z, h * 2 * self.nu * slope[:, None] * y + noise))
            z = z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        return z


@dataclass(frozen=True)
class FlatBrownian(Brownian):
    """Brownian motion in R^d, p_t(x, y) = (4 pi nu t)^(-d/2) e^{-|x - y|^2 / (4 nu t)}.

    >>> x = torch.zeros(1, 2, dtype=torch.float64)
    >>> FlatBrownian(nu=0.5).log_density(x, x, 1.0)  # -log 2 pi
    tensor([[-1.8379]], dtype=torch.float64)
    """

    @property
    def space(self) -> StateSpace:
        """R^d."""
        return StateSpace.FLAT

    @full_precision
    def log_density(self, x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], t: float) -> Float[Tensor, "n m"]:
        """log p_t(x_i, y_j)."""
        center = y.mean(0)  # |x|^2 - 2 <x, y> + |y|^2 loses digits far from the origin
        x, y = x - center, y - center
        square = (x * x).sum(-1)[:, None] + (y * y).sum(-1) - 2 * x @ y.mT
        return -square.clamp(min=0) / (4 * self.nu * t) - x.shape[-1] / 2 * math.log(4 * math.pi * self.nu * t)

    @full_precision
    def _block(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], log_weights: Float[Tensor, " m"], t: float
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, "n d"]]:
        log_p = self.log_density(x, y, t) + log_weights
        log_phi = torch.logsumexp(log_p, 1)
        return log_phi, (torch.exp(log_p - log_phi[:, None]) @ y - x) / t

    def pinned(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "n d"], t: float, duration: float, generator: torch.Generator
    ) -> Float[Tensor, "n d"]:
        """Exact: N(((T - t) x + t y) / T, 2 nu t (T - t) / T)."""
        share = t / duration
        xi = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
        return (1 - share) * x + share * y + math.sqrt(2 * self.nu * t * (1 - share)) * xi
