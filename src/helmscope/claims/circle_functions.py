"""Random functions on the circle in closed form, for trials with densities: sum_k p_k cos k t + q_k sin k t."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.meanfield.drift import Drift

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.claims.registry import TrialCase


def random_harmonics(case: TrialCase, count: int, degree: int, *, stream: int) -> Float[Tensor, "case k 2"]:
    """Gaussian coefficients (p_k, q_k), k = 1 to degree, that fall as 1/k.

    >>> from helmscope.claims.registry import TrialCase
    >>> random_harmonics(TrialCase(), 5, 3, stream=0).shape
    torch.Size([5, 3, 2])
    """
    return case.normal(count, degree, 2, stream=stream) / torch.arange(1, degree + 1)[:, None]


def harmonic_sum(
    coefficients: Float[Tensor, "*batch k 2"], x: Float[Tensor, "*batch m 2"]
) -> Float[Tensor, "*batch m"]:
    """sum_k p_k cos k t + q_k sin k t at points x = (cos t, sin t), by powers of x_1 + i x_2.

    >>> harmonic_sum(torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.tensor([[0.0, 1.0]]))  # cos 2t + 2 sin 2t, t = pi/2
    tensor([-1.])
    """
    cos, sin = x[..., 0], x[..., 1]
    real, imaginary, total = cos, sin, torch.zeros_like(cos)
    for k in range(coefficients.shape[-2]):
        p, q = coefficients[..., k, :].unsqueeze(-2).unbind(-1)
        total = total + p * real + q * imaginary
        real, imaginary = real * cos - imaginary * sin, imaginary * cos + real * sin
    return total


def derivative(coefficients: Float[Tensor, "*batch k 2"]) -> Float[Tensor, "*batch k 2"]:
    """The coefficients (k q_k, -k p_k) of the derivative in t.

    >>> derivative(torch.tensor([[0.0, 1.0]]))  # (sin t)' = cos t
    tensor([[1., -0.]])
    """
    p, q = coefficients.unbind(-1)
    k = torch.arange(1, coefficients.shape[-2] + 1)
    return torch.stack([k * q, -k * p], -1)


@dataclass(frozen=True, eq=False)
class GivenDrift(Drift):
    """A drift with given components at the points of a grid, whatever the density.

    >>> GivenDrift(torch.ones(3, 1)).components(torch.zeros(2), 0.0).shape
    torch.Size([3, 1])
    """

    values: Float[Tensor, "*batch m c"]

    def components(
        self, modes: Float[Tensor, "*batch modes"], t: float, values: Float[Tensor, "*batch m"] | None = None
    ) -> Float[Tensor, "*batch m c"]:
        """The components."""
        return self.values
