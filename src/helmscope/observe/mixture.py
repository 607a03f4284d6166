"""Mixtures of von Mises-Fisher laws fitted to the tokens of a cloud: how many clusters, how heavy, where, how tight.

The law on S^(d-1) has a density proportional to e^{kappa <mu, x>}: uniform at kappa = 0, about a Gaussian of variance
1/kappa around mu where kappa is large. Its mean is A_d(kappa) mu, A_d = I_{d/2} / I_{d/2-1}. Everything here is written
in the spread s = 1 - A and in 1 - <mu, x> = |x - mu|^2 / 2, which keep their digits where kappa is large.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.polynomial import Chebyshev
from scipy.interpolate import CubicSpline
from scipy.special import gammaln

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import check_tokens, retract
from helmscope.types import HelmscopeError, counted, fits_memory, real_number, whole_number

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy.typing import NDArray
    from torch import Tensor

    Array = NDArray[np.float64]

KAPPA_LIMIT = 1e12  # float64 places a token to 1e-16: a narrower law would rest on rounding
CHUNK = 256  # clouds at a time, which bounds the memory
SHORT, LONG, GAIN = 20, 500, 1e-6  # steps of a trial climb and of the last one; the gain a token that ends a climb


@dataclass(frozen=True, eq=False)
class VMFMixture:
    """One mixture a cloud. ``count`` components, the heaviest first; rows of ``weights``, ``centers`` and ``kappas``
    beyond them are 0. A kappa equal to kappa_max is bound by it: the tokens are tighter, or one. ``bic[..., k-1]`` is
    that of the best mixture found with k components, the least one at k = count.

    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    >>> fitted = vmf_mixture(x, most=3)
    >>> fitted.count.item(), fitted.weights.tolist(), fitted.centers[1].tolist()
    (2, [0.6, 0.4, 0.0], [0.0, 1.0])
    """

    count: Int[Tensor, "*batch"]
    weights: Float[Tensor, "*batch most"]
    centers: Float[Tensor, "*batch most d"]
    kappas: Float[Tensor, "*batch most"]
    log_likelihood: Float[Tensor, "*batch"]
    bic: Float[Tensor, "*batch most"]

    def log_density(self, x: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch m"]:
        """log sum_k w_k f(x; mu_k, kappa_k), by the surface measure, at points of the sphere.

        >>> x = torch.eye(3, dtype=torch.float64)
        >>> seen = vmf_mixture(x, most=1)
        >>> bool((seen.log_density(x).sum() - seen.log_likelihood).abs() < 1e-12)
        True
        """
        points, kappas = _units(x), self.kappas.numpy()
        log_masses = _polar(kappas, points.shape[-1]).log_mass
        fit = _Fit(self.weights.numpy(), self.centers.numpy(), kappas, log_masses)
        return torch.from_numpy(_logsumexp(_components(points, fit)))


def vmf_mixture(
    x: Float[Tensor, "*batch n d"], *, most: int = 8, kappa_max: float = 1e3, starts: int = 4, seed: int = 0
) -> VMFMixture:
    """The mixture sum_k w_k f(x; mu_k, kappa_k), kappa_k <= ``kappa_max``, of at most ``most`` <= n components that has
    the least

        BIC = -2 sum_i log sum_k w_k f(x_i) + p log n,   p = k (d + 1) - 1   (k - 1 weights, k centers, k kappas).

    Without ``kappa_max`` the likelihood is unbounded: a component on one token, or on equal ones, gains without end as
    its kappa grows. The bound is a part of the definition, the resolution of the count: clusters tighter than about
    1/sqrt(kappa_max) radians are points, and two closer than a few of these are one.

    Each number of components is fitted by expectation maximization (Banerjee, Dhillon, Ghosh & Sra 2005) from
    ``starts`` draws of k-means++ centers (Arthur & Vassilvitskii 2007) with one kappa for all; 20 steps from each, then
    up to 500 from the best. That finds a local maximum, in float64 on the CPU, without gradient. Tokens are put into an
    order of their own first, so that their order cannot matter; equal seeds give equal mixtures.

    A component is no cluster: one cluster that is not von Mises-Fisher may take two.

    >>> from helmscope.theory.starts import VonMisesFisher
    >>> north = VonMisesFisher(n=40, dim=3, kappa=50.0).sample(seed=0)
    >>> fitted = vmf_mixture(torch.cat([north, -north[:20]]))
    >>> fitted.count.item(), round(fitted.weights[0].item(), 2)
    (2, 0.67)
    """
    tokens = _units(x)
    n, dim = tokens.shape[-2:]
    most = whole_number("most", most, at_least=1)
    if most > n:
        raise HelmscopeError(
            f"most is {most}, but a cloud of {counted(n, 'token')} has at most {counted(n, 'component')}"
        )
    if real_number("kappa_max", kappa_max, above=0) > KAPPA_LIMIT:
        raise HelmscopeError(f"kappa_max is {kappa_max:g}, but it must be at most {KAPPA_LIMIT:g}")
    starts = whole_number("starts", starts, at_least=1)
    fits_memory(f"starts is {starts} and most is {most}", starts * most)
    chance = np.random.default_rng(whole_number("seed", seed, at_least=0)).random((starts, most))
    clouds = np.stack([cloud[np.lexsort(cloud.T)] for cloud in tokens.reshape(-1, n, dim)])
    parts = [_chosen(clouds[i : i + CHUNK], float(kappa_max), chance) for i in range(0, len(clouds), CHUNK)]
    batch = x.shape[:-2]
    fields = (torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True))
    return VMFMixture(*(field.reshape((*batch, *field.shape[1:])) for field in fields))


def vmf_log_density(
    x: Float[Tensor, "*batch n d"], center: Float[Tensor, "*batch d"], kappa: Float[Tensor, "*batch"] | float
) -> Float[Tensor, "*batch n"]:
    """log of the von Mises-Fisher density by the surface measure, in float64,

        -kappa |x - mu|^2 / 2 - log int e^{-kappa (1 - <mu, y>)} dy,   0 <= kappa <= 1e12, |mu| = 1, d >= 2,

    exact to rounding for every d and kappa.

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(vmf_log_density(x, x[0], 0.0)[1].item(), 12) == round(-math.log(4 * math.pi), 12)
    True
    """
    tokens = _units(x)
    mu = _units(center.unsqueeze(-2) if isinstance(center, torch.Tensor) else center, name="center")
    if tokens.shape[-1] != mu.shape[-1]:
        raise HelmscopeError(f"center has {mu.shape[-1]} coordinates, but the tokens have {tokens.shape[-1]}")
    kappas = _between("kappa", kappa, 0.0, KAPPA_LIMIT)[..., None]
    fit = _Fit(np.ones_like(kappas), mu, kappas, _polar(kappas, tokens.shape[-1]).log_mass)
    return torch.from_numpy(_components(tokens, fit)[..., 0])


def vmf_concentration(spread: Float[Tensor, "*batch"] | float, *, dim: int) -> Float[Tensor, "*batch"]:
    """kappa with 1 - A_d(kappa) = ``spread``: the most likely one for tokens whose mean has the length 1 - spread.

    dim / 1e12 <= spread <= 1, kappa = 0 at 1 and inf at 0. Newton's method, to rounding. It asks for the spread and not
    for the length, which keeps no digits of tight clouds.

    >>> round(vmf_concentration(1 - (1 / math.tanh(2.0) - 1 / 2.0), dim=3).item(), 12)  # A_3 = coth kappa - 1/kappa
    2.0
    """
    dim = whole_number("dim", dim, at_least=2)
    return torch.from_numpy(_concentration(_between("spread", spread, dim / KAPPA_LIMIT, 1.0), dim))


class _Polar(NamedTuple):
    """log int e^{-kappa (1 - <mu, y>)} dy over the sphere, and mean and variance of 1 - <mu, y> under the law."""

    log_mass: Array
    spread: Array
    variance: Array


def _polar(kappa: Array, dim: int) -> _Polar:
    """With <mu, y> = tanh z the integrals are area(S^(d-2)) int e^{-kappa (1 - tanh z)} cosh(z)^{1-d} dz: analytic,
    with one peak and exponential tails, where the trapezoidal rule is exact to rounding, and sums of positive terms.
    """
    step, reach = 0.3 / math.sqrt(dim + 8), 40 / (dim - 1) + 10 / math.sqrt(dim - 1)
    z = np.arcsinh(2 * kappa / (dim - 1))[..., None] / 2 + np.arange(-reach, reach, step)
    apart = 2 / (1 + np.exp(2 * z))
    size = np.abs(z)
    log_cosh = size + np.log1p(np.exp(-2 * size)) - math.log(2)
    log = -(dim - 1) * log_cosh - kappa[..., None] * apart
    top = log.max(-1, keepdims=True)
    weight = np.exp(log - top)
    total = weight.sum(-1)
    spread = (weight * apart).sum(-1) / total
    variance = (weight * (apart - spread[..., None]) ** 2).sum(-1) / total
    log_area = math.log(2) + (dim - 1) / 2 * math.log(math.pi) - float(gammaln((dim - 1) / 2))
    return _Polar(np.log(step * total) + top[..., 0] + log_area, spread, variance)


def _concentration(spread: Array, dim: int) -> Array:
    """Newton's method climbs from below the root without passing it, since A is concave."""
    kappa = np.asarray((1 - spread) * (dim - 1) / (spread * (2 - spread)))  # below: d - 1 stands for a number up to d
    for _ in range(30):
        at = _polar(kappa, dim)
        change = (at.spread - spread) / at.variance
        kappa = np.asarray(np.maximum(kappa + change, 0.0))
        if bool((np.abs(change) <= 1e-9 * kappa).all()):  # the next change would be the square of that
            break
    return kappa


