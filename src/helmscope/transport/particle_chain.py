"""The potential phi of a bridge over dX = b dt + sqrt(2 Sigma) dW, on clouds of particles.

The horizon T is divided into K steps of the length h (``splitting``). At the end of each, phi is represented by N
particles w_l as a combination of densities, which the diffusion maps to densities of a longer time:

    phi_(kh)(Phi_(h/2)(w)) = sum_l c_l p_r(w, w_l)   =>   phi_t(x) = sum_l c_l p_(s+r)(z, w_l),   t = kh - s.

No density of the particles is needed, and no sum over them is a Monte Carlo estimate: they need only cover the region
where the bridge is. The coefficients c are found by least squares of the relative error at 3 N points. Everything is
linear in phi_T = sum_j e^{g_j} delta(y_j), so that the K steps are one matrix, n x m, which is scaled to the masses of
x and y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import every, full_precision
from helmscope.transport.scaling import scale_to_marginals
from helmscope.transport.splitting import Drift, Stage
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.transport.clouds import Clouds
    from helmscope.transport.diffusion import Diffusion
    from helmscope.types import Progress

    Evaluate = Callable[[Diffusion, Drift, Tensor, float], tuple[Tensor, Tensor]]

# Variances below 5 leave errors of more than 10 % at the edge of the clouds, for an Ornstein-Uhlenbeck process in the
# plane. On S^7, wide densities, half of them around targets, have less than a fifth of the error of narrow ones.
_NARROW, _WIDE = 0.3, (0.6, 0.9)  # r as a share of the time left, or of a step
_RETURN = 0.01  # how far a flow, reversed, may miss its start
_WIDER = 6.0  # the variance of the wider noise
_COPIES = 4  # particles with wider noise from one start: few leave gaps beyond the edge of x
_RIDGE = 1e-4
_STRONG = 1.5  # contraction over the horizon beyond which a flow is not reversed over half of it
_OUT_OF_REACH = (
    "noise and horizon are so small, or steps so long, that y is out of reach in float64: raise noise or horizon, or "
    "steps if the reference contracts strongly within one"
)


@dataclass(frozen=True, eq=False)
class Chain:
    """One ``Stage`` per cloud, the potentials at x and y, and how well the particles represent phi.

    ``errors`` are the relative errors of the fits to phi, one per inner time: root mean squares over the particles that
    follow the bridge, of the error at each if the fit leaves it out, at most 1. ``followers`` are those particles.
    """

    stages: list[Stage]
    guide: Stage
    start_log_potential: Float[Tensor, " n"]
    end_log_potential: Float[Tensor, " m"]
    errors: Float[Tensor, " times"]
    iterations: int
    marginal_error: float
    followers: list[Float[Tensor, "particles d"]]

    @property
    def worst_error(self) -> float:
        """The largest of ``errors``."""
        return float(self.errors.amax()) if len(self.errors) else 0.0

    def evaluate(self, diffusion: Diffusion, drift: Drift, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        """log phi_t and its gradient; where the particles do not cover x, those of the guide, up to a constant."""
        step = self.stages[-1].time / len(self.stages)
        number = min(math.floor(t / step + 1e-9), len(self.stages) - 1)
        value, slope = self.stages[number].evaluate(diffusion, drift, x, t)
        lost = torch.isnan(value)
        if bool(lost.any()):
            value[lost], slope[lost] = self.guide.evaluate(diffusion, drift, x[lost], t)
        return value, slope


@dataclass(frozen=True, eq=False)
class Problem:
    """Two clouds, the reference process between them, and its division into steps. Everything is in float64."""

    clouds: Clouds
    diffusion: Diffusion
    drift: Drift
    horizon: float
    steps: int

    @property
    def h(self) -> float:
        """The length of a step."""
        return self.horizon / self.steps

    def carry_back(self, y: Tensor, t: float) -> tuple[Tensor, Tensor]:
        """Points y carried back by the flow from the horizon to t, and which of them return to where they were: where a
        flow contracts much, or comes from infinity, it cannot be reversed.
        """
        back = self.drift.flow(y, self.horizon, t)
        gap = torch.linalg.vector_norm(self.drift.flow(back, t, self.horizon) - y, dim=1)
        return back, gap <= _RETURN * (1 + torch.linalg.vector_norm(y, dim=1))

    def target(self) -> Stage:
        """The cloud y, with equal weights."""
        ones = torch.ones_like(self.clouds.b)
        divergence = self.drift.divergence(self.clouds.y, self.horizon)
        return Stage(self.horizon, self.clouds.y, 0.0, 0.0, ones, 0 * ones, divergence)

    def guide(self) -> Stage:
        """The target, from which phi is evaluated in a single step: exact only for b = 0. A flow that contracts
        strongly, or cannot be reversed, is not; all of it then comes before the diffusion, whose time is shorter.
        """
        x, target = self.clouds.x, self.target()
        assert target.divergence is not None
        mean = (float(self.drift.divergence(x, 0.0).mean()) + float(target.divergence.mean())) / 2
        contraction = -mean / max(1, x.shape[1] - self.drift.on_sphere)
        if abs(contraction) * self.horizon <= _STRONG and every(self.carry_back(self.clouds.y, self.horizon / 2)[1]):
            return target
        return replace(target, divergence=None, contraction=contraction)


@dataclass(frozen=True, eq=False)
class _Layer:
    """A cloud: w before the last half of the flow, x after it, and the logarithm of the guide there; and two choices of
    centers of densities, ``spread_out`` over the cloud, or ``mixed`` with targets.
    """

    time: float
    w: Tensor
    x: Tensor
    log_guide: Tensor
    spread_out: _Centers
    mixed: _Centers


@dataclass(frozen=True, eq=False)
class _Centers:
    """Points before the last half of the flow, and the logarithm of the guide after it."""

    points: Tensor
    log_guide: Tensor


@dataclass(frozen=True, eq=False)
class _Fit:
    """Densities of the time ``spread`` with their coefficients, one column for every point of y; the potentials at the
    particles that follow the control, and their fits, each by the others.
    """

    centers: _Centers
    spread: float
    coefficients: Tensor
    values: Tensor
    fitted: Tensor

    @full_precision
    def error(self, end: Tensor) -> float:
        """The root mean square of the relative errors, each at most 1, for the weights ``end`` of the columns."""
        errors = ((self.fitted @ end) / (self.values @ end) - 1).abs()
        return float(errors.nan_to_num(nan=1.0).clamp(max=1).square().mean().sqrt())


@full_precision
def fit_chain(
    problem: Problem,
    *,
    particles: int,
    rounds: int,
    seed: int,
    tol: float,
    max_iterations: int,
    progress: Progress | None = None,
) -> Chain:
    """Sample clouds and fit phi up to ``rounds`` times, each time under the control of the best round before, first
    under that of the guide, and return the best: that with the smallest error.
    """
    clouds, diffusion, drift = problem.clouds, problem.diffusion, problem.drift
    generator = torch.Generator(clouds.x.device).manual_seed(seed)
    guide = problem.guide()
    log_kernel = guide.log_terms(diffusion, drift, clouds.x, 0.0)
    if not every(torch.isfinite(log_kernel.amax(1))) or not every(torch.isfinite(log_kernel.amax(0))):
        raise HelmscopeError(_OUT_OF_REACH)
    guess = scale_to_marginals(log_kernel, clouds.a, clouds.b, tol=1e-3, max_iterations=200)
    plan = torch.exp(guess.f[:, None] + log_kernel + guess.g)
    guide = replace(guide, log_scale=guess.g)
    evaluate, best = guide.evaluate, None
    for count in range(rounds if problem.steps > 1 else 1):
        try:
            layers = _sample_layers(problem, evaluate, plan, particles, generator)
            chain = _fit(problem, layers, guide, evaluate, tol, max_iterations)
        except HelmscopeError:  # the control of a poor round may lead nowhere
            if best is None:
                raise
            break
        if best is None or chain.worst_error < best.worst_error:
            best = chain
        evaluate = best.evaluate
        if progress is not None:
            progress((count + 1) / rounds)
    assert best is not None
    return best


@full_precision
def splitting_error(problem: Problem, chain: Chain, fit: Callable[[Problem], Chain]) -> float:
    """An estimate of the error of the control by the length of the steps, relative, in the root mean square over the
    particles that follow the bridge, and the times between steps. It comes from the difference to the control with half
    as many steps, or twice as many if the chain has one or two: if the error of K steps is C / K^p, the difference to k
    steps is |(K / k)^p - 1| times as large. 0 for a process whose steps are exact; infinite if the other fit fails.
    """
    diffusion, drift, steps = problem.diffusion, problem.drift, problem.steps
    if drift.velocity is None and diffusion.is_semigroup:
        return 0.0
    other_steps = 2 * steps if steps < 3 else math.ceil(steps / 2)
    try:
        other = fit(replace(problem, steps=other_steps))
    except HelmscopeError:
        return math.inf
    difference = size = 0.0
    for k, x in enumerate([problem.clouds.x, *chain.followers]):
        slope, other_slope = (c.evaluate(diffusion, drift, x, k * problem.h)[1] for c in (chain, other))
        difference += float(diffusion.times_sigma(x, slope - other_slope).square().sum(-1).mean())
        size += float(diffusion.times_sigma(x, slope).square().sum(-1).mean())
    return math.sqrt(difference / size) / abs((steps / other_steps) ** (2 if diffusion.is_semigroup else 1) - 1)


@full_precision
def _sample_layers(
    problem: Problem, evaluate: Evaluate, plan: Tensor, particles: int, generator: torch.Generator
) -> list[_Layer]:
    """Clouds at the times h, ..., (steps - 1) h. A third of the points is a simulation under the control, a third one
    with wider noise from points spread out over x, for the edge, and a third are points between x and y, for every
    target.
    """
    clouds, diffusion, drift, h = problem.clouds, problem.diffusion, problem.drift, problem.h
    edge = _spread_out(diffusion.coordinates(clouds.x), min(particles // _COPIES, len(clouds.x)))
    edge = edge.repeat(math.ceil(particles / len(edge)))[:particles]
    x = clouds.x[torch.cat([_stratified(clouds.a, particles, generator), edge])]
    ends = _stratified(clouds.b, particles, generator)
    starts = clouds.x[torch.multinomial(plan.mT[ends], 1, generator=generator).squeeze(1)]
    path = diffusion.between(starts, clouds.y[ends])
    layers = []
    for k in range(problem.steps - 1):
        t, share = k * h, (k + 1) / problem.steps
        z = drift.flow(x, t, t + h / 2)
        u = 2 * diffusion.times_sigma(x, evaluate(diffusion, drift, x, t)[1])
        plain = diffusion.step(z[:particles], h * u[:particles], h, generator)
        wide = diffusion.step(z[particles:], h * u[particles:], _WIDER * h, generator)
        pinned = diffusion.step(starts, share * path, _WIDER * h * (k + 1) * (1 - share), generator)
        w = torch.cat([plain, wide, pinned])
        back, returns = problem.carry_back(clouds.y[ends[::2]], t + h / 2)
        both = torch.cat([w, back[returns]])
        moved = drift.flow(both, t + h / 2, t + h)
        log_guide = evaluate(diffusion, drift, moved, t + h)[0]
        x, chosen = moved[: 2 * particles], _spread_out(diffusion.coordinates(w), particles)
        targets = torch.arange(len(w), len(both), device=w.device)
        mixed = torch.cat([chosen[: particles - len(targets)], targets])
        centers = [_Centers(both[index], log_guide[index]) for index in (chosen, mixed)]
        layers.append(_Layer(t + h, w, moved[: len(w)], log_guide[: len(w)], *centers))
    return layers


def _stratified(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``count`` numbers of points, each about count * weight times."""
    shift = torch.rand(1, dtype=weights.dtype, device=weights.device, generator=generator)
    levels = (torch.arange(count, dtype=weights.dtype, device=weights.device) + shift) / count
    cumulative = weights.cumsum(0)
    return torch.searchsorted(cumulative, levels * cumulative[-1]).clamp(max=len(weights) - 1)


