"""How far from a bound the truth must lie for a trial to decide."""

from __future__ import annotations

import math

from scipy import optimize, special

from helmscope.types import HelmscopeError, real_number, whole_number


def detection_power(effect: float, n: int) -> float:
    """The chance that Student's 95 % interval from n normal replicates lies wholly on the true side of a bound, where
    the truth is ``effect`` standard deviations of a replicate away from it: P(T > t), T noncentral t with n - 1
    degrees and noncentrality effect sqrt n, t the .975 quantile of Student's t.

    At effect 0 it is the chance of a false verdict, 2.5 % on each side. Exact for one bound; a second one further away
    than the interval is wide changes nothing.

    >>> round(detection_power(0.0, n=32), 6), round(detection_power(0.6, n=32), 3)
    (0.025, 0.908)
    """
    n = whole_number("n", n, at_least=2)
    effect = real_number("effect", effect, at_least=0)
    return 1.0 - float(special.nctdtr(n - 1, effect * math.sqrt(n), -special.stdtrit(n - 1, 0.025)))


def decisive_effect(n: int, *, chance: float = 0.9) -> float:
    """The least effect, in standard deviations of a replicate, that n replicates decide with this chance.

    A chance outside (.025, 1) is refused.

    >>> round(decisive_effect(32), 3)
    0.592
    """
    n = whole_number("n", n, at_least=2)
    if not 0.025 < real_number("chance", chance) < 1:
        raise HelmscopeError(f"chance is {chance:g}, but it must lie between 0.025 and 1")
    far = 1.0
    while detection_power(far, n) < chance:
        far *= 2.0
    return float(optimize.brentq(lambda effect: detection_power(effect, n) - chance, 0.0, far, xtol=1e-12))
