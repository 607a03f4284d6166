"""Spherical harmonics on S^2."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from scipy.fft import next_fast_len

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.harmonics import spherical_harmonics, zonal_quadrature
from helmscope.meanfield.grid import Grid
from helmscope.types import check_integer, check_memory

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class SphereGrid(Grid):
    """Functions on S^2 in the real spherical harmonics sqrt(4 pi) Y_lm up to ``degree``, ordered as in
    ``geometry.harmonics``, and their values at 3 degree / 2 + 1 Gauss nodes of z times 3 degree + 1 longitudes.

    A transform is an FFT along the longitudes and one matrix product per order m, O(degree^3) in all:

        f = Re sum_m e^{i m phi} sum_l L_lm(theta) (a_lm - i b_lm),     a_lm, b_lm the coefficients of cos and sin.

    The frame is (d/d theta, d/d phi / sin theta), theta the angle from the third axis; no node is at a pole. Products
    of two functions are free of aliasing.

    >>> grid = SphereGrid(degree=8)
    >>> grid.mean_of(grid.points[:, 0] ** 2).item()
    0.333...
    """

    degree: int = 32
    dim: int = field(init=False, default=3)
    points: Float[Tensor, "m 3"] = field(init=False)
    weights: Float[Tensor, " m"] = field(init=False)
    frame: Float[Tensor, "m 2 3"] = field(init=False)
    degrees: Int[Tensor, " modes"] = field(init=False)
    latitudes: int = field(init=False)
    longitudes: int = field(init=False)
    legendre: Float[Tensor, "order latitude degree"] = field(init=False)  # L_lm at the nodes; 0 where l < m
    slopes: Float[Tensor, "order latitude degree"] = field(init=False)  # d L_lm / d theta
    _modes_at: Int[Tensor, "order two degree"] = field(init=False)  # index of a mode, one past the last where l < m
    _scale: Float[Tensor, "order two degree"] = field(init=False)  # from modes to Fourier coefficients
    _places: Int[Tensor, " modes"] = field(init=False)  # the inverse of _modes_at
    _inverse_scale: Float[Tensor, " modes"] = field(init=False)
    _latitude_weights: Float[Tensor, " latitude"] = field(init=False)
    _turn: Float[Tensor, "order 1 latitude"] = field(init=False)  # m / sin theta

    def __post_init__(self) -> None:
        degree = check_integer("degree", self.degree, at_least=1)
        rows, columns = 3 * degree // 2 + 1, int(next_fast_len(3 * degree + 1, real=True))
        check_memory(f"degree is {degree}", 3 * rows * (degree + 1) ** 2 + 10 * rows * columns)
        z, weights = zonal_quadrature(rows, dim=3)
        phi = 2 * math.pi * torch.arange(columns, dtype=torch.float64, device="cpu") / columns
        values: dict[str, object] = {"degree": degree, "latitudes": rows, "longitudes": columns}
        values |= _points_and_frame(z, phi) | _legendre_tables(degree, z) | _layout(degree)
        values |= {"weights": (weights / columns).repeat_interleave(columns), "_latitude_weights": weights}
        values["_turn"] = torch.arange(degree + 1, device="cpu")[:, None, None] / ((1 - z) * (1 + z)).sqrt()
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def synthesize(self, modes: Float[Tensor, "*batch modes"]) -> Float[Tensor, "*batch m"]:
        """The values at the points."""
        return self._along_longitudes(self._sums(self._by_order(modes), self.legendre))

    def gradient(self, modes: Float[Tensor, "*batch modes"]) -> Float[Tensor, "*batch m 2"]:
        """d/d theta and d/d phi / sin theta at the points."""
        parts = self._by_order(modes)
        south, east = self._sums(parts, self.slopes), self._turned(self._sums(parts, self.legendre))
        return self._along_longitudes(torch.stack([south, east], -4)).movedim(-2, -1)

    def value_and_gradient(
        self, modes: Float[Tensor, "*batch modes"]
    ) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch m 2"]]:
        """``synthesize`` and ``gradient`` at once: two matrix products per order instead of three."""
        parts = self._by_order(modes)
        value, south = self._sums(parts, self.legendre), self._sums(parts, self.slopes)
        together = self._along_longitudes(torch.stack([value, south, self._turned(value)], -4))
        return together[..., 0, :], together[..., 1:, :].movedim(-2, -1)

    def analyze(self, values: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch modes"]:
        """The coefficients of a function."""
        return self._modes(self._integrals(self._orders(values), self.legendre))

    def divergence(self, components: Float[Tensor, "*batch m 2"]) -> Float[Tensor, "*batch modes"]:
        """The coefficients of the surface divergence."""
        south, east = self._orders(components.movedim(-1, -2)).unbind(-4)
        return self._modes(self._integrals(self._turned(east), self.legendre) - self._integrals(south, self.slopes))

    def analyze_with_divergence(
        self, values: Float[Tensor, "*batch m"], components: Float[Tensor, "*batch m 2"]
    ) -> Float[Tensor, "*batch modes"]:
        """``analyze`` and ``divergence`` at once: two matrix products per order instead of three."""
        together = torch.cat([values[..., None, :], components.movedim(-1, -2)], -2)
        value, south, east = self._orders(together).unbind(-4)
        return self._modes(
            self._integrals(value + self._turned(east), self.legendre) - self._integrals(south, self.slopes)
        )

    @full_precision
    def evaluate(self, modes: Float[Tensor, "*batch modes"], x: Float[Tensor, "n 3"]) -> Float[Tensor, "*batch n"]:
        """The values at unit vectors x."""
        return math.sqrt(4 * math.pi) * modes @ spherical_harmonics(x.to(modes), self.degree).mT

    def _by_order(self, modes: Tensor) -> Float[Tensor, "*batch order two degree"]:
        """Real and imaginary parts of the Fourier coefficients along the longitude, for each order and degree."""
        return torch.nn.functional.pad(modes, (0, 1))[..., self._modes_at] * self._scale

    def _modes(self, parts: Float[Tensor, "*batch order two degree"]) -> Tensor:
        return parts.flatten(-3)[..., self._places] * self._inverse_scale

    def _turned(self, parts: Float[Tensor, "*batch order two latitude"]) -> Float[Tensor, "*batch order two latitude"]:
        """d/d phi / sin theta of every order: times i m / sin theta."""
        return torch.stack([-parts[..., 1, :], parts[..., 0, :]], -2) * self._turn

    @full_precision
    def _sums(self, parts: Tensor, table: Tensor) -> Float[Tensor, "*batch order two latitude"]:
        """The sum over degrees: one matrix product per order."""
        return parts @ table.mT

    @full_precision
    def _integrals(self, parts: Tensor, table: Tensor) -> Float[Tensor, "*batch order two degree"]:
        """The integral over z: one matrix product per order."""
        return (parts * self._latitude_weights) @ table

    def _along_longitudes(self, parts: Float[Tensor, "*batch order two latitude"]) -> Float[Tensor, "*batch m"]:
        spectrum = torch.view_as_complex(parts.movedim(-1, -3).contiguous())
        values: Tensor = torch.fft.irfft(spectrum, n=self.longitudes, norm="forward")
        return values.flatten(-2)

    def _orders(self, values: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch order two latitude"]:
        rows = values.reshape(*values.shape[:-1], self.latitudes, self.longitudes)
        spectrum = torch.fft.rfft(rows, norm="forward")[..., : self.degree + 1]
        return torch.view_as_real(spectrum).movedim(-3, -1)


def _points_and_frame(z: Tensor, phi: Tensor) -> dict[str, Tensor]:
    z, phi = (part.flatten() for part in torch.meshgrid(z, phi, indexing="ij"))
    sine, cos, sin = ((1 - z) * (1 + z)).sqrt(), phi.cos(), phi.sin()
    south = torch.stack([z * cos, z * sin, -sine], -1)
    east = torch.stack([-sin, cos, torch.zeros_like(z)], -1)
    return {"points": torch.stack([sine * cos, sine * sin, z], -1), "frame": torch.stack([south, east], -2)}


def _legendre_tables(degree: int, z: Tensor) -> dict[str, Tensor]:
    """L_lm and its derivative, sin(theta) dL_lm = l cos(theta) L_lm - sqrt((2l + 1)/(2l - 1) (l^2 - m^2)) L_(l-1)m."""
    sine = ((1 - z) * (1 + z)).sqrt()
    meridian = torch.stack([sine, torch.zeros_like(z), z], -1)
    at_nodes = torch.nn.functional.pad(math.sqrt(4 * math.pi) * spherical_harmonics(meridian, degree), (0, 1))
    m, k = _orders_and_degrees(degree)
    legendre = at_nodes[:, torch.where(k >= m, k * k + k + m, -1)].movedim(0, 1).contiguous()
    previous = torch.nn.functional.pad(legendre[..., :-1], (1, 0))
    factor = ((2 * k + 1).double() / (2 * k - 1) * (k * k - m * m)).clamp(min=0).sqrt()
    slopes = (k[:, None] * z[:, None] * legendre - factor[:, None] * previous) / sine[:, None]
    return {"legendre": legendre, "slopes": slopes}


def _layout(degree: int) -> dict[str, Tensor]:
    """Where the coefficients of cos and sin are among the modes, and how they enter the Fourier coefficients of the
    longitude: c_m = (a - i b)/2 for m > 0 and c_0 = a, with f = c_0 + 2 Re sum_m c_m e^{i m phi}. The integrals of f
    times cos and sin are Re c_m and -Im c_m.
    """
    m, k = _orders_and_degrees(degree)
    past = (degree + 1) ** 2
    cosines, sines = torch.where(k >= m, k * k + k + m, past), torch.where((k >= m) & (m > 0), k * k + k - m, past)
    modes_at = torch.stack([cosines, sines], 1)
    factor = torch.where(m > 0, 0.5, 1.0).double()
    scale = torch.stack([factor, -factor], 1)
    places = torch.zeros(past + 1, dtype=torch.long, device="cpu")
    places[modes_at.flatten()] = torch.arange(modes_at.numel(), device="cpu")
    places = places[:-1]
    inverse = torch.where(scale > 0, 1.0, -1.0).flatten()[places].double()
    degrees = torch.arange(degree + 1, device="cpu").repeat_interleave(2 * torch.arange(degree + 1, device="cpu") + 1)
    return {"_modes_at": modes_at, "_scale": scale, "_places": places, "_inverse_scale": inverse, "degrees": degrees}


def _orders_and_degrees(degree: int) -> tuple[Int[Tensor, "order degree"], Int[Tensor, "order degree"]]:
    numbers = torch.arange(degree + 1, device="cpu")
    m, k = torch.meshgrid(numbers, numbers, indexing="ij")
    return m, k
