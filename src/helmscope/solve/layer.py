"""The discrete post-norm layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.solve.stepper import FixedStepper

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class Layer(FixedStepper):
    """One discrete layer x' = N(x + h f(x)) with f before projection: for h = 1 a post-norm transformer layer. Each
    layer advances the time by h.

    As a method for the flow its order is 1: N(x + h f) = x + h P f - h^2 [<x, f> P f + |P f|^2 x / 2] + O(h^3)
    [Helmholtz Transformer, no. 1], and the term <x, f> P f delays it.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> x = integrate(SA(beta=0.0), torch.eye(2), times=[1.0], stepper=Layer(1.0)).states[-1]
    >>> round(float(x[0] @ x[1]), 4)  # exact: tanh 1 = 0.7616
    0.6
    """

    h: float = 1.0
    order: ClassVar[int] = 1
    reads_end: ClassVar[bool] = False
    divisible: ClassVar[bool] = False

    def step(self, flow: Flow, x: Tensor, h: Tensor, t: Tensor) -> Tensor:
        """One layer."""
        return flow.layer(x, h, t)