@functools.lru_cache(maxsize=32)
def _table(dim: int) -> CubicSpline:
    """kappa s (2 - s) / (1 - s), between d - 1 and d, and log_mass - (d-1)/2 log(s (2 - s)): smooth for 0 <= s <= 1.

    The inner loop reads kappa here, within 1e-11.
    """

    def exact(spread: Array, which: int) -> Array:
        kappa, width = _concentration(spread, dim), spread * (2 - spread)
        return (kappa * width / (1 - spread), _polar(kappa, dim).log_mass - (dim - 1) / 2 * np.log(width))[which]

    grid = np.linspace(0, 1, 2049)
    # by Chebyshev points, which leave out the ends, where the forms are 0/0
    return CubicSpline(grid, np.stack([Chebyshev.interpolate(exact, 100, [0, 1], (i,))(grid) for i in (0, 1)], -1))


class _Fit(NamedTuple):
    """Mixtures of one number of components, one a row."""

    weights: Array
    centers: Array
    kappas: Array
    log_masses: Array

    def rows(self, which: NDArray[np.intp]) -> _Fit:
        return _Fit(*(part[which] for part in self))


def _chosen(x: Array, kappa_max: float, chance: Array) -> tuple[NDArray[np.generic], ...]:
    """Fields of the result for each cloud: of the fits of 1 .. most components the one with the least BIC."""
    clouds, n, dim = x.shape
    most = chance.shape[1]
    seeds = np.stack([_seeds(x, row) for row in chance], 1)
    fits = [_fitted(x, seeds[:, : 1 if k == 1 else None, :k], kappa_max) for k in range(1, most + 1)]
    likelihood = np.stack([_logsumexp(_components(x, fit)).sum(-1) for fit in fits], -1)
    bic = (np.arange(1, most + 1) * (dim + 1) - 1) * math.log(n) - 2 * likelihood
    best = bic.argmin(-1)
    weights, centers, kappas = np.zeros((clouds, most)), np.zeros((clouds, most, dim)), np.zeros((clouds, most))
    for i, k in enumerate(best):
        heaviest = np.argsort(-fits[k].weights[i], kind="stable")
        for whole, part in zip((weights, centers, kappas), fits[k], strict=False):
            whole[i, : k + 1] = part[i, heaviest]
    return best + 1, weights, centers, kappas, likelihood[np.arange(clouds), best], bic


