"""curvature-drift: the chain, Stratonovich noise, Ito noise and the divergence form have different drifts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.noise import DivergenceForm, Ito, LayerNormChain, MatrixNoise, Stratonovich
from helmscope.geometry import lu, sphere, surface
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.meanfield.sphere_grid import SphereGrid
from helmscope.observe.generator import discrete_generator, sphere_generator

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from helmscope.fields.noise import Noise
    from helmscope.meanfield.grid import Grid

PROCESSES = {
    "chain": LayerNormChain(),
    "Stratonovich": Stratonovich(),
    "Ito": Ito(),
    "divergence form": DivergenceForm(),
}
NAMES = tuple(PROCESSES)
POINTS, EVEN = 64, 4
STEPS = tuple(2.0**-k for k in range(9, 15))
NOISES = 128  # on each of two grids, with four forward equations each
LAWS, MIN_RATIO = 256, 0.25  # noises on the circle, with four stationary laws each; the ratio of their eigenvalues


class Generators(NamedTuple):
    """The four generators applied to phi at many points, measured and from the library (point, 4); their two terms,
    <PMx, grad_S phi> (``pull``) and tr(PMP Hess_S phi) (``spread``) (point,); the c of theory (point, 4); the size
    |M| (|grad_S phi| + |Hess_S phi|) (point,); and the difference quotients of single steps (point, step, 3).
    """

    measured: Tensor
    library: Tensor
    pull: Tensor
    spread: Tensor
    c: Tensor
    size: Tensor
    rates: Tensor


@experiment("curvature-drift", seconds=14)
def curvature_drift(case: TrialCase) -> Finding:
    """L phi = -c <PMx, grad_S phi> + tr(PMP Hess_S phi) with c = 2 for the chain x' = N(x + sigma dW), 1 for
    dX = P sigma o dW, 0 for dX = P sigma dW - tr(PM) X dt, and d for the divergence form; M = sigma sigma^T / 2.

    Each is measured on its own process. The first three take one step h of their definition (a layer; Heun's method for
    Stratonovich; Euler's for Ito, in R^d), with dW replaced by 2 d points that have its mean and covariance, and
    (E phi(x') - phi(x)) / h, a power series in h, is extrapolated to h = 0 by Richardson's method. The fourth is the
    operator div_S(PMP grad_S phi). Random x, M and phi, and M = diag(1, 2, 3) at
    (1, 1, 1) / sqrt(3) with phi = x_1. Errors are relative to |<PMx, grad_S phi>| + |tr(PMP Hess_S phi)|.

    In densities, the forward equation of each process must give d/dt E phi = E[L phi] for random densities on S^1 and
    S^2, and on the circle, where Sigma(t) = <t', M t'> at the unit tangent vector t', its stationary density is
    Sigma^(c/2 - 1): uniform for the chain and the divergence form, but not for Stratonovich and Ito noise.
    """
    dims, count = case.constant("dims"), case.count(48, quick=16)
    by_dim = {d: _concatenate([_at_random_points(case, d, k) for k in range(count)]) for d in dims}
    isotropic = _concatenate([_at_random_points(case, d, k, isotropic=True) for d in dims for k in range(EVEN)])
    corner = _at_corner()
    everywhere = _concatenate([*by_dim.values(), corner])
    above_two = _concatenate([by_dim[d] for d in dims if d > 2])
    listed = ", ".join(f"{name} {float(value):.9f}" for name, value in zip(NAMES, corner.measured[0], strict=True))
    unexplained = torch.maximum(*(_relative_gap(everywhere, 0, other, less_theory=True) for other in (1, 3)))
    four, to_stratonovich = isotropic.measured, _relative_gap(everywhere, 0, 1)
    nearer = torch.minimum(_relative_gap(above_two, 0, 1), _relative_gap(above_two, 0, 3))
    library = _relative(everywhere, everywhere.library - _theory(everywhere))
    forward = forward_errors(case)
    return Finding(
        evidence={
            "four generators": IdentityErrors(
                _relative(everywhere, everywhere.measured - _theory(everywhere)), "error"
            ),
            "differences": IdentityErrors(unexplained, "relative error"),
            "isotropic noise": _difference((four.amax(-1) - four.amin(-1)) / isotropic.size),
            "forward equations": IdentityErrors(forward[:, 0], "relative error"),
            "stationary laws on the circle": IdentityErrors(stationary_errors(case), "difference of densities"),
        },
        controls={
            "chain and the nearer of the two forms": _difference(nearer),
            "chain and Stratonovich": _difference(to_stratonovich),
            "chain and divergence form, d > 2": _difference(_relative_gap(above_two, 0, 3)),
            "chain and divergence form on the circle": _difference(_relative_gap(by_dim[2], 0, 3)),
            "generators of the library": IdentityErrors(library, "relative error"),
            "forward equation of another process": IdentityErrors(forward[:, 1], "relative error"),
        },
        printed=_difference(to_stratonovich),
        data=_curves(by_dim, count),
        remark=f"At M = diag(1, 2, 3), x = (1, 1, 1)/sqrt(3), phi = x_1: {listed}.",
        setting=(
            f"simulation on the unit sphere: random points and noises, d = {', '.join(map(str, dims))}, steps of "
            f"1/{1 / STEPS[0]:.0f} to 1/{1 / STEPS[-1]:.0f} to the limit"
        ),
    )


def forward_errors(case: TrialCase) -> Tensor:
    """The error of d/dt E phi by the forward equation of each process, as E[L phi] with the corrected generator of that
    process, and of the next one in the list: relative to the sum of the absolute terms, (equation, 2).
    """
    errors = []
    grids: tuple[Grid, ...] = (CircleGrid(degree=24), SphereGrid(degree=12))
    for grid in grids:
        factors = (2.0, 1.0, 0.0, float(grid.dim))  # c, in the order of the processes
        for k in range(NOISES):
            m, density, phi = _noise_and_density(case, grid, k)
            pull = (sphere.project(grid.points, grid.points @ m) * surface.gradient(phi, grid.points)).sum(-1)
            spread = (m * surface.hessian(phi, grid.points)).sum((-1, -2))
            terms = torch.stack([grid.mean_of(density * each) for each in (spread, pull)])
            modes = grid.analyze(density)
            for j, process in enumerate(PROCESSES.values()):
                equation = ForwardEquation.of(None, grid, MatrixNoise(m, process=process))
                change = grid.synthesize(equation.rate(modes, 0.0) - equation.decay * modes)
                measured = grid.mean_of(change * phi(grid.points))
                predicted = torch.stack([terms[0] - factors[(j + shift) % 4] * terms[1] for shift in (0, 1)])
                errors.append((measured - predicted).abs() / terms.abs().sum())
    return torch.stack(errors)


def _noise_and_density(case: TrialCase, grid: Grid, k: int) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Noise of trace d, a density ~ e^(<a, x> + <x, B x> / 4) at the points of a grid, and a test function."""
    d = grid.dim
    sample = case.normal(2 * d + 4, d, index=100_000 + 1_000 * d + k)
    m = sample[:d] @ sample[:d].mT
    exponent = grid.points @ sample[2 * d] / 2 + ((grid.points @ sample[d : 2 * d]) * grid.points).sum(-1) / 4
    density = exponent.exp() / grid.mean_of(exponent.exp())
    return d * m / m.trace(), density, _test_function(sample[-3], sample[-2] / 2, sample[-1])


def stationary_errors(case: TrialCase) -> Tensor:
    """The largest difference, over the circle, between the stationary density of each forward equation and Sigma^(c/2 -
    1), relative to the uniform density: (noise and process,).
    """
    grid = CircleGrid(degree=48)
    angles, levels = case.normal(2, LAWS, index=200_000)
    errors = []
    for angle, level in zip(angles, torch.special.ndtr(levels), strict=True):
        axis = torch.stack([angle.cos(), angle.sin()])
        ratio = MIN_RATIO + (1 - MIN_RATIO) * level
        m = ratio * torch.eye(2, dtype=axis.dtype) + (1 - ratio) * axis[:, None] * axis
        sigma = torch.einsum("md,de,me->m", grid.frame[:, 0], m, grid.frame[:, 0])
        for c, process in zip((2.0, 1.0, 0.0, 2.0), PROCESSES.values(), strict=True):
            exact = sigma ** (c / 2 - 1)
            law = stationary_values(ForwardEquation.of(None, grid, MatrixNoise(m, process=process)))
            errors.append((law - exact / grid.mean_of(exact)).abs().max())
    return torch.stack(errors)


def stationary_values(equation: ForwardEquation) -> Tensor:
    """The stationary density of a linear forward equation, by solving for its coefficients."""
    basis = torch.eye(len(equation.decay), dtype=torch.float64)
    operator = (equation.rate(basis, 0.0) - equation.decay * basis).mT  # its columns are the images of the basis
    modes = lu.solve(operator[1:, 1:], -operator[1:, 0])
    return equation.grid.synthesize(torch.cat([torch.ones(1, dtype=modes.dtype), modes]))


def _difference(values: Tensor) -> IdentityErrors:
    return IdentityErrors(values, "difference")


def _at_random_points(case: TrialCase, d: int, k: int, *, isotropic: bool = False) -> Generators:
    """Noise of trace d at random points, with a random phi(y) = sin <a, y> + e^<b, y> + <c, y> at each."""
    sample = case.normal(4 * POINTS + d, d, index=2 * (1_000 * d + k) + isotropic)
    root, (x, a, b, c) = sample[:d], sample[d:].reshape(4, POINTS, d)
    m = root @ root.mT
    m = torch.eye(d, dtype=m.dtype) * m.trace() / d**2 if isotropic else d * m / m.trace()
    return _apply_generators(m, sphere.retract(x), _test_function(a, b / 2, c))


def _at_corner() -> Generators:
    """M = diag(1, 2, 3) at (1, 1, 1) / sqrt(3), phi = x_1."""
    one = torch.ones(1, 3, dtype=torch.float64)
    m = torch.diag(torch.tensor([1.0, 2.0, 3.0]).to(one))
    return _apply_generators(m, sphere.retract(one), lambda y: y[..., 0])


def _test_function(a: Tensor, b: Tensor, c: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda y: (a * y).sum(-1).sin() + (b * y).sum(-1).exp() + (c * y).sum(-1)


def _apply_generators(m: Tensor, x: Tensor, phi: Callable[[Tensor], Tensor]) -> Generators:
    d, noise = len(m), MatrixNoise(m)
    axes = torch.cat([torch.eye(d), -torch.eye(d)]).to(x)[:, None, :] * d**0.5  # mean 0, covariance I
    rates = []
    for h in STEPS:
        start, dw = x.expand(2 * d, *x.shape), (h**0.5 * axes).expand(2 * d, *x.shape)
        steps = [partial(step, noise, dw, h) for step in (_chain, _heun, _euler)]
        rates.append(torch.stack([discrete_generator(step, phi, start, epsilon=h).mean(0) for step in steps], -1))
    quotients = torch.stack(rates)
    divergence_form = surface.divergence(lambda y: surface.gradient(phi, y) @ m, x)
    slope, curvature, pull = surface.gradient(phi, x), surface.hessian(phi, x), sphere.project(x, x @ m)
    library = [
        sphere_generator(torch.zeros_like, phi, x, noise=MatrixNoise(m, process=process))
        for process in PROCESSES.values()
    ]
    return Generators(
        measured=torch.cat([_richardson(quotients), divergence_form[:, None]], -1),
        library=torch.stack(library, -1),
        pull=(pull * slope).sum(-1),
        spread=(m * curvature).sum((-1, -2)),
        c=torch.tensor([2.0, 1.0, 0.0, float(d)]).to(x).expand(len(x), 4),
        size=m.norm() * (slope.norm(dim=-1) + curvature.norm(dim=(-1, -2))),
        rates=quotients.movedim(0, 1),
    )


def _chain(noise: Noise, dw: Tensor, h: float, x: Tensor) -> Tensor:
    """One layer, N(x + sigma dW)."""
    return sphere.retract(x + noise.increment(x, dw))


def _heun(noise: Noise, dw: Tensor, h: float, x: Tensor) -> Tensor:
    """Heun's step for P sigma o dW: x + the mean of P sigma dW at both ends of the step."""
    first = sphere.project(x, noise.increment(x, dw))
    end = sphere.retract(x + first)
    return sphere.retract(x + (first + sphere.project(end, noise.increment(end, dw))) / 2)


def _euler(noise: Noise, dw: Tensor, h: float, x: Tensor) -> Tensor:
    """Euler's step x + P sigma dW - h tr(PM) x, without retraction to the sphere."""
    m = noise.diffusion_matrix(x)
    trace = m.diagonal(dim1=-2, dim2=-1).sum(-1) - (x * (m @ x[..., None])[..., 0]).sum(-1)
    return x + sphere.project(x, noise.increment(x, dw)) - h * trace[..., None] * x


def _richardson(rates: Tensor) -> Tensor:
    """The limit at h = 0 of a power series in h, from its values at h, h/2, h/4, ... along the first axis."""
    for order in range(1, len(rates)):
        rates = rates[1:] + (rates[1:] - rates[:-1]) / (2.0**order - 1)
    return rates[0]


def _concatenate(parts: list[Generators]) -> Generators:
    return Generators(*(torch.cat(field) for field in zip(*parts, strict=True)))


def _theory(at: Generators) -> Tensor:
    """The corrected L phi of each process (point, 4)."""
    return at.spread[:, None] - at.c * at.pull[:, None]


def _relative(at: Generators, error: Tensor) -> Tensor:
    """The largest error at each point, relative to the sum of the absolute terms."""
    return error.abs().flatten(1).amax(-1) / (at.pull.abs() + at.spread.abs())


def _relative_gap(at: Generators, one: int, other: int, *, less_theory: bool = False) -> Tensor:
    """The relative difference between two measured generators, optionally less the difference that theory predicts."""
    predicted = (at.c[:, other] - at.c[:, one]) * at.pull if less_theory else 0.0
    return _relative(at, (at.measured[:, one] - at.measured[:, other] - predicted)[:, None])


def _curves(by_dim: dict[int, Generators], count: int) -> xr.Dataset:
    """c by least squares over the points of each noise, and the errors of single steps."""
    fits, errors = [], []
    for at in by_dim.values():
        pull, drift = at.pull.reshape(count, -1, 1), (at.measured - at.spread[:, None]).reshape(count, -1, 4)
        fits.append(-(pull * drift).sum(1) / (pull * pull).sum(1))
        error = (at.rates - _theory(at)[:, None, :3]).abs() / (at.pull.abs() + at.spread.abs())[:, None, None]
        errors.append(error.reshape(count, -1, len(STEPS), 3).median(1).values)
    c = curve("c", torch.stack(fits, 1), {"d": list(by_dim), "process": NAMES}, label="c of the drift -c PMx")
    axes = {"step": STEPS, "one_step_of": NAMES[:3]}
    miss = curve("miss", torch.cat(errors), axes, label="relative error of one step for L phi", log=True)
    return xr.merge([c, miss], join="outer")
