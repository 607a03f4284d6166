"""Schroedinger bridges: of all processes with given laws at times 0 and T, the one closest to a reference process.

The reference has the generator L = b . grad + Sigma : Hess. The bridge has the density rho_t = phi_t phihat_t with
(d_t + L) phi = 0, and the generator [Helmholtz Transformer, no. 4, corrected]

    L^phi = L + 2 Sigma grad log phi_t . grad,        u_t = 2 Sigma grad log phi_t,

so that for Sigma = nu I and b = grad U the potential changes by delta U = +2 nu log phi. The source prints
delta U = -2 nu log phi. The cost is E int u . Sigma^-1 u / 4 dt, which is E int |u|^2 / (4 nu) dt for Sigma = nu I,
and equals the relative entropy of the bridge with respect to the reference started from mu_0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, StateSpace
from helmscope.solve.integrate import integrate
from helmscope.transport.clouds import Clouds, check_clouds
from helmscope.transport.cost import Euclidean, Geodesic
from helmscope.transport.time_grid import graded_times
from helmscope.types import ConciseRepr, HelmscopeError, Plottable, check_real

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time
    from helmscope.fields.noise import Noise
    from helmscope.solve.simulation import Simulation
    from helmscope.types import Interval


_ROUNDING = 1e-12  # of times, relative


class Bridge(ConciseRepr, Plottable, ABC):
    """Base class of bridges over [0, ``horizon``]. Every point x is a particle of its own: they do not interact.

    >>> from helmscope.transport.gaussian_bridge import GaussianBridge
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> bridge: Bridge = GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3)
    >>> run = bridge.simulate(bridge.marginal(0.0, n=2000), [1.0])
    >>> bool((run.states[-1].std() - 0.5).abs() < 0.05)
    True
    """

    horizon: float

    @property
    @abstractmethod
    def space(self) -> StateSpace:
        """The sphere, or R^d."""

    @property
    @abstractmethod
    def noise(self) -> Noise:
        """The noise of the reference process, which is that of the bridge."""

    @property
    def defined_at_horizon(self) -> bool:
        """Whether the control is finite at the horizon; not where the target is a set of points."""
        return False

    @property
    def reference(self) -> Field | None:
        """The drift of the reference process; None for Brownian motion."""
        return None

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the shape of the points fits this bridge.

        >>> from helmscope.transport.gaussian_bridge import GaussianBridge
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> bridge = GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3)
        >>> bridge.check_size(one)
        """

    @abstractmethod
    def log_potential(self, x: Float[Tensor, "*batch n d"], t: Time) -> Float[Tensor, "*batch n"]:
        """log phi_t(x), t < horizon; defined up to a constant.

        >>> from helmscope.transport.gaussian_bridge import GaussianBridge
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> bridge = GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3)
        >>> float(bridge.log_potential(one, 0.0) - bridge.log_potential(0 * one, 0.0)) < 0  # the target is near 0
        True
        """

    @abstractmethod
    def control(self, x: Float[Tensor, "*batch n d"], t: Time) -> Float[Tensor, "*batch n d"]:
        """u_t(x) = 2 Sigma grad log phi_t(x), tangent on the sphere; t < horizon.

        >>> from helmscope.transport.gaussian_bridge import GaussianBridge
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> bridge = GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3)
        >>> float(bridge.control(one, 0.0)) < 0  # towards the mean of the target
        True
        """

    def control_as_printed(self, x: Float[Tensor, "*batch n d"], t: Time) -> Float[Tensor, "*batch n d"]:
        """The control with the sign that the source prints, delta U = -2 nu log phi: it drives away from the target.

        >>> from helmscope.transport.gaussian_bridge import GaussianBridge
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> bridge = GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3)
        >>> bool(bridge.control_as_printed(one, 0.5) == -bridge.control(one, 0.5))
        True
        """
        return -self.control(x, t)

    @abstractmethod
    def marginal(self, t: float, *, n: int, seed: int = 0) -> Float[Tensor, "n d"]:
        """A sample of n points of the law of the bridge at time t.

        >>> from helmscope.transport.gaussian_bridge import GaussianBridge
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> bridge = GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3)
        >>> bridge.marginal(0.5, n=3).shape
        torch.Size([3, 1])
        """

    @abstractmethod
    def cost(self) -> Interval:
        """E int u . Sigma^-1 u / 4 dt; its interval is that of a sampling error, of width 0 where it is exact.

        >>> from helmscope.transport.gaussian_bridge import GaussianBridge
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> bridge = GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3)
        >>> round(bridge.cost().estimate, 6)
        0.700827
        """

    def graded_times(self) -> list[float]:
        """Times from the start to the horizon for ``integrate`` with one step of ``EulerMaruyama(horizon)`` between two
        of them: steps of at most 2 % of the horizon and 10 % of the time left, about 90 in all, as the control grows
        like 1/(horizon - t).

        >>> from helmscope.transport.gaussian_bridge import GaussianBridge
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> times = GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3).graded_times()
        >>> len(times), times[0], times[-1]
        (92, 0.02, 1.0)
        """
        return [*graded_times(self.horizon, self.horizon), self.horizon]

    def field(self, *, as_printed: bool = False) -> BridgeField:
        """The drift of the bridge, reference plus control, as a field that depends on time.

        >>> from helmscope.transport.gaussian_bridge import GaussianBridge
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> bridge = GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3)
        >>> bool(bridge.field()(one, t=0.5) == bridge.control(one, 0.5))  # Brownian motion has no drift
        True
        """
        return BridgeField(self, as_printed=as_printed)

    def simulate(
        self,
        x0: Float[Tensor, "*batch n d"],
        times: Sequence[float],
        *,
        seed: int = 0,
        as_printed: bool = False,
        **options: object,
    ) -> Simulation:
        """Integrate the controlled process from ``x0``, sampled from mu_0, with ``integrate`` and its ``options``.

        >>> from helmscope.transport.gaussian_bridge import GaussianBridge
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> bridge = GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3)
        >>> bridge.simulate(bridge.marginal(0.0, n=5), [0.5, 1.0]).states.shape
        torch.Size([2, 5, 1])
        """
        return integrate(
            self.field(as_printed=as_printed),
            x0,
            times,
            noise=self.noise,
            seed=seed,
            **options,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, eq=False)
