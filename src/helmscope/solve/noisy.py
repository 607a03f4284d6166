"""Integration of a stochastic flow with a fixed step size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, StateSpace
from helmscope.fields.noise import LayerNormChain, Noise
from helmscope.geometry.sphere import project
from helmscope.solve.fixed import run_steps
from helmscope.types import HelmscopeError, Outcome

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.solve.flow import Flow
    from helmscope.solve.random_source import RandomSource
    from helmscope.solve.step_actions import StepActions
    from helmscope.solve.stepper import NoisyStepper


def run_noisy(
    flow: Flow,
    x: Float[Tensor, "batch n d"],
    times: list[float],
    stepper: NoisyStepper,
    noise: Noise,
    streams: RandomSource,
    actions: StepActions,
) -> tuple[Float[Tensor, "time batch *kept"], Outcome]:
    """The stored values at the requested times, and how the systems ended. Each interval between requested times is
    divided into equal steps of at most h; every step uses the next n k normal numbers of a system (k if the noise is
    common to its tokens), so a path depends on the requested times.

    An event happens at the end of a step, because the noise is not sampled within it.
    """
    draws, sources = 1 if noise.common else x.shape[-2], noise.brownian_dim(x)

    def step(flow: Flow, x: Tensor, h: Tensor, t: Tensor, systems: Tensor) -> Tensor:
        if len(systems) < len(streams):
            streams.keep(systems.tolist())
        dw = (h.sqrt()[:, None, None] * streams.normal(draws, sources).to(h)).to(x.dtype).expand(-1, x.shape[-2], -1)
        return stepper.step(flow, noise, x, h[:, None, None], t[:, None, None], dw)

    return run_steps(flow, x, times, stepper, actions, step, inside=False)


def check_noise(field: Field, noise: Noise, stepper: NoisyStepper) -> None:
    """Raise ``HelmscopeError`` if the stepper does not simulate the noise's process, or if the field's states are a
    residual stream and the process is not defined there.

    >>> from helmscope.fields.noise import IsotropicNoise
    >>> from helmscope.solve.euler_maruyama import EulerMaruyama
    >>> from helmscope.fields.field import as_field
    >>> check_noise(as_field(torch.zeros_like), IsotropicNoise(0.1), EulerMaruyama(0.01))
    """
    stepper.check(noise)
    if field.space is StateSpace.STREAM and not isinstance(noise.process, LayerNormChain):
        raise HelmscopeError(
            f"process is {noise.process!r}, but noise is added to a residual stream without projection, and its "
            "directions then follow LayerNormChain()"
        )


def noise_increment(flow: Flow, noise: Noise, x: Float[Tensor, "batch n d"], dw: Tensor) -> Float[Tensor, "batch n d"]:
    """The random displacement: P sigma dW if states are unit vectors, sigma dW on a residual stream."""
    step = noise.increment(x, dw)
    return project(x, step) if flow.on_sphere else step


def noise_drift(flow: Flow, noise: Noise, x: Float[Tensor, "batch n d"], h: Tensor) -> Float[Tensor, "batch n d"]:
    """The displacement by the drift of the noise: h beta if states are unit vectors, 0 on a residual stream."""
    return h.to(x.dtype) * noise.process.drift(noise, x) if flow.on_sphere else torch.zeros_like(x)
