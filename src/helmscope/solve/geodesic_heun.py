"""Heun's method in normal coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.geometry.sphere import exp, pull_back, retract
from helmscope.types import real_number

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class GeodesicHeun:
    """Heun for the coordinate u = log_x, u' = (d exp_x)_u^{-1} f(exp_x u), order 2.

    A token moves less than pi a step.
    """

    h: float
    order: ClassVar[int] = 2
    divisible: ClassVar[bool] = True

    def __post_init__(self) -> None:
        real_number("h", self.h, above=0)

    def step(self, flow: Flow, x: Tensor, h: Tensor) -> Tensor:
        """One step."""
        k1 = flow.move(x, h)
        k2 = pull_back(x, k1, flow.move(retract(exp(x, k1)), h))
        return retract(exp(x, (k1 + k2) / 2))
