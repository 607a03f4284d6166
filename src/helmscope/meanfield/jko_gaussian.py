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
from functools import cached_property
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
    found = steps.step(gaussian.covariance, tau)
    mean = c + steps.solved(m - c, tau)
    distance = float(found.squared_distance + (mean - m).square().sum()) ** 0.5
    return GaussianStep(Gaussian(mean, found.covariance), distance)


@dataclass(frozen=True, eq=False)
class QuadraticSteps:
    """Steps of any size for one energy nu Ent + int V: the eigenvalues and eigenvectors of the stiffness of V, which
    all of them need, and ``nu``.

    >>> QuadraticSteps.of(torch.tensor([[1.5]]).double(), 0.4).solved(torch.ones(1).double(), 2.0)
    tensor([0.2500], dtype=torch.float64)
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
    def step(self, old: Float[Tensor, "d d"], tau: float) -> CovarianceStep:
        """The step of size ``tau`` from the covariance ``old``.

        >>> steps = QuadraticSteps.of(torch.tensor([[1.5]]).double(), 0.4)
        >>> steps.step(torch.tensor([[1.69]]).double(), 0.1).covariance.sqrt()
        tensor([[1.1604]], dtype=torch.float64)
        """
        stretched, shift = self._stretched(tau), 2 * tau * self.nu
        scale, along = stretched.rsqrt(), self.vectors.mT @ old @ self.vectors
        excess, axes = torch.linalg.eigh(scale.unsqueeze(-1) * along * scale)
        excess = excess.clamp(min=0)
        spread = (excess + shift + (excess * (excess + 2 * shift)).sqrt()) / 2
        return CovarianceStep(self, tau, along, scale, excess, axes, spread)

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


@dataclass(frozen=True, eq=False)
class CovarianceStep:
    """The covariance C' = N Y N after a step from C, N = M^{-1/2}, in the coordinates of the eigenvectors of K: ``old``
    is C, ``scale`` the diagonal of N, ``excess`` and ``axes`` the eigenvalues and eigenvectors of B = N C N, and
    ``spread`` the eigenvalues of Y, y = (b + 2 e + (b (b + 4 e))^{1/2}) / 2 with e = tau nu.

    >>> step = QuadraticSteps.of(torch.zeros(1, 1).double(), 1.0).step(torch.ones(1, 1).double(), 2.0)
    >>> step.covariance, step.squared_distance  # s' = (1 + 3) / 2
    (tensor([[4.]], dtype=torch.float64), 1.0)
    """

    steps: QuadraticSteps
    tau: float
    old: Float[Tensor, "d d"]
    scale: Float[Tensor, " d"]
    excess: Float[Tensor, " d"]
    axes: Float[Tensor, "d d"]
    spread: Float[Tensor, " d"]

    @cached_property
    @full_precision
    def covariance(self) -> Float[Tensor, "d d"]:
        """C'."""
        factor = self.steps.vectors @ (self.scale.unsqueeze(-1) * self.axes)
        new: Tensor = (factor * self.spread) @ factor.mT
        return (new + new.mT) / 2

    @property
    def log_det(self) -> float:
        """log det C'.

        >>> QuadraticSteps.of(torch.zeros(1, 1).double(), 0.0).step(torch.ones(1, 1).double(), 2.0).log_det
        0.0
        """
        return float(self.spread.log().sum() + 2 * self.scale.log().sum())

    @cached_property
    @full_precision
    def squared_distance(self) -> float:
        """The squared W2 between laws of the same mean with C and C',

        tr((A - I) C' (A - I)) = tau^2 (tr(K C' K) - 2 nu tr K + nu^2 tr C'^{-1}).
        """
        values, nu, squares = self.steps.values, self.steps.nu, self.axes.square()
        found = (values * self.scale).square() @ squares @ self.spread
        if nu > 0:
            found = found - 2 * nu * values.sum() + nu**2 * (self.scale**-2 @ (squares / self.spread)).sum()
        return float(self.tau**2 * found.clamp(min=0))
