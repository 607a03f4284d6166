"""Forward Euler without tangent projection, by which published figures were computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.solve.stepper import FixedStepper

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class UnprojectedEuler(FixedStepper):
    """Forward Euler without tangent projection, then normalization: x' = (x + h f) / |x + h f|, order 1.

    The scheme that the authors of arXiv:2312.10794 used for figure 3, with h = 0.1. It is ``Layer`` as a
    discretization, and a biased one: near a cluster it contracts by 1/(1 + h) per step, with rate 0.953 where the flow
    has rate 1, so its curves lag behind. Kept only to reproduce those figures.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> x = integrate(SA(beta=0.0), torch.eye(2), times=[1.0], stepper=UnprojectedEuler(0.1)).states[-1]
    >>> round(float(x[0] @ x[1]), 4)  # exact: tanh 1 = 0.7616
    0.7412
    """

    h: float = 0.1
    order: ClassVar[int] = 1
    reads_end: ClassVar[bool] = False
    divisible: ClassVar[bool] = False

    def step(self, flow: Flow, x: Tensor, h: Tensor, t: Tensor) -> Tensor:
        """One step."""
        return flow.retract(x + flow.ambient_displacement(x, h, t))
