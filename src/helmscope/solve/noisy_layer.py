"""The discrete post-norm layer with noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from helmscope.fields.noise import LayerNormChain
from helmscope.solve.stepper import NoisyStepper
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.fields.noise import Noise
    from helmscope.solve.flow import Flow


@dataclass(frozen=True)
class NoisyLayer(NoisyStepper):
    """One noisy layer x' = N(x + h f + sigma dW), with f and sigma dW before projection: a post-norm layer with noise.
    Each layer advances the time by h.

    As h -> 0 it converges to the process ``LayerNormChain`` with weak order 1 and strong order 1/2; ``integrate``
    raises ``HelmscopeError`` for other processes. On a residual stream the layer is y + h f + sigma dW. A plain
    callable is its own f.

    >>> import torch
    >>> from helmscope.fields.noise import IsotropicNoise
    >>> from helmscope.solve.integrate import integrate
    >>> x0 = torch.tensor([[1.0, 0.0, 0.0]]).expand(1000, 1, 3)
    >>> noise = IsotropicNoise(0.5)
    >>> x = integrate(torch.zeros_like, x0, [1.0], stepper=NoisyLayer(0.05), noise=noise).states[-1]
    >>> bool((x[..., 0].mean() - torch.exp(torch.tensor(-1.0))).abs() < 0.05)  # E<a, X_t> = e^{-nu (d-1) t}
    True
    """

    weak_order: ClassVar[float] = 1
    strong_order: ClassVar[float] = 0.5
    reads_end: ClassVar[bool] = False
    divisible: ClassVar[bool] = False

    def check(self, noise: Noise) -> None:
        """Raise ``HelmscopeError`` for any process other than the layer-norm chain."""
        if not isinstance(noise.process, LayerNormChain):
            raise HelmscopeError(
                f"process is {noise.process!r}, but NoisyLayer simulates the layer-norm chain only: use "
                "LayerNormChain(), or another stepper such as EulerMaruyama(h)"
            )

    def step(self, flow: Flow, noise: Noise, x: Tensor, h: Tensor, t: Tensor, dw: Tensor) -> Tensor:
        """One layer."""
        return flow.retract(x + flow.ambient_displacement(x, h, t) + noise.increment(x, dw))
