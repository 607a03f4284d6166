"""Steps of Jordan, Kinderlehrer and Otto on the circle and for zonal densities: implicit Euler in the space of
densities [Helmholtz Transformer, no. 10].

    rho' = argmin over rho' of  F(rho') + W2^2(rho', rho) / (2 tau),     F = nu Ent + int V rho',     V = -U.

A step of size tau approximates d_t rho = -div_S(rho grad U) + nu Lap_S rho with an error of order tau^2, decreases F,
and leaves rho ~ e^{-V / nu} where it is. In the coordinates of a particle it is an ordinary minimization: rho' = T_#
rho with T = exp(grad phi), and with a the angle along a circle of longitude and u = d phi / da

    J(phi) = int rho u^2 / (2 tau) + nu int rho log(rho / det DT) + int V(T) rho,
    T(a) = a + u(a),     det DT = (1 + u') (cos T(a) / cos a)^(d-2),

where the second factor, with a the angle from the equator, is that of zonal densities, and 1 on the circle. phi is a
sum of harmonics, J is evaluated by quadrature, and Newton's method finds its minimum, so the error in space is
spectral. A map of the circle that also turns it, int u da != 0, is not optimal; as u = d phi / da it cannot occur.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import USA
from helmscope.fields.field import Field
from helmscope.fields.noise import IsotropicNoise
from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.density import Density, zonal_cloud_points
from helmscope.meanfield.evolve import evolve
from helmscope.meanfield.free_energy import isotropic_nu
from helmscope.meanfield.zonal_grid import ZonalGrid
from helmscope.types import HelmscopeError, check_real, one_line_repr, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    Energy = Callable[[Tensor], Tensor]

MAX_ITERATIONS = 100
SMALLEST = 2.0**-40  # share of a Newton step
CONVERGED = 1e-22  # squared length of a Newton step, in the metric of J, at which it is the last
UNRESOLVED = 1e-6  # largest error of the new density's series, relative to its largest value


@dataclass(frozen=True, eq=False, repr=False)
class JkoStep:
    """The density after a step, F before and after it, W2^2 between both, and how far each point of the grid moves.

    >>> from helmscope.meanfield import CircleGrid
    >>> jko_step(Density.uniform(CircleGrid(degree=16)), lambda x: -x[:, 0], noise=0.5, tau=0.1)
    <JkoStep: F from -0.9189 to -0.9654, W2 0.067, 4 Newton steps>
    """

    density: Density
    energy_before: float
    energy_after: float
    squared_distance: float
    displacement: Float[Tensor, " m"]  # u at the points: along the circle, or the meridian toward the axis
    iterations: int

    def __repr__(self) -> str:
        return one_line_repr(
            f"JkoStep: F from {self.energy_before:.4g} to {self.energy_after:.4g}, W2 "
            f"{math.sqrt(self.squared_distance):.2g}, {self.iterations} Newton steps"
        )


@full_precision
def jko_step(
    density: Density,
    energy: Energy | None,
    *,
    noise: IsotropicNoise | float,
    tau: float,
    attention: USA | None = None,
    transported: Field | Callable[[Tensor], Tensor] | Density | None = None,
) -> JkoStep:
    """One step of size ``tau`` from a density on a ``CircleGrid`` or ``ZonalGrid``.

    ``energy`` is V = -U, a function of points (m, d) -> (m,) that torch can differentiate twice, or None: it has the
    opposite sign of the ``potential`` U of ``free_energy``. ``noise`` is ``IsotropicNoise(nu)`` or the number nu.
    ``attention`` adds the energy of USA, F - (1 / (2 beta)) int int e^{beta <x, y>} rho rho, on the circle only.

    ``transported`` makes it a splitting step: the step starts at T_# rho, where T is the flow for the time tau of a
    field, or of a function as in ``evolve``, or at a density that was transported already. Attention must not be in T
    and in F (in ``noise`` as its diffusion, or as ``attention``) at once, or it is counted twice; a warning says so for
    a field that attends. What a density, or a function, was made of cannot be known: there is no warning for them.

    Raises ``HelmscopeError`` for nu < 0, tau <= 0, another grid, a start that is not positive, a V that is not smooth
    or not zonal, a tau for which J is not convex near its minimum, and a result that the grid does not resolve.

    >>> from helmscope.meanfield import CircleGrid
    >>> gibbs = Density.from_function(CircleGrid(degree=16), lambda x: (x[:, 0] / 0.5).exp(), normalize=True)
    >>> step = jko_step(gibbs, lambda x: -x[:, 0], noise=0.5, tau=0.1)  # e^{-V / nu} stays
    >>> bool((step.density.modes - gibbs.modes).abs().max() < 1e-12)
    True
    """
    if not isinstance(density, Density) or not isinstance(density.grid, CircleGrid | ZonalGrid):
        raise HelmscopeError(f"density is {short_repr(density)}, but it must be a Density on a CircleGrid or ZonalGrid")
    nu, tau = isotropic_nu(noise), check_real("tau", tau, above=0)
    if energy is not None and not callable(energy):
        raise HelmscopeError(f"energy is {short_repr(energy)}, but it must be a function of points, or None")
    warn_if_counted_twice(transported, nu, attention)
    start = _transport(density, transported, tau)
    problem = _Lagrangian.of(start, energy, nu, tau, _interaction(attention, density.grid))
    coefficients, iterations = _minimize(problem)
    u = problem.slopes @ coefficients
    moved = _pushforward(problem, coefficients)
    energies = (problem.energy(torch.zeros_like(coefficients)), problem.energy(coefficients))
    return JkoStep(moved, *energies, float(problem.mass @ u**2), u, iterations)


@dataclass(frozen=True, eq=False)
class _Interaction:
    """-(c / 2) int int G(a - b) rho rho with G = e^{beta cos} / beta, or cos for beta = 0."""

    beta: float
    scale: float

    @full_precision
    def derivatives(self, a: Float[Tensor, " m"]) -> tuple[Tensor, Tensor, Tensor]:
        """G, G', G'' at all differences."""
        difference = a[:, None] - a
        cos, sin, beta = difference.cos(), difference.sin(), self.beta
        growth = (beta * cos).exp()
        value = growth / beta if beta else cos
        return self.scale * value, -self.scale * sin * growth, self.scale * growth * (beta * sin**2 - cos)


