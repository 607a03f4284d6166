"""Synthetic laws with known answers for the measurements of entropy, free energy, generators and gradient flows; see
``calibration_laws``. Statistics of the cloud of all tokens are jackknife pseudo-values over the 32 prompts of an
interval.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from scipy import integrate, linalg, optimize

import helmscope as hs
from helmscope.fields.activations import Identity
from helmscope.fields.attention import SA
from helmscope.fields.block import Block
from helmscope.fields.mlp import MLP
from helmscope.observe.entropy import entropy_along_depth
from helmscope.observe.free_energy import free_energy_along_depth
from helmscope.observe.generator_test import generator_test
from helmscope.observe.jko_step_test import jko_step_test
from helmscope.observe.layer_whitening import layer_whitening
from helmscope.observe.mlp_entropy_change import mlp_entropy_change
from helmscope.observe.mobility_test import mobility_test
from helmscope.observe.probes import ProbeBank
from helmscope.solve.layer import Layer
from helmscope.types import Trajectory
from support.calibration_laws import F64, Law, Values, normals, picked, uniform

LOG_NORMAL = math.log(2 * math.pi * math.e)


def linear(matrix: torch.Tensor) -> MLP:
    """The force M x."""
    return MLP(w_in=torch.eye(len(matrix), dtype=F64), w_out=matrix, activation=Identity())


def moments_of(mean: np.ndarray, covariance: np.ndarray) -> dict[str, float]:
    """The statistics of moments with a diagonal covariance, by hand."""
    d, second = len(mean), covariance + mean**2
    flat = float((1 / covariance).sum())
    entropies = [
        -float((shares * np.log(shares)).sum()) for shares in (each / each.sum() for each in (second, covariance))
    ]
    return {
        "gaussian_entropy": float(LOG_NORMAL * d + np.log(covariance).sum()) / 2,
        "fisher_information": flat,
        "surface_fisher_information": flat - d**2 - float((mean**2 / covariance).sum()),
        "matrix_entropy": entropies[0],
        "centered_matrix_entropy": entropies[1],
    }


def measured_entropies(x: torch.Tensor, *names: str) -> Values:
    path = Trajectory(torch.zeros(1, dtype=F64), x[None], replicate="prompt", axis="depth")
    return picked(entropy_along_depth(path, include_first_token=True, progress=False), *names)


SHARED = 0.5  # of a token of a uniform cloud: the part that all tokens of a prompt have in common


def draw_uniform(size: int, count: int, generator: torch.Generator) -> Values:
    """Uniform tokens on S^2, those of a prompt around a uniform axis of its own."""
    common = uniform(generator, count, 1, 3)
    own = uniform(generator, count, size, 3)
    return measured_entropies(hs.sphere.retract(own + SHARED * common), *uniform_truths(size))


def uniform_truths(size: int) -> dict[str, float]:
    """C = I / 3; two coordinates of a uniform token have the density 1 / (2 pi |z|), z the third."""
    return moments_of(np.zeros(3), np.full(3, 1 / 3)) | {"neighbor_entropy": math.log(2 * math.pi) - 1}


KAPPA = 4.0  # of the law of von Mises and Fisher


def draw_concentrated(size: int, count: int, generator: torch.Generator) -> Values:
    """Tokens of the law of von Mises and Fisher on S^2, whose height is drawn by its inverse distribution."""
    share = torch.rand(count, size, generator=generator, dtype=F64)
    height = 1 + torch.log(share + (1 - share) * math.exp(-2 * KAPPA)) / KAPPA
    angle = 2 * math.pi * torch.rand(count, size, generator=generator, dtype=F64)
    ring = (1 - height.square()).sqrt()
    x = torch.stack([height, ring * angle.cos(), ring * angle.sin()], -1)
    return measured_entropies(x, *concentrated_truths(size))


def concentrated_truths(size: int) -> dict[str, float]:
    """E z = coth kappa - 1 / kappa and E z^2 = 1 - 2 E z / kappa along the axis."""
    mean = 1 / math.tanh(KAPPA) - 1 / KAPPA
    across = mean / KAPPA
    return moments_of(np.array([mean, 0.0, 0.0]), np.array([1 - 2 * across - mean**2, across, across]))


AXES = torch.tensor([3.0, 1.0], dtype=F64)  # of N(0, diag(9, 1)), the directions of which are the tokens
STRETCH = torch.tensor([0.5, 2.0], dtype=F64)  # the map x -> N(diag(1/2, 2) x)


def directions(generator: torch.Generator, count: int, size: int) -> torch.Tensor:
    return hs.sphere.retract(normals(generator, count, size, 2) * AXES)


def draw_map(size: int, count: int, generator: torch.Generator) -> Values:
    x = directions(generator, count, size + 1)
    force = linear(torch.diag(STRETCH - 1))
    run = hs.integrate(force, x, times=[0.0, 1.0], stepper=Layer(1.0))
    measured = mlp_entropy_change(run, sampled_tokens=size, progress=False).isel(time=0)
    return picked(measured, "entropy_change", "first_order_entropy_change")


def map_truths(size: int) -> dict[str, float]:
    """|det D_S T| = |det M| / |M x|^2 on the circle, and E log |M x| = log((3 a + b) / (3 + 1)) for M = diag(a, b);
    E x x^T = diag(3, 1) / 4.
    """
    a, b = STRETCH.tolist()
    length = math.log((3 * a + b) / 4)
    return {
        "entropy_change": math.log(a * b) - 2 * length,
        "first_order_entropy_change": (a + b - 2) - 2 * (3 * (a - 1) + b - 1) / 4,
    }


PULL, TIME = torch.tensor([1.0, -1.0], dtype=F64), 0.1  # f = diag(1, -1) x, with isotropic noise
WEAK, TURNING = 0.05, 0.2  # nu; at the second one the predicted change of entropy is nearly the same for all spreads


def draw_energy(size: int, count: int, generator: torch.Generator, *, nu: float) -> Values:
    seed = int(torch.randint(2**31, (1,), generator=generator))
    run = hs.integrate(
        linear(torch.diag(PULL)),
        directions(generator, count, size + 1),
        times=[0.0, TIME],
        noise=hs.fields.IsotropicNoise(nu),
        stepper=hs.solve.StochasticHeun(0.01),
        seed=seed,
    )
    measured = free_energy_along_depth(run, sampled_tokens=None, progress=False).isel(time=1)
    return picked(measured, *energy_truths(size, nu=nu))


def circle_moments(time: float, nu: float, modes: int = 60) -> tuple[float, float]:
    """E cos 2 theta and E cos 4 theta of the noisy flow theta' = -sin 2 theta: its Fourier series c_k = E cos 2 k theta
    has c_k' = k (c_(k-1) - c_(k+1)) - 4 nu k^2 c_k, and begins with r^k, r = (3 - 1) / (3 + 1).
    """
    k = np.arange(modes)
    rates = np.diag(-4 * nu * k**2.0) + np.diag(k[1:], -1) - np.diag(k[:-1], 1)
    c = linalg.expm(time * rates) @ (0.5**k)
    return float(c[1]), float(c[2])


def energy_truths(size: int, *, nu: float) -> dict[str, float]:
    """C = diag(1 + c_1, 1 - c_1) / 2, E U = E<x, M x> / 2 = c_1 / 2, E div b = -2 c_1 = E Lap U, and E|b|^2 =
    E sin^2 2 theta = (1 - c_2) / 2; predicted rates are those of both ends.
    """
    first, last = circle_moments(0.0, nu), circle_moments(TIME, nu)
    entropies = [math.log((1 - c**2) / 4) / 2 for c, _ in (first, last)]
    changed, lifted = entropies[1] - entropies[0], (last[0] - first[0]) / 2
    grown = [-2 * c + nu * (4 / (1 - c**2) - 4) for c, _ in (first, last)]
    work = [(1 - c4) / 2 - 2 * nu * c2 for c2, c4 in (first, last)]
    predicted = TIME * sum(grown) / 2
    return {
        "gaussian_entropy_change": changed,
        "potential_term": -lifted,
        "free_energy_change": -nu * changed - lifted,
        "predicted_entropy_change": predicted,
        "predicted_free_energy_change": -nu * predicted - TIME * sum(work) / 2,
    }


PUSH = torch.tensor([[0.2, -0.3], [0.3, -0.2]], dtype=F64)  # the layer x -> N(x + M x)
BANK = ProbeBank.around(torch.eye(2, dtype=F64), seed=0)


def draw_generator(size: int, count: int, generator: torch.Generator) -> Values:
    run = hs.integrate(linear(PUSH), uniform(generator, count, size, 2), times=[0.0, 1.0], stepper=Layer(1.0))
    measured = generator_test(run, bank=BANK, include_first_token=True, progress=False)
    return picked(measured, "explained_share", "explained_share_second_moment")


def generator_truths(size: int) -> dict[str, float]:
    """Sums over 4,000 equidistant tokens, with the derivatives of the probes along the step by automatic ones."""
    angle = 2 * math.pi * torch.arange(4000, dtype=F64) / 4000
    x = torch.stack([angle.cos(), angle.sin()], -1)
    step = x @ PUSH.T

    def values(s: torch.Tensor) -> torch.Tensor:
        return BANK(hs.sphere.retract(x + s * step))

    zero, one = torch.zeros((), dtype=F64), torch.ones((), dtype=F64)
    change = values(one) - values(zero)
    drift = torch.func.jacfwd(values)(zero)
    second = torch.func.jacfwd(torch.func.jacfwd(values))(zero) / 2
    missed = [((change - each) ** 2).mean(0) / (change**2).mean(0) for each in (drift, drift + second)]
    return {
        "explained_share": 1 - float(missed[0].mean()),
        "explained_share_second_moment": 1 - float(missed[1].mean()),
    }


TURNED = torch.tensor([[1.0, 0.6, 0.0], [-0.2, 0.0, 0.5], [0.0, 0.1, -1.0]], dtype=F64)


def draw_whitening(size: int, count: int, generator: torch.Generator) -> Values:
    block = Block(SA(beta=0.0), linear(TURNED))
    run = hs.integrate(block, uniform(generator, count, size, 3), times=[0.0])
    return picked(layer_whitening(run, sampled_tokens=size), *whitening_truths(size))


@functools.cache
def mean_share() -> float:
    """The mean over uniform x on S^2 of |A|^2 / |J|^2, J = T M T - <x, M x> T, by Gauss's rule in the height and equal
    steps around it.
    """
    heights, weights = np.polynomial.legendre.leggauss(100)
    total, m = 0.0, TURNED.numpy()
    for z, weight in zip(heights, weights, strict=True):
        ring = math.sqrt(1 - z * z)
        for angle in 2 * math.pi * np.arange(200) / 200:
            x = np.array([ring * math.cos(angle), ring * math.sin(angle), z])
            onto = np.eye(3) - np.outer(x, x)
            jacobian = onto @ m @ onto - (x @ m @ x) * onto
            total += weight * np.square(jacobian - jacobian.T).sum() / np.square(jacobian).sum()
    return float(total) / 4 / 400


def whitening_truths(size: int) -> dict[str, float]:
    """Sigma(x) = T_x / (2 d), and its mean over x is a multiple of I, which changes no share and commutes. The
    variation is E|T / 2d|^2 = (d - 1) / (4 d^2) over |mean|^2 = (d - 1)^2 / (4 d^3), minus 1: 1 / (d - 1).
    """
    share = mean_share()
    return {
        "antisymmetric_share_before": share,
        "antisymmetric_share_after": share,
        "antisymmetric_share_change": 0.0,
        "sigma_variation": 1 / 2,
        "commutator": 0.0,
    }


def draw_mobility(size: int, count: int, generator: torch.Generator) -> Values:
    block = Block(SA(beta=0.0), linear(TURNED))
    run = hs.integrate(block, uniform(generator, count, size, 3), times=[0.0])
    return picked(mobility_test(run, sampled_tokens=4, progress=False), *mobility_truths(size))


def mobility_truths(size: int) -> dict[str, float]:
    """Sigma = T / (2 d) and b = T M x, so that Sigma^-1 b = 2 d T M x, the Jacobian of which has the share above."""
    return {"antisymmetric_share": mean_share()}


SPREAD = torch.tensor([1.0, 0.0, -1.0], dtype=F64)  # f = diag(1, 0, -1) x
NOISE = 0.25  # V = NOISE I: nu = NOISE^2 / (2 d)


def draw_step(size: int, count: int, generator: torch.Generator) -> Values:
    """One half of the prompts to fit on, and one to test."""
    attention = SA(beta=0.0, value=NOISE * torch.eye(3, dtype=F64))
    block = Block(attention, linear(torch.diag(SPREAD)))
    run = hs.integrate(block, uniform(generator, count, size + 1, 3), times=[0.0, 0.5])
    return picked(jko_step_test(run, whole_layer_only=True, progress=False), *step_truths(size))


def step_truths(size: int) -> dict[str, float]:
    """E over uniform x of -(T M T - <x, M x> T) is the stiffness -(1 - 2/3 + 4/15) M for M of trace 0. The flow of M
    has C = E N(e^(t M) u) N(e^(t M) u)^T, diagonal like the minimizer, and the share is the largest over tau.
    """
    stiffness = -0.6 * SPREAD.numpy()
    nu, before = NOISE**2 / 6, np.full(3, 1 / 3)
    scale = np.exp(0.5 * SPREAD.numpy())
    after = np.array([_second_moment(scale, k) for k in range(3)])

    def gap(tau: float) -> tuple[float, float]:
        stretched = 1 + tau * stiffness
        root = (np.sqrt(before) + np.sqrt(before + 4 * nu * tau * stretched)) / (2 * stretched)
        return float(np.linalg.norm(np.sqrt(after) - root)), float(np.linalg.norm(np.sqrt(before) - root))

    def left(log_tau: float) -> float:
        return gap(math.exp(log_tau))[0] / gap(math.exp(log_tau))[1]

    best = optimize.minimize_scalar(left, bounds=(math.log(1e-3), math.log(0.9 / 0.6)), method="bounded").x
    return {
        "gap_closed_share": 1 - left(best),
        "objective_input": -nu * float(LOG_NORMAL * 3 + np.log(before).sum()) / 2,
    }


def _second_moment(scale: np.ndarray, k: int) -> float:
    """E x_k^2 of x = N(diag(scale) u) for uniform u on S^2: int_0^inf s_k^2 dt / ((1 + 2 s_k^2 t) prod_i (1 + 2 s_i^2
    t)^(1/2)), since u may be a normal vector.
    """

    def density(t: float) -> float:
        return float(scale[k] ** 2 / (1 + 2 * scale[k] ** 2 * t) / np.sqrt(np.prod(1 + 2 * scale**2 * t)))

    return float(integrate.quad(density, 0, np.inf)[0])


BLOCK = "SA(beta=0) and f = M x, uniform tokens on S^2"
FLOW_LAWS = (
    Law(
        "entropy_along_depth",
        "uniform tokens on S^2, alike within a prompt",
        "tokens",
        (8, 32),
        draw_uniform,
        uniform_truths,
        together=True,
    ),
    Law(
        "entropy_along_depth",
        f"law of von Mises and Fisher on S^2, kappa = {KAPPA:g}",
        "tokens",
        (8, 32),
        draw_concentrated,
        concentrated_truths,
        repetitions=400,
        others=100,
        together=True,
    ),
    Law(
        "mlp_entropy_change",
        "x -> N(diag(1/2, 2) x), directions of N(0, diag(9, 1)) in R^2",
        "tokens",
        (4, 16),
        draw_map,
        map_truths,
    ),
    *(
        Law(
            "free_energy_along_depth",
            f"f = diag(1, -1) x with isotropic noise nu = {nu:g} for a time of {TIME:g}, "
            "directions of N(0, diag(9, 1)) in R^2",
            "tokens",
            (8, 32),
            functools.partial(draw_energy, nu=nu),
            functools.partial(energy_truths, nu=nu),
            together=True,
        )
        for nu in (WEAK, TURNING)
    ),
    Law(
        "generator_test",
        "x -> N(x + M x), uniform tokens on the circle",
        "tokens",
        (16, 64),
        draw_generator,
        generator_truths,
        repetitions=400,
        others=100,
    ),
    Law(
        "layer_whitening",
        BLOCK,
        "tokens",
        (8, 32),
        draw_whitening,
        whitening_truths,
        repetitions=400,
        others=100,
    ),
    Law("mobility_test", BLOCK, "tokens", (8, 32), draw_mobility, mobility_truths, repetitions=100, others=25),
    Law(
        "jko_step_test",
        "a flow of f = diag(1, 0, -1) x for a time of 1/2, uniform tokens on S^2",
        "tokens",
        (8, 32),
        draw_step,
        step_truths,
        together=True,
    ),
)
