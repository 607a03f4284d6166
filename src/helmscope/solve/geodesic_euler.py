"""The Euler method along geodesics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.geometry.sphere import exp, retract
from helmscope.solve.stepper import FixedStepper

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class GeodesicEuler(FixedStepper):
    """The geodesic Euler method x' = exp_x(h f(x)), order 1: in each step a token moves along one great circle.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> x = integrate(SA(beta=0.0), torch.eye(2), times=[1.0], stepper=GeodesicEuler(0.1)).states[-1]
    >>> round(float(x[0] @ x[1]), 4)  # exact: tanh 1 = 0.7616
    0.7707
    """

    order: ClassVar[int] = 1
    reads_end: ClassVar[bool] = False
    geodesic: ClassVar[bool] = True

    def step(self, flow: Flow, x: Tensor, h: Tensor, t: Tensor) -> Tensor:
        """One step; the retraction only removes rounding errors."""
        return retract(exp(x, flow.displacement(x, h, t)))
