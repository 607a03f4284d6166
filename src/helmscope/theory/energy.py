"""The interaction energy E_beta[mu] = (1/(2 beta)) int int e^{beta <x, y>} dmu dmu and its extrema [Geshkovski et al.
2023].

Among probability measures on S^(d-1), for beta > 0, the uniform measure is the unique minimizer and the point masses
are the maximizers (Geshkovski, Letrouit, Polyanskiy & Rigollet 2023, arXiv:2312.10794, Proposition 3.4).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.theory.equiangular import check_gamma
from helmscope.types import HelmscopeError, check_integer, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def min_energy(*, beta: float, dim: int) -> float:
    """Minimal energy over probability measures on S^(dim-1), that of the uniform measure:

        Gamma(d/2) (2/b)^{d/2-1} I_{d/2-1}(b) / (2b) = (1/(2b)) sum_k (b^2/4)^k / (k! (d/2)_k),   b = beta > 0, d >= 2.

    The series has only positive terms and is used for all d and b; a few hundred terms suffice up to the largest
    float64 number. Raises ``HelmscopeError`` where the energy overflows. The energy of n tokens is always larger.

    >>> min_energy(beta=1.0, dim=3)  # sinh(1) / 2
    0.58760059682190...
    """
    beta = check_real("beta", beta, above=0)
    half = check_integer("dim", dim, at_least=2) / 2
    total = term = 1.0
    k = 0
    while term > 1e-17 * total:
        term *= beta / (2 * (k + 1)) * (beta / (2 * (half + k)))
        total += term
        k += 1
    return _check_finite(total / (2 * beta), beta)


def max_energy(*, beta: float) -> float:
    """Maximal energy over probability measures on the sphere, that of a point mass: e^b / (2b), b = beta > 0.

    Raises ``HelmscopeError`` where the energy overflows.

    >>> max_energy(beta=1.0) == math.e / 2
    True
    """
    beta = check_real("beta", beta, above=0)
    return _check_finite(_exp_or_inf(beta) / (2 * beta), beta)


def equiangular_energy(gamma: float | Float[Tensor, "*batch"], *, beta: float, n: int) -> Float[Tensor, "*batch"]:
    """Energy of n tokens with <x_i, x_j> = gamma for all i != j, in float64: (e^b + (n-1) e^{b gamma}) / (2 b n).

    Requires b = beta > 0, n >= 2 and -1/(n-1) <= gamma <= 1; raises ``HelmscopeError`` where the energy overflows.

    >>> equiangular_energy(1.0, beta=1.0, n=32).item() == math.e / 2
    True
    """
    beta = check_real("beta", beta, above=0)
    n = check_integer("n", n, at_least=2)
    return max_energy(beta=beta) * (1 + (n - 1) * torch.exp(beta * (check_gamma(gamma, n=n) - 1))) / n


def _exp_or_inf(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _check_finite(energy: float, beta: float) -> float:
    if math.isinf(energy):
        raise HelmscopeError(f"beta is {beta:g}, but at this beta the energy is not finite in float64: lower beta")
    return energy
