"""The lifetime of two clusters before they merge [Geshkovski et al. 2023].

Two clusters of n/2 coinciding tokens each, at positions with inner product g, move like two tokens of weight 1/2 each.
For any number of tokens this is the equiangular flow with n = 2,

    SA    g' = 2 e^{b g} (1 - g^2) / (e^b + e^{b g})
    USA   g' = e^{b g} (1 - g^2)                                            b = beta.
"""

from __future__ import annotations

import math

from helmscope.theory.equiangular import EquiangularFlow, hitting_time, isotropic_flow
from helmscope.types import HelmscopeError, check_real


def metastable_time(field: EquiangularFlow, *, gamma0: float, gamma1: float = 0.999) -> float:
    """Time in which the inner product of two equal clusters rises from gamma0 to gamma1, -1 < gamma0 <= gamma1 < 1.

    In closed form with Ei and E1 (``hitting_time`` of two tokens); raises ``HelmscopeError`` where the time overflows.

    >>> from helmscope.fields.attention import SA
    >>> metastable_time(SA(beta=9.0), gamma0=0.0)
    466.71065291002...
    """
    isotropic_flow(field)
    gamma0, gamma1 = check_real("gamma0", gamma0), check_real("gamma1", gamma1)
    if not -1 < gamma0 <= gamma1 < 1:
        raise HelmscopeError(f"gamma0 is {gamma0:g} and gamma1 is {gamma1:g}, but -1 < gamma0 <= gamma1 < 1 must hold")
    return hitting_time(field, n=2, delta=1 - gamma1, gamma0=gamma0)


def metastable_time_asymptotic(field: EquiangularFlow, *, gamma0: float) -> float:
    """Asymptotic form of ``metastable_time`` for large beta, the same for every gamma1 > gamma0:

        SA    e^{b (1 - gamma0)} / (2 b (1 - gamma0^2))
        USA   e^{-b gamma0} / (b (1 - gamma0^2)).

    The relative error is O(1/beta). Requires -1 < gamma0 < 1 and beta > 0; raises ``HelmscopeError`` where the time
    overflows.

    >>> from helmscope.fields.attention import SA
    >>> metastable_time_asymptotic(SA(beta=1.0), gamma0=0.0) == math.e / 2
    True
    """
    beta, normalized = isotropic_flow(field)
    beta = check_real("beta", beta, above=0)
    gamma0 = check_real("gamma0", gamma0)
    if not -1 < gamma0 < 1:
        raise HelmscopeError(f"gamma0 is {gamma0:g}, but it must be strictly between -1 and 1")
    exponent = beta * (1 - gamma0) if normalized else -beta * gamma0
    if exponent > 700:
        raise HelmscopeError(
            f"beta is {beta:g} and gamma0 is {gamma0:g}, but times of order e^({exponent:g}) overflow: lower beta"
        )
    return math.exp(exponent) / ((2 if normalized else 1) * beta * (1 - gamma0**2))