class BridgeField(Field):
    """The drift of a bridge: that of its reference plus the control. Where the target is a cloud of points it is
    infinite at the horizon: steps may end there, but must not evaluate it there, as those of ``EulerMaruyama`` do not.
    """

    bridge: Bridge = field(repr=False)
    as_printed: bool = False

    @property
    def space(self) -> StateSpace:
        """The space of the bridge."""
        return self.bridge.space

    @property
    def autonomous(self) -> bool:
        """False: the control depends on time."""
        return False

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the shape of the points fits the bridge."""
        super().check_size(x)
        self.bridge.check_size(x)

    def check_times(self, times: Sequence[float], *, reads_end: bool) -> None:
        """Raise ``HelmscopeError`` for times beyond the horizon, and for a stepper that would evaluate an infinite
        control there.
        """
        horizon = self.bridge.horizon
        if times[-1] > horizon * (1 + _ROUNDING):
            raise HelmscopeError(
                f"times holds {times[-1]:g}, but it must not exceed the horizon {horizon:g} of the bridge"
            )
        if reads_end and not self.bridge.defined_at_horizon and times[-1] >= horizon * (1 - _ROUNDING):
            raise HelmscopeError(
                f"times holds {times[-1]:g}, the horizon of the bridge, where its control is infinite, but the stepper "
                "evaluates the field there: take EulerMaruyama, which does not, or times before the horizon"
            )

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """Reference drift plus control, unchecked."""
        control = self.bridge.control_as_printed(x, t) if self.as_printed else self.bridge.control(x, t)
        reference = self.bridge.reference
        return control if reference is None else reference.velocity(x, weights, t=t) + control


def check_ends(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    x_weights: Float[Tensor, " n"] | None,
    y_weights: Float[Tensor, " m"] | None,
    space: StateSpace,
) -> Clouds:
    """The clouds at both ends of a bridge in float64, detached, without points of mass 0; raises ``HelmscopeError`` for
    another space, points that are not in it, bad weights and batches of clouds.
    """
    if space not in (StateSpace.SPHERE, StateSpace.FLAT):
        raise HelmscopeError(f"space is {space!r}, but it must be StateSpace.SPHERE or StateSpace.FLAT")
    cost = Geodesic() if space is StateSpace.SPHERE else Euclidean()
    clouds = check_clouds(x, y, x_weights, y_weights, cost=cost)
    if clouds.x.ndim != 2:
        raise HelmscopeError(f"x has shape {tuple(clouds.x.shape)}, but a bridge takes one cloud (n, d) at a time")
    rows, columns = clouds.a > 0, clouds.b > 0
    kept = (clouds.x[rows], clouds.y[columns], clouds.a[rows], clouds.b[columns])
    return Clouds(*(part.detach().to(torch.float64) for part in kept))


def check_time(bridge: Bridge, t: object, *, closed: bool = False) -> float:
    """``t`` as a float in [0, horizon), or [0, horizon] if ``closed``; raises ``HelmscopeError`` otherwise."""
    time = check_real("t", t)
    if closed and bridge.horizon < time <= bridge.horizon * (1 + _ROUNDING):
        return bridge.horizon  # of a last step whose length is rounded
    if not (0 <= time < bridge.horizon or (closed and time == bridge.horizon)):
        raise HelmscopeError(
            f"t is {time:g}, but it must be in [0, {bridge.horizon:g}{']' if closed else ')'}, up to the horizon"
        )
    return time


def map_systems(
    function: Callable[[Tensor, float], Tensor], bridge: Bridge, x: Tensor, t: Time, *, closed: bool = False
) -> Tensor:
    """``function(points, time)`` of every system of x (*batch, n, d), each at its time, as one tensor of the dtype of
    x. ``function`` receives points (n, d) in float64. Systems are computed one by one, so that the result of a system
    does not depend on its batch.
    """
    bridge.check_size(x)
    batch = x.shape[:-2]
    systems = x.reshape(-1, *x.shape[-2:]).to(torch.float64)
    if isinstance(t, torch.Tensor):
        times = t.reshape(t.shape[:-2] if t.ndim > 1 else t.shape).expand(batch).flatten().tolist()
    else:
        times = [t] * len(systems)
    checked = [check_time(bridge, time, closed=closed) for time in times]
    values = torch.stack([function(points, time) for points, time in zip(systems, checked, strict=True)])
    return values.reshape(*batch, *values.shape[1:]).to(x.dtype)
