"""How perturbations of the uniform density grow under attention with noise, in closed form.

With Q, K, V multiples of I the equation commutes with rotations, so harmonics of each degree grow at one rate. For
logits beta <x, y>, V = c I and noise M = nu I the drift is c grad_S G / Z (SA) or c grad_S G (USA), with

    Z = int e^{beta <x, y>} rho(dy),   G = Z / beta,   e^{beta <x, y>} = sum_k N(d, k) mu_k P_k(<x, y>).

At rho = 1 + eps Y_k, relative to the uniform density, Z = mu_0 + eps mu_k Y_k, and -Lap_S Y_k = k (k + d - 2) Y_k, so
to first order in eps, d_t eps = r_k eps with

    SA    r_k = k (k + d - 2) (c lambda_k / beta - nu),   lambda_k = mu_k / mu_0 = I_{k+d/2-1}(beta) / I_{d/2-1}(beta),
    USA   r_k = k (k + d - 2) (c mu_k / beta - nu),       mu_k = Gamma(d/2) (2 / beta)^{d/2-1} I_{k+d/2-1}(beta).

The uniform density is stable above nu_c, the largest of c lambda_k / beta (c mu_k / beta for USA) over k >= 1. For
c > 0 that is k = 1. For beta = 0, where the drift is c P_x mean, it is c / d, and all other degrees are damped only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import SA, USA
from helmscope.theory.energy import min_energy
from helmscope.types import HelmscopeError, check_integer, check_memory, check_real, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def growth_rates(field: SA | USA, *, dim: int, nu: float = 0.0, degree: int = 16) -> Float[Tensor, " degree_plus_1"]:
    """The growth rates r_0, ..., r_degree of harmonics of degree k around the uniform density of S^(dim-1):

        SA    r_k = k (k + d - 2) (c lambda_k / beta - nu),   lambda_k = I_{k+d/2-1}(beta) / I_{d/2-1}(beta),
        USA   r_k = k (k + d - 2) (c mu_k / beta - nu),       mu_k = Gamma(d/2) (2 / beta)^{d/2-1} I_{k+d/2-1}(beta),

    with V = c I; at beta = 0, r_1 = (d - 1) (c / d - nu), and r_k = -nu k (k + d - 2) for all others.

    Accurate for every beta and dim. Raises ``HelmscopeError`` unless ``field`` is SA or USA with multiples of I for
    query_key and value, dim >= 2, nu >= 0 and degree >= 0, and where e^beta overflows under USA.

    >>> growth_rates(SA(beta=4.0), dim=3, nu=0.1, degree=3)
    tensor([ 0.0000,  0.1753,  0.0555, -0.5867], dtype=torch.float64)
    """
    nu = check_real("nu", nu, at_least=0)
    dim, degree = check_integer("dim", dim, at_least=2), check_integer("degree", degree, at_least=0)
    k = torch.arange(degree + 1, dtype=torch.float64, device="cpu")
    return k * (k + dim - 2) * (_drift_strengths(field, dim, degree) - nu)


def critical_nu(field: SA | USA, *, dim: int) -> float:
    """Critical noise nu_c, above which the uniform density of S^(dim-1) is stable; 0 if it is stable without noise, as
    for V = -I.

    Raises ``HelmscopeError`` as ``growth_rates`` does.

    >>> critical_nu(SA(beta=4.0), dim=3)  # (coth 4 - 1/4) / 4
    0.18766778760042...
    """
    dim = check_integer("dim", dim, at_least=2)
    return max(0.0, float(_drift_strengths(field, dim, 2)[1:].max()))  # |mu_k| decreases: only its sign may favor k = 2


def _drift_strengths(field: object, dim: int, degree: int) -> Float[Tensor, " degree_plus_1"]:
    """c lambda_k / beta (SA) or c mu_k / beta (USA), the nu at which degree k neither grows nor decays."""
    beta, value, normalized = check_isotropic_attention(field, dim)
    if beta == 0:
        strengths = torch.zeros(degree + 1, dtype=torch.float64, device="cpu")
        strengths[1:2] = value / dim
        return strengths
    ratios = bessel_ratios(abs(beta), degree, dim=dim)
    if beta < 0:
        ratios[1::2] *= -1
    mean = 1.0 if normalized else 2 * abs(beta) * min_energy(beta=abs(beta), dim=dim)  # mu_0
    return value * mean / beta * ratios


def check_isotropic_attention(field: object, dim: int) -> tuple[float, float, bool]:
    """(beta, c, whether it is SA) of attention with the logits beta <x, y> and V = c I on R^dim; else
    ``HelmscopeError``.

    >>> check_isotropic_attention(SA(beta=4.0, value=-torch.eye(3)), 3)
    (4.0, -1.0, True)
    """
    beta, value = getattr(field, "unit_beta", None), getattr(field, "value_scale", None)
    if not isinstance(field, SA | USA) or not field.exchangeable or beta is None or value is None:
        raise HelmscopeError(
            f"field is {short_repr(field)}, but it must be SA or USA with a number for beta, multiples of I for "
            "query_key and value, and no mask, bias or positions"
        )
    field.check_size(torch.empty((1, dim), device="meta"))
    return beta, value, isinstance(field, SA)


def bessel_ratios(beta: float, degree: int, *, dim: int) -> Float[Tensor, " degree_plus_1"]:
    """lambda_k = I_{k+l}(beta) / I_l(beta), l = dim/2 - 1, for k = 0..degree and beta >= 0, in float64.

    They are products of the ratios of neighbors, r_k = beta / (2k + d - 2 + beta r_{k+1}), computed downwards from a
    degree where the start r = 0 no longer matters: no Bessel function overflows.

    >>> bessel_ratios(2.0, 2, dim=2)[1]  # I_1(2) / I_0(2)
    tensor(0.6978, dtype=torch.float64)
    """
    beta, dim = check_real("beta", beta, at_least=0), check_integer("dim", dim, at_least=2)
    degree = check_integer("degree", degree, at_least=0)
    # beyond beta every step damps an error by r^2 < 1/4, and below it the series of e^(beta s) has its bulk
    top = max(degree, math.ceil(beta + 40 * math.sqrt(beta) + 500)) + 60
    check_memory(f"beta is {beta:g} and degree is {degree}", top)
    ratio, ratios = 0.0, [1.0] * (degree + 1)
    for k in range(top, 0, -1):
        ratio = beta / (2 * k + dim - 2 + beta * ratio)
        if k <= degree:
            ratios[k] = ratio
    return torch.tensor(ratios, dtype=torch.float64, device="cpu").cumprod(0)
