"""How clusters form and dissolve with noise: the branch of clustered stationary densities over (beta, nu).

Zonal stationary densities of SA or USA with multiples of I are followed from the uniform density, where they branch off
at nu_c (``critical_nu``), with the order parameter m = |E x| as the parameter and nu as an unknown:

    N(rho) = nu k (k + d - 2) rho,   E x = m e,

so that folds of nu(m) are no obstacle. Where nu(m) decreases throughout, the transition is continuous: the order
parameter falls to 0 at nu_c. Where nu(m) first increases, it is discontinuous: a stable clustered state exists up to
the fold, the largest nu(m) > nu_c, at which it jumps to the uniform one, and between nu_c and the fold both are stable
(hysteresis). The part of the branch beyond the fold, where nu(m) decreases, is the stable one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from scipy.optimize import brentq

from helmscope.fields.attention import SA, USA
from helmscope.fields.field import Field
from helmscope.fields.noise import IsotropicNoise
from helmscope.geometry import lu
from helmscope.geometry.harmonics import exponential_degree
from helmscope.meanfield.density import Density
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.meanfield.grid import Grid
from helmscope.meanfield.growth import check_isotropic_attention, critical_nu, growth_rates
from helmscope.meanfield.linearization import Linearization
from helmscope.meanfield.stationary import UNRESOLVED, truncation_error
from helmscope.meanfield.zonal_grid import ZonalGrid
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, as_measurement, check_integer, check_progress, check_real, short_repr
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

FIRST_ORDER, STEP, SMALLEST_STEP = 0.01, 0.02, 1e-4  # of the order parameter along the branch
ITERATIONS = 20  # of Newton's method at one point of the branch
CONVERGED = 1e-13  # largest error of a point, relative to |rho|
DISCONTINUOUS = 1e-6  # by which the fold must exceed nu_c, relative to it
PAST_FOLD = 0.98  # the branch is followed down to this share of nu_c
CLOSE = 0.002  # to the fold, in the order parameter
NEGATIVE = 1e-5  # of the largest value: larger negative values are no truncation error
UNSTABLE = ("unstable_order_parameter", "unstable_nu")
MARGIN = 1.1  # the default degree exceeds by this factor what the most concentrated density needs


@shows_progress("bifurcation diagram")
def bifurcation_diagram(
    field: Callable[[float], SA | USA],
    *,
    betas: Sequence[float],
    nus: Sequence[float],
    dim: int,
    degree: int | None = None,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The stationary densities of attention with noise nu I on S^(dim-1), over (beta, nu): zonal solutions rho of
    N(rho) = nu k (k + d - 2) rho in the harmonics of degree k, where N is minus the divergence of rho times the drift.

    ``field`` is a callable beta -> field, such as SA. The variables are

        order_parameter  |E x| of the stable clustered state; 0 where there is none
        growth_rate   the largest growth rate of perturbations of the uniform density, which is stable where it is < 0
        bistable      whether both are stable
        critical_nu   nu_c(beta), above which the uniform density is stable
        fold_nu       the largest nu with a clustered state; nu_c where the transition is continuous
        fold_order_parameter  |E x| of that state; 0 where the transition is continuous
        continuous    whether it is
        unstable_order_parameter, unstable_nu
                      |E x| and nu along the unstable branch from the uniform density at nu_c to the fold, at each
                      ``point`` that was computed; NaN beyond the last, and where the transition is continuous

    Stability of the clustered state is that under zonal perturbations. ``degree`` of the ``ZonalGrid`` defaults to what
    the most concentrated state, at the smallest nu, needs. Raises ``HelmscopeError`` for other fields than SA and USA
    with multiples of I, where another degree than 1 is the first to become unstable (the order is then not E x), unless
    betas >= 0 and nus > 0 increase, and if the degree is too small.

    >>> diagram = bifurcation_diagram(SA, betas=[0.0, 4.0], nus=[0.1, 0.3], dim=3)
    >>> diagram.order_parameter.values.round(4)
    array([[0.8873, 0.3966],
           [0.8232, 0.    ]])
    >>> diagram.continuous.values
    array([ True,  True])
    """
    dim = check_integer("dim", dim, at_least=2)
    beta_list, nu_list = _increasing("betas", betas, at_least=0.0), _increasing("nus", nus, above=0.0)
    if degree is not None:
        degree = check_integer("degree", degree, at_least=2)
    report, rows = check_progress(progress), []
    for index, beta in enumerate(beta_list):
        rows.append(_row(_field_at(field, beta, dim), nu_list, dim, degree))
        report((index + 1) / len(beta_list))
    stacked = {name: np.array([row[name] for row in rows]) for name in rows[0] if name not in UNSTABLE}
    axes = {name: ("beta", "nu") if value.ndim == 2 else ("beta",) for name, value in stacked.items()}
    stacked |= {name: _padded([row[name] for row in rows]) for name in UNSTABLE}
    axes |= dict.fromkeys(UNSTABLE, ("beta", "point"))
    diagram = xr.Dataset(
        {name: (axes[name], value) for name, value in stacked.items()},
        coords={"beta": beta_list, "nu": nu_list},
        attrs={"dim": dim, "field": type(_field_at(field, beta_list[0], dim)).__name__},
    )
    return as_measurement(diagram)


