"""Steps of Jordan, Kinderlehrer and Otto between Gaussian laws on R^d, in closed form [Helmholtz Transformer, no. 10].

For V(x) = <x - c, K (x - c)> / 2 the step from N(m, C) is a Gaussian N(m', C'). With M = I + tau K and A = M - tau nu
C'^{-1} the optimal map from the new law to the old one, the minimum satisfies

    M (m' - c) = m - c,     A C' A = C,     that is     Y + (tau nu)^2 Y^{-1} = 2 tau nu I + M^{-1/2} C M^{-1/2} =: S

for Y = M^{1/2} C' M^{1/2}. Y commutes with S, and A > 0 selects the larger root: Y = (S + (S^2 - 4 tau^2 nu^2)^{1/2}) /
2. In one dimension s' = (s + (s^2 + 4 nu tau (1 + k tau))^{1/2}) / (2 (1 + k tau)). The fixed point is C = nu K^{-1},
the law e^{-V / nu}, for every tau.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.gaussian import Gaussian, check_gaussian, check_symmetric, check_vector
from helmscope.types import HelmscopeError, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class GaussianStep(NamedTuple):
    """The law after a step, and its distance W2 from the law before.

    >>> one = torch.ones(1, 1)
    >>> gaussian_jko_step(Gaussian(one[0], one), stiffness=one, nu=1.0, tau=1.0).distance  # only the mean moves, by 1/2
    0.5...
    """

    gaussian: Gaussian
    distance: float


@full_precision
def gaussian_jko_step(
    gaussian: Gaussian,
    *,
    stiffness: Float[Tensor, "d d"],
    nu: float,
    tau: float,
    center: Float[Tensor, " d"] | None = None,
) -> GaussianStep:
    """One step of size ``tau`` for F = nu Ent + int V, V = <x - center, stiffness (x - center)> / 2, from a Gaussian.

    ``stiffness`` is symmetric and need not commute with the covariance. It may have negative eigenvalues k as long as
    1 + k tau > 0. Raises ``HelmscopeError`` otherwise, and for nu < 0 or tau <= 0.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> law = gaussian_jko_step(Gaussian(2 * one[0], 1.69 * one), stiffness=1.5 * one, nu=0.4, tau=0.1).gaussian
    >>> law.mean.item(), law.covariance.sqrt().item()
    (1.739130434782608..., 1.1604092159529...)
    """
    gaussian = check_gaussian("gaussian", gaussian)
    nu, tau = check_real("nu", nu, at_least=0), check_real("tau", tau, above=0)
    m, old = gaussian.mean, gaussian.covariance
    c = torch.zeros_like(m) if center is None else check_vector("center", center, len(m))
    matrix = tau * check_symmetric("stiffness", stiffness, len(m))
    matrix = matrix + torch.eye(len(m), dtype=torch.float64, device="cpu")
    values, vectors = torch.linalg.eigh(matrix)
    if not bool((values > 0).all()):
        raise HelmscopeError(
            f"tau is {tau:g}, but with the eigenvalue {float(values.min() - 1) / tau:.3g} of stiffness it must be "
            f"below {-tau / float(values.min() - 1):.3g}, or the step has no minimum"
        )
    root = (vectors / values.sqrt()) @ vectors.mT  # M^(-1/2)
    excess, axes = torch.linalg.eigh(root @ old @ root)
    excess = excess.clamp(min=0)  # S - 2 tau nu
    spread = (excess + 2 * tau * nu + (excess * (excess + 4 * tau * nu)).sqrt()) / 2
    new = root @ (axes * spread) @ axes.mT @ root
    after = Gaussian(c + root @ (root @ (m - c)), (new + new.mT) / 2)
    return GaussianStep(after, gaussian.w2(after))
