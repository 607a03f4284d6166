"""mean-field-limit: n tokens under self-attention approach the solution of the continuity equation as n grows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.kernels.choose import using_summation
from helmscope.kernels.harmonic import Harmonic
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.density import Density
from helmscope.meanfield.evolve import evolve
from helmscope.meanfield.sphere_grid import SphereGrid
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.theory.starts import VonMisesFisher
from helmscope.transport.distance import w2
from helmscope.transport.sliced import random_frames, w2_on_great_circles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

STEP = 0.25  # of RK4; its error is far below the distances
CIRCLE_DEGREE, SPHERE_DEGREE = 64, 24
ATOMS = 6_000  # quantiles that stand for a density on the circle; their distance from it is of order 1 / ATOMS
HEIGHTS = 1 << 12  # at which a density on S^2 is evaluated for sampling
NODES = 1 << 17  # of the distribution function, between which it is linear


class SphereDistances(NamedTuple):
    """Distances (seed, size) of tokens from the density of their own beta, and of another; and those of independent
    samples of the limit.
    """

    tokens: Tensor
    other_beta: Tensor
    independent: Tensor


class CircleDistances(NamedTuple):
    """The same on the circle, with those of quantiles of the limit, and the distance between the two densities."""

    tokens: Tensor
    other_beta: Tensor
    independent: Tensor
    quantiles: Tensor
    between: Tensor


@experiment("mean-field-limit", seconds=21)
def mean_field_limit(case: TrialCase) -> Finding:
    """W2 between n tokens, independent samples of a von Mises-Fisher density moved by SA, and the density moved
    by the continuity equation: exact on the circle; on S^2 the sliced distance, with the same slices for all n.

    Independent samples of the limit have the slope -1/2 in log n, quantiles -1. The density of another beta is at a
    fixed distance, so that W2 reaches a plateau.
    """
    circle, sphere = _on_circle(case), _on_sphere(case)
    sizes, sphere_sizes = _sizes(case)
    families = ("tokens", "independent samples of the limit", "density of another beta")
    plots = [
        curve(
            name,
            torch.stack([each.tokens, each.independent, each.other_beta], -1),
            {axis: points, f"{name} of": families},
            label=label,
            log=True,
        )
        for name, each, axis, points, label in (
            ("W2", circle, "n", sizes, "W2 from the density, circle"),
            ("sliced", sphere, "sphere_n", sphere_sizes, "sliced W2 from the density, S^2"),
        )
    ]
    return Finding(
        evidence={
            "slope": _slopes(sizes, circle.tokens),
            "slope on the sphere": _slopes(sphere_sizes, sphere.tokens),
        },
        controls={
            "independent samples of the limit": _slopes(sizes, circle.independent),
            "solution for another beta": _slopes(sizes, circle.other_beta),
            "plateau for another beta": Replicates(circle.other_beta[:, -1] / circle.between, "seeds"),
            "quantiles of the limit": _slopes(sizes, circle.quantiles),
            "independent samples on the sphere": _slopes(sphere_sizes, sphere.independent),
            "solution for another beta on the sphere": _slopes(sphere_sizes, sphere.other_beta),
        },
        data=xr.merge(plots, join="outer"),
        remark=f"On the circle, n = {sizes[-1]:,}: W2 is {float(circle.tokens[:, -1].mean()):.3g} from the solution, "
        f"{float(circle.other_beta[:, -1].mean()):.3g} from that for beta = {case.constant('other_beta'):g}.",
        setting=f"simulation: SA at beta = {case.constant('beta'):g}, von Mises-Fisher starts with kappa = "
        f"{case.constant('kappa'):g}; S^1: t = {_time(case, 2):g}, n = {sizes[0]} to {sizes[-1]}; S^2: t = "
        f"{_time(case, 3):g}, n = {sphere_sizes[0]} to {sphere_sizes[-1]}",
    )


def _sizes(case: TrialCase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of tokens on the circle and on S^2."""
    return case.constant("sizes"), case.constant("sphere_sizes")


def _seeds(case: TrialCase, dim: int) -> int:
    return case.constant("sphere_seeds") if dim == 3 else case.count(case.constant("seeds"), quick=24)


def _time(case: TrialCase, dim: int) -> float:
    return float(case.constant("time" if dim == 2 else "sphere_time"))


def _slopes(sizes: Sequence[int], distances: Tensor) -> Replicates:
    return Replicates(log_slope(sizes, distances), "seeds")


def log_slope(sizes: Sequence[int], distances: Tensor) -> Tensor:
    """The least-squares slope of log distance in log n, one per seed."""
    log_n = torch.tensor(sizes, dtype=distances.dtype).log()
    log_n = log_n - log_n.mean()
    return (distances.log() * log_n).sum(-1) / log_n.square().sum()


