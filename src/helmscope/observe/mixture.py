"""Mixtures of von Mises-Fisher distributions fitted to a cloud of tokens: number, weights, centers and concentrations.

The distribution on S^(d-1) has a density proportional to e^{kappa <mu, x>}: uniform at kappa = 0, approximately a
Gaussian of variance 1/kappa around mu for large kappa. Its mean is A_d(kappa) mu, A_d = I_{d/2} / I_{d/2-1}. All
formulas use the spread s = 1 - A and 1 - <mu, x> = |x - mu|^2 / 2, which avoid cancellation for large kappa.
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
from helmscope.observe.observable import observable
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    check_integer,
    check_memory,
    check_progress,
    check_real,
    pluralized,
    sub_progress,
)
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy.typing import NDArray
    from torch import Tensor

    from helmscope.types import Progress
    from helmscope.types.progress import ProgressOption

    Array = NDArray[np.float64]

KAPPA_LIMIT = 1e12  # a token in float64 is accurate to 1e-16: a narrower distribution would be determined by rounding
CHUNK = 256  # clouds at a time, which bounds the memory
TRIAL_STEPS, FINAL_STEPS = 20, 500  # EM steps from each start, and from the best of them
MINIMAL_GAIN = 1e-6  # EM stops once a step raises the log-likelihood by less than this per token


@dataclass(frozen=True, eq=False)
class VMFMixture(ConciseRepr):
    """Fitted mixtures, one per cloud, of ``count`` components in order of decreasing weight.

    Rows of ``weights``, ``centers`` and ``kappas`` beyond ``count`` are 0. A kappa equal to max_kappa is limited by
    that bound: the tokens are more concentrated, or there is only one. ``bic[..., k-1]`` is the BIC of the best mixture
    found with k components, smallest at k = count.

    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    >>> fitted = vmf_mixture(x, max_components=3)
    >>> fitted.count.item(), fitted.weights.tolist(), fitted.centers[1].tolist()
    (2, [0.6, 0.4, 0.0], [0.0, 1.0])
    """

    count: Int[Tensor, "*batch"]
    weights: Float[Tensor, "*batch max_components"]
    centers: Float[Tensor, "*batch max_components d"]
    kappas: Float[Tensor, "*batch max_components"]
    log_likelihood: Float[Tensor, "*batch"]
    bic: Float[Tensor, "*batch max_components"]

    def log_density(self, x: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch m"]:
        """Log density log sum_k w_k f(x; mu_k, kappa_k) at points of the sphere, with respect to the surface measure.

        >>> x = torch.eye(3, dtype=torch.float64)
        >>> fitted = vmf_mixture(x, max_components=1)
        >>> bool((fitted.log_density(x).sum() - fitted.log_likelihood).abs() < 1e-12)
        True
        """
        points, kappas = _as_unit_vectors(x), self.kappas.numpy()
        log_masses = _polar_integrals(kappas, points.shape[-1]).log_mass
        fit = _Fit(self.weights.numpy(), self.centers.numpy(), kappas, log_masses)
        return torch.from_numpy(_logsumexp(_log_components(points, fit)))


@observable
@shows_progress("fitting mixtures")
def vmf_mixture(
    x: Float[Tensor, "*batch n d"],
    *,
    max_components: int = 8,
    max_kappa: float = 1e3,
    restarts: int = 4,
    seed: int = 0,
    progress: ProgressOption = None,
) -> VMFMixture:
    """Fits a von Mises-Fisher mixture sum_k w_k f(x; mu_k, kappa_k) to each cloud, selecting the number of components.

    Of the mixtures with at most ``max_components`` <= n components and kappa_k <= ``max_kappa`` it returns the one of
    smallest

        BIC = -2 sum_i log sum_k w_k f(x_i) + p log n,   p = k (d + 1) - 1   (k - 1 weights, k centers, k kappas).

    Without ``max_kappa`` the likelihood is unbounded: that of a component on a single token, or on equal tokens, grows
    with kappa without limit. The bound is part of the definition and sets the resolution: clusters narrower than about
    1/sqrt(max_kappa) radians count as points, and clusters closer than a few times that as one.

    Each number of components is fitted by expectation maximization (Banerjee, Dhillon, Ghosh & Sra 2005) from
    ``restarts`` samples of k-means++ centers (Arthur & Vassilvitskii 2007) with a common kappa: 20 steps from each,
    then up to 500 from the best. This finds a local maximum, in float64 on the CPU, without gradients. Tokens are
    sorted first, so that the result does not depend on their order; equal seeds return equal mixtures. ``progress`` is
    called with the share of the fits done. Raises HelmscopeError for arguments outside their range and for x that is
    not on the sphere.

    Components are not clusters: a cluster that is not von Mises-Fisher may need two components.

    >>> from helmscope.theory.starts import VonMisesFisher
    >>> north = VonMisesFisher(n=40, dim=3, kappa=50.0).sample(seed=0)
    >>> fitted = vmf_mixture(torch.cat([north, -north[:20]]))
    >>> fitted.count.item(), round(fitted.weights[0].item(), 2)
    (2, 0.67)
    """
    tokens = _as_unit_vectors(x)
    n, dim = tokens.shape[-2:]
    max_components = check_integer("max_components", max_components, at_least=1)
    if max_components > n:
        raise HelmscopeError(
            f"max_components is {max_components}, but a cloud of {pluralized(n, 'token')} has at most "
            f"{pluralized(n, 'component')}"
        )
    if check_real("max_kappa", max_kappa, above=0) > KAPPA_LIMIT:
        raise HelmscopeError(f"max_kappa is {max_kappa:g}, but it must be at most {KAPPA_LIMIT:g}")
    restarts = check_integer("restarts", restarts, at_least=1)
    check_memory(f"restarts is {restarts} and max_components is {max_components}", restarts * max_components)
    uniforms = np.random.default_rng(check_integer("seed", seed, at_least=0)).random((restarts, max_components))
    clouds = np.stack([cloud[np.lexsort(cloud.T)] for cloud in tokens.reshape(-1, n, dim)])
    chunks, count = [], len(clouds)
    for first in range(0, count, CHUNK):
        last = min(first + CHUNK, count)
        report = sub_progress(check_progress(progress), first / count, last / count)
        chunks.append(_select_by_bic(clouds[first:last], float(max_kappa), uniforms, report))
    batch = x.shape[:-2]
    fields = (torch.from_numpy(np.concatenate(values)) for values in zip(*chunks, strict=True))
    return VMFMixture(*(field.reshape((*batch, *field.shape[1:])) for field in fields))


def vmf_log_density(
    x: Float[Tensor, "*batch n d"], center: Float[Tensor, "*batch d"], kappa: Float[Tensor, "*batch"] | float
) -> Float[Tensor, "*batch n"]:
    """Log of the von Mises-Fisher density with respect to the surface measure, in float64,

        -kappa |x - mu|^2 / 2 - log int e^{-kappa (1 - <mu, y>)} dy,   0 <= kappa <= 1e12, |mu| = 1, d >= 2,

    exact up to rounding for every d and kappa. Raises HelmscopeError for arguments outside this domain.

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(vmf_log_density(x, x[0], 0.0)[1].item(), 12) == round(-math.log(4 * math.pi), 12)
    True
    """
    tokens = _as_unit_vectors(x)
    mu = _as_unit_vectors(center.unsqueeze(-2) if isinstance(center, torch.Tensor) else center, name="center")
    if tokens.shape[-1] != mu.shape[-1]:
        raise HelmscopeError(f"center has {mu.shape[-1]} coordinates, but the tokens have {tokens.shape[-1]}")
    kappas = _check_range("kappa", kappa, 0.0, KAPPA_LIMIT)[..., None]
    fit = _Fit(np.ones_like(kappas), mu, kappas, _polar_integrals(kappas, tokens.shape[-1]).log_mass)
    return torch.from_numpy(_log_components(tokens, fit)[..., 0])


def vmf_concentration(spread: Float[Tensor, "*batch"] | float, *, dim: int) -> Float[Tensor, "*batch"]:
    """Maximum-likelihood concentration kappa for tokens whose mean has length 1 - spread: 1 - A_d(kappa) = ``spread``.

    dim / 1e12 <= spread <= 1, else HelmscopeError; kappa is 0 at spread 1 and tends to infinity as spread tends to 0.
    Newton's method, exact up to rounding. The argument is the spread rather than the length of the mean, which loses
    all digits for concentrated clouds.

    >>> round(vmf_concentration(1 - (1 / math.tanh(2.0) - 1 / 2.0), dim=3).item(), 12)  # A_3 = coth kappa - 1/kappa
    2.0
    """
    dim = check_integer("dim", dim, at_least=2)
    return torch.from_numpy(_concentration(_check_range("spread", spread, dim / KAPPA_LIMIT, 1.0), dim))


class _PolarIntegrals(NamedTuple):
    """log int e^{-kappa (1 - <mu, y>)} dy over the sphere, and mean and variance of 1 - <mu, y>."""

    log_mass: Array
    spread: Array
    variance: Array


def _polar_integrals(kappa: Array, dim: int) -> _PolarIntegrals:
    """With <mu, y> = tanh z the integrals are area(S^(d-2)) int e^{-kappa (1 - tanh z)} cosh(z)^{1-d} dz. The integrand
    is analytic and positive with one peak and exponential tails, so the trapezoidal rule is exact up to rounding.
    """
    step, reach = 0.3 / math.sqrt(dim + 8), 40 / (dim - 1) + 10 / math.sqrt(dim - 1)
    z = np.arcsinh(2 * kappa / (dim - 1))[..., None] / 2 + np.arange(-reach, reach, step)
    one_minus_cosine = 2 / (1 + np.exp(2 * z))
    size = np.abs(z)
    log_cosh = size + np.log1p(np.exp(-2 * size)) - math.log(2)
    log = -(dim - 1) * log_cosh - kappa[..., None] * one_minus_cosine
    top = log.max(-1, keepdims=True)
    weight = np.exp(log - top)
    total = weight.sum(-1)
    spread = (weight * one_minus_cosine).sum(-1) / total
    variance = (weight * (one_minus_cosine - spread[..., None]) ** 2).sum(-1) / total
    log_area = math.log(2) + (dim - 1) / 2 * math.log(math.pi) - float(gammaln((dim - 1) / 2))
    return _PolarIntegrals(np.log(step * total) + top[..., 0] + log_area, spread, variance)


def _concentration(spread: Array, dim: int) -> Array:
    """Newton's method from below the root, which it cannot overshoot, since A is concave."""
    kappa = np.asarray((1 - spread) * (dim - 1) / (spread * (2 - spread)))  # below the root: see _spline for d - 1
    for _ in range(30):
        at = _polar_integrals(kappa, dim)
        change = (at.spread - spread) / at.variance
        kappa = np.asarray(np.maximum(kappa + change, 0.0))
        if bool((np.abs(change) <= 1e-9 * kappa).all()):  # convergence is quadratic: the next change is below rounding
            break
    return kappa


