"""Steps of Jordan, Kinderlehrer and Otto between Gaussian laws on R^d, in closed form [Helmholtz Transformer, no. 10].

For V(x) = <x - c, K (x - c)> / 2 the step from N(m, C) is a Gaussian N(m', C'). With M = I + tau K and A = M - tau nu
C'^{-1} the optimal map from the new law to the old one, the minimum satisfies

    M (m' - c) = m - c,     A C' A = C,     that is     Y + (tau nu)^2 Y^{-1} = 2 tau nu I + M^{-1/2} C M^{-1/2} =: S

for Y = M^{1/2} C' M^{1/2}. Y commutes with S, and A > 0 selects the larger root: Y = (S + (S^2 - 4 tau^2 nu^2)^{1/2}) /
2. In one dimension s' = (s + (s^2 + 4 nu tau (1 + k tau))^{1/2}) / (2 (1 + k tau)). The fixed point is C = nu K^{-1},
the law e^{-V / nu}, for every tau.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    m = gaussian.mean
    c = torch.zeros_like(m) if center is None else check_vector("center", center, len(m))
    steps = QuadraticSteps.of(check_symmetric("stiffness", stiffness, len(m)), nu)
    covariance, squared = steps.covariance(gaussian.covariance, tau)
    mean = c + steps.solved(m - c, tau)
    distance = float(squared + (mean - m).square().sum()) ** 0.5
    return GaussianStep(Gaussian(mean, covariance), distance)


@dataclass(frozen=True, eq=False)
class QuadraticSteps:
    """Steps of any size for one energy nu Ent + int V: the eigenvalues and eigenvectors of the stiffness of V, which
    all of them need, and ``nu``.

    >>> steps = QuadraticSteps.of(torch.tensor([[1.5]]).double(), 0.4)
    >>> steps.covariance(torch.tensor([[1.69]]).double(), 0.1)[0].sqrt()
    tensor([[1.1604]], dtype=torch.float64)
    """

    values: Float[Tensor, " d"]
    vectors: Float[Tensor, "d d"]
    nu: float

    @classmethod
    @full_precision
    def of(cls, stiffness: Float[Tensor, "d d"], nu: float) -> QuadraticSteps:
        """The steps for a symmetric stiffness in float64."""
        values, vectors = torch.linalg.eigh(stiffness)
        return cls(values, vectors, nu)

    @full_precision
    def solved(self, vector: Float[Tensor, " d"], tau: float) -> Float[Tensor, " d"]:
        """M^{-1} times a vector."""
        return self.vectors @ ((self.vectors.mT @ vector) / self._stretched(tau))

    @full_precision
    def covariance(self, old: Float[Tensor, "d d"], tau: float) -> tuple[Float[Tensor, "d d"], float]:
        """C' after a step from the covariance ``old``, and the squared W2 between laws of the same mean with both,

        tr((A - I) C' (A - I)) = tau^2 (tr(K C' K) - 2 nu tr K + nu^2 tr C'^{-1}).
        """
        stretched, nu = self._stretched(tau), self.nu
        scale = stretched.rsqrt().unsqueeze(-1)  # M^(-1/2) along the eigenvectors of K, in whose coordinates all is
        excess, axes = torch.linalg.eigh(scale * (self.vectors.mT @ old @ self.vectors) * scale.mT)
        excess = excess.clamp(min=0)  # S - 2 tau nu
        spread = (excess + 2 * tau * nu + (excess * (excess + 4 * tau * nu)).sqrt()) / 2
        factor = self.vectors @ (scale * axes)
        new = (factor * spread) @ factor.mT
        new = (new + new.mT) / 2
        squares = axes.square()
        squared = (self.values.square() / stretched) @ squares @ spread
        if nu > 0:
            squared = squared - 2 * nu * self.values.sum() + nu**2 * (stretched @ (squares / spread)).sum()
        return new, float(tau**2 * squared.clamp(min=0))

    def _stretched(self, tau: float) -> Float[Tensor, " d"]:
        """The eigenvalues of M; raises ``HelmscopeError`` unless all are above 0."""
        stretched = 1 + tau * self.values
        if not bool((stretched > 0).all()):
            least = float(self.values.min())
            raise HelmscopeError(
                f"tau is {tau:g}, but with the eigenvalue {least:.3g} of stiffness it must be below {-1 / least:.3g}, "
                "or the step has no minimum"
            )
        return stretched
