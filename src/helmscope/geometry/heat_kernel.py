"""The heat kernel of the sphere S^(d-1): the transition density of Brownian motion with the generator nu Lap_S.

After time t the density with respect to surface area is, with tau = nu t, lambda = (d - 2)/2 and s = cos theta =
<x, y>,

    p_tau(s) = sum_k N(d, k) P_k(s) e^{-k (k + d - 2) tau} / |S^(d-1)|,

a series (``heat_kernel_series``) whose terms cancel where p is small: for e^{-theta^2 / 4 tau} = 1e-16 nothing is left.
The Poisson kernel sums it without the Gaussian factor, sum_k N P_k(s) e^{-(k + lambda) zeta} = sinh zeta / (2^lambda
(cosh zeta - s)^(lambda + 1)), and e^{-a^2 tau} is a Gaussian integral of e^{-a zeta}, so that

    p_tau(s) = e^{lambda^2 tau} / (|S^(d-1)| sqrt(4 pi tau)) * 1/i int e^{zeta^2 / 4 tau} sinh zeta / (2^lambda
               (cosh zeta - s)^(lambda + 1)) d zeta

over a path to the right of all singularities. In z = -zeta^2 these are the points (2 pi k +- theta)^2 on the positive
axis, so the path can be the parabola z = theta^2 - mu (1 + i u)^2 around [theta^2, infinity), through the saddle point.
There the integrand has the size of the result, and the trapezoidal rule converges exponentially (Weideman and Trefethen
2007): 24 nodes suffice for every d, tau and theta, antipodal points included. The derivative with respect to s has
lambda + 2 in place of lambda + 1, which is Millson's relation d/ds p^(d) = 2 pi e^{-(d - 1) tau} p^(d + 2).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.harmonics import gegenbauer, harmonic_dimension
from helmscope.types import HelmscopeError, check_integer, check_real
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = ["HeatKernelTable", "heat_kernel_series", "heat_kernel_table", "log_heat_kernel", "log_heat_kernel_slope"]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)

NODES = 24  # of the trapezoidal rule, on one half of the symmetric path
_SPREAD = math.pi * NODES / 12  # the smallest mu / (4 tau): below it, the step would not resolve the singularity
_KNOTS = 256  # of a table


def log_heat_kernel(s: Float[Tensor, "*batch"], *, dim: int, tau: float) -> Float[Tensor, "*batch"]:
    """log p_tau(s), the logarithm of the heat kernel of S^(dim-1) at inner products s in [-1, 1]; tau = nu t > 0.

    The density is with respect to surface area; it integrates to 1. In float64 the absolute error, which is the
    relative error of p, is below 1e-11 plus some roundings of log p itself, for all s (compared with the series in
    mpmath for dim <= 64 and 0.02 <= tau <= 20, and with sums over images on S^1 and S^3 down to tau = 1e-6). Near s = 1
    a rounding error of s is amplified by 1 / (2 tau). Raises ``HelmscopeError`` unless dim >= 2 and tau > 0 is finite.
    It costs 24 complex exponentials per value: use ``HeatKernelTable`` for many.

    >>> log_heat_kernel(torch.tensor([1.0, -1.0], dtype=torch.float64), dim=3, tau=100.0)  # -log 4 pi
    tensor([-2.5310, -2.5310], dtype=torch.float64)
    """
    return _log_kernels(_angle(s), *_check(dim, tau), count=1)[0].to(s.dtype)


def log_heat_kernel_slope(s: Float[Tensor, "*batch"], *, dim: int, tau: float) -> Float[Tensor, "*batch"]:
    """d/ds log p_tau(s), positive; the gradient of log p_tau(<x, y>) with respect to x is this times P_x y.

    Domain, relative accuracy and errors as for ``log_heat_kernel``.

    >>> log_heat_kernel_slope(torch.tensor([1.0], dtype=torch.float64), dim=4, tau=0.01)  # about 1 / (2 tau)
    tensor([49.6667], dtype=torch.float64)
    """
    dim, tau = _check(dim, tau)
    log_p, log_p_above = _log_kernels(_angle(s), dim, tau, count=2)
    return torch.exp(_log_slope(log_p, log_p_above, dim, tau)).to(s.dtype)


def heat_kernel_series(s: Float[Tensor, "*batch"], *, dim: int, tau: float) -> Float[Tensor, "*batch"]:
    """p_tau(s) from the series sum_k N(d, k) P_k(s) e^{-k (k + d - 2) tau} / |S^(d-1)|: Fourier for dim = 2, Legendre
    for dim = 3, Gegenbauer beyond.

    Terms are added until they are below 1e-20 of the largest. The absolute error is about 1e-15 p_tau(1), so that the
    result is only rounding error, possibly negative, where p is smaller than that.

    >>> heat_kernel_series(torch.tensor([0.5], dtype=torch.float64), dim=3, tau=0.5)
    tensor([0.1204], dtype=torch.float64)
    """
    dim, tau = _check(dim, tau)
    logs: list[float] = []
    while len(logs) < 3 or logs[-1] > max(logs) - 46:
        k = len(logs)
        logs.append(math.log(harmonic_dimension(k, dim=dim)) - k * (k + dim - 2) * tau)
    terms = torch.tensor(logs, dtype=s.dtype, device=s.device) - _log_area(dim)
    return (gegenbauer(s, len(logs) - 1, dim=dim) * terms.exp()).sum(-1)


@dataclass(frozen=True, eq=False)
class HeatKernelTable:
    """log p_tau and its derivative, interpolated in a table: for many values at one tau.

    G = log p + theta^2 / (4 tau) is smooth except in a layer of width tau at the antipode, theta = pi. It is therefore
    tabulated at pi - theta = tau sinh v with equidistant v, and interpolated by cubic Hermite polynomials. For
    tau >= 1e-4 the relative errors of p and of the derivative are below 1e-6 if dim <= 8, and below 1e-5 if dim <= 64.

    >>> table = HeatKernelTable(dim=3, tau=0.1)
    >>> s = torch.tensor([0.9, -0.9], dtype=torch.float64)
    >>> value, slope = table(s)
    >>> bool((value - log_heat_kernel(s, dim=3, tau=0.1)).abs().max() < 1e-7)
    True
    """

    dim: int
    tau: float
    spacing: float = field(init=False, repr=False)
    cubics: Float[Tensor, "intervals 8"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        dim, tau = _check(self.dim, self.tau)
        v = torch.linspace(0, math.asinh(math.pi / tau), _KNOTS, dtype=torch.float64, device="cpu")
        theta = (math.pi - tau * torch.sinh(v)).clamp(0, math.pi)
        first, second, third = _log_kernels(theta, dim, tau, count=3)
        log_slope, next_log_slope = _log_slope(first, second, dim, tau), _log_slope(second, third, dim + 2, tau)
        slope, next_slope = torch.exp(log_slope), torch.exp(next_log_slope)
        step = float(v[1]) * tau * torch.cosh(v)  # -dtheta per interval
        smooth, smooth_rate = first + theta**2 / (4 * tau), step * (slope * torch.sin(theta) - theta / (2 * tau))
        log_slope_rate = step * torch.sin(theta) * (next_slope - slope)
        object.__setattr__(self, "spacing", float(v[1]))
        cubics = torch.cat([_hermite(smooth, smooth_rate), _hermite(log_slope, log_slope_rate)], -1)
        object.__setattr__(self, "cubics", cubics)

    def __call__(self, s: Float[Tensor, "*batch"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """log p_tau(s) and d/ds log p_tau(s), in float64, for s in [-1, 1] up to rounding."""
        theta = _angle(s)
        place = torch.asinh((math.pi - theta) / self.tau) / self.spacing
        index = place.long().clamp_(0, _KNOTS - 2)
        w = place - index
        a0, a1, a2, a3, b0, b1, b2, b3 = self.cubics.to(theta.device)[index].unbind(-1)
        smooth = a0 + w * (a1 + w * (a2 + w * a3))
        return smooth - theta**2 / (4 * self.tau), torch.exp(b0 + w * (b1 + w * (b2 + w * b3)))


def _hermite(values: Tensor, rates: Tensor) -> Tensor:
    """The coefficients of the cubic on each interval between knots, in the variable w of [0, 1]; ``rates`` are the
    derivatives at the knots with respect to w.
    """
    rise, start, end = torch.diff(values), rates[:-1], rates[1:]
    return torch.stack([values[:-1], start, 3 * rise - 2 * start - end, start + end - 2 * rise], -1)


@functools.lru_cache(maxsize=512)
def heat_kernel_table(dim: int, tau: float) -> HeatKernelTable:
    """The table for dim and tau; the last 512 are kept, because a simulation returns to the same times.

    >>> heat_kernel_table(3, 0.1) is heat_kernel_table(3, 0.1)
    True
    """
    return HeatKernelTable(dim, tau)


def _angle(s: Tensor) -> Tensor:
    """arccos s in float64; s beyond +-1 by rounding counts as +-1."""
    if not s.is_floating_point():
        raise HelmscopeError(f"s has dtype {s.dtype}, but it must be a float tensor")
    return torch.acos(s.to(torch.float64).clamp(-1.0, 1.0))


def _check(dim: object, tau: object) -> tuple[int, float]:
    return check_integer("dim", dim, at_least=2), check_real("tau", tau, above=0)


def _log_area(dim: int) -> float:
    """log |S^(dim-1)|."""
    return math.log(2) + dim / 2 * math.log(math.pi) - math.lgamma(dim / 2)


def _log_slope(log_p: Tensor, log_p_above: Tensor, dim: int, tau: float) -> Tensor:
    """log d/ds log p by Millson's relation, from log p of S^(dim-1) and of S^(dim+1)."""
    return math.log(2 * math.pi) - (dim - 1) * tau + log_p_above - log_p


