"""How long two clusters last before they merge (source 001).

Two clusters of n/2 coinciding tokens each, g the inner product of their places, are two tokens with the weight 1/2
each: the equiangular flow of n = 2, whatever the number of tokens,

    SA    g' = 2 e^{b g} (1 - g^2) / (e^b + e^{b g})
    USA   g' = e^{b g} (1 - g^2)                                            b = beta.
"""

from __future__ import annotations

import math

from helmscope.theory.equiangular import EquiangularFlow, hitting_time, isotropic_flow
from helmscope.types import HelmscopeError, real_number


def metastable_time(field: EquiangularFlow, *, gamma0: float, gamma1: float = 0.999) -> float:
    """Time in which the inner product of two equal clusters rises from gamma0 to gamma1, -1 < gamma0 <= gamma1 < 1.

    In closed form, with Ei and E1 (``hitting_time`` of two tokens); refuses a time that leaves float64.

    >>> from helmscope.fields.attention import SA
    >>> metastable_time(SA(beta=9.0), gamma0=0.0)
    466.71065291002...
    """
    isotropic_flow(field)
    gamma0, gamma1 = real_number("gamma0", gamma0), real_number("gamma1", gamma1)
    if not -1 < gamma0 <= gamma1 < 1:
        raise HelmscopeError(f"gamma0 is {gamma0:g} and gamma1 {gamma1:g}, but -1 < gamma0 <= gamma1 < 1 must hold")
    return hitting_time(field, n=2, delta=1 - gamma1, gamma0=gamma0)


def metastable_time_asymptotic(field: EquiangularFlow, *, gamma0: float) -> float:
    """What ``metastable_time`` tends to as beta grows, whatever gamma1 > gamma0:

        SA    e^{b (1 - gamma0)} / (2 b (1 - gamma0^2))
        USA   e^{-b gamma0} / (b (1 - gamma0^2)).

    The relative error is O(1/beta). -1 < gamma0 < 1 and beta > 0; refuses a time that leaves float64.

    >>> from helmscope.fields.attention import SA
    >>> metastable_time_asymptotic(SA(beta=1.0), gamma0=0.0) == math.e / 2
    True
    """
    beta, normalized = isotropic_flow(field)
    beta = real_number("beta", beta, above=0)
    gamma0 = real_number("gamma0", gamma0)
    if not -1 < gamma0 < 1:
        raise HelmscopeError(f"gamma0 is {gamma0:g}, but it must lie strictly between -1 and 1")
    exponent = beta * (1 - gamma0) if normalized else -beta * gamma0
    if exponent > 700:
        raise HelmscopeError(
            f"beta is {beta:g} and gamma0 is {gamma0:g}, but times of order e^({exponent:g}) leave float64: lower beta"
        )
    return math.exp(exponent) / ((2 if normalized else 1) * beta * (1 - gamma0**2))
