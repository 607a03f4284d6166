"""The committor on S^2 between two caps, for any smooth drift: L q = 0, L = b . grad + nu Lap_S.

In two dimensions the Laplacian is conformally covariant, and a Moebius transformation maps two disjoint caps to
concentric ones. Followed by Mercator's projection it gives conformal coordinates (t, phi), in which the region between
the caps is a rectangle, periodic in phi, and q solves

    nu (q_tt + q_phiphi) + <b, x_t> q_t + <b, x_phi> q_phi = 0,     q = 0 at t = t_a,  q = 1 at t = t_b,

x_t and x_phi the derivatives of the point x(t, phi). Unknowns are the values at Chebyshev points of t times equally
spaced phi, so the error decreases faster than any power of their number if b is smooth. GMRES solves for them, with the
operator of the drift averaged over phi, which decouples the Fourier modes, as preconditioner: a drift that is zonal for
the two caps needs one step.

A point x of the sphere is the direction of (x, 1) on the light cone of R^(3,1), where Moebius transformations are
linear and a cap <x, c> >= h is the half-space of (c, h). The plane spanned by the two caps meets the cone in two
directions, (p_a, 1) and (p_b, 1): the points that become the poles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, gmres

from helmscope.fields.field import Field
from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.committor_circle import check_between_caps, finite_velocity
from helmscope.meanfield.sphere_sets import Cap
from helmscope.types import HelmscopeError, check_integer, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

FIRST_DEGREE = 16
RESIDUAL = 1e-13  # of GMRES, relative
WAVES = 2  # waves in phi per degree in t: the far side of the sphere is crowded into a small range of phi
KRYLOV = 400  # steps of GMRES without restart


@full_precision
def sphere_committor(
    field: Field | Callable[..., Tensor],
    x: Float[Tensor, "n 3"],
    *,
    a: Cap,
    b: Cap,
    nu: float,
    tol: float = 1e-9,
    max_degree: int = 128,
) -> Float[Tensor, " n"]:
    """The probability that the process with drift ``field`` and noise nu > 0 reaches the cap b before a, at points of
    S^2, in float64.

    ``field`` is the drift of one particle, also with swirl. The degree in t, with twice as many waves in phi, is
    doubled from 16 until the last eighth of the coefficients of q is below ``tol``, and at most to
    ``max_degree``. Raises ``HelmscopeError`` if that does not suffice, as where nu is small compared with the drift or
    the caps almost touch; for caps that overlap or touch; and for a field that depends on time or on other tokens.

    >>> north = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    >>> upward = lambda x: north.expand_as(x)
    >>> sphere_committor(upward, x, a=Cap(-north, min_cosine=0.8), b=Cap(north, min_cosine=0.8), nu=0.5)
    tensor([0.8640], dtype=torch.float64)
    """
    nu, tol = check_real("nu", nu, above=0), check_real("tol", tol, above=0)
    max_degree = check_integer("max_degree", max_degree, at_least=FIRST_DEGREE)
    points, drift = check_between_caps(field, x, a, b, dim=3)
    coordinates = BetweenCaps.of(a, b)
    degree = FIRST_DEGREE
    while degree <= max_degree:
        values = _solve(drift, coordinates, nu, degree)
        series = None if values is None else _series(values)
        if series is not None and _tail(series) <= tol:
            q = _evaluate(series, coordinates, points)
            q[a.contains(points)], q[b.contains(points)] = 0.0, 1.0
            return q.clamp(0.0, 1.0).to(x.device)
        degree *= 2
    raise HelmscopeError(
        f"nu is {nu:g}, but the committor is not resolved to {tol:g} with max_degree={max_degree}: use a larger "
        "nu or max_degree, or caps farther apart"
    )


@dataclass(frozen=True, eq=False)
class BetweenCaps:
    """Conformal coordinates (t, phi) of S^2 in which both caps are bounded by lines t = constant: the point is the
    direction of Y = e^{-t} pole_a + e^t pole_b + cos(phi) side_1 + sin(phi) side_2, vectors (3 + 1,) of the light
    cone's space. ``low`` and ``high`` are t on the boundaries of a and b.

    >>> north = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    >>> region = BetweenCaps.of(Cap(-north, min_cosine=0.8), Cap(north, min_cosine=0.8))
    >>> round(region.high, 12) == round(math.atanh(0.8), 12)  # Mercator's projection
    True
    """

    pole_a: Float[Tensor, " 4"]
    pole_b: Float[Tensor, " 4"]
    side_1: Float[Tensor, " 4"]
    side_2: Float[Tensor, " 4"]
    low: float
    high: float

    @classmethod
    @full_precision
    def of(cls, a: Cap, b: Cap) -> BetweenCaps:
        """The coordinates between two caps that do not touch."""
        caps = [torch.nn.functional.pad(cap.center.cpu().double(), (0, 1), value=cap.min_cosine) for cap in (a, b)]
        planes = [cap / math.sqrt((1 - cap[3]) * (1 + cap[3])) for cap in caps]
        product = float(_lorentz(*planes))  # below -1 for disjoint caps
        root = math.sqrt((-product - 1) * (-product + 1))
        poles = [planes[0] + planes[1] / (root - product), planes[1] + planes[0] / (root - product)]
        poles = [pole / pole[3] for pole in poles]
        p, r = poles[0][:3], poles[1][:3]
        along = (p - r) / (p - r).norm()
        normal = torch.linalg.cross(p, r)
        if float(normal.norm()) < 1e-8:  # antipodal: any direction orthogonal to the axis
            axes = torch.eye(3, dtype=torch.float64, device="cpu")
            normal = torch.linalg.cross(along, axes[int(along.abs().argmin())])
        normal = normal / normal.norm()
        across = torch.linalg.cross(normal, along)
        half = 2 / (p - r).norm()  # 1 / sin of half the angle between the poles
        side_1 = half * torch.cat([across, (across @ (p + r) / 2)[None]])
        side_2 = torch.cat([normal, torch.zeros(1, dtype=torch.float64, device="cpu")])
        poles = [half / 2 * pole for pole in poles]
        low, high = (math.log(-_lorentz(poles[0], plane) / _lorentz(poles[1], plane)) / 2 for plane in planes)
        return cls(poles[0], poles[1], side_1, side_2, low, high)

    def points(
        self, t: Float[Tensor, " m"], phi: Float[Tensor, " m"]
    ) -> tuple[Float[Tensor, "m 3"], Float[Tensor, "m 3"], Float[Tensor, "m 3"]]:
        """The points x, and their derivatives with respect to t and phi."""
        down, up, cos, sin = (f[:, None] for f in ((-t).exp(), t.exp(), phi.cos(), phi.sin()))
        y = down * self.pole_a + up * self.pole_b + cos * self.side_1 + sin * self.side_2
        x = y[:, :3] / y[:, 3:]
        derivatives = (up * self.pole_b - down * self.pole_a, cos * self.side_2 - sin * self.side_1)
        x_t, x_phi = ((d[:, :3] - d[:, 3:] * x) / y[:, 3:] for d in derivatives)
        return x, x_t, x_phi

    def coordinates(self, x: Float[Tensor, "n 3"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """t and phi of unit vectors; t is infinite at the poles."""
        distances = [(x - pole[:3] / pole[3]).norm(dim=-1) for pole in (self.pole_a, self.pole_b)]
        y = torch.cat([x, torch.ones_like(x[:, :1])], -1)
        return (distances[0] / distances[1]).log(), torch.atan2(_lorentz(y, self.side_2), _lorentz(y, self.side_1))


def _lorentz(u: Tensor, v: Tensor) -> Tensor:
    return (u[..., :3] * v[..., :3]).sum(-1) - u[..., 3] * v[..., 3]


@full_precision
def _solve(drift: Field, region: BetweenCaps, nu: float, degree: int) -> np.ndarray | None:
    """q at degree + 1 Chebyshev points of t, from t_b down to t_a, times 4 degree angles; None if GMRES fails."""
    nodes, first = _chebyshev(degree)
    scale = 2 / (region.high - region.low)
    first = first * scale
    second = first @ first
    t = region.low + (torch.from_numpy(nodes) + 1) / scale
    columns = 2 * WAVES * degree
    phi = 2 * math.pi * torch.arange(columns, dtype=torch.float64, device="cpu") / columns
    along, around = _coefficients(drift, region, t, phi)
    waves = np.arange(WAVES * degree + 1)
    inner = slice(1, -1)
    turn = 1j * waves
    turn[-1] = 0  # the derivative of the highest wave, which is not resolved

    def fourier_part(values: np.ndarray, factor: np.ndarray) -> np.ndarray:
        result: np.ndarray = np.fft.irfft(np.fft.rfft(values, axis=1) * factor, n=columns, axis=1)
        return result

    def operator(q: np.ndarray) -> np.ndarray:
        """L q at the inner points, for q at all points."""
        straight: np.ndarray = nu * (second[inner] @ q) + along[inner] * (first[inner] @ q)
        straight += nu * fourier_part(q[inner], -(waves**2.0) + 0j) + around[inner] * fourier_part(q[inner], turn)
        return straight

    mean_along, mean_around = along[inner].mean(1), around[inner].mean(1)
    zonal = nu * second[inner, inner] + mean_along[:, None] * first[inner, inner]
    blocks = np.repeat(zonal[None].astype(complex), len(waves), 0)
    diagonal = np.arange(degree - 1)
    blocks[:, diagonal, diagonal] += turn[:, None] * mean_around - nu * (waves**2.0)[:, None]
    inverses = np.linalg.inv(blocks)

    def precondition(flat: np.ndarray) -> np.ndarray:
        spectrum = np.fft.rfft(flat.reshape(-1, columns), axis=1)
        solved = np.einsum("kij,jk->ik", inverses, spectrum)
        result: np.ndarray = np.fft.irfft(solved, n=columns, axis=1).ravel()
        return result

    def apply(flat: np.ndarray) -> np.ndarray:
        q = np.zeros((degree + 1, columns))
        q[inner] = flat.reshape(-1, columns)
        return precondition(operator(q).ravel())

    straight_line = np.repeat((nodes[:, None] + 1) / 2, columns, 1)  # satisfies the boundary values
    right = -precondition(operator(straight_line).ravel())
    size = (degree - 1) * columns
    solution, info = gmres(
        LinearOperator((size, size), matvec=apply), right, rtol=RESIDUAL, atol=0.0, restart=KRYLOV, maxiter=1
    )
    reached = np.linalg.norm(apply(solution) - right) <= 1e3 * RESIDUAL * np.linalg.norm(right)
    if (info and not reached) or not np.isfinite(solution).all():
        return None
    straight_line[inner] += solution.reshape(-1, columns)
    return straight_line


def _coefficients(drift: Field, region: BetweenCaps, t: Tensor, phi: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """<b, x_t> and <b, x_phi> at all pairs of t and phi."""
    shape = (len(t), len(phi))
    x, x_t, x_phi = region.points(t.repeat_interleave(len(phi)), phi.repeat(len(t)))
    velocity = finite_velocity(drift, x)
    along, around = ((velocity * derivative).sum(-1).reshape(shape).numpy() for derivative in (x_t, x_phi))
    return along, around


def _chebyshev(degree: int) -> tuple[np.ndarray, np.ndarray]:
    """The points cos(pi j / degree), and the matrix that differentiates polynomials by their values there."""
    j = np.arange(degree + 1)
    nodes = np.cos(np.pi * j / degree)
    weights = np.where((j == 0) | (j == degree), 2.0, 1.0) * (-1.0) ** j
    # nodes_i - nodes_k = 2 sin(...) sin(...), without cancellation
    difference = 2 * np.sin(np.pi * (j[:, None] + j) / (2 * degree)) * np.sin(np.pi * (j - j[:, None]) / (2 * degree))
    np.fill_diagonal(difference, 1.0)
    matrix = weights[:, None] / weights / difference
    np.fill_diagonal(matrix, 0.0)
    np.fill_diagonal(matrix, -matrix.sum(1))  # derivatives of constants vanish
    return nodes, matrix


@full_precision
def _series(values: np.ndarray) -> np.ndarray:
    """The coefficients c_km of q = Re sum_km c_km cos(k angle) e^{i m phi}, where cos(angle) is t scaled to [-1, 1]."""
    degree, columns = len(values) - 1, values.shape[1]
    j = np.arange(degree + 1)
    ends = np.where((j == 0) | (j == degree), 0.5, 1.0)
    cosines = 2 / degree * (np.cos(np.pi * np.outer(j, j) / degree) * ends) @ values * ends[:, None]
    series: np.ndarray = np.fft.rfft(cosines, axis=1) / columns
    series[:, 1:-1] *= 2
    return series


def _tail(series: np.ndarray) -> float:
    """The largest coefficient in the last eighth of the degrees or of the waves."""
    sizes = np.abs(series)
    degrees, waves = sizes.shape
    return float(max(sizes[-(degrees // 8) :].max(), sizes[:, -(waves // 8) :].max()))


def _evaluate(series: np.ndarray, region: BetweenCaps, x: Float[Tensor, "n 3"]) -> Float[Tensor, " n"]:
    """q at points between the caps; at others, that of the nearest boundary."""
    t, phi = (coordinate.numpy() for coordinate in region.coordinates(x))
    share = 2 * (np.clip(t, region.low, region.high) - region.low) / (region.high - region.low) - 1
    angle = np.arccos(np.clip(share, -1, 1))
    degrees, waves = (np.arange(size) for size in series.shape)
    turns = np.exp(1j * np.outer(phi, waves))
    sums = np.einsum("nk,km,nm->n", np.cos(np.outer(angle, degrees)), series, turns, optimize=True)
    return torch.from_numpy(sums.real.copy())
