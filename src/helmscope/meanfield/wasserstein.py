"""Otto's geometry of densities on the sphere: Wasserstein gradients, the inner product, and the energy of a path.

A change h of a density rho, int h = 0, is carried by the velocity grad phi with the least kinetic energy [Benamou and
Brenier 2000; lecture on Geshkovski et al. 2023]:

    -div_S(rho grad phi) = h,     <h1, h2>_rho = int <grad phi1, grad phi2> rho = int phi1 h2.

In this inner product a functional f with first variation df/drho has the gradient

    nabla_W2 f = -div_S(rho grad(df/drho)),

and along d_t rho = -nabla_W2 f, which is descent, a particle moves by x' = -grad(df/drho). The lecture prints x' =
+grad(df/drho), which is ascent. The Benamou-Brenier energy of a path is int ||d_t rho||^2_rho dt, without a factor 1/2;
for times from 0 to 1 its least value between two densities is W2^2, taken on geodesics.

Changes h, like densities, are given by coefficients relative to the uniform density, so h has the first coefficient 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.interpolate import CubicSpline

from helmscope.geometry import lu
from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.density import Density
from helmscope.meanfield.evolve import DensityPath
from helmscope.types import HelmscopeError, check_times, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.meanfield.grid import Grid

MAX_DENSE = 640  # modes: beyond it, conjugate gradients
TOLERANCE = 1e-13  # of the residual of conjugate gradients, relative to the right-hand side
MAX_ITERATIONS = 2000
NODES = 4  # Gauss nodes in each interval of time

FirstVariation = Callable[["Tensor"], "Tensor"]


def wasserstein_gradient(
    density: Density, first_variation: Float[Tensor, " m"] | FirstVariation
) -> Float[Tensor, " modes"]:
    """The coefficients of nabla_W2 f = -div_S(rho grad(df/drho)).

    ``first_variation`` is df/drho: a function of points (m, d) -> (m,), or its values at the points of the grid. It is
    expanded in the harmonics of the grid, so both it and the density must be resolved by them. The density decreases f
    along d_t rho = -nabla_W2 f. Raises ``HelmscopeError`` for values of another shape, or not finite.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=8)
    >>> gradient = wasserstein_gradient(Density.uniform(grid), lambda x: x[:, 0])
    >>> torch.allclose(gradient, grid.analyze(grid.points[:, 0]))  # -Lap cos t = cos t
    True
    """
    grid = _check_density(density).grid
    return -grid.divergence(density.values[:, None] * _variation_gradient(density, first_variation))


def descent_velocity(
    density: Density, first_variation: Float[Tensor, " m"] | FirstVariation
) -> Float[Tensor, "m components"]:
    """Steepest descent x' = -grad(df/drho), the velocity of particles along d_t rho = -nabla_W2 f: components at the
    points of the grid.

    >>> from helmscope.meanfield import CircleGrid
    >>> velocity = descent_velocity(Density.uniform(CircleGrid(degree=8)), lambda x: x[:, 1])
    >>> round(velocity[0].item(), 12)  # -d/dt sin t at t = 0
    -1.0
    """
    return -_variation_gradient(_check_density(density), first_variation)


def descent_velocity_as_printed(
    density: Density, first_variation: Float[Tensor, " m"] | FirstVariation
) -> Float[Tensor, "m components"]:
    """Steepest descent as printed: x' = +grad(df/drho), as the lecture prints the particles of d_t rho = -nabla_W2 f.
    The sign is wrong: f increases.

    >>> from helmscope.meanfield import CircleGrid
    >>> density = Density.von_mises_fisher(CircleGrid(degree=16), kappa=1.0)
    >>> functional_rate(density, torch.sin(density.grid.points[:, 0]), descent_velocity_as_printed(
    ...     density, lambda x: torch.sin(x[:, 0]))) > 0
    True
    """
    return _variation_gradient(_check_density(density), first_variation)


def functional_rate(
    density: Density,
    first_variation: Float[Tensor, " m"] | FirstVariation,
    velocity: Float[Tensor, "m components"],
) -> float:
    """Rate of a functional: df/dt = int <grad(df/drho), v> rho along d_t rho = -div_S(rho v), v by components at the
    points.

    >>> from helmscope.meanfield import CircleGrid
    >>> density = Density.uniform(CircleGrid(degree=8))
    >>> round(functional_rate(density, lambda x: x[:, 1], descent_velocity(density, lambda x: x[:, 1])), 12)
    -0.5
    """
    gradient = _variation_gradient(_check_density(density), first_variation)
    if not isinstance(velocity, torch.Tensor) or velocity.shape != gradient.shape:
        raise HelmscopeError(
            f"velocity is {short_repr(velocity)}, but {density.grid} needs a tensor of shape {tuple(gradient.shape)}"
        )
    return float(density.grid.mean_of(density.values * (gradient * velocity).sum(-1)))


def internal_energy_gradient(density: Density, u: FirstVariation) -> Float[Tensor, " modes"]:
    """Wasserstein gradient of an internal energy: nabla_W2 f = -div_S(p u''(p) grad p) for f(p) = int u(p(x)) dx, p
    with respect to surface area; u is a smooth function of numbers that torch can differentiate twice.

    It is ``wasserstein_gradient`` of u'(p). Raises ``HelmscopeError`` if u(p) or u''(p) is not finite, as for u = p log
    p where the density is not positive.

    >>> from helmscope.meanfield import CircleGrid
    >>> density = Density.von_mises_fisher(CircleGrid(degree=16), kappa=1.0)
    >>> gradient = internal_energy_gradient(density, lambda p: p * p.log())  # -Lap p: diffusion is descent of it
    >>> torch.allclose(gradient, density.grid.eigenvalues * density.modes)
    True
    """
    grid, scale = _check_density(density).grid, math.exp(-density.grid.log_area)
    with torch.enable_grad():
        p = (scale * density.values).requires_grad_()
        energy = u(p)
        (slope,) = torch.autograd.grad(energy.sum(), p, create_graph=True)
        curvature = torch.zeros_like(p)
        if slope.requires_grad:
            (curvature,) = torch.autograd.grad(slope.sum(), p)
    if not bool((torch.isfinite(energy) & torch.isfinite(curvature)).all()):
        raise HelmscopeError("u or its second derivative is not finite at a value of the density")
    mobility = density.values * curvature * scale
    return -grid.divergence(mobility[:, None] * grid.gradient(density.modes))


def continuity_potential(density: Density, h: Float[Tensor, " modes"]) -> Float[Tensor, " modes"]:
    """The coefficients of phi with -div_S(rho grad phi) = h, the potential of the velocity that changes rho by h.

    By Galerkin's method: A phi = h with A_kl = int rho <grad Y_k, grad Y_l>, without the constant; dense up to 640
    modes, beyond by conjugate gradients preconditioned by the Laplacian, whose number of steps grows with the ratio of
    the largest to the smallest value of rho. Raises ``HelmscopeError`` if h has another shape or does not integrate to
    0, and if the density is not positive, since then phi is not unique.

    >>> from helmscope.meanfield import SphereGrid
    >>> grid = SphereGrid(degree=4)
    >>> h = grid.analyze(grid.points[:, 2])
    >>> torch.allclose(continuity_potential(Density.uniform(grid), h), h / 2)  # -Lap z = 2 z
    True
    """
    grid, right = _check_density(density).grid, _check_change(density, h)
    rho = density.values
    if not bool((rho > 0).all()):
        raise HelmscopeError(
            f"density has the relative value {float(rho.min()):.3g}, but the equation -div(rho grad phi) = h needs a "
            "positive density"
        )
    if len(grid.degrees) <= MAX_DENSE:
        solution = lu.solve(stiffness_matrix(grid, rho)[1:, 1:], right[1:])
        return torch.cat([right[:1] * 0, solution])
    return _conjugate_gradients(grid, rho, right)


@full_precision
def wasserstein_inner_product(density: Density, h1: Float[Tensor, " modes"], h2: Float[Tensor, " modes"]) -> float:
    """Wasserstein inner product of two changes of a density: <h1, h2>_rho = int <grad phi1, grad phi2> rho = int phi1
    h2, where -div_S(rho grad phi_i) = h_i.

    Raises ``HelmscopeError`` as ``continuity_potential`` does.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=4)
    >>> h = grid.analyze(grid.points[:, 0])
    >>> round(wasserstein_inner_product(Density.uniform(grid), h, h), 12)  # int cos^2
    0.5
    """
    return float(continuity_potential(density, h1) @ _check_change(density, h2))


def benamou_brenier_energy(
    densities: DensityPath | Iterable[Density], times: Iterable[float] | Tensor | None = None
) -> float:
    """Benamou-Brenier energy int ||d_t rho||^2_rho dt of a path of densities: the kinetic energy of the least velocity
    that moves it.

    A ``DensityPath`` has its own times. Between the times the path is a cubic spline of the coefficients, and the
    error is of order dt^4 (of lower order on an uneven grid of times). For times from 0 to 1 the energy is at least
    W2^2 of the ends, with equality for geodesics of constant speed. Raises ``HelmscopeError`` for fewer than 4
    densities, for densities on different grids, and where a density of the path is not positive.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid, times = CircleGrid(degree=16), torch.linspace(0, 1, 5)
    >>> turning = [Density.von_mises_fisher(grid, kappa=1.0, center=torch.stack([t.cos(), t.sin()])) for t in times]
    >>> round(benamou_brenier_energy(turning, times), 2)  # the rotation itself, not the least velocity, has energy 1
    0.38
    """
    if times is None and isinstance(densities, DensityPath):
        times = densities.times
    path, wanted = list(densities), check_times(times)
    if len(path) < 4 or len(path) != len(wanted):
        raise HelmscopeError(
            f"densities has {len(path)} densities for {len(wanted)} times, but there must be one for each of at least 4"
        )
    grid = _check_density(path[0]).grid
    if any(_check_density(density).grid is not grid for density in path):
        raise HelmscopeError("densities has densities on several grids, but they must share one grid object")
    spline = CubicSpline(np.array(wanted), torch.stack([density.modes for density in path]).numpy())
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    energy = 0.0
    for start, end in itertools.pairwise(wanted):
        for node, weight in zip(nodes, weights, strict=True):
            t = start + (end - start) * (node + 1) / 2
            modes, change = torch.from_numpy(spline(t)), torch.from_numpy(spline(t, 1))
            change[0] = 0.0
            energy += (
                (end - start) / 2 * float(weight) * wasserstein_inner_product(Density(grid, modes), change, change)
            )
    return energy


@full_precision
def stiffness_matrix(grid: Grid, rho: Float[Tensor, " m"]) -> Float[Tensor, "modes modes"]:
    """A_kl = int rho <grad Y_k, grad Y_l> dm, from values of rho at the points.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=1)
    >>> torch.allclose(stiffness_matrix(grid, torch.ones_like(grid.weights)), torch.diag(grid.eigenvalues))
    True
    """
    gradients = grid.gradient(torch.eye(len(grid.degrees), dtype=torch.float64, device="cpu"))
    weighted = gradients * (grid.weights * rho)[:, None]
    return weighted.flatten(1) @ gradients.flatten(1).mT


@full_precision
def _conjugate_gradients(grid: Grid, rho: Tensor, right: Tensor) -> Tensor:
    """Solve A phi = h; the condition number of the preconditioned matrix is at most max rho / min rho."""
    inverse = 1 / grid.eigenvalues.clamp(min=1)

    def apply(modes: Tensor) -> Tensor:
        return -grid.divergence(rho[:, None] * grid.gradient(modes))

    phi, residual = torch.zeros_like(right), right.clone()
    direction = inverse * residual
    product = residual @ direction
    for _ in range(MAX_ITERATIONS):
        if float(residual.norm()) <= TOLERANCE * float(right.norm()):
            return phi
        image = apply(direction)
        step = product / (direction @ image)
        phi, residual = phi + step * direction, residual - step * image
        preconditioned = inverse * residual
        product, previous = residual @ preconditioned, product
        direction = preconditioned + product / previous * direction
    raise HelmscopeError(
        f"density has values from {float(rho.min()):.3g} to {float(rho.max()):.3g}, and conjugate gradients do not "
        f"converge in {MAX_ITERATIONS} steps: use a density that varies less"
    )


def _variation_gradient(density: Density, first_variation: Tensor | FirstVariation) -> Tensor:
    grid = density.grid
    values = first_variation(grid.points) if callable(first_variation) else first_variation
    if not isinstance(values, torch.Tensor) or values.shape != grid.weights.shape:
        raise HelmscopeError(
            f"first_variation gives {short_repr(values)}, but it must give one number for each of the "
            f"{len(grid.points)} points of the grid"
        )
    if not bool(torch.isfinite(values).all()):
        raise HelmscopeError("first_variation is not finite at a point of the grid")
    return grid.gradient(grid.analyze(values.detach().double()))


def _check_density(density: object) -> Density:
    if not isinstance(density, Density):
        raise HelmscopeError(f"density is {short_repr(density)}, but it must be a Density")
    return density


def _check_change(density: Density, h: object) -> Tensor:
    modes = density.modes
    if not isinstance(h, torch.Tensor) or h.shape != modes.shape or not bool(torch.isfinite(h).all()):
        raise HelmscopeError(
            f"h is {short_repr(h)}, but {density.grid} needs a finite tensor of shape {tuple(modes.shape)}"
        )
    h = h.detach().double()
    if not abs(float(h[0])) <= 1e-10 * (1e-300 + float(h.norm())) + 1e-14:
        raise HelmscopeError(f"h integrates to {float(h[0]):.3g}, but a change of a density integrates to 0")
    return h
