"""What a model would say if it stopped early: the lens, and how far it is from what the model says in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from helmscope.observe.track import mean_and_stderr, real_tokens
from helmscope.types import HelmscopeError, Trajectory

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor


@runtime_checkable
class Speaks(Protocol):
    """A system with a head: what it makes of the state at a time index, or of its last one."""

    @property
    def trajectory(self) -> Trajectory:
        """What the tokens did."""

    def logits(self, step: int | None = None) -> Tensor:
        """The head's logits (batch, n, vocabulary)."""


def lens_divergence(system: Speaks) -> xr.Dataset:
    """Along depth, for each text the mean over its real tokens, then mean and standard error over texts, in nats:

        ``divergence``  KL(p | p_t) = sum_w p(w) log p(w) / p_t(w)      ``entropy``  -sum_w p_t(w) log p_t(w)

    with p_t the softmax of what the head makes of the state at depth t, p that of the model itself. Zero at the last
    depth. A system without a head is refused.

    >>> lens_divergence(torch.nn.Identity())
    Traceback (most recent call last):
      ...
    helmscope.types.HelmscopeError: system is a Identity, but a lens needs a head: a Recording of a language model
    """
    if not isinstance(system, Speaks):
        raise HelmscopeError(
            f"system is a {type(system).__name__}, but a lens needs a head: a Recording of a language model"
        )
    path = system.trajectory
    real = real_tokens(path.states[0], path.mask)
    final = torch.log_softmax(system.logits().double(), -1)
    rows = []
    for step in range(len(path.times)):
        early = torch.log_softmax(system.logits(step).double(), -1)
        divergence = (final.exp() * (final - early)).sum(-1)
        entropy = -(early.exp() * early).sum(-1)
        rows.append([(value * real).sum(-1) / real.sum(-1) for value in (divergence, entropy)])
    names = ("divergence", "entropy")
    return mean_and_stderr(path, {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(names)})