@dataclass(frozen=True, eq=False)
class Branch(ConciseRepr):
    """Clustered stationary densities in order of the order parameter: nu(m), the coefficients of the densities, and the
    largest nu(m), at the fold, with its m; without a fold those are nu_c and 0.

    >>> branch = clustered_branch(SA(beta=4.0), ZonalGrid(dim=3, degree=24), min_nu=0.1)
    >>> branch.fold_nu  # nu_c
    0.187667...
    """

    order_parameter: Float[np.ndarray, " point"]
    nu: Float[np.ndarray, " point"]
    modes: Float[Tensor, "point modes"]
    fold_nu: float
    fold_order_parameter: float


def clustered_branch(field: SA | USA, grid: ZonalGrid, *, min_nu: float) -> Branch:
    """The branch from the uniform density past its fold, and down to ``min_nu``, with steps of at most 0.02 in the
    order parameter.

    Raises ``HelmscopeError`` where the grid no longer resolves the densities.

    >>> branch = clustered_branch(SA(beta=4.0), ZonalGrid(dim=3, degree=24), min_nu=0.1)
    >>> branch.nu[0].round(4), branch.nu[-1] < 0.1
    (np.float64(0.1877), np.True_)
    """
    min_nu = check_real("min_nu", min_nu, above=0)
    equation = ForwardEquation.of(field, grid, IsotropicNoise(1.0))
    critical = nu = critical_nu(field, dim=grid.dim)
    points = [Point(0.0, nu, Density.uniform(grid).modes)]
    order, step = FIRST_ORDER, STEP
    while nu > min(min_nu, PAST_FOLD * critical):
        guess = points[-1].modes if len(points) < 2 else _extrapolated(points[-2], points[-1], order)
        solved = _point_at(equation, guess, nu, order)
        if solved is None:
            order, step = order - step / 2, step / 2
            if step < SMALLEST_STEP:
                raise _unresolved(field, grid, nu)
            continue
        points.append(solved)
        nu, step = solved.nu, min(STEP, 1.5 * step, (1 - order) / 8)
        order += step
    nus = np.array([point.nu for point in points])
    modes = torch.stack([point.modes for point in points])
    fold_order_parameter, fold_nu = _fold(equation, points, int(nus.argmax()))
    return Branch(np.array([point.order_parameter for point in points]), nus, modes, fold_nu, fold_order_parameter)


class Point(NamedTuple):
    """A point of a branch."""

    order_parameter: float
    nu: float
    modes: Float[Tensor, " modes"]


