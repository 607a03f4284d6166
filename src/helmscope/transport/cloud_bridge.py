"""The Schroedinger bridge between two clouds of weighted points, on S^(d-1) or in R^d, over Brownian motion.

With the transition density p_t of Brownian motion with the generator nu Lap, scale p_T to the masses a_i of x_i and b_j
of y_j: pi_ij = e^{f_i + g_j} p_T(x_i, y_j), the law of the two ends of the bridge. Then

    phi_t(x) = sum_j e^{g_j} p_(T-t)(x, y_j),    phihat_t(x) = sum_i e^{f_i} p_t(x_i, x),    rho_t = phi_t phihat_t,

the control is u_t = 2 nu grad log phi_t, in closed form, and given its ends the bridge is the Brownian bridge. From x
at time t it ends at y_j with probability proportional to e^{g_j} p_(T-t)(x, y_j).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.fields.field import StateSpace
from helmscope.fields.noise import IsotropicNoise
from helmscope.runs.bar import shows_progress
from helmscope.solve.simulation import Simulation
from helmscope.stats.intervals import mean_interval
from helmscope.transport.bridge import Bridge, check_ends, check_time, map_systems
from helmscope.transport.bridge_cost import cost_between_laws
from helmscope.transport.brownian import Brownian, FlatBrownian, SphereBrownian
from helmscope.transport.landing import sample_columns, simulate_landing
from helmscope.transport.scaling import Scaling, scale_to_marginals
from helmscope.types import HelmscopeError, check_integer, check_memory, check_real, pluralized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time
    from helmscope.fields.noise import Noise
    from helmscope.transport.clouds import Clouds
    from helmscope.types import Interval
    from helmscope.types.progress import ProgressOption

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class CloudBridge(Bridge):
    """The bridge between two clouds, returned by ``bridge_clouds``. Points without mass are left out.

    ``potentials`` are f and g. The target is a set of points, so log phi and the control are defined for t < horizon
    only, and the control grows like 1/(horizon - t).

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> bridge = bridge_clouds(x, -x, nu=0.5)
    >>> bridge
    CloudBridge(2 to 2 points, reference=SphereBrownian(nu=0.5), horizon=1.0)
    >>> bridge.control(x, 0.0).shape, bridge.ok
    (torch.Size([2, 2]), True)
    """

    clouds: Clouds
    reference_process: Brownian
    horizon: float
    potentials: tuple[Float[Tensor, " n"], Float[Tensor, " m"]]
    iterations: int
    marginal_error: float
    ok: bool
    max_iterations: int
    tol: float

    def __repr__(self) -> str:
        sizes = f"{len(self.clouds.x)} to {len(self.clouds.y)} points"
        return f"CloudBridge({sizes}, reference={self.reference_process!r}, horizon={self.horizon!r})"

    @property
    def space(self) -> StateSpace:
        """The sphere, or R^d."""
        return self.reference_process.space

    @property
    def nu(self) -> float:
        """The diffusivity."""
        return self.reference_process.nu

    @property
    def noise(self) -> Noise:
        """Isotropic noise, which on the sphere has the generator nu Lap."""
        return IsotropicNoise(self.nu)

    def check_size(self, x: Tensor) -> None:
        """Raise ``HelmscopeError`` unless the points have the dimension of the clouds."""
        dim = self.clouds.x.shape[-1]
        if x.shape[-1] != dim:
            raise HelmscopeError(f"x has dimension {x.shape[-1]}, but the bridge is between clouds of dimension {dim}")

    @cached_property
    def outcome(self) -> str:
        """How the solver ended, in words. If it did not converge, a value of nu horizon with which it does, found by
        doubling, is named; that repeats the computation.
        """
        if self.ok:
            return f"converged in {pluralized(self.iterations, 'iteration')}: marginal error {self.marginal_error:.2g}"
        factor = 2
        while factor < 2**20 and not self._fit(factor * self.horizon).converged:
            factor *= 2
        return (
            f"iteration limit reached after {pluralized(self.iterations, 'iteration')} with marginal error "
            f"{self.marginal_error:.2g}: raise max_iterations, or take nu * horizon >= "
            f"{factor * self.nu * self.horizon:.3g}"
        )

    def _fit(self, horizon: float) -> Scaling:
        return _fit(self.clouds, self.reference_process, horizon, self.tol, self.max_iterations, None)

    def log_potential(self, x: Float[Tensor, "*batch n d"], t: Time) -> Float[Tensor, "*batch n"]:
        """log phi_t(x), t < horizon."""
        return map_systems(lambda points, time: self._forward(points, time)[0], self, x, t)

    def control(self, x: Float[Tensor, "*batch n d"], t: Time) -> Float[Tensor, "*batch n d"]:
        """2 nu grad log phi_t(x), tangent on the sphere; t < horizon. In R^d it is (E[X_T | X_t = x] - x) / (T - t)."""
        return map_systems(lambda points, time: self._forward(points, time)[1], self, x, t)

    def _forward(self, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        """log phi_t and the control at points (n, d)."""
        return self.reference_process.log_sum(x, self.clouds.y, self.potentials[1], self.horizon - t)

    def log_density(self, x: Float[Tensor, "*batch n d"], t: Time) -> Float[Tensor, "*batch n"]:
        """log rho_t(x) = log phi_t + log phihat_t, 0 < t < horizon; with respect to surface area on the sphere.

        >>> x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        >>> bridge_clouds(x, x, nu=100.0).log_density(-x, 0.5)  # -log 2 pi
        tensor([-1.8379], dtype=torch.float64)
        """

        def at(points: Tensor, time: float) -> Tensor:
            check_real("t", time, above=0)
            hat = self.reference_process.log_sum(points, self.clouds.x, self.potentials[0], time)[0]
            return self._forward(points, time)[0] + hat

        return map_systems(at, self, x, t)

    def marginal(self, t: float, *, n: int, seed: int = 0) -> Float[Tensor, "n d"]:
        """n independent points of the bridge at time t in [0, horizon].

        The two ends are sampled from the plan, and the point between them from the Brownian bridge: exact in R^d, and
        by 24 steps of the pinned process on the sphere.
        """
        t, n = check_time(self, t, closed=True), check_integer("n", n, at_least=1)
        seed = check_integer("seed", seed, at_least=0, below=2**32)
        x, y = self.clouds.x, self.clouds.y
        generator = torch.Generator(x.device).manual_seed(seed)
        rows = torch.multinomial(self.clouds.a, n, replacement=True, generator=generator)
        ends = self._sample_ends(x[rows], 0.0, np.random.default_rng([seed, n]))
        return self.reference_process.pinned(x[rows], y[ends], t, self.horizon, generator)

    def _sample_ends(self, x: Tensor, t: float, source: np.random.Generator) -> Tensor:
        """The number of the point at which each particle ends that is at x at time t, sampled."""
        picked = []
        for part in torch.split(x, max(1, 2**20 // len(self.clouds.y))):
            logs = self.reference_process.log_density(part, self.clouds.y, self.horizon - t) + self.potentials[1]
            picked.append(sample_columns(logs, source))
        return torch.cat(picked)

    def cost(self, *, target_entropy: float | None = None) -> Interval:
        """E int |u|^2 / (4 nu) dt of the bridge between the laws that the clouds are independent samples of, with a
        95 % confidence interval for their sampling error (``bridge_cost``).

        It needs the entropy of the target: the points themselves have none, and a process that ends in points costs
        infinitely much (see ``cost_until``). Without ``target_entropy`` it is estimated from the distances of nearest
        neighbors in y (Kozachenko and Leonenko 1987), which is wrong for points that are not independent: regular or
        quasi-random ones repel each other, and the cost comes out too low. Raises ``HelmscopeError`` if that is
        impossible: equal points, unequal weights, fewer than 32 points.

        >>> x = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
        >>> bridge = bridge_clouds(x, x, nu=0.5, space=StateSpace.FLAT)
        >>> round(bridge.cost(target_entropy=0.6931).estimate, 2)
        0.51
        """
        return cost_between_laws(
            self.clouds,
            torch.log(self.clouds.a) - self.potentials[0],
            self.potentials[1],
            target_entropy=target_entropy,
            on_sphere=self.space is StateSpace.SPHERE,
        )

    def cost_until(self, t: float, *, n: int = 2048, seed: int = 0) -> Interval:
        """E int_0^t |u|^2 / (4 nu) ds = E log phi_t(X_t) - E log phi_0(X_0), 0 < t < horizon, from n samples of X_t. It
        grows without bound as t approaches the horizon.

        >>> x = torch.tensor([[0.0]], dtype=torch.float64)
        >>> cost = bridge_clouds(x, x + 1, nu=0.5, space=StateSpace.FLAT).cost_until(0.75)
        >>> cost.low < 0.6931 < cost.high  # log 2, as -log(1 - t) / 2 in general
        True
        """
        t = check_real("t", check_time(self, t), above=0)
        values = self.log_potential(self.marginal(t, n=n, seed=seed), t)
        start = float((self.clouds.a * self._forward(self.clouds.x, 0.0)[0]).sum())
        return mean_interval((values - start).cpu().numpy())

    def simulate(
        self,
        x0: Float[Tensor, "*batch n d"],
        times: Sequence[float],
        *,
        seed: int = 0,
        as_printed: bool = False,
        **options: object,
    ) -> Simulation:
        """Integrate the controlled process from ``x0`` with ``integrate``, and return the states at ``times``.

        Because the control grows like 1/(horizon - t), steps shrink towards the horizon: they are at most 2 % of the
        horizon and 10 % of the time left, one Euler-Maruyama step each (about 90 in all). After 99.9 % of the horizon
        the particle is at one of the target points, sampled with the probabilities with which the bridge ends there
        from where the particle is. With ``as_printed`` the control has the sign of the source, and an ordinary step is
        taken in place of that one. ``resume`` of the result takes equal steps, of at most 2 % of the horizon. Raises
        ``HelmscopeError`` for times beyond the horizon.
        """
        return simulate_landing(
            self, x0, times, self._sample_ends, self.clouds.y, seed=seed, as_printed=as_printed, options=options
        )


@shows_progress("fitting a bridge")
def bridge_clouds(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    x_weights: Float[Tensor, " n"] | None = None,
    y_weights: Float[Tensor, " m"] | None = None,
    *,
    nu: float,
    horizon: float = 1.0,
    space: StateSpace = StateSpace.SPHERE,
    tol: float = 1e-9,
    max_iterations: int = 10_000,
    progress: ProgressOption = None,
) -> CloudBridge:
    """The Schroedinger bridge from the cloud x to the cloud y in the time ``horizon``, over Brownian motion with the
    generator ``nu`` Lap: dX = sqrt(2 nu) dW in R^d (``space=StateSpace.FLAT``), or on the sphere S^(d-1), d >= 2.

    Weights are as in ``check_clouds``; no gradients are propagated to the clouds. The solver scales an n x m matrix in
    float64 until the marginal error is at most ``tol``. It needs more iterations the smaller nu horizon is next
    to the squared distances; if ``max_iterations`` do not suffice, the result is not ``ok`` and its ``outcome`` names a
    value of nu * horizon that does. Antipodal points are allowed: the heat kernel is positive and smooth there. Raises
    ``HelmscopeError`` for points that are not in the space, bad weights, nu <= 0, horizon <= 0, and clouds whose matrix
    does not fit in memory.

    >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> bridge = bridge_clouds(x, x + 3, nu=0.5, space=StateSpace.FLAT)
    >>> bridge.control(x, 0.0).round(decimals=3)  # from 0 to 3 and from 1 to 4, mostly
    tensor([[3.3780],
            [2.6220]], dtype=torch.float64)
    """
    nu, horizon = check_real("nu", nu, above=0), check_real("horizon", horizon, above=0)
    clouds = check_ends(x, y, x_weights, y_weights, space)
    check_memory(f"x has {len(clouds.x)} and y {len(clouds.y)} points", 6 * len(clouds.x) * len(clouds.y))
    process = SphereBrownian(nu) if space is StateSpace.SPHERE else FlatBrownian(nu)
    tol = check_real("tol", tol, above=0)
    most = check_integer("max_iterations", max_iterations, at_least=1)
    fit = _fit(clouds, process, horizon, tol, most, progress or None)
    if not fit.converged:
        logger.warning("the marginal error of a bridge is %.2g after %d iterations", fit.error, fit.iterations)
    return CloudBridge(clouds, process, horizon, (fit.f, fit.g), fit.iterations, fit.error, fit.converged, most, tol)


def _fit(clouds: Clouds, process: Brownian, horizon: float, tol: float, most: int, progress: ProgressOption) -> Scaling:
    log_kernel = process.log_density(clouds.x, clouds.y, horizon)
    return scale_to_marginals(log_kernel, clouds.a, clouds.b, tol=tol, max_iterations=most, progress=progress or None)
