"""The order parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.observe.observable import observable
from helmscope.observe.track import counted_tokens, token_weights

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@observable
def order_parameter(
    x: Float[Tensor, "*batch n d"],
    *,
    weights: Float[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Order parameter R = |sum_i m_i x_i| / sum_i m_i of each cloud, the length of the mean token.

    It is 1 where all tokens agree and 0 for a balanced cloud; in d = 2 it is that of Kuramoto.

    >>> order_parameter(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor(0.7071)
    """
    x = counted_tokens(x, weights)
    m = token_weights(x, weights)
    mean = (m.unsqueeze(-1) * x).sum(-2) / m.sum(-1, keepdim=True)
    size: Tensor = torch.linalg.vector_norm(mean, dim=-1)
    return size
