"""How fast two flows of self-attention can separate."""

from __future__ import annotations

import math

from helmscope.types import check_real


def w2_growth_bound(*, beta: float, value_norm: float = 1.0) -> float:
    """An L with W2(mu_t, nu_t) <= e^(L t) W2(mu_0, nu_0) for the flow of SA with Q = K = I on any sphere, geodesic W2:

        L = |V| (max over r in [0, 1] of [beta (1 - r^2) + r]  +  (1 + beta) e^beta).

    The first term bounds the covariant derivative of X[mu](x) = P_x V m(x), which is P (beta V Cov_P) P - <x, V m> P,
    with r = |m| and |Cov_P| <= 1 - r^2. The second bounds the change of X when the points z_j of mu move by d_j:
    |V| sum_j p_j |d_j| (1 + beta |z_j - m|), by Cauchy-Schwarz and n p_j <= e^(2 beta). Gronwall's lemma, applied to an
    optimal coupling, gives the bound. ``value_norm`` is the spectral norm of V. For beta >= 0.

    >>> w2_growth_bound(beta=0.0)
    2.0
    """
    beta = check_real("beta", beta, at_least=0)
    value_norm = check_real("value_norm", value_norm, at_least=0)
    along_state = 1.0 if beta <= 0.5 else beta + 1 / (4 * beta)
    return value_norm * (along_state + (1 + beta) * math.exp(beta))
