"""Heun's method, projected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.geometry.sphere import retract
from helmscope.types import real_number

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class Heun:
    """y = N(x + h f(x)),  x' = N(x + h (f(x) + f(y)) / 2), order 2."""

    h: float
    order: ClassVar[int] = 2
    divisible: ClassVar[bool] = True

    def __post_init__(self) -> None:
        real_number("h", self.h, above=0)

    def step(self, flow: Flow, x: Tensor, h: Tensor) -> Tensor:
        """One step."""
        k1 = flow.move(x, h)
        k2 = flow.move(retract(x + k1), h)
        return retract(x + (k1 + k2) / 2)
