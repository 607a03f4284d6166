"""Random functions on the circle in closed form, for trials with densities: sum_k p_k cos k t + q_k sin k t."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from helmscope.meanfield.density import Density
from helmscope.meanfield.drift import Drift

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.claims.registry import TrialCase


def random_harmonics(case: TrialCase, count: int, degree: int, *, index: int) -> Float[Tensor, "case k 2"]:
    """Gaussian coefficients (p_k, q_k), k = 1 to degree, that fall as 1/k.

    >>> from helmscope.claims.registry import TrialCase
    >>> random_harmonics(TrialCase(), 5, 3, index=0).shape
    torch.Size([5, 3, 2])
    """
    return case.normal(count, degree, 2, index=index) / torch.arange(1, degree + 1)[:, None]


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


def quantile_angles(density: Density, count: int) -> Float[Tensor, " count"]:
    """The angles of a density on the circle at its quantiles (i + 1/2) / count, counted from the angle 0.

    >>> from helmscope.meanfield import CircleGrid
    >>> quantile_angles(Density.uniform(CircleGrid(degree=4)), 4) / math.pi
    tensor([0.2500, 0.7500, 1.2500, 1.7500], dtype=torch.float64)
    """
    k = torch.arange(1, density.grid.degree + 1, dtype=torch.float64)
    p, q = math.sqrt(2) * density.modes[1:].reshape(-1, 2).T

    def distribution(t: Tensor) -> Tensor:
        angles = k * t[:, None]
        share: Tensor = (t + angles.sin() @ (p / k) + (1 - angles.cos()) @ (q / k)) / (2 * math.pi)
        return share

    def slope(t: Tensor) -> Tensor:
        angles = k * t[:, None]
        value: Tensor = (1 + angles.cos() @ p + angles.sin() @ q) / (2 * math.pi)
        return value

    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    grid = torch.linspace(0, 2 * math.pi, 4 * count + 1, dtype=torch.float64)
    t = torch.from_numpy(np.interp(levels.numpy(), distribution(grid).numpy(), grid.numpy()))
    for _ in range(3):  # Newton's method
        t = t - (distribution(t) - levels) / slope(t)
    return t


def circle_w2(first: Float[Tensor, " n"], second: Float[Tensor, " n"]) -> float:
    """W2 on the circle between two continuous laws, from their increasing angles at the quantiles (i + 1/2) / n: the
    smallest distance of the quantile functions over all shifts of one of them, interpolated in between. (As clouds of
    n points the laws would be up to half a spacing apart, depending on where their quantiles begin.)

    >>> angles = torch.linspace(0, 2 * math.pi, 101, dtype=torch.float64)[:-1]
    >>> round(circle_w2(angles + 0.3 * angles.sin(), angles), 4)  # 0.3 times the root mean square of the sine
    0.2121
    """
    n, turn = len(first), 2 * math.pi
    levels = (np.arange(n) + 0.5) / n
    known = np.concatenate([levels - 1, levels, levels + 1, levels + 2])
    angles, others = first.numpy(), second.numpy()
    table = np.concatenate([others - turn, others, others + turn, others + 2 * turn])
    table = table + turn * round(float((angles - others).mean() / turn))

    def squared(shift: float) -> float:
        return float(np.square(angles - np.interp(levels + shift, known, table)).mean())

    return math.sqrt(minimize_scalar(squared, bounds=(-0.75, 0.75), method="bounded", options={"xatol": 1e-10}).fun)


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
