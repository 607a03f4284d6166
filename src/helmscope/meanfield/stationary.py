"""Stationary densities of tokens under a field with noise, stable or not, by Newton's method.

With the forward equation d_t rho = N(rho) - D rho, D = nu k (k + d - 2) in the harmonics, they solve

    rho = D^{-1} N(rho)   for all harmonics but the constant one, which is 1.

This form is the identity plus a compact operator, so that Krylov methods converge in few steps; up to 700 harmonics
the Jacobian is a matrix. Without mean field the equation is linear and one step solves it.

Known forms: e^{U / nu} for a force grad U under nu I; Z^{c / (nu beta)} for SA and e^{c Z / (nu beta)} for USA with
V = c I (``attention_potential``).

A stationary density is stable if all perturbations decay: if the spectrum of h -> N'(rho) h - D h on perturbations of
mass 0 has negative real parts. Where the equation commutes with rotations, rotating a density gives another stationary
one, and these directions, of rate 0, are counted apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, gmres

from helmscope.fields.attention import SA, USA
from helmscope.fields.field import Field, as_field
from helmscope.fields.noise import Noise
from helmscope.geometry import lu
from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.attention_potential import attention_potential
from helmscope.meanfield.density import Density, check_nonnegative
from helmscope.meanfield.drift import AttentionDrift, ForceDrift
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.meanfield.grid import Grid
from helmscope.meanfield.growth import bessel_ratios
from helmscope.meanfield.linearization import Linearization
from helmscope.meanfield.zonal_grid import ZonalGrid
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_integer, check_progress, check_real, short_repr
from helmscope.types.display import one_line_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

DENSE = 700  # harmonics up to which the Jacobian is a matrix
SWEEPS = 500  # most fixed-point iterations before Newton's method, from the default start
SETTLED = (1e-3, 1e-5, 1e-7)  # relative change of a fixed-point iteration at which Newton's method takes over
HALVINGS = 12  # of a Newton step that does not reduce the error
UNRESOLVED = 1e-6  # largest truncation error, relative to |rho|
SMOOTH = 1e-9  # share of the harmonics beyond, below which the first ones determine the stability
FAR = 1e-10  # relative density below which its series has fewer than 6 correct digits
NEUTRAL = 1e-6  # largest rate of a rotation, relative to nu (d - 1)


class StationaryStatus(Enum):
    """How Newton's method ended; the value is the message, with a remedy.

    >>> StationaryStatus.CONVERGED.value
    'converged'
    """

    CONVERGED = "converged"
    NOT_CONVERGED = "Newton's method did not converge: pass a start that is closer, or raise max_iterations"
    NOT_FINITE = "the velocity is not finite: lower beta, or check the field"
    UNRESOLVED = "the density is too concentrated for its grid: raise degree, or the noise"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StationaryDensity(Density):
    """A stationary density, with how well it solves the equation and whether it is stable.

    ``residual`` is the L2 norm of d_t rho relative to the uniform density in the harmonics of the grid, ``truncation``
    the share of the last tenth of their degrees in |rho|, about the relative error of rho. ``growth_rate`` is the
    largest real part of the spectrum of the linearized equation, and ``rotations`` the number of directions of rate 0
    along which a rotation moves the density, which are left out of it. On a ``ZonalGrid`` only zonal perturbations are
    considered. Where ``status`` is not CONVERGED, the density is the last iterate, and ``growth_rate`` may be NaN.

    >>> from helmscope.fields.noise import IsotropicNoise
    >>> from helmscope.meanfield import CircleGrid
    >>> stationary_density(SA(beta=4.0), CircleGrid(degree=32), IsotropicNoise(0.1))
    <StationaryDensity on S^1, degree 32: |mean| 0.9131, growth rate -0.6342, 1 rotation; converged>
    """

    residual: float
    truncation: float
    status: StationaryStatus
    iterations: int
    growth_rate: float
    rotations: int

    @property
    def stable(self) -> bool:
        """Whether all perturbations other than rotations decay."""
        return self.growth_rate < 0

    def __repr__(self) -> str:
        turns = f", {self.rotations} rotation{'s' if self.rotations > 1 else ''}" if self.rotations else ""
        return one_line_repr(
            f"StationaryDensity on S^{self.grid.dim - 1}, degree {self.grid.degree}: |mean| "
            f"{float(self.mean.norm()):.4g}, growth rate {self.growth_rate:.4g}{turns}; "
            f"{self.status.value.split(':')[0]}"
        )


@shows_progress("stationary density")
def stationary_density(
    field: object,
    grid: Grid,
    noise: Noise,
    *,
    start: Density | None = None,
    tol: float = 1e-10,
    max_iterations: int = 50,
    progress: ProgressOption = None,
) -> StationaryDensity:
    """A stationary density of tokens under ``field`` and ``noise``, near ``start``: a solution of the forward equation
    0 = -div_S(rho b) + div_S div_S(Sigma rho), where b is the drift of the field at rho and of the noise's process.

    Known forms: e^{U / nu} for a force grad U under nu I; Z^{c / (nu beta)} for SA and e^{c Z / (nu beta)} for USA with
    V = c I, where Z(x) = int e^{beta <x, y>} rho(dy).

    ``field`` is anything that ``evolve`` takes and that does not depend on time. Newton's method finds unstable
    densities as well: those nearest to ``start``. By default attention whose matrices are multiples of I starts from a
    concentrated density and first iterates rho <- e^{Phi[rho] / nu}, which leads to the clustered state if there is
    one, and all else starts from the uniform density. It has converged where the residual is at most ``tol`` (1 +
    |rho|). Raises ``HelmscopeError`` for fields that depend on time, without noise, and for bad input of ``evolve``.
    ``progress`` is called with the share of the work done.

    >>> from helmscope.fields.noise import IsotropicNoise
    >>> from helmscope.meanfield import CircleGrid
    >>> right = lambda x: torch.tensor([1.0, 0.0]).to(x).expand_as(x)  # grad of U = x_1
    >>> stationary_density(right, CircleGrid(degree=32), IsotropicNoise(0.5)).mean[0]  # I_1(2) / I_0(2)
    tensor(0.6978, dtype=torch.float64)
    """
    tol = check_real("tol", tol, above=0)
    max_iterations = check_integer("max_iterations", max_iterations, at_least=1)
    if not isinstance(grid, Grid):
        raise HelmscopeError(f"grid is {short_repr(grid)}, but it must be a grid such as CircleGrid(degree=64)")
    flow = as_field(torch.zeros_like if field is None else field)
    if not flow.autonomous:
        raise HelmscopeError(f"field is {flow.name}, which depends on time, but then no density is stationary")
    equation = ForwardEquation.of(flow, grid, noise)
    if not equation.nu > 0:
        raise HelmscopeError(f"noise is {short_repr(noise)}, but a stationary density needs noise with nu > 0")
    if start is not None and (not isinstance(start, Density) or repr(start.grid) != repr(grid)):
        raise HelmscopeError(f"start is {short_repr(start)}, but it must be a Density on the grid {grid}")
    if start is not None:
        check_nonnegative("start", start)
    if start is None:
        modes, iterations = _from_default_start(flow, equation, tol, max_iterations)
    else:
        modes, iterations = _newton(equation, start.modes / start.modes[0], tol, max_iterations)
    report = check_progress(progress)
    report(0.5)
    residual = _residual(equation, modes)
    status = StationaryStatus.CONVERGED
    if not residual <= tol * (1 + float(modes.norm())):
        status = StationaryStatus.NOT_CONVERGED
    truncation = truncation_error(grid, modes)
    if not truncation <= UNRESOLVED:
        status = StationaryStatus.UNRESOLVED
    growth, rotations = math.nan, 0
    if math.isfinite(residual):
        growth, rotations = _stability(Linearization(equation, modes, _accurate_values(flow, equation, modes)))
    else:
        status = StationaryStatus.NOT_FINITE
    report(1.0)
    return StationaryDensity(
        grid,
        modes,
        residual=residual,
        truncation=truncation,
        status=status,
        iterations=iterations,
        growth_rate=growth,
        rotations=rotations,
    )


def _from_default_start(field: Field, equation: ForwardEquation, tol: float, max_iterations: int) -> tuple[Tensor, int]:
    """Newton's method from the uniform density, or for attention from a concentrated one after fixed-point iterations;
    if it fails, after more of them, since below a fold they pass slowly where a solution has just vanished.
    """
    grid, modes = equation.grid, Density.uniform(equation.grid).modes
    if not isinstance(equation.drift, AttentionDrift) or equation.excess is not None:
        return _newton(equation, modes, tol, max_iterations)
    assert isinstance(field, SA | USA)
    # near a cluster Phi is about scale <x, center>, and for beta = 0 this von Mises-Fisher density is the solution
    kappa = _self_consistent_kappa(equation.drift.scale / equation.nu, grid.dim)
    modes = normalized_exponential(grid, min(kappa, (grid.degree / 6) ** 2) * grid.points[:, 0])
    for settled in SETTLED:
        for _ in range(SWEEPS):
            after = normalized_exponential(grid, attention_potential(field, grid, modes) / equation.nu)
            change, modes = float((after - modes).norm()), after
            if change <= settled * float(modes[1:].norm()):
                break
        found, iterations = _newton(equation, modes, tol, max_iterations)
        if _residual(equation, found) <= tol * (1 + float(found.norm())):
            break
    return found, iterations


def _accurate_values(field: Field, equation: ForwardEquation, modes: Tensor) -> Tensor | None:
    """The values of a stationary density under SA where it is far below the rounding errors of its series, from
    rho ~ Z^{c / (nu beta)}; None for other equations. Each of the iterations removes more of the rounding errors.
    """
    if not isinstance(field, SA) or not isinstance(equation.drift, AttentionDrift) or equation.excess is not None:
        return None
    grid = equation.grid
    values = grid.synthesize(modes)
    far = values <= FAR * values.max()
    for _ in range(3 if bool(far.any()) else 0):
        exponent = attention_potential(field, grid, modes, values) / equation.nu
        peak = values.argmax()
        values = torch.where(far, values[peak] * (exponent - exponent[peak]).exp(), values)
    return values


def _residual(equation: ForwardEquation, modes: Tensor) -> float:
    return float((equation.rate(modes, 0.0) - equation.decay * modes).norm())


def _self_consistent_kappa(strength: float, dim: int) -> float:
    """The solution kappa > 0 of kappa = strength A_d(kappa), A_d = I_{d/2} / I_{d/2-1}; 0 if there is none."""
    if strength <= dim:
        return 0.0
    kappa = strength
    for _ in range(200):
        kappa = strength * float(bessel_ratios(min(kappa, 1e6), 1, dim=dim)[1])
    return kappa


def normalized_exponential(grid: Grid, exponent: Float[Tensor, " m"]) -> Float[Tensor, " modes"]:
    """The coefficients of e^exponent / int e^exponent dm.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=8)
    >>> normalized_exponential(grid, 2 * grid.points[:, 0])[0]
    tensor(1., dtype=torch.float64)
    """
    modes = grid.analyze((exponent - exponent.max()).exp())
    return modes / modes[0]


def truncation_error(grid: Grid, modes: Float[Tensor, " modes"]) -> float:
    """The share of the harmonics in the last tenth of the degrees in |rho|.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=16)
    >>> truncation_error(grid, Density.von_mises_fisher(grid, kappa=2.0).modes) < 1e-12
    True
    """
    return float(modes[grid.degrees > 0.9 * grid.degree].norm() / modes.norm())


def _newton(equation: ForwardEquation, modes: Tensor, tol: float, limit: int) -> tuple[Tensor, int]:
    """Damped Newton steps on g(rho) = rho - D^{-1} N(rho), until rounding stops them; the state and their number."""
    error = _error(equation, modes)
    for iteration in range(limit):
        if not bool(torch.isfinite(error).all()) or float(error.norm()) <= 1e-15 * float(modes.norm()):
            return modes, iteration
        step = _newton_step(Linearization(equation, modes), error)
        for halving in range(HALVINGS):
            trial = modes.clone()
            trial[1:] += 0.5**halving * step
            after = _error(equation, trial)
            if float(after.norm()) < float(error.norm()):
                break
        else:
            return modes, iteration  # no step reduces the error any more
        converged = float(after.norm()) > 0.5 * float(error.norm()) and float(error.norm()) < 1e-3 * tol
        modes, error = trial, after
        if converged:
            return modes, iteration + 1
    return modes, limit


def _error(equation: ForwardEquation, modes: Tensor) -> Tensor:
    return (modes - equation.rate(modes, 0.0) / equation.decay.clamp(min=1e-300))[1:]


@full_precision
def _newton_step(linear: Linearization, error: Tensor) -> Tensor:
    """s with s - D^{-1} N'(rho) s = -error. T T^T, with the tangents T of rotations, is added, since along them the
    left side vanishes.
    """
    decay, tangents = linear.equation.decay[1:], torch.zeros(len(error), 0, dtype=torch.float64, device="cpu")
    if isinstance(linear.equation.drift, AttentionDrift) and linear.equation.excess is None:
        tangents = _rotation_tangents(linear)
    if len(error) <= DENSE:
        matrix = -linear.matrix[1:, 1:] / decay[:, None] + tangents @ tangents.mT
        if isinstance(linear.equation.drift, AttentionDrift | ForceDrift):
            regular: Tensor = lu.solve(matrix, -error)
            return regular
        shortest: Tensor = torch.linalg.lstsq(matrix, -error[:, None], driver="gelsd", rcond=1e-9).solution[:, 0]
        return shortest  # other attention may have rotations of its own

    def product(s: np.ndarray) -> np.ndarray:
        h = torch.from_numpy(np.ascontiguousarray(s.reshape(-1)))
        change = -_apply(linear, h) / decay + tangents @ (tangents.mT @ h)
        return change.numpy()

    operator = LinearOperator((len(error),) * 2, matvec=product, dtype=np.float64)
    answer, _ = gmres(operator, -error.numpy(), rtol=1e-8, restart=100, maxiter=4)
    return torch.from_numpy(answer)


def _apply(linear: Linearization, h: Tensor) -> Tensor:
    """The linearized equation on perturbations of mass 0, without their first coefficient."""
    return linear.apply(torch.nn.functional.pad(h, (1, 0)))[..., 1:]


@full_precision
def _rotation_tangents(linear: Linearization) -> Float[Tensor, "modes turns"]:
    """An orthonormal basis of the changes <grad_S rho, A x> under rotations, A antisymmetric, without the mass."""
    grid, columns = linear.equation.grid, []
    if not isinstance(grid, ZonalGrid):
        gradient = grid.gradient(linear.modes)
        for i in range(grid.dim):
            for j in range(i):
                turn = torch.zeros_like(grid.points)
                turn[:, i], turn[:, j] = grid.points[:, j], -grid.points[:, i]
                columns.append(grid.analyze((gradient * grid.components(turn)).sum(-1))[1:])
    table = torch.stack(columns, -1) if columns else linear.modes.new_zeros(len(linear.modes) - 1, 0)
    left, sizes, _ = torch.linalg.svd(table, full_matrices=False)
    basis: Tensor = left[:, sizes > 1e-7 * max(1.0, float(linear.modes.norm()))]
    return basis


@full_precision
def _stability(linear: Linearization) -> tuple[float, int]:
    """The largest real part of the spectrum without rotations, and the number of rotations that leave the equation
    unchanged.
    """
    tangents = _rotation_tangents(linear)
    if tangents.shape[1]:
        moved = torch.stack([_apply(linear, tangent) for tangent in tangents.mT], -1)
        _, sizes, right = torch.linalg.svd(moved, full_matrices=False)
        scale = linear.equation.nu * (linear.equation.grid.dim - 1)
        tangents = tangents @ right.mT[:, sizes <= NEUTRAL * scale]
    count = len(linear.modes) - 1
    if count <= DENSE:
        return _largest_real_part(linear.matrix[1:, 1:], tangents), tangents.shape[1]
    low = DENSE  # the smooth perturbations alone give an estimate
    eye = torch.eye(low, len(linear.modes) - 1, dtype=torch.float64, device="cpu")
    corner = torch.cat([_apply(linear, block)[:, :low] for block in torch.split(eye, 64)]).mT
    estimate = _largest_real_part(corner, torch.linalg.qr(tangents[:low])[0])
    if float(linear.modes[low:].norm()) <= SMOOTH * float(linear.modes.norm()):
        return estimate, tangents.shape[1]
    return _refined_real_part(linear, tangents, estimate), tangents.shape[1]


@full_precision
def _largest_real_part(matrix: Tensor, neutral: Tensor) -> float:
    """Of the spectrum of a matrix on the quotient by invariant directions of rate 0."""
    basis, _ = torch.linalg.qr(neutral, mode="complete")
    rest = basis[:, neutral.shape[1] :]
    return float(torch.linalg.eigvals(rest.mT @ matrix @ rest).real.max())


@full_precision
def _refined_real_part(linear: Linearization, neutral: Tensor, estimate: float) -> float:
    """The largest real part near an estimate, from eigenvalues of (shift - L)^{-1} by the Arnoldi method; each inverse
    by GMRES, preconditioned with shift + D.
    """
    decay, size = linear.equation.decay[1:], len(linear.modes) - 1
    shift = max(estimate, 0.0) + float(decay[0])

    def off(h: Tensor) -> Tensor:
        return h - neutral @ (neutral.mT @ h)

    def shifted(s: np.ndarray) -> np.ndarray:
        h = torch.from_numpy(np.ascontiguousarray(s.reshape(-1)))
        return ((shift * h - off(_apply(linear, off(h)))) / (shift + decay)).numpy()

    operator = LinearOperator((size, size), matvec=shifted, dtype=np.float64)

    def inverse(s: np.ndarray) -> np.ndarray:
        h = off(torch.from_numpy(np.ascontiguousarray(s.reshape(-1)))) / (shift + decay)
        return off(torch.from_numpy(gmres(operator, h.numpy(), rtol=1e-10, restart=100, maxiter=4)[0])).numpy()

    start = off(torch.ones(size, dtype=torch.float64, device="cpu") / (1 + decay)).numpy()
    resolvent = LinearOperator((size, size), matvec=inverse, dtype=np.float64)
    try:
        values = eigs(resolvent, k=4, v0=start, tol=1e-8, return_eigenvectors=False)
    except ArpackNoConvergence as error:
        values = error.eigenvalues
    return float((shift - 1 / values).real.max()) if len(values) else estimate
