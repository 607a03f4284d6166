"""Harmonics of the sphere S^(d-1): Fourier modes (d = 2), real Y_lm (d = 3), zonal polynomials and expansions (any d).

Zonal polynomials P_k are normalized by P_k(1) = 1: cos k t for d = 2, Legendre for d = 3. The addition theorem relates
them to any real basis Y_k1, ..., Y_kN of the degree-k harmonics, orthonormal for the uniform probability measure:

    sum_i Y_ki(x) Y_ki(y) = N(d, k) P_k(<x, y>),    N(d, k) = harmonic_dimension(k, dim=d).

Hence a kernel f(<x, y>) = sum_k a_k P_k(<x, y>) is diagonal in such a basis, and summing it over n points costs O(n).
Harmonics are computed from the coordinates by recurrences, not from angles, so that no point is singular and the
result at a point does not depend on its batch.

The harmonic kernels (``kernels/harmonic.py``) take their coefficients, degree and powers from this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.linalg import eigvalsh_tridiagonal

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import retract
from helmscope.types import HelmscopeError, check_integer, check_memory, check_real
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Complex, Float
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = [
    "circle_angle",
    "exponential_coefficients",
    "exponential_degree",
    "fourier",
    "gegenbauer",
    "gegenbauer_c",
    "harmonic_dimension",
    "powers",
    "spherical_harmonics",
    "zonal_coefficients",
    "zonal_quadrature",
]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)


def circle_angle(x: Float[Tensor, "*batch 2"]) -> Float[Tensor, "*batch"]:
    """Angle t in (-pi, pi] of x = |x| (cos t, sin t), from tan(t / 2) = sin t / (1 + cos t), mirrored for cos t < 0.

    It does not use torch.atan2, whose last bit depends on the batch. The result is NaN for the zero vector.

    >>> circle_angle(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
    tensor([1.5708, 3.1416])
    """
    u, v = retract(_check_points(x, 2)).unbind(-1)
    negative = u < 0
    angle = 2 * torch.atan(v / (1 + torch.where(negative, -u, u)))
    half_circle = torch.full_like(v, torch.pi)
    return torch.where(negative, torch.where(v < 0, -half_circle, half_circle) - angle, angle)


def fourier(
    x: Float[Tensor, "*batch 2"], degree: int
) -> tuple[Float[Tensor, "*batch degree_plus_1"], Float[Tensor, "*batch degree_plus_1"]]:
    """Fourier modes (cos k t, sin k t), k = 0..degree, at unit vectors x = (cos t, sin t): the real and imaginary parts
    of (x_0 + i x_1)^k.

    Powers are computed by doubling: those with k < m times z^m are those with m <= k < 2m. The error is about k
    roundings, plus k times the error of |x|.

    >>> cos, sin = fourier(torch.tensor([0.0, 1.0]), 3)
    >>> cos, sin
    (tensor([ 1.,  0., -1., -0.]), tensor([ 0.,  1.,  0., -1.]))
    """
    u, v = _check_points(x, 2)[..., :1], x[..., 1:]
    degree = _check_degree(degree, u.numel())
    cos, sin = torch.ones_like(u), torch.zeros_like(u)
    while cos.shape[-1] <= degree:
        c, s = cos[..., -1:] * u - sin[..., -1:] * v, sin[..., -1:] * u + cos[..., -1:] * v
        cos, sin = torch.cat([cos, cos * c - sin * s], -1), torch.cat([sin, sin * c + cos * s], -1)
    return cos[..., : degree + 1], sin[..., : degree + 1]


def powers(u: Complex[Tensor, "batch n"], degree: int) -> Complex[Tensor, "batch degree_plus_1 n"]:
    """Powers u^0, ..., u^degree of complex numbers by doubling, so that the error of u^k grows with log k.

    For u = e^{i t} these are the modes of ``fourier`` with the degree axis before the point axis, computed in place and
    without gradient, for sums over many points.

    >>> powers(torch.tensor([[1j]]), 3).flatten().tolist() == [1, 1j, -1, -1j]
    True
    """
    table = u.new_ones(len(u), degree + 1, u.shape[-1])
    if degree:
        table[:, 1] = u
    done = 1
    while done < degree:
        count = min(done, degree - done)
        table[:, done + 1 : done + 1 + count] = table[:, 1 : 1 + count] * table[:, done : done + 1]
        done += count
    return table


def spherical_harmonics(x: Float[Tensor, "*batch 3"], degree: int) -> Float[Tensor, "*batch modes"]:
    """Real orthonormal Y_lm on S^2, l = 0..degree, m = -l..l at index l^2 + l + m: int Y_lm Y_l'm' dS = delta.

    With colatitude theta and longitude phi, and no Condon-Shortley sign:

        Y_lm = Pbar_l^|m|(cos theta) times sqrt 2 cos(m phi) for m > 0, sqrt 2 sin(|m| phi) for m < 0, 1 for m = 0,

    so that Y_1 = sqrt(3 / 4 pi) (y, z, x). Y_ll + i Y_l(-l) is a multiple of (x + iy)^l, and for |m| < l (m for |m|)

        Y_lm = c Y_(l-1)m + G_lm,   G_lm = c ((l - 1 - m) G_(l-1)m - (2l - 1) q Y_(l-1)m) / (l + m),
        c^2 = (2l + 1) (l + m) / ((2l - 1) (l - m)),   q = 1 - z = (x^2 + y^2) / (1 + z),

    mirrored for z < 0: Reinsch's form of the Legendre recurrence, whose error grows like l roundings even at the poles
    (that of the plain form like l^2). There is no division by sin theta, so gradients are finite everywhere. x must
    hold unit vectors. High powers of x + iy underflow harmlessly up to about degree 1,900 in float64 (Holmes and
    Featherstone 2002) and 220 in float32; beyond about 180 the float32 gradient overflows near the poles.

    >>> spherical_harmonics(torch.tensor([0.0, 0.0, 1.0]), 1)
    tensor([0.2821, 0.0000, 0.4886, 0.0000])
    """
    u, v, w = _check_points(x, 3)[..., :1], x[..., 1:2], x[..., 2:]
    degree = _check_degree(degree, u.numel(), power=2)
    sign = torch.where(w < 0, -torch.ones_like(w), torch.ones_like(w))
    q = (u * u + v * v) / (1 + sign * w)
    cos, sin = torch.full_like(w, math.sqrt(1 / (2 * math.pi))), torch.zeros_like(w)
    rows, g = [torch.full_like(w, math.sqrt(1 / (4 * math.pi)))], torch.zeros_like(w)
    for deg in range(1, degree + 1):
        m = torch.arange(1 - deg, deg, device=x.device, dtype=x.dtype).abs()
        c = sign * torch.sqrt((2 * deg + 1) * (deg + m) / ((2 * deg - 1) * (deg - m)))
        g = c * ((deg - 1 - m) * g - (2 * deg - 1) * (q * rows[-1])) / (deg + m)
        factor = math.sqrt((2 * deg + 1) / (2 * deg))
        cos, sin = factor * (u * cos - v * sin), factor * (u * sin + v * cos)
        rows.append(torch.cat([sin, c * rows[-1] + g, cos], -1))
        g = torch.nn.functional.pad(g, (1, 1))
    return torch.cat(rows, -1)


def gegenbauer(s: Float[Tensor, "*batch"], degree: int, *, dim: int) -> Float[Tensor, "*batch degree_plus_1"]:
    """Zonal polynomials P_0(s), ..., P_degree(s) of S^(dim-1), P_k(1) = 1, |s| <= 1:

        (k + d - 2) P_(k+1) = (2k + d - 2) s P_k - k P_(k-1).

    Chebyshev T_k for dim = 2, Legendre for dim = 3, C_k^(l)(s) / C_k^(l)(1) with l = (dim - 2)/2 beyond.
    Near s = 1 a rounding error of s is amplified by P_k'(1) = k (k + d - 2) / (d - 1).

    >>> gegenbauer(torch.tensor(0.5), 2, dim=3)
    tensor([ 1.0000,  0.5000, -0.1250])
    """
    return _zonal_polynomials(s, _check_degree(degree, s.numel()), check_integer("dim", dim, at_least=2))


def gegenbauer_c(s: Float[Tensor, "*batch"], degree: int, *, order: float) -> Float[Tensor, "*batch degree_plus_1"]:
    """Classical Gegenbauer polynomials C_0^(l)(s), ..., C_degree^(l)(s) of order l > 0: P_k of dimension 2l + 2 times

        C_k^(l)(1) = (k + 2l - 1)! / (k! (2l - 1)!).

    That factor overflows at high order and degree (order 512: from degree 304 on, in float32 from 19), and the result
    is then not finite; ``gegenbauer`` has no such limit.

    >>> gegenbauer_c(torch.tensor(0.5), 2, order=1.0)
    tensor([1., 1., 0.])
    """
    degree, order = _check_degree(degree, s.numel()), check_real("order", order, above=0)
    k = np.arange(1, degree + 1)
    with np.errstate(over="ignore"):
        at_one = np.cumprod(np.concatenate([[1.0], (k + (2 * order - 1)) / k]))
    return _zonal_polynomials(s, degree, 2 * order + 2) * torch.from_numpy(at_one).to(s)


def harmonic_dimension(degree: int, *, dim: int) -> int:
    """Dimension N(d, k) = binom(k + d - 1, k) - binom(k + d - 3, k - 2) of the degree-k harmonics on S^(d-1), exact.

    It equals 1 / int P_k^2 for the uniform probability measure.

    >>> [harmonic_dimension(k, dim=3) for k in range(4)]
    [1, 3, 5, 7]
    """
    k, d = check_integer("degree", degree, at_least=0), check_integer("dim", dim, at_least=2)
    return math.comb(k + d - 1, k) - (math.comb(k + d - 3, k - 2) if k >= 2 else 0)


def zonal_quadrature(points: int, *, dim: int) -> tuple[Float[Tensor, " points"], Float[Tensor, " points"]]:
    """Gauss nodes s and weights w (sum 1) for the distribution of <x, e>, x uniform on S^(dim-1), in float64.

    The density is ~ (1 - s^2)^((d-3)/2), and sum w f(s) = E f(<x, e>) for polynomials f of degree up to 2 points - 1.
    Nodes are eigenvalues of the Jacobi matrix (Golub and Welsch 1969), improved by a Newton step on P_n. Weights are
    proportional to 1 / ((1 - s^2) P_n'(s)^2), which is accurate even for tiny weights at high dim (0 below 1e-308).

    >>> s, w = zonal_quadrature(8, dim=3)
    >>> round((w * s**2).sum().item(), 12)
    0.333333333333
    """
    n, d = check_integer("points", points, at_least=1), check_integer("dim", dim, at_least=2)
    check_memory(f"points is {n}", n)
    k = np.arange(2.0, n)  # floats: at high dim the products leave int64
    squares = np.concatenate([[1 / d], k * (k + d - 3) / ((2 * k + d - 2) * (2 * k + d - 4))])[: n - 1]
    s = eigvalsh_tridiagonal(np.zeros(n), np.sqrt(squares))
    previous, value, _ = _last_two_zonal(s, n, d)
    s = s - value * (1 - s) * (1 + s) / (n * (previous - s * value))
    s = (s - s[::-1]) / 2
    previous, value, exponent = _last_two_zonal(s, n, d)
    root = np.sqrt((1 - s) * (1 + s)) / np.abs(previous - s * value)  # (1 - s^2) P_n' = n (P_(n-1) - s P_n)
    w = np.ldexp(root, exponent.min() - exponent) ** 2
    return torch.from_numpy(s), torch.from_numpy(w / w.sum())


@full_precision
def zonal_coefficients(
    f: Callable[[Tensor], Tensor], degree: int, *, dim: int, points: int | None = None
) -> Float[Tensor, "*batch degree_plus_1"]:
    """Coefficients a_k of f(s) = sum_k a_k P_k(s) on S^(dim-1), k = 0..degree: a_k = N(d, k) E[f P_k(<x, e>)], by Gauss
    quadrature.

    ``f`` maps the nodes (points,) to (*batch, points). The result is exact up to rounding for polynomials of degree up
    to 2 points - 1 - degree; ``points`` defaults to 2 degree + 64 and should be larger for functions with kinks. The
    error of a_k is about 1e-16 sqrt(N(d, k)) max|f|: small in mean square, but at high dim and degree the series near
    s = 1 is dominated by noise.

    >>> zonal_coefficients(lambda s: s**2, 2, dim=3).round(decimals=12) + 0.0
    tensor([0.3333, 0.0000, 0.6667], dtype=torch.float64)
    """
    degree, dim = _check_degree(degree, 1), check_integer("dim", dim, at_least=2)
    points = 2 * degree + 64 if points is None else check_integer("points", points, at_least=degree + 1)
    dimensions = [harmonic_dimension(k, dim=dim) for k in range(degree + 1)]
    if dimensions[-1] > 10**300:
        raise HelmscopeError(
            f"degree is {degree}, but in dim={dim} there must be at most 1e300 harmonics of this degree: lower degree"
        )
    s, w = zonal_quadrature(points, dim=dim)
    return torch.tensor(dimensions, dtype=s.dtype, device=s.device) * ((w * f(s)) @ _zonal_polynomials(s, degree, dim))


def exponential_coefficients(beta: float, degree: int, *, dim: int) -> Float[Tensor, " degree_plus_1"]:
    """Coefficients e^(-beta) a_k, k = 0..degree, of e^(beta (s - 1)), where e^(beta s) = sum_k a_k P_k(s) on S^(dim-1)
    and beta >= 0. In float64; they never overflow.

        a_k = Gamma(l + 1) (2 / beta)^l N(d, k) I_(k+l)(beta),   l = (d - 2)/2.

    For d = 2 that is I_0, 2 I_1, 2 I_2, ..., for d = 3 (2k + 1) i_k(beta) with the modified spherical Bessel functions.
    The scaled a_k are a probability distribution on k (all >= 0, and s = 1 shows that they sum to 1), log-concave and
    stochastically dominated by Poisson(beta). The Bessel ratios r_k = I_(k+l) / I_(k+l-1) = beta / (2k + d - 2 +
    beta r_(k+1)) are therefore computed downwards from where that distribution underflows, and the sum fixes the
    scale: the result is accurate for every beta and dim, with O(beta) work.

    >>> exponential_coefficients(1.0, 2, dim=3)
    tensor([0.4323, 0.4060, 0.1316], dtype=torch.float64)
    """
    degree = _check_degree(degree, 1)
    return torch.from_numpy(_scaled_exponential_coefficients(beta, dim, degree)[: degree + 1])


def exponential_degree(beta: float, *, dim: int, tol: float) -> int:
    """Smallest K with e^(-beta) sum_(k > K) a_k <= tolerance, beta >= 0.

    That tail is the largest error on [-1, 1], attained at s = 1, of the series of e^(beta (s - 1)) truncated after
    degree K.

    >>> exponential_degree(4.0, dim=3, tol=1e-12)
    18
    """
    tol = check_real("tol", tol, above=0)
    tail = np.cumsum(_scaled_exponential_coefficients(beta, dim, 0)[:0:-1])
    return int((tail > tol).sum())


def _scaled_exponential_coefficients(beta: float, dim: int, degree: int) -> NDArray[np.float64]:
    """The scaled a_k for k = 0..top, with top >= degree large enough that all further ones are below 1e-308."""
    beta, dim = check_real("beta", beta, at_least=0), check_integer("dim", dim, at_least=2)
    # a_k / a_(k-1) <= beta / k, and Poisson(beta) exceeds beta + t with probability below exp(-t^2 / (2 beta + 2t/3))
    top = max(degree, math.ceil(beta + 40 * math.sqrt(beta) + 500))
    check_memory(f"beta is {beta:g}", top)
    k = np.arange(2.0, top + 1)
    growth = np.concatenate([[dim], (2 * k + dim - 2) * (k + dim - 3) / ((2 * k + dim - 4) * k)])  # N(d, k) / N(d, k-1)
    bessel, ratio = 0.0, np.empty(top)
    for j in range(top, 0, -1):
        bessel = beta / (2 * j + dim - 2 + beta * bessel)
        ratio[j - 1] = bessel
    ratio *= growth
    # the ratios decrease: products outward from the largest a_k do not overflow, and underflow only where a_k does
    peak = int((ratio > 1).sum())
    below, above = np.cumprod(1 / ratio[:peak][::-1])[::-1], np.cumprod(ratio[peak:])
    coefficients = np.concatenate([below, [1.0], above])
    coefficients /= coefficients.sum()
    return coefficients


def _last_two_zonal(
    s: NDArray[np.float64], n: int, d: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """P_(n-1)(s) and P_n(s), both divided by 2^exponent, because at high dim they leave the range of float64."""
    previous, value = np.ones_like(s), s
    exponent = np.zeros(s.shape, dtype=np.int64)
    for k in range(1, n):
        previous, value = value, ((2 * k + d - 2) * s * value - k * previous) / (k + d - 2)
        _, shift = np.frexp(np.abs(previous) + np.abs(value))
        previous, value, exponent = np.ldexp(previous, -shift), np.ldexp(value, -shift), exponent + shift
    return previous, value, exponent


def _check_degree(degree: object, points: int, *, power: int = 1) -> int:
    """Check that (degree + 1)^power function values at each of ``points`` points fit in memory."""
    checked = check_integer("degree", degree, at_least=0)
    check_memory(f"degree is {checked} at {points} points", (checked + 1) ** power * points)
    return checked


def _zonal_polynomials(s: Tensor, degree: int, dim: float) -> Tensor:
    if not s.is_floating_point():
        raise HelmscopeError(f"s has dtype {s.dtype}, but it must be a float tensor")
    rows = [torch.ones_like(s), s]
    for k in range(1, degree):
        rows.append(((2 * k + dim - 2) * s * rows[k] - k * rows[k - 1]) / (k + dim - 2))
    return torch.stack(rows[: degree + 1], -1)


def _check_points(x: Tensor, d: int) -> Tensor:
    if x.ndim < 1 or x.shape[-1] != d or not x.is_floating_point():
        raise HelmscopeError(
            f"x has shape {tuple(x.shape)} and dtype {x.dtype}, but it must hold float vectors (..., {d})"
        )
    return x
