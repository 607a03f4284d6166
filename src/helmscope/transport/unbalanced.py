"""Relaxed marginals: transport between clouds of different masses, where creating or destroying mass has a price.

    min over pi >= 0 of  <pi, c> + epsilon KL(pi | a b^T) + rho KL(pi 1 | a) + rho KL(pi^T 1 | b),

KL(r | a) = sum_i r_i log(r_i / a_i) - r_i + a_i, with the dual [Chizat, Peyre, Schmitzer & Vialard 2018,
arXiv:1607.05816]

    max over f, g of  <a, phi(f)> + <b, phi(g)> - epsilon sum_ij a_i b_j (e^{(f_i + g_j - c_ij) / epsilon} - 1),

phi(f) = rho (1 - e^{-f / rho}). At the optimum the marginals are a e^{-f / rho} and b e^{-g / rho}, and a Sinkhorn
update is the balanced one times rho / (rho + epsilon). rho = infinity is balanced transport, phi(f) = f.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def damping(rho: float, epsilon: float) -> float:
    """rho / (rho + epsilon): the factor of an update.

    >>> damping(3.0, 1.0), damping(math.inf, 1.0)
    (0.75, 1.0)
    """
    return 1 / (1 + epsilon / rho)


def conjugate(f: Float[Tensor, " n"], rho: float) -> Float[Tensor, " n"]:
    """phi(f) = rho (1 - e^{-f / rho}), and f for rho = infinity.

    >>> conjugate(torch.tensor([1.0]), math.inf), conjugate(torch.tensor([1.0]), 1.0)
    (tensor([1.]), tensor([0.6321]))
    """
    return f if math.isinf(rho) else -rho * torch.expm1(-f / rho)


def relaxed_marginal(f: Float[Tensor, " n"], rho: float) -> Float[Tensor, " n"]:
    """e^{-f / rho}: the optimal marginal divided by the mass of each point; 1 for rho = infinity.

    >>> relaxed_marginal(torch.tensor([0.0, 1.0]), 1.0)
    tensor([1.0000, 0.3679])
    """
    return torch.exp(-f / rho)


def relative_entropy(r: Float[Tensor, " n"], a: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """KL(r | a) = sum_i r_i log(r_i / a_i) - r_i + a_i; points of mass 0 contribute nothing.

    >>> relative_entropy(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    tensor(0.3863)
    """
    ratio = torch.where(a > 0, r / a.clamp(min=torch.finfo(a.dtype).tiny), 1.0)
    terms: Tensor = torch.special.xlogy(r, ratio) - r + a
    return terms.sum()


def best_translation(f: Tensor, g: Tensor, a: Tensor, b: Tensor, rho: float) -> float:
    """The t for which (f + t, g - t) has the largest dual value: t = rho / 2 log(<a, e^{-f/rho}> / <b, e^{-g/rho}>).

    The plan does not depend on t, and plain updates approach it only at the rate (rho / (rho + epsilon))^2 [Sejourne,
    Vialard & Peyre 2022, arXiv:2201.00730].

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> round(best_translation(zero, zero, math.e * one, one, 2.0), 6)
    1.0
    """
    log_masses = [torch.logsumexp(log_mass, -1) for log_mass in (a.log() - f / rho, b.log() - g / rho)]
    return rho / 2 * float(log_masses[0] - log_masses[1])
