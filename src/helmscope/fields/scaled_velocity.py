"""A velocity with a log scale: for rates such as e^beta that overflow the dtype although a displacement does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.types import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ScaledVelocity(ConciseRepr):
    """A velocity that may overflow its dtype, as e^{log_scale} times ``direction``, with one log scale per token.

    >>> ScaledVelocity(torch.ones(1, 2), torch.full((1, 1), 100.0)).displacement(1e-43)
    tensor([[2.6881, 2.6881]])
    """

    direction: Float[Tensor, "*batch n d"]
    log_scale: Float[Tensor, "*batch n 1"]

    def displacement(self, duration: Tensor | float) -> Float[Tensor, "*batch n d"]:
        """The displacement, ``duration`` >= 0 times the velocity, which may be finite where the velocity overflows.

        >>> ScaledVelocity(torch.ones(1, 2), torch.full((1, 1), 1000.0)).displacement(0.0)
        tensor([[0., 0.]])
        """
        duration = torch.as_tensor(duration, dtype=torch.float64, device=self.direction.device)
        factor = torch.exp(torch.log(duration) + self.log_scale.to(torch.float64))
        return (factor * self.direction.to(torch.float64)).to(self.direction.dtype)