@full_precision
def _log_kernels(theta: Tensor, dim: int, tau: float, *, count: int) -> list[Tensor]:
    """log p of S^(dim-1), S^(dim+1), ..., ``count`` of them, at angles theta, by the trapezoidal rule on one parabola:
    through the saddle point of the middle one if tau is small, so that those of the others are close.
    """
    if tau > 1 and count > 1:  # on a path through another saddle point, digits are lost like e^tau
        return [_log_kernels(theta, dim + 2 * k, tau, count=1)[0] for k in range(count)]
    orders = [dim / 2 + k for k in range(count)]  # lambda + 1
    mu = torch.clamp(_saddle(theta, sum(orders) / count, tau), min=4 * tau * _SPREAD).unsqueeze(-1)
    spread = mu / (4 * tau)
    h = 3 / NODES * torch.sqrt(_SPREAD / spread)
    u = h * (torch.arange(NODES, dtype=torch.float64, device=theta.device) + 0.5)
    ray = torch.complex(torch.ones_like(u), u)
    angle = theta.unsqueeze(-1)
    zeta = torch.sqrt(mu * ray * ray - angle**2)
    turn = torch.complex(torch.zeros_like(angle), angle)
    # cosh zeta - cos theta = 2 sinh((zeta + i theta)/2) sinh((zeta - i theta)/2): no cancellation, and each logarithm
    # is continuous along the path, as the one of cosh zeta - s itself would not be
    plus = zeta + turn
    minus = mu * ray * ray / plus  # zeta - i theta, which would cancel where tau is small
    log_gap = zeta - math.log(2) + torch.log(-torch.expm1(-plus)) + torch.log(-torch.expm1(-minus))
    factor = -torch.expm1(-2 * zeta) * (mu * ray / zeta)  # sinh zeta = e^zeta (1 - e^(-2 zeta)) / 2; d zeta / (i du)
    results = []
    for order in orders:
        exponent = spread * ray * ray + zeta - order * log_gap
        scale = exponent.real.amax(-1, keepdim=True)
        total = (torch.exp(exponent - scale) * factor).real.sum(-1)
        constant = (order - 1) ** 2 * tau - (order - 1) * math.log(2) - math.log(4 * math.pi * tau) / 2
        log_p = constant - _log_area(round(2 * order)) - theta**2 / (4 * tau) + scale.squeeze(-1)
        results.append(log_p + torch.log(h.squeeze(-1) * total))
    return results


