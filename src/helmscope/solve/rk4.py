"""The classical Runge-Kutta method, projected to the sphere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.solve.stepper import FixedStepper

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class RK4(FixedStepper):
    """The classical Runge-Kutta method with every stage retracted to the sphere, order 4: the method for the field
    f(x / |x|) of R^d.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> x = integrate(SA(beta=0.0), torch.eye(2), times=[1.0], stepper=RK4(0.1)).states[-1]
    >>> round(float(x[0] @ x[1]), 4)  # exact: tanh 1 = 0.7616
    0.7616
    """

    order: ClassVar[int] = 4

    def step(self, flow: Flow, x: Tensor, h: Tensor, t: Tensor) -> Tensor:
        """One step."""
        k1 = flow.displacement(x, h, t)
        k2 = flow.displacement(flow.retract(x + k1 / 2), h, t + h / 2)
        k3 = flow.displacement(flow.retract(x + k2 / 2), h, t + h / 2)
        k4 = flow.displacement(flow.retract(x + k3), h, t + h)
        return flow.retract(x + (k1 + 2 * k2 + 2 * k3 + k4) / 6)
