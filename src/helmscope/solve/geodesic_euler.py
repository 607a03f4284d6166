"""Euler along geodesics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.geometry.sphere import exp, retract
from helmscope.types import real_number

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class GeodesicEuler:
    """x' = exp_x(h f(x)), order 1: the token moves the whole step along one great circle at constant speed."""

    h: float
    order: ClassVar[int] = 1
    divisible: ClassVar[bool] = True

    def __post_init__(self) -> None:
        real_number("h", self.h, above=0)

    def step(self, flow: Flow, x: Tensor, h: Tensor) -> Tensor:
        """One step; the retraction removes rounding only."""
        return retract(exp(x, flow.move(x, h)))
