"""Probabilities for a random start: n independent uniform points on the sphere S^(d-1) [Geshkovski et al. 2023]."""

from __future__ import annotations

from scipy.special import betainc

from helmscope.types import HelmscopeError, check_integer, check_real


def wendel_probability(*, n: int, dim: int) -> float:
    """Probability that n uniform points lie in a common open half-space (Wendel 1962), n >= 1, dim >= 2:

        2^{-(n-1)} sum_{k < dim} C(n-1, k) = I_{1/2}(n - dim, dim)          (regularized incomplete beta function)

    with the boundary of the half-space through the origin; exactly 1 for n <= dim. Tokens in a common half-space form
    one cluster at every beta, so 1 - P bounds the probability of a start that does not.

    >>> wendel_probability(n=32, dim=16)
    0.5
    """
    n = check_integer("n", n, at_least=1)
    dim = check_integer("dim", dim, at_least=2)
    return 1.0 if n <= dim else float(betainc(n - dim, dim, 0.5))


def initial_close_pair_probability(*, dim: int, delta: float) -> float:
    """Probability P(<x, y> >= 1 - delta) for two independent uniform points: the expected share of pairs that have met
    at t = 0.

        P = (1/2) I_{1-(1-delta)^2}((dim-1)/2, 1/2)  for delta <= 1, and 1 - P(2 - delta) above;  0 <= delta <= 2.

    >>> initial_close_pair_probability(dim=3, delta=0.5)  # on S^2 the inner product is uniform on [-1, 1]
    0.25
    """
    half = (check_integer("dim", dim, at_least=2) - 1) / 2
    delta = check_real("delta", delta, at_least=0)
    if delta > 2:
        raise HelmscopeError(f"delta is {delta:g}, but 0 <= delta <= 2 must hold, as 1 - delta is an inner product")
    # I_x(a, 1/2) = 1 - I_{1-x}(1/2, a): near the equator x rounds to 1, near the pole 1 - x does
    outside_caps = float(betainc(0.5, half, (1 - delta) ** 2))
    in_caps = 1 - outside_caps if outside_caps < 0.5 else float(betainc(half, 0.5, delta * (2 - delta)))
    return in_caps / 2 if delta <= 1 else 1 - in_caps / 2
