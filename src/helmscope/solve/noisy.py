"""Integration of a flow with noise, with a fixed step size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, Space
from helmscope.fields.noise import LayerNormChain, Noise
from helmscope.geometry.sphere import project
from helmscope.solve.fixed import outcome_of, steps_in
from helmscope.types import HelmscopeError, Outcome

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.solve.extras import Extras
    from helmscope.solve.flow import Flow
    from helmscope.solve.stepper import NoisyStepper
    from helmscope.solve.streams import Streams


def run_noisy(
    flow: Flow,
    x: Float[Tensor, "batch n d"],
    times: list[float],
    stepper: NoisyStepper,
    noise: Noise,
    streams: Streams,
    extras: Extras,
) -> tuple[Float[Tensor, "time batch n d"], Outcome]:
    """States at the asked times. Each interval is cut into equal steps of at most h; every step takes the next n k
    normal numbers of a system (k where the noise is common to its tokens), so a path depends on the asked times.

    An event happens at the end of a step: between the two ends of one nothing is drawn.
    """
    states, systems = [], torch.arange(len(x), device=x.device)
    draws, sources = 1 if noise.common else x.shape[-2], noise.sources(x)
    now = 0.0
    for target in times:
        count = steps_in(target - now, stepper)
        size = (target - now) / max(count, 1)
        h = torch.full((len(x),), size, dtype=torch.float64, device=x.device)
        for k in range(count):
            dw = (math.sqrt(size) * streams.normal(draws, sources)).to(x).expand(-1, x.shape[-2], -1)
            x = stepper.step(flow, noise, x, h[:, None, None], (now + k * h)[:, None, None], dw)
            for watch in extras.watches:
                watch.see(systems, now + k * h, h, x, None)
            extras.say((now + (k + 1) * size) / times[-1])
        now = target
        states.append(x)
    return torch.stack(states), outcome_of(states, times)


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
