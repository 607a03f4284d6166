"""curvature-drift: the chain, Stratonovich noise, Ito noise and the divergence form, each with a drift of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Finding, Identity
from helmscope.claims.registry import Case, experiment
from helmscope.fields.noise import DivergenceForm, Ito, LayerNormChain, MatrixNoise, Stratonovich
from helmscope.geometry import sphere, surface
from helmscope.observe.generator import discrete_generator, sphere_generator
from helmscope.types import Region, Ruling

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from helmscope.fields.noise import Noise

PROCESSES = {
    "chain": LayerNormChain(),
    "Stratonovich": Stratonovich(),
    "Ito": Ito(),
    "divergence form": DivergenceForm(),
}
NAMES = tuple(PROCESSES)
DIMS, POINTS, EVEN = (2, 3, 4, 8), 64, 4
STEPS = tuple(2.0**-k for k in range(9, 15))
SAME = Region(text="The two are equal within a relative error of 1e-6.", high=1e-6)
OF_SIZE = Region(text="The four agree within 1e-6 of |M| (|grad_S phi| + |Hess_S phi|).", high=1e-6)


class Seen(NamedTuple):
    """What noise does at many points: the four generators applied to phi, measured and by the library (point, 4); the
    two terms that they are made of, <PMx, grad_S phi> and tr(PMP Hess_S phi) (point,); c in theory (point, 4); the
    size |M| (|grad_S phi| + |Hess_S phi|) (point,); and what single steps give, (point, step, 3).
    """

    measured: Tensor
    library: Tensor
    pull: Tensor
    spread: Tensor
    c: Tensor
    size: Tensor
    rates: Tensor


@experiment("curvature-drift", seconds=5)
def curvature_drift(case: Case) -> Finding:
    """L phi = -c <PMx, grad_S phi> + tr(PMP Hess_S phi) with c = 2 for the chain x' = N(x + sigma dW), 1 for
    dX = P sigma o dW, 0 for dX = P sigma dW - tr(PM) X dt, and d for the divergence form; M = sigma sigma^T / 2.

    Each is measured on its own process. The first three take one step h of their definition (a layer; Heun's rule for
    Stratonovich; Euler's for Ito, in R^d), the noise being one of 2 d points with the mean and covariance of dW, and
    (E phi(x') - phi(x)) / h, a power series in h, goes to h = 0 by Richardson's rule. The fourth is the operator
    div_S(PMP grad_S phi). Random x, M and phi, and M = diag(1, 2, 3) at (1, 1, 1) / sqrt(3) with phi = x_1. Errors are
    relative to |<PMx, grad_S phi>| + |tr(PMP Hess_S phi)|.
    """
    count = case.count(48, quick=16)
    clouds = {d: _joined([_random(case, d, k) for k in range(count)]) for d in DIMS}
    even = _joined([_random(case, d, k, isotropic=True) for d in DIMS for k in range(EVEN)])
    corner = _corner()
    seen, space = _joined([*clouds.values(), corner]), _joined([clouds[d] for d in DIMS if d > 2])
    shown = ", ".join(f"{name} {float(value):.9f}" for name, value in zip(NAMES, corner.measured[0], strict=True))
    return Finding(
        evidence=Identity(_relative(seen, seen.measured - _corrected(seen)), "relative error"),
        null=Check(
            "relative difference of the chain's generator and the nearer of both forms', d > 2",
            _apart(torch.minimum(_gap(space, 0, 1), _gap(space, 0, 3))),
            region=SAME,
        ),
        data=_drawn(clouds, count),
        printed=Check(
            "no curvature drift: relative difference of Stratonovich's generator and Ito's",
            _apart(_gap(seen, 1, 2)),
            region=SAME,
        ),
        also=_parts(seen, space, clouds[2], even),
        remark=f"At M = diag(1, 2, 3), x = (1, 1, 1)/sqrt(3), phi = x_1: {shown}.",
        where=(
            f"simulation on the unit sphere: random points and noises, d = {', '.join(map(str, DIMS))}, steps of "
            f"1/{1 / STEPS[0]:.0f} to 1/{1 / STEPS[-1]:.0f} to the limit"
        ),
    )


def _parts(seen: Seen, space: Seen, circle: Seen, even: Seen) -> tuple[Check, ...]:
    """Which of the four differ, by how much, and where they agree."""
    held, exact = Ruling.BY_CONSTRUCTION, torch.maximum(_gap(seen, 0, 1, exact=True), _gap(seen, 0, 3, exact=True))
    return (
        Check("relative difference of the chain and Stratonovich", _apart(_gap(seen, 0, 1)), region=SAME),
        Check(
            "relative difference of the chain and the divergence form, d > 2",
            _apart(_gap(space, 0, 3)),
            region=SAME,
        ),
        Check("relative error of PMx and (d-2) PMx for these two differences", Identity(exact, "relative error"), held),
        Check(
            "relative difference of the chain and the divergence form on the circle",
            _apart(_gap(circle, 0, 3)),
            held,
            SAME,
        ),
        Check(
            "range of all four for M = nu I, over its size",
            _apart(_range(even.measured) / even.size),
            held,
            OF_SIZE,
        ),
        Check(
            "relative error of the library's generators",
            Identity(_relative(seen, seen.library - _corrected(seen)), "relative error"),
            held,
        ),
    )


def _apart(differences: Tensor) -> Identity:
    return Identity(differences, "difference")


def _random(case: Case, d: int, k: int, *, isotropic: bool = False) -> Seen:
    """A noise of trace d at random points, with a phi(y) = sin <a, y> + e^<b, y> + <c, y> at each."""
    draws = case.normal(4 * POINTS + d, d, stream=2 * (1_000 * d + k) + isotropic)
    root, (x, a, b, c) = draws[:d], draws[d:].reshape(4, POINTS, d)
    m = root @ root.mT
    m = torch.eye(d, dtype=m.dtype) * m.trace() / d**2 if isotropic else d * m / m.trace()
    return _look(m, sphere.retract(x), _probe(a, b / 2, c))


def _corner() -> Seen:
    """M = diag(1, 2, 3) at (1, 1, 1) / sqrt(3), phi = x_1."""
    one = torch.ones(1, 3, dtype=torch.float64)
    return _look(torch.diag(torch.tensor([1.0, 2.0, 3.0]).to(one)), sphere.retract(one), lambda y: y[..., 0])


def _probe(a: Tensor, b: Tensor, c: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda y: (a * y).sum(-1).sin() + (b * y).sum(-1).exp() + (c * y).sum(-1)


def _look(m: Tensor, x: Tensor, phi: Callable[[Tensor], Tensor]) -> Seen:
    d, noise = len(m), MatrixNoise(m)
    axes = torch.cat([torch.eye(d), -torch.eye(d)]).to(x)[:, None, :] * d**0.5  # mean 0, covariance I
    rates = []
    for h in STEPS:
        start, dw = x.expand(2 * d, *x.shape), (h**0.5 * axes).expand(2 * d, *x.shape)
        layers = [partial(step, noise, dw, h) for step in (_chain, _heun, _euler)]
        rates.append(torch.stack([discrete_generator(each, phi, start, epsilon=h).mean(0) for each in layers], -1))
    steps = torch.stack(rates)
    form = surface.divergence(lambda y: surface.gradient(phi, y) @ m, x)
    slope, curvature, pull = surface.gradient(phi, x), surface.hessian(phi, x), sphere.project(x, x @ m)
    still = [
        sphere_generator(torch.zeros_like, phi, x, noise=MatrixNoise(m, process=each)) for each in PROCESSES.values()
    ]
    return Seen(
        measured=torch.cat([_richardson(steps), form[:, None]], -1),
        library=torch.stack(still, -1),
        pull=(pull * slope).sum(-1),
        spread=(m * curvature).sum((-1, -2)),
        c=torch.tensor([2.0, 1.0, 0.0, float(d)]).to(x).expand(len(x), 4),
        size=m.norm() * (slope.norm(dim=-1) + curvature.norm(dim=(-1, -2))),
        rates=steps.movedim(0, 1),
    )


def _chain(noise: Noise, dw: Tensor, h: float, x: Tensor) -> Tensor:
    """N(x + sigma dW), a layer."""
    return sphere.retract(x + noise.kick(x, dw))


def _heun(noise: Noise, dw: Tensor, h: float, x: Tensor) -> Tensor:
    """x + the mean of P sigma dW at both ends of the step, which is what the circle in P sigma o dW means."""
    first = sphere.project(x, noise.kick(x, dw))
    end = sphere.retract(x + first)
    return sphere.retract(x + (first + sphere.project(end, noise.kick(end, dw))) / 2)


def _euler(noise: Noise, dw: Tensor, h: float, x: Tensor) -> Tensor:
    """x + P sigma dW - h tr(PM) x, not put back on the sphere."""
    m = noise.matrix(x)
    trace = m.diagonal(dim1=-2, dim2=-1).sum(-1) - (x * (m @ x[..., None])[..., 0]).sum(-1)
    return x + sphere.project(x, noise.kick(x, dw)) - h * trace[..., None] * x


def _richardson(rates: Tensor) -> Tensor:
    """The limit of a power series in h, from its values at h, h/2, h/4, ... along the first axis."""
    for order in range(1, len(rates)):
        rates = rates[1:] + (rates[1:] - rates[:-1]) / (2.0**order - 1)
    return rates[0]


def _joined(parts: list[Seen]) -> Seen:
    return Seen(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _corrected(seen: Seen) -> Tensor:
    return seen.spread[:, None] - seen.c * seen.pull[:, None]


def _relative(seen: Seen, error: Tensor) -> Tensor:
    """The largest error at each point, in units of the two terms."""
    return error.abs().flatten(1).amax(-1) / (seen.pull.abs() + seen.spread.abs())


def _range(numbers: Tensor) -> Tensor:
    return numbers.amax(-1) - numbers.amin(-1)


def _gap(seen: Seen, one: int, other: int, *, exact: bool = False) -> Tensor:
    """How far two measured generators are apart; with ``exact``, less what their c's say."""
    due = (seen.c[:, other] - seen.c[:, one]) * seen.pull if exact else 0.0
    return _relative(seen, (seen.measured[:, one] - seen.measured[:, other] - due)[:, None])


def _drawn(clouds: dict[int, Seen], count: int) -> xr.Dataset:
    """c by least squares over the points of each noise, and how single steps come near L phi."""
    fits, misses = [], []
    for seen in clouds.values():
        pull, drift = seen.pull.reshape(count, -1, 1), (seen.measured - seen.spread[:, None]).reshape(count, -1, 4)
        fits.append(-(pull * drift).sum(1) / (pull * pull).sum(1))
        off = (seen.rates - _corrected(seen)[:, None, :3]).abs() / (seen.pull.abs() + seen.spread.abs())[:, None, None]
        misses.append(off.reshape(count, -1, len(STEPS), 3).median(1).values)
    c = curve("c", torch.stack(fits, 1), {"d": DIMS, "process": NAMES}, label="c of the drift -c PMx")
    axes = {"step": STEPS, "one_step_of": NAMES[:3]}
    miss = curve("miss", torch.cat(misses), axes, label="relative error of one step for L phi", log=True)
    return xr.merge([c, miss], join="outer")
