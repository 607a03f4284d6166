"""Heun's method in normal coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.geometry.sphere import exp, pull_back, retract
from helmscope.solve.stepper import FixedStepper

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class GeodesicHeun(FixedStepper):
    """Heun's method for the coordinate u = log_x, u' = (d exp_x)_u^{-1} f(exp_x u), order 2.

    A token must move by less than pi per step.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> x = integrate(SA(beta=0.0), torch.eye(2), times=[1.0], stepper=GeodesicHeun(0.1)).states[-1]
    >>> round(float(x[0] @ x[1]), 4)  # exact: tanh 1 = 0.7616
    0.7611
    """

    order: ClassVar[int] = 2
    geodesic: ClassVar[bool] = True

    def step(self, flow: Flow, x: Tensor, h: Tensor, t: Tensor) -> Tensor:
        """One step."""
        k1 = flow.displacement(x, h, t)
        k2 = pull_back(x, k1, flow.displacement(retract(exp(x, k1)), h, t + h))
        return retract(exp(x, (k1 + k2) / 2))