@dataclass(frozen=True, eq=False)
class _Lagrangian:
    """J as a function of the coefficients of u in an orthonormal basis of gradients."""

    grid: CircleGrid | ZonalGrid
    mass: Float[Tensor, " m"]  # of the quadrature points
    rho: Float[Tensor, " m"]
    angle: Float[Tensor, " m"]
    slopes: Float[Tensor, "m k"]  # u of the basis
    bends: Float[Tensor, "m k"]  # u'
    external: Energy | None  # V
    interaction: _Interaction | None
    nu: float
    tau: float

    @classmethod
    def of(
        cls, start: Density, external: Energy | None, nu: float, tau: float, interaction: _Interaction | None
    ) -> _Lagrangian:
        grid, rho = start.grid, start.values
        assert isinstance(grid, CircleGrid | ZonalGrid)
        if not bool((rho > 0).all()):
            raise HelmscopeError(
                f"density has the relative value {float(rho.min()):.3g} at the start of the step, but it must be "
                "positive everywhere: mix it with the uniform density"
            )
        frequency = grid.eigenvalues[1:].sqrt()
        identity = torch.eye(len(grid.degrees), dtype=torch.float64, device="cpu")[1:]
        slopes = grid.gradient(identity)[..., 0].mT / frequency
        bends = -grid.synthesize(identity).mT * frequency
        if isinstance(grid, ZonalGrid):
            angle = torch.asin(grid.cosines)
            bends = bends + (grid.dim - 2) * torch.tan(angle)[:, None] * slopes
        else:
            angle = 2 * math.pi * torch.arange(len(rho), dtype=torch.float64, device="cpu") / len(rho)
        result = cls(grid, grid.weights * rho, rho, angle, slopes, bends, external, interaction, nu, tau)
        result._check_external()
        return result

    def points(self, a: Float[Tensor, " m"]) -> Float[Tensor, "m d"]:
        """The points of the circle, or of one meridian, at angles."""
        if isinstance(self.grid, CircleGrid):
            return torch.stack([a.cos(), a.sin()], -1)
        flat = torch.stack([a.sin(), a.cos()], -1)
        return torch.nn.functional.pad(flat, (0, self.grid.dim - 2))

    @full_precision
    def jacobian(self, coefficients: Tensor) -> Float[Tensor, " m"]:
        """det DT at the points."""
        stretch = 1 + self.bends @ coefficients
        if isinstance(self.grid, CircleGrid):
            return stretch
        narrowing = (self.angle + self.slopes @ coefficients).cos() / self.angle.cos()
        return stretch * narrowing.clamp(min=0) ** (self.grid.dim - 2)

    @full_precision
    def is_feasible(self, coefficients: Tensor) -> bool:
        """Whether T is monotone and stays on the meridian."""
        monotone = bool((1 + self.bends @ coefficients > 0).all())
        inside = (self.angle + self.slopes @ coefficients).abs() < math.pi / 2
        return monotone and (isinstance(self.grid, CircleGrid) or bool(inside.all()))

    @full_precision
    def energy(self, coefficients: Tensor) -> float:
        """F of T_# rho, with the entropy relative to surface area."""
        log_density = (self.rho / self.jacobian(coefficients)).log() - self.grid.log_area
        a = self.angle + self.slopes @ coefficients
        energy = self.nu * (self.mass @ log_density) if self.nu else self.mass.new_zeros(())
        if self.external is not None:
            energy = energy + self.mass @ self.external(self.points(a)).detach()
        if self.interaction is not None:
            energy = energy - self.mass @ self.interaction.derivatives(a)[0] @ self.mass / 2
        return float(energy)

    @full_precision
    def value(self, coefficients: Tensor) -> float:
        """J."""
        return self.energy(coefficients) + float(self.mass @ (self.slopes @ coefficients) ** 2) / (2 * self.tau)

    @full_precision
    def derivatives(self, coefficients: Tensor) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
        """The gradient and the matrix of second derivatives of J."""
        u, stretch = self.slopes @ coefficients, 1 + self.bends @ coefficients
        a = self.angle + u
        slope, curvature = u / self.tau, torch.full_like(u, 1 / self.tau)
        if self.external is not None:
            first, second = self._external_derivatives(a)
            slope, curvature = slope + first, curvature + second
        if isinstance(self.grid, ZonalGrid):
            slope = slope + self.nu * (self.grid.dim - 2) * a.tan()
            curvature = curvature + self.nu * (self.grid.dim - 2) / a.cos() ** 2
        extra = None
        if self.interaction is not None:
            _, first, second = self.interaction.derivatives(a)
            slope, curvature = slope - first @ self.mass, curvature - second @ self.mass
            extra = self.mass[:, None] * second * self.mass
        gradient = self.slopes.mT @ (self.mass * slope) - self.nu * self.bends.mT @ (self.mass / stretch)
        hessian = self.slopes.mT @ ((self.mass * curvature)[:, None] * self.slopes)
        hessian = hessian + self.nu * self.bends.mT @ ((self.mass / stretch**2)[:, None] * self.bends)
        return gradient, hessian if extra is None else hessian + self.slopes.mT @ extra @ self.slopes

    def _external_derivatives(self, a: Tensor) -> tuple[Tensor, Tensor]:
        assert self.external is not None
        with torch.enable_grad():
            angle = a.detach().requires_grad_()
            values = self.external(self.points(angle))
            if not values.requires_grad:
                return torch.zeros_like(a), torch.zeros_like(a)
            (first,) = torch.autograd.grad(values.sum(), angle, create_graph=True)
            second = torch.zeros_like(a)
            if first.requires_grad:
                (second,) = torch.autograd.grad(first.sum(), angle)
        return first.detach(), second

    def _check_external(self) -> None:
        if self.external is None:
            return
        values = self.external(self.points(self.angle))
        if (
            not isinstance(values, torch.Tensor)
            or values.shape != self.angle.shape
            or not bool(torch.isfinite(values).all())
        ):
            raise HelmscopeError(
                f"energy returns {short_repr(values)}, but it must return a finite number for each of the "
                f"{len(self.angle)} points"
            )
        if isinstance(self.grid, ZonalGrid):
            around = self.external(zonal_cloud_points(self.grid)).detach().reshape(len(values), -1)
            change = float((around - values.detach()[:, None]).abs().max())
            if not change <= 1e-9 * max(1.0, float(values.abs().max())):
                raise HelmscopeError(
                    f"energy changes by {change:.2g} under a rotation about the first axis, but on a ZonalGrid it "
                    "must depend on the first coordinate only"
                )


