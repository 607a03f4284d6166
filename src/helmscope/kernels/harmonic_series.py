"""The linear algebra of ``harmonic``: from the moments of the tokens to the coefficients of their sums.

Its cost depends on the length of the series, not on the number of tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import special

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.harmonics import exponential_coefficients

if TYPE_CHECKING:
    from jaxtyping import Complex, Float
    from numpy.typing import NDArray
    from torch import Tensor


def circle_series(moments: Complex[Tensor, "batch k"], beta: float, degree: int) -> Complex[Tensor, "batch k 3"]:
    """Coefficients S_k of the sums at phi, Re sum_k S_k e^{i k phi}, from the moments sum_j m_j e^{-i k phi_j} for
    k = 0..degree + 1.
    """
    c = _circle_coefficients(beta, degree)
    below = torch.cat([moments[:, 1:2].conj(), moments[:, :degree]], 1)  # e^{-i (k - 1) phi}
    above = moments[:, 1:]
    sums = torch.stack([moments[:, :-1], (below + above) / 2, (below - above) / 2j], -1)
    return sums * c.to(moments.real)[:, None]


@lru_cache(maxsize=16)
def _circle_coefficients(beta: float, degree: int) -> Float[Tensor, " k"]:
    """c_k e^{-beta}, cached because a flow needs the same ones at every step."""
    return exponential_coefficients(beta, degree, dim=2)


@full_precision
def sphere_series(moments: Complex[Tensor, "batch m k"], beta: float, degree: int) -> Complex[Tensor, "batch m k 4"]:
    """Coefficients S_mk of the sums at a point, Re sum_mk S_mk e^{i m phi} u_k(theta), from the moments
    sum_j m_j e^{-i m phi_j} u_k(theta_j) for m, k = 0..degree + 1.
    """
    table = torch.from_numpy(_kernel_table(beta, degree)).to(moments)
    series = torch.einsum("mkl,bmls->bmks", table, _coordinate_moments(moments, degree))
    series[:, 1:] *= 2  # m and -m are conjugate
    return series


def _coordinate_moments(g: Complex[Tensor, "batch m k"], degree: int) -> Complex[Tensor, "batch m k 4"]:
    """Moments with the factors 1, x, y, z, from those with the factor 1: a factor cos theta or sin theta e^{+-i phi}
    shifts an index by one.
    """
    size = degree + 1
    odd = (torch.arange(size, device=g.device) % 2 == 1)[:, None]

    def times_sine(h: Tensor) -> Tensor:
        """sin t cos k t = (sin(k+1)t - sin(k-1)t) / 2 and sin t sin k t = (cos(k-1)t - cos(k+1)t) / 2."""
        up, down = h[..., 1 : size + 1], torch.nn.functional.pad(h[..., : size - 1], (1, 0))
        mirrored = torch.nn.functional.pad(h[..., 1:2], (0, size - 1))
        for_odd = torch.nn.functional.pad(((down - up) / 2)[..., 1:], (1, 0))
        return torch.where(odd, for_odd, (up - down + mirrored) / 2)

    plain = g[:, :size, :size]
    up, down = g[:, :size, 1 : size + 1], torch.nn.functional.pad(g[:, :size, : size - 1], (1, 0))
    mirrored = torch.nn.functional.pad(g[:, :size, 1:2], (0, size - 1))  # cos(-t) = cos t, sin(-t) = -sin t
    z = (up + down + torch.where(odd, -mirrored, mirrored)) / 2
    before = times_sine(torch.cat([g[:, 1:2].conj(), g[:, : size - 1]], 1))
    after = times_sine(g[:, 1 : size + 1])
    return torch.stack([plain, (before + after) / 2, (before - after) / 2j, z], -1)


@lru_cache(maxsize=4)
def _kernel_table(beta: float, degree: int) -> NDArray[np.float64]:
    """A^m_{k k'} e^{-beta} for m, k, k' = 0..degree, by the Fourier transform of samples on the doubled torus."""
    points = 2 * (degree + 2)
    angle = 2 * np.pi * np.arange(points) / points
    argument = beta * np.outer(np.sin(angle), np.sin(angle))
    scale = np.exp(beta * (np.outer(np.cos(angle), np.cos(angle)) - 1) + np.abs(argument))
    multiplicity = np.where(np.arange(degree + 1) > 0, 2.0, 1.0)
    table = np.empty((degree + 1,) * 3)
    for m in range(degree + 1):
        samples = special.ive(m, np.abs(argument)) * np.where(argument < 0, (-1.0) ** m, 1.0) * scale
        fourier = np.fft.fft2(samples).real[: degree + 1, : degree + 1] / points**2
        table[m] = fourier * np.outer(multiplicity, multiplicity) * (1 if m % 2 == 0 else -1)
        if m % 2:  # there is no sin 0
            table[m, 0] = table[m, :, 0] = 0.0
    return table
