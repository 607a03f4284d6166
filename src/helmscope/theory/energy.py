"""The interaction energy E_beta[mu] = (1/(2 beta)) int int e^{beta <x, y>} dmu dmu and its extremes (source 001).

On probability measures over S^(d-1) and for beta > 0, the uniform measure alone attains the least energy and the point
masses the greatest (Geshkovski, Letrouit, Polyanskiy & Rigollet 2023, arXiv:2312.10794, Proposition 3.4).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.theory.equiangular import check_gamma
from helmscope.types import HelmscopeError, real_number, whole_number

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def energy_min(*, beta: float, dim: int) -> float:
    """Energy of the uniform measure on S^(dim-1), below that of every other measure,

        Gamma(d/2) (2/b)^{d/2-1} I_{d/2-1}(b) / (2b) = (1/(2b)) sum_k (b^2/4)^k / (k! (d/2)_k),   b = beta > 0, d >= 2.

    The sum has positive terms only and serves every d and b; a few hundred terms reach the end of float64, beyond which
    it refuses. n tokens stay above this value.

    >>> energy_min(beta=1.0, dim=3)  # sinh(1) / 2
    0.58760059682190...
    """
    beta = real_number("beta", beta, above=0)
    half = whole_number("dim", dim, at_least=2) / 2
    total = term = 1.0
    k = 0
    while term > 1e-17 * total:
        term *= beta / (2 * (k + 1)) * (beta / (2 * (half + k)))
        total += term
        k += 1
    return _finite(total / (2 * beta), beta)


def energy_max(*, beta: float) -> float:
    """Energy of a point mass, e^b/(2b), above that of every other measure; b = beta > 0, refused where it overflows.

    >>> energy_max(beta=1.0) == math.e / 2
    True
    """
    beta = real_number("beta", beta, above=0)
    return _finite(_exp(beta) / (2 * beta), beta)


def equiangular_energy(gamma: float | Float[Tensor, "*batch"], *, beta: float, n: int) -> Float[Tensor, "*batch"]:
    """Energy of n tokens with <x_i, x_j> = gamma for all i != j, in float64: (e^b + (n-1) e^{b gamma}) / (2 b n).

    b = beta > 0, n >= 2 and -1/(n-1) <= gamma <= 1; refused where it overflows.

    >>> equiangular_energy(1.0, beta=1.0, n=32).item() == math.e / 2
    True
    """
    beta = real_number("beta", beta, above=0)
    n = whole_number("n", n, at_least=2)
    top = energy_max(beta=beta)
    return top * (1 + (n - 1) * torch.exp(beta * (check_gamma(gamma, n=n) - 1))) / n


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _finite(energy: float, beta: float) -> float:
    if math.isinf(energy):
        raise HelmscopeError(f"beta is {beta:g}, but at this beta the energy is not finite in float64: lower beta")
    return energy