def _on_circle(case: TrialCase) -> CircleDistances:
    own, other = _limits(case, CircleGrid(degree=CIRCLE_DEGREE))
    seeds = _seeds(case, 2)
    level = torch.special.ndtr(case.normal(seeds, 1, index=1))
    columns: list[tuple[Tensor, ...]] = []
    for k, n in enumerate(_sizes(case)[0]):
        tokens = _moved(case, n, dim=2, index=2 + 2 * k)
        independent = quantile_points(own, torch.special.ndtr(case.normal(seeds, n, index=3 + 2 * k)))
        regular = quantile_points(own, (torch.arange(n) + level) / n)
        columns.append(tuple(_circle_w2(cloud, law) for cloud, law in (
            (tokens, own), (tokens, other), (independent, own), (regular, own))))  # fmt: skip
    between = _circle_w2(quantile_points(own, (torch.arange(ATOMS) + level[:1]) / ATOMS), other)
    tokens, other_beta, independent, quantiles = (torch.stack(each, -1) for each in zip(*columns, strict=True))
    return CircleDistances(tokens, other_beta, independent, quantiles, between)


def _circle_w2(clouds: Tensor, density: Density) -> Tensor:
    """W2 between each cloud (seed, n, 2) and a density, as ``ATOMS`` quantiles of equal mass."""
    atoms = quantile_points(density, (torch.arange(ATOMS, dtype=torch.float64) + 0.5) / ATOMS)
    return w2(clouds, atoms.expand(len(clouds), -1, -1))


def quantile_points(density: Density, levels: Tensor) -> Tensor:
    """Points of the circle (*levels, 2): from the angle 0 up to them the density has these masses in [0, 1)."""
    angles = 2 * math.pi * np.arange(NODES + 1) / NODES
    k = torch.arange(1, density.grid.degree + 1)
    cosine, sine = (density.modes[1:].reshape(-1, 2) * math.sqrt(2) / k[:, None]).T
    # int_0^t (1 + sum_k a_k cos ks + b_k sin ks) ds / 2 pi, by one FFT
    spectrum = np.zeros(NODES // 2 + 1, dtype=complex)
    spectrum[1 : density.grid.degree + 1] = (-sine.numpy() - 1j * cosine.numpy()) * NODES / 2
    waves = np.fft.irfft(spectrum, n=NODES)
    mass = (angles + np.append(waves, waves[0]) + float(sine.sum())) / (2 * math.pi)
    chosen = torch.from_numpy(np.interp(levels.numpy(), mass, angles))
    return torch.stack([chosen.cos(), chosen.sin()], -1)


def _on_sphere(case: TrialCase) -> SphereDistances:
    own, other = _limits(case, SphereGrid(degree=SPHERE_DEGREE))
    seeds = _seeds(case, 3)
    frames = random_frames(case.constant("slices"), 3, seed=case.seed_for(100))
    columns = []
    for k, n in enumerate(_sizes(case)[1]):
        tokens = _moved(case, n, dim=3, index=101 + 2 * k)
        independent = zonal_samples(own, seeds, n, case.seed_for(102 + 2 * k))
        columns.append(tuple(_sliced_w2(cloud, law, frames) for cloud, law in (
            (tokens, own), (tokens, other), (independent, own))))  # fmt: skip
    return SphereDistances(*(torch.stack(each, -1) for each in zip(*columns, strict=True)))


def _sliced_w2(clouds: Tensor, density: Density, frames: Tensor) -> Tensor:
    """The sliced distance between each cloud (seed, n, 3) and a density, as its weighted cloud."""
    points, weights = density.cloud()
    count = len(clouds)
    distances = w2_on_great_circles(
        clouds, points.expand(count, -1, -1), None, weights.expand(count, -1), frames=frames
    )
    return distances.square().mean(-1).sqrt()


def zonal_samples(density: Density, count: int, n: int, seed: int) -> Tensor:
    """Independent samples (count, n, 3) of a density on S^2 that depends on s = x_1 only: s has the density rho / 2."""
    heights = torch.linspace(-1, 1, HEIGHTS, dtype=torch.float64)
    meridian = torch.stack([heights, (1 - heights**2).clamp(min=0).sqrt(), torch.zeros_like(heights)], -1)
    mass = torch.cumulative_trapezoid(density.grid.evaluate(density.modes, meridian), heights)
    mass = torch.cat([torch.zeros(1, dtype=torch.float64), mass]) / mass[-1]
    level, turn = torch.rand(2, count, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    s = torch.from_numpy(np.interp(level.numpy(), mass.numpy(), heights.numpy()))
    radius, angle = (1 - s**2).clamp(min=0).sqrt(), 2 * math.pi * turn
    return torch.stack([s, radius * angle.cos(), radius * angle.sin()], -1)


def _limits(case: TrialCase, grid: CircleGrid | SphereGrid) -> tuple[Density, Density]:
    """The density at the given time, and that for the other beta."""
    start = Density.von_mises_fisher(grid, kappa=case.constant("kappa"))
    betas = (case.constant("beta"), case.constant("other_beta"))
    own, other = (evolve(SA(beta=beta), start, times=[_time(case, grid.dim)], tol=1e-8)[0] for beta in betas)
    return own, other


def _moved(case: TrialCase, n: int, *, dim: int, index: int) -> Tensor:
    """Tokens (seed, n, dim), sampled from the start and moved by SA."""
    seeds = _seeds(case, dim)
    x = VonMisesFisher(n=n, dim=dim, kappa=case.constant("kappa")).sample(seeds, seed=case.seed_for(index))
    with using_summation(Harmonic()):  # as accurate as the sum over all pairs, and linear in n
        return integrate(SA(beta=case.constant("beta")), x, [_time(case, dim)], stepper=RK4(STEP)).states[0]