def _seeds(x: Array, chance: Array) -> Array:
    """k-means++: each next center is a token drawn with a chance proportional to its squared distance to the nearest
    center so far, by the same random numbers for every cloud."""
    chosen, rows = [x[:, int(chance[0] * x.shape[1])]], np.arange(len(x))
    nearest = np.full(x.shape[:2], np.inf)
    for number in chance[1:]:
        nearest = np.minimum(nearest, ((x - chosen[-1][:, None]) ** 2).sum(-1))
        total = nearest.cumsum(-1)
        chosen.append(x[rows, (total <= number * total[:, -1:]).sum(-1) % x.shape[1]])
    return np.stack(chosen, 1)


@full_precision
def _fitted(x: Array, seeds: Array, kappa_max: float) -> _Fit:
    """The best of the climbs from seeds (cloud, start, component, d), for each cloud."""
    clouds, starts, k, dim = seeds.shape
    floor = float(_polar(np.asarray(kappa_max), dim).spread)
    centers = seeds.reshape(-1, k, dim)
    many = np.repeat(x, starts, 0)
    common = (1 - many @ centers.mT).min(-1).mean(-1)[:, None].repeat(k, 1)
    begun = _Fit(np.full((len(many), k), 1 / k), centers, *_law(common, dim, floor, kappa_max))
    tried, reached = _climb(many, begun, floor, kappa_max, SHORT)
    best = reached.reshape(clouds, starts).argmax(-1) + starts * np.arange(clouds)
    return _climb(x, tried.rows(best), floor, kappa_max, LONG)[0]