def _fold(equation: ForwardEquation, points: list[Point], top: int) -> tuple[float, float]:
    """m at the largest nu(m), and that nu: twice a parabola through three points, the second time close to the first
    maximum.
    """
    if top in (0, len(points) - 1):
        return points[top].order_parameter, points[top].nu
    nearby = points[top - 1 : top + 2]
    peak, level = _vertex(nearby)
    close = [
        _point_at(equation, _extrapolated(nearby[1], nearby[2], m), level, m)
        for m in (peak - CLOSE, peak, peak + CLOSE)
    ]
    solved = [point for point in close if point is not None]
    return _vertex(solved) if len(solved) == 3 else (peak, level)


def _vertex(points: list[Point]) -> tuple[float, float]:
    middle = points[1].order_parameter
    bend, slope, level = np.polyfit(
        [point.order_parameter - middle for point in points], [point.nu for point in points], 2
    )
    if bend >= 0:
        return middle, points[1].nu
    return middle - slope / (2 * bend), float(level - slope**2 / (4 * bend))


def _unresolved(field: Field, grid: ZonalGrid, nu: float) -> HelmscopeError:
    return HelmscopeError(
        f"degree is {grid.degree}, but the clustered states of {field} in dim={grid.dim} at nu={nu:.3g} and below need "
        "more: raise degree, or the smallest nu"
    )


def _extrapolated(first: Point, second: Point, order: float) -> Tensor:
    """The coefficients at another order parameter on the line through two points."""
    return second.modes + (order - second.order_parameter) / (second.order_parameter - first.order_parameter) * (
        second.modes - first.modes
    )


def _point_at(equation: ForwardEquation, guess: Tensor, nu: float, order: float) -> Point | None:
    """The point with E x = order e near a guess, by Newton's method; None if it fails or is not resolved.

    ``equation`` has nu = 1. The mean of a zonal density is modes_1 / sqrt(d), so modes_2, ..., and nu are unknown.
    """
    grid = equation.grid
    modes = guess.clone()
    modes[1] = order * math.sqrt(grid.dim)
    for _ in range(ITERATIONS):
        error = (equation.rate(modes, 0.0) - nu * equation.decay * modes)[1:]
        scaled = error / equation.decay[1:]
        if not bool(torch.isfinite(scaled).all()):
            return None
        if float(scaled.norm()) <= CONVERGED * nu * float(modes.norm()):
            fine = nu > 0 and truncation_error(grid, modes) <= UNRESOLVED and _is_positive(grid, modes)
            return Point(order, nu, modes) if fine else None
        linear = Linearization(equation, modes)
        matrix = linear.matrix[1:, 1:] + (1 - nu) * torch.diag(equation.decay[1:])
        matrix[:, 0] = -(equation.decay * modes)[1:]  # the derivative in nu takes the place of that in modes_1
        change = lu.solve(matrix / equation.decay[1:, None], -scaled)
        nu += float(change[0])
        modes[2:] += change[1:]
    return None


def _is_positive(grid: Grid, modes: Tensor) -> bool:
    """Other solutions of the truncated equation have the same mean, but are negative somewhere."""
    values = grid.synthesize(modes)
    return bool(values.min() > -NEGATIVE * values.max())


def _row(field: SA | USA, nus: list[float], dim: int, degree: int | None) -> dict[str, Any]:
    """The variables at one beta."""
    critical = critical_nu(field, dim=dim)
    growth = [float(growth_rates(field, dim=dim, nu=nu)[1:].max()) for nu in nus]
    order, fold, fold_order_parameter = [0.0] * len(nus), critical, 0.0
    below: tuple[list[float], list[float]] = ([], [])
    if critical > 0:
        grid = ZonalGrid(dim=dim, degree=degree or _needed_degree(field, min(nus[0], PAST_FOLD * critical), dim))
        branch = clustered_branch(field, grid, min_nu=nus[0])
        fold, fold_order_parameter = branch.fold_nu, branch.fold_order_parameter
        order = [_order_at(field, branch, grid, nu) for nu in nus]
        kept = branch.order_parameter < fold_order_parameter
        below = ([*branch.order_parameter[kept], fold_order_parameter], [*branch.nu[kept], fold])
    continuous = not fold > critical * (1 + DISCONTINUOUS)
    bistable = [rate < 0 < m for rate, m in zip(growth, order, strict=True)]
    return {
        "order_parameter": order,
        "growth_rate": growth,
        "bistable": bistable,
        "critical_nu": critical,
        "fold_nu": critical if continuous else fold,
        "fold_order_parameter": 0.0 if continuous else fold_order_parameter,
        "continuous": continuous,
        **dict(zip(UNSTABLE, ([], []) if continuous else below, strict=True)),
    }


