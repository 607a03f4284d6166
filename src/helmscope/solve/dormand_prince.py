"""The embedded Runge-Kutta pair of Dormand and Prince, projected to the sphere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.solve.stepper import AdaptiveStepper, Attempt

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.solve.flow import Flow

# Dormand & Prince (1980), RK5(4)7M: rows of stage coefficients; the last row is also the weights of order 5
STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
NODES = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)  # the fraction of the step at which each stage is evaluated
# weights of order 5 minus weights of order 4
ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


@dataclass(frozen=True)
class DormandPrince(AdaptiveStepper):
    """Adaptive Runge-Kutta method of order 5 with an error estimate of order 4, for the field f(x / |x|) of R^d.

    ``tol`` bounds the local error of every token in each step (None: 1e-9 in float64, 1e-5 in float32), ``max_steps``
    the trial steps of one system. Raises ``HelmscopeError`` unless tol > 0 and max_steps >= 1.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> x = integrate(SA(beta=0.0), torch.eye(2), times=[1.0], stepper=DormandPrince()).states[-1]
    >>> round(float(x[0] @ x[1]), 4)  # exact: tanh 1 = 0.7616
    0.7616
    """

    order: ClassVar[int] = 5

    def attempt(self, flow: Flow, x: Tensor, h: Tensor, t: Tensor, first: Tensor) -> Attempt:
        """One trial step. Its last stage is evaluated at the new state, and is the first stage of the next step."""
        k = [first]
        for row, node in zip(STAGES, NODES, strict=True):
            y = flow.retract(x + _combine(row, k))
            k.append(flow.displacement(y, h, t + node * h))
        return Attempt(y, k[-1], _combine(ERROR, k))


def _combine(weights: tuple[float, ...], k: list[Tensor]) -> Tensor:
    total = weights[0] * k[0]
    for weight, step in zip(weights[1:], k[1:], strict=True):
        if weight:
            total = total + weight * step
    return total
