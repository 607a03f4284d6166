"""Statistical power of a trial: how far from a bound the truth must be for a decision."""

from __future__ import annotations

import math

from scipy import optimize, special

from helmscope.types import HelmscopeError, check_integer, check_real


def detection_power(effect: float, n: int) -> float:
    """The probability that Student's 95 % interval from n normal replicates is entirely on the correct side of a bound,
    if the true mean is ``effect`` standard deviations of a replicate away from it: P(T > t), with T noncentral t with
    n - 1 degrees of freedom and noncentrality effect sqrt n, and t the .975 quantile of Student's t.

    For effect 0 it is the probability of a false verdict, 2.5 % on each side. Exact for one bound; a second bound
    matters only if it is closer than the width of the interval. Raises ``HelmscopeError`` if effect < 0 or n < 2.

    >>> round(detection_power(0.0, n=32), 6), round(detection_power(0.6, n=32), 3)
    (0.025, 0.908)
    """
    n = check_integer("n", n, at_least=2)
    effect = check_real("effect", effect, at_least=0)
    return 1.0 - float(special.nctdtr(n - 1, effect * math.sqrt(n), -special.stdtrit(n - 1, 0.025)))


def minimum_detectable_effect(n: int, *, power: float = 0.9) -> float:
    """The smallest effect, in standard deviations of a replicate, that n replicates detect with probability ``power``.

    Raises ``HelmscopeError`` unless .025 < power < 1 and n >= 2.

    >>> round(minimum_detectable_effect(32), 3)
    0.592
    """
    n = check_integer("n", n, at_least=2)
    if not 0.025 < check_real("power", power) < 1:
        raise HelmscopeError(f"power is {power:g}, but it must be between 0.025 and 1")
    upper = 1.0
    while detection_power(upper, n) < power:
        upper *= 2.0
    return float(optimize.brentq(lambda effect: detection_power(effect, n) - power, 0.0, upper, xtol=1e-12))