@functools.lru_cache(maxsize=32)
def _spline(dim: int) -> CubicSpline:
    """Spline in s of kappa s (2 - s) / (1 - s), between d - 1 and d, and log_mass - (d-1)/2 log(s (2 - s)), which are
    smooth for 0 <= s <= 1.

    EM evaluates kappa from this spline, with an error below 1e-11.
    """

    def exact(spread: Array, which: int) -> Array:
        kappa, width = _concentration(spread, dim), spread * (2 - spread)
        log_mass = _polar_integrals(kappa, dim).log_mass
        return (kappa * width / (1 - spread), log_mass - (dim - 1) / 2 * np.log(width))[which]

    grid = np.linspace(0, 1, 2049)
    # Chebyshev points exclude the ends, where both expressions are 0/0
    return CubicSpline(grid, np.stack([Chebyshev.interpolate(exact, 100, [0, 1], (i,))(grid) for i in (0, 1)], -1))


class _Fit(NamedTuple):
    """Mixtures with the same number of components, one per row."""

    weights: Array
    centers: Array
    kappas: Array
    log_masses: Array

    def rows(self, which: NDArray[np.intp]) -> _Fit:
        return _Fit(*(values[which] for values in self))


def _select_by_bic(x: Array, max_kappa: float, uniforms: Array, report: Progress) -> tuple[NDArray[np.generic], ...]:
    """Fields of the result for each cloud: the fit with 1 .. max_components components that has the smallest BIC."""
    clouds, n, dim = x.shape
    max_components = uniforms.shape[1]
    seeds = np.stack([_kmeans_plus_plus(x, row) for row in uniforms], 1)
    fits = []
    for k in range(1, max_components + 1):
        fits.append(_fit_components(x, seeds[:, : 1 if k == 1 else None, :k], max_kappa))
        report(k * (k + 1) / (max_components * (max_components + 1)))  # a fit takes time in proportion to k
    likelihood = np.stack([_logsumexp(_log_components(x, fit)).sum(-1) for fit in fits], -1)
    bic = (np.arange(1, max_components + 1) * (dim + 1) - 1) * math.log(n) - 2 * likelihood
    best = bic.argmin(-1)
    weights, centers, kappas = (
        np.zeros((clouds, max_components)),
        np.zeros((clouds, max_components, dim)),
        np.zeros((clouds, max_components)),
    )
    for i, k in enumerate(best):
        order = np.argsort(-fits[k].weights[i], kind="stable")
        for padded, values in zip((weights, centers, kappas), fits[k], strict=False):
            padded[i, : k + 1] = values[i, order]
    return best + 1, weights, centers, kappas, likelihood[np.arange(clouds), best], bic


