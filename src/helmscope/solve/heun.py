"""Heun's method, projected to the sphere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.solve.stepper import FixedStepper

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class Heun(FixedStepper):
    """Heun's method, projected: y = N(x + h f(x)),  x' = N(x + h (f(x) + f(y)) / 2), order 2.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> x = integrate(SA(beta=0.0), torch.eye(2), times=[1.0], stepper=Heun(0.1)).states[-1]
    >>> round(float(x[0] @ x[1]), 4)  # exact: tanh 1 = 0.7616
    0.7611
    """

    order: ClassVar[int] = 2

    def step(self, flow: Flow, x: Tensor, h: Tensor, t: Tensor) -> Tensor:
        """One step."""
        k1 = flow.displacement(x, h, t)
        k2 = flow.displacement(flow.retract(x + k1), h, t + h)
        return flow.retract(x + (k1 + k2) / 2)
