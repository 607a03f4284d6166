"""The classical Runge-Kutta method in normal coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.geometry.sphere import exp, pull_back, retract
from helmscope.solve.stepper import FixedStepper

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class GeodesicRK4(FixedStepper):
    """RK4 for the coordinate u = log_x, u' = (d exp_x)_u^{-1} f(exp_x u), order 4: every stage is on the sphere.

    A token must move by less than pi per step.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> x = integrate(SA(beta=0.0), torch.eye(2), times=[1.0], stepper=GeodesicRK4(0.1)).states[-1]
    >>> round(float(x[0] @ x[1]), 4)  # exact: tanh 1 = 0.7616
    0.7616
    """

    order: ClassVar[int] = 4
    geodesic: ClassVar[bool] = True

    def step(self, flow: Flow, x: Tensor, h: Tensor, t: Tensor) -> Tensor:
        """One step."""
        k1 = flow.displacement(x, h, t)
        k2 = self._stage(flow, x, k1 / 2, h, t + h / 2)
        k3 = self._stage(flow, x, k2 / 2, h, t + h / 2)
        k4 = self._stage(flow, x, k3, h, t + h)
        return retract(exp(x, (k1 + 2 * k2 + 2 * k3 + k4) / 6))

    @staticmethod
    def _stage(flow: Flow, x: Tensor, u: Tensor, h: Tensor, t: Tensor) -> Tensor:
        return pull_back(x, u, flow.displacement(retract(exp(x, u)), h, t))