def _spread_out(points: Tensor, count: int) -> Tensor:
    """The numbers of ``count`` points, each the farthest from those before it (Gonzalez 1985): they cover all of the
    cloud evenly, its edge included.
    """
    chosen = [int(((points - points.mean(0)) ** 2).sum(-1).argmin())]
    distance = torch.full_like(points[:, 0], torch.inf)
    while len(chosen) < count:
        distance = torch.minimum(distance, ((points - points[chosen[-1]]) ** 2).sum(-1))
        chosen.append(int(distance.argmax()))
    return torch.tensor(chosen, device=points.device)


@full_precision
def _fit(
    problem: Problem, layers: list[_Layer], guide: Stage, evaluate: Evaluate, tol: float, max_iterations: int
) -> Chain:
    """Represent the potential of every target point on the clouds, from the last to the first, relative to the guide;
    then scale the result, one potential per point of x and y, to the masses of both clouds.
    """
    clouds, diffusion, drift, h = problem.clouds, problem.diffusion, problem.drift, problem.h
    log_start = evaluate(diffusion, drift, clouds.x, 0.0)[0]
    rows = [(0.0, clouds.x, log_start), *((layer.time, layer.x, layer.log_guide) for layer in layers)]
    last = replace(problem.target(), log_scale=guide.log_scale)
    time, points, log_guide = rows[-1]
    values = torch.exp(last.log_terms(diffusion, drift, points, time) - log_guide[:, None])
    fits: list[_Fit] = []
    for (time, points, log_guide), layer in zip(reversed(rows[:-1]), reversed(layers), strict=True):
        fit = _best_fit(problem, layer, values)
        fits.append(fit)
        z = drift.flow(points, time, time + h / 2)
        log_p = diffusion.pairs(z, fit.centers.points, h + fit.spread)[0]
        values = (torch.exp(log_p + fit.centers.log_guide - log_guide[:, None]) @ fit.coefficients).clamp(min=0)
    end, iterations, error = _scale(values, clouds, tol, max_iterations)
    stages = [
        Stage(layer.time, fit.centers.points, h / 2, fit.spread, fit.coefficients @ end, fit.centers.log_guide)
        for layer, fit in zip(layers, reversed(fits), strict=True)
    ]
    log_end = guide.log_scale + torch.log(end)
    stages.append(replace(last, log_scale=log_end))
    errors = end.new_tensor([fit.error(end) for fit in reversed(fits)])
    followers = [layer.x[: len(layer.x) // 3] for layer in layers]
    return Chain(stages, guide, torch.log(values @ end) + log_start, log_end, errors, iterations, error, followers)


@full_precision
def _best_fit(problem: Problem, layer: _Layer, values: Tensor) -> _Fit:
    """Represent the potentials, (points of the layer) x (points of y), by densities p_r around centers: of several
    choices that with the smallest error. Wide ones need p_s and p_r to combine to p_(s+r) exactly.
    """
    left = problem.horizon - layer.time
    choices = [(layer.spread_out, _NARROW * (left if problem.diffusion.is_semigroup else problem.h))]
    if problem.diffusion.is_semigroup:
        choices += [(layer.mixed, share * left) for share in _WIDE]
    fits = []
    for centers, spread in choices:
        log_p = problem.diffusion.pairs(layer.w, centers.points, spread)[0]
        basis = torch.exp(log_p + centers.log_guide - layer.log_guide[:, None])
        coefficients, left_out = _ridge(basis, values)
        followers = slice(len(basis) // 3)  # of the control, without the points that are there for the edge
        fits.append(_Fit(centers, spread, coefficients, values[followers], left_out[followers]))
    return min(fits, key=lambda fit: fit.error(torch.ones_like(problem.clouds.b)))


@full_precision
def _ridge(basis: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The coefficients c that minimize |basis c - values|^2 + RIDGE |c|^2, after scaling the columns to length 1; and
    the value at each point of the fit to all others, v_i + (fit_i - v_i) / (1 - H_ii) with the hat matrix H.
    """
    if not every(torch.isfinite(basis)) or not every(torch.isfinite(values)):
        raise HelmscopeError(_OUT_OF_REACH)
    length = torch.linalg.vector_norm(basis, dim=0)
    length = torch.where(length > 0, length, 1.0)  # a center so far away that its density is 0
    scaled = basis / length
    normal = scaled.mT @ scaled
    normal.diagonal().add_(_RIDGE)
    factor = torch.linalg.cholesky(normal)
    coefficients = torch.cholesky_solve(scaled.mT @ values, factor)
    leverage = torch.linalg.solve_triangular(factor, scaled.mT, upper=False).square().sum(0)
    left_out = values + (scaled @ coefficients - values) / (1 - leverage).clamp(min=1e-12)[:, None]
    return coefficients / length[:, None], left_out


@full_precision
def _scale(values: Tensor, clouds: Clouds, tol: float, most: int) -> tuple[Tensor, int, float]:
    """v > 0 with u_i sum_j R_ij v_j = a_i and v_j sum_i u_i R_ij = b_j. R may have entries below 0 by its error."""
    v, error = torch.ones_like(clouds.b), math.inf
    iterations = 0
    while iterations < most and error > tol:
        iterations += 1
        rows = values @ v
        u = clouds.a / rows
        columns = u @ values
        error = float((v * columns - clouds.b).abs().sum())
        if not bool((rows > 0).all() and (columns > 0).all()):
            raise HelmscopeError(
                "particles do not cover the paths between x and y: raise particles, rounds, noise or horizon"
            )
        v = clouds.b / columns
    return v, iterations, error