@full_precision
def _minimize(problem: _Lagrangian) -> tuple[Tensor, int]:
    """Newton's method with halved steps, from the identity."""
    coefficients = torch.zeros(problem.slopes.shape[1], dtype=torch.float64, device="cpu")
    value = problem.value(coefficients)
    for iteration in range(1, MAX_ITERATIONS + 1):
        gradient, hessian = problem.derivatives(coefficients)
        factor, failed = torch.linalg.cholesky_ex(hessian)
        if int(failed) or not bool(torch.isfinite(factor).all()):
            raise HelmscopeError(
                f"tau is {problem.tau:g}, but the step is not a convex problem for it: use a smaller tau"
            )
        step = -torch.cholesky_solve(gradient[:, None], factor)[:, 0]
        decrement = -float(gradient @ step)
        share = 1.0
        while True:
            trial = coefficients + share * step
            if problem.is_feasible(trial):
                if decrement <= CONVERGED * max(1.0, 1 / problem.tau):
                    return trial, iteration
                trial_value = problem.value(trial)
                if trial_value <= value - 1e-4 * share * decrement + 1e-14 * abs(value):
                    break
            share /= 2
            if share < SMALLEST:
                raise HelmscopeError(
                    f"tau is {problem.tau:g}, but Newton's method does not converge: use a smaller tau"
                )
        coefficients, value = trial, trial_value
    raise HelmscopeError(
        f"tau is {problem.tau:g}, but Newton's method does not converge in {MAX_ITERATIONS} steps: use a smaller tau"
    )


