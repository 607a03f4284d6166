"""The committor on the circle, by quadrature.

For the generator L = b d/dt + nu d^2/dt^2, any drift b(t), the complement of two disjoint arcs is two arcs, and on each

    q'(t) ~ exp(-(1 / nu) int b dt),     q = 0 at the end next to A and 1 at the end next to B.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.polynomial import chebyshev
from scipy.fft import dct

from helmscope.fields.field import Field
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.harmonics import circle_angle
from helmscope.meanfield.committor_cloud import check_cloud, particle_field
from helmscope.meanfield.committor_zonal import share_below
from helmscope.meanfield.sphere_sets import Cap, check_regions, gap_between
from helmscope.types import HelmscopeError, check_real, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

FIRST_DEGREE, LAST_DEGREE = 32, 2**13
TOUCHING = 1e-9  # radians
TOLERANCE = 1e-14  # of the last coefficients of the drift


@full_precision
def circle_committor(
    field: Field | Callable[..., Tensor], x: Float[Tensor, "n 2"], *, a: Cap, b: Cap, nu: float
) -> Float[Tensor, " n"]:
    """The probability that the process with drift ``field`` and noise nu > 0 reaches the arc b before a, at points of
    the circle, in float64; to about 1e-13 for a smooth drift.

    ``field`` is the drift of one particle, also one that drives it around the circle. Raises ``HelmscopeError`` for
    arcs that overlap or touch, for a field that depends on time or on other tokens, and for a drift that is not smooth,
    or too strong for nu.

    >>> west, east = (Cap(torch.tensor([sign, 0.0], dtype=torch.float64), min_cosine=0.8) for sign in (-1.0, 1.0))
    >>> top_and_bottom = torch.tensor([[0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    >>> circle_committor(torch.zeros_like, top_and_bottom, a=west, b=east, nu=1.0)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    >>> turning = lambda x: torch.stack([-x[..., 1], x[..., 0]], -1)
    >>> circle_committor(turning, top_and_bottom, a=west, b=east, nu=1.0)  # counterclockwise
    tensor([0.2835, 0.7165], dtype=torch.float64)
    """
    nu = check_real("nu", nu, above=0)
    points, drift = check_between_caps(field, x, a, b, dim=2)
    at = circle_angle(points).numpy()
    (center_a, half_a), (center_b, half_b) = (_center_and_half_width(cap) for cap in (a, b))
    in_a, in_b = (cap.signed_distance(points).numpy() for cap in (a, b))
    q = np.where(in_b > in_a, 1.0, 0.0)  # in the sets, and where rounding leaves a boundary point in no arc
    free = np.maximum(in_a, in_b) < 0
    ends = [center_a + half_a, center_b - half_b, center_b + half_b, center_a - half_a]  # counterclockwise
    for start, end, rising in ((ends[0], ends[1], True), (ends[2], ends[3], False)):
        length = (end - start) % (2 * math.pi)
        beyond = (at - start) % (2 * math.pi)
        inside = free & (beyond <= length)
        share = share_below(_log_density(drift, start, length, nu), beyond[inside], (0.0, length))
        if share is None:
            raise HelmscopeError(f"nu is {nu:g}, but the quadrature does not converge for this drift: use a larger nu")
        q[inside] = share if rising else 1 - share
    return torch.from_numpy(q).to(x.device)


def check_between_caps(
    field: Field | Callable[..., Tensor], x: object, a: object, b: object, *, dim: int
) -> tuple[Float[Tensor, "n d"], Field]:
    """The points in float64 and the drift of a committor on S^(dim-1); raises ``HelmscopeError`` unless x are points
    there, a and b caps with a gap between them, and the field is one of single particles.

    >>> caps = (Cap(torch.tensor([0.0, sign]), min_cosine=0.5) for sign in (1.0, -1.0))
    >>> check_between_caps(torch.zeros_like, torch.eye(2), *caps, dim=2)[0].dtype
    torch.float64
    """
    cloud = check_cloud(x)
    if cloud.shape[-1] != dim:
        raise HelmscopeError(f"x has dimension {cloud.shape[-1]}, but points of S^{dim - 1} have dimension {dim}")
    for name, region in (("a", a), ("b", b)):
        if not isinstance(region, Cap):
            raise HelmscopeError(f"{name} is {short_repr(region)}, but it must be a Cap(center, min_cosine=0.8)")
    check_regions(a, b, cloud)
    assert isinstance(a, Cap)
    assert isinstance(b, Cap)
    if not gap_between(a, b) > TOUCHING:
        raise HelmscopeError("b touches a, but a committor needs a gap between the two regions")
    points = cloud.detach().cpu().double()
    return points, particle_field(field, points)


def finite_velocity(drift: Field, points: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The velocity of single particles; raises ``HelmscopeError`` where it is not finite.

    >>> from helmscope.fields.field import as_field
    >>> finite_velocity(as_field(torch.zeros_like), torch.eye(2)).abs().max().item()
    0.0
    """
    velocity = drift.velocity(points.unsqueeze(-2)).squeeze(-2).detach()
    if not bool(torch.isfinite(velocity).all()):
        raise HelmscopeError("field has a velocity that is not finite, but a committor needs finite drifts")
    return velocity


def _center_and_half_width(cap: Cap) -> tuple[float, float]:
    return float(circle_angle(cap.center.cpu().double())), math.acos(cap.min_cosine)


def _interpolate(function: Callable[[np.ndarray], np.ndarray], degree: int) -> np.ndarray:
    """The coefficients of the polynomial that agrees with a function at Chebyshev nodes."""
    nodes = np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))
    series: np.ndarray = dct(function(nodes)) / (degree + 1)
    series[0] /= 2
    return series


def _log_density(drift: Field, start: float, length: float, nu: float) -> Callable[[np.ndarray], np.ndarray]:
    """-(1 / nu) int b from the start of an arc, from a Chebyshev series of b."""

    def component(share: np.ndarray) -> np.ndarray:
        t = torch.from_numpy(start + length * (share + 1) / 2)
        points = torch.stack([t.cos(), t.sin()], -1)
        velocity = finite_velocity(drift, points)
        values: np.ndarray = (velocity[:, 1] * t.cos() - velocity[:, 0] * t.sin()).numpy()
        return values

    degree = FIRST_DEGREE
    while degree <= LAST_DEGREE:
        series = _interpolate(component, degree)
        if np.abs(series[-degree // 8 :]).max() <= TOLERANCE * max(np.abs(series).max(), nu / length):
            integral = chebyshev.chebint(series, lbnd=-1) * length / 2
            return lambda y: -chebyshev.chebval(2 * y / length - 1, integral) / nu
        degree *= 2
    raise HelmscopeError("field is not smooth on the circle, but the committor needs a smooth drift")
