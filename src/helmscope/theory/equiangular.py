"""The equiangular flow: n tokens with <x_i, x_j> = gamma for all i != j keep equal angles and obey one scalar ODE
[Geshkovski et al. 2023]

    SA    gamma' = 2 e^{b gamma} (1 - gamma) ((n-1) gamma + 1) / (e^b + (n-1) e^{b gamma})
    USA   gamma' = (2/n) e^{b gamma} (1 - gamma) ((n-1) gamma + 1)                              b = beta

for -1/(n-1) < gamma < 1; orthonormal tokens start at gamma(0) = 0. With v = gamma - gamma0, u = 1 - gamma0 and
r = gamma0 + 1/(n-1) the time in which gamma rises by v is, in closed form,

    SA    t = (n-1)/(2n) [log(u/(u-v)) + log((r+v)/r)] + e^{b u}/(2n) [D(u, -) + D(r, +)]
    USA   t = e^{-b gamma0}/2 [D(u, -) + D(r, +)]

    D(u, -) = int_0^v e^{-b y}/(u - y) dy = e^{-b u} [Ei(b u) - Ei(b (u - v))]
    D(r, +) = int_0^v e^{-b y}/(r + y) dy = e^{b r} [E1(b r) - E1(b (r + v))].

Both integrals are positive and contain no factor e^b, so nothing cancels, and nothing overflows unless the time does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import exp1, expi

from helmscope.types import HelmscopeError, check_integer, check_real, check_times, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_LARGEST_EXPONENT = 700.0  # e^709 is near the largest float64 number
_SMALLEST_POSITIVE = 5e-324  # the smallest subnormal float64 number


@runtime_checkable
class EquiangularFlow(Protocol):
    """The properties that a field needs to have closed forms; the fields SA and USA have them."""

    @property
    def beta(self) -> Any:
        """The inverse temperature, a number >= 0."""

    @property
    def normalized(self) -> bool:
        """True for SA, whose attention weights sum to 1; False for USA, which divides by n instead."""

    @property
    def isotropic(self) -> bool:
        """Whether the query-key and value matrices are the identity and there is no causal mask and no bias."""


def isotropic_flow(field: EquiangularFlow) -> tuple[float, bool]:
    """(beta, normalized) of a field that has closed forms; raises ``HelmscopeError`` for any other field.

    >>> from helmscope.fields.attention import SA
    >>> isotropic_flow(SA(beta=4.0))
    (4.0, True)
    """
    if not isinstance(field, EquiangularFlow) or not field.isotropic:
        raise HelmscopeError(
            f"field is {type_with_article(field)} without a closed form: it must be SA or USA with identity query_key "
            "and value, no causal mask and no bias"
        )
    return check_real("beta", field.beta, at_least=0), bool(field.normalized)


def equiangular_rate(
    field: EquiangularFlow, gamma: float | Float[Tensor, "*batch"], *, n: int
) -> Float[Tensor, "*batch"]:
    """Right-hand side gamma' of the equiangular ODE, in float64, for -1/(n-1) <= gamma <= 1 and n >= 2.

    Raises ``HelmscopeError`` where the rate would overflow (USA beyond beta = 700).

    >>> from helmscope.fields.attention import SA
    >>> equiangular_rate(SA(beta=0.0), 0.0, n=32).item()
    0.0625
    """
    beta, normalized = isotropic_flow(field)
    n = check_integer("n", n, at_least=2)
    g = check_gamma(gamma, n=n)
    if not normalized and beta > _LARGEST_EXPONENT:
        raise HelmscopeError(
            f"beta is {beta:g}, but it must be at most {_LARGEST_EXPONENT:g} for USA, whose rates overflow beyond"
        )
    rise = 2 * (1 - g) * ((n - 1) * g + 1)
    return rise / (torch.exp(beta * (1 - g)) + n - 1) if normalized else rise * torch.exp(beta * g) / n


def check_gamma(gamma: float | Float[Tensor, "*batch"], *, n: int) -> Float[Tensor, "*batch"]:
    """Check inner products of n equiangular tokens and return them as a float64 tensor.

    Raises ``HelmscopeError`` unless every value is in [-1/(n-1), 1].

    >>> check_gamma(0.5, n=2)
    tensor(0.5000, dtype=torch.float64)
    """
    try:
        g = torch.as_tensor(gamma, dtype=torch.float64, device=getattr(gamma, "device", "cpu"))
    except (TypeError, ValueError, RuntimeError):
        g = torch.tensor(math.nan, device="cpu")
    inside = (g >= -1 / (n - 1)) & (g <= 1)
    if not bool(inside.all()):
        raise HelmscopeError(f"gamma is {gamma!r}, but for n={n} tokens it must be in [{-1 / (n - 1):g}, 1]")
    return g


def hitting_time(field: EquiangularFlow, *, n: int, delta: float, gamma0: float = 0.0) -> float:
    """Time at which gamma, starting at gamma0, reaches 1 - delta, in closed form with relative error 2e-14: with
    u = 1 - gamma0, v = u - delta and r = gamma0 + 1/(n-1),

        SA    t = (n-1)/(2n) [log(u/(u-v)) + log((r+v)/r)] + e^{beta u}/(2n) D,    USA   t = e^{-beta gamma0}/2 D,
        D = int_0^v e^{-beta y} [1/(u - y) + 1/(r + y)] dy, by exponential integrals.

    Requires 0 < delta <= 1 - gamma0 and -1/(n-1) < gamma0 < 1; raises ``HelmscopeError`` where the time overflows.

    >>> from helmscope.fields.attention import SA
    >>> hitting_time(SA(beta=4.0), n=32, delta=1e-3)
    6.9535018488080...
    """
    time, gamma0 = _rise_time(field, n, gamma0)
    delta = check_real("delta", delta, above=0)
    if delta > 1 - gamma0:
        raise HelmscopeError(f"delta is {delta:g}, but for gamma0 = {gamma0:g} it must be at most 1 - gamma0")
    return time(math.fsum((1, -gamma0, -delta)), delta)


def equiangular(
    field: EquiangularFlow, *, n: int, times: Sequence[float] | Float[Tensor, " time"], gamma0: float = 0.0
) -> Float[Tensor, " time"]:
    """Solution gamma(t) of the equiangular ODE with gamma(0) = gamma0, in float64, by inverting the closed form
    t(gamma).

    ``times`` must be increasing and >= 0, -1/(n-1) < gamma0 < 1 and n >= 2. The result at t is the exact gamma, rounded
    to float64, of some time within t (1 +- 1e-15 max(5, beta)): where gamma rises steeply, at large beta, a float64
    time does not determine it more closely.

    >>> from helmscope.fields.attention import SA
    >>> equiangular(SA(beta=0.0), n=2, times=[0.0, 1.0])  # tanh t
    tensor([0.0000, 0.7616], dtype=torch.float64)
    """
    time, gamma0 = _rise_time(field, n, gamma0)
    gammas = [_invert(time, gamma0, t) for t in check_times(times)]
    return torch.tensor(gammas, dtype=torch.float64, device="cpu")


def _invert(time: Callable[[float, float], float], gamma0: float, t: float) -> float:
    """gamma at time t. The unknown is y = log((gamma - gamma0)/(1 - gamma)): at early times t ~ e^y, at late times
    t ~ y, so that both gamma - gamma0 and 1 - gamma keep their digits.
    """

    def split(y: float) -> tuple[float, float]:
        small = (1 - gamma0) / (1 + math.exp(abs(y)))
        large = (1 - gamma0) / (1 + math.exp(-abs(y)))
        return (small, large) if y < 0 else (large, small)

    def excess(y: float) -> float:
        return math.log(max(time(*split(y)), _SMALLEST_POSITIVE)) - math.log(t)

    low, high = -_LARGEST_EXPONENT, _LARGEST_EXPONENT
    if t == 0 or excess(low) >= 0:
        return gamma0
    if excess(high) <= 0:
        return 1.0
    rise, remaining = split(brentq(excess, low, high, xtol=1e-15, rtol=4 * np.finfo(float).eps))
    return gamma0 + rise if rise < remaining else 1 - remaining


def _rise_time(field: EquiangularFlow, n: int, gamma0: float) -> tuple[Callable[[float, float], float], float]:
    """The function (v, 1 - gamma) -> t for the rise v = gamma - gamma0, and the checked gamma0.

    The function takes both arguments because computing the smaller one as a difference would lose its digits.
    """
    beta, normalized = isotropic_flow(field)
    n = check_integer("n", n, at_least=2)
    gamma0 = check_real("gamma0", gamma0)
    u, r = 1 - gamma0, ((n - 1) * gamma0 + 1) / (n - 1)
    if not (u > 0 and r > 0):
        raise HelmscopeError(
            f"gamma0 is {gamma0:g}, but for n={n} equiangular tokens {-1 / (n - 1):g} < gamma0 < 1 must hold"
        )
    exponent = beta * u if normalized else -beta * gamma0
    if abs(exponent) > _LARGEST_EXPONENT:
        raise HelmscopeError(
            f"beta is {beta:g} and gamma0 is {gamma0:g}, but times of order e^({exponent:g}) overflow: lower beta"
        )
    scale = math.exp(exponent)

    def time(v: float, remaining: float) -> float:
        integrals = _decay_integral(beta, u, remaining, v) + _decay_integral(beta, r, r + v, v)
        if not normalized:
            return scale / 2 * integrals
        return ((n - 1) * (_log_ratio(remaining, v) + _log_ratio(r, v)) + scale * integrals) / (2 * n)

    return time, gamma0


def _decay_integral(beta: float, start: float, end: float, length: float) -> float:
    """int_0^length e^{-beta y} / |r(y)| dy, where r moves at unit speed from start to end; length = |end - start|."""
    small, large = min(start, end), max(start, end)
    sign = 1.0 if start == large else -1.0
    if length <= small / 2 and beta * length <= 1:
        # on a short interval the difference of two exponential integrals would cancel; 16 Gauss nodes are exact
        y = length / 2 * (1 + _NODES)
        return length / 2 * float(_WEIGHTS @ (np.exp(-beta * y) / (start - sign * y)))
    if beta * large <= 1:
        # int e^{+-x}/x dx = log x + sum_k (+-x)^k / (k k!): at beta = 0 the logarithm alone
        x0, x1 = sign * beta * small, sign * beta * large
        series = sum((x1**k - x0**k) / (k * math.factorial(k)) for k in range(1, 20))
        return math.exp(-sign * beta * start) * (_log_ratio(small, length) + series)
    scaled = _scaled_ei if sign > 0 else _scaled_e1
    return scaled(beta * start) - math.exp(-beta * length) * scaled(beta * end)


def _log_ratio(small: float, length: float) -> float:
    """log((small + length) / small), accurate for a short ``length`` and for a tiny ``small``."""
    return math.log1p(length / small) if length < small else math.log(small + length) - math.log(small)


def _scaled_ei(x: float) -> float:
    """e^{-x} Ei(x) for x > 0."""
    return _asymptotic(x, 1.0) if x > 40 else math.exp(-x) * float(expi(x))


def _scaled_e1(x: float) -> float:
    """e^x E1(x) for x > 0."""
    return _asymptotic(x, -1.0) if x > 40 else math.exp(x) * float(exp1(x))


def _asymptotic(x: float, sign: float) -> float:
    """Asymptotic series sum_{k <= 40} (sign)^k k! / x^{k+1}; beyond x = 40 its smallest term is below e^{-40}."""
    total = 1.0
    for k in range(40, 0, -1):
        total = 1 + sign * k * total / x
    return total / x
