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
from helmscope.transport.gaussian import gaussian_w2
from helmscope.types import HelmscopeError, check_real, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class GaussianStep(NamedTuple):
    """The law after a step, and its distance W2 from the law before.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> gaussian_jko_step(one[0], one, stiffness=one, nu=1.0, tau=1.0).distance  # only the mean moves, by 1/2
    0.5...
    """

    mean: Float[Tensor, " d"]
    covariance: Float[Tensor, "d d"]
    distance: float


@full_precision
def gaussian_jko_step(
    mean: Float[Tensor, " d"],
    covariance: Float[Tensor, "d d"],
    *,
    stiffness: Float[Tensor, "d d"],
    nu: float,
    tau: float,
    center: Float[Tensor, " d"] | None = None,
) -> GaussianStep:
    """One step of size ``tau`` for F = nu Ent + int V, V = <x - center, stiffness (x - center)> / 2, from N(mean,
    covariance), in float64.

    ``stiffness`` is symmetric and need not commute with ``covariance``, which may be singular. It may have negative
    eigenvalues k as long as 1 + k tau > 0. Raises ``HelmscopeError`` otherwise, and for nu < 0 or tau <= 0.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> step = gaussian_jko_step(2 * one[0], 1.69 * one, stiffness=1.5 * one, nu=0.4, tau=0.1)
    >>> step.mean.item(), step.covariance.sqrt().item()
    (1.739130434782608..., 1.1604092159529...)
    """
    nu, tau = check_real("nu", nu, at_least=0), check_real("tau", tau, above=0)
    m = _check("mean", mean, ndim=1)
    c = torch.zeros_like(m) if center is None else _check("center", center, ndim=1, size=len(m))
    old = _check("covariance", covariance, ndim=2, size=len(m))
    matrix = tau * _check("stiffness", stiffness, ndim=2, size=len(m))
    matrix = matrix + torch.eye(len(m), dtype=torch.float64, device="cpu")
    values, vectors = torch.linalg.eigh(matrix)
    if not bool((values > 0).all()):
        raise HelmscopeError(
            f"tau is {tau:g}, but with the eigenvalue {float(values.min() - 1) / tau:.3g} of stiffness it must be "
            f"below {-tau / float(values.min() - 1):.3g}, or the step has no minimum"
        )
    if not bool((torch.linalg.eigvalsh(old) >= -1e-12 * old.abs().max()).all()):
        raise HelmscopeError("covariance has a negative eigenvalue, but a covariance must have none")
    root = (vectors / values.sqrt()) @ vectors.mT  # M^(-1/2)
    excess, axes = torch.linalg.eigh(root @ old @ root)
    excess = excess.clamp(min=0)  # S - 2 tau nu
    spread = (excess + 2 * tau * nu + (excess * (excess + 4 * tau * nu)).sqrt()) / 2
    new = root @ (axes * spread) @ axes.mT @ root
    new = (new + new.mT) / 2
    new_mean = c + root @ (root @ (m - c))
    return GaussianStep(new_mean, new, float(gaussian_w2(m, old, new_mean, new)))


def _check(name: str, value: object, *, ndim: int, size: int | None = None) -> Tensor:
    if not isinstance(value, torch.Tensor) or value.ndim != ndim or not bool(torch.isfinite(value).all()):
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be a finite tensor with {ndim} axes")
    wanted = (size if size is not None else len(value),) * ndim
    if tuple(value.shape) != wanted:
        raise HelmscopeError(f"{name} has shape {tuple(value.shape)}, but it must have {wanted}")
    value = value.detach().cpu().double()
    if ndim == 2 and not bool((value - value.mT).abs().max() <= 1e-12 * value.abs().max()):
        raise HelmscopeError(f"{name} is not symmetric, but it must be")
    return value