def _saddle(theta: Tensor, order: float, tau: float) -> Tensor:
    """mu > 0 at which e^{-z / 4 tau} F(z), F = (sinh zeta / zeta) (cosh zeta - cos theta)^-order, is least on
    the real axis z = -zeta^2 = theta^2 - mu, to about one percent: by bisection, since log F is convex.
    """
    low = torch.full_like(theta, math.log(tau * order / 4))
    high = torch.full_like(theta, math.log(16 * tau * order + 4 * (2 * tau * order) ** 2))
    for _ in range(12):
        middle = (low + high) / 2
        rises = _integrand_slope(theta, torch.exp(middle), order) < 1 / (4 * tau)  # then mu is too large
        low, high = torch.where(rises, low, middle), torch.where(rises, middle, high)
    return torch.exp((low + high) / 2)


def _integrand_slope(theta: Tensor, mu: Tensor, order: float) -> Tensor:
    """d/dz log F at z = theta^2 - mu."""
    z = theta**2 - mu
    r = torch.sqrt(z.abs()).clamp(min=1e-4)
    hyperbolic = z < 0
    q = torch.exp(-2 * torch.where(hyperbolic, r, torch.ones_like(r)))
    # sinh r / (r (cosh r - cos theta)), scaled by e^-r
    growth = (1 - q) / (r * (1 + q - 2 * torch.sqrt(q) * torch.cos(theta)))
    curvature = (r * (1 + q) / (1 - q) - 1) / r**2
    gap = 2 * torch.sin((theta + r) / 2) * torch.sin((theta - r) / 2)
    growth = torch.where(hyperbolic, growth, torch.sin(r) / (r * gap))
    curvature = torch.where(hyperbolic, curvature, (1 - r / torch.tan(r)) / r**2)
    return (order * growth - curvature) / 2
