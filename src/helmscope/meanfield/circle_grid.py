"""Fourier series on the circle S^1."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.harmonics import fourier
from helmscope.meanfield.grid import Grid
from helmscope.types import check_integer, check_memory

if TYPE_CHECKING:
    from jaxtyping import Complex, Float, Int
    from torch import Tensor

OVERSAMPLING = 4  # points per degree: products of up to three functions are free of aliasing


@dataclass(frozen=True, eq=False, repr=False)
class CircleGrid(Grid):
    """Functions on the circle, x = (cos t, sin t), in the basis 1, sqrt 2 cos t, sqrt 2 sin t, sqrt 2 cos 2t, ... up to
    ``degree``, and their values at 4 degree + 4 equally spaced points. Transforms are FFTs. The frame is (-sin t, cos
    t), so the component of a gradient is d/dt. Raises ``HelmscopeError`` unless degree >= 1.

    >>> grid = CircleGrid(degree=8)
    >>> grid.gradient(grid.analyze(grid.points[:, 1]))[0].round(decimals=12)  # d/dt sin t at t = 0
    tensor([1.], dtype=torch.float64)
    """

    degree: int = 64
    dim: int = field(init=False, default=2)
    points: Float[Tensor, "m 2"] = field(init=False)
    weights: Float[Tensor, " m"] = field(init=False)
    frame: Float[Tensor, "m 1 2"] = field(init=False)
    degrees: Int[Tensor, " modes"] = field(init=False)
    _scale: Complex[Tensor, " degree_plus_1"] = field(init=False)
    _slope: Complex[Tensor, " degree_plus_1"] = field(init=False)

    def __post_init__(self) -> None:
        degree = check_integer("degree", self.degree, at_least=1)
        m = OVERSAMPLING * (degree + 1)
        check_memory(f"degree is {degree}", 8 * m)
        t = 2 * math.pi * torch.arange(m, dtype=torch.float64, device="cpu") / m
        scale = torch.tensor([-1j] + degree * [math.sqrt(0.5)], dtype=torch.complex128, device="cpu")
        values = {
            "degree": degree,
            "points": torch.stack([t.cos(), t.sin()], -1),
            "weights": torch.full_like(t, 1 / m),
            "frame": torch.stack([-t.sin(), t.cos()], -1)[:, None],
            "degrees": (torch.arange(2 * degree + 1, device="cpu") + 1) // 2,
            "_scale": scale,
            "_slope": -1j * torch.arange(degree + 1, device="cpu"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def synthesize(self, modes: Float[Tensor, "*batch modes"]) -> Float[Tensor, "*batch m"]:
        """The values at the points."""
        return self._values(self._coefficients(modes))

    def gradient(self, modes: Float[Tensor, "*batch modes"]) -> Float[Tensor, "*batch m 1"]:
        """d/dt at the points."""
        return self._values(self._slope * self._coefficients(modes))[..., None]

    def analyze(self, values: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch modes"]:
        """The coefficients of a function."""
        return self._modes(self._integrals(values))

    def divergence(self, components: Float[Tensor, "*batch m 1"]) -> Float[Tensor, "*batch modes"]:
        """The coefficients of d/dt of the component."""
        return self._modes(self._slope * self._integrals(components[..., 0]))

    @full_precision
    def evaluate(self, modes: Float[Tensor, "*batch modes"], x: Float[Tensor, "n 2"]) -> Float[Tensor, "*batch n"]:
        """The values at unit vectors x."""
        cos, sin = fourier(x.to(modes), self.degree)
        basis = torch.stack([cos[:, 1:], sin[:, 1:]], -1).flatten(-2) * math.sqrt(2)
        return modes[..., :1] + modes[..., 1:] @ basis.mT

    # With (a + i b)/2 at degree k for a cos kt + b sin kt, the modes 0, 1, a, b, a, b, ... are pairs of real and
    # imaginary parts, up to a factor: no reordering is needed.

    def _coefficients(self, modes: Tensor) -> Complex[Tensor, "*batch degree_plus_1"]:
        pairs = torch.nn.functional.pad(modes, (1, 0)).reshape(*modes.shape[:-1], self.degree + 1, 2)
        return torch.view_as_complex(pairs) * self._scale

    def _modes(self, coefficients: Complex[Tensor, "*batch degree_plus_1"]) -> Tensor:
        return torch.view_as_real(coefficients / self._scale).flatten(-2)[..., 1:]

    def _values(self, coefficients: Complex[Tensor, "*batch degree_plus_1"]) -> Tensor:
        values: Tensor = torch.fft.hfft(coefficients, n=len(self.points))
        return values

    def _integrals(self, values: Tensor) -> Complex[Tensor, "*batch degree_plus_1"]:
        coefficients: Tensor = torch.fft.ihfft(values)
        return coefficients[..., : self.degree + 1]