def _kmeans_plus_plus(x: Array, uniforms: Array) -> Array:
    """k-means++: each next center is a token sampled with probability proportional to its squared distance from the
    nearest center so far, using the same random numbers for every cloud."""
    centers, rows = [x[:, int(uniforms[0] * x.shape[1])]], np.arange(len(x))
    nearest = np.full(x.shape[:2], np.inf)
    for uniform in uniforms[1:]:
        nearest = np.minimum(nearest, ((x - centers[-1][:, None]) ** 2).sum(-1))
        total = nearest.cumsum(-1)
        centers.append(x[rows, (total <= uniform * total[:, -1:]).sum(-1) % x.shape[1]])
    return np.stack(centers, 1)


@full_precision
def _fit_components(x: Array, seeds: Array, max_kappa: float) -> _Fit:
    """The best EM fit from the centers ``seeds`` (cloud, start, component, d), for each cloud."""
    clouds, restarts, k, dim = seeds.shape
    floor = float(_polar_integrals(np.asarray(max_kappa), dim).spread)
    centers = seeds.reshape(-1, k, dim)
    repeated = np.repeat(x, restarts, 0)
    common = (1 - repeated @ centers.mT).min(-1).mean(-1)[:, None].repeat(k, 1)
    initial = _Fit(np.full((len(repeated), k), 1 / k), centers, *_kappa_and_log_mass(common, dim, floor, max_kappa))
    trials, likelihood = _run_em(repeated, initial, floor, max_kappa, TRIAL_STEPS)
    best = likelihood.reshape(clouds, restarts).argmax(-1) + restarts * np.arange(clouds)
    return _run_em(x, trials.rows(best), floor, max_kappa, FINAL_STEPS)[0]


