"""Basins of a landscape: which maximum of U (minimum of V = -U) a point reaches by gradient ascent x' = grad_S U, and
which basins a saddle joins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.critical_points import CriticalPoints
from helmscope.geometry.hessian import tangent_hessian
from helmscope.geometry.potential import Potential, as_potential
from helmscope.geometry.sphere import angle, check_tokens, exp, tangent_basis
from helmscope.solve.integrate import integrate
from helmscope.types import HelmscopeError, check_real, short_repr
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

CAPTURE = 0.1  # radius around a maximum, as a share of the distance to the nearest other critical point
LARGEST_CAPTURE = 0.1  # radians
OFFSET = 1e-3  # radians from a saddle
CHECKS = 16  # times at which the flow is compared with the maxima, each twice the one before
TIME_CONSTANTS = 50.0  # the default horizon, in units of the slowest rate at a critical point


@dataclass(frozen=True)
class SaddleConnection(ConciseRepr):
    """A saddle of index 1 and the two basins at the ends of its unstable direction, as numbers of critical points.

    ``barriers`` are the heights U(basin) - U(saddle) = V(saddle) - V(basin) to climb from each. A basin is -1, and its
    barrier NaN, where the ascent reached none of the known ones. A saddle may join a basin with itself.

    >>> SaddleConnection(saddle=2, basins=(0, 1), barriers=(1.0, 0.5)).joins_two
    True
    """

    saddle: int
    basins: tuple[int, int]
    barriers: tuple[float, float]

    @property
    def joins_two(self) -> bool:
        """Whether the basins are known and distinct."""
        return -1 not in self.basins and self.basins[0] != self.basins[1]


def label_basins(
    potential: Potential | Callable[[Tensor], Tensor],
    x: Float[Tensor, "n d"],
    critical_points: CriticalPoints,
    *,
    horizon: float | None = None,
    progress: ProgressOption = None,
) -> Int[Tensor, " n"]:
    """The basin of each point: the number, in ``critical_points``, of the maximum of U that gradient ascent reaches.

    The flow x' = grad_S U is integrated adaptively until it is close to a known maximum: within a tenth of that
    maximum's distance to the nearest other critical point, and within 0.1 radians. The label is -1 if that does not
    happen until ``horizon`` (by default 50 times the slowest time constant at the critical points): the point is on a
    ridge, or its maximum is missing from the list; then search again with it as a start. Raises ``HelmscopeError``
    unless x are unit vectors (n, d) and at least one basin is known.

    >>> from helmscope.geometry.critical_points import find_critical_points
    >>> from helmscope.theory.starts import Uniform
    >>> double_well = lambda x: x[..., 0] ** 2
    >>> found = find_critical_points(double_well, Uniform(n=32, dim=2).sample(seed=0))
    >>> x = torch.tensor([[0.6, 0.8], [-0.6, 0.8], [-0.8, -0.6]], dtype=torch.float64)
    >>> found.points[label_basins(double_well, x, found)][:, 0].round(decimals=6)
    tensor([ 1., -1., -1.], dtype=torch.float64)
    """
    u = as_potential(potential)
    if not isinstance(critical_points, CriticalPoints):
        raise HelmscopeError(
            f"critical_points is {short_repr(critical_points)}, but it must be the result of find_critical_points"
        )
    if check_tokens(x).ndim != 2 or x.shape[-1] != critical_points.points.shape[-1]:
        raise HelmscopeError(
            f"x has shape {tuple(x.shape)}, but it must be (n, d) with d = {critical_points.points.shape[-1]}"
        )
    basins = critical_points.basins
    if not len(basins):
        raise HelmscopeError(
            "critical_points has no nondegenerate maximum of U, but a basin needs one: use more starts"
        )
    if horizon is None:
        rates = critical_points.curvatures[~critical_points.degenerate].abs()
        horizon = TIME_CONSTANTS / float(rates.min())
    horizon = check_real("horizon", horizon, above=0)
    events = [_Capture(critical_points.points[k].to(x), _capture_radius(critical_points, int(k))) for k in basins]
    times = [horizon * 0.5**k for k in reversed(range(CHECKS))]
    run = integrate(u.gradient, x.detach().unsqueeze(-2), times, events=events, progress=progress)
    reached = ~torch.isnan(torch.stack(run.event_times))  # (basin, n)
    return torch.where(reached.any(0), basins.to(x.device)[reached.int().argmax(0)], -1)


@full_precision
def saddle_connections(
    potential: Potential | Callable[[Tensor], Tensor],
    critical_points: CriticalPoints,
    *,
    horizon: float | None = None,
    progress: ProgressOption = None,
) -> tuple[SaddleConnection, ...]:
    """The saddles of index 1, each with the two basins that it joins.

    From both sides of a saddle, 0.001 radians along the only direction in which V descends, gradient ascent of U leads
    to the basins, as in ``label_basins``, with whose errors.

    >>> from helmscope.geometry.critical_points import find_critical_points
    >>> from helmscope.theory.starts import Uniform
    >>> double_well = lambda x: x[..., 0] ** 2
    >>> found = find_critical_points(double_well, Uniform(n=32, dim=2).sample(seed=0))
    >>> [(c.joins_two, round(c.barriers[0], 6)) for c in saddle_connections(double_well, found)]
    [(True, 1.0), (True, 1.0)]
    """
    u = as_potential(potential)
    if not isinstance(critical_points, CriticalPoints):
        raise HelmscopeError(
            f"critical_points is {short_repr(critical_points)}, but it must be the result of find_critical_points"
        )
    saddles = critical_points.saddles
    if not len(saddles):
        return ()
    points = critical_points.points[saddles]
    steepest = torch.linalg.eigh(tangent_hessian(u, points).detach()).eigenvectors[..., -1:]
    direction = (tangent_basis(points) @ steepest)[..., 0]
    sides = torch.cat([exp(points, OFFSET * direction), exp(points, -OFFSET * direction)])
    labels = label_basins(u, sides, critical_points, horizon=horizon, progress=progress).reshape(2, -1)
    values = critical_points.values.tolist()

    def barrier(basin: int, saddle: int) -> float:
        return values[basin] - values[saddle] if basin >= 0 else float("nan")

    return tuple(
        SaddleConnection(saddle, (one, other), (barrier(one, saddle), barrier(other, saddle)))
        for saddle, one, other in zip(saddles.tolist(), *labels.tolist(), strict=True)
    )


def _capture_radius(critical_points: CriticalPoints, k: int) -> float:
    distances = angle(critical_points.points[k], critical_points.points)
    distances[k] = torch.inf
    return min(CAPTURE * float(distances.min()), LARGEST_CAPTURE)


@dataclass(frozen=True)
class _Capture:
    """Event: the point is within ``radius`` of a maximum. When exactly does not matter, so it is sampled."""

    center: Float[Tensor, " d"]
    radius: float
    terminal: bool = True
    sampled: bool = True

    def signal(self, x: Float[Tensor, "batch 1 d"]) -> Float[Tensor, " batch"]:
        """The radius minus the distance."""
        return self.radius - angle(x[..., 0, :], self.center)
