"""Heun's method for a stochastic flow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.fields.noise import Stratonovich
from helmscope.solve.noisy import noise_drift, noise_increment
from helmscope.solve.stepper import NoisyStepper

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.fields.noise import Noise
    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class StochasticHeun(NoisyStepper):
    """The stochastic Heun method y = N(x + a(x)),  x' = N(x + (a(x) + a(y)) / 2), where
    a(x) = h (P f + beta - beta_S) + P sigma dW; weak order 1, strong order 1/2 (1 if the columns of P sigma commute, 2
    without noise).

    Averaging over both ends of a step approximates the Stratonovich integral, which contains the drift beta_S; beta is
    the drift of the noise's process. For the process ``Stratonovich`` no derivative of sigma is needed.

    >>> import torch
    >>> from helmscope.fields.noise import IsotropicNoise
    >>> from helmscope.solve.integrate import integrate
    >>> x0 = torch.tensor([[1.0, 0.0, 0.0]]).expand(1000, 1, 3)
    >>> noise = IsotropicNoise(0.5)
    >>> x = integrate(torch.zeros_like, x0, [1.0], stepper=StochasticHeun(0.05), noise=noise).states[-1]
    >>> bool((x[..., 0].mean() - torch.exp(torch.tensor(-1.0))).abs() < 0.05)  # E<a, X_t> = e^{-nu (d-1) t}
    True
    """

    weak_order: ClassVar[float] = 1
    strong_order: ClassVar[float] = 0.5

    def step(self, flow: Flow, noise: Noise, x: Tensor, h: Tensor, t: Tensor, dw: Tensor) -> Tensor:
        """One step."""
        first = _increment(flow, noise, x, h, t, dw)
        second = _increment(flow, noise, flow.retract(x + first), h, t + h, dw)
        return flow.retract(x + (first + second) / 2)


def _increment(flow: Flow, noise: Noise, x: Tensor, h: Tensor, t: Tensor, dw: Tensor) -> Tensor:
    step = flow.displacement(x, h, t) + noise_increment(flow, noise, x, dw)
    if isinstance(noise.process, Stratonovich):
        return step  # beta = beta_S
    implied_drift = (
        Stratonovich().drift(noise, x) if flow.on_sphere else noise.stratonovich_correction(x, on_sphere=False)
    )
    return step + noise_drift(flow, noise, x, h) - h.to(x.dtype) * implied_drift