@full_precision
def _pushforward(problem: _Lagrangian, coefficients: Tensor) -> Density:
    """T_# rho: the coefficients int Y_k(T) rho keep the mass; they are checked against rho / det DT."""
    grid = problem.grid
    moved = problem.points(problem.angle + problem.slopes @ coefficients)
    basis = grid.evaluate(torch.eye(len(grid.degrees), dtype=torch.float64, device="cpu"), moved)
    modes = basis @ problem.mass
    expected = problem.rho / problem.jacobian(coefficients)
    misfit = float((modes @ basis - expected).abs().max() / expected.max())
    if not misfit <= UNRESOLVED:
        raise HelmscopeError(
            f"degree is {grid.degree}, but the series of the density after the step is wrong by {misfit:.2g} of its "
            "largest value: raise degree"
        )
    return Density(grid, modes / modes[0])


def _interaction(attention: object, grid: CircleGrid | ZonalGrid) -> _Interaction | None:
    if attention is None:
        return None
    beta = attention.unit_beta if isinstance(attention, USA) else None
    scale = attention.value_scale if isinstance(attention, USA) else None
    if beta is None or scale is None or not isinstance(grid, CircleGrid):
        raise HelmscopeError(
            f"attention is {short_repr(attention)} on {grid}, but it must be USA with multiples of I for query_key and "
            "value on a CircleGrid: no other attention has an energy in the flat metric"
        )
    grid.exponential_multipliers(beta)  # raises if the degree is too small
    return _Interaction(beta, scale)


def warn_if_counted_twice(transported: object, nu: float, attention: object = None) -> None:
    """Warn where a step moves tokens by attention and F may contain attention as well.

    >>> warn_if_counted_twice(None, 0.5)
    """
    if isinstance(transported, Field) and transported.attends and (nu > 0 or attention is not None):
        also = (
            "attention is in F as well"
            if attention is not None
            else "noise must not contain the diffusion of attention"
        )
        warnings.warn(
            f"transported is {transported.name}, which moves tokens by attention already: {also}, or it is counted "
            "twice",
            stacklevel=4,
        )


def _transport(density: Density, transported: object, tau: float) -> Density:
    if transported is None:
        return density
    if isinstance(transported, Density):
        if transported.grid is not density.grid:
            raise HelmscopeError(f"transported is on {transported.grid}, but it must be on the grid of density")
        return transported
    if not isinstance(transported, Field) and not callable(transported):
        raise HelmscopeError(
            f"transported is {short_repr(transported)}, but it must be a field, a function of points, a Density or None"
        )
    path = evolve(transported, density, times=[tau])
    if not len(path):
        raise HelmscopeError(f"transported leads to a density that cannot be computed: {path.outcome.summary}")
    return path[0]
