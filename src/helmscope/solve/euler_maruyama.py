"""The Euler-Maruyama method on the sphere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.solve.noisy import noise_drift, noise_increment
from helmscope.solve.stepper import NoisyStepper

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.fields.noise import Noise
    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class EulerMaruyama(NoisyStepper):
    """The Euler-Maruyama method x' = N(x + h (P f + beta) + P sigma dW), weak order 1 and strong order 1/2, where beta
    is the drift of the noise's process.

    The increment p is tangent, so that N(x + p) = x + p - |p|^2 x / 2 + O(|p|^3) has no tangential term of second order
    ([Helmholtz Transformer, no. 1] with <x, d> = 0): the retraction adds no drift, and beta is the whole drift.

    >>> import torch
    >>> from helmscope.fields.noise import IsotropicNoise
    >>> from helmscope.solve.integrate import integrate
    >>> x0 = torch.tensor([[1.0, 0.0, 0.0]]).expand(1000, 1, 3)
    >>> noise = IsotropicNoise(0.5)
    >>> x = integrate(torch.zeros_like, x0, [1.0], stepper=EulerMaruyama(0.05), noise=noise).states[-1]
    >>> bool((x[..., 0].mean() - torch.exp(torch.tensor(-1.0))).abs() < 0.05)  # E<a, X_t> = e^{-nu (d-1) t}
    True
    """

    weak_order: ClassVar[float] = 1
    strong_order: ClassVar[float] = 0.5
    reads_end: ClassVar[bool] = False

    def step(self, flow: Flow, noise: Noise, x: Tensor, h: Tensor, t: Tensor, dw: Tensor) -> Tensor:
        """One step."""
        return flow.retract(
            x + flow.displacement(x, h, t) + noise_drift(flow, noise, x, h) + noise_increment(flow, noise, x, dw)
        )