def _run_em(x: Array, fit: _Fit, floor: float, max_kappa: float, steps: int) -> tuple[_Fit, Array]:
    """Mixtures after up to ``steps`` EM steps, fewer where they converge, and the log-likelihood before the last."""
    result = _Fit(*(values.copy() for values in fit))
    likelihood = np.full(len(x), -np.inf)
    live = np.arange(len(x))
    for _ in range(steps):
        fit, current = _em_step(x, fit, floor, max_kappa)
        improving = current - likelihood[live] > MINIMAL_GAIN * x.shape[1]
        likelihood[live] = current
        for stored, values in zip(result, fit, strict=True):
            stored[live] = values
        if not bool(improving.all()):
            keep = np.flatnonzero(improving)
            x, fit, live = x[keep], fit.rows(keep), live[keep]
        if not len(live):
            break
    return result, likelihood


@full_precision
def _em_step(x: Array, fit: _Fit, floor: float, max_kappa: float) -> tuple[_Fit, Array]:
    """The mixtures after one EM step, and the log-likelihood before it."""
    n, dim = x.shape[-2:]
    with np.errstate(divide="ignore"):
        offset = np.log(fit.weights) - fit.kappas - fit.log_masses
    log = (fit.kappas[..., None] * fit.centers) @ x.mT + offset[..., None]  # (cloud, component, token)
    top = log.max(-2, keepdims=True)
    share = np.exp(log - top)
    total = share.sum(-2, keepdims=True)
    likelihood = (np.log(total) + top).sum((-1, -2))
    share /= total
    mass, moment = share.sum(-1), share @ x
    length = np.sqrt((moment**2).sum(-1))
    defined = length > 1e-12 * np.maximum(mass, 1e-300)  # a component without tokens or with mean 0 keeps its center
    centers = np.where(defined[..., None], moment / np.where(defined, length, 1.0)[..., None], fit.centers)
    spread = 1 - np.minimum(length / np.maximum(mass, 1e-300), 1.0)
    return _Fit(mass / n, centers, *_kappa_and_log_mass(spread, dim, floor, max_kappa)), likelihood


def _kappa_and_log_mass(spread: Array, dim: int, floor: float, max_kappa: float) -> tuple[Array, Array]:
    """kappa and log_mass for each spread, with kappa at most max_kappa, which is reached at the spread ``floor``."""
    s = np.maximum(spread, floor)
    width, smooth = s * (2 - s), _spline(dim)(s)
    kappa = np.where(spread <= floor, max_kappa, smooth[..., 0] * (1 - s) / width)
    return kappa, smooth[..., 1] + (dim - 1) / 2 * np.log(width)


def _log_components(x: Array, fit: _Fit) -> Array:
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


def _as_unit_vectors(x: object, *, name: str = "x") -> Array:
    """Tokens in float64, normalized again, since float32 tokens have norm 1 only up to float32 rounding."""
    tokens = check_tokens(x, name=name).detach().to(device="cpu", dtype=torch.float64)
    units: Array = retract(tokens).numpy()
    return units


def _check_range(name: str, value: Tensor | float, low: float, high: float) -> Array:
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(check_real(name, value), dtype=torch.float64, device="cpu")
    numbers: Array = value.detach().to(device="cpu", dtype=torch.float64).numpy()
    inside = (numbers >= low) & (numbers <= high)
    if not bool(inside.all()):
        raise HelmscopeError(f"{name} is {numbers[~inside].flat[0]:g}, but it must be in [{low:g}, {high:g}]")
    return numbers
