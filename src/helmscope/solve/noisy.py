"""Integration of a flow with noise, with a fixed step size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, Space
from helmscope.fields.noise import LayerNormChain, Noise
from helmscope.geometry.sphere import project
from helmscope.solve.fixed import march
from helmscope.types import HelmscopeError, Outcome

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.solve.extras import Extras
    from helmscope.solve.flow import Flow
    from helmscope.solve.random_source import RandomSource
    from helmscope.solve.stepper import NoisyStepper


def run_noisy(
    flow: Flow,
    x: Float[Tensor, "batch n d"],
    times: list[float],
    stepper: NoisyStepper,
    noise: Noise,
    streams: RandomSource,
    extras: Extras,
) -> tuple[Float[Tensor, "time batch *kept"], Outcome]:
    """What is kept of the states at the asked times. Each interval is cut into equal steps of at most h; every step
    takes the next n k normal numbers of a system (k where the noise is common to its tokens), so a path depends on the
    asked times.

    An event happens at the end of a step: between the two ends of one nothing is drawn.
    """
    draws, sources = 1 if noise.common else x.shape[-2], noise.sources(x)

    def step(flow: Flow, x: Tensor, h: Tensor, t: Tensor, systems: Tensor) -> Tensor:
        if len(systems) < len(streams):
            streams.keep(systems.tolist())
        dw = (h.sqrt()[:, None, None] * streams.normal(draws, sources).to(h)).to(x.dtype).expand(-1, x.shape[-2], -1)
        return stepper.step(flow, noise, x, h[:, None, None], t[:, None, None], dw)

    return march(flow, x, times, stepper, extras, step, inside=False)


def check_noise(field: Field, noise: Noise, stepper: NoisyStepper) -> None:
    """Refuse a process that the stepper does not simulate, or that a residual stream does not have.

    >>> from helmscope.fields.noise import IsotropicNoise
    >>> from helmscope.solve.euler_maruyama import EulerMaruyama
    >>> from helmscope.fields.field import as_field
    >>> check_noise(as_field(torch.zeros_like), IsotropicNoise(0.1), EulerMaruyama(0.01))
    """
    stepper.check(noise)
    if field.space is Space.STREAM and not isinstance(noise.process, LayerNormChain):
        raise HelmscopeError(
            f"process is {noise.process!r}, but noise is added to a residual stream as it is, and its directions are "
            "then LayerNormChain()"
        )


def kick(flow: Flow, noise: Noise, x: Float[Tensor, "batch n d"], dw: Tensor) -> Float[Tensor, "batch n d"]:
    """P sigma dW where states are unit vectors, sigma dW on a residual stream."""
    step = noise.kick(x, dw)
    return project(x, step) if flow.on_sphere else step


def noise_drift(flow: Flow, noise: Noise, x: Float[Tensor, "batch n d"], h: Tensor) -> Float[Tensor, "batch n d"]:
    """h beta where states are unit vectors, 0 on a residual stream."""
    return h.to(x.dtype) * noise.process.drift(noise, x) if flow.on_sphere else torch.zeros_like(x)