def _climb(x: Array, fit: _Fit, floor: float, kappa_max: float, steps: int) -> tuple[_Fit, Array]:
    """Steps of expectation maximization, and the log-likelihood before the last; rows that stand still are left."""
    done = _Fit(*(part.copy() for part in fit))
    reached = np.full(len(x), -np.inf)
    live = np.arange(len(x))
    for _ in range(steps):
        fit, now = _step(x, fit, floor, kappa_max)
        moving = now - reached[live] > GAIN * x.shape[1]
        reached[live] = now
        for whole, part in zip(done, fit, strict=True):
            whole[live] = part
        if not bool(moving.all()):
            keep = np.flatnonzero(moving)
            x, fit, live = x[keep], fit.rows(keep), live[keep]
        if not len(live):
            break
    return done, reached


@full_precision
def _step(x: Array, fit: _Fit, floor: float, kappa_max: float) -> tuple[_Fit, Array]:
    """The next mixtures, and the log-likelihood of these ones."""
    n, dim = x.shape[-2:]
    with np.errstate(divide="ignore"):
        offset = np.log(fit.weights) - fit.kappas - fit.log_masses
    log = (fit.kappas[..., None] * fit.centers) @ x.mT + offset[..., None]  # (cloud, component, token)
    top = log.max(-2, keepdims=True)
    share = np.exp(log - top)
    total = share.sum(-2, keepdims=True)
    likelihood = (np.log(total) + top).sum((-1, -2))
    share /= total
    mass, pull = share.sum(-1), share @ x
    length = np.sqrt((pull**2).sum(-1))
    held = length > 1e-12 * np.maximum(mass, 1e-300)  # a component without tokens, or without a mean, stays in place
    centers = np.where(held[..., None], pull / np.where(held, length, 1.0)[..., None], fit.centers)
    spread = 1 - np.minimum(length / np.maximum(mass, 1e-300), 1.0)
    return _Fit(mass / n, centers, *_law(spread, dim, floor, kappa_max)), likelihood


def _law(spread: Array, dim: int, floor: float, kappa_max: float) -> tuple[Array, Array]:
    """kappa and log_mass of laws of these spreads, which are floored where kappa would pass its bound."""
    s = np.maximum(spread, floor)
    width, table = s * (2 - s), _table(dim)(s)
    kappa = np.where(spread <= floor, kappa_max, table[..., 0] * (1 - s) / width)
    return kappa, table[..., 1] + (dim - 1) / 2 * np.log(width)


def _components(x: Array, fit: _Fit) -> Array:
    """log(w_k f(x_i; mu_k, kappa_k)), (..., token, component)."""
    chord = ((x[..., :, None, :] - fit.centers[..., None, :, :]) ** 2).sum(-1)
    with np.errstate(divide="ignore"):
        offset = np.log(fit.weights) - fit.log_masses
    log: Array = offset[..., None, :] - fit.kappas[..., None, :] * chord / 2
    return log


def _logsumexp(log: Array) -> Array:
    top = log.max(-1)
    total: Array = np.log(np.exp(log - top[..., None]).sum(-1)) + top
    return total


def _units(x: object, *, name: str = "x") -> Array:
    """Tokens in float64, of norm 1 to its rounding also where they came as float32."""
    tokens = check_tokens(x, name=name).detach().to(device="cpu", dtype=torch.float64)
    numbers: Array = retract(tokens).numpy()
    return numbers


def _between(name: str, value: Tensor | float, low: float, high: float) -> Array:
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(real_number(name, value), dtype=torch.float64, device="cpu")
    numbers: Array = value.detach().to(device="cpu", dtype=torch.float64).numpy()
    inside = (numbers >= low) & (numbers <= high)
    if not bool(inside.all()):
        raise HelmscopeError(f"{name} is {numbers[~inside].flat[0]:g}, but it must lie in {low:g} .. {high:g}")
    return numbers