def _padded(rows: list[list[float]]) -> Float[np.ndarray, "beta point"]:
    """Rows of different lengths as an array, filled up with NaN."""
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for k, row in enumerate(rows):
        table[k, : len(row)] = row
    return table


def _order_at(field: SA | USA, branch: Branch, grid: ZonalGrid, nu: float) -> float:
    """|E x| at nu on the stable part of the branch: the root of nu(m) - nu in m^2 between two points."""
    top = int(branch.nu.argmax())
    above = np.flatnonzero(branch.nu[top:] > nu)
    if not len(above):
        return 0.0
    equation = ForwardEquation.of(field, grid, IsotropicNoise(1.0))
    low = top + int(above[-1])
    first, second = (
        Point(float(branch.order_parameter[k]), float(branch.nu[k]), branch.modes[k]) for k in (low, low + 1)
    )

    def gap(square: float) -> float:
        for end in (first, second):
            if square == end.order_parameter**2:
                return end.nu - nu
        m = math.sqrt(square)
        solved = _point_at(equation, _extrapolated(first, second, m), nu, m)
        if solved is None:
            raise _unresolved(field, grid, nu)
        return solved.nu - nu

    return math.sqrt(brentq(gap, first.order_parameter**2, second.order_parameter**2, xtol=1e-14))


def _needed_degree(field: SA | USA, nu: float, dim: int) -> int:
    """A degree that resolves the kernel, and the most concentrated density, about e^{kappa <x, e>}, kappa = c / nu for
    SA and c e^beta / nu for USA.
    """
    beta, value, normalized = check_isotropic_attention(field, dim)
    kappa = abs(value) / nu * (1.0 if normalized else math.exp(min(beta, 60.0)))
    if not kappa < 1e5:
        raise HelmscopeError(
            f"nus starts at {nu:g}, but there the density is as concentrated as e^({kappa:.3g} <x, e>)"
        )
    needed = max(exponential_degree(size, dim=dim, tol=1e-12) for size in (abs(beta), kappa))
    return math.ceil(MARGIN * needed) + 8


def _field_at(field: object, beta: float, dim: int) -> SA | USA:
    if not callable(field) or isinstance(field, Field):
        raise HelmscopeError(f"field is {short_repr(field)}, but it must be a callable beta -> field, such as SA")
    flow = field(beta)
    check_isotropic_attention(flow, dim)
    first = growth_rates(flow, dim=dim, degree=2)
    if float(first[1]) <= 0 < float(first[2]):
        raise HelmscopeError(
            f"field is {flow} at beta={beta:g}, whose uniform density is first unstable in degree 2, but the order "
            "parameter |E x| describes degree 1 only"
        )
    assert isinstance(flow, SA | USA)
    return flow


def _increasing(name: str, values: object, **bound: float) -> list[float]:
    sequence = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(sequence, Sequence) or isinstance(sequence, str | bytes) or not sequence:
        raise HelmscopeError(f"{name} is {short_repr(values)}, but it must be a sequence of at least one number")
    numbers = [check_real(f"{name}[{i}]", value, **bound) for i, value in enumerate(sequence)]
    for i in range(1, len(numbers)):
        if numbers[i] <= numbers[i - 1]:
            raise HelmscopeError(f"{name}[{i}] is {numbers[i]:g} after {numbers[i - 1]:g}, but {name} must increase")
    return numbers
